//! The input of a warm-up from an analysed and rewritten module, except its compiled code.
//!
//! Both take seconds for a module of a hundred megabytes, and give the same each time. So the cache
//! of compiled guests keeps it with the code, under the digest of its module: another warm-up of
//! the same module neither reads its code nor compiles it. Promises: it is found for the same
//! bytes, the same mode and roots and the same rewriter alone, and one that is damaged is made
//! anew. Guests in fresh mode are prepared each time, for the state that their warm-up leaves is
//! written into the module.

use std::ops::Range;
use std::sync::Arc;

use afresh_memory::{ImageBuilder, PAGE_SIZE, page_align_up};
use afresh_rewrite::{PreparedModule, names};
use serde::{Deserialize, Serialize};
use wasmtime::Module;

use crate::engine::CompiledModule;
use crate::guest::GuestOptions;
use crate::host::beyond_limit;
use crate::warm::instance_state::WarmMemory;
use crate::warm::plan::Plan;
use crate::{Engine, Mode, WarmError};

/// The WASI reactor initialiser, which is run before the warm-up.
pub(crate) const INITIALIZE: &str = "_initialize";

/// Kind of file in the cache.
const KIND: &str = "prepared";

/// The input of a warm-up from a prepared module.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Preparation {
    pub(crate) plan: Plan,
    /// Functions that run before the warm-up's own calls, in order.
    pub(crate) first: Vec<String>,
    /// The memories that are not imported.
    memories: Vec<u32>,
    /// The initial contents of the memories, in the order of writing.
    segments: Vec<Segment>,
}

/// Bytes that belong in a memory before the guest starts.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Segment {
    memory: u32,
    offset: u64,
    /// Where they are in the module.
    place: Range<usize>,
}

/// In the cache.
#[derive(Serialize, Deserialize)]
struct CachedPreparation {
    preparation: Preparation,
    /// The cache key of the compiled module.
    compiled: [u8; 32],
}

impl Preparation {
    /// Decides the mode of a module and prepares it. `warms` is whether a warm-up must be kept.
    pub(crate) fn make(
        wasm: &[u8],
        options: &GuestOptions,
        warms: bool,
    ) -> Result<(Self, PreparedModule), WarmError> {
        Plan::make(wasm, options, warms).map(Self::of)
    }

    /// As [`Plan::cold`].
    pub(crate) fn cold(
        wasm: &[u8],
        options: &GuestOptions,
        why: String,
    ) -> Result<(Self, PreparedModule), WarmError> {
        Plan::cold(wasm, options, why).map(Self::of)
    }

    fn of((plan, prepared): (Plan, PreparedModule)) -> (Self, PreparedModule) {
        let analysis = &prepared.analysis;
        let automatic = analysis.has_start.then_some(names::START);
        let reactor = analysis.exported_functions.iter().any(|n| n == INITIALIZE);
        let first = automatic.into_iter().chain(reactor.then_some(INITIALIZE));
        let memories = (0..).zip(&analysis.memories).filter(|(_, m)| !m.imported);
        let segments = prepared.segments.iter().map(|segment| Segment {
            memory: segment.memory,
            offset: segment.offset,
            place: segment.place..segment.place + segment.bytes.len(),
        });
        let this = Self {
            plan,
            first: first.map(str::to_owned).collect(),
            memories: memories.map(|(index, _)| index).collect(),
            segments: segments.collect(),
        };
        (this, prepared)
    }

    /// The one that was kept for a module, and the module compiled.
    pub(crate) fn load_cached(
        engine: &Engine,
        wasm: &[u8],
        digest: &[u8; 32],
        options: &GuestOptions,
    ) -> Option<(Self, CompiledModule)> {
        let within = |segment: &Segment| wasm.get(segment.place.clone()).is_some();
        let fits = |preparation: &Self| preparation.segments.iter().all(within);
        if let Some((preparation, module, key)) = Self::of_cache(engine, engine, digest, options)
            && fits(&preparation)
        {
            return Some((preparation, CompiledModule { module, key: Some(key) }));
        }
        let (preparation, module) = Self::load_precompiled(engine, digest, options)?;
        // It has no entry in the cache of `engine`.
        fits(&preparation).then_some((preparation, CompiledModule { module, key: None }))
    }

    /// The one that was prepared and compiled in advance
    /// ([`EngineConfig::precompiled`](crate::EngineConfig)).
    pub(crate) fn load_precompiled(
        engine: &Engine,
        digest: &[u8; 32],
        options: &GuestOptions,
    ) -> Option<(Self, Arc<Module>)> {
        let other = engine.of_precompiled()?;
        let (preparation, module, _) = Self::of_cache(engine, &other, digest, options)?;
        Some((preparation, module))
    }

