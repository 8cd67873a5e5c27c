//! The guest's process: made, run until it calls, answered, given orders, ended.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use afresh_sys::Memfd;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::control::Control;
use super::image::{Image, Segment};
use super::track::Track;
use super::{PlatformError, filter, memory, stub};
use crate::ranges::Ranges;

// `_IOWR('!', 0, struct seccomp_notif)` and its kin.
const NOTIF_RECV: libc::c_ulong = 0xc050_2100;
const NOTIF_SEND: libc::c_ulong = 0xc018_2101;
const NOTIF_SET_FLAGS: libc::c_ulong = 0x4008_2104;
/// Sentry and guest take turns on one processor.
const SYNC_WAKE_UP: u64 = 1;
const CONTINUE: u32 = 1;

/// How long the stub may take for its orders, and a new process to start.
const PATIENCE: Duration = Duration::from_secs(20);

// The frame of a signal: offsets from its start, which is where `rt_sigreturn` finds it.
const FRAME_CONTEXT: usize = 8;
const REGISTERS: usize = FRAME_CONTEXT + 40;
const FRAME_LEN: usize = REGISTERS + 32 * 8 + 8;
// Indices of registers in it, as in `ucontext.h`.
const RDI: usize = 8;
const RSI: usize = 9;
const RDX: usize = 12;
const RAX: usize = 13;
const RSP: usize = 15;
const RIP: usize = 16;
const EFLAGS: usize = 17;
const SELECTORS: usize = 18;
const R8: usize = 0;
const R9: usize = 1;
const R10: usize = 2;

/// A system call of the guest's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) number: i64,
    pub(crate) args: [u64; 6],
    pub(crate) place: Place,
}

/// Where a call waits for its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the kernel, under this number.
    Kernel(u64),
    /// In the stub, which takes orders.
    Stub,
}

/// What the guest did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// It made a system call.
    Call(Call),
    /// Time is up; the guest runs on.
    Late,
}

/// What the stub is to do: first the calls, then the copies, then the inputs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orders {
    /// System calls: number and arguments.
    pub(crate) calls: Vec<[u64; 7]>,
    /// Copies within the guest: to, from, length.
    pub(crate) copies: Vec<[u64; 3]>,
    /// Bytes for an address.
    pub(crate) input: Option<(u64, Vec<u8>)>,
    /// Whether all room for orders is wiped, not only these: the guest can write there.
    pub(crate) wipe: bool,
}

/// Longest input that orders may carry.
pub(crate) const INPUT_LEN: usize = 32 << 10;
/// Calls and copies that fit beside an input.
const CALLS_AT_ONCE: usize = 200;
const COPIES_AT_ONCE: usize = 800;
const _: () = assert!(
    stub::FIRST + 64 * CALLS_AT_ONCE + 24 * (COPIES_AT_ONCE + 1) + INPUT_LEN <= stub::ORDERS_LEN
);
/// Mappings of the image that a process makes while it boots, before each call is looked at.
const BOOT_SEGMENTS: usize = 800;

/// What the stub does after its orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// Ask for more.
    Ask,
    /// Go back to the guest.
    Resume,
}

/// The registers that a signal frame does not hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bases {
    pub(crate) fs: u64,
    pub(crate) gs: u64,
}

/// Registers, as the signal stack holds them, and the bases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Registers {
    stack: Vec<u8>,
    frame: usize,
    pub(crate) bases: Bases,
}

/// The process.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    pid: Pid,
    pidfd: OwnedFd,
    listener: OwnedFd,
    control: Control,
    track: Option<Track>,
    /// The question that waits, if the stub asked.
    asked: Option<u64>,
    /// Where the frame lies in the control area, once one was seen.
    frame: Option<usize>,
    pub(crate) bases: Bases,
    core: Option<usize>,
}

