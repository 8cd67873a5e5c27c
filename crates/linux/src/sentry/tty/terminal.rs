//! Calls on terminals: opening them, reading and writing at both ends, and `ioctl`. The foreground
//! process group decides who may.
//!
//! Unlike Linux, a process that gives up its terminal without leading a session (`TIOCNOTTY`) keeps
//! it as `/dev/tty`.

use std::sync::Arc;

use afresh_files::{Access, New, Node, Tree, Walk};
use rustix::io::Errno;

use crate::ioctl;
use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::poll_events::{IN, OUT};
use crate::sentry::kernel::process_info::ProcessInfo;
use crate::sentry::kernel::process_table::PROCESSES;
use crate::sentry::kernel::signals::bit;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::threads::{Wait, WaitReason};
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::stream_write::StreamWrite;
use crate::sentry::tty::terminals::{
    FIRST_DEVICE, SOME, TERMINALS, Terminal, TerminalEnd, Termios, VMIN_REACHED,
};

/// Device numbers of `/dev/tty` and `/dev/ptmx`.
pub(in crate::sentry) const CONTROLLING_TERMINAL: u64 = 0x500;
pub(in crate::sentry) const MULTIPLEXER: u64 = 0x502;

// Requests that the C library has no names for here.
const TCGETS2: u64 = 0x802c_542a;
const TCSETS2: u64 = 0x402c_542b;
const TCSETSF2: u64 = TCSETS2 + 2;
const TIOCGPKT: u64 = 0x8004_5438;
const TIOCGPTLCK: u64 = 0x8004_5439;
const TIOCSIG: u64 = 0x4004_5436;

/// Bytes that a terminal takes before its write looks whether it has to end.
const PIECE: usize = 1 << 10;

/// Nanoseconds in a tenth of a second.
const TENTH: u64 = 100_000_000;

/// Whether a device is a terminal's, or leads to one.
pub(in crate::sentry) fn is_terminal(device: u64) -> bool {
    let numbered = (FIRST_DEVICE..FIRST_DEVICE + u64::from(TERMINALS)).contains(&device);
    numbered || device == CONTROLLING_TERMINAL || device == MULTIPLEXER
}

fn encode(termios: &Termios, two: bool) -> Vec<u8> {
    let Termios { input, output, control, local, line, chars, speeds } = termios;
    let mut bytes = StructBuilder::default().int(*input).int(*output).int(*control).int(*local).0;
    bytes.push(*line);
    bytes.extend(chars);
    if two {
        bytes.extend(speeds.iter().flat_map(|speed| speed.to_le_bytes()));
    }
    bytes
}

/// `struct termio`: the lower halves of the flags, and the first eight characters.
fn encode_short(termios: &Termios) -> Vec<u8> {
    let flags = [termios.input, termios.output, termios.control, termios.local];
    let halves = flags.into_iter().map(|flags| flags as u16);
    let mut bytes = halves.fold(StructBuilder::default(), StructBuilder::half).0;
    bytes.push(termios.line);
    bytes.extend(&termios.chars[..8]);
    bytes.push(0);
    bytes
}

fn decode(bytes: &[u8], old: &Termios) -> Termios {
    let int = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|n| bytes[at + n]));
    let mut chars = [0; 19];
    chars.copy_from_slice(&bytes[17..36]);
    let speeds = if bytes.len() < 44 { old.speeds } else { [int(36), int(40)] };
    let (input, output, control, local) = (int(0), int(4), int(8), int(12));
    Termios { input, output, control, local, line: bytes[16], chars, speeds }
}

impl Kernel {
    /// The terminal that controls the current process.
    fn own_terminal(&self) -> Option<u32> {
        self.terminals.of_session(self.processes.current.info.session)
    }

