//! An instance: a live guest in a frozen state, which is called and reset.
//!
//! Promises: after a reset, a checkpoint or a switch, every byte of memory, all registers,
//! mappings, descriptors and files are those of the state that it then stands on. A process that
//! cannot be rolled back is replaced.
//!
//! A reset takes effect with the next call, in the round trip that delivers the request.

mod compare;
mod dial;
mod memory_limit;
mod output;
mod spare;
mod working_set;
mod written_memory;

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh_files::Tree;
use afresh_memory::PAGE_SIZE;
use afresh_sys::planted::{self, Bug};

use crate::error::CallError;
use crate::file_view::FileView;
use crate::frozen_state::{FrozenKernel, FrozenState, IdleWait};
use crate::guest::{Guest, StopReason, after};
use crate::limits::Limits;
use crate::outbound::OutboundLimits;
use crate::platform::{Continuation, CpuPinning, PlatformError, StubCommands, Trap};
use crate::sentry::{End, FIRST, Generation, Kernel, OutputSinks, Sentry, count_unserved};
use crate::start_turn::StartTurn;
use crate::stats::Stats;
use crate::subprocess::Subprocess;
use crate::subprocess_memory::read_all;
use crate::subprocesses::ParkedSubprocesses;

pub use spare::SpareProcess;

/// Time between calls that a program with connections to the outside is left alone.
const LISTENS: Duration = Duration::from_millis(20);

/// Whether calls may be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResetState {
    /// The next call continues from the present state.
    Live,
    /// The next one starts from the state that the guest stands on.
    NeedsReset,
    /// The last one was cut short: it takes a reset.
    Failed,
}

/// A live instance of a warm program.
#[derive(Debug)]
pub struct Instance {
    standing: FrozenState,
    limits: Limits,
    live: Option<LiveGuest>,
    footing: ResetState,
    /// The wait of the guest for its caller.
    wait: IdleWait,
    /// The generation since the last reset.
    generation: Generation,
    /// Of all of its processes.
    outbound: OutboundLimits,
    stats: Stats,
    /// Bytes of private memory at the last checkpoint, by the PID of the process on the host.
    frozen_memory: BTreeMap<u32, u64>,
    /// Shows the files during calls whose output is heard.
    view: Option<FileView>,
}

/// The processes of the guest.
#[derive(Debug)]
struct LiveGuest {
    guest: Guest,
    /// Whether nothing has run in it yet: it stands where it was made to stand.
    unused: bool,
}

/// A failure before the guest ran.
fn unstarted(source: PlatformError) -> CallError {
    CallError::Platform { source, messages: String::new() }
}

/// Runs the service of a guest. A panic becomes an error of this call: one guest must not stop the
/// threads of others. The process is given up then.
fn guarded<T>(serve: impl FnOnce() -> Result<T, PlatformError>) -> Result<T, PlatformError> {
    catch_unwind(AssertUnwindSafe(serve)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Err(PlatformError::Panicked(text.unwrap_or_default()))
    })
}

impl LiveGuest {
    /// A new process in the state `standing`.
    fn new(
        standing: &FrozenState,
        limits: &Limits,
        generation: &Generation,
        outbound: &OutboundLimits,
    ) -> Result<Self, PlatformError> {
        let first = standing.ground(FIRST).ok_or(PlatformError::Lost)?;
        let body = Subprocess::new_process(&first, limits, Some(&standing.rest.origin))?;
        let sentry = Self::new_sentry(standing, limits, generation, outbound);
        let others = ParkedSubprocesses::new(Some((standing.clone(), limits.clone())));
        Ok(Self { guest: Guest::new(body, sentry, others), unused: true })
    }

    /// Shows the program its new generation, once the rest of it is as it was frozen, and before it
    /// runs.
    fn begin_generation(&mut self, rest: &FrozenKernel) -> Result<(), PlatformError> {
        if !rest.watches_generation || planted::is(Bug::OldGeneration) {
            return Ok(());
        }
        self.guest.sentry.begin_generation()
    }

    /// Everything that is neither memory nor registers.
    fn set_state(&mut self, rest: &FrozenKernel) {
        // Connections do not belong to that state.
        self.guest.sentry.lines.clear();
        if !planted::is(Bug::HostState) {
            self.guest.sentry.state = Arc::clone(&rest.state);
        }
        self.guest.sentry.streams.clock = rest.clock.resume();
        self.guest.set_clock();
    }
}