    /// The entry for a module in the cache of `keeper`, with its code loaded by `engine` and the
    /// key of the code.
    fn of_cache(
        engine: &Engine,
        keeper: &Engine,
        digest: &[u8; 32],
        options: &GuestOptions,
    ) -> Option<(Self, Arc<Module>, blake3::Hash)> {
        let cache = keeper.cache()?;
        let key = Plan::key(keeper, digest, options, None);
        let CachedPreparation { preparation, compiled } = cache.value(&key, KIND)?;
        if preparation.plan.mode != Mode::Reset {
            return None;
        }
        let key = blake3::Hash::from(compiled);
        Some((preparation, engine.module_in(&cache, &key)?, key))
    }

    /// Keeps it where [`Preparation::kept`] looks.
    pub(crate) fn keep(
        &self,
        engine: &Engine,
        digest: &[u8; 32],
        options: &GuestOptions,
        compiled: &CompiledModule,
    ) {
        if let (Some(cache), Some(compiled), Mode::Reset) =
            (engine.cache(), compiled.key, self.plan.mode)
        {
            let kept = CachedPreparation { preparation: self.clone(), compiled: compiled.into() };
            cache.keep_value(&Plan::key(engine, digest, options, None), KIND, &kept);
        }
    }

    /// The memories from segments alone: the initial memories of the module. A segment of one byte
    /// takes a page, so the declared sizes are compared with the limit before.
    pub(crate) fn cold_memories(
        &self,
        wasm: &[u8],
        memory_limit: usize,
    ) -> Result<Vec<WarmMemory>, WarmError> {
        let bad = |why: &str| WarmError::State(why.to_owned());
        let declared = self.memories.iter().filter_map(|&i| self.plan.shapes.get(i as usize));
        let bytes = declared.map(|shape| shape.minimum).fold(0, usize::saturating_add);
        if bytes > memory_limit {
            return Err(WarmError::Instantiate(beyond_limit(bytes)));
        }
        let mut memories = Vec::new();
        for &index in &self.memories {
            let shape = self.plan.shapes.get(index as usize).copied();
            let shape = shape.ok_or_else(|| bad("a memory is not declared"))?;
            let bytes = shape.minimum;
            if !shape.is_addressable() {
                return Err(bad("a memory is larger than the address space"));
            }
            let mut image = ImageBuilder::new(page_align_up(bytes) / PAGE_SIZE);
            for segment in self.segments.iter().filter(|s| s.memory == index) {
                let bytes = wasm.get(segment.place.clone());
                let bytes = bytes.ok_or_else(|| bad("a segment is outside the module"))?;
                image.segment(segment.offset as usize, bytes)?;
            }
            memories.push(WarmMemory { shape, image: image.build()?, bytes });
        }
        Ok(memories)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EngineConfig, Guest, WarmUp};

