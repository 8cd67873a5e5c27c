//! `component/hello`, `component/js-http`, `component/py-http`: a handler of `wasi:http` that
//! answers at once, in Rust, and two handlers from the tools of other languages, which read two
//! hundred of their stored items for each request. Each request runs in a new instance, by afresh
//! and by wasmtime's ways on the same component. Both tools leave the state of an initialised
//! program in the component, so all begin with the same. The floor is one wasmtime instance that
//! answers every request.

use std::path::Path;
use std::time::Duration;

use afresh::Options as OpenOptions;
use afresh::wasm::GuestOptions;
use afresh_serve::Handler;
use anyhow::ensure;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use wasmtime::Store;
use wasmtime::component::{Linker, ResourceTable};
use wasmtime_wasi::{WasiCtx, WasiCtxView, WasiView};
use wasmtime_wasi_http::p2::bindings::http::types::Scheme;
use wasmtime_wasi_http::p2::bindings::{Proxy, ProxyPre, http};
use wasmtime_wasi_http::{
    Error, RequestOptions, WasiBody, WasiHttp, WasiHttpCtx, WasiHttpCtxView, WasiHttpHooks,
};

use crate::code_cache;
use crate::rivals::Rival;
use crate::row::{Contestant, Options, Sink, contest};

/// The strategy of one instance that is never reset.
const FLOOR: &str = "floor/never-reset";

/// Time limit of one request, and maximum bytes of its answer.
const LIMITS: (Duration, usize) = (Duration::from_secs(60), 1 << 20);

/// The store data of a wasmtime instance.
struct RivalHost {
    wasi: WasiCtx,
    table: ResourceTable,
    http: WasiHttpCtx,
    hooks: Hooks,
}

/// Lets no request out, as ours.
struct Hooks;

type SentResponse = (hyper::Response<WasiBody>, Box<dyn Future<Output = Result<(), Error>> + Send>);

impl WasiHttpHooks for Hooks {
    fn send_request(
        &mut self,
        _: Request<WasiBody>,
        _: Option<RequestOptions>,
        _: Box<dyn Future<Output = Result<(), Error>> + Send>,
    ) -> Box<dyn Future<Output = Result<SentResponse, Error>> + Send> {
        Box::new(async { Err(Error::HttpRequestDenied) })
    }
}

impl WasiView for RivalHost {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        WasiCtxView { ctx: &mut self.wasi, table: &mut self.table }
    }
}

fn view(host: &mut RivalHost) -> WasiHttpCtxView<'_> {
    WasiHttpCtxView { hooks: &mut host.hooks, table: &mut host.table, ctx: &mut host.http }
}

/// A component ready for requests by wasmtime.
struct RivalGuest {
    engine: wasmtime::Engine,
    pre: ProxyPre<RivalHost>,
}

impl RivalGuest {
    fn new(rival: Rival, wasm: &[u8]) -> wasmtime::Result<Self> {
        let engine = rival.engine()?;
        let component = code_cache::component(&engine, wasm)?;
        let mut linker = Linker::new(&engine);
        wasmtime_wasi::p2::add_to_linker_async(&mut linker)?;
        let options = http::types::LinkOptions::default();
        http::outgoing_handler::add_to_linker::<_, WasiHttp>(&mut linker, view)?;
        http::types::add_to_linker::<_, WasiHttp>(&mut linker, &options, view)?;
        let pre = ProxyPre::new(linker.instantiate_pre(&component)?)?;
        Ok(Self { engine, pre })
    }

    /// A new instance.
    async fn instance(&self) -> wasmtime::Result<LiveHandler> {
        let host = RivalHost {
            wasi: WasiCtx::builder().build(),
            table: ResourceTable::new(),
            http: WasiHttpCtx::new(),
            hooks: Hooks,
        };
        let mut store = Store::new(&self.engine, host);
        let proxy = self.pre.instantiate_async(&mut store).await?;
        Ok(LiveHandler { store, proxy })
    }

