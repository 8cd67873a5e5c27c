//! The interpreter guest: QuickJS that evaluates its input, behind the byte-handling interface of
//! `afresh-guest-abi`.
//!
//! `warm` starts the engine. `evaluate` takes a request in CBOR, the array
//! `[what, tools, source, name, arguments]`:
//!
//! | `what` | meaning of `source` |
//! |---|---|
//! | 0 | a script; when it ends with a promise, or awaits at its top level, the answer is what that becomes |
//! | 1 | a module |
//! | 2 | an expression that is a function, to be called with `arguments` |
//! | 3 | a script whose promise is not waited for |
//! | 4 | a script as 0, after which the guest traps unless it came to its end: for warm-ups |
//! | 5 | a script as 0, whose value stays: it becomes `globalThis[Symbol.for("afresh.value")]`, and the answer is `undefined` |
//!
//! `tools` are the names of the functions that the host offers: each is a global function for the
//! program. `name` is what stack traces call the source. The answer is `[0, value, text]` or
//! `[1, name, message, stack, host]`: the exception, and the number of the host error if it was
//! one. Output of the program goes to the host at once.
//!
//! A script may declare names that an earlier script declared: its outermost `const`, `let` and
//! `class` are variables. Rejected promises without a handler are reported on standard error.
//!
//! `Math.random` is replaced by a generator that starts from a fixed seed, so that warming is
//! reproducible and clones of one snapshot draw the same numbers until `afresh_reseed` is called.
//! Recursion without end traps; running out of memory is an error of the program, if there is
//! enough left to report it.

mod declarations;
mod host;
mod rejections;
mod wire;

use std::cell::RefCell;
use std::rc::Rc;

use afresh_guest_abi::{BUFFER, Random, fail, reserve, respond};
use minicbor::{Decoder, Encoder};
use rquickjs::context::EvalOptions;
use rquickjs::function::{Args, Rest};
use rquickjs::{
    CatchResultExt, CaughtError, Context, Ctx, Function, Module, Object, Persistent, Promise,
    Runtime, Type, Value,
};

use crate::declarations::as_variables;
use crate::rejections::Rejections;
use crate::wire::{Failed, Helpers};

const PRELUDE: &str = include_str!("prelude.js");

/// Bytes that a call may allocate before the cycle collector runs. A collection marks every object,
/// and so writes to every page of the heap.
const COLLECT_AFTER: usize = 16 << 20;

/// The running engine. Fields drop in this order: values in the context before it.
struct Engine {
    helpers: Rc<Helpers>,
    /// The names of the defined host functions.
    tools: Vec<String>,
    rejections: Rc<Rejections>,
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
pub extern "C" fn evaluate(len: i32) -> i64 {
    ENGINE.with_borrow_mut(|engine| match engine {
        Some(engine) => respond(len, |request, answer| engine.answer(request, answer)),
        None => fail("evaluate: called before warm"),
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
    let helpers = context.with(|ctx| load(&ctx).catch(&ctx).map_err(|error| error.to_string()))?;
    let rejections = Rejections::track(&runtime);
    runtime.run_gc();
    let live = usize::try_from(runtime.memory_usage().malloc_size).unwrap_or(0);
    runtime.set_gc_threshold(live.saturating_add(COLLECT_AFTER));
    Ok(Engine { helpers: Rc::new(Helpers::new(helpers)), tools: Vec::new(), rejections, context })
}

/// Defines the global names that programs get in addition to the language.
fn load(ctx: &Ctx<'_>) -> rquickjs::Result<Persistent<Object<'static>>> {
    let globals = ctx.globals();
    let draw = Function::new(ctx.clone(), || RANDOM.with_borrow_mut(Random::next_f64))?;
    globals.get::<_, Object<'_>>("Math")?.set("random", draw)?;
    let write = Function::new(ctx.clone(), |stream: i32, text: String| host::print(stream, &text))?;
    let mut options = EvalOptions::default();
    options.filename = Some("<afresh>".to_owned());
    let prelude: Function<'_> = ctx.eval_with_options(PRELUDE, options)?;
    let helpers: Object<'_> = prelude.call((write,))?;
    Ok(Persistent::save(ctx, helpers))
}

/// How an evaluation ended that gave no value.
enum Failure<'js> {
    /// The program threw something.
    Threw(CaughtError<'js>),
    /// The request, or a value, cannot be carried.
    Failed(Failed),
    /// The source has a character that the engine does not accept.
    Nul,
    /// It waits for a promise that nothing settles.
    Waits,
}

impl From<Failed> for Failure<'_> {
    fn from(failed: Failed) -> Self {
        Self::Failed(failed)
    }
}

impl From<minicbor::decode::Error> for Failure<'_> {
    fn from(error: minicbor::decode::Error) -> Self {
        Self::Failed(error.into())
    }
}

/// A host function, as the program calls it.
fn tool<'js>(ctx: &Ctx<'js>, helpers: &Rc<Helpers>, name: &str) -> rquickjs::Result<Function<'js>> {
    let (helpers, own) = (helpers.clone(), name.to_owned());
    let call = move |ctx: Ctx<'js>, arguments: Rest<Value<'js>>| {
        call_host(&ctx, &helpers, &own, arguments.0)
    };
    Function::new(ctx.clone(), call)?.with_name(name)
}

