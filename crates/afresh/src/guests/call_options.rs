//! Options of one call and of one lease.
//!
//! They are set like [`Options`](crate::Options): each method has the name of its option. An option
//! that is not set comes from the next level: first the call, then its lease, then the guest, then
//! the default of the kind.

use std::time::Duration;

use afresh_pool::LimitPolicy;

/// Options of one call, where they differ from those of its lease.
///
/// ```
/// # #[cfg(feature = "wasm")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
///
/// use afresh::{CallError, CallOptions, Guest, Options};
/// # let wasm = wat::parse_str(r#"(module (memory (export "memory") 1)
/// #   (func (export "afresh_buffer") (param i32) (result i32) (i32.const 0))
/// #   (func (export "spin") (param i32) (result i64) (loop (br 0)) unreachable))"#)?;
///
/// let guest = Guest::from_bytes("spin", &wasm, &Options::new().timeout(Duration::from_secs(60)))?;
/// let soon = CallOptions::new().timeout(Duration::from_millis(20));
/// let error = guest.call_with("spin", b"", &soon).unwrap_err();
/// assert!(matches!(error, CallError::Timeout { .. }));
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "wasm"))]
/// # fn main() {}
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct CallOptions {
    pub(crate) timeout: Option<Duration>,
    pub(crate) fuel: Option<u64>,
    pub(crate) memory: Option<u64>,
    pub(crate) cpu_time: Option<Duration>,
}

impl CallOptions {
    /// Those of the lease.
    pub fn new() -> Self {
        Self::default()
    }

    /// Time limit of the call. A Wasm guest must have been opened with
    /// [`Options::timeout`](crate::Options::timeout) or
    /// [`Options::interruptible`](crate::Options::interruptible).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Maximum CPU time of the call, counted as [`CallCost::cpu`](crate::CallCost::cpu), without
    /// waits. A call beyond it fails with [`CallError::CpuTime`](crate::CallError::CpuTime), in a
    /// Linux program within 2 ms of CPU time, in a Wasm guest within a tick of 5 ms. A Wasm guest
    /// must have been opened with [`Options::interruptible`](crate::Options::interruptible) or a
    /// watch, and not be asynchronous. A micro-VM refuses this option.
    pub fn cpu_time_limit(mut self, limit: Duration) -> Self {
        self.cpu_time = Some(limit);
        self
    }

    /// Maximum fuel of the call. Only Wasm guests that were opened with fuel count it
    /// (`GuestOptions::fuel` of `afresh::wasm`).
    pub fn fuel(mut self, fuel: u64) -> Self {
        self.fuel = Some(fuel);
        self
    }

    /// Maximum memory in the call, which may be above or below the limit of the guest: the size of
    /// all memories and tables of a Wasm guest, or the memory that the processes of a Linux program
    /// map together. Memory that is already larger stays. Growth beyond the limit fails as if
    /// memory had run out. A Wasm guest must have been opened with
    /// [`Options::memory`](crate::Options::memory). A micro-VM refuses this option.
    ///
    /// A state that grew beyond the limit of its guest can be saved. It opens only with a limit
    /// that it fits.
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = Some(bytes);
        self
    }
}

/// Options of one lease, where they differ from those of its guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct LeaseOptions {
    pub(crate) calls: CallOptions,
    pub(crate) exhausted: Option<LimitPolicy>,
}

impl LeaseOptions {
    /// Those of the guest.
    pub fn new() -> Self {
        Self::default()
    }

    /// Time limit of each of its calls; as [`CallOptions::timeout`].
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.calls = self.calls.timeout(timeout);
        self
    }

    /// Maximum CPU time of each of its calls; as [`CallOptions::cpu_time_limit`].
    pub fn cpu_time_limit(mut self, limit: Duration) -> Self {
        self.calls = self.calls.cpu_time_limit(limit);
        self
    }

    /// Maximum fuel of each of its calls; as [`CallOptions::fuel`].
    pub fn fuel(mut self, fuel: u64) -> Self {
        self.calls = self.calls.fuel(fuel);
        self
    }

    /// Maximum memory of the guest in each of its calls; as [`CallOptions::memory`].
    pub fn memory(mut self, bytes: u64) -> Self {
        self.calls = self.calls.memory(bytes);
        self
    }

    /// The response if all instances are in use, in place of that of
    /// [`Options::limits`](crate::Options::limits). An [`AsyncLease`](crate::AsyncLease) waits
    /// until its future is dropped, unless instances are made on demand.
    pub fn exhausted(mut self, exhausted: LimitPolicy) -> Self {
        self.exhausted = Some(exhausted);
        self
    }
}