impl Process {
    /// Makes a process in which nothing runs yet: with nothing mapped, or with `image`, whose writable parts are then watched.
    pub(crate) fn new(image: Option<&Image>) -> Result<Self, PlatformError> {
        require_bases()?;
        let program = Memfd::new(c"afresh-stub")
            .and_then(|file| {
                let code = stub::program();
                file.set_len(code.len())?;
                file.write_at(&code, 0)?;
                file.seal()?;
                Ok(file)
            })
            .map_err(|e| {
                PlatformError::kernel("writing the stub", io::Error::from_raw_os_error(e.errno))
            })?;
        let mut control = Control::new()?;
        boot_orders(&mut control, image);
        let duplicate = |fd: std::os::fd::BorrowedFd<'_>| {
            fd.try_clone_to_owned()
                .map_err(|e| PlatformError::kernel("duplicating a descriptor", e))
        };
        let mut command = Command::new(format!("/proc/self/fd/{}", program.as_fd().as_raw_fd()));
        command
            .env_clear()
            .process_group(0)
            .stdin(Stdio::from(duplicate(control.file())?))
            .stderr(Stdio::null());
        match image {
            Some(image) => command.stdout(Stdio::from(duplicate(image.file())?)),
            None => command.stdout(Stdio::null()),
        };
        let mut child = command.spawn().map_err(|error| {
            PlatformError::missing(
                "starting the stub from a memory file",
                error,
                "vm.memfd_noexec must be 0, and the limit of processes not reached",
            )
        })?;
        match Self::attach(&child, image.is_some()) {
            Ok((pid, pidfd, listener, track)) => {
                let mut process = Self {
                    child,
                    pid,
                    pidfd,
                    listener,
                    control,
                    track,
                    asked: None,
                    frame: None,
                    bases: Bases::default(),
                    core: None,
                };
                process.question(Instant::now() + PATIENCE)?;
                if let Some(image) = image {
                    let late = image.segments().iter().skip(BOOT_SEGMENTS);
                    let calls = late.map(Segment::order).collect();
                    process.carry_out(&Orders { calls, ..Orders::default() }, Then::Ask)?;
                    for segment in image.segments() {
                        if segment.protection & libc::PROT_WRITE as u64 != 0 {
                            process.watch(segment.range())?;
                        }
                    }
                }
                Ok(process)
            }
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// Fetches the descriptors that the process makes for us while it boots.
    #[allow(clippy::type_complexity)]
    fn attach(
        child: &Child,
        tracked: bool,
    ) -> Result<(Pid, OwnedFd, OwnedFd, Option<Track>), PlatformError> {
        let pid = Pid::from_child(child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty())
            .map_err(|e| PlatformError::missing("pidfd_open", e, "it needs Linux 5.3 or newer"))?;
        let deadline = Instant::now() + PATIENCE;
        // The listener is the last that the process opens.
        let (first, last) = if tracked { (3, 4) } else { (-1, 3) };
        let listener = loop {
            match pidfd_getfd(&pidfd, last, PidfdGetfdFlags::empty()) {
                Ok(fd) => break fd,
                Err(rustix::io::Errno::BADF) if Instant::now() < deadline => {
                    let link = std::fs::read_link(format!("/proc/{}/fd/3", child.id()));
                    if tracked && link.is_ok_and(|link| link.to_string_lossy().contains("seccomp"))
                    {
                        return Err(PlatformError::missing(
                            "userfaultfd in the guest's process",
                            io::Error::from_raw_os_error(libc::EPERM),
                            "the kernel must have it, and the seccomp profile allow it",
                        ));
                    }
                }
                Err(rustix::io::Errno::BADF) => return Err(PlatformError::Late),
                Err(rustix::io::Errno::SRCH) => {
                    return Err(PlatformError::missing(
                        "seccomp user notification and userfaultfd in the guest's process",
                        io::Error::from_raw_os_error(libc::EPERM),
                        "Linux 6.6 or newer is needed, whose maps are not sealed, and a seccomp profile that allows both",
                    ));
                }
                Err(error) => {
                    return Err(PlatformError::missing(
                        "pidfd_getfd",
                        error,
                        "let this process reach its children's descriptors: Yama's ptrace_scope and the seccomp profile must allow it",
                    ));
                }
            }
            std::thread::sleep(Duration::from_micros(50));
        };
        let flags = SYNC_WAKE_UP;
        // SAFETY: the request takes its flags by value.
        if unsafe { libc::ioctl(listener.as_raw_fd(), NOTIF_SET_FLAGS, flags) } != 0 {
            return Err(PlatformError::missing(
                "waking guest and sentry on one processor",
                io::Error::last_os_error(),
                "it needs Linux 6.6 or newer",
            ));
        }
        let track = if tracked {
            let uffd = pidfd_getfd(&pidfd, first, PidfdGetfdFlags::empty())
                .map_err(|e| PlatformError::kernel("fetching the userfaultfd", e))?;
            Some(Track::new(uffd)?)
        } else {
            None
        };
        Ok((pid, pidfd, listener, track))
    }

    /// Waits until the guest calls, or until `deadline`.
    pub(crate) fn next(&mut self, deadline: Instant) -> Result<Event, PlatformError> {
        let Some(notice) = self.receive(Some(deadline))? else { return Ok(Event::Late) };
        let data = notice.data;
        if data.instruction_pointer & !0xfff != stub::CODE {
            let call = Call {
                number: i64::from(data.nr),
                args: data.args,
                place: Place::Kernel(notice.id),
            };
            return Ok(Event::Call(call));
        }
        self.take_question(&notice)?;
        let frame = data.args[2];
        // Where the kernel put the frame of the first signal is where it puts all, the stack being the same.
        let offset = frame.wrapping_sub(stub::CONTROL) as usize;
        if frame < stub::SIGNAL_STACK || offset > stub::CONTROL_LEN - FRAME_LEN || frame % 8 != 0 {
            return Err(self.forged("its frame is elsewhere"));
        }
        if self.frame.is_some_and(|known| known != offset) {
            return Err(self.forged("its frame moved"));
        }
        self.frame = Some(offset);
        self.bases = Bases { fs: data.args[0], gs: data.args[1] };
        let register = |index| self.control.read_word(offset + REGISTERS + 8 * index);
        Ok(Event::Call(Call {
            number: i64::from(register(RAX) as u32),
            args: [RDI, RSI, RDX, R10, R8, R9].map(register),
            place: Place::Stub,
        }))
    }

    /// Answers a call with `value`, which is a negative error number or a result.
    pub(crate) fn answer(&mut self, call: &Call, value: i64) -> Result<(), PlatformError> {
        match call.place {
            Place::Kernel(id) => {
                let (error, value) =
                    if (-4095..0).contains(&value) { (value as i32, 0) } else { (0, value) };
                self.send(id, value, error, 0)
            }
            Place::Stub => {
                self.set_result(value);
                self.carry_out(&Orders::default(), Then::Resume)
            }
        }
    }

    /// Sets what the call that waits in the stub returns.
    pub(crate) fn set_result(&mut self, value: i64) {
        let frame = self.frame.expect("a call waits in the stub");
        self.control.write_word(frame + REGISTERS + 8 * RAX, value as u64);
    }

    /// Has the stub carry out `orders`, each of whose calls is checked when it is made.
    pub(crate) fn carry_out(&mut self, orders: &Orders, then: Then) -> Result<(), PlatformError> {
        let deadline = Instant::now() + PATIENCE;
        let (mut calls, mut copies) = (&orders.calls[..], &orders.copies[..]);
        loop {
            let now = calls.split_at(calls.len().min(CALLS_AT_ONCE));
            calls = now.1;
            // Copies come after all calls, for they may go into what the calls map.
            let fit = if calls.is_empty() { copies.len().min(COPIES_AT_ONCE) } else { 0 };
            let copied = copies.split_at(fit);
            copies = copied.1;
            let last = calls.is_empty() && copies.is_empty();
            let input = orders.input.as_ref().filter(|_| last);
            let then = if last { then } else { Then::Ask };
            self.write_orders(now.0, copied.0, input, then, orders.wipe);
            let id = self.asked.take().expect("the stub waits for orders");
            self.send(id, 0, 0, 0)?;
            for expected in now.0 {
                let notice = self.receive(Some(deadline))?.ok_or(PlatformError::Late)?;
                let data = notice.data;
                let made = data.instruction_pointer & !0xfff == stub::CODE
                    && u64::from(data.nr as u32) == expected[0]
                    && data.args == expected[1..];
                if !made {
                    return Err(self.forged("a call that was not ordered"));
                }
                self.send(notice.id, 0, 0, CONTINUE)?;
            }
            if then == Then::Ask {
                self.question(deadline)?;
            }
            if last {
                return Ok(());
            }
        }
    }

    fn write_orders(
        &mut self,
        calls: &[[u64; 7]],
        copies: &[[u64; 3]],
        input: Option<&(u64, Vec<u8>)>,
        then: Then,
        wipe: bool,
    ) {
        let data =
            stub::FIRST + 64 * calls.len() + 24 * (copies.len() + usize::from(input.is_some()));
        let end = data + input.map_or(0, |(_, bytes)| bytes.len());
        let mut bytes = vec![0; end];
        let mut put = |offset: usize, word: u64| {
            bytes[offset..offset + 8].copy_from_slice(&word.to_le_bytes())
        };
        put(stub::CALLS, calls.len() as u64);
        put(stub::COPIES, (copies.len() + usize::from(input.is_some())) as u64);
        put(stub::AGAIN, u64::from(then == Then::Ask));
        put(stub::FS_BASE, self.bases.fs);
        put(stub::GS_BASE, self.bases.gs);
        put(stub::WIPE, if wipe { stub::ORDERS_LEN } else { end } as u64);
        put(stub::FRAME, stub::CONTROL + self.frame.unwrap_or(stub::ORDERS_LEN) as u64);
        let mut at = stub::FIRST;
        for call in calls {
            for (index, word) in call.iter().enumerate() {
                put(at + 8 * index, *word);
            }
            at += 64;
        }
        let input_copy =
            input.map(|(to, bytes)| [*to, stub::CONTROL + data as u64, bytes.len() as u64]);
        for copy in copies.iter().chain(&input_copy) {
            for (index, word) in copy.iter().enumerate() {
                put(at + 8 * index, *word);
            }
            at += 24;
        }
        if let Some((_, input)) = input {
            bytes[data..].copy_from_slice(input);
        }
        self.control.write(0, &bytes);
    }

    /// Prepares the registers of a program that starts.
    pub(crate) fn set_start(&mut self, entry: u64, stack: u64) {
        let frame = stub::CONTROL_LEN - 2048;
        let mut bytes = vec![0; FRAME_LEN];
        let mut put = |offset: usize, word: u64| {
            bytes[offset..offset + 8].copy_from_slice(&word.to_le_bytes())
        };
        put(FRAME_CONTEXT, 6); // selectors are in the frame, and meant
        put(FRAME_CONTEXT + 16, stub::SIGNAL_STACK);
        put(FRAME_CONTEXT + 32, stub::SIGNAL_STACK_LEN as u64);
        put(REGISTERS + 8 * RIP, entry);
        put(REGISTERS + 8 * RSP, stack);
        put(REGISTERS + 8 * EFLAGS, 0x202);
        put(REGISTERS + 8 * SELECTORS, 0x33 | 0x2b << 48);
        self.control.write(frame, &bytes);
        self.frame = Some(frame);
    }

    /// Forgets where the frame of a start was: the kernel chooses where those of signals are.
    pub(crate) fn forget_frame(&mut self) {
        self.frame = None;
    }

    /// The registers of the guest, while it waits in the stub.
    pub(crate) fn registers(&self) -> Registers {
        let mut stack = vec![0; stub::SIGNAL_STACK_LEN];
        self.control.read(stub::ORDERS_LEN, &mut stack);
        Registers {
            stack,
            frame: self.frame.expect("the guest waits in the stub"),
            bases: self.bases,
        }
    }

    /// Sets the registers that it returns to.
    pub(crate) fn set_registers(&mut self, registers: &Registers) {
        self.control.write(stub::ORDERS_LEN, &registers.stack);
        self.frame = Some(registers.frame);
        self.bases = registers.bases;
    }

    /// Whether the orders are wiped and the signal stack holds `registers`.
    pub(crate) fn control_equals(&self, registers: &Registers) -> bool {
        let mut orders = vec![0; stub::ORDERS_LEN];
        self.control.read(0, &mut orders);
        orders.iter().all(|&byte| byte == 0) && self.registers() == *registers
    }

    pub(crate) fn read(&self, address: u64, out: &mut [u8]) -> Result<bool, PlatformError> {
        memory::read(self.pid, address, out)
    }

    /// Writes guest memory; the pages count as written.
    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) -> Result<bool, PlatformError> {
        if let Some(track) = &mut self.track {
            track.touch(address..address.saturating_add(bytes.len() as u64))?;
        }
        memory::write(self.pid, address, bytes)
    }

