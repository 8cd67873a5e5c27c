//! Leases: an instance in the warm state, for the time of a call.

pub(crate) mod acquire;
pub(crate) mod async_calls;
pub(crate) mod background;
pub(crate) mod bytes;
pub(crate) mod freeze;
pub(crate) mod leased_instance;

use std::sync::Arc;

use wasmtime::{Extern, Memory, Val, WasmParams, WasmResults};

use crate::call::dynamic::{call_dynamic, call_error};
use crate::call::entry::{Entry, typed};
use crate::call::lease_options::{CallOptions, LeaseLimits};
use crate::call::scope::forget_exception;
use crate::call::stores::CallLimits;
use crate::engine::call_path::{CallPath, drive};
use crate::engine::linear::GuestMemory;
use crate::host::Host;
use crate::host::uniqueness::{entropy, next_generation};
use crate::lease::leased_instance::{InstanceParts, LeasedInstance};
use crate::warm::Inner;
use crate::warm::compare::Comparison;
use crate::{CallError, LoadError, StopHandle, WarmError};

/// An instance in the warm state. Calls of one lease see each other's effects. Dropping the lease
/// undoes them all.
pub struct Lease<'a> {
    pub(crate) live: LeasedInstance<'a>,
    pub(crate) warm: &'a Inner,
    /// The limits of each of its calls.
    pub(crate) limits: CallLimits,
    /// Whether a call failed in the guest, so that the state of the instance is unknown.
    cut_short: bool,
    /// The guest of an owned lease, dropped after everything that borrows from it. No function
    /// returns a reference into `live` or `warm` that outlives its borrow of the lease, so nothing
    /// else outlives it.
    pub(crate) keep: Option<Arc<Inner>>,
}

/// A lease that owns a reference to its guest, and can move to other threads and tasks; see
/// [`crate::Warm::lease_owned`].
pub type OwnedLease = Lease<'static>;

impl std::fmt::Debug for Lease<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease").field("host", self.host()).finish()
    }
}

impl<'a> Lease<'a> {
    #[inline]
    pub(crate) fn begin(warm: &'a Inner, live: LeasedInstance<'a>, limits: CallLimits) -> Self {
        let mut lease = Self { live, warm, limits, cut_short: false, keep: None };
        lease.host_mut().set_generation(next_generation());
        lease
    }

    /// A lease of an instance that continues where it was.
    pub(crate) fn resume(warm: &'a Inner, live: LeasedInstance<'a>) -> Self {
        Self { live, warm, limits: warm.limits, cut_short: false, keep: None }
    }

    /// Makes the lease own its guest.
    pub(crate) fn keep(mut self, keep: Arc<Inner>) -> Self {
        self.keep = Some(keep);
        self
    }

    /// Runs the guest's own hooks for a new clone, where it has any.
    pub(crate) async fn prepare(&mut self) -> Result<(), WarmError> {
        let failed = |name: &str| {
            let name = name.to_owned();
            move |error| WarmError::Call { name, error }
        };
        if self.warm.initialize {
            self.run("_initialize", &[]).await.map_err(failed("_initialize"))?;
        }
        if let Some(reseed) = &self.warm.reseed {
            let taken = match self.warm.way.waits() {
                false => self.invoke(reseed, entropy()),
                true => self.invoke_async(reseed, entropy()).await,
            };
            taken.map_err(failed(&reseed.name))?;
        }
        Ok(())
    }

    /// Calls a typed export.
    ///
    /// # Errors
    /// [`CallError`]; the lease stays usable, and is restored when dropped.
    #[inline]
    pub fn invoke<P, R>(&mut self, entry: &Entry<P, R>, params: P) -> Result<R, CallError>
    where
        P: WasmParams + Sync + 'static,
        R: WasmResults + Sync + 'static,
    {
        // Numbers mean something within one guest only.
        if entry.guest != self.warm.id {
            return Err(entry.foreign());
        }
        if self.warm.way.waits() {
            return Err(CallError::Asynchronous);
        }
        if self.live.is_unfinished() {
            return Err(self.cut_off());
        }
        let (way, limits) = (self.warm.way, self.limits);
        let InstanceParts { mut store, instance, known, unfinished } = self.live.parts();
        let once;
        let func = match known {
            Some(known) => known.find(&mut store, instance, entry)?,
            None => {
                once = typed(&mut store, instance, entry)?;
                &once
            }
        };
        limits.apply(&mut store);
        // It stays so where a host function panics, and the embedder catches that.
        *unfinished = true;
        let result = way.call_now(func, &mut store, params);
        *unfinished = false;
        self.outcome(result)
    }

