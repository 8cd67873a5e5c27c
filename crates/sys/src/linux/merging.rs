//! The kernel's merging of equal pages (KSM), which drops the write protection of the pages that it
//! merges.
//!
//! It merges anonymous memory whose content has come to rest. The merged page is mapped anew,
//! without userfaultfd's mark, and the next write gets a private copy that no tracker reports.
//! Where `PR_SET_MEMORY_MERGE` is in force, every new private mapping may be merged, so each one
//! opts out as it is made.
//!
//! Set `PR_SET_MEMORY_MERGE` before the first slot: a later call also marks mappings that have
//! opted out, and slots that exist do not notice.

const PR_GET_MEMORY_MERGE: libc::c_int = 68;

/// Whether all memory of this process is merged (`PR_SET_MEMORY_MERGE`), which children and started
/// programs inherit.
#[must_use]
pub fn merges_memory() -> bool {
    // SAFETY: the request takes no arguments; kernels that do not know it refuse.
    unsafe { libc::prctl(PR_GET_MEMORY_MERGE, 0, 0, 0, 0) == 1 }
}