    /// Pages written since they were protected; nothing for a process that is not tracked.
    pub(crate) fn written(&self) -> Option<&Ranges> {
        self.track.as_ref().map(Track::set)
    }

    pub(crate) fn watch(&mut self, range: std::ops::Range<u64>) -> Result<(), PlatformError> {
        self.track.as_mut().map_or(Ok(()), |track| track.watch(range))
    }

    pub(crate) fn protect(&mut self, range: std::ops::Range<u64>) -> Result<(), PlatformError> {
        self.track.as_mut().map_or(Ok(()), |track| track.protect(range))
    }

    pub(crate) fn forget(&mut self, range: std::ops::Range<u64>) {
        if let Some(track) = &mut self.track {
            track.forget(range);
        }
    }

    /// Keeps the guest on the processor that the caller is on: across two each call costs ten times as much.
    pub(crate) fn follow(&mut self) {
        let core = rustix::thread::sched_getcpu();
        if self.core != Some(core) {
            let mut set = rustix::thread::CpuSet::new();
            set.set(core);
            // Refused where the caller may not run there any more; then it is only slower.
            if rustix::thread::sched_setaffinity(Some(self.pid), &set).is_ok() {
                self.core = Some(core);
            }
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// What the kernel has mapped for the guest: start, end, protection.
    ///
    /// Whatever else is mapped must be the stub's own, or an entry for it appears, too.
    pub(crate) fn mappings(&self) -> Result<Vec<(u64, u64, u64)>, PlatformError> {
        let text = std::fs::read_to_string(format!("/proc/{}/maps", self.id()))
            .map_err(|e| PlatformError::kernel("reading the list of mappings", e))?;
        let mut list = Vec::new();
        for line in text.lines() {
            let mut fields = line.split(' ');
            let range = fields.next().and_then(|range| range.split_once('-'));
            let address = |text| u64::from_str_radix(text, 16).ok();
            let Some((start, end)) = range.and_then(|(s, e)| address(s).zip(address(e))) else {
                continue;
            };
            let modes = fields.next().unwrap_or_default().as_bytes();
            let own =
                [stub::CODE, stub::CONTROL, stub::IMAGE].contains(&start) || start >= stub::TOP;
            if !own {
                let bits =
                    [(b'r', libc::PROT_READ), (b'w', libc::PROT_WRITE), (b'x', libc::PROT_EXEC)];
                let held = bits.iter().filter(|(letter, _)| modes.contains(letter));
                list.push((start, end, held.fold(0, |all, (_, bit)| all | *bit as u64)));
            }
        }
        Ok(list)
    }

    /// Waits for `length`, or less if the process ends.
    pub(crate) fn pause(&self, length: Duration) {
        let timeout = rustix::time::Timespec::try_from(length).unwrap_or_default();
        let _ = poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&timeout));
    }

