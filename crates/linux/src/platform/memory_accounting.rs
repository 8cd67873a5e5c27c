//! Whether the kernel counts writable memory of this host.

use afresh_sys::InheritedCell;

/// Whether the kernel counts writable memory of this host, and may refuse to make some writable.
pub(crate) fn is_memory_accounted() -> bool {
    static ACCOUNTED: InheritedCell<bool> = InheritedCell::new();
    // 2 is `OVERCOMMIT_NEVER`; the others do not count mappings with `MAP_NORESERVE`.
    *ACCOUNTED.get_or_make(|| overcommit_mode().is_none_or(|mode| mode == 2))
}

fn overcommit_mode() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/vm/overcommit_memory").ok()?.trim().parse().ok()
}
