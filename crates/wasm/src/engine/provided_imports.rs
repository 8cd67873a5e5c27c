//! The imports that afresh provides for modules: WASI preview 1, and `afresh.generation`.
//!
//! They are defined once for each engine, on first use, because a definition takes 0.16 ms and a
//! copy a tenth of that. Definitions on another thread, while the module is read, made no start
//! faster.

use afresh_sys::InheritedCell;
use wasmtime::{Caller, Linker};

use crate::host::{Host, preview1};
use crate::{Engine, LoadError};

/// Linkers with these imports.
#[derive(Default)]
pub(super) struct ProvidedImports {
    blocking: InheritedCell<Linker<Host>>,
    asynchronous: InheritedCell<Linker<Host>>,
}

impl Engine {
    /// A linker with the provided imports, for calls that may wait or for calls that block.
    pub(crate) fn provided(&self, asynchronous: bool) -> Result<&Linker<Host>, LoadError> {
        let provided = &self.inner.provided;
        let cell = if asynchronous { &provided.asynchronous } else { &provided.blocking };
        if let Some(linker) = cell.get() {
            return Ok(linker);
        }
        let linker = define(self.wasmtime(), asynchronous).map_err(LoadError::Link)?;
        Ok(cell.get_or_make(|| linker))
    }
}

fn define(engine: &wasmtime::Engine, asynchronous: bool) -> wasmtime::Result<Linker<Host>> {
    let mut linker = Linker::new(engine);
    match asynchronous {
        false => wasmtime_wasi::p1::add_to_linker_sync(&mut linker, Host::p1)?,
        true => wasmtime_wasi::p1::add_to_linker_async(&mut linker, Host::p1)?,
    }
    linker.allow_shadowing(true);
    preview1::link(&mut linker, asynchronous)?;
    linker.allow_shadowing(false);
    linker.func_wrap("afresh", "generation", |caller: Caller<'_, Host>| {
        caller.data().generation() as i64
    })?;
    Ok(linker)
}