fn call_host<'js>(
    ctx: &Ctx<'js>,
    helpers: &Helpers,
    name: &str,
    arguments: Vec<Value<'js>>,
) -> rquickjs::Result<Value<'js>> {
    let refused = |Failed(why)| rquickjs::Exception::throw_type(ctx, &format!("{name}: {why}"));
    let encode = || -> Result<Vec<u8>, Failed> {
        let mut request = Vec::new();
        let mut out = Encoder::new(&mut request);
        out.array(2)?.str(name)?.array(arguments.len() as u64)?;
        arguments.into_iter().try_for_each(|value| helpers.encode(ctx, value, &mut out, 1))?;
        Ok(request)
    };
    let request = encode().map_err(refused)?;
    let answer = host::ask(&request).map_err(refused)?;
    let mut from = Decoder::new(&answer);
    let mut decode = || -> Result<Result<Value<'js>, Value<'js>>, Failed> {
        from.array()?;
        if from.u8()? == 0 {
            return Ok(Ok(helpers.decode(ctx, &mut from, 0)?));
        }
        let (name, message, id) = (from.str()?, from.str()?, from.u32()?);
        Ok(Err(helpers.call(ctx, "failure", (name, message, id))?))
    };
    match decode() {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(ctx.throw(error)),
        Err(failed) => Err(refused(failed)),
    }
}

impl Engine {
    fn answer(&mut self, request: &[u8], answer: &mut Vec<u8>) {
        let (helpers, tools, rejections) = (&self.helpers, &mut self.tools, &self.rejections);
        self.context.with(|ctx| {
            let value = run(&ctx, helpers, tools, rejections, request);
            // Jobs that the program left, even after it ended with an error.
            while ctx.execute_pending_job() {}
            if let Ok(value) = &value {
                // The host may wait for a promise that is the answer.
                rejections.forget(&ctx, value);
            }
            rejections.report(&ctx, helpers);
            let carried = value.and_then(|value| {
                let mut out = Encoder::new(&mut *answer);
                carry(&ctx, helpers, value, &mut out)
                    .map_err(|failed| Failure::Failed(with_thrown(&ctx, helpers, failed)))
            });
            if let Err(ended) = carried {
                if request.get(1) == Some(&4) {
                    fail("the setup threw something");
                }
                answer.clear();
                let mut out = Encoder::new(answer);
                if write_error(&ctx, helpers, ended, &mut out).is_err() {
                    fail("the error has no text");
                }
            }
        });
    }
}

/// The reason, and what the program's own code threw while its value was read: a getter, or a
/// proxy.
fn with_thrown<'js>(ctx: &Ctx<'js>, helpers: &Helpers, failed: Failed) -> Failed {
    let thrown = ctx.catch();
    if matches!(thrown.type_of(), Type::Uninitialized | Type::Null | Type::Undefined) {
        return failed;
    }
    let shown = helpers.show(ctx, thrown).unwrap_or_default();
    Failed(format!("reading it threw {}", shown.lines().next().unwrap_or_default()))
}

fn carry<'js>(
    ctx: &Ctx<'js>,
    helpers: &Helpers,
    value: Value<'js>,
    out: &mut Encoder<&mut Vec<u8>>,
) -> Result<(), Failed> {
    out.array(3)?.u8(0)?;
    // The host can show such values itself.
    let plain = !value.is_object() && !value.is_symbol();
    // A program may break the functions that showing uses; its value is carried all the same.
    let shown = match plain {
        true => None,
        false => Some(helpers.show(ctx, value.clone()).unwrap_or_else(|_| {
            drop(ctx.catch());
            value.type_name().to_owned()
        })),
    };
    helpers.encode(ctx, value, out, 0)?;
    match shown {
        Some(text) => out.str(&text)?,
        None => out.null()?,
    };
    Ok(())
}

