//! Thawing: a warm guest out of a frozen one, without running its warm-up.

use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh_files::{Budget, Tree};
use afresh_pool::Pool;
use afresh_rewrite::VisibleState;

use crate::engine::linear::Shape;
use crate::guest::GuestOptions;
use crate::host::clock::Clock;
use crate::warm::Times;
use crate::warm::fresh::FreshState;
use crate::warm::frozen::Frozen;
use crate::warm::module::warm_module;
use crate::warm::plan::Plan;
use crate::warm::pools::Pools;
use crate::warm::reset::{Blueprint, ResetState};
use crate::{Engine, Mode, ThawError, Warm, WarmError};

impl Warm {
    /// A warm guest in the state of `frozen`. If a cache of compiled guests
    /// ([`crate::EngineConfig::cache`]) has this one, nothing is analysed or compiled, and only the
    /// pages that calls touch are read from a snapshot.
    ///
    /// `options` must provide the same imports as when it was frozen.
    ///
    /// # Errors
    /// [`ThawError`] when state and module do not fit together, or as [`crate::Guest::warm`].
    pub fn thaw(
        engine: &Engine,
        options: &GuestOptions,
        frozen: &Frozen,
    ) -> Result<Self, ThawError> {
        engine
            .keep_limits(options.timeout, options.fuel, options.watch.is_some())
            .map_err(WarmError::from)?;
        if frozen.is_component() {
            return Err(ThawError::State(
                "it is a component; thaw it with `WarmComponent::thaw`".to_owned(),
            ));
        }
        let options = &with_files(options, frozen);
        let started = Instant::now();
        let state_bytes =
            postcard::to_allocvec(&frozen.state).map_err(|e| ThawError::State(e.to_string()))?;
        let (plan, module) = warm_module(
            engine,
            &frozen.program.digest,
            options,
            &frozen.state,
            &state_bytes,
            || frozen.program.read().map_err(|e| WarmError::State(e.to_string())),
        )?;
        check(&plan, frozen)?;
        let clock = Clock::from(frozen.read);
        let blueprint =
            Blueprint::new(engine, options, &module, &plan, &clock).map_err(WarmError::from)?;
        frozen.check_limit(blueprint.stores.memory_limit)?;
        blueprint.stores.thaw_files(frozen.files.as_ref())?;
        let compile = started.elapsed();
        let memories = frozen.memories.clone();
        let state = frozen.state.clone();
        let pools = match plan.mode {
            Mode::Fresh => {
                let state = Box::new(FreshState { blueprint, memories, state: Some(state) });
                Pools::Fresh { state, pool: Pool::new(options.limits) }
            }
            Mode::Auto | Mode::Reset => {
                let state = Arc::new(ResetState { blueprint, memories, state });
                let first = state.make()?;
                Pools::reset(state, first, options.limits)?
            }
        };
        let times = Times { compile, warm_up: Duration::ZERO };
        let program = frozen.program.clone();
        Ok(Self::finish(options, pools, false, plan, times, program, frozen.read)?)
    }
}

/// The same options, with a file tree where the frozen guest has one, under the budget of the
/// options'.
pub(crate) fn with_files(options: &GuestOptions, frozen: &Frozen) -> GuestOptions {
    let mut options = options.clone();
    if frozen.files.is_some() && options.wasi.files.is_none() {
        options.wasi.files = Some(Tree::new(Budget::default()));
    }
    options
}

/// Refuses a state that does not belong to this module: it must have exactly the parts that the
/// module exposes.
fn check(plan: &Plan, frozen: &Frozen) -> Result<(), ThawError> {
    let bad = |why: &str| Err(ThawError::State(why.to_owned()));
    let Some(visible) = &plan.visible else {
        return bad("the warm state of this module cannot be kept");
    };
    check_state(visible, plan.shapes.iter().copied(), &plan.page_log2, frozen)
}

/// As [`check`], against the known properties of the module.
pub(crate) fn check_state(
    visible: &VisibleState,
    shapes: impl Iterator<Item = Shape>,
    page_log2: &[u32],
    frozen: &Frozen,
) -> Result<(), ThawError> {
    let bad = |why: &str| Err(ThawError::State(why.to_owned()));
    if !frozen.memories.iter().map(|m| m.shape).eq(shapes) {
        return bad("its memories are not those of the module");
    }
    if frozen.memories.iter().any(|m| m.bytes < m.shape.minimum) {
        return bad("a memory is smaller than the module declares it");
    }
    let state = &frozen.state;
    let pages = frozen.memories.iter().zip(page_log2).map(|(m, log2)| (m.bytes >> log2) as u64);
    if !pages.eq(state.memories.iter().copied()) {
        return bad("its memories have other sizes than stated");
    }
    if !state.globals.keys().eq(&visible.globals) || !state.tables.keys().eq(&visible.tables) {
        return bad("its globals and tables are not those of the module");
    }
    let known = |set: &std::collections::BTreeSet<u32>, all: &[u32]| {
        set.iter().all(|index| all.binary_search(index).is_ok())
    };
    if !known(&state.dropped_data, &visible.data)
        || !known(&state.dropped_elements, &visible.elements)
    {
        return bad("its dropped segments are not those of the module");
    }
    Ok(())
}