    /// Whether a group is orphaned: no process of its session outside of it could continue it.
    fn is_orphaned(&self, group: u32) -> bool {
        let cares = |id: u32| {
            let info = self.processes.info(id);
            let parent = info.and_then(|info| self.processes.info(info.parent));
            let outside = |info: &ProcessInfo, of: &ProcessInfo| {
                of.group != info.group && of.session == info.session
            };
            info.zip(parent).is_some_and(|(info, parent)| outside(info, parent))
        };
        !self.processes.group(group).into_iter().any(cares)
    }

    /// Whether the current process has a terminal, and its group is orphaned.
    pub(in crate::sentry) fn is_orphaned_at_terminal(&self) -> bool {
        self.own_terminal().is_some() && self.is_orphaned(self.processes.current.info.group)
    }

    /// Groups that may become orphaned when the current process ends.
    pub(in crate::sentry) fn kept_groups(&self) -> Vec<u32> {
        let own = &self.processes.current.info;
        let children =
            self.processes.infos().filter(|info| info.parent == own.id).map(|info| info.group);
        let mut groups: Vec<_> = children.chain([own.group]).collect();
        groups.sort_unstable();
        groups.dedup();
        groups.retain(|group| !self.is_orphaned(*group));
        groups
    }

    /// Sends SIGHUP and SIGCONT to those of `groups` that are orphaned and have a stopped process.
    pub(in crate::sentry) fn wake_orphans(&mut self, groups: Vec<u32>) {
        for group in groups {
            let stopped =
                |id: u32| self.processes.info(id).is_some_and(|info| info.stopped.is_some());
            if self.is_orphaned(group) && self.processes.group(group).into_iter().any(stopped) {
                self.signal_group(group, libc::SIGHUP);
                self.signal_group(group, libc::SIGCONT);
            }
        }
    }
}

impl Sentry {
    /// Opens a terminal by a name that the tree has for it.
    pub(in crate::sentry) fn open_terminal(
        &mut self,
        device: u64,
        node: Node,
        access: Access,
        flags: i32,
        found: Option<(Node, Arc<[u8]>)>,
    ) -> SyscallResult {
        self.state.table.check_room()?;
        let id = match device {
            MULTIPLEXER => return self.open_master(node, access, flags, found),
            CONTROLLING_TERMINAL => self.state.own_terminal().ok_or(Errno::NXIO)?,
            number => (number - FIRST_DEVICE) as u32,
        };
        let terminal = self.state.terminals.get(id).ok_or(Errno::NXIO)?;
        if terminal.locked {
            return Err(Errno::IO.into());
        }
        self.open_end(id, node, access, flags, found)
    }

    fn open_master(
        &mut self,
        node: Node,
        access: Access,
        flags: i32,
        found: Option<(Node, Arc<[u8]>)>,
    ) -> SyscallResult {
        let id = self.state.terminals.free().ok_or(Errno::NOSPC)?;
        let path = format!("/dev/pts/{id}");
        let place = self.state.tree.walk(path.as_bytes(), Walk::new(Tree::ROOT).name())?;
        let state = self.change();
        let open = state.tree.open(node, access)?;
        let device = New::Device(FIRST_DEVICE + u64::from(id));
        let made = state.tree.create_at(&place, device, 0o620, crate::sentry::kernel::time::now());
        let made = made.and_then(|made| state.tree.hold(made).map(|()| made));
        let owned = |made| state.own_new(made).map(|()| made);
        let made = match made.map_err(Into::into).and_then(owned) {
            Ok(made) => made,
            Err(refused) => {
                state.tree.close(open);
                return Err(refused);
            }
        };
        state.terminals.add(id, Terminal::new(made));
        self.add_found(
            FileObject::Terminal(TerminalEnd { id: Some(id), master: true, hung: false, open }),
            flags,
            found,
        )
    }

