//! Room for further mappings in the kernel, so that it cannot refuse a call that a guest makes
//! itself.
//!
//! Promises: `munmap` and `mprotect` of mapped pages do not fail for want of mappings. Each call
//! makes at most two more.

use afresh_sys::InheritedCell;

use super::process::Process;

/// Mappings that a call can add: it cuts one at both ends.
pub(super) const MAPPINGS_OF_CALL: usize = 2;
/// Maximum mappings of a process without guest memory: stub and vDSO.
pub(super) const STUB_MAPPINGS: usize = 32;
/// The kernel's own limit, where it cannot be read.
const DEFAULT_MAPPINGS: usize = 65_530;

fn setting(path: &str) -> Option<usize> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Mappings up to which guests make calls themselves: half of the kernel limit.
fn most_mappings() -> usize {
    static MAX_MAPPINGS: InheritedCell<usize> = InheritedCell::new();
    *MAX_MAPPINGS
        .get_or_make(|| setting("/proc/sys/vm/max_map_count").unwrap_or(DEFAULT_MAPPINGS) / 2)
}

impl Process {
    /// Whether the kernel has room for the mappings that one more call of the guest can make.
    pub(crate) fn has_room_for_mappings(&mut self) -> bool {
        if self.mappings_bound < most_mappings() {
            return true;
        }
        // The bound only grows.
        let Ok(maps) = self.maps() else { return false };
        self.mappings_bound = maps.lines().count();
        self.mappings_bound < most_mappings()
    }
}
