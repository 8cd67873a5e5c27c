//! Sandboxes from their creation to their end: calls, saves, forks and the care of idle ones.

pub(crate) mod background;
pub(crate) mod creation;
pub(crate) mod key_turns;
mod processor_turn;
pub(crate) mod random;
pub(crate) mod refusals;
pub(crate) mod refused_work;
pub(crate) mod registry;
pub(crate) mod restart;
pub(crate) mod sandbox;
pub(crate) mod sandbox_metrics;
pub(crate) mod saving;
pub(crate) mod tasks;
pub(crate) mod termination;
pub(crate) mod undo_point;