    /// A new slave end of a terminal. It may become the controlling terminal of its opener.
    fn open_end(
        &mut self,
        id: u32,
        node: Node,
        access: Access,
        flags: i32,
        found: Option<(Node, Arc<[u8]>)>,
    ) -> SyscallResult {
        let state = self.change();
        let open = state.tree.open(node, access)?;
        let own = (
            state.processes.current_id(),
            state.processes.current.info.session,
            state.processes.current.info.group,
        );
        let free = own.0 == own.1 && state.own_terminal().is_none();
        if let Some(terminal) = state.terminals.get_mut(id) {
            terminal.slaves += 1;
            terminal.parted = false;
            terminal.edges += 1;
            let takes = flags & libc::O_NOCTTY == 0 && access.read && terminal.session.is_none();
            if free && takes {
                (terminal.session, terminal.group) = (Some(own.1), own.2);
            }
        }
        self.add_found(
            FileObject::Terminal(TerminalEnd { id: Some(id), master: false, hung: false, open }),
            flags,
            found,
        )
    }

    /// An end, and its terminal unless it was hung up.
    fn end_of(&self, descriptor: u64) -> Result<(&TerminalEnd, Option<&Terminal>), Errno> {
        match &self.state.table.get(descriptor)?.open {
            FileObject::Terminal(end) => {
                let id = end.id.filter(|_| !end.hung);
                Ok((end, id.and_then(|id| self.state.terminals.get(id))))
            }
            _ => Err(Errno::NOTTY),
        }
    }

    fn terminal_mut(&mut self, id: u32) -> Result<&mut Terminal, Errno> {
        self.change().terminals.get_mut(id).ok_or(Errno::IO)
    }

    /// Has the current process's group stopped if it is in the background of `terminal`: then the
    /// call is repeated later.
    fn in_foreground(&mut self, id: u32, signal: i32) -> SyscallResult<Option<SyscallControl>> {
        let own = &self.state.current().info;
        let Some(terminal) = self.state.terminals.get(id) else { return Ok(None) };
        let controls = terminal.session == Some(own.session) && terminal.group != 0;
        if !controls || terminal.group == own.group {
            return Ok(None);
        }
        if self.state.shuns(signal as u8) {
            return if signal == libc::SIGTTIN { Err(Errno::IO.into()) } else { Ok(None) };
        }
        if self.state.is_orphaned(self.state.current().info.group) {
            return Err(Errno::IO.into());
        }
        let group = own.group;
        self.change().signal_group(group, signal);
        Ok(Some(SyscallControl::Wait(Wait::new(WaitReason::Stop, None))))
    }

    /// Reads at either end.
    pub(in crate::sentry) fn take_typed(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
        wanted: u64,
    ) -> SyscallResult {
        let (end, terminal) = self.end_of(descriptor)?;
        let (Some(id), Some(terminal)) = (end.id, terminal) else { return Ok(ZERO) };
        if end.master {
            return self.take_shown(process, descriptor, id, pieces, wanted);
        }
        if wanted == 0 {
            return Ok(ZERO);
        }
        let canonical = terminal.termios.is_canonical();
        if let Some(stopped) = self.in_foreground(id, libc::SIGTTIN)? {
            return Ok(stopped);
        }
        let terminal = self.state.terminals.get(id).ok_or(Errno::IO)?;
        if canonical && terminal.lines.is_empty() {
            return self.wait_for(descriptor, IN, 0);
        }
        if !canonical && let Some(waits) = self.too_few(descriptor, terminal, wanted)? {
            return Ok(waits);
        }
        let bytes = terminal.first(wanted as usize).to_vec();
        scatter(process, pieces, &bytes)?;
        self.terminal_mut(id)?.take_first(bytes.len());
        Ok(SyscallControl::Value(bytes.len() as u64))
    }

