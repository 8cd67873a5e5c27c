//! The real kernel behind the wrappers.

mod arch;
pub mod fault;
pub mod file;
pub mod folios;
pub mod fork;
pub mod futex;
pub mod host;
mod hugepage;
mod memfd;
mod merging;
pub mod own_process;
mod page_size;
pub mod pagemap;
mod perf;
pub mod poll;
#[cfg(feature = "socket")]
mod process_memory;
pub mod random;
mod remap;
mod reservation;
mod sealed_memfd;
#[cfg(feature = "socket")]
pub mod socket;
pub mod termination;
mod trial;
mod uffd;
pub mod usage;
mod vmm;
mod withhold;

pub use memfd::Memfd;
pub use merging::merges_memory;
pub(crate) use page_size::page_size;
pub use perf::Instructions;
#[cfg(feature = "socket")]
pub use process_memory::{MappingKind, ProcessMemory};
pub use reservation::{Advice, Protection, Reservation};
pub use sealed_memfd::SealedMemfd;
pub use uffd::{Interest, Uffd, UffdEvent, UffdMode};
pub use withhold::{WithholdGuard, withhold, withhold_all};

use std::cell::Cell;
use std::collections::BTreeMap;

use crate::features::ProbeResults;
use crate::{Call, Feature, PageRange, SysError};
use trial::{Trial, any_ends_the_process, ends_the_process};

/// Finds missing facilities by trying each one once on a separate page.
pub(crate) fn probe() -> ProbeResults {
    let mut missing = BTreeMap::new();
    let short = Cell::new(false);
    let note_shortage = |error: SysError| short.set(short.get() || error.is_exhaustion());
    let deadly = any_ends_the_process();
    let deadly = |call| deadly.then(|| ends_the_process(call)).flatten();
    if let Some(why) = deadly(Trial::MemfdCreate) {
        missing.insert(Feature::Memfd, format!("memfd_create: {why}"));
    } else if let Err(error) = Memfd::new(c"afresh-probe") {
        note_shortage(error);
        missing.insert(Feature::Memfd, error.to_string());
    }
    if let Some(why) = missing.get(&Feature::Memfd).cloned() {
        // They watch mappings of such files.
        missing.insert(Feature::UffdSigbus, why.clone());
        missing.insert(Feature::UffdAsync, why);
    }
    if let Some(why) = deadly(Trial::Userfaultfd) {
        for feature in [Feature::UffdSigbus, Feature::UffdAsync, Feature::UffdKernel] {
            missing.insert(feature, format!("userfaultfd: {why}"));
        }
    }
    let known: Vec<Feature> = missing.keys().copied().collect();
    let mut note = |feature, probe: &dyn Fn() -> Result<(), SysError>| {
        // A facility that is known to be missing is not tried: the trial may end the process.
        if known.contains(&feature) {
            return;
        }
        if let Err(error) = probe() {
            note_shortage(error);
            missing.insert(feature, error.to_string());
        }
    };
    note(Feature::UffdSigbus, &|| probe_uffd(UffdMode::Sigbus));
    note(Feature::UffdAsync, &|| probe_uffd(UffdMode::Async));
    note(Feature::UffdKernel, &|| Uffd::open_for_kernel().map(drop));
    note(Feature::PagemapScan, &|| {
        Reservation::new(1).and_then(|r| {
            r.map_anonymous(PageRange::new(0, 1), Protection::ReadWrite)?;
            pagemap::written(r.base().as_ptr(), 1, |_| {})
        })
    });
    note(Feature::Populate, &|| {
        Reservation::new(1).and_then(|r| {
            r.map_anonymous(PageRange::new(0, 1), Protection::ReadWrite)?;
            r.advise(PageRange::new(0, 1), Advice::PopulateWrite)
        })
    });
    if let Err(error) = std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        note_shortage(SysError::new(Call::Map, error.raw_os_error().unwrap_or_default()));
        missing.insert(Feature::Kvm, format!("/dev/kvm: {error}"));
    }
    ProbeResults { missing, short: short.get() }
}

/// Registers and protects a page of a private memfd mapping, the kind of mapping in slots.
fn probe_uffd(mode: UffdMode) -> Result<(), SysError> {
    let range = PageRange::new(0, 1);
    let file = Memfd::new(c"afresh-probe")?;
    file.set_len(range.byte_len())?;
    let memory = Reservation::new(1)?;
    memory.map_private(range, Protection::ReadWrite, &file, 0)?;
    let uffd = Uffd::open(mode)?;
    uffd.register(memory.base().as_ptr(), range.byte_len(), Interest::WRITES)?;
    uffd.write_protect(memory.base().as_ptr(), range.byte_len(), true)
}
