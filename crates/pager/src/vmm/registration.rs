//! Ends the registration of memory with userfaultfd: poisons missing pages, or unregisters
//! mappings.
//!
//! May break it: nothing. Both ignore memory that the VMM has unmapped.

use std::time::Duration;

use afresh_sys::errno::{EAGAIN, EEXIST};
use afresh_sys::{PAGE_SIZE, Uffd};

/// How often a service that ends looks for discards that wait for it.
const RELEASE_ATTEMPTS: usize = 1000;
/// Time between two of these.
const RELEASE_PAUSE: Duration = Duration::from_millis(1);
/// Events read before the service looks around again.
pub(super) const MAX_EVENTS: usize = 1024;

/// Poisons the missing pages among `len` pages of a mapping from page `start` on. Returns `false`
/// where the VMM does not allow that.
pub(super) fn poison(uffd: &Uffd, base: usize, (start, len): (usize, usize), unit: usize) -> bool {
    let (mut at, end) = (start, start + len);
    while at < end {
        let from = (base + at * PAGE_SIZE) as *const u8;
        match uffd.poison(from, (end - at) * PAGE_SIZE) {
            Ok(bytes) if bytes > 0 => at += bytes / PAGE_SIZE,
            Err(error) if error.errno == EEXIST => at += unit,
            _ => return false,
        }
    }
    true
}

/// Unregisters mappings, by address and number of pages.
pub(super) fn unregister(uffd: &Uffd, mut mappings: impl Iterator<Item = (usize, usize)>) {
    let mut first = None;
    for (base, pages) in &mut mappings {
        first = first.or(Some(base));
        // Fails where the VMM has ended or unmapped it, which is as good.
        let _ = uffd.unregister(base as *const u8, pages * PAGE_SIZE);
    }
    // A discard that began earlier still waits for a reader; until then the kernel refuses to fill.
    for _ in 0..RELEASE_ATTEMPTS {
        for _ in 0..MAX_EVENTS {
            if !matches!(uffd.next_event(), Ok(Some(_))) {
                break;
            }
        }
        match first.map(|base| uffd.zero(base as *mut u8, PAGE_SIZE)) {
            Some(Err(error)) if error.errno == EAGAIN => std::thread::sleep(RELEASE_PAUSE),
            _ => break,
        }
    }
}
