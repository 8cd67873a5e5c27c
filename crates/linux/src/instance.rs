//! An instance: a frozen guest that lives, is called, and goes back to where it stood.
//!
//! What it promises: after a reset, a checkpoint or a switch, every byte of memory, all registers, mappings, descriptors and
//! files are those of the state that it then stands on. A process that cannot be brought there is replaced.
//!
//! A reset is not carried out at once but with the next call, in the same round trip that hands the request in.

mod compare;
mod dial;

use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh_files::Tree;
use afresh_memory::PAGE_SIZE;
use afresh_sys::host::random_word;
use afresh_sys::planted::{self, Bug};

use crate::bodies::Others;
use crate::body::Body;
use crate::error::{CallError, VerifyError};
use crate::guest::{Guest, Halt, after};
use crate::personality::{FIRST, Hearer, Person, State, Writer};
use crate::platform::{Orders, Place, PlatformError, Then, Together};
use crate::standing::{Rest, Standing, Wait, read_all};
use crate::warm::{Limits, Stats};

use compare::compare;

/// How long a program with connections to the outside is left alone between calls.
const LISTENS: Duration = Duration::from_millis(20);

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

/// A frozen guest that lives.
#[derive(Debug)]
pub struct Instance {
    standing: Standing,
    limits: Limits,
    live: Option<Live>,
    footing: Footing,
    /// How the guest waits for the caller.
    wait: Wait,
    /// Of what runs since it was last brought back, once somebody has asked.
    generation: Option<u64>,
    stats: Stats,
}

/// What plays the guest.
#[derive(Debug)]
struct Live {
    guest: Guest,
    /// Whether nothing has run in it yet: it stands where it was made to stand.
    unused: bool,
}

/// A failure before the guest ran.
fn unstarted(source: PlatformError) -> CallError {
    CallError::Platform { source, messages: String::new() }
}

impl Live {
    /// A new process in the state `standing`.
    fn new(standing: &Standing, limits: &Limits) -> Result<Self, PlatformError> {
        let first = standing.ground(FIRST).ok_or(PlatformError::Lost)?;
        let body = Body::made(&first, limits, Some(&standing.rest.origin))?;
        let person = Person::new(
            Arc::clone(&standing.rest.state),
            limits.output,
            Arc::clone(&limits.granted),
        );
        let others = Others::new(Some((standing.clone(), limits.clone())));
        Ok(Self { guest: Guest::new(body, person, others), unused: true })
    }

    /// Everything that is neither memory nor registers.
    fn set_state(&mut self, rest: &Rest) {
        // What was connected to is not of that state.
        self.guest.person.lines.clear();
        if !planted::is(Bug::HostState) {
            self.guest.person.state = Arc::clone(&rest.state);
        }
    }
}