    /// The outcome of a raw read with too few bytes.
    fn too_few(
        &self,
        descriptor: u64,
        terminal: &Terminal,
        wanted: u64,
    ) -> SyscallResult<Option<SyscallControl>> {
        let ((least, time), held) = (terminal.termios.patience(), terminal.readable());
        let asked = least.max(1).min(wanted as usize);
        if held >= asked || least == 0 && time == 0 {
            return Ok(None);
        }
        let description = self.state.table.get(descriptor)?;
        if description.flags & libc::O_NONBLOCK as u32 != 0 {
            return if held > 0 { Ok(None) } else { Err(Errno::AGAIN.into()) };
        }
        // From the start, or, where several are awaited, from the first.
        let until = match self.resumed.as_ref().and_then(|wait| wait.until) {
            Some(until) => Some(until),
            None if time > 0 && (least == 0 || held > 0) => {
                Some(self.now().saturating_add(time * TENTH))
            }
            None => None,
        };
        if self.passed(until) {
            return Ok(None);
        }
        let events = match held {
            0 if time > 0 || asked < least => SOME,
            _ => VMIN_REACHED,
        };
        let reason = WaitReason::Files(vec![(self.state.table.id(descriptor)?, events)]);
        Ok(Some(SyscallControl::Wait(Wait::new(reason, until))))
    }

    /// Reads output of a terminal, as its master.
    fn take_shown(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        id: u32,
        pieces: &[(u64, u64)],
        wanted: u64,
    ) -> SyscallResult {
        let terminal = self.state.terminals.get(id).ok_or(Errno::IO)?;
        if wanted == 0 {
            return Ok(ZERO);
        }
        if let Some(status @ 1..) = terminal.packet {
            scatter(process, pieces, &[status])?;
            self.terminal_mut(id)?.packet = Some(0);
            return Ok(SyscallControl::Value(1));
        }
        if terminal.shown.is_empty() {
            if terminal.is_parted() {
                return Err(Errno::IO.into());
            }
            return self.wait_for(descriptor, IN, 0);
        }
        let mark = terminal.packet.map(|_| 0);
        let room = wanted as usize - usize::from(mark.is_some());
        let len = terminal.shown.len().min(room);
        let bytes: Vec<u8> = mark.into_iter().chain(terminal.shown.range(..len).copied()).collect();
        scatter(process, pieces, &bytes)?;
        let terminal = self.terminal_mut(id)?;
        terminal.shown.drain(..len);
        terminal.edges += 1;
        Ok(SyscallControl::Value(bytes.len() as u64))
    }

    /// Writes at either end: types, or shows.
    pub(in crate::sentry) fn put_shown(
        &mut self,
        descriptor: u64,
        written: &StreamWrite<'_>,
    ) -> SyscallResult {
        let (end, terminal) = self.end_of(descriptor)?;
        let terminal = terminal.ok_or(Errno::IO)?;
        let (master, id) = (end.master, end.id.ok_or(Errno::IO)?);
        let stops = terminal.termios.has_local(libc::TOSTOP);
        if !master
            && stops
            && let Some(stopped) = self.in_foreground(id, libc::SIGTTOU)?
        {
            return Ok(stopped);
        }
        let mut done = self.resumed_bytes();
        while !written.after(done).is_empty() {
            let piece = written.after(done);
            let piece = &piece[..piece.len().min(PIECE)];
            let terminal = self.terminal_mut(id)?;
            let (taken, signals) = terminal.take_piece(piece, master);
            let group = terminal.group;
            done += taken as u64;
            // Of equal signals that no process could take meanwhile, one is pending.
            for signal in (1..=64).filter(|signal| signals & bit(*signal) != 0) {
                self.change().signal_group(group, signal.into());
            }
            if taken < piece.len() {
                return self.wait_for(descriptor, OUT, done);
            }
            let members = if signals == 0 { 0 } else { PROCESSES };
            if self.is_spent(taken + members) && done < written.len {
                return Ok(self.pause(done));
            }
        }
        // Others run before the next part of a large write, which a signal ends as in Linux.
        let continues = done < written.len && !self.has_signal();
        Ok(if continues { self.pause(done) } else { SyscallControl::Value(done) })
    }

