//! Faults are not counted.

/// Page faults so far that needed no disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// The count of the whole process.
    pub process: u64,
    /// The count of the calling thread.
    pub thread: u64,
}

/// None.
#[must_use]
pub fn faults() -> Faults {
    Faults::default()
}