    /// Waits for the stub's question, which must come without an error.
    fn question(&mut self, deadline: Instant) -> Result<(), PlatformError> {
        let notice = self.receive(Some(deadline))?.ok_or(PlatformError::Late)?;
        if notice.data.instruction_pointer & !0xfff != stub::CODE {
            return Err(self.forged("a call in place of a question"));
        }
        self.take_question(&notice)?;
        // What the stub has just loaded.
        if notice.data.args[..2] != [self.bases.fs, self.bases.gs] {
            return Err(self.forged("its bases are not those it was given"));
        }
        Ok(())
    }

    fn take_question(&mut self, notice: &libc::seccomp_notif) -> Result<(), PlatformError> {
        let data = notice.data;
        if data.instruction_pointer != stub::asked_at() || i64::from(data.nr) != stub::ASK {
            return Err(self.forged("a call that was not ordered"));
        }
        self.asked = Some(notice.id);
        match data.args[3] as i64 {
            0 => Ok(()),
            error => Err(PlatformError::kernel(
                "an order to the stub",
                io::Error::from_raw_os_error(error.wrapping_neg() as i32),
            )),
        }
    }

    /// The next notice; serves page faults meanwhile. `None` when `deadline` passed.
    fn receive(
        &mut self,
        deadline: Option<Instant>,
    ) -> Result<Option<libc::seccomp_notif>, PlatformError> {
        loop {
            let timeout = deadline.map(|d| {
                rustix::time::Timespec::try_from(d.saturating_duration_since(Instant::now()))
                    .unwrap_or_default()
            });
            let (called, faulted, ended);
            {
                let mut wait = [
                    PollFd::new(&self.listener, PollFlags::IN),
                    PollFd::new(&self.pidfd, PollFlags::IN),
                    // A tracked process has a third; otherwise the second stands there twice.
                    match &self.track {
                        Some(track) => PollFd::from_borrowed_fd(track.descriptor(), PollFlags::IN),
                        None => PollFd::new(&self.pidfd, PollFlags::IN),
                    },
                ];
                match poll(&mut wait, timeout.as_ref()) {
                    Ok(0) => return Ok(None),
                    Ok(_) => {}
                    Err(rustix::io::Errno::INTR) => continue,
                    Err(error) => {
                        return Err(PlatformError::kernel("waiting for the guest", error));
                    }
                }
                called = wait[0].revents().contains(PollFlags::IN);
                ended = !wait[1].revents().is_empty();
                faulted = self.track.is_some() && !wait[2].revents().is_empty();
            }
            if ended {
                let status = self
                    .child
                    .wait()
                    .map_err(|e| PlatformError::kernel("waiting for the process", e))?;
                return Err(PlatformError::Ended(status));
            }
            if faulted && let Some(track) = &mut self.track {
                track.serve()?;
            }
            if called {
                // SAFETY: it is plain data, for which zeros are a value; the kernel demands them.
                let mut notice: libc::seccomp_notif = unsafe { std::mem::zeroed() };
                // SAFETY: the request fills one such structure, which lives through the call.
                let rc =
                    unsafe { libc::ioctl(self.listener.as_raw_fd(), NOTIF_RECV, &raw mut notice) };
                if rc == 0 {
                    return Ok(Some(notice));
                }
                let error = io::Error::last_os_error();
                // It was interrupted, or the process died since.
                if !matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR)) {
                    return Err(PlatformError::kernel("receiving a call", error));
                }
            }
        }
    }

    fn send(&mut self, id: u64, value: i64, error: i32, flags: u32) -> Result<(), PlatformError> {
        let mut answer = libc::seccomp_notif_resp { id, val: value, error, flags };
        // SAFETY: the request reads one such structure, which lives through the call.
        let rc = unsafe { libc::ioctl(self.listener.as_raw_fd(), NOTIF_SEND, &raw mut answer) };
        if rc == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() == Some(libc::ENOENT) {
            // Nobody waits for it any more: the process was killed.
            if let Ok(status) = self.child.wait() {
                return Err(PlatformError::Ended(status));
            }
        }
        Err(PlatformError::kernel("answering a call", error))
    }

    /// Kills the process for what it did.
    fn forged(&mut self, what: &'static str) -> PlatformError {
        let _ = self.child.kill();
        PlatformError::Forged(what)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It runs nobody's code but the guest's; nothing of it is waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The stub loads the bases by instruction.
fn require_bases() -> Result<(), PlatformError> {
    // SAFETY: the call takes a number and reads what the kernel gave this process.
    if unsafe { libc::getauxval(libc::AT_HWCAP2) } & 2 == 0 {
        return Err(PlatformError::missing(
            "FSGSBASE",
            io::Error::from_raw_os_error(libc::ENOTSUP),
            "a processor of 2012 or later and Linux 5.9 or newer are needed",
        ));
    }
    // SAFETY: as above.
    let frame = unsafe { libc::getauxval(libc::AT_MINSIGSTKSZ) } as usize;
    if frame + 1024 > stub::SIGNAL_STACK_LEN {
        return Err(PlatformError::missing(
            "a signal frame of this processor",
            io::Error::from_raw_os_error(libc::E2BIG),
            "its state is larger than the stub's stack",
        ));
    }
    Ok(())
}

/// The orders that a new process starts with. Until the filter is there its calls are its own.
fn boot_orders(control: &mut Control, image: Option<&Image>) {
    // Structures that the calls point to lie at the end of the signal stack, which nothing uses yet.
    let data = stub::CONTROL_LEN - 4096;
    let at = |offset: usize| stub::CONTROL + (data + offset) as u64;
    let mut words = |offset: usize, words: &[u64]| {
        for (index, word) in words.iter().enumerate() {
            control.write_word(data + offset + 8 * index, *word);
        }
    };
    words(0, &[stub::SIGNAL_STACK, 0, stub::SIGNAL_STACK_LEN as u64]);
    // SA_SIGINFO, SA_RESTORER, SA_ONSTACK; all other signals wait.
    words(32, &[stub::CODE, 0x0c00_0004, stub::CODE, u64::MAX]);
    words(64, &[0, 0]);
    let program = filter::program();
    words(80, &[program.len() as u64, at(128)]);
    let mut filter = Vec::new();
    for step in &program {
        filter.extend(step.code.to_le_bytes());
        filter.extend([step.jt, step.jf]);
        filter.extend(step.k.to_le_bytes());
    }
    control.write(data + 128, &filter);

    let private = libc::MAP_PRIVATE as u64;
    let fixed = libc::MAP_FIXED as u64;
    let lazy = libc::MAP_NORESERVE as u64;
    let read = libc::PROT_READ as u64;
    let call = |number: libc::c_long, args: [u64; 6]| {
        let mut call = [number as u64; 7];
        call[1..].copy_from_slice(&args);
        call
    };
    let behind = stub::CONTROL + stub::CONTROL_LEN as u64;
    let image_len = image.map_or(0, |image| image.len());
    let mut calls = vec![
        call(libc::SYS_close_range, [3, u64::from(u32::MAX), 0, 0, 0, 0]),
        call(libc::SYS_prctl, [libc::PR_SET_NO_NEW_PRIVS as u64, 1, 0, 0, 0, 0]),
        call(libc::SYS_prctl, [libc::PR_SET_PDEATHSIG as u64, libc::SIGKILL as u64, 0, 0, 0, 0]),
        call(libc::SYS_prlimit64, [0, u64::from(libc::RLIMIT_CORE), at(64), 0, 0, 0]),
        // Nothing of what the kernel mapped remains: no stack, no vDSO.
        call(libc::SYS_munmap, [0, stub::CODE, 0, 0, 0, 0]),
        call(libc::SYS_munmap, [behind, stub::TOP - behind, 0, 0, 0, 0]),
        call(libc::SYS_sigaltstack, [at(0), 0, 0, 0, 0, 0]),
        call(libc::SYS_rt_sigaction, [libc::SIGSYS as u64, at(32), 0, 8, 0, 0]),
    ];
    if let Some(image) = image {
        calls.push(call(
            libc::SYS_mmap,
            [stub::IMAGE, image_len, read, private | fixed | lazy, 1, 0],
        ));
        calls.extend(image.segments().iter().take(BOOT_SEGMENTS).map(Segment::order));
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | 1; // faults of user code only: no privilege needed
        calls.push(call(libc::SYS_userfaultfd, [flags as u64, 0, 0, 0, 0, 0]));
    }
    let listen = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    calls.push(call(
        libc::SYS_seccomp,
        [u64::from(libc::SECCOMP_SET_MODE_FILTER), listen, at(80), 0, 0, 0],
    ));
    let mut offset = stub::FIRST;
    for call in &calls {
        for (index, word) in call.iter().enumerate() {
            control.write_word(offset + 8 * index, *word);
        }
        offset += 64;
    }
    control.write_word(stub::CALLS, calls.len() as u64);
    control.write_word(stub::AGAIN, 1);
    control.write_word(stub::WIPE, offset as u64);
    control.write_word(stub::FRAME, stub::SIGNAL_STACK);
}
