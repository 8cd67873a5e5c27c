//! Signals of a guest: what is pending, who takes it, and the frame that a handler returns through.

use serde::{Deserialize, Serialize};

use super::encode::Bytes;
use super::threads::{NO_STACK, On, Wait};
use super::{End, Outcome, Person, Served, State, copy_in, word_in};
use crate::platform::{
    CLEAR_FLAGS, FRAME_LEN, INFO, INFO_LEN, MASK, Process, Register, STACK, USER_SELECTORS,
};

/// Signals that are kept for a thread or for all of them.
const PENDING: usize = 128;
/// From here on signals are queued each, not only noted.
const REAL_TIME: u8 = 32;
/// What nobody blocks, handles or ignores.
pub(super) const UNTOUCHABLE: u64 = bit(libc::SIGKILL as u8) | bit(libc::SIGSTOP as u8);
/// Flags that a program may change: arithmetic, direction, identification and alignment.
const USER_FLAGS: u64 = 0x24_0cd5;
const DIRECTION_AND_TRAP: u64 = 0x500;
/// The part of a processor's state that every frame has (`FXSAVE`).
const LEGACY: usize = 512;
/// Where it says in there how much follows (`struct _fpx_sw_bytes`), and what marks it.
const EXTENDED: usize = 464;
const MAGIC: u32 = 0x4650_5853;
/// What a frame needs below the stack's pointer, for leaf functions use it.
const RED_ZONE: u64 = 128;

/// A signal's place in a set.
pub(crate) const fn bit(signal: u8) -> u64 {
    1 << (signal - 1)
}

/// A signal that was sent: `siginfo_t`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Info {
    pub(crate) signal: u8,
    /// The first bytes; the rest is nought.
    bytes: [u8; 32],
}

impl Info {
    pub(crate) fn new(signal: u8, code: i32, sender: u64, value: u64) -> Self {
        let user = if sender == 0 { 0 } else { super::USER as u32 };
        let bytes = Bytes::default()
            .int(u32::from(signal))
            .int(0)
            .int(code as u32)
            .int(0)
            .int(sender as u32)
            .int(user)
            .word(value);
        Self { signal, bytes: bytes.0.try_into().expect("it is as long") }
    }

    /// A timer has run out, and `overrun` times more since.
    pub(super) fn of_timer(signal: u8, timer: u32, overrun: u32, value: u64) -> Self {
        let bytes = Bytes::default()
            .int(u32::from(signal))
            .int(0)
            .int(libc::SI_TIMER as u32)
            .int(0)
            .int(timer)
            .int(overrun)
            .word(value);
        Self { signal, bytes: bytes.0.try_into().expect("it is as long") }
    }

    fn int(&self, at: usize) -> u32 {
        u32::from_le_bytes([0, 1, 2, 3].map(|n| self.bytes[at + n]))
    }

    /// What the frame of a fault says.
    fn of_frame(signal: u8, frame: &[u8]) -> Self {
        let bytes = frame[INFO..INFO + 32].try_into().expect("it is as long");
        Self { signal, bytes }
    }

    /// As the guest hands it in.
    pub(super) fn given(signal: u8, given: &[u8]) -> Self {
        let mut bytes: [u8; 32] = given[..32].try_into().expect("it is as long");
        bytes[..4].copy_from_slice(&u32::from(signal).to_le_bytes());
        Self { signal, bytes }
    }

    /// All of it.
    pub(super) fn all(&self) -> Vec<u8> {
        let mut bytes = self.bytes.to_vec();
        bytes.resize(INFO_LEN, 0);
        bytes
    }
}

/// Signals that wait to be taken, in the order they came.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pending {
    list: Vec<Info>,
    /// How many have come, for who is told of each once.
    pub(super) came: u64,
}

