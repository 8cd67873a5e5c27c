//! A store whose references to collected objects end with each lease.
//!
//! wasmtime roots every reference that a call gives to the host until the scope around it ends.
//! Without a scope that is the life of the store, and the object, its referents and the host data
//! behind an `externref` stay alive with it. Here the scope is the lease: a reference from one call
//! can be passed to the next call of the same lease, and to no other.
//!
//! Promises: after [`ScopedStore::renew`] nothing that the host was given before is rooted, and
//! using it is an error. May break it: an `OwnedRooted` that a host function keeps.
//!
//! A `RootScope` owns its store and never returns it; its drop ends the scope and drops the
//! store. So it owns a loan here, which returns the store when it is dropped.

use std::sync::Arc;

use afresh_sys::planted::{Bug, is};
use wasmtime::{AsContext, AsContextMut, RootScope, Store, StoreContext, StoreContextMut};

use crate::engine::exclusive::ExclusiveCell;
use crate::host::Host;

type StoreCell = Arc<ExclusiveCell<Option<Store<Host>>>>;

/// A store on loan to a scope.
struct ScopedLoan {
    /// `None` only once it is dropped.
    store: Option<Store<Host>>,
    home: StoreCell,
}

impl Drop for ScopedLoan {
    fn drop(&mut self) {
        *self.home.lock() = self.store.take();
    }
}

impl AsContext for ScopedLoan {
    type Data = Host;

    #[inline]
    fn as_context(&self) -> StoreContext<'_, Host> {
        match &self.store {
            Some(store) => store.as_context(),
            None => unreachable!("a loan has its store until it is dropped"),
        }
    }
}

impl AsContextMut for ScopedLoan {
    #[inline]
    fn as_context_mut(&mut self) -> StoreContextMut<'_, Host> {
        match &mut self.store {
            Some(store) => store.as_context_mut(),
            None => unreachable!("a loan has its store until it is dropped"),
        }
    }
}

/// A store, and the scope of the present lease.
pub(crate) struct ScopedStore {
    /// `None` only within `renew`, and after a panic there.
    scope: Option<RootScope<ScopedLoan>>,
    home: StoreCell,
}

impl ScopedStore {
    /// Opens the first scope. Existing roots stay, so the store must have none.
    pub(crate) fn new(store: Store<Host>) -> Self {
        let home = StoreCell::new(ExclusiveCell::new(None));
        let loan = ScopedLoan { store: Some(store), home: home.clone() };
        Self { scope: Some(RootScope::new(loan)), home }
    }

    /// The store's data.
    #[inline]
    pub(crate) fn data_mut(&mut self) -> &mut Host {
        let mut store = self.as_context_mut();
        let data: *mut Host = store.data_mut();
        // SAFETY: the data is in the store's own allocation, which lives until `self` drops the
        // store. `self` stays borrowed until the reference ends, so no other code reaches the
        // store. Only the context in between, which a scope does not let out, makes this unknown to
        // the compiler.
        unsafe { &mut *data }
    }

    /// Ends the scope, lets `look` at the store while nothing is rooted, and opens the next.
    pub(crate) fn renew<R>(&mut self, look: impl FnOnce(&mut Store<Host>) -> R) -> R {
        drop(self.scope.take());
        let Some(mut store) = self.home.lock().take() else {
            unreachable!("the loan brought its store home")
        };
        let result = look(&mut store);
        let loan = ScopedLoan { store: Some(store), home: self.home.clone() };
        self.scope = Some(RootScope::new(loan));
        result
    }
}

impl AsContext for ScopedStore {
    type Data = Host;

    #[inline]
    fn as_context(&self) -> StoreContext<'_, Host> {
        match &self.scope {
            Some(scope) => scope.as_context(),
            None => unreachable!("a scope is always open"),
        }
    }
}

impl AsContextMut for ScopedStore {
    #[inline]
    fn as_context_mut(&mut self) -> StoreContextMut<'_, Host> {
        match &mut self.scope {
            Some(scope) => scope.as_context_mut(),
            None => unreachable!("a scope is always open"),
        }
    }
}

/// Takes the exception that a failed call, or a host function, left in the store, and forgets it.
pub(crate) fn forget_exception(mut store: impl AsContextMut) {
    if store.as_context_mut().has_pending_exception() && !is(Bug::Exception) {
        let mut scope = RootScope::new(store);
        scope.as_context_mut().take_pending_exception();
    }
}
