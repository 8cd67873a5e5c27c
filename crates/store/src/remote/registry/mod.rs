//! OCI registries as remotes, by the distribution specification 1.1.
//!
//! A repository holds the blobs, its tags are the names. Existing blobs are not sent again, pages
//! are read by ranges, and nothing is read without a limit. The registry is trusted with the
//! target of a tag; open by digest to trust it with nothing.
//!
//! Credentials go to the registry and its token server only: not to the storage that it redirects
//! to, not over http where the registry itself speaks https. `docs/decisions/registry-client.md`
//! says why this is not a library.

mod address;
mod auth;
mod credentials;
mod tag_names;
mod tagging;
mod upload;

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

use async_trait::async_trait;
use futures_util::{StreamExt, TryStreamExt, stream};
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_LENGTH, HeaderMap, HeaderValue, LINK, RANGE};
use reqwest::redirect::Policy;
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use serde::Deserialize;
use tokio::runtime::Handle;
use url::Url;

pub(super) use address::Address;

use self::auth::{Access, Session};
use self::credentials::Credentials;
use self::tag_names::TagNames;
use super::backend::{Backend, CONNECTIONS, ResolvedName, Source};
use super::retry::Retrier;
use super::{RemoteError, retry};
use crate::disk::two_clocks::TwoClocks;
use crate::format::manifest::MAX_MANIFEST;
use crate::local::naming::ExpectedName;
use crate::{OpenError, Sha256, Tag};

const DIGEST: &str = "docker-content-digest";
/// Maximum bytes of a page of the list of tags, and of pages.
const MAX_TAG_PAGE: u64 = 4 << 20;
const MAX_TAG_PAGES: usize = 256;
/// Tags whose target is asked for at the same time.
const TAGS_IN_FLIGHT: usize = 8;
/// Bytes of a refusal that are looked at.
const MAX_REFUSAL: u64 = 16 << 10;
const REDIRECTS: usize = 5;

/// A repository in a registry.
pub(super) struct Registry {
    client: Client,
    address: Address,
    retry: Retrier,
    session: Session,
}

#[derive(Deserialize)]
struct Refusal {
    errors: Vec<RefusalEntry>,
}

#[derive(Deserialize)]
struct RefusalEntry {
    #[serde(default)]
    code: String,
    #[serde(default)]
    message: String,
}

impl fmt::Display for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "oci://{}/{}", self.address.registry, self.address.repository)
    }
}

/// A client for requests to a registry and its token server.
fn http_client(
    address: &Address,
    retry: &Retrier,
    redirects: Policy,
) -> Result<Client, RemoteError> {
    let mut client = Client::builder();
    if address.is_loopback() {
        // A proxy has another loopback.
        client = client.no_proxy();
    }
    let client = client
        .connect_timeout(retry.policy.connect())
        .redirect(redirects)
        .referer(false)
        .user_agent(concat!("afresh/", env!("CARGO_PKG_VERSION")))
        .build();
    let what = || address.base.to_string();
    client.map_err(|e| RemoteError::Connection { what: what(), source: e.into() })
}

impl Registry {
    pub(super) fn new(
        address: Address,
        retry: Retrier,
        options: &[(&str, &str)],
    ) -> Result<Self, RemoteError> {
        let (mut user, mut password) = (None, None);
        for (key, value) in options {
            match *key {
                "user" => user = Some((*value).to_owned()),
                "password" => password = Some((*value).to_owned()),
                _ => {
                    return Err(RemoteError::Url {
                        url: address.base.to_string(),
                        why: format!("registries have no option `{key}`: `user` and `password`"),
                    });
                }
            }
        }
        let given =
            user.zip(password).map(|(user, password)| Credentials::Password { user, password });
        let plain = address.base.scheme() == "http";
        let redirects = Policy::custom(move |attempt| {
            if attempt.previous().len() > REDIRECTS {
                return attempt.error("too many redirections");
            }
            // The client takes the credentials off where the host changes.
            match attempt.url().scheme() {
                "https" => attempt.follow(),
                "http" if plain => attempt.follow(),
                _ => attempt.error("a redirection from https to something else"),
            }
        });
        let client = http_client(&address, &retry, redirects)?;
        Ok(Self { client, address, retry, session: Session::with(given) })
    }

