//! The kernel's merging of equal pages (KSM), which takes write protection from a page without a word.
//!
//! What it merges is anonymous memory whose content came to rest: exactly what a write set sheds. The merged page
//! is mapped anew, without userfaultfd's mark, and the next write gets a copy of its own unnoticed.

const PR_GET_MEMORY_MERGE: libc::c_int = 68;

/// Whether all memory of this process is to be merged (`PR_SET_MEMORY_MERGE`), which children and programs that
/// are started inherit. Memory that depends on protection opts out (`Advice::NoMerge`).
#[must_use]
pub fn merges_memory() -> bool {
    // SAFETY: the request takes no arguments; kernels that do not know it refuse.
    unsafe { libc::prctl(PR_GET_MEMORY_MERGE, 0, 0, 0, 0) == 1 }
}
