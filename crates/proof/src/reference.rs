//! The reference: instances of the original module in plain wasmtime, one new for each history.
//!
//! May break it: a proposal that one engine allows and the other does not, or a host function that
//! one has and the other lacks. Both sides get theirs from here.

use afresh_wasm::Imports;
use afresh_wasm::wasmtime::{
    Config, Engine, Error, ExternRef, Instance, Linker, Module, Result, Rooted, Store, Val,
};

use crate::meddling::{self, Meddler};
use crate::outcome;

/// wasmtime as it comes, with the proposals that guests may use.
///
/// # Errors
/// When wasmtime does not support this machine.
pub fn engine() -> anyhow::Result<Engine> {
    let mut config = Config::new();
    config
        .wasm_multi_memory(true)
        .wasm_memory64(true)
        .wasm_tail_call(true)
        .wasm_function_references(true)
        .wasm_gc(true)
        .wasm_exceptions(true)
        .wasm_extended_const(true)
        // Small, so that making a store is cheap.
        .memory_reservation(1 << 20)
        .memory_guard_size(1 << 16);
    Engine::new(&config).map_err(|error| anyhow::anyhow!("{error:#}"))
}

/// Defines the host functions that the suites' modules import, for stores of any kind.
fn define<T: Meddler>(linker: &mut Linker<T>) -> Result<()> {
    linker.func_wrap("env", "host", |value: i32| value ^ 77)?;
    linker.func_wrap(
        "env",
        "object",
        |mut caller: afresh_wasm::wasmtime::Caller<'_, T>,
         number: i32|
         -> Result<Option<Rooted<ExternRef>>> {
            Ok(Some(ExternRef::new(&mut caller, number)?))
        },
    )?;
    linker.func_wrap(
        "env",
        "number",
        |caller: afresh_wasm::wasmtime::Caller<'_, T>,
         object: Option<Rooted<ExternRef>>|
         -> Result<i32> {
            let Some(object) = object else { return Ok(-1) };
            let data = object.data(&caller)?.and_then(|data| data.downcast_ref::<i32>());
            data.copied().ok_or_else(|| Error::msg("an object without a type"))
        },
    )?;
    meddling::define(linker)?;
    // The print functions of the specification tests.
    linker.func_wrap("spectest", "print", || {})?;
    linker.func_wrap("spectest", "print_i32", |_: i32| {})?;
    linker.func_wrap("spectest", "print_i64", |_: i64| {})?;
    linker.func_wrap("spectest", "print_f32", |_: f32| {})?;
    linker.func_wrap("spectest", "print_f64", |_: f64| {})?;
    linker.func_wrap("spectest", "print_i32_f32", |_: i32, _: f32| {})?;
    linker.func_wrap("spectest", "print_f64_f64", |_: f64, _: f64| {})?;
    Ok(())
}

/// The same host functions for warm guests.
#[must_use]
pub fn imports() -> Imports {
    Imports::new(define)
}

/// A compiled module of plain wasmtime.
#[derive(Debug)]
pub struct Reference {
    module: Module,
}

impl Reference {
    /// Compiles the original.
    ///
    /// # Errors
    /// When it is not valid.
    pub fn new(engine: &Engine, wasm: &[u8]) -> Result<Self> {
        Ok(Self { module: Module::new(engine, wasm)? })
    }

    /// A new instance in a new store.
    ///
    /// # Errors
    /// When its start function or a segment traps, or an import is unknown.
    pub fn start(&self) -> Result<PlainInstance> {
        let mut linker = Linker::new(self.module.engine());
        define(&mut linker)?;
        let mut store = Store::new(self.module.engine(), ());
        let instance = linker.instantiate(&mut store, &self.module)?;
        Ok(PlainInstance { store, instance })
    }
}

/// An instance of plain wasmtime.
#[derive(Debug)]
pub struct PlainInstance {
    /// Its store.
    pub store: Store<()>,
    /// The instance.
    pub instance: Instance,
}

impl PlainInstance {
    /// Calls an export; a pending exception is taken, as an embedder must.
    ///
    /// # Errors
    /// The trap, the uncaught exception, or a missing export.
    pub fn invoke(&mut self, name: &str, arguments: &[Val]) -> Result<Vec<Val>> {
        let func = self
            .instance
            .get_func(&mut self.store, name)
            .ok_or_else(|| Error::msg(format!("no function {name}")))?;
        let mut results = vec![Val::I32(0); func.ty(&self.store).results().len()];
        let outcome = func.call(&mut self.store, arguments, &mut results);
        let _ = self.store.take_pending_exception();
        outcome.map(|()| results)
    }

    /// Calls an export; see [`outcome`].
    pub fn call(&mut self, name: &str, arguments: &[Val]) -> String {
        match self.invoke(name, arguments) {
            Ok(results) => outcome::values(&results),
            Err(error) => outcome::failure(&error),
        }
    }
}