/// Runs the request.
fn run<'js>(
    ctx: &Ctx<'js>,
    helpers: &Rc<Helpers>,
    tools: &mut Vec<String>,
    rejections: &Rejections,
    request: &[u8],
) -> Result<Value<'js>, Failure<'js>> {
    let settle = |promise: &Promise<'js>| settle(ctx, rejections, promise);
    let threw = |error: rquickjs::Error| Failure::Threw(CaughtError::from_error(ctx, error));
    let mut from = Decoder::new(request);
    from.array()?;
    let what = from.u8()?;
    define(ctx, helpers, tools, &mut from)?;
    let (source, name) = (from.str()?, from.str()?);
    if source.contains('\0') || name.contains('\0') {
        return Err(Failure::Nul);
    }
    match what {
        1 => {
            let loaded = Module::evaluate(ctx.clone(), name, source).map_err(threw)?;
            settle(&loaded)
        }
        2 => {
            let function: Function<'_> = ctx.eval(format!("({source})")).map_err(threw)?;
            let arguments: Args<'_> = helpers.decode_arguments(ctx, &mut from)?;
            let value: Value<'_> = arguments.apply(&function).map_err(threw)?;
            Ok(value)
        }
        _ => {
            let source = as_variables(source);
            let mut options = EvalOptions::default();
            options.strict = false;
            options.filename = Some(name.to_owned());
            // Where it may await at its top level: what that becomes is the member of an object
            // then.
            options.promise = what != 3 && source.contains("await");
            let awaits = options.promise;
            let value: Value<'_> =
                ctx.eval_with_options(source.as_bytes(), options).map_err(threw)?;
            let value = match value.as_promise() {
                Some(promise) if awaits => {
                    let ended = settle(promise)?;
                    let value: Value<'_> = match ended.as_object() {
                        Some(object) => object.get("value").map_err(threw)?,
                        None => ended,
                    };
                    match value.as_promise() {
                        Some(promise) => settle(promise)?,
                        None => value,
                    }
                }
                Some(promise) if what != 3 => settle(promise)?,
                _ => value,
            };
            if what != 5 {
                return Ok(value);
            }
            ctx.globals().set(place(ctx).map_err(threw)?, value).map_err(threw)?;
            Ok(Value::new_undefined(ctx.clone()))
        }
    }
}

/// Where a value that stays is found.
fn place<'js>(ctx: &Ctx<'js>) -> rquickjs::Result<Value<'js>> {
    let symbol: Object<'js> = ctx.globals().get("Symbol")?;
    let of: Function<'js> = symbol.get("for")?;
    of.call(("afresh.value",))
}

/// The result of a promise, once no job is left.
fn settle<'js>(
    ctx: &Ctx<'js>,
    rejections: &Rejections,
    promise: &Promise<'js>,
) -> Result<Value<'js>, Failure<'js>> {
    let ended = promise.finish::<Value<'_>>();
    rejections.forget_promise(ctx, promise);
    match ended {
        Ok(value) => Ok(value),
        Err(rquickjs::Error::WouldBlock) => Err(Failure::Waits),
        Err(error) => Err(Failure::Threw(CaughtError::from_error(ctx, error))),
    }
}

/// Defines the host's functions, unless they are those that are defined already.
fn define<'js>(
    ctx: &Ctx<'js>,
    helpers: &Rc<Helpers>,
    tools: &mut Vec<String>,
    from: &mut Decoder<'_>,
) -> Result<(), Failure<'js>> {
    let threw = |error: rquickjs::Error| Failure::Threw(CaughtError::from_error(ctx, error));
    let count = from.array()?.unwrap_or_default() as usize;
    let mut same = count == tools.len();
    let mut names = Vec::new();
    for at in 0..count {
        let name = from.str()?;
        same &= tools.get(at).is_some_and(|known| known == name);
        names.push(name);
    }
    if same {
        return Ok(());
    }
    let globals = ctx.globals();
    for gone in tools.iter().filter(|known| !names.contains(&known.as_str())) {
        globals.remove(gone.as_str()).map_err(threw)?;
    }
    for name in names.iter().filter(|name| !tools.iter().any(|known| known == *name)) {
        globals.set(*name, tool(ctx, helpers, name).map_err(threw)?).map_err(threw)?;
    }
    *tools = names.into_iter().map(str::to_owned).collect();
    Ok(())
}

fn write_error<'js>(
    ctx: &Ctx<'js>,
    helpers: &Helpers,
    ended: Failure<'js>,
    out: &mut Encoder<&mut Vec<u8>>,
) -> Result<(), Failed> {
    out.array(5)?.u8(1)?;
    let plain =
        |name: &str, message: &str, out: &mut Encoder<&mut Vec<u8>>| -> Result<(), Failed> {
            out.str(name)?.str(message)?.null()?.null()?;
            Ok(())
        };
    match ended {
        Failure::Waits => {
            let why = "the program waits for a promise that nothing settles any more";
            plain("DeadlockError", why, out)
        }
        Failure::Nul => {
            let why = "the source or its name contains the character U+0000; write \\0 in strings";
            plain("SyntaxError", why, out)
        }
        Failure::Failed(Failed(why)) => plain("MarshalError", &why, out),
        Failure::Threw(CaughtError::Error(error)) => {
            plain("InternalError", &error.to_string(), out)
        }
        Failure::Threw(CaughtError::Value(value)) => {
            let shown = helpers.show(ctx, value)?;
            plain("Error", &shown, out)
        }
        Failure::Threw(CaughtError::Exception(exception)) => {
            let object = exception.as_object();
            // The program may have replaced them.
            let text = |key: &str| {
                let value: Value<'_> = object.get(key).ok()?;
                helpers.text(ctx, &value).ok()
            };
            out.str(text("name").as_deref().unwrap_or("Error"))?;
            out.str(text("message").as_deref().unwrap_or_default())?;
            match text("stack") {
                Some(stack) => out.str(&stack)?,
                None => out.null()?,
            };
            match object.get::<_, Option<u32>>("hostError").ok().flatten() {
                Some(id) => out.u32(id)?,
                None => out.null()?,
            };
            Ok(())
        }
    }
}
