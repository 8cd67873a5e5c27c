//! Calls that wait: of a guest whose imports are asynchronous, on a fiber.
//!
//! Promises: while a host function waits, the thread does other things. If a future is dropped or
//! forgotten before its call is over, its instance is never used again: the lease refuses further
//! calls, and when it ends a new instance over reset memories replaces the old one.

use wasmtime::{Val, WasmParams, WasmResults};

use crate::CallError;
use crate::call::entry::{Entry, typed};
use crate::lease::Lease;
use crate::lease::leased_instance::InstanceParts;

impl Lease<'_> {
    /// Refuses a call that may wait where none may, and one after a call that was cut off.
    #[inline]
    fn may_wait(&self) -> Result<(), CallError> {
        if !self.warm.way.waits() {
            return Err(CallError::Synchronous);
        }
        if self.live.is_unfinished() { Err(self.cut_off()) } else { Ok(()) }
    }

    /// As [`Lease::invoke`], for a guest with [`crate::GuestOptions::asynchronous`].
    ///
    /// # Errors
    /// [`CallError`]; the lease stays usable, and is restored when dropped. [`CallError::CutOff`]
    /// when the future of an earlier call was dropped before it was over.
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
        let InstanceParts { mut store, instance, unfinished, known } = self.live.parts();
        let once;
        let func = match known {
            Some(known) => known.find(&mut store, instance, entry)?,
            None => {
                once = typed(&mut store, instance, entry)?;
                &once
            }
        };
        limits.apply(&mut store);
        *unfinished = true;
        let result = func.call_async(store, params).await;
        *unfinished = false;
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
