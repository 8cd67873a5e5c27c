//! No signals.

use std::sync::atomic::AtomicBool;

use crate::SysError;

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// A flag that is never set.
///
/// # Errors
/// None.
pub fn watch() -> Result<&'static AtomicBool, SysError> {
    Ok(&REQUESTED)
}

/// Signals that never come.
#[derive(Clone, Copy, Debug)]
pub struct AwaitedSignals;

impl AwaitedSignals {
    /// Blocks nothing.
    ///
    /// # Errors
    /// None.
    pub fn block(_: &[i32]) -> Result<Self, SysError> {
        Ok(Self)
    }

    /// None comes.
    #[must_use]
    pub fn wait(&self) -> Option<i32> {
        None
    }
}
