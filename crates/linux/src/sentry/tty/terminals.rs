//! Terminals of a guest (`/dev/ptmx`, `/dev/pts/N`): each lasts until its master is closed.
//!
//! Promises: all of a terminal is plain data, and bounded; the line that is being typed, unread
//! output and the foreground group are in every state. A frozen one is checked before it counts.
//! `line_discipline` documents bytes, and `terminal` documents calls.

use std::collections::{BTreeMap, VecDeque};

use afresh_files::{Node, OpenFile, Tree};
use serde::{Deserialize, Serialize};

use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::poll_events::{ERR, HUP, IN, OUT};
use crate::sentry::kernel::signals::{KERNEL, SignalInfo};
use crate::sentry::kernel::state::Kernel;

/// Terminals that a guest may have.
pub(in crate::sentry) const TERMINALS: u32 = 64;
/// The number of the first terminal's device.
pub(in crate::sentry) const FIRST_DEVICE: u64 = 0x8800;
/// Bytes that wait to be read by programs, with one more for each line.
pub(in crate::sentry) const TYPED: usize = 4096;
/// Maximum bytes of output that the master has not read.
pub(in crate::sentry) const MAX_UNREAD_OUTPUT: usize = 16 << 10;
/// Room that makes a terminal writable again.
const MIN_WRITE_ROOM: usize = 512;
/// An event beside those of `poll`: at least as many bytes as the terminal's VMIN, or the end of
/// input.
pub(in crate::sentry) const VMIN_REACHED: u16 = 0x400;
pub(in crate::sentry) const SOME: u16 = 0x200;

/// The settings of a terminal (`struct termios2`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Termios {
    pub(in crate::sentry) input: u32,
    pub(in crate::sentry) output: u32,
    pub(in crate::sentry) control: u32,
    pub(in crate::sentry) local: u32,
    pub(in crate::sentry) line: u8,
    pub(in crate::sentry) chars: [u8; 19],
    pub(in crate::sentry) speeds: [u32; 2],
}

impl Termios {
    /// As in Linux for every new one.
    fn usual() -> Self {
        let mut chars = [0; 19];
        for (at, byte) in [
            (libc::VINTR, 3),
            (libc::VQUIT, 28),
            (libc::VERASE, 127),
            (libc::VKILL, 21),
            (libc::VEOF, 4),
            (libc::VMIN, 1),
            (libc::VSTART, 17),
            (libc::VSTOP, 19),
            (libc::VSUSP, 26),
            (libc::VREPRINT, 18),
            (libc::VDISCARD, 15),
            (libc::VWERASE, 23),
            (libc::VLNEXT, 22),
        ] {
            chars[at] = byte;
        }
        let echo = libc::ECHO | libc::ECHOE | libc::ECHOK | libc::ECHOCTL | libc::ECHOKE;
        Self {
            input: libc::ICRNL | libc::IXON,
            output: libc::OPOST | libc::ONLCR,
            control: libc::B38400 | libc::CS8 | libc::CREAD,
            local: libc::ISIG | libc::ICANON | libc::IEXTEN | echo,
            line: 0,
            chars,
            speeds: [38400; 2],
        }
    }

    pub(in crate::sentry) fn is_canonical(&self) -> bool {
        self.local & libc::ICANON != 0
    }

    /// The number of bytes that a read waits for, and its time (in tenths of a second), in
    /// non-canonical mode.
    pub(in crate::sentry) fn patience(&self) -> (usize, u64) {
        (self.chars[libc::VMIN].into(), self.chars[libc::VTIME].into())
    }
}

/// A terminal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Terminal {
    /// Its name in the tree, which it holds.
    pub(in crate::sentry) node: Node,
    pub(in crate::sentry) termios: Termios,
    /// Rows and columns, in characters and in pixels.
    pub(in crate::sentry) window: [u16; 4],
    /// Whether it is locked (`TIOCSPTLCK`).
    pub(in crate::sentry) locked: bool,
    /// The packet byte for the master, in packet mode.
    pub(in crate::sentry) packet: Option<u8>,
    /// The session that it controls, and which of its groups is in the foreground.
    pub(in crate::sentry) session: Option<u32>,
    pub(in crate::sentry) group: u32,
    /// Descriptions of the slave, and whether the last was closed.
    pub(in crate::sentry) slaves: u32,
    pub(in crate::sentry) parted: bool,
    /// Input to be read: lines, or one piece in raw mode.
    pub(in crate::sentry) lines: VecDeque<Vec<u8>>,
    /// The line that is being typed, and the column that it has begun in.
    pub(in crate::sentry) line: Vec<u8>,
    pub(in crate::sentry) begun: u32,
    /// Whether the next byte means itself.
    pub(in crate::sentry) literal: bool,
    /// Output for the master, and the column of the cursor.
    pub(in crate::sentry) shown: VecDeque<u8>,
    pub(in crate::sentry) column: u32,
    /// Whether output was stopped.
    pub(in crate::sentry) stopped: bool,
    /// Goes up whenever there is more to read or more room, or an end closes.
    pub(in crate::sentry) edges: u64,
}