    /// The result of a call.
    #[inline]
    pub(crate) fn outcome<R>(&mut self, result: wasmtime::Result<R>) -> Result<R, CallError> {
        if self.host().has_lost() {
            return Err(self.lose());
        }
        if let Some(failure) = self.host().failure() {
            let failure = failure.to_owned();
            self.cut_short = true;
            return Err(CallError::Wasi(failure));
        }
        result.map_err(|error| self.failed(error))
    }

    /// The error of a call that touched a page which will never be in place. Its results may come
    /// from zeros. The instance is not used again.
    #[cold]
    fn lose(&mut self) -> CallError {
        self.cut_short = true;
        let InstanceParts { store, unfinished, .. } = self.live.parts();
        *unfinished = true;
        CallError::Memory(store.data().loss().unwrap_or_default())
    }

    /// The error of a call after one that was cut off.
    #[cold]
    pub(crate) fn cut_off(&self) -> CallError {
        self.host().loss().map_or(CallError::CutOff, CallError::Memory)
    }

    /// Translates the failure of a call, and drops its remains in the store.
    #[cold]
    fn failed(&mut self, error: wasmtime::Error) -> CallError {
        let limits = self.limits;
        self.cut_short = true;
        forget_exception(self.live.parts().store);
        self.explain(call_error(error, limits))
    }

    /// A call that met a page which could not be fetched looks like one that went out of bounds.
    #[cold]
    fn explain(&self, error: CallError) -> CallError {
        self.incomplete().map_or(error, CallError::Memory)
    }

    /// Why pages of the memories will never be there, if that is so.
    fn incomplete(&self) -> Option<String> {
        self.live.memories().find_map(|memory| memory.slot().failure())
    }

    /// Calls an export by name, with any values.
    ///
    /// # Errors
    /// [`CallError`]; the lease stays usable, and is restored when dropped. A guest that exits with
    /// code 0 has succeeded, without results.
    pub fn call(&mut self, name: &str, arguments: &[Val]) -> Result<Vec<Val>, CallError> {
        self.warm.callable(name)?;
        if self.warm.way.waits() {
            return Err(CallError::Asynchronous);
        }
        if self.live.is_unfinished() {
            return Err(self.cut_off());
        }
        drive(CallPath::Direct, self.run(name, arguments))
    }

    pub(crate) async fn run(
        &mut self,
        name: &str,
        arguments: &[Val],
    ) -> Result<Vec<Val>, CallError> {
        let (way, limits) = (self.warm.way, self.limits);
        let InstanceParts { mut store, instance, unfinished, .. } = self.live.parts();
        *unfinished = true;
        limits.apply(&mut store);
        let result = call_dynamic(way, &mut store, instance, name, arguments, limits).await;
        *unfinished = false;
        if self.host().has_lost() {
            return Err(self.lose());
        }
        self.cut_short |= result.is_err();
        result.map_err(|error| self.explain(error))
    }

    /// Puts the input of a handler where the guest has room for it.
    pub(crate) fn put_input(&mut self, address: i32, input: &[u8]) -> Result<(), CallError> {
        let (address, len) = (address as u32 as usize, input.len());
        if address == 0 && len > 0 {
            return Err(CallError::Interface(format!(
                "the guest has no room for {len} bytes of input"
            )));
        }
        let memory = self.memory_at(address, len)?;
        let InstanceParts { store, .. } = self.live.parts();
        memory.write(store, address, input).map_err(|_| {
            CallError::Interface(format!(
                "the guest made room at {address:#x}, and {len} bytes there are outside its memory"
            ))
        })
    }

    /// Copies the answer of a handler out of the guest.
    pub(crate) fn take_answer(&mut self, packed: i64) -> Result<Vec<u8>, CallError> {
        let packed = packed as u64;
        let (address, len) = ((packed >> 32) as usize, (packed & 0xffff_ffff) as usize);
        let memory = self.memory_at(address, len)?;
        let InstanceParts { store, .. } = self.live.parts();
        let data = memory.data(&store);
        let answer = address.checked_add(len).and_then(|end| data.get(address..end));
        answer.map(<[u8]>::to_vec).ok_or_else(|| {
            CallError::Interface(format!(
                "the handler's answer, {len} bytes at {address:#x}, is outside its memory"
            ))
        })
    }

    /// The guest's first memory, once the bytes that the host will access are present.
    fn memory_at(&mut self, address: usize, len: usize) -> Result<Memory, CallError> {
        if let Some(memory) = self.live.memory(0) {
            memory.slot().fetch(address, len).map_err(|e| CallError::Memory(e.to_string()))?;
        }
        self.memory()
    }

    /// The guest's first memory.
    fn memory(&mut self) -> Result<Memory, CallError> {
        let none = || CallError::Interface("the guest has no memory".to_owned());
        if let Some(handle) = self.live.handle() {
            return Ok(handle);
        }
        let export = self.warm.memory.ok_or_else(none)?;
        let InstanceParts { store, instance, .. } = self.live.parts();
        match instance.get_module_export(store, &export) {
            Some(Extern::Memory(memory)) => Ok(memory),
            _ => Err(none()),
        }
    }

