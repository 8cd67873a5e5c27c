//! A backend without the tricks of Linux: mappings of files are copies, and no write is noticed.
//!
//! It serves macOS and Windows, where it is the only one; Linux in a build with `--cfg
//! afresh_portable`, for tests; and Miri, which finds undefined behaviour that tests on hardware
//! cannot. Strategies that need fault signals report themselves as missing, as on a host without
//! them.
//!
//! Promises: memory is zero, or the content of a file, where it is mapped. A missing call fails
//! with `ENOSYS` or reports itself as missing. May break it: a caller that relies on protection, on
//! guards, or on seeing later writes to a file through a mapping. A fork is noticed by the number
//! of the process.

mod address_range;
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
use crate::features::{FeatureGroup, ProbeResults};

pub use memfd::Memfd;
pub use perf::Instructions;
pub use reservation::{Advice, Protection, Reservation};
pub use uffd::{Interest, Uffd, UffdEvent, UffdMode};
pub use withhold::{WithholdGuard, withhold, withhold_all};

/// Why features are missing.
const MISSING: &str = "this build has the portable backend of afresh-sys, and only Linux has this";

/// Pages have the size that is expected.
pub(crate) fn page_size() -> usize {
    crate::PAGE_SIZE
}

/// Everything but files in memory is missing here.
pub(crate) fn probe(group: FeatureGroup) -> ProbeResults {
    let of_group = Feature::ALL.into_iter().filter(|feature| FeatureGroup::of(*feature) == group);
    let real = of_group.filter(|feature| *feature != Feature::Memfd);
    ProbeResults { missing: real.map(|f| (f, MISSING.to_owned())).collect(), short: false }
}
