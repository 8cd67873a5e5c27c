//! Compiled components.

use afresh_rewrite::direct_calls;
use wasmtime::component::Component;

use crate::{Engine, LoadError};

/// Compiles a component, or takes it from the cache.
pub(crate) fn compile(engine: &Engine, wasm: &[u8]) -> Result<Component, LoadError> {
    let compile = || engine.compile_anew(|engine| Component::new(engine, wasm));
    let Some(cache) = engine.cache() else { return compile() };
    let key = engine.cache_key(&[b"component", wasm]);
    if let Some(component) = cache.component(engine.wasmtime(), &key) {
        return Ok(component);
    }
    let component = compile()?;
    cache.keep_component(&key, &component);
    Ok(component)
}

/// As [`compile`], for the component of leases.
pub(crate) fn compile_direct(engine: &Engine, wasm: &[u8]) -> Result<Component, LoadError> {
    compile(engine, &direct_calls(wasm))
}