impl Pending {
    /// Whether it is what a guest could have sent.
    pub(crate) fn is_sound(&self) -> bool {
        self.came < 1 << 62
            && self.list.len() <= PENDING
            && self.list.iter().all(|info| (1..=64).contains(&info.signal))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(crate) fn set(&self) -> u64 {
        self.list.iter().fold(0, |set, info| set | bit(info.signal))
    }

    /// Adds one; whether there was room.
    pub(crate) fn add(&mut self, info: Info) -> bool {
        if info.signal < REAL_TIME && self.set() & bit(info.signal) != 0 {
            return true;
        }
        let room = self.list.len() < PENDING;
        if room {
            self.list.push(info);
            self.came += 1;
        }
        room
    }

    /// Takes the lowest of `set`.
    pub(crate) fn take(&mut self, set: u64) -> Option<Info> {
        let wanted = |info: &&Info| set & bit(info.signal) != 0;
        let lowest = self.list.iter().filter(wanted).map(|info| info.signal).min()?;
        let at = self.list.iter().position(|info| info.signal == lowest)?;
        Some(self.list.remove(at))
    }

    /// A timer has run out `times` more while its signal waits here: how often beside that, if it does.
    pub(super) fn overran(&mut self, timer: u32, times: u64) -> Option<u64> {
        let is_its =
            |info: &&mut Info| info.int(8) == libc::SI_TIMER as u32 && info.int(16) == timer;
        let info = self.list.iter_mut().find(is_its)?;
        let overrun = u64::from(info.int(20)).saturating_add(times).min(i32::MAX as u64);
        info.bytes[20..24].copy_from_slice(&(overrun as u32).to_le_bytes());
        Some(overrun)
    }

    pub(crate) fn drop_all(&mut self, signal: u8) {
        self.list.retain(|info| info.signal != signal);
    }
}

/// Signals that stop a process, unless it has a handler.
const STOPS: [u8; 4] =
    [libc::SIGSTOP as u8, libc::SIGTSTP as u8, libc::SIGTTIN as u8, libc::SIGTTOU as u8];
/// The same as a set.
const STOPPING: u64 = bit(STOPS[0]) | bit(STOPS[1]) | bit(STOPS[2]) | bit(STOPS[3]);

/// What a program has asked to be done at a signal: `struct kernel_sigaction`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Action {
    pub(crate) handler: u64,
    pub(crate) flags: u64,
    pub(crate) restorer: u64,
    pub(crate) mask: u64,
}

impl Action {
    pub(crate) fn of(bytes: &[u8; 32]) -> Self {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        Self { handler: word(0), flags: word(8), restorer: word(16), mask: word(24) }
    }

    fn has(&self, flag: i32) -> bool {
        self.flags & flag as u32 as u64 != 0
    }
}

/// What came of the signals that a thread could take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    Nothing,
    /// It goes on in a handler.
    Handled,
    Ends(End),
}

/// What becomes of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Ignored,
    Deadly,
    /// The process stands still until `SIGCONT`.
    Stops,
    Handled(Action),
}

impl State {
    fn action(&self, signal: u8) -> Action {
        self.handlers.get(&u64::from(signal)).map(Action::of).unwrap_or_default()
    }

    fn fate(&self, signal: u8) -> Fate {
        let action = self.action(signal);
        match action.handler {
            _ if i32::from(signal) == libc::SIGSTOP => Fate::Stops,
            _ if UNTOUCHABLE & bit(signal) != 0 => Fate::Deadly,
            0 => match i32::from(signal) {
                libc::SIGCHLD | libc::SIGCONT | libc::SIGURG | libc::SIGWINCH => Fate::Ignored,
                libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU => Fate::Stops,
                _ => Fate::Deadly,
            },
            1 => Fate::Ignored,
            _ => Fate::Handled(action),
        }
    }

    /// Whether the current thread neither hears nor heeds a signal.
    pub(super) fn shuns(&self, signal: u8) -> bool {
        self.fate(signal) == Fate::Ignored || self.threads.current().blocked & bit(signal) != 0
    }

