//! A child of a fork gets a private copy of all memory.

use std::sync::Arc;

use crate::{PageRange, Reservation, SysError};

/// A no-op: withholds nothing.
#[derive(Debug)]
pub struct WithholdGuard(());

/// Nothing is withheld: no page is missing.
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
