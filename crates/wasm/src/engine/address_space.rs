//! Address space of Wasm memories.

use afresh_sys::InheritedCell;
use afresh_sys::host;

/// Address space of one memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Space {
    /// Bytes reserved behind the base. With [`MAX_MEMORY32`] a 32-bit memory needs no bounds
    /// checks; with less wasmtime checks every access, and a memory that is not larger from the
    /// start grows no further.
    pub(crate) reservation: u64,
    /// Inaccessible bytes before the base and after the reservation.
    pub(crate) guard: u64,
}

/// Bytes that 32 bits can address.
const MAX_MEMORY32: u64 = 4 << 30;

impl Space {
    /// The guard after the heap of wasmtime for GC objects. It differs, so that a request of
    /// wasmtime for this heap is distinguished from one for a guest memory.
    pub(crate) fn heap_guard(self) -> u64 {
        self.guard / 2
    }

    /// The same for every memory of the process, and for its children.
    pub(crate) fn of_process() -> Self {
        static SPACE: InheritedCell<Space> = InheritedCell::new();
        *SPACE.get_or_make(|| Self::fitting(host::address_space()))
    }

    /// The layout for a process that may reserve `left` bytes more.
    fn fitting(left: Option<u64>) -> Self {
        // Room for some memories at a time, and for all that is not one.
        match left.map_or(MAX_MEMORY32, |left| left / 8) {
            MAX_MEMORY32.. => Self { reservation: MAX_MEMORY32, guard: 32 << 20 },
            part => {
                let reservation = 1 << part.max(16 << 20).ilog2();
                Self { reservation, guard: 1 << 20 }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memories_reserve_what_there_are_addresses_for() {
        let of = |left| Space::fitting(left).reservation;
        assert_eq!(of(None), 4 << 30);
        assert_eq!(of(Some(1 << 40)), 4 << 30);
        assert_eq!(of(Some(32 << 30)), 4 << 30);
        assert_eq!(of(Some((32 << 30) - 1)), 2 << 30);
        assert_eq!(of(Some((2 << 30) - 1)), 128 << 20);
        assert_eq!(of(Some(0)), 16 << 20);
    }
}
