//! Components of the world `wasi:http/proxy`: a new instance answers each request, in its own task.
//!
//! Promises: bodies stream both ways; the task ends when the guest has, when it took too long, or
//! when its client has left. A guest cannot send requests to other servers: they are denied.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use afresh::wasm::wasmtime;
use afresh::wasm::wasmtime::component::Linker;
use afresh::wasm::{Host, LeaseOptions, OwnedComponentLease, State, WarmComponent};
use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use hyper::Request;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use wasmtime_wasi_http::p2::bindings::http::types::Scheme;
use wasmtime_wasi_http::p2::bindings::{ProxyIndices, http};
use wasmtime_wasi_http::{
    Error, RequestOptions, WasiBody, WasiHttp, WasiHttpCtx, WasiHttpCtxView, WasiHttpHooks,
};

use crate::body::BodyError;
use crate::concurrency::Permit;
use crate::failure::{Failure, describe};
use crate::logged_lease::{LogOptions, LoggedLease};
use crate::reuse::ReusePool;
use crate::yielding_future::YieldingFuture;

/// State of wasi:http for one lease.
struct Http {
    context: WasiHttpCtx,
    hooks: DeniedRequests,
}

/// Lets no request out.
struct DeniedRequests;

type SendFuture = Box<
    dyn Future<
            Output = Result<
                (hyper::Response<WasiBody>, Box<dyn Future<Output = Result<(), Error>> + Send>),
                Error,
            >,
        > + Send,
>;

impl WasiHttpHooks for DeniedRequests {
    fn send_request(
        &mut self,
        _: Request<WasiBody>,
        _: Option<RequestOptions>,
        _: Box<dyn Future<Output = Result<(), Error>> + Send>,
    ) -> SendFuture {
        Box::new(async { Err(Error::HttpRequestDenied) })
    }
}

/// State of the host functions of wasi:http for a lease.
pub(crate) fn state() -> State {
    State::new(|| Http { context: WasiHttpCtx::new(), hooks: DeniedRequests })
}

fn view(host: &mut Host) -> WasiHttpCtxView<'_> {
    let (state, table) = host.state_and_table::<Http>();
    WasiHttpCtxView { hooks: &mut state.hooks, table, ctx: &mut state.context }
}

/// Adds wasi:http to the imports of components.
pub(crate) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    let options = http::types::LinkOptions::default();
    http::outgoing_handler::add_to_linker::<_, WasiHttp>(linker, view)?;
    http::types::add_to_linker::<_, WasiHttp>(linker, &options, view)
}

impl<E: std::fmt::Display> From<BodyError<E>> for Error {
    fn from(cut: BodyError<E>) -> Self {
        match cut {
            BodyError::TooLarge(most) => Self::HttpRequestBodySize(Some(most as u64)),
            BodyError::TooSlow => Self::ConnectionReadTimeout,
            BodyError::BudgetExhausted => {
                Self::InternalError(Some("the server has no memory left".to_owned()))
            }
            BodyError::Broken(error) => Self::InternalError(Some(error.to_string())),
        }
    }
}

/// A component that answers requests.
pub(crate) struct Proxy {
    warm: WarmComponent,
    indices: ProxyIndices,
    shelf: Arc<ReusePool<LoggedLease<OwnedComponentLease>>>,
    logging: LogOptions,
}

/// Ends the task of a guest when its answer is not needed any more.
struct TaskGuard(Option<JoinHandle<Result<(), Failure>>>);

impl Drop for TaskGuard {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

impl TaskGuard {
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

/// The exports of a component that answers requests; nothing for another one.
pub(crate) async fn indices(warm: &WarmComponent) -> Result<Option<ProxyIndices>, Failure> {
    let mut lease = warm.lease_async(&LeaseOptions::new()).await?;
    let (store, instance) = lease.lazy_bindings();
    Ok(ProxyIndices::new(&instance.instance_pre(&store)).ok())
}

impl Proxy {
    /// The component, if it answers requests.
    pub(crate) async fn of(
        warm: &WarmComponent,
        shelf: ReusePool<LoggedLease<OwnedComponentLease>>,
        logging: LogOptions,
    ) -> Result<Option<Self>, Failure> {
        let (warm, shelf) = (warm.clone(), Arc::new(shelf));
        Ok(indices(&warm).await?.map(|indices| Self { warm, indices, shelf, logging }))
    }

    pub(crate) fn sweep(&self) {
        self.shelf.sweep();
    }