    /// Whether a signal of its terminal's that is to stop the current process is still on its way.
    pub(super) fn is_about_to_stop(&self) -> bool {
        let own = self.threads.iter().map(|(_, thread)| &thread.pending).chain([&self.pending]);
        let came = own.fold(0, |set, pending| set | pending.set());
        came & (bit(libc::SIGTTIN as u8) | bit(libc::SIGTTOU as u8)) != 0
    }

    /// Signals that stop the current process.
    fn stopping(&self) -> u64 {
        let stops = STOPS.iter().filter(|signal| self.fate(**signal) == Fate::Stops);
        stops.fold(0, |set, signal| set | bit(*signal))
    }

    /// Whether a signal that stops the current process has come to a thread that may take it.
    pub(crate) fn is_to_stop(&self) -> bool {
        let open = |(id, thread): (u32, &super::threads::Thread)| {
            let own = if id == self.threads.current_id() { self.pending.set() } else { 0 };
            (thread.pending.set() | own) & !thread.blocked
        };
        let came = self.threads.iter().fold(0, |set, thread| set | open(thread));
        // Stopped, it would not come to its end.
        let ends = (came | self.pending.set()) & bit(libc::SIGKILL as u8) != 0;
        came & STOPPING != 0 && !ends && came & self.stopping() != 0
    }

    /// Stops the current process if it is to. For when none of its threads runs.
    pub(crate) fn heed_stops(&mut self) {
        if !self.is_to_stop() {
            return;
        }
        let stopping = self.stopping();
        let mut by = self.pending.take(stopping);
        for id in self.threads.iter().map(|(id, _)| id).collect::<Vec<_>>() {
            let Some(thread) = self.threads.get_mut(id) else { continue };
            let open = stopping & !thread.blocked;
            by = by.or_else(|| thread.pending.take(open));
        }
        if let Some(info) = by {
            self.halt(Some(info.signal));
        }
    }

    /// Whether the current process is not told of children that stop.
    pub(super) fn ignores_stops(&self) -> bool {
        self.action(libc::SIGCHLD as u8).has(libc::SA_NOCLDSTOP)
    }

    /// Whether nobody asks for the children of the current process.
    pub(super) fn disowns(&self) -> bool {
        let action = self.action(libc::SIGCHLD as u8);
        action.handler == 1 || action.has(libc::SA_NOCLDWAIT)
    }

    /// What the thread would take now, of those that are not ignored.
    pub(crate) fn deliverable(&self, id: u32) -> bool {
        let Some(thread) = self.threads.get(id) else { return false };
        if matches!(&thread.wait, Some(Wait { on: On::Borrower(_), .. })) {
            // Its stack is the child's.
            return false;
        }
        if thread.pending.is_empty() && self.pending.is_empty() {
            return false;
        }
        // What stops it is for its process, when none of its threads runs.
        let came = (thread.pending.set() | self.pending.set()) & !thread.blocked;
        came != 0 && (came & STOPPING == 0 || came & !self.stopping() != 0)
    }

    /// Notes a signal: for one thread, or for whichever takes it. Whether there was room.
    pub(crate) fn send(&mut self, to: Option<u32>, info: Info) -> bool {
        let all = |state: &mut Self, gone: u64| {
            let ids: Vec<_> = state.threads.iter().map(|(id, _)| id).collect();
            for signal in (1..REAL_TIME).filter(|signal| gone & bit(*signal) != 0) {
                state.pending.drop_all(signal);
                let threads = &mut state.threads;
                ids.iter().for_each(|id| {
                    if let Some(thread) = threads.get_mut(*id) {
                        thread.pending.drop_all(signal);
                    }
                });
            }
        };
        match i32::from(info.signal) {
            libc::SIGCONT => {
                all(self, STOPPING);
                if self.family.own.stopped.is_some() {
                    self.halt(None);
                }
            }
            // It ends, wherever it stands.
            libc::SIGKILL => self.family.own.stopped = None,
            _ if STOPPING & bit(info.signal) != 0 => all(self, bit(libc::SIGCONT as u8)),
            _ => {}
        }
        // What is ignored is not kept, unless somebody may wait for it.
        let blocked = match to.and_then(|id| self.threads.get(id)) {
            Some(thread) => thread.blocked,
            None => self.threads.iter().fold(u64::MAX, |all, (_, thread)| all & thread.blocked),
        };
        if self.fate(info.signal) == Fate::Ignored && blocked & bit(info.signal) == 0 {
            return true;
        }
        // As in Linux the first thread takes what is for all of them, if it takes it at all.
        let first = self.family.own.id;
        let open = |thread: &super::threads::Thread| thread.blocked & bit(info.signal) == 0;
        let to = to.or_else(|| self.threads.get(first).filter(|t| open(t)).map(|_| first));
        match to.and_then(|id| self.threads.get_mut(id)) {
            Some(thread) => thread.pending.add(info),
            None => self.pending.add(info),
        }
    }
}

