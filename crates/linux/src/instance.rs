//! An instance: a process that plays a frozen guest, is called, and goes back to where it stood.
//!
//! What it promises: after a reset, a checkpoint or a switch, every byte of memory, all registers, mappings, descriptors and
//! files are those of the state that it then stands on. A process that cannot be brought there is replaced.
//!
//! A reset is not carried out at once but with the next call, in the same round trip that hands the request in.

mod compare;

use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::Instant;

use afresh_files::Tree;
use afresh_memory::{Image, PAGE_SIZE, PageRange, RemoteError, RemoteSlot};
use afresh_sys::host::random_word;
use afresh_sys::planted::{self, Bug};

use crate::error::{CallError, VerifyError};
use crate::guest::{Guest, Halt, after};
use crate::hands::Hands;
use crate::personality::{Change, Channel, Hearer, Person, protect_order, unmap_order};
use crate::platform::{
    IMAGE, Orders, Place, PlatformError, Process, Segment, Segments, Shown, Then, Together,
};
use crate::ranges::Ranges;
use crate::standing::{Rest, Standing, Wait, read_all};
use crate::warm::{Limits, Stats};

use compare::compare;

const PAGE: u64 = PAGE_SIZE as u64;
/// Images that the mappings of one process may show besides each other. Beyond that a new process is made.
const SHOWN: usize = 64;

/// Whether calls may be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Footing {
    /// They go on from the present state.
    Live,
    /// The next one starts from the state that the guest stands on.
    Due,
    /// The last one was cut short: it takes a reset.
    Fallen,
}

/// A frozen guest's live process.
#[derive(Debug)]
pub struct Instance {
    standing: Standing,
    limits: Limits,
    live: Option<Live>,
    footing: Footing,
    /// How the guest waits for the caller.
    wait: Wait,
    /// Of what runs since it was last brought back.
    generation: u64,
    stats: Stats,
}

/// A process and the slot that its memory is.
#[derive(Debug)]
struct Live {
    guest: Guest,
    slot: RemoteSlot,
    /// What its mappings may show, which must not go before them.
    shown: Vec<Image>,
    plain: bool,
    /// Whether nothing has run in it yet: it stands where it was made to stand.
    unused: bool,
}

/// An error of a slot's owner, or of the slot itself.
fn failed(error: RemoteError<PlatformError>) -> PlatformError {
    match error {
        RemoteError::Owner(error) => error,
        other => {
            PlatformError::kernel("resetting memory", std::io::Error::other(other.to_string()))
        }
    }
}

/// A failure before the guest ran.
fn unstarted(source: PlatformError) -> CallError {
    CallError::Platform { source, messages: String::new() }
}

impl Live {
    /// A new process in the state `standing`.
    fn new(standing: &Standing, limits: &Limits) -> Result<Self, PlatformError> {
        let rest = &standing.rest;
        let shown = Shown::ahead(&standing.image)?;
        let process = Process::new(Some((&shown, &rest.segments)))?;
        let person = Person::new(Arc::clone(&rest.state), limits.output);
        let mut guest = Guest::new(process, person);
        guest.base = Some(standing.clone());
        let slot =
            RemoteSlot::new(&standing.image, limits.strategy, limits.write_set).map_err(failed)?;
        Ok(Self { guest, slot, shown: vec![standing.image.clone()], plain: true, unused: true })
    }

    fn hands<'a>(&'a mut self, segments: &'a Segments) -> (&'a mut RemoteSlot, Hands<'a>) {
        (&mut self.slot, Hands { guest: &mut self.guest, segments, plain: self.plain })
    }

    /// Maps the image of `standing` where `ranges` say, and nothing where it has nothing. The pages of it that are there.
    fn map_back(
        &mut self,
        standing: &Standing,
        ranges: &Ranges,
    ) -> Result<Vec<PageRange>, PlatformError> {
        let layout = &self.guest.person.state.layout;
        let unmap = |r: std::ops::Range<u64>| {
            layout.touches(&r).then(|| unmap_order(r.start, r.end - r.start))
        };
        let calls = ranges.iter().filter_map(unmap).collect();
        ranges.iter().for_each(|range| self.guest.process.forget(range));
        let orders = Orders { calls, ..Orders::default() };
        self.guest.process.carry_out(&orders, Then::Ask)?;
        let parts: Vec<Segment> =
            ranges.iter().flat_map(|range| standing.rest.segments.within(range)).collect();
        let shown = self.guest.process.shown(&standing.image)?;
        self.guest.process.show(&shown, &parts)?;
        if !self.shown.last().is_some_and(|last| last.same(&standing.image)) {
            self.shown.push(standing.image.clone());
        }
        Ok(standing.rest.segments.pages_of(ranges.iter()))
    }

    /// Registers and everything else that is not memory.
    fn set_rest(&mut self, rest: &Rest) {
        if !planted::is(Bug::Register) {
            self.guest.process.set_registers(&rest.registers);
        }
        if !planted::is(Bug::HostState) {
            self.guest.person.state = Arc::clone(&rest.state);
        }
    }
}

