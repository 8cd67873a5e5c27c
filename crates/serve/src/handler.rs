//! A component of the world `wasi:http/proxy`, called without a server: one request at a time, each
//! to a new instance.

use std::time::Duration;

use afresh::wasm::{GuestOptions, LeaseOptions, WarmComponent};
use afresh::{Guest, Verification};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::Request;
use hyper::header::HOST;
use tokio::sync::oneshot;
use wasmtime_wasi_http::Error;
use wasmtime_wasi_http::p2::bindings::ProxyIndices;

use crate::failure::Failure;
use crate::proxy::{self, Progress};

/// Prefix of the exports of such a component.
const EXPORT: &[u8] = b"wasi:http/incoming-handler@";

/// Why a handler did not answer.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct HandlerError(Failure);

impl From<Failure> for HandlerError {
    fn from(failure: Failure) -> Self {
        Self(failure)
    }
}

/// A component that answers requests.
pub struct Handler {
    warm: WarmComponent,
    indices: ProxyIndices,
    time: Duration,
    most: usize,
}

impl std::fmt::Debug for Handler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handler").field("time", &self.time).finish_non_exhaustive()
    }
}

/// The answer of a handler.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reply {
    /// The status of HTTP.
    pub status: u16,
    /// The body.
    pub body: Bytes,
}

/// A request of `path`: with a body `POST`, without one `GET`.
fn request(path: &str, body: Option<&[u8]>) -> Result<Request<Full<Bytes>>, Failure> {
    let method = if body.is_some() { "POST" } else { "GET" };
    let builder = Request::builder().method(method).uri(path).header(HOST, "localhost");
    let body = Full::new(Bytes::copy_from_slice(body.unwrap_or_default()));
    let request = builder.body(body);
    request.map_err(|error| Failure::Request(format!("{path}: {error}")))
}

impl Handler {
    /// Whether these bytes of a component name the interface of such a one.
    #[must_use]
    pub fn is_named_in(component: &[u8]) -> bool {
        component.windows(EXPORT.len()).any(|part| part == EXPORT)
    }

    /// The options for a guest that is called directly: with wasi:http, and calls that wait.
    #[must_use]
    pub fn options(wasm: GuestOptions) -> GuestOptions {
        GuestOptions {
            asynchronous: true,
            gives_way: true,
            imports: wasm.imports.component(proxy::link).check_memory(),
            state: proxy::state(),
            ..wasm
        }
    }

    /// The guest, if it is a component that answers requests. `time` and `most` limit an answer.
    ///
    /// # Errors
    /// Without an available instance.
    pub async fn of(
        guest: &Guest,
        time: Duration,
        most: usize,
    ) -> Result<Option<Self>, HandlerError> {
        let Some(warm) = guest.as_component() else { return Ok(None) };
        let indices = proxy::indices(warm).await?;
        let warm = warm.clone();
        Ok(indices.map(|indices| Self { warm, indices, time, most }))
    }

    /// Sends a request for `path` to a new instance.
    ///
    /// # Errors
    /// When the guest fails, takes too long or answers too much.
    pub async fn request(&self, path: &str, body: Option<&[u8]>) -> Result<Reply, HandlerError> {
        Ok(self.send_request(path, body, None).await?)
    }

    /// Sends a request and, on demand, returns the number of changed bytes in the instance.
    async fn send_request(
        &self,
        path: &str,
        body: Option<&[u8]>,
        changed: Option<&mut usize>,
    ) -> Result<Reply, Failure> {
        let request =
            request(path, body)?.map(|body| body.map_err(|never| -> Error { match never {} }));
        let lease = self.warm.lease_async(&LeaseOptions::new()).await?;
        let (sender, receiver) = oneshot::channel();
        let progress = Progress::default();
        let handling = async {
            // A guest that has failed ends here, and its answer with it.
            let mut lease = lease;
            proxy::handle(&mut lease, &self.indices, request, sender, &progress).await?;
            Ok::<_, Failure>(lease)
        };
        // The guest waits for its body to be read.
        let reading = async {
            let response = match receiver.await {
                Ok(Ok(response)) => response,
                Ok(Err(code)) => {
                    return Err(Failure::Guest(format!("it answered with the error {code:?}")));
                }
                Err(_) => return Err(Failure::Guest("it ended without an answer".to_owned())),
            };
            let status = response.status().as_u16();
            let body = Limited::new(response.into_body(), self.most).collect().await;
            let body = body.map_err(|error| match error.downcast_ref::<LengthLimitError>() {
                Some(_) => Failure::Guest(format!("it answers more than {} bytes", self.most)),
                None => Failure::Guest(format!("its answer breaks off: {error}")),
            });
            Ok(Reply { status, body: body?.to_bytes() })
        };
        let both = async { tokio::join!(handling, reading) };
        let (handled, read) =
            tokio::time::timeout(self.time, both).await.map_err(|_| Failure::Timeout)?;
        let mut lease = handled?;
        if let Some(changed) = changed {
            *changed = lease.differences().map_err(|e| Failure::Host(e.to_string()))?;
        }
        read
    }

    /// Sends the request several times, and before each compares the next instance's memories with
    /// the warm state; the answers with the first. `progress` is called after each.
    ///
    /// # Errors
    /// When no comparison can be made; a difference is not an error.
    pub async fn verify(
        &self,
        path: &str,
        body: Option<&[u8]>,
        calls: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Verification, HandlerError> {
        request(path, None)?;
        let mut found = Verification::default();
        let mut first = None;
        for done in 1..=calls {
            self.compare(&mut found)?;
            let mut changed = 0;
            let answer = self.send_request(path, body, Some(&mut changed)).await;
            found.most_bytes_changed = found.most_bytes_changed.max(Some(changed));
            let answer = answer.map_err(|failure| failure.to_string());
            found.calls += 1;
            if let Err(failure) = &answer {
                found.failed_calls += 1;
                found.failure.get_or_insert_with(|| failure.clone());
            }
            found.answers_differ +=
                u64::from(*first.get_or_insert_with(|| answer.clone()) != answer);
            progress(done);
        }
        self.compare(&mut found)?;
        Ok(found)
    }

    fn compare(&self, found: &mut Verification) -> Result<(), Failure> {
        let compared = self.warm.compare().map_err(|e| Failure::Host(e.to_string()))?;
        found.bytes_differ += compared.bytes;
        found.items_differ += compared.items.len();
        found.items.extend(compared.items);
        found.unseen.extend(compared.unseen);
        Ok(())
    }
}