impl Person {
    /// Whether the current thread has a signal to take, and ought to come to the stub for it.
    pub(crate) fn has_signal(&self) -> bool {
        self.state.deliverable(self.state.threads.current_id())
    }

    /// Has the current thread, which waits in the stub, take the signals that it may. `interrupted` says that it was in a call
    /// that waited.
    pub(crate) fn take_signals(
        &mut self,
        process: &mut Process,
        mut interrupted: bool,
    ) -> Served<Taken> {
        let mut taken = Taken::Nothing;
        while self.has_signal() {
            let id = self.state.threads.current_id();
            let stopping = self.state.stopping();
            let state = self.change();
            let Some(thread) = state.threads.get_mut(id) else { break };
            let open = !thread.blocked & !stopping;
            let Some(info) = thread.pending.take(open).or_else(|| state.pending.take(open)) else {
                break;
            };
            match self.state.fate(info.signal) {
                Fate::Ignored | Fate::Stops => {}
                Fate::Deadly => return Ok(Taken::Ends(End::Signal(info.signal.into()))),
                Fate::Handled(action) => {
                    taken = Taken::Handled;
                    if interrupted {
                        self.break_off(process, &action)?;
                        interrupted = false;
                    }
                    if let Some(end) = self.handle(process, &info, action)?
                        && let Some(end) = self.unhandled(process, info.signal, end)?
                    {
                        return Ok(Taken::Ends(end));
                    }
                }
            }
        }
        Ok(taken)
    }

    /// There is no stack for the handler of `signal`. As in Linux that is a fault, for which there may be another handler, on
    /// another stack. How it ends, if so.
    fn unhandled(&mut self, process: &mut Process, signal: u8, end: End) -> Served<Option<End>> {
        const FAULT: u8 = libc::SIGSEGV as u8;
        const FROM_KERNEL: i32 = 0x80;
        match self.state.fate(FAULT) {
            Fate::Handled(action)
                if signal != FAULT && self.state.threads.current().blocked & bit(FAULT) == 0 =>
            {
                self.handle(process, &Info::new(FAULT, FROM_KERNEL, 0, 0), action)
            }
            _ => Ok(Some(end)),
        }
    }