impl Instance {
    /// An instance that stands on `standing`; its process is made when it is first needed.
    pub(crate) fn new(standing: Standing, limits: Limits) -> Self {
        let (mapped, stored) = standing.pages();
        let stats = Stats {
            image: (mapped * PAGE_SIZE) as u64,
            resident: (stored * PAGE_SIZE) as u64,
            ..Stats::default()
        };
        let wait = standing.rest.wait;
        let (footing, generation) = (Footing::Due, None);
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
        if self.live.as_ref().is_some_and(|live| live.guest.body.process.is_ours()) {
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
        match self.attempt(Some(request), None) {
            // Somebody else killed it; a guest cannot do that to itself. A call from a frozen state has no effect but its
            // answer, so it can be made again.
            Err(CallError::Platform { source: PlatformError::Ended(status), .. })
                if afresh && status.signal() == Some(libc::SIGKILL) =>
            {
                self.footing = Footing::Due;
                self.attempt(Some(request), None)
            }
            result => result,
        }
    }

    /// As [`Instance::call`], but `hear` hears what the program writes, when and in the pieces in which it does: its messages,
    /// too, and what it writes to `/dev/host`. The program waits meanwhile, and its time goes on; `false` ends it.
    ///
    /// Where the program has a [slice](crate::Program::slice) of time, the call ends after that once it is answered, though other threads or
    /// processes could go on. [`Instance::proceed`] lets them.
    ///
    /// # Errors
    /// As [`Instance::call`]. What was heard may have been half of an answer then.
    pub fn call_heard(
        &mut self,
        request: &[u8],
        hear: impl FnMut(Writer, &[u8]) -> bool + Send + 'static,
    ) -> Result<(), CallError> {
        self.stats.calls += 1;
        self.attempt(Some(request), Some(Hearer(Box::new(hear)))).map(drop)
    }

    /// Lets the program go on without a call, for a slice of time or until nobody in it can: what it does in the background. `hear` as
    /// for [`Instance::call_heard`].
    ///
    /// # Errors
    /// As [`Instance::call`].
    pub fn proceed(
        &mut self,
        hear: impl FnMut(Writer, &[u8]) -> bool + Send + 'static,
    ) -> Result<(), CallError> {
        self.attempt(None, Some(Hearer(Box::new(hear)))).map(drop)
    }

    /// How long until something happens in the program by itself: not at all where a thread could go on, never where all wait for the
    /// caller.
    #[must_use]
    pub fn due(&self) -> Option<Duration> {
        let wait = match self.footing {
            Footing::Live => self.wait,
            _ => self.standing.rest.wait,
        };
        let due = wait.due(self.state());
        let lines = matches!(&self.live, Some(live) if !live.guest.person.lines.is_empty());
        match lines && self.footing == Footing::Live {
            // Whatever comes from outside comes unasked.
            true => Some(due.map_or(LISTENS, |due| due.min(LISTENS))),
            false => due,
        }
    }

    /// Whether a process of the program's lives.
    #[must_use]
    pub fn has_process(&self, id: u32) -> bool {
        self.state().family.lives(id)
    }

    /// A random number of its own for what runs from a frozen state on: the same for calls that go on from one another, another
    /// one after each reset, rollback and fork. A program that keeps a generator of random numbers in its memory can be told
    /// by it to seed that anew.
    pub fn generation(&mut self) -> u64 {
        *self.generation.get_or_insert_with(random_word)
    }

    /// The program's files as they are now. A copy costs nothing, and never changes.
    #[must_use]
    pub fn files(&self) -> &Tree {
        &self.state().tree
    }

    /// The present state.
    fn state(&self) -> &State {
        match &self.live {
            Some(live) if self.footing == Footing::Live => &live.guest.person.state,
            _ => &self.standing.rest.state,
        }
    }

    /// Changes the program's files from outside, between two calls. What it has mapped of a file keeps what it shows.
    ///
    /// # Errors
    /// [`CallError::NeedsReset`] after a call that was cut short; when the host cannot run guests.
    pub fn change_files<T>(&mut self, change: impl FnOnce(&mut Tree) -> T) -> Result<T, CallError> {
        self.change(|state| change(&mut state.tree))
    }

    /// Changes the state between two calls.
    fn change<T>(&mut self, change: impl FnOnce(&mut State) -> T) -> Result<T, CallError> {
        if self.footing == Footing::Fallen {
            return Err(CallError::NeedsReset);
        }
        self.bring_back().map_err(unstarted)?;
        let live = self.live.as_mut().ok_or(PlatformError::Lost).map_err(unstarted)?;
        Ok(change(live.guest.person.change()))
    }

    /// Has the process be in the present state, where that is the one that it stands on.
    fn bring_back(&mut self) -> Result<(), PlatformError> {
        self.prepare()?;
        if self.footing == Footing::Due {
            let _together = Together::new();
            let carried = self.restore().and_then(|orders| {
                let live = self.live.as_mut().ok_or(PlatformError::Lost)?;
                live.unused = false;
                live.guest.body.process.carry_out(&orders, Then::Ask)
            });
            if let Err(error) = carried {
                self.live = None;
                return Err(error);
            }
            self.footing = Footing::Live;
        }
        Ok(())
    }

    /// Goes back to the state that it stands on, and sends `request` from there.
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
        hearer: Option<Hearer>,
    ) -> Result<Vec<u8>, CallError> {
        if self.footing == Footing::Fallen {
            return Err(CallError::NeedsReset);
        }
        let deadline = after(self.limits.time);
        // It may start a thread, which must not stay with us.
        self.prepare().map_err(unstarted)?;
        let _together = Together::new();
        if let Some(live) = &mut self.live {
            let slice = self.limits.slice.filter(|_| hearer.is_some());
            live.guest.rests = slice.map(after);
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
    fn start(
        &mut self,
        request: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<Option<Halt>, PlatformError> {
        let due = self.footing == Footing::Due;
        let orders = if due { self.restore()? } else { Orders::default() };
        let Some(live) = &mut self.live else { return Err(PlatformError::Lost) };
        live.unused = false;
        live.guest.body.ran = true;
        live.guest.body.process.follow();
        live.guest.resume(&self.wait, request, orders, deadline)
    }

    /// Goes back to the state that it stands on, from the next call on.
    pub fn reset(&mut self) {
        self.footing = Footing::Due;
        self.generation = None;
    }

    /// Brings everything but the write set back, and returns the orders that copy that.
    fn restore(&mut self) -> Result<Orders, PlatformError> {
        let Some(live) = &mut self.live else { return Err(PlatformError::Lost) };
        let rest = &self.standing.rest;
        if live.unused {
            live.set_state(rest);
            self.wait = rest.wait;
            return Ok(Orders { wipe: true, ..Orders::default() });
        }
        let orders = live.guest.restore()?;
        self.stats.copied = orders.copies.iter().map(|copy| copy[2]).sum();
        live.set_state(rest);
        self.wait = rest.wait;
        Ok(orders)
    }

    /// Brings the guest back and compares all of it with the state that it stands on: every byte, the kernel's list of mappings,
    /// registers, descriptors, files. Returns the bytes that were compared.
    ///
    /// # Errors
    /// The first difference. The process is then killed, and the next call has a new one.
    pub fn verify(&mut self) -> Result<u64, VerifyError> {
        self.reset();
        let result = (|| {
            self.prepare()?;
            let orders = self.restore()?;
            let Some(live) = &mut self.live else { return Err(PlatformError::Lost.into()) };
            live.guest.body.process.carry_out(&orders, Then::Ask)?;
            compare(&mut live.guest, &self.standing)
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
            Some(live) if live.guest.body.process.is_ours() && !live.unused => {
                read_all(&live.guest.body.process, &[(address, out.len())], out)
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
        let pages =
            |live: &Live| live.guest.body.write_set_len() + live.guest.others.write_set_len();
        self.live.as_ref().map_or(0, |live| pages(live) * PAGE_SIZE)
    }

    /// The host's process that plays the guest's first at the moment, if there is one.
    #[must_use]
    pub fn process_id(&self) -> Option<u32> {
        self.live.as_ref().map(|live| live.guest.body.process.id())
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
        let captured = match &mut self.live {
            Some(live) => live.guest.freeze(self.wait, moves),
            None => Err(PlatformError::Lost),
        };
        // Of a process that failed in the middle nothing is known.
        captured.map_err(|source| {
            self.live = None;
            self.footing = Footing::Fallen;
            unstarted(source)
        })
    }

    /// Goes to another state of the same guest, and stands on it from then on.
    pub(crate) fn switch(&mut self, to: &Standing) {
        let ours = self.live.as_ref().is_some_and(|live| live.guest.body.process.is_ours());
        // A process that cannot be brought there is replaced when the next call comes.
        if !ours || self.move_to(to).is_err() {
            self.live = None;
        }
        self.standing = to.clone();
        self.reset();
    }

    /// The present state, which was frozen just now, is stored as `to` from now on. All else stays, connections to the outside too,
    /// unless its process fails meanwhile.
    pub(crate) fn rehouse(&mut self, to: &Standing) {
        let (generation, wait) = (self.generation, self.wait);
        let kept = match &mut self.live {
            Some(live) if self.footing == Footing::Live => {
                let person = &mut live.guest.person;
                Some((Arc::clone(&person.state), person.lines.take()))
            }
            _ => None,
        };
        self.switch(to);
        self.generation = generation;
        // Otherwise the next call finds out why not.
        if let Some((state, lines)) = kept
            && self.bring_back().is_ok()
            && let Some(live) = &mut self.live
        {
            (live.guest.person.state, live.guest.person.lines) = (state, lines);
            self.wait = wait;
        }
    }

    fn move_to(&mut self, to: &Standing) -> Result<(), PlatformError> {
        let Some(live) = &mut self.live else { return Ok(()) };
        live.unused = false;
        if !self.standing.same(to) {
            live.guest.move_to(to)?;
            live.set_state(&to.rest);
        }
        Ok(())
    }
}