    /// `ioctl` on a terminal.
    pub(in crate::sentry) fn control_terminal(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        request: u64,
        value: u64,
    ) -> SyscallResult {
        let (end, terminal) = self.end_of(descriptor)?;
        let (Some(id), Some(terminal)) = (end.id, terminal) else { return Err(Errno::IO.into()) };
        let (master, node) = (end.master, terminal.node);
        let int = |bytes: u32| bytes.to_le_bytes();
        let reply = match request {
            ioctl::TCGETS => encode(&terminal.termios, false),
            TCGETS2 => encode(&terminal.termios, true),
            ioctl::TCGETA => encode_short(&terminal.termios),
            ioctl::TIOCGWINSZ => {
                let [rows, columns, x, y] = terminal.window;
                StructBuilder::default().half(rows).half(columns).half(x).half(y).0
            }
            ioctl::FIONREAD => {
                let lines = terminal.lines.iter().map(Vec::len).sum::<usize>();
                int(if master { terminal.shown.len() } else { lines } as u32).to_vec()
            }
            ioctl::TIOCOUTQ | ioctl::TIOCGETD => int(0).to_vec(),
            ioctl::TIOCGPTN if master => int(id).to_vec(),
            TIOCGPKT if master => int(terminal.packet.is_some().into()).to_vec(),
            TIOCGPTLCK if master => int(terminal.locked.into()).to_vec(),
            ioctl::TIOCGPGRP | ioctl::TIOCGSID => {
                let own = terminal.session == Some(self.state.current().info.session);
                if !master && !own {
                    return Err(Errno::NOTTY.into());
                }
                let session = terminal.session.ok_or(Errno::NOTTY);
                int(match request {
                    ioctl::TIOCGPGRP => terminal.group,
                    _ => session?,
                })
                .to_vec()
            }
            ioctl::TIOCGPTPEER if master => {
                let mode = value as i32 & libc::O_ACCMODE;
                let (read, write) = (mode != libc::O_WRONLY, mode != libc::O_RDONLY);
                self.state.table.check_room()?;
                let access = Access { read, write, append: false };
                let path = format!("/dev/pts/{id}");
                let place = self.state.tree.walk(path.as_bytes(), Walk::new(Tree::ROOT));
                let name = place.ok().map(|place| (place.directory, place.name));
                return self.open_end(id, node, access, value as i32, name);
            }
            _ => return self.set_terminal(process, (id, master), request, value),
        };
        copy_out(process, value, &reply)?;
        Ok(ZERO)
    }

