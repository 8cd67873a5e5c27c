//! Compiled code of guests in a folder, so that contests with the same guest compile it once. The
//! tables of a report share one folder.
//!
//! Without a folder every contest compiles its guests. No figure contains a compilation, and code
//! from the folder is loaded from memory, as that of [`Module::new`] is.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use afresh_wasm::{Engine, EngineConfig};
use wasmtime::Module;
#[cfg(feature = "http")]
use wasmtime::component::Component;

static FOLDER: OnceLock<PathBuf> = OnceLock::new();

/// Sets the folder of this process. Only its first call has an effect. The folder is trusted as
/// this program itself, and must exist.
pub fn set_folder(folder: &Path) {
    let _ = FOLDER.set(folder.to_owned());
}

/// The folder of this process, for servers that are processes of their own.
pub(crate) fn folder() -> Option<&'static Path> {
    FOLDER.get().map(PathBuf::as_path)
}

/// An engine of afresh that has nothing compiled in that the rivals do not have.
pub(crate) fn engine() -> anyhow::Result<Engine> {
    let cache = FOLDER.get().cloned();
    Ok(Engine::new(EngineConfig { timeouts: false, cache, ..EngineConfig::default() })?)
}

/// A module compiled for an engine of a rival.
pub(crate) fn module(engine: &wasmtime::Engine, wasm: &[u8]) -> wasmtime::Result<Module> {
    match FOLDER.get() {
        Some(folder) => module_in(folder, engine, wasm),
        None => Module::new(engine, wasm),
    }
}

/// As [`module`], in a folder that is trusted as this program itself.
pub(crate) fn module_in(
    folder: &Path,
    engine: &wasmtime::Engine,
    wasm: &[u8],
) -> wasmtime::Result<Module> {
    let code = code(folder, engine, wasm, || engine.precompile_module(wasm))?;
    // SAFETY: this program compiled these bytes for an engine with this configuration, now or
    // earlier: see `code`.
    unsafe { Module::deserialize(engine, code) }
}

/// A component compiled for an engine of a rival.
#[cfg(feature = "http")]
pub(crate) fn component(engine: &wasmtime::Engine, wasm: &[u8]) -> wasmtime::Result<Component> {
    let Some(folder) = FOLDER.get() else { return Component::new(engine, wasm) };
    let code = code(folder, engine, wasm, || engine.precompile_component(wasm))?;
    // SAFETY: as in `module_in`.
    unsafe { Component::deserialize(engine, code) }
}

/// The compiled code of `wasm` for engines like this one: the file in the folder, which an earlier
/// call wrote whole under a name of guest and configuration, or the result of `compile`.
fn code(
    folder: &Path,
    engine: &wasmtime::Engine,
    wasm: &[u8],
    compile: impl FnOnce() -> wasmtime::Result<Vec<u8>>,
) -> wasmtime::Result<Vec<u8>> {
    let mut hasher = DefaultHasher::new();
    wasm.hash(&mut hasher);
    engine.precompile_compatibility_hash().hash(&mut hasher);
    let file = folder.join(format!("{:016x}.cwasm", hasher.finish()));
    if let Ok(code) = std::fs::read(&file) {
        return Ok(code);
    }
    let code = compile()?;
    let new = file.with_extension("new");
    std::fs::write(&new, &code)?;
    std::fs::rename(&new, &file)?;
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_from_the_folder_computes_the_same_and_other_engines_get_other_code() {
        let folder = tempfile::tempdir().unwrap();
        let wasm = crate::modules::SMALL_MODULE.module();
        let files = || std::fs::read_dir(folder.path()).unwrap().count();
        let engine = wasmtime::Engine::default();
        let sizes: Vec<usize> = (0..2)
            .map(|_| {
                let module = module_in(folder.path(), &engine, &wasm).unwrap();
                assert_eq!(files(), 1);
                module.serialize().unwrap().len()
            })
            .collect();
        assert_eq!(sizes[0], sizes[1]);
        let config = |fuel| {
            let mut config = wasmtime::Config::new();
            wasmtime::Engine::new(config.consume_fuel(fuel)).unwrap()
        };
        module_in(folder.path(), &config(true), &wasm).unwrap();
        assert_eq!(files(), 2);
        // A file that is no code is refused.
        for file in std::fs::read_dir(folder.path()).unwrap() {
            std::fs::write(file.unwrap().path(), b"no code").unwrap();
        }
        assert!(module_in(folder.path(), &engine, &wasm).is_err());
    }
}
