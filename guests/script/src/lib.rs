//! A JavaScript interpreter behind the byte-handling interface of `afresh-guest-abi`.
//!
//! `warm` starts the engine. `handle` takes `{"code": "…"}`, runs the code as a script, so that what it declares is there for
//! the next piece, then what it has put off (promises), and answers with what came of it, each apart:
//!
//! | field | what it is |
//! |---|---|
//! | `printed` | pairs of `"stdout"` or `"stderr"` and a text, in the order in which they were printed |
//! | `value` | of the last expression, where it is not `undefined`: `text`, and `json` where it has one |
//! | `error` | of code that threw: `name`, `value`, `traceback` |
//!
//! A promise that is the value is waited for. Recursion without end and an engine without memory trap.

use std::cell::RefCell;

use afresh_guest_abi::{BUFFER, Random, fail, reserve, respond, write_error};
use rquickjs::context::EvalOptions;
use rquickjs::{Context, Ctx, Function, Object, Persistent, Promise, Runtime, Value};

const CONSOLE: &str = include_str!("console.js");

/// The running engine. Fields drop in this order: functions before the context they belong to.
struct Engine {
    parse: Persistent<Function<'static>>,
    report: Persistent<Function<'static>>,
    context: Context,
}

thread_local! {
    static ENGINE: RefCell<Option<Engine>> = const { RefCell::new(None) };
    static RANDOM: RefCell<Random> = const { RefCell::new(Random::new(0, 0)) };
}

/// Starts the engine. Traps when that fails, after saying why on standard error.
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
        Some(engine) => respond(len, |request, answer| match engine.answer(request) {
            Ok(text) => answer.extend_from_slice(text.as_bytes()),
            Err(error) => write_error(&error, answer),
        }),
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
    let (parse, report) = context.with(|ctx| load(&ctx)).map_err(|error| error.to_string())?;
    runtime.run_gc();
    Ok(Engine { parse, report, context })
}

type Functions = (Persistent<Function<'static>>, Persistent<Function<'static>>);

/// Defines what programs find there, and takes what is ours out of their sight.
fn load(ctx: &Ctx<'_>) -> rquickjs::Result<Functions> {
    let globals = ctx.globals();
    let draw = Function::new(ctx.clone(), || RANDOM.with_borrow_mut(Random::next_f64))?;
    globals.get::<_, Object<'_>>("Math")?.set("random", draw)?;
    ctx.eval::<(), _>(CONSOLE)?;
    let report: Function<'_> = globals.get("report")?;
    globals.remove("report")?;
    let parse: Function<'_> = globals.get::<_, Object<'_>>("JSON")?.get("parse")?;
    Ok((Persistent::save(ctx, parse), Persistent::save(ctx, report)))
}

impl Engine {
    fn answer(&self, request: &[u8]) -> Result<String, String> {
        let text = std::str::from_utf8(request)
            .map_err(|error| format!("the request is not UTF-8: {error}"))?;
        self.context.with(|ctx| {
            let parse = self.parse.clone().restore(&ctx).map_err(|error| error.to_string())?;
            let code = parse.call::<_, Object<'_>>((text,)).and_then(|it| it.get("code"));
            let code: String = code.map_err(|_| {
                ctx.catch();
                "the request is not {\"code\": \"…\"}".to_owned()
            })?;
            let (kind, value) = match run(&ctx, code) {
                Ok(value) => ("value", value),
                Err(_) => ("error", ctx.catch()),
            };
            let report = self.report.clone().restore(&ctx).map_err(|error| error.to_string())?;
            report.call((kind, value)).map_err(|error| {
                ctx.catch();
                format!("what came of the code cannot be shown: {error}")
            })
        })
    }
}

/// Runs code to its end, and gives its value.
fn run<'js>(ctx: &Ctx<'js>, code: String) -> rquickjs::Result<Value<'js>> {
    let mut options = EvalOptions::default();
    options.strict = false;
    options.backtrace_barrier = true;
    let value: Value<'js> = ctx.eval_with_options(code, options)?;
    while ctx.execute_pending_job() {}
    match value.as_promise().and_then(Promise::result::<Value<'js>>) {
        Some(settled) => settled,
        None => Ok(value),
    }
}
