//! A warm program: every call starts from the same state, and leaves nothing behind.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{CallError, VerifyError, WarmError};
use crate::guest::{Guest, Halt, after};
use crate::personality::{Change, Person, State, protect_order, unmap_order};
use crate::platform::{
    Call, IMAGE, INPUT_LEN, Image, Orders, Place, PlatformError, Process, Registers, Then,
};
use crate::ranges::Ranges;

/// Resets after which the write set is learned anew, so that what one heavy call wrote is not copied for ever.
const RELEARN: u64 = 1024;
/// Bytes of a write set beyond which it is not copied but mapped anew.
const LARGEST_SET: u64 = 32 << 20;

/// Counts of a warm program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Calls made.
    pub calls: u64,
    /// Processes made from the image: one, and one more for each that was killed.
    pub processes: u64,
    /// Bytes that the last reset copied back.
    pub copied: u64,
    /// Bytes of the image, as mapped.
    pub image: u64,
    /// Bytes of the image that take memory; all processes share them.
    pub resident: u64,
    /// System calls that were answered with `ENOSYS`: how often, by number.
    pub unserved: BTreeMap<i64, u64>,
}

/// A program that waits for input, frozen, and a process that plays it.
///
/// A call goes in on descriptor 0 and out on descriptor 1, and lasts until the program waits for more input than there is. Before the next
/// one, memory, registers, mappings, descriptors and files are what they were when the program was frozen.
#[derive(Debug)]
pub struct Warm {
    image: Image,
    state: Arc<State>,
    registers: Registers,
    /// The read that the program waits in: where to and how much.
    to: u64,
    wanted: u64,
    output: usize,
    time: Duration,
    guest: Option<Guest>,
    stats: Stats,
}

impl Warm {
    /// Freezes `guest`, which waits for input in `call`.
    pub(crate) fn freeze(mut guest: Guest, call: Call, time: Duration) -> Result<Self, WarmError> {
        let registers = guest.process.registers();
        let state = Arc::clone(&guest.person.state);
        // What cannot be read is made readable: this process is not used again.
        let read = libc::PROT_READ as u64;
        let closed = state.layout.mappings().filter(|(_, _, protection)| protection & read == 0);
        let open = closed.map(|(start, len, _)| protect_order(start, len, read));
        let change = Change { before: open.collect(), ..Change::default() };
        guest.enact(change, Then::Ask)?;
        let process = &guest.process;
        let image = Image::build(state.layout.mappings(), |address, out| {
            if process.read(address, out)? {
                return Ok(());
            }
            let error = std::io::Error::from_raw_os_error(libc::EFAULT);
            Err(PlatformError::kernel("reading the guest's memory", error))
        })?;
        let (to, wanted) = guest.person.input_place(&guest.process, &call)?;
        let stats = Stats {
            image: image.len(),
            resident: image.resident(),
            unserved: std::mem::take(&mut guest.person.unserved),
            ..Stats::default()
        };
        let output = guest.person.output_limit;
        let mut warm =
            Self { image, state, registers, to, wanted, output, time, guest: None, stats };
        drop(guest);
        warm.guest = Some(warm.thaw()?);
        Ok(warm)
    }

    /// The guest there is, or a new one. One that was made before a fork is the parent's, who goes on with it.
    fn take(&mut self) -> Result<Guest, PlatformError> {
        match self.guest.take().filter(|guest| guest.process.is_ours()) {
            Some(guest) => Ok(guest),
            None => self.thaw(),
        }
    }

    /// A new process with the image mapped.
    fn thaw(&mut self) -> Result<Guest, PlatformError> {
        let process = Process::new(Some(&self.image))?;
        self.stats.processes += 1;
        Ok(Guest::new(process, Person::new(Arc::clone(&self.state), self.output)))
    }

    /// Sends `request` and returns the answer. An empty request is the end of the input.
    ///
    /// # Errors
    /// When the guest ends, takes too long, or writes too much. The next call starts from the warm state all the same.
    pub fn call(&mut self, request: &[u8]) -> Result<Vec<u8>, CallError> {
        self.stats.calls += 1;
        let old = self.guest.is_some();
        match self.attempt(request) {
            // Somebody else killed it, or it went with the thread that made it; a guest cannot do that to itself. A call has
            // no effect but its answer, so it can be made again.
            Err(CallError::Platform { source: PlatformError::Ended(status), .. })
                if old && status.signal() == Some(libc::SIGKILL) =>
            {
                self.attempt(request)
            }
            result => result,
        }
    }

    fn attempt(&mut self, request: &[u8]) -> Result<Vec<u8>, CallError> {
        let deadline = after(self.time);
        let mut guest = self.started(request).map_err(failed)?;
        let halt = guest.run(deadline);
        for (number, count) in std::mem::take(&mut guest.person.unserved) {
            *self.stats.unserved.entry(number).or_default() += count;
        }
        let messages = guest.messages();
        let output = std::mem::take(&mut guest.person.streams.output);
        match halt {
            Ok(Halt::Idle(_)) => {
                self.guest = Some(guest);
                Ok(output)
            }
            Ok(Halt::End(end, place)) => {
                // From the stub it can be brought back; from within the kernel it cannot.
                if place == Place::Stub {
                    self.guest = Some(guest);
                }
                Err(CallError::Ended { end, output, messages })
            }
            Ok(Halt::Late) => Err(CallError::Late { messages }),
            Err(source) => Err(CallError::Platform { source, messages }),
        }
    }