    fn url(&self, path: &str) -> Result<Url, RemoteError> {
        self.address.base.join(path).map_err(|e| self.protocol(path, &e.to_string()))
    }

    fn protocol(&self, what: &str, why: &str) -> RemoteError {
        RemoteError::Protocol { what: format!("{self}: {what}"), why: why.to_owned() }
    }

    /// The client's own errors. Their URLs may hold tokens.
    fn broken(&self, what: &str, error: reqwest::Error) -> RemoteError {
        let what = format!("{self}: {what}");
        if error.is_timeout() {
            return RemoteError::Timeout { what, after: self.retry.policy.connect() };
        }
        RemoteError::Connection { what, source: error.without_url().into() }
    }

    /// Sends a request once, and again when the registry first wants to know who we are.
    async fn send(
        &self,
        what: &str,
        access: Access,
        url: &Url,
        request: impl Fn(Url) -> RequestBuilder,
    ) -> Result<Response, RemoteError> {
        let ours = self.address.is_same_origin(url);
        let send = async |header: Option<HeaderValue>| {
            let request = request(url.clone());
            let request = match header {
                Some(header) => request.header(AUTHORIZATION, header),
                None => request,
            };
            let response = request.send().await.map_err(|e| self.broken(what, e))?;
            retry::answered();
            Ok::<_, RemoteError>(response)
        };
        let header = if ours { self.session.header(access) } else { None };
        let mut response = send(header).await?;
        // Only the registry itself may ask for credentials. Storage after a redirect could name any
        // token server, or take the password.
        if ours
            && response.status() == StatusCode::UNAUTHORIZED
            && self.address.is_same_origin(response.url())
            && let Some(header) = self.authorize(response.headers(), access).await?
        {
            response = send(Some(header)).await?;
        }
        self.accepted(what, response).await
    }

