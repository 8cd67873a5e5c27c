//! The results of analysis and preparation: everything needed to make instances, except the
//! compiled module and the warm state. Small, so it is cached with the compiled module.

use std::sync::Arc;

use afresh_rewrite::{
    self as rewrite, PrepareError, PrepareOptions, PreparedModule, Roots, VisibleState, WarmState,
    prepare,
};
use serde::{Deserialize, Serialize};
use wasmtime::Module;

use crate::engine::linear::Shape;
use crate::guest::GuestOptions;
use crate::{Engine, LoadError, Mode, WarmError};

/// Options of running a guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// Reset or fresh, never auto.
    pub(crate) mode: Mode,
    /// Why not reset, when it was not possible.
    pub(crate) why_fresh: Option<String>,
    /// The declarations of its memories.
    pub(crate) shapes: Vec<Shape>,
    /// The size of one page of each memory, as a power of two.
    pub(crate) page_log2: Vec<u32>,
    /// The exports that read a warm instance's state; `None` when its state cannot be kept.
    pub(crate) visible: Option<VisibleState>,
    /// Globals, tables and segments that a reset restores.
    pub(crate) restored_items: usize,
    /// Whether calls may make objects on the store's collected heap, or give references to them.
    pub(crate) collects: bool,
}

/// Kind of file in the cache.
pub(crate) const KIND: &str = "plan";

impl Plan {
    /// Decides the mode of a module and prepares it. `warms` is whether a warm-up must be kept.
    pub(crate) fn make(
        wasm: &[u8],
        options: &GuestOptions,
        warms: bool,
    ) -> Result<(Self, PreparedModule), WarmError> {
        let (mode, prepared, why_fresh) = decide(wasm, options, warms)?;
        Ok((Self::of(mode, &prepared, why_fresh), prepared))
    }

    /// The plan of a guest whose state cannot be kept: every instance starts from the module.
    pub(crate) fn cold(
        wasm: &[u8],
        options: &GuestOptions,
        why: String,
    ) -> Result<(Self, PreparedModule), WarmError> {
        let prepared = prepare_as(wasm, options, false, false).map_err(LoadError::from)?;
        Ok((Self::of(Mode::Fresh, &prepared, Some(why)), prepared))
    }

    fn of(mode: Mode, prepared: &PreparedModule, why_fresh: Option<String>) -> Self {
        let items = prepared
            .restorable
            .as_ref()
            .map_or(0, |r| r.globals.len() + r.tables.len() + r.data.len() + r.elements.len());
        Self {
            mode,
            why_fresh,
            shapes: prepared.analysis.memories.iter().map(Shape::of).collect(),
            page_log2: prepared.analysis.memories.iter().map(|m| m.page_size_log2).collect(),
            visible: prepared.visible.clone(),
            restored_items: items,
            collects: prepared.analysis.collected,
        }
    }

    /// The name in the cache of the plan of a guest, or of its module with a state in it.
    pub(crate) fn key(
        engine: &Engine,
        digest: &[u8; 32],
        options: &GuestOptions,
        state_bytes: Option<&[u8]>,
    ) -> blake3::Hash {
        let build = concat!(env!("CARGO_PKG_VERSION"), " form 2");
        let how = format!("{build} {} {:?} {:?}", rewrite::BUILD, options.mode, options.roots);
        match state_bytes {
            None => engine.cache_key(&[digest, how.as_bytes()]),
            Some(state) => engine.cache_key(&[digest, how.as_bytes(), state]),
        }
    }

    /// The name in the cache of the compiled module. In fresh mode the state is part of it.
    pub(crate) fn module_key(
        engine: &Engine,
        digest: &[u8; 32],
        options: &GuestOptions,
        plan: &Self,
        state_bytes: &[u8],
    ) -> blake3::Hash {
        let state = (plan.mode == Mode::Fresh).then_some(state_bytes);
        Self::key(engine, digest, options, state)
    }

    /// Stores plan and compiled module of a guest that was warmed here where [`Plan::of_warm`]
    /// looks, so that its snapshots open again without analysis or compiler. `module` is kept under
    /// `compiled` already.
    pub(crate) fn keep_warm(
        &self,
        engine: &Engine,
        digest: &[u8; 32],
        options: &GuestOptions,
        state: &WarmState,
        compiled: Option<&blake3::Hash>,
        module: &Arc<Module>,
    ) {
        let (Some(cache), Some(compiled)) = (engine.cache(), compiled) else { return };
        if engine.inner.config.portable {
            // Other hosts take code and plan from the preparation.
            return;
        }
        let Ok(state) = postcard::to_allocvec(state) else { return };
        let module_key = Self::module_key(engine, digest, options, self, &state);
        cache.also_as(compiled, &module_key);
        engine.inner.loaded.enter(&module_key, module);
        cache.keep_value(&Self::key(engine, digest, options, None), KIND, self);
    }
}

fn prepare_as(
    wasm: &[u8],
    options: &GuestOptions,
    restorable: bool,
    bakeable: bool,
) -> Result<PreparedModule, PrepareError> {
    let roots = if restorable { options.roots.clone() } else { Roots::AllExports };
    prepare(wasm, &PrepareOptions { roots, restorable, bakeable })
}

/// Decides the mode and prepares the module for it.
fn decide(
    wasm: &[u8],
    options: &GuestOptions,
    warms: bool,
) -> Result<(Mode, PreparedModule, Option<String>), WarmError> {
    let try_as = |restorable, bakeable| prepare_as(wasm, options, restorable, bakeable);
    let refused = |mode: Mode, error: &PrepareError| WarmError::Refused {
        mode: mode.name(),
        reason: error.to_string(),
    };
    let mut why_fresh = None;
    if options.mode != Mode::Fresh {
        match try_as(true, true) {
            Ok(prepared) => return Ok((Mode::Reset, prepared, None)),
            Err(
                error @ (PrepareError::NotRestorable(_)
                | PrepareError::NotBakeable(_)
                | PrepareError::TooMany { .. }),
            ) => {
                if options.mode == Mode::Reset {
                    return Err(refused(Mode::Reset, &error));
                }
                why_fresh = Some(error.to_string());
            }
            Err(error) => return Err(LoadError::from(error).into()),
        }
    }
    match try_as(false, true) {
        Ok(prepared) => Ok((Mode::Fresh, prepared, why_fresh)),
        Err(error @ (PrepareError::NotBakeable(_) | PrepareError::TooMany { .. })) => {
            if warms {
                return Err(refused(Mode::Fresh, &error));
            }
            let prepared = try_as(false, false).map_err(LoadError::from)?;
            let memories = (0..).zip(&prepared.analysis.memories);
            if let Some((index, _)) = memories.into_iter().find(|(_, m)| m.shared) {
                return Err(WarmError::Refused {
                    mode: Mode::Fresh.name(),
                    reason: format!(
                        "memory {index} is shared between threads, which no guest has here; build it \
                         without threads"
                    ),
                });
            }
            Ok((Mode::Fresh, prepared, why_fresh.or_else(|| Some(error.to_string()))))
        }
        Err(error) => Err(LoadError::from(error).into()),
    }
}
