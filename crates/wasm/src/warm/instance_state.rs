//! The state of an instance as a value: memories as images, and everything else by number.

use afresh_rewrite::WarmState;

use crate::engine::linear::Shape;
use crate::host::files::Files;

/// A warm memory: its declaration, its content, and its size in bytes.
#[derive(Clone, Debug)]
pub(crate) struct WarmMemory {
    pub(crate) shape: Shape,
    pub(crate) image: afresh_memory::Image,
    pub(crate) bytes: usize,
}

/// The present state of an instance, for others to start from.
pub(crate) struct InstanceState {
    pub(crate) memories: Vec<WarmMemory>,
    pub(crate) state: WarmState,
    pub(crate) files: Option<Files>,
    /// An upper bound of its clock's readings.
    pub(crate) read: u64,
}
