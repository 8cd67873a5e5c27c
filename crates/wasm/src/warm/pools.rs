//! Pools of instances, in either mode.

use std::sync::Arc;

use afresh_pool::{Limits, NextItem, Pool};

use crate::WarmError;
use crate::warm::fresh::{FreshMemories, FreshState};
use crate::warm::instance_state::WarmMemory;
use crate::warm::reset::{Blueprint, ResetInstance, ResetState};

/// The warm state and its pool.
pub(crate) enum Pools {
    Reset { state: Arc<ResetState>, pool: Pool<ResetInstance> },
    Fresh { state: Box<FreshState>, pool: Pool<FreshMemories> },
}

impl Pools {
    /// A pool whose first instance is there already.
    pub(crate) fn reset(
        state: Arc<ResetState>,
        first: ResetInstance,
        limits: Limits,
    ) -> Result<Self, WarmError> {
        let pool = Pool::new(limits);
        let mut first = Some(first);
        // Through the pool itself, so that its counts include the first instance.
        drop(pool.get(0, |_| first.take().map_or_else(|| state.make(), Ok))?);
        Ok(Self::Reset { state, pool })
    }

    /// The limits of the pool.
    pub(crate) fn limits(&self) -> Limits {
        match self {
            Pools::Reset { pool, .. } => pool.limits(),
            Pools::Fresh { pool, .. } => pool.limits(),
        }
    }

    /// A wait of a task for an instance.
    pub(crate) fn next_instance(&self) -> NextItem {
        match self {
            Pools::Reset { pool, .. } => pool.room(),
            Pools::Fresh { pool, .. } => pool.room(),
        }
    }

    pub(crate) fn memories(&self) -> &[WarmMemory] {
        match self {
            Pools::Reset { state, .. } => &state.memories,
            Pools::Fresh { state, .. } => &state.memories,
        }
    }

    pub(crate) fn blueprint(&self) -> &Blueprint {
        match self {
            Pools::Reset { state, .. } => &state.blueprint,
            Pools::Fresh { state, .. } => &state.blueprint,
        }
    }
}
