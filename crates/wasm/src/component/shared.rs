//! The parts of a warm component that its leases share.

use std::sync::Arc;

use afresh_pool::{Lease as PoolLease, MappingCharge, Pool};
use afresh_rewrite::{Roots, WarmState};
use wasmtime::component::{ComponentExportIndex, InstancePre};

use crate::WarmError;
use crate::call::lease_options::LeaseOptions;
use crate::call::stores::Stores;
use crate::component::lease::{ComponentLease, OwnedComponentLease};
use crate::engine::guest_code::GuestCode;
use crate::engine::linear::MemoryPolicy;
use crate::host::Host;
use crate::warm::fresh::FreshMemories;
use crate::warm::frozen::Program;
use crate::warm::instance_state::WarmMemory;

pub(crate) struct SharedComponent {
    /// Marks the faults of the code as those of a guest. Dropped before the code.
    pub(crate) _text: Option<GuestCode>,
    pub(crate) pre: InstancePre<Host>,
    pub(crate) memories: Vec<WarmMemory>,
    pub(crate) policy: MemoryPolicy,
    pub(crate) stores: Stores,
    pub(crate) pool: Pool<FreshMemories>,
    pub(crate) roots: Roots,
    /// The export that takes fresh entropy for each clone.
    pub(crate) reseed: Option<ComponentExportIndex>,
    /// The share of the process budget that the code holds.
    pub(crate) _code: MappingCharge,
    pub(crate) program: Program,
    /// The clock's reading when the warm state was taken.
    pub(crate) read: u64,
    /// The state of its core modules, by their place in the binary; none where it cannot be kept.
    pub(crate) state: Option<Vec<Option<WarmState>>>,
    /// Why each instance starts as the component does, where instantiation does something.
    pub(crate) rerun_reason: Option<String>,
}

impl SharedComponent {
    /// Memories for a lease, from the pool.
    pub(crate) fn take_memories(
        &self,
        options: &LeaseOptions,
    ) -> Result<PoolLease<'_, FreshMemories>, WarmError> {
        options.limits(&self.stores)?;
        let exhausted = options.policy(self.pool.limits().exhausted);
        let make = |_| FreshMemories::new(&self.memories, &self.policy);
        Ok(self.pool.get_with(0, exhausted, make)?)
    }

    /// Whether code of the component prepares each instance.
    pub(crate) fn prepares(&self) -> bool {
        self.rerun_reason.is_some() || self.reseed.is_some()
    }
}

/// Memories of the pool that keep their component.
pub(crate) struct OwnedMemories {
    pub(crate) memories: PoolLease<'static, FreshMemories>,
    /// Dropped last.
    pub(crate) keep: Arc<SharedComponent>,
}

impl OwnedMemories {
    pub(crate) async fn prepare(
        self,
        options: &LeaseOptions,
    ) -> Result<OwnedComponentLease, WarmError> {
        let Self { memories, keep } = self;
        // SAFETY: `memories` and the lease are dropped before `keep`, or with the lease that gets
        // it: the function owns both, and moves `memories` out first.
        let component = unsafe { borrow(&keep) };
        let mut lease = ComponentLease::prepare(component, memories, options).await?;
        lease.keep = Some(keep);
        Ok(lease)
    }
}

/// The component, borrowed from `keep`.
///
/// # Safety
/// The reference, and everything borrowed from it, must not outlive `keep`.
pub(crate) unsafe fn borrow(keep: &Arc<SharedComponent>) -> &'static SharedComponent {
    // SAFETY: an `Arc` does not move its value, and the caller keeps the `Arc` until the last use.
    unsafe { &*Arc::as_ptr(keep) }
}