    /// A guest that was brought back and runs with `request`.
    fn started(&mut self, request: &[u8]) -> Result<Guest, PlatformError> {
        let mut guest = self.take()?;
        guest.process.follow();
        let taken = request.len().min(INPUT_LEN).min(self.wanted as usize);
        let mut orders = self.reset(&mut guest)?;
        orders.input = Some((self.to, request[..taken].to_vec()));
        guest.process.set_result(taken as i64);
        guest.process.carry_out(&orders, Then::Resume)?;
        let streams = &mut guest.person.streams;
        streams.input.clear();
        streams.input.extend(request);
        streams.taken = taken;
        Ok(guest)
    }

    /// Brings everything but the write set back, and returns the orders that copy that.
    fn reset(&mut self, guest: &mut Guest) -> Result<Orders, PlatformError> {
        let disturbed = std::mem::take(&mut guest.disturbed);
        if !disturbed.is_empty() {
            self.map_back(guest, &disturbed)?;
        }
        let written = guest.process.written().map_or(0, Ranges::bytes);
        if written > LARGEST_SET || self.stats.calls.is_multiple_of(RELEARN) {
            Self::discard(guest)?;
        }
        let mut copies = Vec::new();
        if let Some(set) = guest.process.written() {
            for range in set.iter() {
                for part in self.image.within(range) {
                    copies.push([part.start, IMAGE + part.offset, part.len]);
                }
            }
            self.stats.copied = set.bytes();
        }
        guest.process.set_registers(&self.registers);
        guest.person.state = Arc::clone(&self.state);
        Ok(Orders { copies, wipe: true, ..Orders::default() })
    }

    /// Maps the image where the guest changed its map, and nothing where there was nothing.
    fn map_back(&self, guest: &mut Guest, disturbed: &Ranges) -> Result<(), PlatformError> {
        let mut calls = Vec::new();
        for range in disturbed.iter() {
            if guest.person.state.layout.touches(&range) {
                calls.push(unmap_order(range.start, range.end - range.start));
            }
            calls.extend(self.image.within(range).map(|part| part.order()));
        }
        guest.process.carry_out(&Orders { calls, ..Orders::default() }, Then::Ask)?;
        for range in disturbed.iter() {
            for part in self.image.within(range) {
                if part.is_writable() {
                    guest.process.watch(part.range())?;
                }
            }
        }
        Ok(())
    }

    /// Throws the pages of the write set away and protects their places again.
    fn discard(guest: &mut Guest) -> Result<(), PlatformError> {
        let set: Vec<_> = guest.process.written().map_or(Vec::new(), |set| set.iter().collect());
        let advise = libc::MADV_DONTNEED as u64;
        let order = |r: &std::ops::Range<u64>| {
            [libc::SYS_madvise as u64, r.start, r.end - r.start, advise, 0, 0, 0]
        };
        let calls = set.iter().map(order).collect();
        guest.process.carry_out(&Orders { calls, ..Orders::default() }, Then::Ask)?;
        set.into_iter().try_for_each(|range| guest.process.protect(range))
    }

    /// Brings the guest back and compares all of it with the warm state: every byte, the kernel's list of mappings, registers,
    /// descriptors, files. Returns the bytes that were compared.
    ///
    /// # Errors
    /// The first difference. The process is then killed, and the next call has a new one.
    pub fn verify(&mut self) -> Result<u64, VerifyError> {
        let mut guest = self.take()?;
        let orders = self.reset(&mut guest)?;
        guest.process.carry_out(&orders, Then::Ask)?;
        let compared = self.compare(&guest)?;
        self.guest = Some(guest);
        Ok(compared)
    }

    fn compare(&self, guest: &Guest) -> Result<u64, VerifyError> {
        if *guest.person.state != *self.state {
            return Err(VerifyError::State);
        }
        if !guest.process.control_equals(&self.registers) {
            return Err(VerifyError::Registers);
        }
        let expected =
            joined(self.image.segments().iter().map(|s| (s.start, s.start + s.len, s.protection)));
        let found = joined(guest.process.mappings()?.into_iter());
        if expected != found {
            let odd = expected
                .iter()
                .filter(|m| !found.contains(m))
                .chain(found.iter().filter(|m| !expected.contains(m)));
            let list: Vec<_> =
                odd.map(|(start, end, p)| format!("{start:x}-{end:x} {p}")).collect();
            return Err(VerifyError::Mappings(list.join(", ")));
        }
        let mut compared = 0;
        let (mut here, mut there) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        for segment in self.image.segments() {
            // Memory that nobody may read is as it was mapped, or its protection would have changed.
            if segment.protection & libc::PROT_READ as u64 == 0 {
                continue;
            }
            let mut done = 0;
            while done < segment.len {
                let n = (segment.len - done).min(here.len() as u64) as usize;
                let address = segment.start + done;
                if !guest.process.read(address, &mut here[..n])? {
                    return Err(VerifyError::Memory(address));
                }
                self.image.read(segment.offset + done, &mut there[..n])?;
                if let Some(at) = (0..n).find(|&i| here[i] != there[i]) {
                    return Err(VerifyError::Memory(address + at as u64));
                }
                done += n as u64;
                compared += n as u64;
            }
        }
        Ok(compared)
    }

    /// Counts so far.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The process that plays the guest at the moment, if there is one.
    #[must_use]
    pub fn process_id(&self) -> Option<u32> {
        self.guest.as_ref().map(|guest| guest.process.id())
    }
}

/// A failure before the guest ran.
fn failed(source: PlatformError) -> CallError {
    CallError::Platform { source, messages: String::new() }
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
