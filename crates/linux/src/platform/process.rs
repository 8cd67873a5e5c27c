//! The guest's process: made, run until it calls, answered, given orders, ended.

mod detach;
mod fork;
mod inside;
mod mappings;
mod receipts;
mod registers;

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh_sys::fork::generation;
use afresh_sys::planted::{self, Bug};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Signal, kill_process};

use super::arch::CALL_LEN;
use super::attach::{BootDescriptors, require_processor};
use super::commands::{Continuation, StubCommands};
use super::control::Control;
use super::forker::{SpawnedProcess, unprepared};
use super::frame::{self, Register, ThreadBases};
use super::listener::{Answer, Listener, SeccompNotification};
use super::mapped_image::{FileMapping, MappedImage, reader};
use super::mapping_room::{MAPPINGS_OF_CALL, STUB_MAPPINGS};
use super::pending_content::PendingContent;
use super::segments::Segments;
use super::stub::{FAULTS, INTERRUPT, STUB_TIMEOUT};
use super::template::Template;
use super::vdso::ClockOffsets;
use super::write_tracker::WriteTracker;
use super::zygote;
use super::{PlatformError, boot, filter, stub};
pub(crate) use detach::is_taken_for_restart;
pub(crate) use inside::{AttributeAnswer, DescriptorAnswers};
use receipts::{ExpectedReceipt, ReceiptSource};

/// Time for which the sentry sleeps until a process has booted. Afterwards it looks again and
/// again, also whether the process has ended.
const BOOT_WAIT: Duration = Duration::from_millis(20);

/// A system call of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) number: i64,
    pub(crate) args: [u64; 6],
    pub(crate) place: Trap,
}

/// Where a call waits for its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trap {
    /// In the kernel, under this number.
    Kernel(u64),
    /// In the stub, which takes orders.
    Stub,
}

/// An event of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// It made a system call.
    Call(Call),
    /// It was interrupted, as ordered; the stub has it.
    Interrupted,
    /// One of its instructions fails, with this signal; the stub has it.
    Fault(i32),
    /// Time is up; the guest runs on.
    Late,
}

/// The process.
#[derive(Debug)]
pub(crate) struct Process {
    pub(super) born: SpawnedProcess,
    /// That of the process which this one was forked from, if it was.
    listener: Arc<Listener>,
    control: Control,
    pub(super) track: Option<WriteTracker>,
    /// The image that it shows, while content of that may be missing.
    pub(super) coming: Option<PendingContent>,
    /// Pages that its window has.
    pub(super) window: usize,
    /// The pending question, if the stub has sent one.
    asked: Option<u64>,
    /// Whether an interrupt to it is pending.
    interrupting: bool,
    /// Offset of the frame in the control area, once one was seen.
    frame: Option<usize>,
    pub(crate) bases: ThreadBases,
    /// Nanoseconds of processor time that were looked at, if that is known.
    pub(super) counted: Option<u64>,
    /// CPU time that bills have.
    pub(super) billed: Duration,
    /// The process that made this one. A child forked from that must leave it alone.
    generation: u32,
    receipts: ReceiptSource,
    /// Offsets of its clocks.
    offsets: ClockOffsets,
    /// The kernel has at most so many mappings of it.
    pub(super) mappings_bound: usize,
    /// Start and end of the memory that the sentry could not read or write last.
    pub(super) refused: Cell<Option<(u64, u64)>>,
}

