//! Comparing an instance that was brought back with the state that it stands on.
//!
//! Promises: what differs is told, whatever it is: what the personality keeps, registers, mappings, each byte of memory.

use afresh_memory::PageRange;

use super::Live;
use crate::error::VerifyError;
use crate::instance::failed;
use crate::platform::Segment;
use crate::standing::Standing;

/// The bytes that were compared, or the first difference.
pub(super) fn compare(live: &mut Live, standing: &Standing) -> Result<u64, VerifyError> {
    let rest = &standing.rest;
    let guest = &live.guest;
    if *guest.person.state != *rest.state {
        return Err(VerifyError::State);
    }
    if !guest.process.control_equals(&rest.registers) {
        return Err(VerifyError::Registers);
    }
    let segments = rest.segments.iter();
    let expected = joined(segments.map(|s| (s.start, s.start + s.len, s.protection)));
    let found = joined(guest.process.mappings()?.into_iter());
    if expected != found {
        let odd = expected
            .iter()
            .filter(|m| !found.contains(m))
            .chain(found.iter().filter(|m| !expected.contains(m)));
        let list: Vec<_> = odd.map(|(start, end, p)| format!("{start:x}-{end:x} {p}")).collect();
        return Err(VerifyError::Mappings(list.join(", ")));
    }
    // Memory that nobody may read is as it was mapped, or its protection would have changed.
    let readable = rest.segments.iter().filter(|segment| segment.allows(libc::PROT_READ));
    let mut pages: Vec<_> = readable.map(Segment::pages).collect();
    pages.sort_unstable_by_key(|run| run.start);
    let (slot, mut hands) = live.hands(&rest.segments);
    match slot.verify(&mut hands, &pages).map_err(failed)? {
        None => Ok(pages.iter().map(|run| run.byte_len() as u64).sum()),
        Some(page) => {
            let mut at = rest.segments.showing(PageRange::new(page, 1));
            Err(VerifyError::Memory(at.next().map_or(0, |part| part.start)))
        }
    }
}

/// Start, end and protection of mappings, neighbours that are alike joined.
fn joined(mappings: impl Iterator<Item = (u64, u64, u64)>) -> Vec<(u64, u64, u64)> {
    let mut list: Vec<(u64, u64, u64)> = Vec::new();
    for (start, end, protection) in mappings {
        match list.last_mut() {
            Some(last) if last.1 == start && last.2 == protection => last.1 = end,
            _ => list.push((start, end, protection)),
        }
    }
    list
}
