//! Compiled modules that guests of an engine use, shared between guests of one module.
//!
//! Promises: the key of a module is its source alone, and it is dropped with the last guest that
//! uses it. No thread waits here for long, and a forked child does not wait: while another thread
//! has the lock, the module is read or made again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use wasmtime::Module;

/// The modules of an engine, by their keys in the cache.
#[derive(Default)]
pub(crate) struct LoadedModules {
    modules: Mutex<HashMap<blake3::Hash, Weak<Module>>>,
}

impl LoadedModules {
    /// The module of this key, if a guest uses it.
    pub(crate) fn find(&self, key: &blake3::Hash) -> Option<Arc<Module>> {
        self.modules.try_lock().ok()?.get(key)?.upgrade()
    }

    /// Lets others find it.
    pub(crate) fn enter(&self, key: &blake3::Hash, module: &Arc<Module>) {
        if let Ok(mut modules) = self.modules.try_lock() {
            modules.retain(|_, module| module.strong_count() > 0);
            modules.insert(*key, Arc::downgrade(module));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A module with nothing in it.
    const EMPTY: &[u8] = b"\0asm\x01\0\0\0";

    #[test]
    fn a_module_is_found_while_it_is_in_use() {
        let engine = wasmtime::Engine::default();
        let module = Arc::new(Module::new(&engine, EMPTY).unwrap());
        let (one, other) = (blake3::hash(b"one"), blake3::hash(b"other"));
        let loaded = LoadedModules::default();
        loaded.enter(&one, &module);
        assert!(Arc::ptr_eq(&loaded.find(&one).unwrap(), &module));
        assert!(loaded.find(&other).is_none());
        drop(module);
        assert!(loaded.find(&one).is_none());
        loaded.enter(&other, &Arc::new(Module::new(&engine, EMPTY).unwrap()));
        assert_eq!(loaded.modules.lock().unwrap().len(), 1, "an unused module is dropped");
    }
}
