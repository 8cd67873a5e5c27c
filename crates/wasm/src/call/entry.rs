//! Typed exports, resolved once for a guest, and the functions behind them in one instance.

use std::any::Any;
use std::marker::PhantomData;

use wasmtime::{
    Extern, Instance, ModuleExport, StoreContextMut, TypedFunc, WasmParams, WasmResults,
};

use crate::CallError;
use crate::host::Host;

/// A typed export, resolved once by [`crate::Warm::entry`].
pub struct Entry<P, R> {
    pub(crate) name: String,
    pub(crate) export: ModuleExport,
    pub(crate) number: usize,
    /// The guest it belongs to.
    pub(crate) guest: u64,
    signature: PhantomData<fn(P) -> R>,
}

impl<P, R> Entry<P, R> {
    pub(crate) fn new(name: &str, export: ModuleExport, number: usize, guest: u64) -> Self {
        Self { name: name.to_owned(), export, number, guest, signature: PhantomData }
    }

    #[cold]
    pub(crate) fn foreign(&self) -> CallError {
        CallError::Interface(format!("the entry for {:?} belongs to another guest", self.name))
    }
}

impl<P, R> Clone for Entry<P, R> {
    fn clone(&self) -> Self {
        Self::new(&self.name, self.export, self.number, self.guest)
    }
}

impl<P, R> std::fmt::Debug for Entry<P, R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry").field("name", &self.name).finish()
    }
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
