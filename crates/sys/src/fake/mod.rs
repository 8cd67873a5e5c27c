//! A pretend kernel for Miri: maps are heap memory, files are vectors, write tracking is missing.
//!
//! It lets the page arithmetic, copy-back and bookkeeping above run in the interpreter, which finds
//! undefined behaviour that tests on hardware cannot. Strategies that need fault signals report
//! themselves as missing, as on a host without them.

pub mod fault;
pub mod file;
pub mod fork;
pub mod futex;
pub mod host;
mod hugepage;
mod memfd;
pub mod pagemap;
mod perf;
mod reservation;
pub mod termination;
mod uffd;
pub mod usage;
mod withhold;

use crate::Feature;
use crate::features::ProbeResults;

pub use memfd::Memfd;
pub use perf::Instructions;
pub use reservation::{Advice, Protection, Reservation};
pub use uffd::{Interest, Uffd, UffdEvent, UffdMode};
pub use withhold::{WithholdGuard, withhold, withhold_all};

/// Pages have the size that is expected.
pub(crate) fn page_size() -> usize {
    crate::PAGE_SIZE
}

/// Everything but files in memory is missing here.
pub(crate) fn probe() -> ProbeResults {
    let real = Feature::ALL.into_iter().filter(|feature| *feature != Feature::Memfd);
    ProbeResults { missing: real.map(|f| (f, "not simulated".to_owned())).collect(), short: false }
}