    /// What a call returns that a signal has interrupted: an error, or it is made once more after the handler.
    fn break_off(&mut self, process: &mut Process, action: &Action) -> Served<()> {
        let call = process.call();
        let until = self.resumed.as_ref().and_then(|wait| wait.until);
        // A sleep tells what is left of it.
        let left = match call.number {
            libc::SYS_nanosleep => call.args[1],
            libc::SYS_clock_nanosleep if call.args[1] & 1 == 0 => call.args[3],
            _ => 0,
        };
        if let Some(until) = until.filter(|_| left != 0) {
            let nanos = until.saturating_sub(super::clock_calls::now_moment());
            let time = Bytes::default().word(nanos / 1_000_000_000).word(nanos % 1_000_000_000);
            let _ = process.write(left, &time.0)?;
        }
        if matches!(self.resumed, Some(Wait { on: On::Fifo(_), .. })) {
            let state = self.change();
            let wait = state.threads.current_mut().wait.take();
            state.give_up(wait);
        }
        let timed = until.is_some();
        let again = match call.number {
            libc::SYS_futex | libc::SYS_recvfrom | libc::SYS_accept | libc::SYS_accept4 => !timed,
            libc::SYS_read | libc::SYS_readv | libc::SYS_write | libc::SYS_writev => true,
            libc::SYS_recvmsg | libc::SYS_sendto | libc::SYS_sendmsg | libc::SYS_connect => true,
            libc::SYS_recvmmsg | libc::SYS_sendmmsg | libc::SYS_sendfile => true,
            libc::SYS_open | libc::SYS_openat | libc::SYS_creat => true,
            libc::SYS_wait4 | libc::SYS_waitid | libc::SYS_fcntl | libc::SYS_flock => true,
            _ => false,
        };
        let done = self.resumed.as_ref().map_or(0, |wait| wait.done);
        if done > 0 {
            process.set_result(done as i64);
        } else if again && action.has(libc::SA_RESTART) {
            process.rewind();
        } else {
            process.set_result(-i64::from(libc::EINTR));
        }
        Ok(())
    }

    /// An instruction of the current thread's failed.
    pub(crate) fn fault(&mut self, process: &mut Process, signal: i32) -> Served<Option<End>> {
        let signal = signal as u8;
        let info = Info::of_frame(signal, &process.frame_bytes());
        match self.state.fate(signal) {
            Fate::Handled(action) if self.state.threads.current().blocked & bit(signal) == 0 => {
                self.handle(process, &info, action)
            }
            _ => Ok(Some(End::Signal(signal.into()))),
        }
    }

    /// Puts a frame on the guest's stack, as Linux does, and has the thread go on in the handler.
    fn handle(
        &mut self,
        process: &mut Process,
        info: &Info,
        action: Action,
    ) -> Served<Option<End>> {
        let frame = process.frame_bytes();
        let segfault = Ok(Some(End::Signal(libc::SIGSEGV)));
        let Some(vectors) = vectors(&frame, process.frame_address()) else { return segfault };
        let thread = self.state.threads.current();
        let [stack, disabled, len] = thread.signal_stack;
        let mut top = process.register(Register::Rsp).wrapping_sub(RED_ZONE);
        let on_it = top.wrapping_sub(stack) < len;
        if action.has(libc::SA_ONSTACK) && disabled & 2 == 0 && !on_it {
            top = stack.wrapping_add(len);
        }
        let vectors_at = top.wrapping_sub(vectors.len() as u64) & !63;
        // As if it had been called: the address that it returns to lies where a stack is one word off.
        let at = (vectors_at.wrapping_sub((INFO + INFO_LEN) as u64) & !15).wrapping_sub(8);
        let mut bytes = frame[..INFO].to_vec();
        let mut put = |offset: usize, word: u64| {
            bytes[offset..offset + 8].copy_from_slice(&word.to_le_bytes());
        };
        put(0, action.restorer);
        put(STACK, stack);
        put(STACK + 8, disabled);
        put(STACK + 16, len);
        put(Register::Vectors.offset(), vectors_at);
        put(MASK, thread.masked.unwrap_or(thread.blocked));
        bytes.extend(info.all());
        if !process.write(at, &bytes)? || !process.write(vectors_at, vectors)? {
            return segfault;
        }
        let flags = process.register(Register::Flags) & !DIRECTION_AND_TRAP;
        for (register, value) in [
            (Register::Rip, action.handler),
            (Register::Rsp, at),
            (Register::Rdi, u64::from(info.signal)),
            (Register::Rsi, at + INFO as u64),
            (Register::Rdx, at + 8),
            (Register::Rax, 0),
            (Register::Flags, flags),
        ] {
            process.set_register(register, value);
        }
        let state = self.change();
        let thread = state.threads.current_mut();
        thread.masked = None;
        let own = if action.has(libc::SA_NODEFER) { 0 } else { bit(info.signal) };
        thread.blocked = (thread.blocked | action.mask | own) & !UNTOUCHABLE;
        if action.has(libc::SA_RESETHAND) {
            state.handlers.remove(&u64::from(info.signal));
        }
        Ok(None)
    }