    /// Its memory and table have initial contents; the warm-up writes to a global and the memory.
    const TEXT: &str = r#"(module (memory (export "memory") 1) (table 2 funcref) (global $n (mut i32) (i32.const 0))
        (data (i32.const 8) "\07") (data (i32.const 9) "\01") (elem (i32.const 0) $add)
        (func $add (param i32) (result i32)
            (global.set $n (i32.add (global.get $n) (local.get 0)))
            (i32.store (i32.const 16) (i32.add (i32.load (i32.const 8)) (global.get $n)))
            (i32.load (i32.const 16)))
        (func (export "_initialize") (drop (call $add (i32.const 5))))
        (func (export "add") (param i32) (result i32)
            (call_indirect (param i32) (result i32) (local.get 0) (i32.const 0))))"#;

    fn warmed(engine: &Engine, wasm: &[u8]) -> i32 {
        let guest = Guest::new(engine, wasm).unwrap();
        let ten = WarmUp::new().call("add", &[wasmtime::Val::I32(10)]);
        let warm = guest.warm(ten).unwrap();
        let add = warm.entry::<i32, i32>("add").unwrap();
        let call = |n| warm.lease().unwrap().invoke(&add, n).unwrap();
        for _ in 0..2 {
            assert_eq!(call(100), 0x107 + 115);
        }
        call(0)
    }

    #[test]
    fn a_module_that_was_prepared_is_warmed_by_what_was_kept_and_a_damaged_entry_is_made_anew() {
        let folder = tempfile::tempdir().unwrap();
        let wasm = wat::parse_str(TEXT).unwrap();
        let config = EngineConfig { cache: Some(folder.path().to_owned()), ..Default::default() };
        let (digest, options) = (*blake3::hash(&wasm).as_bytes(), GuestOptions::default());
        let kept = |engine: &Engine| Preparation::load_cached(engine, &wasm, &digest, &options);
        let engine = Engine::new(config.clone()).unwrap();
        assert!(kept(&engine).is_none());
        assert_eq!(warmed(&engine, &wasm), 0x107 + 15);
        let entries = || {
            let entries = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path());
            entries.filter(|path| path.extension().is_some_and(|e| e == KIND)).collect::<Vec<_>>()
        };
        let [entry] = &entries()[..] else { panic!("{:?}", entries()) };

        // Another engine, as in another process.
        let engine = Engine::new(config.clone()).unwrap();
        let (made, prepared) = Preparation::make(&wasm, &options, true).unwrap();
        let (found, compiled) = kept(&engine).expect("it was kept");
        assert_eq!(compiled.key, Some(engine.cache_key(&[&prepared.module])));
        assert_eq!((&found.first, &found.memories), (&made.first, &made.memories));
        let memories = |of: &Preparation| {
            let mut bytes = vec![0; 64 << 10];
            of.cold_memories(&wasm, usize::MAX).unwrap()[0].image.read(0, &mut bytes);
            bytes
        };
        assert_eq!(memories(&found), memories(&made));
        assert_eq!(memories(&found)[8..10], [7, 1]);
        assert_eq!(warmed(&engine, &wasm), 0x107 + 15);
        // Other roots or another module have no entry.
        let roots = afresh_rewrite::Roots::Named(vec!["add".to_owned()]);
        let other = GuestOptions { roots, ..GuestOptions::default() };
        assert!(Preparation::load_cached(&engine, &wasm, &digest, &other).is_none());
        assert!(Preparation::load_cached(&engine, &wasm, &[0; 32], &options).is_none());
        assert!(Preparation::load_cached(&engine, &wasm[..40], &digest, &options).is_none());

        let whole = std::fs::read(entry).unwrap();
        let mut damaged = whole.clone();
        damaged[whole.len() / 2] ^= 1;
        for bytes in [&damaged[..], &whole[..whole.len() / 2], &[]] {
            std::fs::write(entry, bytes).unwrap();
            assert!(kept(&engine).is_none());
            assert_eq!(warmed(&engine, &wasm), 0x107 + 15);
            assert_eq!(std::fs::read(entry).unwrap(), whole, "it was made anew");
        }
        // The code may go without it.
        for path in std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path()) {
            if path.extension().is_some_and(|e| e == "cwasm") {
                std::fs::remove_file(path).unwrap();
            }
        }
        let engine = Engine::new(config).unwrap();
        assert!(kept(&engine).is_none());
        assert_eq!(warmed(&engine, &wasm), 0x107 + 15);
        assert!(kept(&engine).is_some());
    }

    #[test]
    fn a_guest_that_was_compiled_in_advance_needs_no_compiler_and_leaves_the_directory_alone() {
        let ahead = tempfile::tempdir().unwrap();
        let wasm = wat::parse_str(TEXT).unwrap();
        let (digest, options) = (*blake3::hash(&wasm).as_bytes(), GuestOptions::default());
        let makes = EngineConfig {
            cache: Some(ahead.path().to_owned()),
            portable: true,
            ..Default::default()
        };
        assert_eq!(warmed(&Engine::new(makes).unwrap(), &wasm), 0x107 + 15);
        let files = || {
            let files = std::fs::read_dir(ahead.path()).unwrap();
            let mut files: Vec<_> = files.map(|file| file.unwrap().file_name()).collect();
            files.sort();
            files
        };
        let shipped = files();
        assert_eq!(shipped.len(), 2, "{shipped:?}");

        let cache = tempfile::tempdir().unwrap();
        for cache in [None, Some(cache.path().to_owned())] {
            let precompiled = Some(ahead.path().to_owned());
            let config = EngineConfig { cache, precompiled, ..Default::default() };
            let engine = Engine::new(config.clone()).unwrap();
            assert_eq!(warmed(&engine, &wasm), 0x107 + 15);
            let (_, compiled) =
                Preparation::load_cached(&engine, &wasm, &digest, &options).expect("it is found");
            assert_eq!(compiled.key, None, "the cache has no copy of it");
            assert!(Preparation::load_cached(&engine, &wasm[..40], &digest, &options).is_none());
            // An engine of other code finds nothing.
            let fuel = Engine::new(EngineConfig { fuel: true, ..config }).unwrap();
            assert!(Preparation::load_precompiled(&fuel, &digest, &options).is_none());
        }
        assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0);
        assert_eq!(files(), shipped);
    }

    #[test]
    fn memories_beyond_the_limit_together_get_no_image() {
        let wasm = wat::parse_str(TEXT).unwrap();
        let (made, _) = Preparation::make(&wasm, &GuestOptions::default(), true).unwrap();
        assert_eq!(made.cold_memories(&wasm, 1 << 16).unwrap().len(), 1);
        let error = made.cold_memories(&wasm, (1 << 16) - 1).unwrap_err();
        assert!(error.to_string().contains("memory_limit"), "{error}");
    }
}