impl Terminal {
    pub(in crate::sentry) fn new(node: Node) -> Self {
        Self {
            node,
            termios: Termios::usual(),
            window: [0; 4],
            locked: true,
            packet: None,
            session: None,
            group: 0,
            slaves: 0,
            parted: false,
            lines: VecDeque::new(),
            line: Vec::new(),
            begun: 0,
            literal: false,
            shown: VecDeque::new(),
            column: 0,
            stopped: false,
            edges: 0,
        }
    }

    /// Bytes that may be read.
    pub(in crate::sentry) fn readable(&self) -> usize {
        self.lines.iter().map(Vec::len).sum()
    }

    /// Whether it takes input.
    pub(in crate::sentry) fn takes(&self) -> bool {
        // A line that is too long is cut, since it cannot be read before its end.
        let canonical = self.termios.is_canonical();
        let cut = canonical && self.lines.is_empty();
        // The same room as of `keep`, so that no byte behind a complete line is taken and lost.
        let typed = self.readable() + self.lines.len() + self.line.len();
        cut || typed + usize::from(canonical) < TYPED
    }

    /// The signals that the slave got when the master closed.
    pub(in crate::sentry) fn is_parted(&self) -> bool {
        self.slaves == 0 && self.parted
    }

    fn is_sound(&self) -> bool {
        let typed = self.readable() + self.lines.len() + self.line.len();
        let (typed, shown) = (typed <= 2 * TYPED, self.shown.len() <= MAX_UNREAD_OUTPUT);
        typed && shown && self.edges < 1 << 62 && self.packet.is_none_or(|packet| packet < 64)
    }

    fn readiness(&self, master: bool) -> u16 {
        let when = |holds: bool, events: u16| if holds { events } else { 0 };
        if master {
            return when(!self.shown.is_empty() || self.packet.is_some_and(|p| p != 0), IN)
                | when(self.takes(), OUT)
                | when(self.is_parted(), HUP);
        }
        let writes =
            when(!self.stopped && MAX_UNREAD_OUTPUT - self.shown.len() >= MIN_WRITE_ROOM, OUT);
        if self.termios.is_canonical() {
            return writes | when(!self.lines.is_empty(), IN | VMIN_REACHED | SOME);
        }
        let (least, time) = self.termios.patience();
        let (held, least) = (self.readable(), least.max(1));
        let enough = when(held >= least, VMIN_REACHED) | when(held > 0, SOME);
        writes | enough | when(held >= if time == 0 { least } else { 1 }, IN)
    }
}

/// One open end of a terminal whose master is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TerminalEnd {
    pub(crate) id: Option<u32>,
    pub(crate) master: bool,
    /// Whether its session has ended: it is counted, and good for nothing.
    pub(crate) hung: bool,
    pub(crate) open: OpenFile,
}

/// All terminals, by number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Terminals(BTreeMap<u32, Terminal>);

impl Terminals {
    pub(in crate::sentry) fn get(&self, id: u32) -> Option<&Terminal> {
        self.0.get(&id)
    }

    pub(in crate::sentry) fn get_mut(&mut self, id: u32) -> Option<&mut Terminal> {
        self.0.get_mut(&id)
    }

    /// The first number that is free.
    pub(in crate::sentry) fn free(&self) -> Option<u32> {
        (0..TERMINALS).find(|id| !self.0.contains_key(id))
    }

    pub(in crate::sentry) fn add(&mut self, id: u32, terminal: Terminal) {
        self.0.insert(id, terminal);
    }

    /// The terminal that controls a session.
    pub(in crate::sentry) fn of_session(&self, session: u32) -> Option<u32> {
        let mut all = self.0.iter();
        all.find(|(_, terminal)| terminal.session == Some(session)).map(|(id, _)| *id)
    }

    /// The readiness of an end.
    pub(in crate::sentry) fn readiness(&self, end: &TerminalEnd) -> (u16, u64) {
        match end.id.filter(|_| !end.hung).and_then(|id| self.get(id)) {
            Some(terminal) => (terminal.readiness(end.master), terminal.edges),
            None => (IN | OUT | ERR | HUP, u64::MAX),
        }
    }

    /// The first error of terminals from a snapshot with open `ends`.
    pub(in crate::sentry) fn check<'a>(
        &self,
        ends: impl Iterator<Item = &'a TerminalEnd>,
        is_terminal: impl Fn(Node, u32) -> bool,
    ) -> Result<(), &'static str> {
        let mut counts: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        for end in ends {
            match (end.id, end.master) {
                (Some(id), true) => counts.entry(id).or_default().0 += 1,
                (Some(id), false) => counts.entry(id).or_default().1 += 1,
                (None, true) => return Err("a terminal is invalid"),
                (None, false) => {}
            }
        }
        let sound = self.0.iter().all(|(id, terminal)| {
            let fits = counts.get(id) == Some(&(1, terminal.slaves));
            *id < TERMINALS && fits && terminal.is_sound() && is_terminal(terminal.node, *id)
        });
        let known = counts.keys().all(|id| self.0.contains_key(id));
        if sound && known { Ok(()) } else { Err("its terminals do not fit together") }
    }
}

