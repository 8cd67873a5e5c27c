//! The compiled module of a guest whose warm state is known.

use std::sync::Arc;

use afresh_rewrite::{WarmState, bake};
use wasmtime::Module;

use crate::guest::GuestOptions;
use crate::warm::plan::{KIND, Plan};
use crate::warm::preparation::Preparation;
use crate::{Engine, Mode, WarmError};

/// The plan and compiled module for a guest whose warm state is known: from the cache, or made
/// from the guest's bytes, which `wasm` fetches.
pub(crate) fn warm_module(
    engine: &Engine,
    digest: &[u8; 32],
    options: &GuestOptions,
    state: &WarmState,
    state_bytes: &[u8],
    wasm: impl FnOnce() -> Result<Vec<u8>, WarmError>,
) -> Result<(Plan, Arc<Module>), WarmError> {
    let plan_key = Plan::key(engine, digest, options, None);
    let module_key = |plan: &Plan| Plan::module_key(engine, digest, options, plan, state_bytes);
    if let Some(cache) = engine.cache()
        && let Some(plan) = cache.value::<Plan>(&plan_key, KIND)
        && let Some(module) = engine.kept_module(&module_key(&plan))
    {
        return Ok((plan, module));
    }
    if let Some((preparation, module)) = Preparation::load_precompiled(engine, digest, options) {
        return Ok((preparation.plan, module));
    }
    let (plan, prepared) = Plan::make(&wasm()?, options, true)?;
    let compile = |wasm: &[u8]| engine.compile_anew(|engine| Module::new(engine, wasm));
    let module = match plan.mode {
        Mode::Fresh => {
            let baked = bake(&prepared, state).map_err(|e| WarmError::State(e.to_string()))?;
            compile(&baked)?
        }
        Mode::Auto | Mode::Reset => compile(&prepared.module)?,
    };
    let module = Arc::new(module);
    if let Some(cache) = engine.cache() {
        engine.keep_module(&module_key(&plan), &module);
        cache.keep_value(&plan_key, KIND, &plan);
    }
    Ok((plan, module))
}