    /// The commands of `ioctl` that change a terminal.
    fn set_terminal(
        &mut self,
        process: &mut Process,
        (id, master): (u32, bool),
        request: u64,
        value: u64,
    ) -> SyscallResult {
        let foreground =
            [ioctl::TCSETS, ioctl::TCSETSW, ioctl::TCSETSF, ioctl::TCFLSH, ioctl::TCXONC];
        let changes = foreground.contains(&request)
            || (TCSETS2..=TCSETSF2).contains(&request)
            || [ioctl::TCSBRK, ioctl::TCSBRKP, ioctl::TIOCSPGRP].contains(&request);
        if changes && let Some(stopped) = self.in_foreground(id, libc::SIGTTOU)? {
            return Ok(stopped);
        }
        let int_in = |process: &Process| -> SyscallResult<u32> {
            let bytes = copy_in(process, value, 4)?;
            Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        };
        let own = self.state.current().info.clone();
        match request {
            ioctl::TCSETS | ioctl::TCSETSW | ioctl::TCSETSF | TCSETS2..=TCSETSF2 => {
                let two = (TCSETS2..=TCSETSF2).contains(&request);
                let bytes = copy_in(process, value, if two { 44 } else { 36 })?;
                let terminal = self.terminal_mut(id)?;
                if request == ioctl::TCSETSF || request == TCSETSF2 {
                    terminal.flush_typed();
                }
                let new = decode(&bytes, &terminal.termios);
                terminal.behave(new);
            }
            ioctl::TIOCSWINSZ => {
                let bytes = copy_in(process, value, 8)?;
                let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
                let (new, terminal) = ([0, 2, 4, 6].map(half), self.terminal_mut(id)?);
                if std::mem::replace(&mut terminal.window, new) != new {
                    let group = terminal.group;
                    self.change().signal_group(group, libc::SIGWINCH);
                }
            }
            ioctl::TIOCSPGRP => {
                let group = int_in(process)?;
                let known = self.state.terminals.get(id).and_then(|terminal| terminal.session);
                if known != Some(own.session) {
                    return Err(Errno::NOTTY.into());
                }
                let members = self.state.processes.group(group);
                let first = members.first().and_then(|id| self.state.processes.info(*id));
                match first {
                    _ if group as i32 <= 0 => return Err(Errno::INVAL.into()),
                    None => return Err(Errno::SRCH.into()),
                    Some(info) if info.session != own.session => return Err(Errno::PERM.into()),
                    Some(_) => self.terminal_mut(id)?.group = group,
                }
            }
            ioctl::TIOCSCTTY => {
                let known = self.state.own_terminal();
                if known == Some(id) {
                    return Ok(ZERO);
                }
                let terminal = self.terminal_mut(id)?;
                if own.id != own.session || known.is_some() || terminal.session.is_some() {
                    return Err(Errno::PERM.into());
                }
                (terminal.session, terminal.group) = (Some(own.session), own.group);
            }
            ioctl::TIOCNOTTY => {
                let terminal = self.terminal_mut(id)?;
                if terminal.session != Some(own.session) {
                    return Err(Errno::NOTTY.into());
                }
                if own.id == own.session {
                    let group = std::mem::take(&mut terminal.group);
                    terminal.session = None;
                    self.change().signal_group(group, libc::SIGHUP);
                    self.change().signal_group(group, libc::SIGCONT);
                }
            }
            ioctl::TIOCSPTLCK if master => {
                let locked = int_in(process)? != 0;
                self.terminal_mut(id)?.locked = locked;
            }
            ioctl::TIOCPKT if master => {
                let on = int_in(process)? != 0;
                let terminal = self.terminal_mut(id)?;
                terminal.packet = on.then(|| terminal.packet.unwrap_or(0));
            }
            TIOCSIG if master => {
                let group = self.state.terminals.get(id).map_or(0, |terminal| terminal.group);
                let signal = i32::try_from(value).ok().filter(|signal| (1..=64).contains(signal));
                self.change().signal_group(group, signal.ok_or(Errno::INVAL)?);
            }
            ioctl::TCFLSH => {
                let (typed, shown) = match value as i32 {
                    libc::TCIFLUSH => (true, false),
                    libc::TCOFLUSH => (false, true),
                    libc::TCIOFLUSH => (true, true),
                    _ => return Err(Errno::INVAL.into()),
                };
                // The input of one end is the output of the other.
                let (typed, shown) = if master { (shown, typed) } else { (typed, shown) };
                let terminal = self.terminal_mut(id)?;
                if typed {
                    terminal.flush_typed();
                }
                if shown {
                    terminal.flush_shown();
                }
            }
            ioctl::TCXONC => match value as i32 {
                libc::TCOOFF => self.terminal_mut(id)?.flow(false),
                libc::TCOON => self.terminal_mut(id)?.flow(true),
                libc::TCIOFF | libc::TCION => {}
                _ => return Err(Errno::INVAL.into()),
            },
            // All output is at the master already, and there is only one discipline.
            ioctl::TCSBRK | ioctl::TCSBRKP | ioctl::TIOCEXCL | ioctl::TIOCNXCL => {}
            ioctl::TIOCSETD if int_in(process)? == 0 => {}
            ioctl::TIOCSETD => return Err(Errno::INVAL.into()),
            ioctl::TIOCSTI => return Err(Errno::IO.into()),
            _ => return Err(Errno::NOTTY.into()),
        }
        Ok(ZERO)
    }
}

/// Bytes into pieces of memory, which have room for them.
fn scatter(process: &mut Process, pieces: &[(u64, u64)], mut rest: &[u8]) -> SyscallResult<()> {
    for &(to, len) in pieces {
        let (now, later) = rest.split_at(rest.len().min(len as usize));
        copy_out(process, to, now)?;
        rest = later;
    }
    Ok(())
}
