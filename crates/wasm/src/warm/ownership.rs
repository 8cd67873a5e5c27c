//! The owner of a leased instance: the pool, or a session.

use std::ops::{Deref, DerefMut};

use crate::warm::reset::ResetInstance;

/// An instance on lease.
pub(crate) enum Ownership<'a> {
    /// Brought back to the warm state when the lease ends.
    Pooled(afresh_pool::Lease<'a, ResetInstance>),
    /// Stays as the lease leaves it.
    SessionInstance(SessionInstance<'a>),
}

/// A session's instance. Notes when its user panics, which may have been in the middle of a call.
pub(crate) struct SessionInstance<'a>(pub(crate) &'a mut ResetInstance);

impl Drop for SessionInstance<'_> {
    fn drop(&mut self) {
        self.0.unwound |= std::thread::panicking();
        self.0.settle_stack();
    }
}

impl Ownership<'_> {
    /// Drops a pool's instance instead of bringing it back; a session's stays its own.
    pub(crate) fn discard(self) {
        match self {
            Self::Pooled(lease) => lease.discard(),
            Self::SessionInstance(_) => {}
        }
    }
}

impl Deref for Ownership<'_> {
    type Target = ResetInstance;

    #[inline]
    fn deref(&self) -> &ResetInstance {
        match self {
            Self::Pooled(lease) => lease,
            Self::SessionInstance(own) => own.0,
        }
    }
}

impl DerefMut for Ownership<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut ResetInstance {
        match self {
            Self::Pooled(lease) => lease,
            Self::SessionInstance(own) => own.0,
        }
    }
}
