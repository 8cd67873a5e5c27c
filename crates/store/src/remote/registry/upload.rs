//! Sending blobs: in one request, or in parts that continue where a broken connection left them.

use std::cell::RefCell;

use afresh_sys::crash::point;
use bytes::Bytes;
use reqwest::header::{
    CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION, RANGE,
};
use url::Url;

use super::auth::Access;
use super::{Registry, StatusCode};
use crate::Sha256;
use crate::remote::RemoteError;
use crate::remote::backend::{Backend, Source};

/// Bytes in one part.
const PART: u64 = 8 << 20;
/// Bytes that a registry digests in the time in which the slowest line carries one.
const DIGESTED: u64 = 512;
const BYTES: HeaderValue = HeaderValue::from_static("application/octet-stream");

/// An upload under way.
struct Upload {
    /// Where the next part goes.
    url: Url,
    /// Bytes that are there.
    at: u64,
    /// Whether a part was sent and not acknowledged, so that `at` and `url` may be out of date.
    in_doubt: bool,
}

impl Registry {
    /// The place at which an answer continues an upload.
    fn location(&self, what: &str, from: &Url, headers: &HeaderMap) -> Result<Url, RemoteError> {
        headers
            .get(LOCATION)
            .and_then(|location| from.join(location.to_str().ok()?).ok())
            .filter(|url| self.address.allows(url))
            .ok_or_else(|| self.protocol(what, "no address to upload to, or one without https"))
    }

    async fn begin(&self, what: &str) -> Result<Url, RemoteError> {
        let url = self.url("blobs/uploads/")?;
        point();
        let response = self
            .send(what, Access::Push, &url, |url| self.client.post(url).header(CONTENT_LENGTH, 0))
            .await?;
        self.location(what, &url, response.headers())
    }

    async fn finish(
        &self,
        what: &str,
        (digest, size): (Sha256, u64),
        url: &Url,
        bytes: Bytes,
    ) -> Result<(), RemoteError> {
        let mut url = url.clone();
        url.query_pairs_mut().append_pair("digest", &digest.to_string());
        point();
        let response = self
            .send(what, Access::Push, &url, |url| {
                self.client
                    .put(url)
                    .header(CONTENT_TYPE, BYTES)
                    .header(CONTENT_LENGTH, bytes.len())
                    .body(bytes.clone())
            })
            .await?;
        point();
        match response.status() {
            StatusCode::CREATED => Ok(()),
            // Some registries answer so, and so does every login page.
            StatusCode::NO_CONTENT | StatusCode::OK if self.has(digest, size).await? => Ok(()),
            status => Err(self.protocol(what, &format!("the upload ended with {status}"))),
        }
    }

    pub(super) async fn upload_whole(
        &self,
        digest: Sha256,
        bytes: Bytes,
    ) -> Result<(), RemoteError> {
        let what = digest.to_string();
        self.retry
            .attempt_sending(&format!("{self}: {what}"), bytes.len() as u64, || async {
                let url = self.begin(&what).await?;
                self.finish(&what, (digest, bytes.len() as u64), &url, bytes.clone()).await
            })
            .await
    }

    pub(super) async fn upload_parts(
        &self,
        digest: Sha256,
        size: u64,
        source: &dyn Source,
        sent: &mut dyn FnMut(u64),
    ) -> Result<(), RemoteError> {
        let what = digest.to_string();
        let name = format!("{self}: {what}");
        let url = self.retry.attempt(&name, || self.begin(&what)).await?;
        let upload = RefCell::new(Upload { url, at: 0, in_doubt: false });
        let mut reached = 0;
        while reached < size {
            let send = || self.send_part(&what, &upload, source, size);
            self.retry.attempt_sending(&name, PART, send).await?;
            reached = upload.borrow().at;
            sent(reached);
        }
        let url = upload.borrow().url.clone();
        let finish = || self.finish(&what, (digest, size), &url, Bytes::new());
        // The registry may read all of it again before it answers.
        match self.retry.attempt_sending(&name, size / DIGESTED, finish).await {
            // The answer to an earlier attempt was lost, and the upload is over.
            Err(error) if error.is_not_found() => {
                if self.has(digest, size).await? {
                    Ok(())
                } else {
                    Err(error)
                }
            }
            other => other,
        }
    }

    /// Sends the next part, after asking how far the upload is where that is in doubt.
    async fn send_part(
        &self,
        what: &str,
        upload: &RefCell<Upload>,
        source: &dyn Source,
        size: u64,
    ) -> Result<(), RemoteError> {
        let (mut url, mut at, in_doubt) = {
            let upload = upload.borrow();
            (upload.url.clone(), upload.at, upload.in_doubt)
        };
        if in_doubt {
            (url, at) = match self.progress(what, &url).await {
                Ok(progress) => progress,
                Err(error) if error.is_not_found() => (self.begin(what).await?, 0),
                Err(error) => return Err(error),
            };
            upload.replace(Upload { url: url.clone(), at, in_doubt: false });
        }
        if at >= size {
            return Ok(());
        }
        let mut part = vec![0; PART.min(size - at) as usize];
        source.read(at, &mut part)?;
        let part = Bytes::from(part);
        let end = at + part.len() as u64;
        upload.borrow_mut().in_doubt = true;
        point();
        let response = self
            .send(what, Access::Push, &url, |url| {
                self.client
                    .patch(url)
                    .header(CONTENT_TYPE, BYTES)
                    .header(CONTENT_LENGTH, part.len())
                    .header(CONTENT_RANGE, format!("{at}-{}", end - 1))
                    .body(part.clone())
            })
            .await?;
        let url = self.location(what, &url, response.headers())?;
        upload.replace(Upload { url, at: end, in_doubt: false });
        Ok(())
    }

    /// The progress of an upload, and where it continues.
    async fn progress(&self, what: &str, url: &Url) -> Result<(Url, u64), RemoteError> {
        let response = self.send(what, Access::Push, url, |url| self.client.get(url)).await?;
        let next = self.location(what, url, response.headers())?;
        // `0-N`, N being the last byte; `0-0` is what an empty upload has too, and no part is so
        // short.
        let last = response
            .headers()
            .get(RANGE)
            .and_then(|range| range.to_str().ok()?.rsplit_once('-')?.1.parse::<u64>().ok());
        Ok((next, last.filter(|last| *last > 0).map_or(0, |last| last + 1)))
    }
}
