//! Changes of a layout that copy much memory: a mapping that moves, and a private mapping of a file
//! that is not shown.
//!
//! Promises: the copy is made in parts, and its call ends at its deadline, at its limit of CPU time
//! or where its caller stops it, however much there is to copy; each part has the whole time that
//! the stub may take. A call that ends has left the mappings as the layout has them, so that a
//! reset finds them. The copy is whole where the guest is kept after its call.

use std::time::Instant;

use afresh_files::Refused;

use crate::guest::{Guest, StopReason};
use crate::platform::{Call, Continuation, PlatformError, StubCommands};
use crate::sentry::{Change, Content};

/// Maximum bytes of a part.
const MAX_PART: u64 = 16 << 20;

/// The parts of copies, in order.
fn parts(copies: Vec<[u64; 3]>) -> impl Iterator<Item = [u64; 3]> {
    copies.into_iter().flat_map(|[to, from, len]| {
        let starts = (0..len).step_by(MAX_PART as usize);
        starts.map(move |at| [to + at, from + at, MAX_PART.min(len - at)])
    })
}

fn unreadable(error: Refused) -> PlatformError {
    PlatformError::kernel("reading a mapped file", error.errno())
}

impl Guest {
    /// Puts a large change into effect, and has the call return `value`.
    pub(crate) fn enact_in_parts(
        &mut self,
        call: &Call,
        value: u64,
        change: Change,
        deadline: Instant,
    ) -> Result<Option<StopReason>, PlatformError> {
        self.body.detach(call)?;
        self.body.process.set_result(value as i64);
        let halt = self.enact_until_halt(change, deadline)?;
        if halt.is_some() {
            return Ok(halt);
        }
        if self.sentry.unattached {
            self.attach()?;
        }
        self.go_on()
    }

    /// Puts changes into effect in their order, while the stub waits for orders. Of large ones the
    /// copies end where the call does; returns why.
    pub(crate) fn enact_all_until_halt(
        &mut self,
        changes: Vec<Change>,
        deadline: Instant,
    ) -> Result<Option<StopReason>, PlatformError> {
        if !changes.iter().any(Change::is_large) {
            return self.body.enact_all(changes, Continuation::Ask).map(|()| None);
        }
        let mut halt = None;
        for change in changes {
            let halts = self.enact_until_halt(change, deadline)?;
            halt = halt.or(halts);
        }
        Ok(halt)
    }

    /// Puts a large change into effect, as far as the call lasts.
    fn enact_until_halt(
        &mut self,
        change: Change,
        deadline: Instant,
    ) -> Result<Option<StopReason>, PlatformError> {
        let Change { before, content, fill, copies, after } = change;
        let (copied, content) = match content {
            Some((start, Content::Copied(part))) => (Some((start, part)), None),
            content => (None, content),
        };
        let first = Change { before, content, fill, ..Change::default() };
        self.enact(first, Continuation::Ask)?;
        let mut halt = None;
        for part in parts(copies) {
            halt = self.halt_of_copy(deadline);
            if halt.is_some() {
                break;
            }
            let commands = StubCommands { copies: vec![part], ..StubCommands::default() };
            self.body.process.execute(&commands, Continuation::Ask)?;
        }
        if let Some((start, part)) = copied {
            let pieces = part.pieces().map_err(unreadable)?;
            let mut bytes = Vec::new();
            for piece in pieces {
                halt = halt.or_else(|| self.halt_of_copy(deadline));
                if halt.is_some() {
                    break;
                }
                part.read(&piece, &mut bytes).map_err(unreadable)?;
                self.body.fill(start + piece.start, &bytes)?;
            }
        }
        self.enact(Change { after, ..Change::default() }, Continuation::Ask)?;
        Ok(halt)
    }