    /// Turns a refusal into an error that says what the registry said.
    async fn accepted(&self, what: &str, response: Response) -> Result<Response, RemoteError> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        retry::heard_from(status, response.headers());
        let body = self.read(response, MAX_REFUSAL).await.unwrap_or_default();
        let mut message = String::new();
        if let Ok(refusal) = serde_json::from_slice::<Refusal>(&body) {
            for entry in refusal.errors.iter().take(3) {
                message += &format!(": {} {}", entry.code, entry.message);
            }
        }
        // Text of a server goes to a terminal.
        let mut message: String = message.chars().filter(|c| !c.is_control()).take(400).collect();
        if matches!(status.as_u16(), 401 | 403) {
            message += ": set AFRESH_REGISTRY, AFRESH_REGISTRY_USER and AFRESH_REGISTRY_PASSWORD, or log in with \
                        a tool that writes Docker's configuration";
        }
        Err(RemoteError::Refused {
            what: format!("{self}: {what}"),
            status: status.as_u16(),
            message,
        })
    }

    /// The body, cut off one byte after `limit`.
    async fn read(&self, mut response: Response, limit: u64) -> reqwest::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while let Some(part) = response.chunk().await? {
            retry::received(part.len());
            let left = (limit + 1 - bytes.len() as u64) as usize;
            bytes.extend_from_slice(&part[..part.len().min(left)]);
            if bytes.len() as u64 > limit {
                break;
            }
        }
        Ok(bytes)
    }

    async fn body(
        &self,
        what: &str,
        response: Response,
        limit: u64,
    ) -> Result<Vec<u8>, RemoteError> {
        let bytes = self.read(response, limit).await.map_err(|e| self.broken(what, e))?;
        if bytes.len() as u64 > limit {
            return Err(self.protocol(what, &format!("longer than {limit} bytes")));
        }
        Ok(bytes)
    }

    /// Gets a small thing whole, with the headers it came with.
    async fn get(
        &self,
        what: &str,
        url: &Url,
        accept: &'static str,
        limit: u64,
    ) -> Result<(HeaderMap, Vec<u8>), RemoteError> {
        self.retry
            .attempt(&format!("{self}: {what}"), || async {
                let response = self
                    .send(what, Access::Pull, url, |url| {
                        self.client.get(url).header(ACCEPT, accept)
                    })
                    .await?;
                let headers = response.headers().clone();
                Ok((headers, self.body(what, response, limit).await?))
            })
            .await
    }

    /// The target of a tag, by its headers alone; `None` for a removed tag.
    async fn tag_of(&self, name: String) -> Result<Option<Tag>, RemoteError> {
        let url = self.url(&format!("manifests/{name}"))?;
        let what = format!("tag {name}");
        let answer = self
            .retry
            .attempt(&what, || {
                self.send(&what, Access::Pull, &url, |url| {
                    self.client.head(url).header(ACCEPT, ANY_MANIFEST)
                })
            })
            .await;
        match answer {
            Ok(response) => match digest_header(response.headers()) {
                Some(id) => Ok(Some(Tag { name, id })),
                None => Err(self.protocol(&what, "the answer has no digest")),
            },
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn tag_names(&self) -> Result<Vec<String>, RemoteError> {
        const TAG_LIST: &str = "the list of tags";
        let mut names = TagNames::default();
        let mut next = Some(self.url("tags/list")?);
        let mut pages = HashSet::new();
        while let Some(url) = next.take() {
            if pages.len() == MAX_TAG_PAGES {
                let why = format!(
                    "it has more than {MAX_TAG_PAGES} pages; keep snapshots in a repository with \
                     fewer tags"
                );
                return Err(self.protocol(TAG_LIST, &why));
            }
            // A page that leads back to an earlier one has nothing new behind it.
            if !pages.insert(Sha256::of(url.as_str().as_bytes())) {
                break;
            }
            let (headers, bytes) =
                match self.get(TAG_LIST, &url, "application/json", MAX_TAG_PAGE).await {
                    Ok(answer) => answer,
                    // The repository appears with its first push.
                    Err(error) if error.is_not_found() => break,
                    Err(error) => return Err(error),
                };
            names.read_page(&bytes).map_err(|why| self.protocol(TAG_LIST, &why))?;
            next = headers
                .get(LINK)
                .and_then(|link| link.to_str().ok())
                .filter(|link| link.contains("rel=\"next\""))
                .and_then(|link| link.split_once('<')?.1.split_once('>'))
                .and_then(|(link, _)| url.join(link).ok())
                .filter(|url| self.address.is_same_origin(url));
        }
        Ok(names.into_names())
    }
}

/// Tags may mean things of others.
const ANY_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json, \
    application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json, \
    application/vnd.docker.distribution.manifest.list.v2+json";

fn digest_header(headers: &HeaderMap) -> Option<Sha256> {
    headers.get(DIGEST)?.to_str().ok()?.parse().ok()
}

#[async_trait(?Send)]
impl Backend for Registry {
    fn prepare(&self, tasks: &Handle) {
        let Ok(url) = self.address.base.join("/v2/") else { return };
        for _ in 0..CONNECTIONS {
            let request = self.client.get(url.clone()).timeout(self.retry.policy.timeout);
            // Later requests handle its answer, or the lack of one. A connection can be used again
            // once its answer was read, if that is short.
            drop(tasks.spawn(async move {
                let mut response = request.send().await?;
                let mut room = MAX_REFUSAL;
                while room > 0
                    && let Some(part) = response.chunk().await?
                {
                    room = room.saturating_sub(part.len() as u64);
                }
                Ok::<_, reqwest::Error>(())
            }));
        }
    }

    fn check_name(&self, name: &str) -> Result<(), RemoteError> {
        if address::is_tag(name) {
            Ok(())
        } else {
            Err(RemoteError::Name(name.chars().take(140).collect()))
        }
    }

    async fn resolve(&self, name: &str) -> Result<ResolvedName, RemoteError> {
        if let Ok(id) = name.parse() {
            return Ok(ResolvedName { id, size: None, manifest: None });
        }
        self.check_name(name)?;
        let url = self.url(&format!("manifests/{name}"))?;
        let what = format!("tag {name}");
        match self.get(&what, &url, ANY_MANIFEST, MAX_MANIFEST).await {
            Ok((headers, bytes)) => {
                let id = Sha256::of(&bytes);
                match digest_header(&headers) {
                    Some(expected) if expected != id => {
                        Err(OpenError::Digest { what: "the manifest", expected }.into())
                    }
                    _ => Ok(ResolvedName { id, size: None, manifest: Some(bytes) }),
                }
            }
            Err(error) if error.is_not_found() => {
                // The names only help; the error stands without them.
                let known = self.tag_names().await.unwrap_or_default();
                Err(OpenError::NoSuchName { name: name.to_owned(), known }.into())
            }
            Err(error) => Err(error),
        }
    }

    async fn tags(&self) -> Result<Vec<Tag>, RemoteError> {
        let names = self.tag_names().await?;
        let tags: Vec<_> = stream::iter(names)
            .map(|name| self.tag_of(name))
            .buffered(TAGS_IN_FLIGHT)
            .try_collect()
            .await?;
        Ok(tags.into_iter().flatten().collect())
    }

    async fn manifest(&self, id: Sha256, limit: u64) -> Result<Vec<u8>, RemoteError> {
        let url = self.url(&format!("manifests/{id}"))?;
        Ok(self.get("the manifest", &url, ANY_MANIFEST, limit).await?.1)
    }

    async fn blob(
        &self,
        what: &'static str,
        digest: Sha256,
        limit: u64,
    ) -> Result<Vec<u8>, RemoteError> {
        let url = self.url(&format!("blobs/{digest}"))?;
        Ok(self.get(what, &url, "*/*", limit).await?.1)
    }

    async fn range(&self, digest: Sha256, range: Range<u64>) -> Result<Vec<u8>, RemoteError> {
        let url = self.url(&format!("blobs/{digest}"))?;
        let what = digest.to_string();
        let wanted = range.end - range.start;
        let header = format!("bytes={}-{}", range.start, range.end - 1);
        self.retry
            .persist(&format!("{self}: {what}"), || async {
                let response = self
                    .send(&what, Access::Pull, &url, |url| {
                        self.client.get(url).header(RANGE, &header)
                    })
                    .await?;
                // The whole blob in place of a part of it would have to be read up to that part.
                if response.status() != StatusCode::PARTIAL_CONTENT
                    && response.content_length() != Some(wanted)
                {
                    return Err(self.protocol(
                        &what,
                        "the registry does not answer requests for ranges of a blob",
                    ));
                }
                let bytes = self.read(response, wanted).await.map_err(|e| self.broken(&what, e))?;
                let found = bytes.len() as u64;
                if found != wanted {
                    return Err(RemoteError::Length { what: what.clone(), found, wanted });
                }
                Ok(bytes)
            })
            .await
    }

    async fn has(&self, digest: Sha256, size: u64) -> Result<bool, RemoteError> {
        let url = self.url(&format!("blobs/{digest}"))?;
        let what = digest.to_string();
        let answer = self
            .retry
            .attempt(&format!("{self}: {what}"), || {
                self.send(&what, Access::Push, &url, |url| self.client.head(url))
            })
            .await;
        match answer {
            Ok(response) => {
                let length = response.headers().get(CONTENT_LENGTH);
                let length = length.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
                Ok(length.is_none_or(|length| length == size))
            }
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn put(&self, digest: Sha256, bytes: Vec<u8>) -> Result<(), RemoteError> {
        self.upload_whole(digest, bytes.into()).await
    }

    async fn put_parts(
        &self,
        digest: Sha256,
        size: u64,
        source: &dyn Source,
        sent: &mut dyn FnMut(u64),
    ) -> Result<(), RemoteError> {
        self.upload_parts(digest, size, source, sent).await
    }

    async fn put_manifest(&self, id: Sha256, manifest: Vec<u8>) -> Result<(), RemoteError> {
        self.send_manifest(&id.to_string(), id, manifest, None).await
    }

    async fn publish(
        &self,
        name: &str,
        id: Sha256,
        manifest: Vec<u8>,
        (expected, _): (ExpectedName, TwoClocks),
    ) -> Result<(), RemoteError> {
        self.check_name(name)?;
        self.tag(name, id, manifest, expected).await
    }
}
