//! A directory of compiled guests, kept between runs.
//!
//! A file in it is native code, trusted as much as the program itself, so the directory must be the
//! embedder's own; it is off by default. A file of another wasmtime or another configuration is refused
//! by wasmtime and made anew. A cache that cannot be written makes the next start slower, nothing else.

use std::path::{Path, PathBuf};

use wasmtime::{Engine, Module};

/// The cache in a directory.
pub(crate) struct Cache<'a> {
    directory: &'a Path,
}

impl<'a> Cache<'a> {
    pub(crate) fn new(directory: &'a Path) -> Self {
        Self { directory }
    }

    fn path(&self, key: &blake3::Hash, kind: &str) -> PathBuf {
        self.directory.join(format!("{}.{kind}", key.to_hex()))
    }

    /// The module kept under `key`.
    pub(crate) fn module(&self, engine: &Engine, key: &blake3::Hash) -> Option<Module> {
        // SAFETY: the directory is the embedder's own, as `EngineConfig::cache` demands.
        unsafe { Module::deserialize_file(engine, self.path(key, "cwasm")) }.ok()
    }

    pub(crate) fn keep_module(&self, key: &blake3::Hash, module: &Module) {
        if let Ok(code) = module.serialize() {
            self.keep(key, "cwasm", &code);
        }
    }

    /// The bytes kept under `key` and `kind`.
    pub(crate) fn bytes(&self, key: &blake3::Hash, kind: &str) -> Option<Vec<u8>> {
        std::fs::read(self.path(key, kind)).ok()
    }

    pub(crate) fn keep(&self, key: &blake3::Hash, kind: &str, bytes: &[u8]) {
        let temporary = self.path(key, &format!("{kind}-{}", std::process::id()));
        let _ = std::fs::create_dir_all(self.directory)
            .and_then(|()| std::fs::write(&temporary, bytes))
            .and_then(|()| std::fs::rename(&temporary, self.path(key, kind)));
    }
}
