//! Counts of page faults: a measure of memory activity on the host.

/// Page faults so far that needed no disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// The count of the whole process.
    pub process: u64,
    /// The count of the calling thread.
    pub thread: u64,
}

fn minor(who: libc::c_int) -> u64 {
    // SAFETY: an all-zero `rusage` is a value, and the call fills it.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(who, &mut usage);
        usage.ru_minflt.max(0) as u64
    }
}

/// Reads both counts.
#[must_use]
pub fn faults() -> Faults {
    Faults { process: minor(libc::RUSAGE_SELF), thread: minor(libc::RUSAGE_THREAD) }
}
