//! Whose the instance of a lease is: the pool's, or a session's.

use std::ops::{Deref, DerefMut};

use crate::reset::ResetInstance;

/// An instance on lease.
pub(crate) enum Loan<'a> {
    /// Brought back to the warm state when the lease ends.
    Pooled(afresh_pool::Lease<'a, ResetInstance>),
    /// Stays as the lease leaves it.
    Own(&'a mut ResetInstance),
}

impl Loan<'_> {
    /// Drops a pool's instance instead of bringing it back; a session's stays its own.
    pub(crate) fn discard(self) {
        match self {
            Self::Pooled(lease) => lease.discard(),
            Self::Own(_) => {}
        }
    }
}

impl Deref for Loan<'_> {
    type Target = ResetInstance;

    #[inline]
    fn deref(&self) -> &ResetInstance {
        match self {
            Self::Pooled(lease) => lease,
            Self::Own(instance) => instance,
        }
    }
}

impl DerefMut for Loan<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut ResetInstance {
        match self {
            Self::Pooled(lease) => lease,
            Self::Own(instance) => instance,
        }
    }
}