    /// Has an instance answer the request of this ID. `pass` is its place until it is done, which
    /// may be after its answer has begun; while it waits for its client others have the place. A
    /// failure after the beginning breaks the answer off, and goes to `report`.
    pub(crate) async fn answer<B>(
        &self,
        id: &str,
        request: Request<B>,
        time: Duration,
        pass: Permit,
        report: impl FnOnce(&Failure) + Send + 'static,
    ) -> Result<Response, Failure>
    where
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<Error>,
    {
        let lease = async |options: LeaseOptions| self.warm.lease_async(&options).await;
        let (used, logged) = self.logging.take(&self.shelf, id, lease).await?;
        let (sender, receiver) = oneshot::channel();
        let (indices, shelf) = (self.indices.clone(), self.shelf.clone());
        let progress = Arc::new(Progress::default());
        let mut task = TaskGuard(Some(tokio::spawn({
            let progress = progress.clone();
            async move {
                let mut used = used;
                let done = {
                    let lease = &mut used.lease.lease;
                    let mut handling = pin!(handle(lease, &indices, request, sender, &progress));
                    let paced = YieldingFuture::new(handling.as_mut(), pass, time);
                    match tokio::time::timeout(time, paced).await {
                        Ok(Ok(done)) => done,
                        // Either way the guest was not done in the time that it has.
                        Ok(Err(_)) | Err(_) => Err(progress.fail(Failure::Timeout)),
                    }
                };
                // The next request of the instance has another log.
                drop(logged);
                match done {
                    Ok(()) => shelf.give_back(used),
                    Err(failure) if progress.settle(FAILED) => return Err(failure),
                    Err(failure) => report(&failure),
                }
                Ok(())
            }
        })));
        match receiver.await {
            Ok(Ok(response)) => {
                if !progress.settle(BEGUN) {
                    // It failed before the client had anything of the answer.
                    return Err(task.failure().await);
                }
                // The answer has begun; the guest continues to write it within its time limit.
                task.0.take();
                Ok(response.map(|body| Body::new(StartedBody { body, progress })))
            }
            Ok(Err(code)) => Err(Failure::Guest(format!("it answered with the error {code:?}"))),
            Err(_) => Err(task.failure().await),
        }
    }
}

/// How far an answer has come.
#[derive(Default)]
pub(crate) struct Progress {
    /// The first event: [`BEGUN`] or [`FAILED`]. 0 before.
    first: AtomicU8,
    /// Whether the guest has failed: set before its end of the body is dropped.
    failed: AtomicBool,
}

/// The client has the answer's head: a failure is reported, and breaks the answer off.
const BEGUN: u8 = 1;
/// The guest failed: the failure is the answer.
const FAILED: u8 = 2;

impl Progress {
    /// Whether this came first.
    fn settle(&self, to: u8) -> bool {
        self.first.compare_exchange(0, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn fail(&self, failure: Failure) -> Failure {
        self.failed.store(true, Ordering::Release);
        failure
    }
}

/// The body of an answer that has begun. It ends with an error if the guest fails, and the
/// connection breaks off. Without this the body would end as if it were complete.
struct StartedBody {
    body: wasmtime_wasi_http::p2::body::HyperOutgoingBody,
    progress: Arc<Progress>,
}

/// The guest failed before it had written all of its answer.
#[derive(Debug, thiserror::Error)]
#[error("the guest failed in the middle of its answer")]
struct TruncatedResponse;

impl HttpBody for StartedBody {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match ready!(Pin::new(&mut self.body).poll_frame(context)) {
            Some(frame) => Poll::Ready(Some(frame.map_err(Into::into))),
            None if self.progress.failed.load(Ordering::Acquire) => {
                Poll::Ready(Some(Err(TruncatedResponse.into())))
            }
            None => Poll::Ready(None),
        }
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

type ProxyAnswer = Result<
    hyper::Response<wasmtime_wasi_http::p2::body::HyperOutgoingBody>,
    http::types::ErrorCode,
>;

/// Has an instance handle a request. Parts of its answer may be sent before it is done.
pub(crate) async fn handle<B>(
    lease: &mut OwnedComponentLease,
    indices: &ProxyIndices,
    request: Request<B>,
    sender: oneshot::Sender<ProxyAnswer>,
    progress: &Progress,
) -> Result<(), Failure>
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<Error>,
{
    let host = |error: wasmtime::Error| Failure::Host(describe(error.as_ref()));
    let (mut store, instance) = lease.lazy_bindings();
    let proxy = indices.load(&mut store, &instance).map_err(host)?;
    let mut http = view(store.data_mut());
    let request = http
        .new_incoming_request(Scheme::Http, request)
        .map_err(|error| Failure::Request(describe(error.as_ref())))?;
    let answer = http.new_response_outparam(sender).map_err(host)?;
    let handled = proxy.wasi_http_incoming_handler().call_handle(&mut store, request, answer).await;
    match handled {
        Ok(()) => lease.check_memory().map_err(|lost| progress.fail(lost.into())),
        Err(error) => Err(progress.fail(lease.explain(error).into())),
    }
}
