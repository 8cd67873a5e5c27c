//! The JavaScript guest as a component of the world `wasi:http/proxy`: QuickJS with the heap that
//! `guests/js/src/app.js` builds. The body of a request is passed to the program's `handle` as
//! text, and its return value is the answer.
//!
//! It is for comparing servers: one that knows of the export `warm` starts every request from the
//! heap; for any other the heap is built into the component with `wasmtime wizer --init-func warm`,
//! or else each request builds it first.

use std::cell::RefCell;

use rquickjs::{CatchResultExt, Context, Function, Object, Persistent, Runtime};
use wasip2::http::types::{
    Fields, IncomingRequest, OutgoingBody, OutgoingResponse, ResponseOutparam,
};
use wasip2::io::streams::StreamError;

// The generated items are public and carry the documentation of the WIT file only.
#[allow(missing_docs, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn)]
mod bindings {
    wit_bindgen::generate!({ path: "wit", world: "warmed" });
    export!(Handler with_types_in self);
    use super::Handler;
}

const PROGRAM: &str = include_str!("../../../guests/js/src/app.js");

/// As in the JavaScript guest: garbage of one request is dropped with it anyway.
const COLLECT_AFTER: usize = 64 << 20;

struct Handler;

wasip2::http::proxy::export!(Handler);

/// The running engine. Fields drop in this order: the function before the context it belongs to.
struct Engine {
    handler: Persistent<Function<'static>>,
    context: Context,
}

thread_local! {
    static ENGINE: RefCell<Option<Engine>> = const { RefCell::new(None) };
}

fn start() -> rquickjs::Result<Engine> {
    let runtime = Runtime::new()?;
    let context = Context::full(&runtime)?;
    let handler = context.with(|ctx| {
        let globals = ctx.globals();
        // The same numbers for every server, so that each has the same work.
        let draw = Function::new(ctx.clone(), || 0.5)?;
        globals.get::<_, Object<'_>>("Math")?.set("random", draw)?;
        ctx.eval::<(), _>(PROGRAM)?;
        let handler: Function<'_> = globals.get("handle")?;
        rquickjs::Result::Ok(Persistent::save(&ctx, handler))
    })?;
    runtime.run_gc();
    let live = usize::try_from(runtime.memory_usage().malloc_size).unwrap_or(0);
    runtime.set_gc_threshold(live.saturating_add(COLLECT_AFTER));
    Ok(Engine { handler, context })
}

impl bindings::Guest for Handler {
    fn warm() {
        ENGINE.set(Some(start().expect("the program runs")));
    }
}

/// The body of a request, whole.
fn read(request: &IncomingRequest) -> Vec<u8> {
    let incoming = request.consume().expect("its body is taken once");
    let input = incoming.stream().expect("its stream is taken once");
    let mut body = Vec::new();
    loop {
        match input.blocking_read(64 << 10) {
            Ok(bytes) => body.extend(bytes),
            Err(StreamError::Closed) => return body,
            Err(StreamError::LastOperationFailed(error)) => {
                panic!("the body broke off: {}", error.to_debug_string())
            }
        }
    }
}

fn answer(request: &[u8]) -> String {
    let text = String::from_utf8_lossy(request);
    ENGINE.with_borrow(|engine| {
        let engine = engine.as_ref().expect("it is warm");
        engine.context.with(|ctx| {
            let handler = engine.handler.clone().restore(&ctx).expect("it is this context's");
            let said: rquickjs::Result<String> = handler.call((&*text,));
            said.catch(&ctx).unwrap_or_else(|error| panic!("the program does not answer: {error}"))
        })
    })
}

impl wasip2::exports::http::incoming_handler::Guest for Handler {
    fn handle(request: IncomingRequest, outparam: ResponseOutparam) {
        if ENGINE.with_borrow(Option::is_none) {
            <Self as bindings::Guest>::warm();
        }
        let said = answer(&read(&request));
        let response = OutgoingResponse::new(Fields::new());
        let body = response.body().expect("its body is taken once");
        ResponseOutparam::set(outparam, Ok(response));
        let stream = body.write().expect("its stream is taken once");
        for piece in said.as_bytes().chunks(4096) {
            // An error means that the client has left.
            if stream.blocking_write_and_flush(piece).is_err() {
                return;
            }
        }
        drop(stream);
        let _ = OutgoingBody::finish(body, None);
    }
}