    /// Why a call that copies memory has to end, if it has to. A guest that is kept afterwards
    /// continues with all of its memory.
    fn halt_of_copy(&mut self, deadline: Instant) -> Option<StopReason> {
        if self.sentry.streams.stops_at_end { None } else { self.halt(deadline) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use afresh_files::{Budget, Time, Tree};

    use super::*;
    use crate::platform::Process;
    use crate::sentry::{FIRST, FilePart, Kernel, Layout, Sentry};
    use crate::subprocess::Subprocess;
    use crate::subprocesses::ParkedSubprocesses;

    const FROM: u64 = 1 << 40;
    const TO: u64 = 1 << 41;
    const LEN: u64 = 8 << 10;

    /// A guest whose process has no memory and waits for orders.
    fn guest() -> Option<Guest> {
        let process = match Process::new(None, None) {
            Err(error @ PlatformError::Missing { .. }) => {
                println!("SKIPPED: {error}");
                return None;
            }
            process => process.unwrap(),
        };
        let tree = Tree::new(Budget::default());
        let state = Kernel::new(Layout::new(64 << 20), tree, None, Vec::new());
        let sentry = Sentry::new(Arc::new(state), 0, afresh_egress::EgressPolicy::default());
        let body = Subprocess::new(process, FIRST);
        Some(Guest::new(body, sentry, ParkedSubprocesses::new(None)))
    }

    fn new_memory(start: u64) -> [u64; 7] {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let fd = u64::MAX;
        [libc::SYS_mmap as u64, start, LEN, protection as u64, flags as u64, fd, 0]
    }

    /// The bytes at `start`, if there is memory.
    fn bytes_at(guest: &Guest, start: u64) -> Option<Vec<u8>> {
        let mut bytes = vec![1; LEN as usize];
        guest.body.process.read(start, &mut bytes).unwrap().then_some(bytes)
    }

    /// A move of memory, and a copy of a file, with what each of them copies.
    fn copies(guest: &mut Guest) -> [(Change, Vec<u8>); 2] {
        let source = Change { before: vec![new_memory(FROM)], ..Change::default() };
        guest.enact(source, Continuation::Ask).unwrap();
        let moved = vec![7; LEN as usize];
        assert!(guest.body.process.write(FROM, &moved).unwrap());
        let unmap = [libc::SYS_munmap as u64, FROM, LEN, 0, 0, 0, 0];
        let (before, after) = (vec![new_memory(TO)], vec![unmap]);
        let copies = vec![[TO, FROM, LEN]];
        let change = Change { before: before.clone(), copies, after, ..Change::default() };
        let mut tree = Tree::new(Budget::default());
        let node = tree.write_path("/file", &[9; LEN as usize], Time::default()).unwrap();
        let part = FilePart::new(&tree, node, 0..LEN).unwrap();
        let content = Some((TO, Content::Copied(part)));
        let file = Change { before, content, ..Change::default() };
        [(change, moved), (file, vec![9; LEN as usize])]
    }

    #[test]
    fn a_copy_ends_at_its_deadline_and_leaves_the_mappings_as_they_are_to_be() {
        let Some(mut guest) = guest() else { return };
        let (late, far) = (Instant::now(), Instant::now() + Duration::from_secs(3600));
        for (deadline, is_kept) in [(late, false), (far, false), (late, true)] {
            guest.sentry.streams.stops_at_end = is_kept;
            for (change, copied) in copies(&mut guest) {
                let halt = guest.enact_until_halt(change, deadline).unwrap();
                let ends = deadline == late && !is_kept;
                assert_eq!(matches!(halt, Some(StopReason::Late)), ends);
                assert_eq!(halt.is_some(), ends);
                let expected = if ends { vec![0; LEN as usize] } else { copied };
                assert_eq!(bytes_at(&guest, TO), Some(expected));
                assert_eq!(bytes_at(&guest, FROM), None, "it has moved");
            }
        }
    }

    #[test]
    fn changes_of_a_program_that_is_loaded_end_where_the_call_does() {
        let Some(mut guest) = guest() else { return };
        let [_, (file, copied)] = copies(&mut guest);
        let other = Change { before: vec![new_memory(TO + LEN)], ..Change::default() };
        let none = vec![0; LEN as usize];
        let far = Instant::now() + Duration::from_secs(3600);
        for (deadline, expected) in [(Instant::now(), &none), (far, &copied)] {
            let changes = vec![file.clone(), other.clone()];
            let halt = guest.enact_all_until_halt(changes, deadline).unwrap();
            assert_eq!(halt.is_some(), deadline != far);
            assert_eq!(bytes_at(&guest, TO).as_ref(), Some(expected));
            assert_eq!(bytes_at(&guest, TO + LEN), Some(none.clone()));
        }
    }

    #[test]
    fn parts_cover_each_copy_once() {
        let len = 2 * MAX_PART + 4096;
        let parts: Vec<_> = parts(vec![[1 << 40, 1 << 30, len], [0, 4096, 4096]]).collect();
        let expected = [
            [1 << 40, 1 << 30, MAX_PART],
            [(1 << 40) + MAX_PART, (1 << 30) + MAX_PART, MAX_PART],
            [(1 << 40) + 2 * MAX_PART, (1 << 30) + 2 * MAX_PART, 4096],
            [0, 4096, 4096],
        ];
        assert_eq!(parts, expected);
    }
}