/// Sends [`INTERRUPT`]. The guest can read its `siginfo_t`, which must not show this process's PID.
fn send_interrupt(process: &impl AsRawFd) -> io::Result<()> {
    // SAFETY: all zeroes are a valid value of the plain structure.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    info.si_signo = INTERRUPT;
    info.si_code = libc::SI_QUEUE;
    // SAFETY: the borrowed descriptor is open, and the call only reads the structure.
    let sent = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            process.as_raw_fd(),
            INTERRUPT,
            &raw const info,
            0,
        )
    };
    if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl Process {
    /// Makes a process in which nothing runs yet: with nothing mapped, or with an image in its
    /// segments, whose writable parts are watched from the first [`Process::drain`] on. `template`
    /// shows that image.
    pub(crate) fn new(
        image: Option<(&MappedImage, &Segments)>,
        template: Option<&Template>,
    ) -> Result<Self, PlatformError> {
        require_processor()?;
        let mut control = Control::new()?;
        if let (Some(template), Some(image)) = (template, image) {
            zygote::check()?;
            boot::write_child(&mut control, Some((&[], &[])), template.copied());
            if let Some(born) = template.fork(&control) {
                let made = Self::taken_over(born, control, Some(image), &[], Vec::new());
                // The kernel may lack the memory to copy pages that the guest may not need.
                if made.is_ok() || template.copied().is_empty() {
                    return made;
                }
                control = Control::new()?;
            }
        }
        let pieces = image.map(|(shown, segments)| shown.all(segments)).unwrap_or_default();
        let coming = image.is_some_and(|(shown, _)| shown.is_coming());
        let mappings_bound = pieces.len() + STUB_MAPPINGS;
        let files = pieces.iter().filter(|piece| coming && piece.file.is_some());
        let files: Vec<_> = files.map(FileMapping::range).collect();
        let sent = image.map(|(shown, _)| shown.main()).unwrap_or_default();
        let (mut first, mut rest) = (Vec::new(), Vec::new());
        for piece in pieces {
            let known = piece.is_of(&sent);
            if known && first.len() < boot::PIECES { first.push(piece) } else { rest.push(piece) }
        }
        boot::write_child(&mut control, image.map(|_| (&first[..], &sent[..])), &[]);
        // The boot code maps the files privately, and closes them before the guest runs.
        let lent = sent.iter().map(|sent| reader(sent)).collect::<Result<Vec<_>, _>>()?;
        let born = zygote::start(&control, &lent)?;
        let mut process = Self::taken_over(born, control, image, &rest, files)?;
        process.mappings_bound = mappings_bound;
        Ok(process)
    }

    /// A process that has run nothing of its guest yet.
    fn with_listener(
        born: SpawnedProcess,
        listener: Arc<Listener>,
        control: Control,
        receipts: ReceiptSource,
    ) -> Self {
        Self {
            born,
            listener,
            control,
            track: None,
            coming: None,
            window: 0,
            asked: None,
            interrupting: false,
            frame: None,
            bases: ThreadBases::default(),
            counted: Some(0),
            billed: Duration::ZERO,
            generation: generation(),
            receipts,
            offsets: ClockOffsets::default(),
            mappings_bound: usize::MAX / 2,
            refused: Cell::default(),
        }
    }

    /// Takes a booting process over: maps the remaining parts of its image (`rest`), and has
    /// missing content of `files` reported.
    fn taken_over(
        mut born: SpawnedProcess,
        control: Control,
        image: Option<(&MappedImage, &Segments)>,
        rest: &[FileMapping],
        files: Vec<Range<u64>>,
    ) -> Result<Self, PlatformError> {
        control.await_boot(BOOT_WAIT);
        let attached = BootDescriptors::fetch(&mut born, image.is_some());
        let BootDescriptors { listener, track } = attached.inspect_err(|_| {
            born.kill();
            let _ = born.wait();
        })?;
        let mut process =
            Self::with_listener(born, Arc::new(listener), control, ReceiptSource::new());
        process.track = track;
        process.window = image.map_or(0, |(_, segments)| segments.pages());
        // Its calls are answered here: across two processors each would cost ten times as much.
        process.follow();
        fork::allow_processes(process.born.pid, false)?;
        let first = ExpectedReceipt { receipt: boot::BOOT_RECEIPT, frame: stub::ORDERS_LEN };
        process.question(first, Instant::now() + STUB_TIMEOUT).map_err(|error| match error {
            PlatformError::Kernel { error, .. } => unprepared(error),
            error => error,
        })?;
        if let Some((shown, segments)) = image {
            process.map_pieces(rest)?;
            // Nothing has touched any of it yet: the stub only executes commands.
            process.await_content(shown, segments, files)?;
            if let Some(track) = &mut process.track {
                let writable = segments.iter().filter(|s| s.allows(libc::PROT_WRITE));
                writable.for_each(|segment| track.begin(segment.range()));
            }
        }
        Ok(process)
    }

    /// Where the guest finds the vDSO.
    pub(crate) fn clock(&self) -> Option<u64> {
        self.born.clock
    }

    /// Sets the clocks that the guest reads, while it does not run.
    pub(crate) fn set_clock(&mut self, offsets: ClockOffsets) {
        if self.offsets != offsets {
            self.control.set_clock(offsets);
            self.offsets = offsets;
        }
    }

    /// Waits until the guest calls, or until `deadline`. A call that needs the stub is there.
    pub(crate) fn next(&mut self, deadline: Instant) -> Result<Event, PlatformError> {
        let event = self.next_event(deadline)?;
        if let Event::Call(call @ Call { place: Trap::Kernel(id), number, .. }) = event
            && filter::is_ordered(number)
        {
            self.detach(id)?;
            return Ok(Event::Call(Call { place: Trap::Stub, ..call }));
        }
        Ok(event)
    }

    /// As [`Process::next`], but every call is where the filter has left it.
    fn next_event(&mut self, deadline: Instant) -> Result<Event, PlatformError> {
        let Some(notice) = self.receive(deadline)? else { return Ok(Event::Late) };
        if !stub::holds(notice.pointer) {
            let place = Trap::Kernel(notice.id);
            return Ok(Event::Call(Call { number: notice.number, args: notice.args, place }));
        }
        self.take_question(&notice)?;
        let [tls, second, frame, ..] = notice.args;
        // The kernel puts the frames of all signals there, because the stack is the same.
        let offset = frame.wrapping_sub(stub::CONTROL) as usize;
        let last = stub::CONTROL + frame::LAST_FRAME as u64;
        let inside = (stub::SIGNAL_STACK..=last).contains(&frame);
        let aligned = frame.is_multiple_of(frame::FRAME_ALIGN as u64);
        if !inside || !aligned || self.frame.is_some_and(|known| known != offset) {
            return Err(self.forged("its frame is elsewhere"));
        }
        self.frame = Some(offset);
        self.bases = ThreadBases { tls, second };
        // The stub blocks all signals and makes no call that traps. An interrupt within it left
        // orders undone.
        if stub::holds(self.register(Register::POINTER)) {
            return Err(self.forged("its own code was interrupted"));
        }
        // A guest could have caused any value there anyway.
        let signal = self.control.read_word(offset + frame::INFO) as i32;
        if signal == INTERRUPT {
            self.interrupting = false;
            return Ok(Event::Interrupted);
        }
        if FAULTS.contains(&signal) {
            return Ok(Event::Fault(signal));
        }
        Ok(Event::Call(self.call()))
    }

    /// The call that waits in the stub.
    pub(crate) fn call(&self) -> Call {
        Call {
            number: i64::from(self.register(Register::NUMBER) as u32),
            args: Register::ARGUMENTS.map(|register| self.register(register)),
            place: Trap::Stub,
        }
    }

    /// Has the guest come to the stub, soon.
    pub(crate) fn interrupt(&mut self) -> Result<(), PlatformError> {
        if !self.interrupting {
            send_interrupt(&self.born.pidfd)
                .map_err(|e| PlatformError::kernel("interrupting the guest", e))?;
            self.interrupting = true;
        }
        Ok(())
    }

    /// Whether the guest was interrupted, and has not come to the stub yet.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.interrupting
    }

    /// Restarts the call that waits in the stub when the guest continues.
    pub(crate) fn rewind(&mut self) {
        let call = self.register(Register::POINTER).wrapping_sub(CALL_LEN);
        self.set_register(Register::POINTER, call);
    }

    /// Answers a call with `value`, which is a negative error number or a result.
    pub(crate) fn answer(&mut self, call: &Call, value: i64) -> Result<(), PlatformError> {
        match call.place {
            Trap::Kernel(id) => self.send(id, Answer::Value(value)),
            Trap::Stub => {
                self.set_result(value);
                self.execute(&StubCommands::default(), Continuation::Resume)
            }
        }
    }

    /// Sets the result of the call that waits in the stub.
    pub(crate) fn set_result(&mut self, value: i64) {
        self.set_register(Register::RESULT, value as u64);
    }

    /// Has the guest make its own call, which waits in the kernel.
    pub(crate) fn let_make(&mut self, id: u64) -> Result<(), PlatformError> {
        self.mappings_bound += MAPPINGS_OF_CALL;
        self.send(id, Answer::Made)
    }

    /// Lets the stub execute commands, each of whose calls is checked when it is made.
    pub(crate) fn execute(
        &mut self,
        orders: &StubCommands,
        then: Continuation,
    ) -> Result<(), PlatformError> {
        let deadline = Instant::now() + STUB_TIMEOUT;
        let pieces = orders.pieces();
        for (index, piece) in pieces.iter().enumerate() {
            let then = if index + 1 == pieces.len() { then } else { Continuation::Ask };
            let frame = self.frame.unwrap_or(stub::ORDERS_LEN);
            let receipt = self.receipts.next();
            self.control.write(0, &piece.encode(then, self.bases, frame, receipt));
            let id = self.asked.take().ok_or_else(|| self.forged("it takes no orders now"))?;
            self.mappings_bound += MAPPINGS_OF_CALL * piece.calls.len();
            self.send(id, Answer::Value(0))?;
            self.make_calls(&piece.calls, deadline)?;
            if then == Continuation::Ask {
                self.question(ExpectedReceipt { receipt, frame }, deadline)?;
            }
        }
        Ok(())
    }

    /// Has the stub make `calls`, which it was ordered to.
    fn make_calls(&mut self, calls: &[[u64; 7]], deadline: Instant) -> Result<(), PlatformError> {
        for expected in calls.iter().filter(|call| !filter::passes(call[0])) {
            let notice = self.receive(deadline)?.ok_or(PlatformError::Late)?;
            self.require_order(&notice, expected)?;
            self.send(notice.id, Answer::Made)?;
        }
        Ok(())
    }

    /// Whether `call` is the order `expected`, or the process is killed.
    fn require_order(
        &mut self,
        call: &SeccompNotification,
        expected: &[u64; 7],
    ) -> Result<(), PlatformError> {
        let made = stub::holds(call.pointer)
            && call.number as u64 == expected[0]
            && call.args == expected[1..];
        if made { Ok(()) } else { Err(self.forged("a call that was not ordered")) }
    }

    /// Lends the process a file, while the stub waits for orders: its descriptor there.
    pub(crate) fn lend(&mut self, file: BorrowedFd<'_>) -> Result<u64, PlatformError> {
        let id = self.asked.ok_or_else(|| self.forged("it takes no orders now"))?;
        self.listener.lend(id, file)
    }

    /// Keeps the guest on the caller's processor: a call across two costs ten times as much.
    pub(crate) fn follow(&mut self) {
        let core = rustix::thread::sched_getcpu();
        if self.born.core != Some(core) {
            let mut set = rustix::thread::CpuSet::new();
            set.set(core);
            // Refused where the caller may not run there any more; then it is only slower.
            if rustix::thread::sched_setaffinity(Some(self.born.pid), &set).is_ok() {
                self.born.core = Some(core);
            }
        }
    }

    /// Whether this process made it, not one that this was forked from.
    pub(crate) fn is_ours(&self) -> bool {
        self.generation == generation()
    }

    pub(crate) fn id(&self) -> u32 {
        self.born.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Waits for the stub's question, which must come with the receipt of its orders.
    fn question(
        &mut self,
        expected: ExpectedReceipt,
        deadline: Instant,
    ) -> Result<(), PlatformError> {
        let notice = self.receive(deadline)?.ok_or(PlatformError::Late)?;
        self.check_question(&notice, expected)
    }

    fn check_question(
        &mut self,
        notice: &SeccompNotification,
        expected: ExpectedReceipt,
    ) -> Result<(), PlatformError> {
        self.take_question(notice)?;
        let ExpectedReceipt { receipt, frame } = expected;
        let executed = notice.args[4] == receipt && notice.args[2] == stub::CONTROL + frame as u64;
        if !executed && !planted::is(Bug::StubReceipt) {
            return Err(self.forged("orders were left undone"));
        }
        // The bases that the stub has just loaded.
        if notice.args[..2] != self.bases.words() {
            return Err(self.forged("its bases are not those it was given"));
        }
        Ok(())
    }

    fn take_question(&mut self, notice: &SeccompNotification) -> Result<(), PlatformError> {
        if notice.pointer != stub::asked_at() || notice.number != stub::ASK {
            return Err(self.forged("a call that was not ordered"));
        }
        self.asked = Some(notice.id);
        match notice.args[3] as i64 {
            0 => Ok(()),
            error => Err(PlatformError::kernel(
                "an order to the stub",
                io::Error::from_raw_os_error(error.wrapping_neg() as i32),
            )),
        }
    }

    /// The next notification; serves page faults until then. `None` after `deadline`.
    fn receive(&mut self, deadline: Instant) -> Result<Option<SeccompNotification>, PlatformError> {
        let call = self.receive_any(deadline, None)?;
        // All other processes of the listener wait for answers.
        if let Some(other) = call.filter(|call| call.pid != self.id()) {
            // Its call waits, so the PID is its own. A process with its own value is reaped by it.
            if let Some(pid) = other.process() {
                let _ = kill_process(pid, Signal::KILL);
            }
            return Err(self.forged("another process has called"));
        }
        Ok(call)
    }

    /// As [`Process::receive`], of any process with this listener. Fails once `child` has ended.
    fn receive_any(
        &mut self,
        deadline: Instant,
        child: Option<&SpawnedProcess>,
    ) -> Result<Option<SeccompNotification>, PlatformError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let timeout = Timespec::try_from(left).unwrap_or_default();
            let (called, faulted, ended);
            {
                let own = &self.born.pidfd;
                let mut wait = [
                    PollFd::new(&*self.listener, PollFlags::IN),
                    PollFd::new(own, PollFlags::IN),
                    PollFd::new(child.map_or(own, |child| &child.pidfd), PollFlags::IN),
                    match &self.track {
                        Some(track) => PollFd::from_borrowed_fd(track.descriptor(), PollFlags::IN),
                        None => PollFd::new(own, PollFlags::IN),
                    },
                ];
                // Each one costs every call of the guest time.
                let count = match (&self.track, child) {
                    (Some(_), _) => 4,
                    (None, Some(_)) => 3,
                    (None, None) => 2,
                };
                match poll(&mut wait[..count], Some(&timeout)) {
                    Ok(0) => return Ok(None),
                    Ok(_) => {}
                    Err(Errno::INTR) => continue,
                    Err(e) => return Err(PlatformError::kernel("waiting for the guest", e)),
                }
                called = wait[0].revents().contains(PollFlags::IN);
                ended = !wait[1].revents().is_empty();
                faulted = self.track.is_some() && !wait[3].revents().is_empty();
                if child.is_some() && !ended && !wait[2].revents().is_empty() {
                    return Err(fork::child_ended());
                }
            }
            if ended {
                let status = self
                    .born
                    .wait()
                    .map_err(|e| PlatformError::kernel("waiting for the process", e))?;
                return Err(PlatformError::Ended(status));
            }
            if faulted {
                self.serve_faults()?;
            }
            if called && let Some(notice) = self.listener.receive()? {
                return Ok(Some(notice));
            }
        }
    }

    fn send(&mut self, id: u64, answer: Answer) -> Result<(), PlatformError> {
        if self.listener.answer(id, answer)? {
            return Ok(());
        }
        // The call does not wait any more: the process was killed.
        let status = self.born.wait();
        Err(status.map_or_else(
            |error| PlatformError::kernel("waiting for the process", error),
            PlatformError::Ended,
        ))
    }

    /// Kills the process because of its behaviour.
    fn forged(&mut self, what: &'static str) -> PlatformError {
        self.born.kill();
        PlatformError::Forged(what)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        self.bill();
        // It runs only code of the guest, so its end is not waited for.
        self.born.kill();
        let _ = self.born.wait();
    }
}