    /// `rt_sigreturn`: registers, mask and signal stack come from the frame that the stack points behind.
    pub(super) fn leave(&mut self, process: &mut Process) -> Served {
        let at = process.register(Register::Rsp).wrapping_sub(8);
        let bytes = copy_in(process, at, FRAME_LEN)?;
        let word = |offset: usize| {
            u64::from_le_bytes(bytes[offset..offset + 8].try_into().expect("8 bytes"))
        };
        let frame = process.frame_bytes();
        let ours = process.frame_address();
        let kept = vectors(&frame, ours).map(<[u8]>::len).unwrap_or_default();
        let place = vectors_offset(&frame, ours).unwrap_or_default();
        let given = word(Register::Vectors.offset());
        if kept > LEGACY {
            let mut state = match given {
                0 => vec![0; kept],
                given => copy_in(process, given, kept)?,
            };
            if given == 0 {
                state[..2].copy_from_slice(&0x37fu16.to_le_bytes());
                state[24..28].copy_from_slice(&0x1f80u32.to_le_bytes());
            }
            // How much there is stays as the kernel has it; so do the words behind.
            process.write_frame(place, &state[..EXTENDED]);
            process.write_frame(place + LEGACY, &state[LEGACY..kept - 4]);
        }
        let first = Register::R8.offset();
        process.write_frame(first, &bytes[first..first + 8 * Register::GENERAL]);
        let flags = word(Register::Flags.offset()) & USER_FLAGS | CLEAR_FLAGS;
        process.set_register(Register::Flags, flags);
        process.set_register(Register::Selectors, USER_SELECTORS);
        let stack = [word(STACK), word(STACK + 8), word(STACK + 16)];
        let mask = word(MASK) & !UNTOUCHABLE;
        let thread = self.change().threads.current_mut();
        thread.blocked = mask;
        thread.signal_stack = if stack[1] & 2 == 0 { stack } else { NO_STACK };
        Ok(Outcome::Resumed)
    }

    /// Waits with other signals blocked, until the call is over. A set of nought is none.
    pub(super) fn mask_in(&mut self, process: &Process, set: u64, size: u64) -> Served<()> {
        if set == 0 || self.resumed.is_some() {
            return Ok(());
        }
        if size != 8 {
            return Err(rustix::io::Errno::INVAL.into());
        }
        let mask = word_in(process, set)? & !UNTOUCHABLE;
        let thread = self.change().threads.current_mut();
        thread.masked = Some(thread.blocked);
        thread.blocked = mask;
        Ok(())
    }

    /// Ends what [`Person::mask_in`] has begun.
    pub(crate) fn unmask(&mut self) {
        if self.state.threads.current().masked.is_some() {
            let thread = self.change().threads.current_mut();
            if let Some(mask) = thread.masked.take() {
                thread.blocked = mask;
            }
        }
    }
}

/// Where the vector registers' state lies in a frame, which lies at `address`.
fn vectors_offset(frame: &[u8], address: u64) -> Option<usize> {
    let at = Register::Vectors.offset();
    let place = u64::from_le_bytes(frame.get(at..at + 8)?.try_into().ok()?);
    let offset = usize::try_from(place.checked_sub(address)?).ok()?;
    (offset >= INFO + INFO_LEN && offset + LEGACY <= frame.len()).then_some(offset)
}

/// The state of the vector registers in a frame, with all that follows the first part.
fn vectors(frame: &[u8], address: u64) -> Option<&[u8]> {
    let all = &frame[vectors_offset(frame, address)?..];
    let int = |at: usize| u32::from_le_bytes(all[at..at + 4].try_into().expect("4 bytes"));
    let len = if int(EXTENDED) == MAGIC { int(EXTENDED + 4) as usize } else { LEGACY };
    all.get(..len).filter(|all| all.len() >= LEGACY)
}