    /// A request to a new instance, which is dropped after its answer.
    async fn ask(&self, target: &str) -> wasmtime::Result<Bytes> {
        self.instance().await?.ask(target).await
    }
}

/// An instance that answers.
struct LiveHandler {
    store: Store<RivalHost>,
    proxy: Proxy,
}

impl LiveHandler {
    /// A request to it.
    async fn ask(&mut self, target: &str) -> wasmtime::Result<Bytes> {
        let Self { store, proxy } = self;
        let request = Request::builder().uri(target).header("host", "localhost");
        let body = Full::new(Bytes::new()).map_err(|never| -> Error { match never {} });
        let request = request.body(body)?;
        let (sender, receiver) = oneshot::channel();
        let request = view(store.data_mut()).new_incoming_request(Scheme::Http, request)?;
        let answer = view(store.data_mut()).new_response_outparam(sender)?;
        let handler = proxy.wasi_http_incoming_handler();
        let handling = handler.call_handle(&mut *store, request, answer);
        let reading = async {
            let response =
                receiver.await?.map_err(|code| wasmtime::Error::msg(format!("{code:?}")))?;
            wasmtime::Result::Ok(response.into_body().collect().await?.to_bytes())
        };
        let (handled, read) = tokio::join!(handling, reading);
        handled?;
        read
    }
}

/// Ours, opened as an embedder would.
fn ours(path: &Path, runtime: &Runtime) -> anyhow::Result<Handler> {
    let engine = code_cache::engine()?;
    let options = OpenOptions::new().wasm(Handler::options(GuestOptions::default()));
    let guest = afresh::open(path, &options.engine(engine))?;
    let handler = runtime.block_on(Handler::of(&guest, LIMITS.0, LIMITS.1))?;
    handler.ok_or_else(|| anyhow::anyhow!("it answers no requests"))
}

/// The contest on the handler in the file `path`, with requests for `target`.
///
/// # Errors
/// The first error of any contestant, or answers that differ.
pub fn handler(
    path: &Path,
    target: &str,
    case: &str,
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let failed = |e: wasmtime::Error| anyhow::anyhow!("{e:#}");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ours = match options.wants(case, "fresh") {
        true => Some(ours(path, &runtime)?),
        false => None,
    };
    let ask = |ours: &Handler| {
        let reply = runtime.block_on(ours.request(target, None))?;
        ensure!(reply.status == 200, "it answers {}", reply.status);
        Ok(reply.body)
    };
    let wasm = std::fs::read(path)?;
    let mut rivals = Vec::new();
    for rival in Rival::ALL.into_iter().filter(|rival| options.wants(case, rival.name())) {
        rivals.push((rival.name(), RivalGuest::new(rival, &wasm).map_err(failed)?));
    }
    let expected = ours.as_ref().map(ask).transpose()?;
    for (name, rival) in &rivals {
        let answer = runtime.block_on(rival.ask(target)).map_err(failed)?;
        let same = expected.as_ref().is_none_or(|expected| *expected == answer);
        ensure!(same, "{name} answers otherwise than ours");
    }
    // The guest's own time: one instance that answers again and again, and nothing undone.
    let mut live = match options.wants(case, FLOOR) {
        true => {
            let guest = RivalGuest::new(Rival::OnDemand, &wasm).map_err(failed)?;
            Some(runtime.block_on(guest.instance()).map_err(failed)?)
        }
        false => None,
    };
    let mut field: Vec<Contestant<'_>> = Vec::new();
    if let Some(ours) = &ours {
        field.push(Contestant::new("fresh", || ask(ours).map(drop)));
    }
    for (name, rival) in &rivals {
        let once = || runtime.block_on(rival.ask(target)).map(drop).map_err(failed);
        field.push(Contestant::new(*name, once));
    }
    if let Some(live) = &mut live {
        let once = || runtime.block_on(live.ask(target)).map(drop).map_err(failed);
        field.push(Contestant::new(FLOOR, once));
    }
    contest("wasm", case, options, field, sink)
}
