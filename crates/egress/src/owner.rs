//! The owner of guests, such as a tenant. Limits of this process have a share for each.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

/// An owner of guests. Guests that get none have the default one together.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionOwner(Option<Arc<str>>);

thread_local! {
    /// The owner of the guest that runs on this thread.
    static PRESENT: RefCell<ConnectionOwner> = const { RefCell::new(ConnectionOwner(None)) };
}

impl ConnectionOwner {
    /// The owner with this name.
    #[must_use]
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self(Some(name.into()))
    }

    /// The owner of the guest that runs on this thread.
    #[must_use]
    pub fn present() -> Self {
        PRESENT.with_borrow(Clone::clone)
    }

    /// Runs a guest, whose connections count for this owner.
    pub fn within<T>(&self, run: impl FnOnce() -> T) -> T {
        struct Restore(ConnectionOwner);
        impl Drop for Restore {
            fn drop(&mut self) {
                PRESENT.set(std::mem::take(&mut self.0));
            }
        }
        let _restore = Restore(PRESENT.replace(self.clone()));
        run()
    }
}

impl fmt::Display for ConnectionOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(name) => write!(f, "the owner `{name}`"),
            None => f.write_str("the default owner"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_present_owner_is_that_of_the_innermost_caller() {
        let (outer, inner) = (ConnectionOwner::new("outer"), ConnectionOwner::new("inner"));
        outer.within(|| {
            inner.within(|| assert_eq!(ConnectionOwner::present(), inner));
            assert_eq!(ConnectionOwner::present(), outer);
        });
        assert_eq!(ConnectionOwner::present(), ConnectionOwner::default());
    }
}