/// The orders that copy `pages` back.
fn copies(pages: &[PageRange], segments: &Segments) -> Orders {
    let copy = |part: Segment| [part.start, IMAGE + part.page * PAGE, part.len];
    let copies = pages.iter().flat_map(|run| segments.showing(*run)).map(copy).collect();
    Orders { copies, wipe: true, ..Orders::default() }
}

impl Instance {
    /// An instance that stands on `standing`; its process is made when it is first needed.
    pub(crate) fn new(standing: Standing, limits: Limits) -> Self {
        let stats = Stats {
            image: (standing.rest.segments.pages() * PAGE_SIZE) as u64,
            resident: (standing.image.stored_pages() * PAGE_SIZE) as u64,
            ..Stats::default()
        };
        let wait = standing.rest.wait;
        let (footing, generation) = (Footing::Due, 0);
        Self { standing, limits, live: None, footing, wait, generation, stats }
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Makes the process now, unless there is one.
    ///
    /// # Errors
    /// When the host cannot run guests.
    pub fn prepare(&mut self) -> Result<(), PlatformError> {
        // One that was made before a fork is the parent's, who goes on with it.
        if self.live.as_ref().is_some_and(|live| live.guest.process.is_ours()) {
            return Ok(());
        }
        self.live = None;
        if self.footing == Footing::Live {
            self.footing = Footing::Fallen;
            return Err(PlatformError::Lost);
        }
        self.live = Some(Live::new(&self.standing, &self.limits)?);
        self.stats.processes += 1;
        Ok(())
    }

    /// Sends `request` and returns the answer: what the program writes until it waits for more input. An empty request is the
    /// end of the input. The call goes on from the present state; [`Instance::reset`] goes back.
    ///
    /// A program that reads no input but listens on a port is sent the request through a new connection, and its answer is what it
    /// writes to that until all of its threads wait: for HTTP until the answer is whole.
    ///
    /// # Errors
    /// When the guest ends, takes too long, or writes too much. It takes a reset then.
    pub fn call(&mut self, request: &[u8]) -> Result<Vec<u8>, CallError> {
        self.stats.calls += 1;
        let afresh = self.footing != Footing::Live;
        match self.attempt(request, None) {
            // Somebody else killed it; a guest cannot do that to itself. A call from a frozen state has no effect but its
            // answer, so it can be made again.
            Err(CallError::Platform { source: PlatformError::Ended(status), .. })
                if afresh && status.signal() == Some(libc::SIGKILL) =>
            {
                self.footing = Footing::Due;
                self.attempt(request, None)
            }
            result => result,
        }
    }

    /// As [`Instance::call`], but `hear` hears what the program writes, when and in the pieces in which it does: its messages,
    /// too, and what it writes to `/dev/host`. The program waits meanwhile, and its time goes on; `false` ends it.
    ///
    /// # Errors
    /// As [`Instance::call`]. What was heard may have been half of an answer then.
    pub fn call_heard(
        &mut self,
        request: &[u8],
        hear: impl FnMut(Channel, &[u8]) -> bool + Send + 'static,
    ) -> Result<(), CallError> {
        self.stats.calls += 1;
        self.attempt(request, Some(Hearer(Box::new(hear)))).map(drop)
    }

    /// A random number of its own for what runs from a frozen state on: the same for calls that go on from one another, another
    /// one after each reset, rollback and fork. A program that keeps a generator of random numbers in its memory can be told
    /// by it to seed that anew.
    pub fn generation(&mut self) -> u64 {
        if self.footing != Footing::Live {
            self.generation = random_word();
        }
        self.generation
    }

    /// The program's files as they are now. A copy costs nothing, and never changes.
    #[must_use]
    pub fn files(&self) -> &Tree {
        match &self.live {
            Some(live) if self.footing == Footing::Live => &live.guest.person.state.tree,
            _ => &self.standing.rest.state.tree,
        }
    }

    /// Changes the program's files from outside, between two calls. What it has mapped of a file keeps what it shows.
    ///
    /// # Errors
    /// [`CallError::NeedsReset`] after a call that was cut short; when the host cannot run guests.
    pub fn change_files<T>(&mut self, change: impl FnOnce(&mut Tree) -> T) -> Result<T, CallError> {
        if self.footing == Footing::Fallen {
            return Err(CallError::NeedsReset);
        }
        self.prepare().map_err(unstarted)?;
        if self.footing == Footing::Due {
            self.generation = random_word();
            // The present state is the one that it stands on, but the process may not be in it yet.
            let _together = Together::new();
            let carried = self.restore().and_then(|orders| {
                let live = self.live.as_mut().ok_or(PlatformError::Lost)?;
                live.unused = false;
                live.guest.process.carry_out(&orders, Then::Ask)
            });
            if let Err(error) = carried {
                self.live = None;
                return Err(unstarted(error));
            }
            self.footing = Footing::Live;
        }
        let live = self.live.as_mut().ok_or(PlatformError::Lost).map_err(unstarted)?;
        Ok(change(&mut live.guest.person.change().tree))
    }

    /// Goes back to the state that it stands on, and sends `request` from there.
    ///
    /// # Errors
    /// As [`Instance::call`].
    pub fn call_pristine(&mut self, request: &[u8]) -> Result<Vec<u8>, CallError> {
        self.reset();
        self.call(request)
    }

    fn attempt(&mut self, request: &[u8], hearer: Option<Hearer>) -> Result<Vec<u8>, CallError> {
        if self.footing == Footing::Fallen {
            return Err(CallError::NeedsReset);
        }
        let deadline = after(self.limits.time);
        // It may start a thread, which must not stay with us.
        self.prepare().map_err(unstarted)?;
        let _together = Together::new();
        if let Some(live) = &mut self.live {
            live.guest.person.streams.set_hearer(hearer);
        }
        let started = self.start(request, deadline);
        self.footing = Footing::Fallen;
        let halted = match started {
            Ok(halted) => halted,
            Err(source) => {
                self.live = None;
                return Err(unstarted(source));
            }
        };
        let Some(Live { guest, .. }) = &mut self.live else {
            return Err(unstarted(PlatformError::Lost));
        };
        let halt = halted.map_or_else(|| guest.run(deadline), Ok);
        for (number, count) in std::mem::take(&mut guest.person.unserved) {
            *self.stats.unserved.entry(number).or_default() += count;
        }
        let messages = guest.messages();
        guest.person.streams.set_hearer(None);
        let output = std::mem::take(&mut guest.person.streams.output);
        let error = match halt {
            Ok(Halt::Idle(wait)) => {
                self.wait = wait;
                self.footing = Footing::Live;
                return Ok(output);
            }
            // From the stub it can be brought back; from within the kernel it cannot.
            Ok(Halt::End(end, Place::Stub)) => {
                return Err(CallError::Ended { end, output, messages });
            }
            Ok(Halt::End(end, Place::Kernel(_))) => CallError::Ended { end, output, messages },
            Ok(Halt::Late) => CallError::Late { messages },
            Err(source) => CallError::Platform { source, messages },
        };
        self.live = None;
        Err(error)
    }

    /// Lets the guest, which is prepared, run with `request`; brings it back first where that is due.
    fn start(&mut self, request: &[u8], deadline: Instant) -> Result<Option<Halt>, PlatformError> {
        let due = self.footing == Footing::Due;
        let orders = if due { self.restore()? } else { Orders::default() };
        let Some(live) = &mut self.live else { return Err(PlatformError::Lost) };
        live.unused = false;
        live.guest.process.follow();
        live.guest.resume(&self.wait, request, orders, deadline)
    }

    /// Goes back to the state that it stands on, from the next call on.
    pub fn reset(&mut self) {
        self.footing = Footing::Due;
    }

    /// Brings everything but the write set back, and returns the orders that copy that.
    fn restore(&mut self) -> Result<Orders, PlatformError> {
        let Some(live) = &mut self.live else { return Err(PlatformError::Lost) };
        let rest = &self.standing.rest;
        if live.unused {
            live.set_rest(rest);
            self.wait = rest.wait;
            return Ok(Orders { wipe: true, ..Orders::default() });
        }
        live.guest.end_others();
        live.guest.process.look_for_content();
        let mut disturbed = std::mem::take(&mut live.guest.disturbed);
        if planted::is(Bug::Mapping) {
            disturbed = Ranges::default();
        }
        live.guest.replaced = Ranges::default();
        if !disturbed.is_empty() {
            let fresh = live.map_back(&self.standing, &disturbed)?;
            live.slot.forget(&fresh);
        }
        let (slot, mut hands) = live.hands(&rest.segments);
        let pages = slot.reset(&mut hands).map_err(failed)?;
        let orders = copies(pages, &rest.segments);
        self.stats.copied = orders.copies.iter().map(|copy| copy[2]).sum();
        live.set_rest(rest);
        self.wait = rest.wait;
        Ok(orders)
    }

    /// Brings the guest back and compares all of it with the state that it stands on: every byte, the kernel's list of mappings,
    /// registers, descriptors, files. Returns the bytes that were compared.
    ///
    /// # Errors
    /// The first difference. The process is then killed, and the next call has a new one.
    pub fn verify(&mut self) -> Result<u64, VerifyError> {
        self.footing = Footing::Due;
        let result = (|| {
            self.prepare()?;
            let orders = self.restore()?;
            let Some(live) = &mut self.live else { return Err(PlatformError::Lost.into()) };
            live.guest.process.carry_out(&orders, Then::Ask)?;
            compare(live, &self.standing)
        })();
        if result.is_err() {
            self.live = None;
        }
        result
    }

    /// Whether the last call was cut short, so that a reset is needed.
    #[must_use]
    pub fn needs_reset(&self) -> bool {
        self.footing == Footing::Fallen
    }

    /// Reads the guest's memory as the last call has left it, also one that ended it: what a fuzzer's target has counted, for
    /// example. The next call begins with the reset, if one is due.
    ///
    /// # Errors
    /// [`PlatformError::Lost`] when the process is gone, or there was no call yet; when the guest has nothing mapped there, or may
    /// not read it.
    pub fn read_memory(&self, address: u64, out: &mut [u8]) -> Result<(), PlatformError> {
        match &self.live {
            Some(live) if live.guest.process.is_ours() && !live.unused => {
                read_all(&live.guest, address, out)
            }
            _ => Err(PlatformError::Lost),
        }
    }

    /// Counts so far.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Bytes of private memory that a reset copies back.
    #[must_use]
    pub fn write_set_bytes(&self) -> usize {
        self.live.as_ref().map_or(0, |live| live.slot.write_set_len() * PAGE_SIZE)
    }

    /// The process that plays the guest at the moment, if there is one.
    #[must_use]
    pub fn process_id(&self) -> Option<u32> {
        self.live.as_ref().map(|live| live.guest.process.id())
    }

    /// Freezes the present state, and stands on it from then on.
    pub(crate) fn checkpoint(&mut self) -> Result<Standing, CallError> {
        let standing = self.frozen(true)?;
        self.standing = standing.clone();
        Ok(standing)
    }

    /// Freezes the present state. The one that the guest stands on stays.
    pub(crate) fn freeze_standing(&mut self) -> Result<Standing, CallError> {
        self.frozen(false)
    }

    fn frozen(&mut self, moves: bool) -> Result<Standing, CallError> {
        match self.footing {
            Footing::Fallen => return Err(CallError::NeedsReset),
            Footing::Due => return Ok(self.standing.clone()),
            Footing::Live => {}
        }
        self.prepare().map_err(unstarted)?;
        if let Some(live) = &self.live
            && !live.guest.person.state.family.is_single()
        {
            let names = live.guest.person.state.family.children();
            return Err(CallError::Children { names });
        }
        let captured = self.capture(moves);
        // Of a process that failed in the middle nothing is known.
        captured.map_err(|source| {
            self.live = None;
            self.footing = Footing::Fallen;
            unstarted(source)
        })
    }

    fn capture(&mut self, moves: bool) -> Result<Standing, PlatformError> {
        let Some(live) = &mut self.live else { return Err(PlatformError::Lost) };
        live.guest.publish()?;
        let old = &self.standing.rest;
        let state = Arc::clone(&live.guest.person.state);
        let registers = live.guest.process.registers();
        let segments = old.segments.place(state.layout.mappings());
        let (disturbed, replaced) = (live.guest.disturbed.clone(), live.guest.replaced.clone());
        // What was mapped or changed since: pages that hold something, and, of new memory, those that do not.
        let (mut placed, mut gone) = (Vec::new(), segments.without(&old.segments));
        for part in disturbed.iter().flat_map(|range| segments.within(range)) {
            let mut at = part.start;
            for held in live.guest.process.populated(part.range())? {
                let zero = replaced.within(at..held.start);
                gone.extend(segments.pages_of(zero.into_iter()));
                placed.extend(segments.pages_of(std::iter::once(held.clone())));
                at = held.end;
            }
            gone.extend(segments.pages_of(replaced.within(at..part.range().end).into_iter()));
        }
        placed.sort_unstable_by_key(|run| run.start);
        gone.sort_unstable_by_key(|run| run.start);
        let closed: Vec<_> = disturbed
            .iter()
            .flat_map(|range| segments.within(range))
            .filter(|part| !part.allows(libc::PROT_READ))
            .collect();
        let protect = |as_mapped: bool| {
            let read = libc::PROT_READ as u64;
            let protection = |part: &Segment| if as_mapped { part.protection } else { read };
            let order = |part: &Segment| protect_order(part.start, part.len, protection(part));
            Change { before: closed.iter().map(order).collect(), ..Change::default() }
        };
        if !closed.is_empty() {
            live.guest.enact(protect(false), Then::Ask)?;
        }
        let pages = segments.pages();
        let (slot, mut hands) = live.hands(&segments);
        let image = if moves {
            slot.checkpoint(&mut hands, pages, &placed, &gone)
        } else {
            slot.freeze(&mut hands, pages, &placed, &gone)
        };
        let image = image.map_err(failed)?;
        if !closed.is_empty() {
            live.guest.enact(protect(true), Then::Ask)?;
        }
        let rest = Arc::new(Rest { segments, state, registers, wait: self.wait });
        let standing = Standing { image, rest };
        if moves {
            // What was mapped since belongs to the state now: written pages of it must be noticed from here on.
            live.guest.disturbed = Ranges::default();
            live.guest.replaced = Ranges::default();
            live.guest.base = Some(standing.clone());
            let parts = disturbed.iter().flat_map(|range| standing.rest.segments.within(range));
            for part in parts.filter(|part| part.allows(libc::PROT_WRITE)) {
                live.guest.process.watch(part.range())?;
            }
            live.plain = false;
            let differing = self.standing.image.differing(&standing.image);
            live.guest.process.show_window(&Shown::new(&standing.image)?, &differing)?;
        }
        Ok(standing)
    }

    /// Goes to another state of the same guest, and stands on it from then on.
    pub(crate) fn switch(&mut self, to: &Standing) {
        let ours = self
            .live
            .as_ref()
            .is_some_and(|live| live.guest.process.is_ours() && live.shown.len() < SHOWN);
        // A process that cannot be brought there is replaced when the next call comes.
        if !ours || self.move_to(to).is_err() {
            self.live = None;
        }
        self.standing = to.clone();
        self.footing = Footing::Due;
    }

    fn move_to(&mut self, to: &Standing) -> Result<(), PlatformError> {
        let Some(live) = &mut self.live else { return Ok(()) };
        live.unused = false;
        if self.standing.image.same(&to.image) && Arc::ptr_eq(&self.standing.rest, &to.rest) {
            return Ok(());
        }
        live.guest.end_others();
        live.guest.base = Some(to.clone());
        let (old, new) = (&self.standing.rest.segments, &to.rest.segments);
        let differing = self.standing.image.differing(&to.image);
        // Where it is mapped otherwise, and what the guest may not write, but differs.
        let mut moved = std::mem::take(&mut live.guest.disturbed);
        live.guest.replaced = Ranges::default();
        old.missing_in(new).chain(new.missing_in(old)).for_each(|s| moved.insert(s.range()));
        for part in differing.iter().flat_map(|run| new.showing(*run)) {
            if !part.allows(libc::PROT_WRITE) {
                moved.insert(part.range());
            }
        }
        let fresh = live.map_back(to, &moved)?;
        live.guest.process.show_window(&Shown::new(&to.image)?, &differing)?;
        live.plain = false;
        let (slot, mut hands) = live.hands(new);
        let pages = slot.switch(&mut hands, &to.image, &fresh).map_err(failed)?;
        let orders = copies(pages, new);
        live.set_rest(&to.rest);
        live.guest.process.carry_out(&orders, Then::Ask)
    }
}