impl Instance {
    /// An instance that stands on `standing`; its process is made when it is first needed.
    pub(crate) fn new(standing: FrozenState, limits: Limits) -> Self {
        let (mapped, stored) = standing.pages();
        let stats = Stats {
            image: (mapped * PAGE_SIZE) as u64,
            resident: (stored * PAGE_SIZE) as u64,
            ..Stats::default()
        };
        let wait = standing.rest.wait;
        let (footing, generation) = (ResetState::NeedsReset, Generation::default());
        let outbound = OutboundLimits::default();
        Self {
            standing,
            limits,
            live: None,
            footing,
            wait,
            generation,
            outbound,
            stats,
            frozen_memory: BTreeMap::new(),
            view: None,
        }
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Makes the process now, if it does not exist.
    ///
    /// # Errors
    /// When the host cannot run guests.
    pub fn prepare(&mut self) -> Result<(), PlatformError> {
        // A process from before a fork belongs to the parent.
        if self.live.as_ref().is_some_and(|live| live.guest.body.process.is_ours()) {
            return Ok(());
        }
        self.live = None;
        if self.footing == ResetState::Live {
            self.footing = ResetState::Failed;
            return Err(PlatformError::Lost);
        }
        let live = LiveGuest::new(&self.standing, &self.limits, &self.generation, &self.outbound)?;
        self.live = Some(live);
        self.stats.processes += 1;
        Ok(())
    }

    /// Sends `request` and returns the answer: the program's output until it waits for more input.
    /// An empty request is the end of the input. The call continues from the present state.
    /// [`Instance::reset`] undoes it.
    ///
    /// A program that listens on a port instead of reading input gets the request over a new
    /// connection. Its answer is its output there until all of its threads wait, or for HTTP until
    /// the answer is complete.
    ///
    /// # Errors
    /// When the guest ends, or exceeds a limit of time or output. It then needs a reset.
    pub fn call(&mut self, request: &[u8]) -> Result<Vec<u8>, CallError> {
        self.stats.calls += 1;
        self.attempt_twice(Some(request), OutputSinks::default, || false)
    }

    /// Makes a call, again in a new process if the first one failed for no fault of the call: it
    /// was killed from outside, or an earlier call had spoiled it. A call from a frozen state has
    /// no effect but its answer, so it can be repeated until something of that was `heard`.
    fn attempt_twice(
        &mut self,
        request: Option<&[u8]>,
        sinks: impl Fn() -> OutputSinks,
        heard: impl Fn() -> bool,
    ) -> Result<Vec<u8>, CallError> {
        let from_frozen = self.footing != ResetState::Live;
        let used = self.live.as_ref().is_some_and(|live| !live.unused);
        let is_innocent = |source: &PlatformError| match source {
            PlatformError::Ended(status) => used || status.signal() == Some(libc::SIGKILL),
            PlatformError::Forged(_) | PlatformError::Kernel { .. } | PlatformError::Lost => used,
            _ => false,
        };
        match self.attempt(request, sinks()) {
            Err(CallError::Platform { source, .. })
                if from_frozen && is_innocent(&source) && !heard() =>
            {
                self.live = None;
                self.footing = ResetState::NeedsReset;
                self.attempt(request, sinks())
            }
            result => result,
        }
    }

    /// Time until the next event in the program: zero if a thread can run, `None` if all wait for
    /// the caller. It is also zero if a frozen state has an event, because its time passes only
    /// while it runs.
    #[must_use]
    pub fn due(&self) -> Option<Duration> {
        let live = self.live.as_ref().filter(|_| self.footing == ResetState::Live);
        let Some(live) = live else { return self.standing.rest.due() };
        let sentry = &live.guest.sentry;
        let due = self.wait.due(&sentry.state, sentry.now());
        match sentry.lines.is_empty() {
            true => due,
            // Data from outside arrives without an event here.
            false => Some(due.map_or(LISTENS, |due| due.min(LISTENS))),
        }
    }

    /// Whether the program has a live process with this PID.
    #[must_use]
    pub fn has_process(&self, id: u32) -> bool {
        self.state().processes.lives(id)
    }

    /// A unique random number of the run from a frozen state. It changes with each reset, rollback
    /// and fork, and not between other calls. The program reads it from `/dev/afresh/generation`,
    /// which also announces each change, so that it can reseed the generators of random numbers in
    /// its memory.
    pub fn generation(&mut self) -> u64 {
        self.generation.get()
    }

    /// The program's present files. A copy costs nothing, and never changes.
    #[must_use]
    pub fn files(&self) -> &Tree {
        &self.state().tree
    }

    /// Shows the files to another thread during further calls with streamed output
    /// ([`Instance::call_streaming`], [`Instance::proceed`]).
    pub fn show_files(&mut self, view: FileView) {
        self.view = Some(view);
    }

    /// The present state.
    fn state(&self) -> &Kernel {
        match &self.live {
            Some(live) if self.footing == ResetState::Live => &live.guest.sentry.state,
            _ => &self.standing.rest.state,
        }
    }

    /// Changes the program's files from outside, between two calls. Mapped contents of a file stay
    /// unchanged.
    ///
    /// # Errors
    /// [`CallError::NeedsReset`] after a call that was cut short; when the host cannot run guests.
    pub fn change_files<T>(&mut self, change: impl FnOnce(&mut Tree) -> T) -> Result<T, CallError> {
        self.change(|state| change(&mut state.tree))
    }

    /// Changes the state between two calls.
    fn change<T>(&mut self, change: impl FnOnce(&mut Kernel) -> T) -> Result<T, CallError> {
        self.live_sentry()?.with_files(change).map_err(unstarted)
    }

    /// The sentry of the present state, whose process is made or reset first.
    fn live_sentry(&mut self) -> Result<&mut Sentry, CallError> {
        if self.footing == ResetState::Failed {
            return Err(CallError::NeedsReset);
        }
        self.bring_back().map_err(unstarted)?;
        let live = self.live.as_mut().ok_or(PlatformError::Lost).map_err(unstarted)?;
        Ok(&mut live.guest.sentry)
    }

    /// Has the process be in the present state, where that is the one that it stands on. A process
    /// that cannot be, because it was killed for example, is replaced by a new one.
    fn bring_back(&mut self) -> Result<(), PlatformError> {
        let used = self.live.is_some() && self.footing == ResetState::NeedsReset;
        match self.bring_back_once() {
            Err(_) if used => self.bring_back_once(),
            result => result,
        }
    }

    fn bring_back_once(&mut self) -> Result<(), PlatformError> {
        self.prepare()?;
        if self.footing == ResetState::NeedsReset {
            let _together = CpuPinning::new();
            let carried = self.restore().and_then(|orders| {
                let live = self.live.as_mut().ok_or(PlatformError::Lost)?;
                live.unused = false;
                live.guest.body.process.execute(&orders, Continuation::Ask)?;
                live.begin_generation(&self.standing.rest)
            });
            if let Err(error) = carried {
                self.live = None;
                return Err(error);
            }
            self.footing = ResetState::Live;
        }
        Ok(())
    }

    /// Resets the program to the state that it stands on, and sends `request`.
    ///
    /// # Errors
    /// As [`Instance::call`].
    pub fn call_pristine(&mut self, request: &[u8]) -> Result<Vec<u8>, CallError> {
        self.reset();
        self.call(request)
    }

    fn attempt(
        &mut self,
        request: Option<&[u8]>,
        sinks: OutputSinks,
    ) -> Result<Vec<u8>, CallError> {
        if self.footing == ResetState::Failed {
            return Err(CallError::NeedsReset);
        }
        let is_first = self.live.as_ref().is_none_or(|live| live.unused);
        // The wait for it is no time of the call.
        let _turn = is_first.then(|| StartTurn::take(self.limits.stop.as_ref()));
        let deadline = after(self.limits.time);
        // It may start a thread, which must not stay with us.
        self.prepare().map_err(unstarted)?;
        let _together = CpuPinning::new();
        if let Some(live) = &mut self.live {
            let slice = self.limits.slice.filter(|_| sinks.hearer.is_some());
            live.guest.rests = slice.map(after);
            live.guest.poll = self.limits.poll;
            live.guest.sentry.streams.stop = self.limits.stop.clone();
            live.guest.sentry.streams.set_sinks(sinks);
        }
        let started = guarded(|| self.start(request, deadline));
        self.footing = ResetState::Failed;
        let halted = match started {
            Ok(halted) => halted,
            Err(source) => {
                self.live = None;
                return Err(unstarted(source));
            }
        };
        let Some(LiveGuest { guest, .. }) = &mut self.live else {
            return Err(unstarted(PlatformError::Lost));
        };
        let halt = halted.map_or_else(|| guarded(|| guest.run(deadline)), Ok);
        for (number, count) in std::mem::take(&mut guest.sentry.unserved) {
            count_unserved(&mut self.stats.unserved, number, count);
        }
        let messages = guest.messages();
        guest.sentry.streams.set_sinks(OutputSinks::default());
        let output = std::mem::take(&mut guest.sentry.streams.output);
        let error = match halt {
            Ok(StopReason::Idle(wait)) => {
                self.wait = wait;
                self.footing = ResetState::Live;
                if is_first {
                    self.record_working_set();
                }
                return Ok(output);
            }
            // From the stub it can be reset; from within the kernel it cannot.
            Ok(StopReason::End(end, Trap::Stub)) => {
                // A program that has ended has no connections.
                guest.sentry.lines.clear();
                return Err(CallError::Ended { end, output, messages });
            }
            Ok(StopReason::End(end, Trap::Kernel(_))) => CallError::Ended { end, output, messages },
            Ok(StopReason::Late) => CallError::Late { limit: self.limits.time, messages },
            Ok(StopReason::CpuTime) => {
                CallError::CpuTime { limit: self.limits.cpu_time.unwrap_or_default(), messages }
            }
            Ok(StopReason::Unheard) => CallError::Ended { end: End::Unheard, output, messages },
            Err(source) => CallError::Platform { source, messages },
        };
        self.live = None;
        Err(error)
    }

    /// Lets the guest, which is prepared, run with `request`; brings it back first where that is
    /// due.
    fn start(
        &mut self,
        request: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<Option<StopReason>, PlatformError> {
        let due = self.footing == ResetState::NeedsReset;
        let mut orders = if due { self.restore()? } else { StubCommands::default() };
        let Some(live) = &mut self.live else { return Err(PlatformError::Lost) };
        live.unused = false;
        live.guest.body.ran = true;
        live.guest.body.process.follow();
        if due && self.standing.rest.watches_generation {
            let orders = std::mem::take(&mut orders);
            live.guest.body.process.execute(&orders, Continuation::Ask)?;
            live.begin_generation(&self.standing.rest)?;
        }
        // The reset is not part of the call.
        live.guest.set_cpu_time_limit(self.limits.cpu_time);
        live.guest.resume(&self.wait, request, orders, deadline)
    }

    /// Resets the program to the state that it stands on, before the next call. Connections to the
    /// outside are closed now.
    pub fn reset(&mut self) {
        self.footing = ResetState::NeedsReset;
        self.limits.stop = None;
        self.generation.renew();
        if self.limits.replaced && self.live.as_ref().is_some_and(|live| !live.unused) {
            self.live = None;
        }
        if let Some(live) = &mut self.live
            && live.guest.body.process.is_ours()
        {
            live.guest.sentry.lines.clear();
        }
    }

    /// Brings everything but the write set back, and returns the orders that copy that.
    fn restore(&mut self) -> Result<StubCommands, PlatformError> {
        let Some(live) = &mut self.live else { return Err(PlatformError::Lost) };
        let rest = &self.standing.rest;
        if live.unused {
            live.set_state(rest);
            live.guest.sentry.shared.restore(&rest.state.tree, &rest.live)?;
            live.guest.attach()?;
            self.wait = rest.wait;
            return Ok(StubCommands { wipe: true, ..StubCommands::default() });
        }
        let orders = live.guest.restore(rest)?;
        self.stats.copied = orders.copies.iter().map(|copy| copy[2]).sum();
        live.set_state(rest);
        live.guest.attach()?;
        self.wait = rest.wait;
        Ok(orders)
    }

    /// Whether the last call was cut short, so that a reset is needed.
    #[must_use]
    pub fn needs_reset(&self) -> bool {
        self.footing == ResetState::Failed
    }

    /// Reads the guest's memory after the last call, also if that call ended the guest, for example
    /// the counters of a fuzz target. A pending reset is made at the next call.
    ///
    /// # Errors
    /// [`PlatformError::Lost`] when the process has ended, or there was no call yet; when the guest
    /// has nothing mapped there, or may not read it.
    pub fn read_memory(&self, address: u64, out: &mut [u8]) -> Result<(), PlatformError> {
        match &self.live {
            Some(live) if live.guest.body.process.is_ours() && !live.unused => {
                read_all(&live.guest.body.process, &[(address, out.len())], out)
            }
            _ => Err(PlatformError::Lost),
        }
    }

    /// The counts of this instance.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Bytes of private memory that a reset copies back.
    #[must_use]
    pub fn write_set_bytes(&self) -> usize {
        self.live.as_ref().map_or(0, LiveGuest::write_set_bytes)
    }

    /// The present host process of the guest's first process, if one exists.
    #[must_use]
    pub fn process_id(&self) -> Option<u32> {
        self.live.as_ref().map(|live| live.guest.body.process.id())
    }

    /// Freezes the present state, and stands on it from then on.
    pub(crate) fn checkpoint(&mut self) -> Result<FrozenState, CallError> {
        let standing = self.frozen(true)?;
        self.standing = standing.clone();
        if self.footing == ResetState::Live {
            self.note_frozen_memory();
        }
        Ok(standing)
    }

    /// Freezes the present state. The one that the guest stands on stays.
    pub(crate) fn freeze_standing(&mut self) -> Result<FrozenState, CallError> {
        self.frozen(false)
    }

    fn frozen(&mut self, moves: bool) -> Result<FrozenState, CallError> {
        match self.footing {
            ResetState::Failed => return Err(CallError::NeedsReset),
            ResetState::NeedsReset => return Ok(self.standing.clone()),
            ResetState::Live => {}
        }
        self.prepare().map_err(unstarted)?;
        let captured = match &mut self.live {
            Some(live) => guarded(|| live.guest.freeze(self.wait, moves)),
            None => Err(PlatformError::Lost),
        };
        // The state of a process that failed in the middle is unknown.
        captured.map_err(|source| {
            self.live = None;
            self.footing = ResetState::Failed;
            unstarted(source)
        })
    }

    /// Goes to another state of the same guest, and stands on it from then on.
    pub(crate) fn switch(&mut self, to: &FrozenState) {
        let ours = self.live.as_ref().is_some_and(|live| live.guest.body.process.is_ours());
        // A process that cannot be brought there is replaced when the next call comes.
        if !ours || self.move_to(to).is_err() {
            self.live = None;
        }
        self.standing = to.clone();
        self.frozen_memory.clear();
        self.reset();
    }

    /// The present state, which was frozen just now, is stored as `to` from now on. Everything else
    /// stays, including connections to the outside, unless its process fails.
    pub(crate) fn rehouse(&mut self, to: &FrozenState) {
        let (generation, wait) = (self.generation.drawn_number(), self.wait);
        let kept = match &mut self.live {
            Some(live) if self.footing == ResetState::Live => {
                let sentry = &mut live.guest.sentry;
                let clock = sentry.streams.clock;
                Some((Arc::clone(&sentry.state), sentry.lines.take(), clock))
            }
            _ => None,
        };
        self.switch(to);
        self.generation.set(generation);
        // Otherwise the next call finds out why not.
        if let Some((state, lines, clock)) = kept
            && self.bring_back().is_ok()
            && let Some(live) = &mut self.live
        {
            (live.guest.sentry.state, live.guest.sentry.lines) = (state, lines);
            live.guest.sentry.streams.clock = clock;
            live.guest.set_clock();
            self.wait = wait;
        }
    }

    fn move_to(&mut self, to: &FrozenState) -> Result<(), PlatformError> {
        let Some(live) = &mut self.live else { return Ok(()) };
        live.unused = false;
        if !self.standing.same(to) {
            live.guest.move_to(to)?;
            live.set_state(&to.rest);
            live.guest.attach()?;
        }
        Ok(())
    }
}
