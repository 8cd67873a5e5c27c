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

use crate::features::{FeatureGroup, ProbeResults};
use crate::{Call, Feature, PageRange, SysError};
use trial::{Trial, any_ends_the_process, ends_the_process};

/// Finds missing facilities of a group by trying each one once on a separate page.
pub(crate) fn probe(group: FeatureGroup) -> ProbeResults {
    let mut missing = BTreeMap::new();
    let short = Cell::new(false);
    let note_shortage = |error: SysError| short.set(short.get() || error.is_exhaustion());
    let deadly = any_ends_the_process();
    let deadly = |call| deadly.then(|| ends_the_process(call)).flatten();
    let memfd = match deadly(Trial::MemfdCreate) {
        Some(why) => Some(format!("memfd_create: {why}")),
        None => Memfd::new(c"afresh-probe").err().map(|error| {
            note_shortage(error);
            error.to_string()
        }),
    };
    let userfaultfd = deadly(Trial::Userfaultfd).map(|why| format!("userfaultfd: {why}"));
    // A facility that is known to be missing is not tried: the trial may end the process. Write
    // protection watches mappings of files in memory.
    let watches = userfaultfd.as_ref().or(memfd.as_ref());
    let mut note = |feature, known: Option<&String>, probe: &dyn Fn() -> Result<(), SysError>| {
        if let Some(why) = known {
            missing.insert(feature, why.clone());
        } else if let Err(error) = probe() {
            note_shortage(error);
            missing.insert(feature, error.to_string());
        }
    };
    match group {
        FeatureGroup::Slots => {
            note(Feature::Memfd, memfd.as_ref(), &|| Ok(()));
            note(Feature::UffdSigbus, watches, &|| probe_uffd(UffdMode::Sigbus));
            note(Feature::PagemapScan, None, &|| {
                Reservation::new(1).and_then(|r| {
                    r.map_anonymous(PageRange::new(0, 1), Protection::ReadWrite)?;
                    pagemap::written(r.base().as_ptr(), 1, |_| {})
                })
            });
        }
        FeatureGroup::Others => {
            note(Feature::UffdAsync, watches, &|| probe_uffd(UffdMode::Async));
            note(Feature::UffdKernel, userfaultfd.as_ref(), &|| Uffd::open_for_kernel().map(drop));
            note(Feature::Populate, None, &|| {
                Reservation::new(1).and_then(|r| {
                    r.map_anonymous(PageRange::new(0, 1), Protection::ReadWrite)?;
                    r.advise(PageRange::new(0, 1), Advice::PopulateWrite)
                })
            });
            if let Err(error) = std::fs::File::options().read(true).write(true).open("/dev/kvm") {
                note_shortage(SysError::new(Call::Map, error.raw_os_error().unwrap_or_default()));
                missing.insert(Feature::Kvm, format!("/dev/kvm: {error}"));
            }
        }
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
