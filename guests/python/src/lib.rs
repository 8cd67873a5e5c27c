//! The Python guest: RustPython behind the byte-handling interface of `afresh-guest-abi`.
//!
//! `warm` starts the interpreter with the standard library frozen into the module, and runs
//! `app.py`, which imports what it needs, builds its index and defines `handle` and `reseed`.
//! `handle` passes the request to that function as text and returns its answer. An exception that
//! the program does not catch becomes the answer `{"error": "..."}`; what the program changed before
//! it stays changed.
//!
//! The hash seed is fixed, so that warming is reproducible; the `random` module starts from a fixed
//! seed too, and clones of one snapshot draw the same numbers until `afresh_reseed` is called.

use std::cell::RefCell;

use afresh_guest_abi::{BUFFER, fail, reserve, respond, write_error};
use rustpython_vm::builtins::{PyBaseExceptionRef, PyStr};
use rustpython_vm::compiler::Mode;
use rustpython_vm::{AsObject, Interpreter, PyObjectRef, PyResult, Settings, VirtualMachine};

const PROGRAM: &str = include_str!("app.py");

struct Engine {
    interpreter: Interpreter,
    handler: PyObjectRef,
    reseed: PyObjectRef,
}

thread_local! {
    static ENGINE: RefCell<Option<Engine>> = const { RefCell::new(None) };
}

/// Starts the interpreter and builds the index. Traps when that fails, after saying why on standard
/// error.
#[unsafe(no_mangle)]
pub extern "C" fn warm() {
    reserve(BUFFER);
    ENGINE.set(Some(start()));
}

/// Answers the request in the first `len` bytes of the input buffer.
#[unsafe(no_mangle)]
pub extern "C" fn handle(len: i32) -> i64 {
    ENGINE.with_borrow(|engine| match engine {
        Some(engine) => respond(len, |request, answer| engine.answer(request, answer)),
        None => fail("handle: called before warm"),
    })
}

/// Seeds the `random` module.
#[unsafe(no_mangle)]
pub extern "C" fn afresh_reseed(lo: i64, hi: i64) {
    ENGINE.with_borrow(|engine| match engine {
        Some(engine) => engine.seed(lo.cast_unsigned(), hi.cast_unsigned()),
        None => fail("afresh_reseed: called before warm"),
    });
}

fn start() -> Engine {
    let mut settings = Settings::default();
    settings.isolated = true;
    settings.import_site = false;
    settings.install_signal_handlers = false;
    settings.hash_seed = Some(0);
    settings.write_bytecode = false;

    let builder = Interpreter::builder(settings);
    let modules = rustpython_stdlib::stdlib_module_defs(&builder.ctx);
    let interpreter = builder
        .add_native_modules(&modules)
        .add_frozen_modules(rustpython_pylib::FROZEN_STDLIB)
        .build();
    let loaded = interpreter.enter(|vm| load(vm).map_err(|error| describe(vm, &error)));
    match loaded {
        Ok((handler, reseed)) => Engine { interpreter, handler, reseed },
        Err(error) => fail(&format!("warm-up: {error}")),
    }
}

/// Runs the program as the module `__main__` and takes the functions that it leaves.
fn load(vm: &VirtualMachine) -> PyResult<(PyObjectRef, PyObjectRef)> {
    let scope = vm.new_scope_with_main()?;
    let code = vm
        .compile(PROGRAM, Mode::Exec, "app.py".to_owned())
        .map_err(|error| vm.new_syntax_error(&error, Some(PROGRAM)))?;
    vm.run_code_obj(code, scope.clone())?;
    Ok((scope.globals.get_item("handle", vm)?, scope.globals.get_item("reseed", vm)?))
}

impl Engine {
    fn answer(&self, request: &[u8], answer: &mut Vec<u8>) {
        let text = match std::str::from_utf8(request) {
            Ok(text) => self
                .interpreter
                .enter(|vm| self.call(vm, text).map_err(|error| describe(vm, &error))),
            Err(error) => Err(format!("the request is not UTF-8: {error}")),
        };
        match text {
            Ok(text) => answer.extend_from_slice(text.as_bytes()),
            Err(message) => write_error(&message, answer),
        }
    }

    fn call(&self, vm: &VirtualMachine, request: &str) -> PyResult<String> {
        let answer = self.handler.call((request,), vm)?;
        Ok(answer.try_to_ref::<PyStr>(vm)?.to_string())
    }

    fn seed(&self, lo: u64, hi: u64) {
        self.interpreter.enter(|vm| {
            if let Err(error) = self.reseed.call((lo, hi), vm) {
                fail(&format!("afresh_reseed: {}", describe(vm, &error)));
            }
        });
    }
}

/// What was raised, in a line.
fn describe(vm: &VirtualMachine, error: &PyBaseExceptionRef) -> String {
    let kind = error.class().name().to_string();
    match error.as_object().str(vm) {
        Ok(text) => format!("{kind}: {text}"),
        Err(_) => kind,
    }
}
