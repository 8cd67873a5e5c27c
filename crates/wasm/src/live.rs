//! A live instance on lease, in either mode: the one place where a lease depends on the mode.
//!
//! Promises: a call gets the parts of its instance from [`Parts`], which are the same in both
//! modes. Operations that depend on the mode (reading the state, comparing, unusual ends) are
//! implemented here, once each.

use std::any::Any;

use wasmtime::{
    AsContext, AsContextMut, Extern, Instance, Memory, Store, StoreContextMut, TypedFunc,
    WasmParams, WasmResults,
};

use crate::compare::Comparison;
use crate::fresh::FreshMemories;
use crate::host::Host;
use crate::lease::Entry;
use crate::linear::GuestMemory;
use crate::ownership::Ownership;
use crate::reset::Present;
use crate::{CallError, FreezeError, WarmError};

/// An instance on lease.
#[allow(clippy::large_enum_variant, reason = "one of them is on every lease's own stack")]
pub(crate) enum Live<'a> {
    /// From a pool or a session, which resets it when the lease ends.
    Reset(Ownership<'a>),
    /// Dropped with the lease.
    Fresh(Fresh<'a>),
}

/// An instance that was made for the lease.
pub(crate) struct Fresh<'a> {
    /// Has one instance; dropped before the memories come back to their pool.
    pub(crate) store: Store<Host>,
    /// The store's only one.
    pub(crate) instance: Instance,
    /// As [`Parts::unfinished`].
    pub(crate) unfinished: bool,
    /// The memories of the instance. In the warm state when the pool hands them out.
    pub(crate) memories: afresh_pool::Lease<'a, FreshMemories>,
}

/// The parts of an instance that calls need.
pub(crate) struct Parts<'l> {
    /// Its host state is that of the present lease.
    pub(crate) store: StoreContextMut<'l, Host>,
    pub(crate) instance: Instance,
    /// A call has begun and is not over: its future runs, was dropped or leaked, or a host function
    /// panicked. The state that such a call left in the store is never read; the instance is
    /// replaced when the lease ends.
    pub(crate) unfinished: &'l mut bool,
    /// Functions that were called before; none for an instance that will not be called again.
    pub(crate) known: Option<&'l mut TypedFunctions>,
}

/// Functions that leases call, typed, by entry number. Each is of the instance that it is kept
/// with.
#[derive(Default)]
pub(crate) struct TypedFunctions(Vec<Option<Box<dyn Any + Send>>>);

impl TypedFunctions {
    /// The function behind an entry.
    #[inline]
    pub(crate) fn find<P, R>(
        &mut self,
        store: &mut StoreContextMut<'_, Host>,
        instance: Instance,
        entry: &Entry<P, R>,
    ) -> Result<&TypedFunc<P, R>, CallError>
    where
        P: WasmParams + 'static,
        R: WasmResults + 'static,
    {
        if !matches!(self.0.get(entry.number), Some(Some(_))) {
            self.learn(store, instance, entry)?;
        }
        let found = self.0[entry.number].as_ref().and_then(|func| func.downcast_ref());
        found.ok_or_else(|| entry.foreign())
    }

    /// Looks an entry up in an instance that sees it for the first time.
    #[cold]
    fn learn<P, R>(
        &mut self,
        store: &mut StoreContextMut<'_, Host>,
        instance: Instance,
        entry: &Entry<P, R>,
    ) -> Result<(), CallError>
    where
        P: WasmParams + 'static,
        R: WasmResults + 'static,
    {
        let func = typed(store, instance, entry)?;
        if self.0.len() <= entry.number {
            self.0.resize_with(entry.number + 1, || None);
        }
        self.0[entry.number] = Some(Box::new(func) as Box<dyn Any + Send>);
        Ok(())
    }
}

/// The typed function behind an entry, in one instance.
pub(crate) fn typed<P: WasmParams, R: WasmResults>(
    store: &mut StoreContextMut<'_, Host>,
    instance: Instance,
    entry: &Entry<P, R>,
) -> Result<TypedFunc<P, R>, CallError> {
    let Some(Extern::Func(func)) = instance.get_module_export(&mut *store, &entry.export) else {
        return Err(entry.foreign());
    };
    func.typed(&*store).map_err(|e| CallError::Arguments {
        name: entry.name.clone(),
        expected: func.ty(&*store).to_string(),
        reason: format!("{e:#}"),
    })
}

impl<'a> Live<'a> {
    #[inline]
    pub(crate) fn parts(&mut self) -> Parts<'_> {
        match self {
            Self::Reset(lease) => {
                let item = &mut **lease;
                Parts {
                    store: item.store.as_context_mut(),
                    instance: item.instance,
                    unfinished: &mut item.unfinished,
                    known: Some(&mut item.known),
                }
            }
            Self::Fresh(fresh) => Parts {
                store: fresh.store.as_context_mut(),
                instance: fresh.instance,
                unfinished: &mut fresh.unfinished,
                known: None,
            },
        }
    }

    /// Whether a call was cut off.
    pub(crate) fn is_unfinished(&self) -> bool {
        match self {
            Self::Reset(lease) => lease.unfinished,
            Self::Fresh(fresh) => fresh.unfinished,
        }
    }

    /// The lease's host state.
    pub(crate) fn host(&self) -> &Host {
        match self {
            Self::Reset(lease) => lease.store.as_context().data(),
            Self::Fresh(fresh) => fresh.store.data(),
        }
    }

    #[inline]
    pub(crate) fn host_mut(&mut self) -> &mut Host {
        match self {
            Self::Reset(lease) => lease.store.data_mut(),
            Self::Fresh(fresh) => fresh.store.data_mut(),
        }
    }

    /// A memory that it runs on, by its place among those that the module defines.
    pub(crate) fn memory(&self, number: usize) -> Option<&GuestMemory> {
        match self {
            Self::Reset(lease) => lease.memories.get(number).map(|(memory, _)| &**memory),
            Self::Fresh(fresh) => fresh.memories.memories.get(number).map(|memory| &**memory),
        }
    }

    pub(crate) fn memories(&self) -> impl Iterator<Item = &GuestMemory> {
        (0..).map_while(|number| self.memory(number))
    }

    /// wasmtime's own handle of the first memory, where it is at hand.
    pub(crate) fn handle(&self) -> Option<Memory> {
        match self {
            Self::Reset(lease) => lease.memories.first().map(|(_, handle)| *handle),
            Self::Fresh(_) => None,
        }
    }

    /// The present state: memories, everything else, and the reading of the clock.
    pub(crate) fn state(&mut self) -> Result<Present, FreezeError> {
        match self {
            Self::Reset(lease) => Ok(lease.freeze()?),
            Self::Fresh(_) => Err(FreezeError::State(
                "the globals of an instance in fresh mode cannot be read; run it in reset mode"
                    .to_owned(),
            )),
        }
    }

    /// Differences from the warm state.
    pub(crate) fn compare(&mut self) -> Result<Comparison, WarmError> {
        match self {
            Self::Reset(lease) => lease.compare(),
            Self::Fresh(fresh) => fresh.memories.compare(),
        }
    }

    /// Drops the instance, and its memories, instead of resetting it.
    pub(crate) fn discard(self) {
        match self {
            Self::Reset(lease) => lease.discard(),
            Self::Fresh(Fresh { store, memories, .. }) => {
                drop(store);
                memories.discard();
            }
        }
    }
}
