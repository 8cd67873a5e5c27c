//! Tags: sets one to a manifest, on the condition that it has the expected target.
//!
//! The distribution specification has no conditional writes. Some registries honour `If-Match` and
//! `If-None-Match` as HTTP defines them, and all others ignore the headers. So a tag is compared
//! before the write, the write carries the condition, and the tag is read back afterwards.
//!
//! Promises: with a registry that honours conditions a tag never replaces a target that was not
//! expected. With any other, a writer whose tag was replaced before it read it back gets an error.
//! Not noticed is a write of another that falls between this one's comparison and its write, if the
//! other read its tag back before.

use std::time::Duration;

use afresh_sys::crash::point;
use bytes::Bytes;
use reqwest::header::{
    ACCEPT, CONTENT_TYPE, ETAG, HeaderName, HeaderValue, IF_MATCH, IF_NONE_MATCH,
};

use super::auth::Access;
use super::{ANY_MANIFEST, Registry, digest_header};
use crate::format::descriptor::MANIFEST_TYPE;
use crate::local::naming::ExpectedName;
use crate::remote::RemoteError;
use crate::{SaveError, Sha256};

/// Reads of a tag that still shows its earlier target: some registries answer from a cache.
const READS: u32 = 4;
const READ_PAUSE: Duration = Duration::from_millis(100);

/// Refusals of a condition that holds, after which a write carries none. The first may be due to
/// another writer that replaced the tag and put it back.
const MAX_REFUSALS: u32 = 2;

/// The target of a tag, and the registry's own mark of it.
struct TagTarget {
    id: Sha256,
    mark: Option<HeaderValue>,
}

/// The condition that a tag has this target.
fn condition_of(target: Option<&TagTarget>) -> Option<(HeaderName, HeaderValue)> {
    match target {
        None => Some((IF_NONE_MATCH, HeaderValue::from_static("*"))),
        Some(target) => target.mark.clone().map(|mark| (IF_MATCH, mark)),
    }
}

impl Registry {
    /// Makes `name` mean `id`, if it has the expected target.
    pub(super) async fn tag(
        &self,
        name: &str,
        id: Sha256,
        manifest: Vec<u8>,
        expected: ExpectedName,
    ) -> Result<(), RemoteError> {
        if expected == ExpectedName::Any {
            return self.send_manifest(name, id, manifest, None).await;
        }
        let moved = || RemoteError::from(SaveError::Moved(name.into()));
        let before = self.target(name).await?;
        if before.as_ref().map(|target| target.id) != expected.manifest() {
            return Err(moved());
        }
        let mut condition = condition_of(before.as_ref());
        let mut refusals = 0;
        loop {
            match self.send_manifest(name, id, manifest.clone(), condition).await {
                Err(RemoteError::Refused { status: 412, .. }) if refusals < MAX_REFUSALS => {
                    let now = self.target(name).await?;
                    let now_id = now.as_ref().map(|target| target.id);
                    // The answer to an earlier attempt was lost.
                    if now_id == Some(id) {
                        return Ok(());
                    }
                    if now_id != expected.manifest() {
                        return Err(moved());
                    }
                    refusals += 1;
                    // At last, the registry compares with something else than the mark that it
                    // returned.
                    condition = match refusals {
                        MAX_REFUSALS => None,
                        _ => condition_of(now.as_ref()),
                    };
                }
                other => break other?,
            }
        }
        for read in 0..READS {
            if read > 0 {
                tokio::time::sleep(READ_PAUSE * read).await;
            }
            match self.target(name).await?.map(|target| target.id) {
                Some(now) if now == id => return Ok(()),
                now if now == expected.manifest() => {}
                _ => return Err(moved()),
            }
        }
        Err(self.protocol(
            &format!("tag {name}"),
            "the registry accepted the tag and still shows its earlier target: repeat the save",
        ))
    }

    /// The present target of a tag; `None` for one that does not exist.
    async fn target(&self, name: &str) -> Result<Option<TagTarget>, RemoteError> {
        let url = self.url(&format!("manifests/{name}"))?;
        let what = format!("tag {name}");
        let answer = self
            .retry
            .attempt(&format!("{self}: {what}"), || {
                self.send(&what, Access::Push, &url, |url| {
                    self.client.head(url).header(ACCEPT, ANY_MANIFEST)
                })
            })
            .await;
        let headers = match answer {
            Ok(response) => response.headers().clone(),
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) => return Err(error),
        };
        // A weak mark never matches in a condition.
        let strong = |mark: &HeaderValue| !mark.as_bytes().starts_with(b"W/");
        let mark = headers.get(ETAG).cloned().filter(strong);
        if let Some(id) = digest_header(&headers) {
            return Ok(Some(TagTarget { id, mark }));
        }
        // The digest is optional in answers; the content has one.
        let read =
            self.get(&what, &url, ANY_MANIFEST, crate::format::manifest::MAX_MANIFEST).await?;
        Ok(Some(TagTarget { id: Sha256::of(&read.1), mark: None }))
    }

    /// Sends a manifest under a tag or its digest.
    pub(super) async fn send_manifest(
        &self,
        name: &str,
        id: Sha256,
        manifest: Vec<u8>,
        condition: Option<(HeaderName, HeaderValue)>,
    ) -> Result<(), RemoteError> {
        let url = self.url(&format!("manifests/{name}"))?;
        let what = format!("tag {name}");
        let manifest = Bytes::from(manifest);
        point();
        let response = self
            .retry
            .attempt_sending(&format!("{self}: {what}"), manifest.len() as u64, || {
                self.send(&what, Access::Push, &url, |url| {
                    let request = self.client.put(url).header(CONTENT_TYPE, MANIFEST_TYPE);
                    let request = match condition.clone() {
                        Some((name, value)) => request.header(name, value),
                        None => request,
                    };
                    request.body(manifest.clone())
                })
            })
            .await?;
        point();
        // A proxy or a login page answers anything with 200.
        if response.status() != reqwest::StatusCode::CREATED {
            let why = format!("the registry answered {} instead of 201 Created", response.status());
            return Err(self.protocol(&what, &why));
        }
        match digest_header(response.headers()) {
            Some(found) if found != id => Err(RemoteError::Digest { expected: id, found }),
            _ => Ok(()),
        }
    }
}
