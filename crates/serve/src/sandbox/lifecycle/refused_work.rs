//! The budget that refuses the background work of a sandbox.

use std::sync::Mutex;

use crate::lock::lock;

/// The budget that refuses the background work of a sandbox, until a turn of it ends.
#[derive(Default)]
pub(crate) struct RefusedWork(Mutex<Option<&'static str>>);

impl RefusedWork {
    /// The budget, if one refuses.
    pub(crate) fn budget(&self) -> Option<&'static str> {
        *lock(&self.0)
    }

    /// The work was refused for this budget; whether another refusal or none preceded it.
    pub(super) fn refuse(&self, budget: &'static str) -> bool {
        lock(&self.0).replace(budget) != Some(budget)
    }

    /// The work is not refused any more.
    pub(crate) fn clear(&self) {
        *lock(&self.0) = None;
    }
}