impl Kernel {
    /// Sends a signal of the terminal to a group.
    pub(in crate::sentry) fn signal_group(&mut self, group: u32, signal: i32) {
        const FROM_KERNEL: i32 = 0x80;
        if group == 0 {
            return;
        }
        for id in self.processes.group(group) {
            let info = SignalInfo::new(signal as u8, FROM_KERNEL, KERNEL, 0);
            self.send_to(id, None, info);
        }
    }

    /// An end of a terminal is closed; the master's takes the terminal along.
    pub(in crate::sentry) fn close_terminal(&mut self, end: TerminalEnd) {
        self.tree.close(end.open);
        let Some(id) = end.id else { return };
        if !end.master {
            let Some(terminal) = self.terminals.get_mut(id) else { return };
            terminal.slaves = terminal.slaves.saturating_sub(1);
            terminal.parted |= terminal.slaves == 0;
            terminal.edges += 1;
            return;
        }
        let leader = self.terminals.get(id).and_then(|terminal| terminal.session);
        self.hang_up_terminal(id);
        if let Some(leader) = leader.filter(|leader| self.processes.lives(*leader)) {
            for signal in [libc::SIGHUP, libc::SIGCONT] {
                let info = SignalInfo::new(signal as u8, 0x80, KERNEL, 0);
                self.send_to(leader, None, info);
            }
        }
        for description in self.table.descriptions_mut() {
            if let FileObject::Terminal(end) = &mut description.open
                && end.id == Some(id)
            {
                end.id = None;
            }
        }
        let Some(terminal) = self.terminals.0.remove(&id) else { return };
        let how = afresh_files::Walk::new(Tree::ROOT).name();
        if let Ok(place) = self.tree.walk(format!("/dev/pts/{id}").as_bytes(), how)
            && place.node() == Ok(terminal.node)
        {
            // Settings that the guest has made there stay.
            let _ = self.tree.remove_file_at(&place, crate::sentry::kernel::time::now());
        }
        self.tree.release(terminal.node);
    }

    /// Hangs up the terminal for all its slaves; it controls no session any more.
    pub(in crate::sentry) fn hang_up_terminal(&mut self, id: u32) {
        for description in self.table.descriptions_mut() {
            if let FileObject::Terminal(end) = &mut description.open
                && end.id == Some(id)
                && !end.master
            {
                end.hung = true;
            }
        }
        let Some(terminal) = self.terminals.get_mut(id) else { return };
        (terminal.session, terminal.group) = (None, 0);
        terminal.flush_typed();
        terminal.edges += 1;
    }

    /// The current process ends: if it leads a session, its terminal is hung up, and the foreground
    /// group there is notified.
    pub(in crate::sentry) fn leave_terminal(&mut self) {
        let own = &self.processes.current.info;
        if own.session != own.id {
            return;
        }
        let Some(id) = self.terminals.of_session(own.id) else { return };
        let group = self.terminals.get(id).map_or(0, |terminal| terminal.group);
        self.hang_up_terminal(id);
        self.signal_group(group, libc::SIGHUP);
        self.signal_group(group, libc::SIGCONT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_that_do_not_fit_together_are_refused() {
        let mut tree = Tree::new(afresh_files::Budget::default());
        let open = tree.open(Tree::ROOT, afresh_files::Access::reading()).unwrap();
        let end = |id, master| TerminalEnd { id, master, hung: false, open: open.clone() };
        let ends = [end(Some(3), true), end(Some(3), false), end(None, false)];
        let check = |change: &dyn Fn(&mut Terminals), ends: &[TerminalEnd]| {
            let mut all = Terminals::default();
            all.add(3, Terminal { slaves: 1, ..Terminal::new(Node(7)) });
            change(&mut all);
            all.check(ends.iter(), |node, _| node == Node(7))
        };
        fn one(all: &mut Terminals) -> &mut Terminal {
            all.get_mut(3).unwrap()
        }
        assert_eq!(check(&|_| (), &ends), Ok(()));
        assert!(check(&|_| (), &ends[..1]).is_err(), "a program has it open");
        assert!(check(&|_| (), &ends[1..]).is_err(), "it has no master");
        assert!(check(&|_| (), &[&ends[..], &[end(Some(4), true)]].concat()).is_err());
        assert!(check(&|_| (), &[&ends[..], &[end(None, true)]].concat()).is_err());
        let odd: [&dyn Fn(&mut Terminals); 6] = [
            &|all| one(all).node = Node(8),
            &|all| one(all).shown = vec![0; MAX_UNREAD_OUTPUT + 1].into(),
            &|all| one(all).line = vec![0; 2 * TYPED + 1],
            &|all| one(all).lines = vec![Vec::new(); 2 * TYPED + 1].into(),
            &|all| one(all).edges = u64::MAX,
            &|all| one(all).packet = Some(64),
        ];
        for (index, change) in odd.iter().enumerate() {
            assert!(check(change, &ends).is_err(), "{index}");
        }
    }
}
