//! The JavaScript guest: QuickJS behind the byte-handling interface of `afresh-guest-abi`.
//!
//! `warm` starts the engine and evaluates `app.js`, which builds the heap and defines `handle`.
//! `handle` passes the request to that function as text and returns its answer. An exception that
//! the program does not catch becomes the answer `{"error": "..."}`; the program's earlier changes
//! stay. Recursion without end and `abort()` trap.
//!
//! `Math.random` is replaced by a generator that starts from a fixed seed, so that warming is
//! reproducible and clones of one snapshot draw the same numbers until `afresh_reseed` is called.

use std::cell::RefCell;

use afresh_guest_abi::{BUFFER, Random, fail, reserve, respond, write_error};
use rquickjs::{CatchResultExt, CaughtError, Context, Ctx, Function, Object, Persistent, Runtime};

const PROGRAM: &str = include_str!("app.js");

/// Bytes that a call may allocate before the cycle collector runs. A collection marks every object
/// and so writes to every page of the heap; garbage of one call is dropped at the reset anyway.
const COLLECT_AFTER: usize = 64 << 20;

/// The running engine. Fields drop in this order: the function before the context it belongs to.
struct Engine {
    handler: Persistent<Function<'static>>,
    context: Context,
}

thread_local! {
    static ENGINE: RefCell<Option<Engine>> = const { RefCell::new(None) };
    static RANDOM: RefCell<Random> = const { RefCell::new(Random::new(0, 0)) };
}

/// Starts the engine and builds the heap. Traps when that fails, after saying why on standard
/// error.
#[unsafe(no_mangle)]
pub extern "C" fn warm() {
    reserve(BUFFER);
    match start() {
        Ok(engine) => ENGINE.set(Some(engine)),
        Err(error) => fail(&format!("warm-up: {error}")),
    }
}

/// Answers the request in the first `len` bytes of the input buffer.
#[unsafe(no_mangle)]
pub extern "C" fn handle(len: i32) -> i64 {
    ENGINE.with_borrow(|engine| match engine {
        Some(engine) => respond(len, |request, answer| engine.answer(request, answer)),
        None => fail("handle: called before warm"),
    })
}

/// Seeds `Math.random`.
#[unsafe(no_mangle)]
pub extern "C" fn afresh_reseed(lo: i64, hi: i64) {
    RANDOM.set(Random::new(lo.cast_unsigned(), hi.cast_unsigned()));
}

fn start() -> Result<Engine, String> {
    let runtime = Runtime::new().map_err(|error| error.to_string())?;
    let context = Context::full(&runtime).map_err(|error| error.to_string())?;
    let handler = context.with(|ctx| load(&ctx).catch(&ctx).map_err(|error| error.to_string()))?;
    runtime.run_gc();
    let live = usize::try_from(runtime.memory_usage().malloc_size).unwrap_or(0);
    runtime.set_gc_threshold(live.saturating_add(COLLECT_AFTER));
    Ok(Engine { handler, context })
}

/// Defines the globals that the program expects of its host, evaluates it, and takes the handler
/// that it leaves.
fn load(ctx: &Ctx<'_>) -> rquickjs::Result<Persistent<Function<'static>>> {
    let globals = ctx.globals();
    let draw = Function::new(ctx.clone(), || RANDOM.with_borrow_mut(Random::next_f64))?;
    globals.get::<_, Object<'_>>("Math")?.set("random", draw)?;
    let abort = Function::new(ctx.clone(), || -> () { std::process::abort() })?;
    globals.set("abort", abort)?;
    ctx.eval::<(), _>(PROGRAM)?;
    let handler: Function<'_> = globals.get("handle")?;
    Ok(Persistent::save(ctx, handler))
}

impl Engine {
    fn answer(&self, request: &[u8], answer: &mut Vec<u8>) {
        self.context.with(|ctx| {
            let text = match std::str::from_utf8(request) {
                Ok(text) => self.call(&ctx, text).catch(&ctx).map_err(describe),
                Err(error) => Err(format!("the request is not UTF-8: {error}")),
            };
            match text {
                Ok(text) => answer.extend_from_slice(text.as_bytes()),
                Err(message) => write_error(&message, answer),
            }
        });
    }

    fn call(&self, ctx: &Ctx<'_>, request: &str) -> rquickjs::Result<String> {
        self.handler.clone().restore(ctx)?.call((request,))
    }
}

/// The exception, in a line.
fn describe(error: CaughtError<'_>) -> String {
    match error {
        CaughtError::Exception(exception) => {
            let name = exception.get::<_, String>("name").unwrap_or_else(|_| "Error".to_owned());
            format!("{name}: {}", exception.message().unwrap_or_default())
        }
        other => other.to_string(),
    }
}
