//! Options of guests.

use std::time::Duration;

use super::backend::KindOptions;
use super::{Call, Kind};
use crate::Options;

/// The part of [`Options`] that only guests have.
#[derive(Clone, Default)]
pub(crate) struct GuestOptions {
    pub(super) warm_up: Vec<Call>,
    pub(super) timeout: Option<Duration>,
    pub(super) memory: Option<u64>,
    pub(super) kind: Option<Kind>,
    pub(super) limits: afresh_pool::Limits,
    pub(super) kinds: KindOptions,
}

impl Options {
    /// Adds a call to the warm-up. Every later call starts from the state after the warm-up. It is
    /// for Wasm guests, and for Linux programs, which get it as input. A snapshot is warm already,
    /// and a micro-VM warms itself up.
    pub fn warm(mut self, call: Call) -> Self {
        self.guest.warm_up.push(call);
        self
    }

    /// The calls of the warm-up.
    #[must_use]
    pub fn warm_up(&self) -> &[Call] {
        &self.guest.warm_up
    }

    /// Time limit of one call.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.guest.timeout = Some(timeout);
        self
    }

    /// Maximum bytes of the memories and tables of a Wasm guest together, or of the mappings of a
    /// Linux program (default: 1 GiB). For a micro-VM, the size of its memory (default: 64 MiB).
    pub fn memory(mut self, bytes: u64) -> Self {
        self.guest.memory = Some(bytes);
        self
    }

    /// The kind of the file, overriding [`Kind::of`](crate::Kind::of): a static Linux program looks
    /// the same as a micro-VM program.
    pub fn kind(mut self, kind: Kind) -> Self {
        self.guest.kind = Some(kind);
        self
    }

    /// Limits of the pool of instances that calls draw from.
    pub fn limits(mut self, limits: afresh_pool::Limits) -> Self {
        self.guest.limits = limits;
        self
    }

    /// The same options for a guest that runs behind the scenes.
    pub(super) fn without_output(&self) -> Self {
        let mut options = self.clone();
        options.guest.kinds.wasm.discard_output();
        options
    }
}
