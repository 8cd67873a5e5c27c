//! Calls that wait: of a guest whose imports are asynchronous, on a fiber.
//!
//! What it promises: while a host function waits, the thread does other things. A future that is dropped, or
//! forgotten, before its call is over leaves an instance that nobody gets again: the lease refuses further
//! calls, and when it ends a new instance takes the place of the old one, over memories that were reset.

use wasmtime::{TypedFunc, Val, WasmParams, WasmResults};

use crate::CallError;
use crate::lease::{Entry, Kind, Lease, typed};

impl Lease<'_> {
    /// Refuses a call that may wait where none may, and one after a call that was cut off.
    #[inline]
    fn may_wait(&self) -> Result<(), CallError> {
        if !self.warm.way.waits() {
            return Err(CallError::Synchronous);
        }
        if self.is_unfinished() { Err(CallError::CutOff) } else { Ok(()) }
    }

    /// As [`Lease::invoke`], for a guest with [`crate::GuestOptions::asynchronous`].
    ///
    /// # Errors
    /// [`CallError`]; the lease stays usable, and is restored when dropped. [`CallError::CutOff`] when the
    /// future of an earlier call was dropped before it was over.
    pub async fn invoke_async<P, R>(
        &mut self,
        entry: &Entry<P, R>,
        params: P,
    ) -> Result<R, CallError>
    where
        P: WasmParams + Sync + 'static,
        R: WasmResults + Sync + 'static,
    {
        self.may_wait()?;
        if entry.guest != self.warm.id {
            return Err(entry.foreign());
        }
        let limits = self.limits;
        let result = match &mut self.kind {
            Kind::Reset(lease) => {
                let item = &mut **lease;
                if !matches!(item.typed.get(entry.number), Some(Some(_))) {
                    Self::resolve(item, entry)?;
                }
                limits.apply(&mut item.store);
                let typed = item.typed[entry.number]
                    .as_ref()
                    .and_then(|f| f.downcast_ref::<TypedFunc<P, R>>());
                let Some(typed) = typed else {
                    return Err(entry.foreign());
                };
                item.unfinished = true;
                let result = typed.call_async(&mut item.store, params).await;
                item.unfinished = false;
                result
            }
            Kind::Fresh { store, instance, unfinished, .. } => {
                let typed = typed(store, *instance, entry)?;
                limits.apply(&mut *store);
                *unfinished = true;
                let result = typed.call_async(store, params).await;
                *unfinished = false;
                result
            }
        };
        self.outcome(result)
    }

    /// As [`Lease::call`], for a guest with [`crate::GuestOptions::asynchronous`].
    ///
    /// # Errors
    /// As [`Lease::invoke_async`].
    pub async fn call_async(
        &mut self,
        name: &str,
        arguments: &[Val],
    ) -> Result<Vec<Val>, CallError> {
        self.may_wait()?;
        self.warm.callable(name)?;
        self.run(name, arguments).await
    }
}
