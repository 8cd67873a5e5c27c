//! Resident memory of the server.

/// Resident memory of this process; 0 if `/proc` does not report it.
pub(crate) fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok());
    pages.unwrap_or(0).saturating_mul(rustix::param::page_size())
}
