//! The parts of a warm component that its leases share.

use afresh_pool::{MappingCharge, Pool};
use afresh_rewrite::{Roots, WarmState};
use wasmtime::component::{ComponentExportIndex, InstancePre};

use crate::call::stores::Stores;
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
