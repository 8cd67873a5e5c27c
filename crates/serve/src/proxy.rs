//! Components of the world `wasi:http/proxy`: each request is answered by a new instance, in a task of its own.
//!
//! What it promises: bodies stream both ways; the task ends when the guest has, when it took too long, or when
//! nobody waits for its answer any more. A guest asks nothing of other servers: it is told that such a request
//! is denied.

use std::time::Duration;

use afresh::wasm::wasmtime;
use afresh::wasm::wasmtime::component::Linker;
use afresh::wasm::{Host, LeaseOptions, OwnedComponentLease, State, WarmComponent};
use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use hyper::Request;
use hyper::body::Body as HttpBody;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use wasmtime_wasi_http::p2::bindings::http::types::Scheme;
use wasmtime_wasi_http::p2::bindings::{ProxyIndices, http};
use wasmtime_wasi_http::{
    Error, RequestOptions, WasiBody, WasiHttp, WasiHttpCtx, WasiHttpCtxView, WasiHttpHooks,
};

use crate::body::Cut;
use crate::failure::{Failure, describe};
use crate::shelf::{Shelf, Used};

/// What wasi:http keeps of one lease.
struct Http {
    context: WasiHttpCtx,
    hooks: Denied,
}

/// Lets no request out.
struct Denied;

type Sending = Box<
    dyn Future<
            Output = Result<
                (hyper::Response<WasiBody>, Box<dyn Future<Output = Result<(), Error>> + Send>),
                Error,
            >,
        > + Send,
>;

impl WasiHttpHooks for Denied {
    fn send_request(
        &mut self,
        _: Request<WasiBody>,
        _: Option<RequestOptions>,
        _: Box<dyn Future<Output = Result<(), Error>> + Send>,
    ) -> Sending {
        Box::new(async { Err(Error::HttpRequestDenied) })
    }
}

/// What host functions of wasi:http keep for a lease.
pub(crate) fn state() -> State {
    State::new(|| Http { context: WasiHttpCtx::new(), hooks: Denied })
}

fn view(host: &mut Host) -> WasiHttpCtxView<'_> {
    let (state, table) = host.state_and_table::<Http>();
    WasiHttpCtxView { hooks: &mut state.hooks, table, ctx: &mut state.context }
}

/// Adds wasi:http to what components may import.
pub(crate) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    let options = http::types::LinkOptions::default();
    http::outgoing_handler::add_to_linker::<_, WasiHttp>(linker, view)?;
    http::types::add_to_linker::<_, WasiHttp>(linker, &options, view)
}

impl<E: std::fmt::Display> From<Cut<E>> for Error {
    fn from(cut: Cut<E>) -> Self {
        match cut {
            Cut::TooLarge(most) => Self::HttpRequestBodySize(Some(most as u64)),
            Cut::TooSlow => Self::ConnectionReadTimeout,
            Cut::Broken(error) => Self::InternalError(Some(error.to_string())),
        }
    }
}

/// A component that answers requests.
pub(crate) struct Proxy {
    warm: WarmComponent,
    indices: ProxyIndices,
    shelf: std::sync::Arc<Shelf<OwnedComponentLease>>,
}

/// Ends the task of a guest when nobody waits for it any more.
struct Ending(Option<JoinHandle<Result<(), Failure>>>);

impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

impl Ending {
    /// Why the guest, which has ended, gave no answer.
    async fn failure(mut self) -> Failure {
        let Some(task) = &mut self.0 else { return Failure::Host("nothing ran".to_owned()) };
        match task.await {
            Ok(Ok(())) => Failure::Guest("it ended without an answer".to_owned()),
            Ok(Err(failure)) => failure,
            Err(error) => Failure::Host(error.to_string()),
        }
    }
}

impl Proxy {
    /// The component, if it answers requests.
    pub(crate) async fn of(
        warm: &WarmComponent,
        shelf: Shelf<OwnedComponentLease>,
    ) -> Result<Option<Self>, Failure> {
        let mut lease = warm.lease_async(&LeaseOptions::new()).await?;
        let (store, instance) = lease.bindings();
        let indices = ProxyIndices::new(&instance.instance_pre(&store));
        let (warm, shelf) = (warm.clone(), std::sync::Arc::new(shelf));
        Ok(indices.ok().map(|indices| Self { warm, indices, shelf }))
    }

    pub(crate) fn indices(&self) -> &ProxyIndices {
        &self.indices
    }

    pub(crate) fn sweep(&self) {
        self.shelf.sweep();
    }

    /// Has an instance answer. `kept` is dropped once the instance is done, which may be after its answer
    /// has begun.
    pub(crate) async fn answer<B>(
        &self,
        request: Request<B>,
        time: Duration,
        kept: impl Send + 'static,
    ) -> Result<Response, Failure>
    where
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<Error>,
    {
        let used = match self.shelf.take() {
            Some(used) => used,
            None => Shelf::fresh(self.warm.lease_async(&LeaseOptions::new()).await?),
        };
        let (sender, receiver) = oneshot::channel();
        let (indices, shelf) = (self.indices.clone(), self.shelf.clone());
        let mut task = Ending(Some(tokio::spawn(async move {
            let handling = handle(used, &indices, request, sender);
            let done = tokio::time::timeout(time, handling).await;
            shelf.put(done.unwrap_or(Err(Failure::Timeout))?);
            drop(kept);
            Ok(())
        })));
        match receiver.await {
            Ok(Ok(response)) => {
                // The answer has begun; the guest goes on writing it, and ends in the time that it has left.
                task.0.take();
                Ok(response.map(Body::new))
            }
            Ok(Err(code)) => Err(Failure::Guest(format!("it answered with the error {code:?}"))),
            Err(_) => Err(task.failure().await),
        }
    }
}

type Answered = Result<
    hyper::Response<wasmtime_wasi_http::p2::body::HyperOutgoingBody>,
    http::types::ErrorCode,
>;

/// Has an instance handle a request. What it answers is sent before it is done, perhaps.
pub(crate) async fn handle<B>(
    mut used: Used<OwnedComponentLease>,
    indices: &ProxyIndices,
    request: Request<B>,
    sender: oneshot::Sender<Answered>,
) -> Result<Used<OwnedComponentLease>, Failure>
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<Error>,
{
    let host = |error: wasmtime::Error| Failure::Host(describe(error.as_ref()));
    let (mut store, instance) = used.lease.bindings();
    let proxy = indices.load(&mut store, &instance).map_err(host)?;
    let mut http = view(store.data_mut());
    let request = http
        .new_incoming_request(Scheme::Http, request)
        .map_err(|error| Failure::Request(describe(error.as_ref())))?;
    let answer = http.new_response_outparam(sender).map_err(host)?;
    let handled = proxy.wasi_http_incoming_handler().call_handle(&mut store, request, answer).await;
    match handled {
        Ok(()) => Ok(used),
        Err(error) => Err(used.lease.explain(error).into()),
    }
}