    /// Copies bytes from the guest's first memory.
    ///
    /// # Errors
    /// [`CallError::Interface`] outside the memory.
    pub fn read_memory(&mut self, address: usize, out: &mut [u8]) -> Result<(), CallError> {
        let memory = self.memory_at(address, out.len())?;
        let InstanceParts { store, .. } = self.live.parts();
        memory
            .read(store, address, out)
            .map_err(|e| CallError::Interface(format!("reading {address:#x}: {e}")))
    }

    /// Copies bytes into the guest's first memory; undone with the rest.
    ///
    /// # Errors
    /// [`CallError::Interface`] outside the memory.
    pub fn write_memory(&mut self, address: usize, bytes: &[u8]) -> Result<(), CallError> {
        let memory = self.memory_at(address, bytes.len())?;
        let InstanceParts { store, .. } = self.live.parts();
        memory
            .write(store, address, bytes)
            .map_err(|e| CallError::Interface(format!("writing {address:#x}: {e}")))
    }

    /// The call's host state.
    #[must_use]
    pub fn host(&self) -> &Host {
        self.live.host()
    }

    /// The call's host state, to set values for the embedder's host functions.
    #[inline]
    pub fn host_mut(&mut self) -> &mut Host {
        self.live.host_mut()
    }

    /// Compares the instance with the warm state, byte by byte: how many bytes of memory differ,
    /// and how many other items (see [`Comparison`]). Both are 0 in a lease that has made no call
    /// (and whose guest takes no fresh entropy).
    ///
    /// # Errors
    /// [`WarmError`] when the state cannot be read.
    pub fn differences(&mut self) -> Result<(usize, usize), WarmError> {
        Ok(self.compare()?.counts())
    }

    /// As [`Lease::differences`], with the differing parts and those that were not compared.
    ///
    /// # Errors
    /// As [`Lease::differences`].
    pub fn compare(&mut self) -> Result<Comparison, WarmError> {
        self.live.compare()
    }

    /// Pages that the guest's memories keep writable and resident.
    #[must_use]
    pub fn write_set_pages(&self) -> usize {
        self.live.memories().map(|memory| memory.slot().write_set_len()).sum()
    }

    /// Pages of memory that differ from the state to which the instance returns: the warm state, or
    /// the one that its session stands on. It compares the write set.
    ///
    /// # Errors
    /// [`WarmError`] when the memory cannot be read.
    pub fn dirty_pages(&mut self) -> Result<usize, WarmError> {
        let count = |memory: &GuestMemory| {
            memory.dirty_pages().map_err(|error| WarmError::State(error.to_string()))
        };
        self.live.memories().map(count).sum()
    }

    /// Bytes of all guest memories. A memory never shrinks, so it is their peak as well.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.live.memories().map(GuestMemory::bytes).sum()
    }

    /// Whether a call of this lease failed after it had begun: the state of the instance is unknown
    /// until it is reset.
    #[must_use]
    pub fn is_cut_short(&self) -> bool {
        self.cut_short || self.live.is_unfinished()
    }

    /// Whether only asynchronous calls are possible ([`crate::GuestOptions::asynchronous`]).
    #[must_use]
    pub fn is_asynchronous(&self) -> bool {
        self.warm.way.waits()
    }

    /// A handle that stops the calls of this lease from another thread.
    #[must_use]
    pub fn stop_handle(&mut self) -> StopHandle {
        self.host_mut().stop_handle()
    }

    /// Sets the given limits for further calls, and returns the previous ones, for
    /// [`Lease::restore_limits`].
    ///
    /// # Errors
    /// [`LoadError::Limit`] for a limit that the engine was not set up to keep; nothing is changed.
    pub fn set_limits(&mut self, options: &CallOptions) -> Result<LeaseLimits, LoadError> {
        let stores = &self.warm.pools.blueprint().stores;
        let set = stores.limits_over(options, self.limits)?;
        Ok(LeaseLimits(self.replace_limits(set)))
    }

    /// Restores previous limits of the lease.
    pub fn restore_limits(&mut self, limits: LeaseLimits) {
        self.replace_limits(limits.0);
    }

    /// Sets `limits`, lifts the fuel and deadline of the last call, and returns the limits before:
    /// a call without such limits leaves the store as it is.
    fn replace_limits(&mut self, limits: CallLimits) -> CallLimits {
        let stores = &self.warm.pools.blueprint().stores;
        stores.unlimit(self.live.parts().store);
        std::mem::replace(&mut self.limits, limits)
    }

    /// Drops the instance instead of returning it to the pool.
    pub fn discard(self) {
        self.live.discard();
    }
}
