//! Limits on growth: those of the guest options, then the limiter that the embedder sets.
//!
//! Promises: memories and tables together stay within the memory limit, and so does the collected
//! heap alone. May break it: a store whose memories were not [set](Host::set_memories).

use std::sync::Arc;

use wasmtime::ResourceLimiter;

use super::Host;

type FindLimiter = dyn (Fn(&mut Host) -> &mut dyn ResourceLimiter) + Send + Sync;
type FindTotal = dyn Fn(&mut Host) -> Option<usize> + Send + Sync;

#[derive(Clone)]
enum LimiterKind {
    Embedder(Arc<FindLimiter>),
    Total(Arc<FindTotal>),
}

/// The embedder's limiter, in its state, which is consulted after the limits in the guest's
/// options. The default has no limiter.
#[derive(Clone, Default)]
pub struct Limiter(Option<LimiterKind>);

impl Limiter {
    /// The limiter that `find` returns from the lease's host state. It is called when memories and
    /// tables grow, and when instances are made. Its counts must be in that state, so that each
    /// lease starts with new ones.
    pub fn new(
        find: impl (Fn(&mut Host) -> &mut dyn ResourceLimiter) + Send + Sync + 'static,
    ) -> Self {
        Self(Some(LimiterKind::Embedder(Arc::new(find))))
    }

    /// A limit in bytes of the memories and tables of a guest together, in addition to
    /// [`crate::GuestOptions::memory_limit`]. `find` returns that of the current call, and `None`
    /// for a call without one.
    pub fn of_total(find: impl Fn(&mut Host) -> Option<usize> + Send + Sync + 'static) -> Self {
        Self(Some(LimiterKind::Total(Arc::new(find))))
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
    /// Maximum bytes of all memories and tables together.
    pub(crate) fn memory_limit(&self) -> usize {
        self.parts.memory_limit
    }

    /// Sets the maximum bytes of all memories and tables in the next call.
    #[inline]
    pub(crate) fn set_memory_limit(&mut self, bytes: usize) {
        self.parts.memory_limit = bytes;
    }

    /// Bytes of tables that count in the memory limit.
    pub(crate) fn table_bytes(&self) -> usize {
        self.table_bytes
    }

    pub(crate) fn set_table_bytes(&mut self, bytes: usize) {
        self.table_bytes = bytes;
    }

    /// The embedder's own limiter.
    fn limiter(&mut self) -> Option<&mut dyn ResourceLimiter> {
        match self.parts.limiter.0.clone()? {
            LimiterKind::Embedder(find) => Some(find(self)),
            LimiterKind::Total(_) => None,
        }
    }

    /// Fails if the memories and tables that it has exceed a limit together.
    pub(crate) fn check_memory_limit(&mut self) -> wasmtime::Result<()> {
        let bytes = self.memories.bytes().saturating_add(self.table_bytes);
        match self.allows(bytes) {
            true => Ok(()),
            false => Err(beyond_limit(bytes)),
        }
    }

    /// Whether memories and tables may have `bytes` together.
    fn allows(&mut self, bytes: usize) -> bool {
        let total = match self.parts.limiter.0.clone() {
            Some(LimiterKind::Total(find)) => find(self),
            _ => None,
        };
        bytes <= self.parts.memory_limit.min(total.unwrap_or(usize::MAX))
    }
}

/// The error of a guest whose memories and tables have `bytes` before it runs.
pub(crate) fn beyond_limit(bytes: usize) -> wasmtime::Error {
    wasmtime::Error::msg(format!(
        "memories and tables take {bytes} bytes, which is beyond `memory_limit`: raise the limit"
    ))
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
        // The memories of an instance have their sizes before wasmtime makes it over them.
        let exists = self.instantiating && current == 0 && self.memories.largest() >= desired;
        let added = if exists { 0 } else { desired.saturating_sub(current) };
        let total = self.memories.bytes().saturating_add(self.table_bytes).saturating_add(added);
        // The collected heap is not in the total.
        if !self.allows(total.max(desired)) {
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
        let bytes = self.table_bytes.saturating_add(table_bytes(desired.saturating_sub(current)));
        if !self.allows(self.memories.bytes().saturating_add(bytes)) {
            return Ok(false);
        }
        let allowed = match self.limiter() {
            Some(limiter) => limiter.table_growing(current, desired, maximum)?,
            None => true,
        };
        // wasmtime grows no table beyond its maximum. A table never shrinks.
        if allowed && maximum.is_none_or(|maximum| desired <= maximum) {
            self.table_bytes = bytes;
        }
        Ok(allowed)
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
