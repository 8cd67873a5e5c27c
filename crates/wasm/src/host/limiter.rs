//! Limits on growth: those of the guest options, then the limiter that the embedder sets.

use std::sync::Arc;

use wasmtime::ResourceLimiter;

use super::Host;

type FindLimiter = dyn (Fn(&mut Host) -> &mut dyn ResourceLimiter) + Send + Sync;

/// The embedder's limiter, in its state, which is consulted after the limits in the guest's
/// options. The default has no limiter.
#[derive(Clone, Default)]
pub struct Limiter(Option<Arc<FindLimiter>>);

impl Limiter {
    /// The limiter that `find` finds in the lease's host state. It is called when memories and
    /// tables grow, and when instances are made. Its counts must be in the state, to be new for
    /// each lease.
    pub fn new(
        find: impl (Fn(&mut Host) -> &mut dyn ResourceLimiter) + Send + Sync + 'static,
    ) -> Self {
        Self(Some(Arc::new(find)))
    }

    pub(crate) fn is_some(&self) -> bool {
        self.0.is_some()
    }
}

impl std::fmt::Debug for Limiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Limiter").field(&self.0.is_some()).finish()
    }
}

impl Host {
    /// The embedder's own limiter.
    fn limiter(&mut self) -> Option<&mut dyn ResourceLimiter> {
        let find = self.parts.limiter.0.clone()?;
        Some(find(self))
    }
}

/// Host memory of a table, which the memory limit bounds too: an element takes a few words.
pub(crate) fn table_bytes(elements: usize) -> usize {
    elements.saturating_mul(16)
}

/// Instances that wasmtime allows in a store by default.
const WASMTIME_INSTANCES: usize = 10_000;

impl ResourceLimiter for Host {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        if desired > self.parts.memory_limit {
            return Ok(false);
        }
        match self.limiter() {
            Some(limiter) => limiter.memory_growing(current, desired, maximum),
            None => Ok(true),
        }
    }

    fn memory_grow_failed(&mut self, error: wasmtime::Error) -> wasmtime::Result<()> {
        match self.limiter() {
            Some(limiter) => limiter.memory_grow_failed(error),
            None => Ok(()),
        }
    }

    fn table_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        if table_bytes(desired) > self.parts.memory_limit {
            return Ok(false);
        }
        match self.limiter() {
            Some(limiter) => limiter.table_growing(current, desired, maximum),
            None => Ok(true),
        }
    }

    fn table_grow_failed(&mut self, error: wasmtime::Error) -> wasmtime::Result<()> {
        match self.limiter() {
            Some(limiter) => limiter.table_grow_failed(error),
            None => Ok(()),
        }
    }

    fn instances(&self) -> usize {
        self.parts.instances.unwrap_or(WASMTIME_INSTANCES)
    }
}
