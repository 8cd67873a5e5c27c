//! Nothing forks in the interpreter.

use std::sync::Arc;

use crate::{PageRange, Reservation, SysError};

/// A no-op: withholds nothing.
#[derive(Debug)]
pub struct WithholdGuard(());

/// The interpreter has no children to keep memory from.
///
/// # Errors
/// None.
pub fn withhold(_: &Arc<Reservation>, _: PageRange) -> Result<WithholdGuard, SysError> {
    Ok(WithholdGuard(()))
}

/// As [`withhold`], of everything.
#[must_use]
pub fn withhold_all(_: &Arc<Reservation>) -> WithholdGuard {
    WithholdGuard(())
}
