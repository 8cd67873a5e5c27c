//! Terminals of a guest (`/dev/ptmx`, `/dev/pts/N`): each lasts as long as its master is open.
//!
//! Promises: all of a terminal is plain data, and bounded; the line that is being typed, what was echoed and nobody has read, and whose
//! foreground it is are in every state. A frozen one is checked before it counts. What a byte does is said in `discipline`, what a call
//! does in `terminal_calls`.

use std::collections::{BTreeMap, VecDeque};

use afresh_files::{Node, OpenFile, Tree};
use serde::{Deserialize, Serialize};

use super::State;
use super::readiness::{ERR, HUP, IN, OUT};
use super::signals::Info;
use super::table::Open;

/// Terminals that a guest may have.
pub(super) const TERMINALS: u32 = 64;
/// The number of the first terminal's device.
pub(super) const FIRST_DEVICE: u64 = 0x8800;
/// Bytes that wait to be read by programs, with one more for each line.
pub(super) const TYPED: usize = 4096;
/// Bytes that wait to be read by the master.
pub(super) const SHOWN: usize = 16 << 10;
/// Room that makes a terminal writable again.
const ROOM: usize = 512;
/// Enough bytes for a read that waits for several, and any at all: no events of `poll`'s.
pub(super) const ENOUGH: u16 = 0x400;
pub(super) const SOME: u16 = 0x200;

/// How a terminal behaves (`struct termios2`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Termios {
    pub(super) input: u32,
    pub(super) output: u32,
    pub(super) control: u32,
    pub(super) local: u32,
    pub(super) line: u8,
    pub(super) chars: [u8; 19],
    pub(super) speeds: [u32; 2],
}

impl Termios {
    /// As Linux has it for every new one.
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

    pub(super) fn is_canonical(&self) -> bool {
        self.local & libc::ICANON != 0
    }

    /// How many bytes a read waits for, and how long (in tenths of a second), where lines are not.
    pub(super) fn patience(&self) -> (usize, u64) {
        (self.chars[libc::VMIN].into(), self.chars[libc::VTIME].into())
    }
}

/// A terminal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Terminal {
    /// Its name in the tree, which it holds.
    pub(super) node: Node,
    pub(super) termios: Termios,
    /// Rows, columns, and what they are in dots.
    pub(super) window: [u16; 4],
    /// Whether nobody may open it yet.
    pub(super) locked: bool,
    /// What the master is told in front of bytes, if it has asked for that.
    pub(super) packet: Option<u8>,
    /// The session that it controls, and which of its groups is in the foreground.
    pub(super) session: Option<u32>,
    pub(super) group: u32,
    /// Descriptions besides the master's, and whether the last was closed.
    pub(super) slaves: u32,
    pub(super) parted: bool,
    /// What may be read: lines, or, where lines are not, all in one.
    pub(super) lines: VecDeque<Vec<u8>>,
    /// The line that is being typed, and the column that it has begun in.
    pub(super) line: Vec<u8>,
    pub(super) begun: u32,
    /// Whether the next byte means itself.
    pub(super) literal: bool,
    /// What the master may read, and the column that the next of it goes to.
    pub(super) shown: VecDeque<u8>,
    pub(super) column: u32,
    /// Whether output was stopped.
    pub(super) stopped: bool,
    /// Goes up whenever there is more to read or more room, or an end closes.
    pub(super) edges: u64,
}

impl Terminal {
    pub(super) fn new(node: Node) -> Self {
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
    pub(super) fn readable(&self) -> usize {
        self.lines.iter().map(Vec::len).sum()
    }

    /// Whether it takes what is typed.
    pub(super) fn takes(&self) -> bool {
        // A line that is too long is cut, for nobody could read it before it ends.
        let cut = self.termios.is_canonical() && self.lines.is_empty();
        cut || self.readable() + self.lines.len() + self.line.len() < TYPED
    }

    /// What the other end was told for the master's sake, if it has closed.
    pub(super) fn is_parted(&self) -> bool {
        self.slaves == 0 && self.parted
    }

    fn is_sound(&self) -> bool {
        let typed = self.readable() + self.lines.len() + self.line.len();
        let (typed, shown) = (typed <= 2 * TYPED, self.shown.len() <= SHOWN);
        typed && shown && self.edges < 1 << 62 && self.packet.is_none_or(|packet| packet < 64)
    }

    fn readiness(&self, master: bool) -> u16 {
        let when = |holds: bool, events: u16| if holds { events } else { 0 };
        if master {
            return when(!self.shown.is_empty() || self.packet.is_some_and(|p| p != 0), IN)
                | when(self.takes(), OUT)
                | when(self.is_parted(), HUP);
        }
        let writes = when(!self.stopped && SHOWN - self.shown.len() >= ROOM, OUT);
        if self.termios.is_canonical() {
            return writes | when(!self.lines.is_empty(), IN | ENOUGH | SOME);
        }
        let (least, time) = self.termios.patience();
        let (held, least) = (self.readable(), least.max(1));
        let enough = when(held >= least, ENOUGH) | when(held > 0, SOME);
        writes | enough | when(held >= if time == 0 { least } else { 1 }, IN)
    }
}

/// One end of a terminal that is open; of none whose master is gone.
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
    pub(super) fn get(&self, id: u32) -> Option<&Terminal> {
        self.0.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: u32) -> Option<&mut Terminal> {
        self.0.get_mut(&id)
    }

    /// The first number that is free.
    pub(super) fn free(&self) -> Option<u32> {
        (0..TERMINALS).find(|id| !self.0.contains_key(id))
    }

    pub(super) fn add(&mut self, id: u32, terminal: Terminal) {
        self.0.insert(id, terminal);
    }

    /// The terminal that controls a session.
    pub(super) fn of_session(&self, session: u32) -> Option<u32> {
        let mut all = self.0.iter();
        all.find(|(_, terminal)| terminal.session == Some(session)).map(|(id, _)| *id)
    }

    /// What an end is ready for.
    pub(super) fn readiness(&self, end: &TerminalEnd) -> (u16, u64) {
        match end.id.filter(|_| !end.hung).and_then(|id| self.get(id)) {
            Some(terminal) => (terminal.readiness(end.master), terminal.edges),
            None => (IN | OUT | ERR | HUP, u64::MAX),
        }
    }

    /// What is wrong with terminals that somebody else wrote down, of which `ends` are open, if anything is.
    pub(super) fn check<'a>(
        &self,
        ends: impl Iterator<Item = &'a TerminalEnd>,
        is_terminal: impl Fn(Node, u32) -> bool,
    ) -> Result<(), &'static str> {
        let mut counts: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        for end in ends {
            match (end.id, end.master) {
                (Some(id), true) => counts.entry(id).or_default().0 += 1,
                (Some(id), false) => counts.entry(id).or_default().1 += 1,
                (None, true) => return Err("a terminal is none"),
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

impl State {
    /// Sends a signal of the terminal's to all of a group.
    pub(super) fn signal_group(&mut self, group: u32, signal: i32) {
        const FROM_KERNEL: i32 = 0x80;
        if group == 0 {
            return;
        }
        for id in self.family.group(group) {
            let info = Info::new(signal as u8, FROM_KERNEL, 0, 0);
            self.with(id, |state| state.send(None, info));
        }
    }

    /// An end of a terminal is closed; the master's takes the terminal along.
    pub(super) fn close_terminal(&mut self, end: TerminalEnd) {
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
        if let Some(leader) = leader.filter(|leader| self.family.lives(*leader)) {
            for signal in [libc::SIGHUP, libc::SIGCONT] {
                let info = Info::new(signal as u8, 0x80, 0, 0);
                self.with(leader, |state| state.send(None, info));
            }
        }
        for description in self.table.descriptions_mut() {
            if let Open::Terminal(end) = &mut description.open
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
            // What the guest has forbidden itself there stays as it has it.
            let _ = self.tree.remove_file_at(&place, super::clock_calls::now());
        }
        self.tree.release(terminal.node);
    }

    /// Nobody reads or writes the terminal any more who has it open now, but for its master; it controls nobody.
    pub(super) fn hang_up_terminal(&mut self, id: u32) {
        for description in self.table.descriptions_mut() {
            if let Open::Terminal(end) = &mut description.open
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

    /// The current process ends: if it leads a session, its terminal is hung up, and who is in the foreground there is told.
    pub(super) fn leave_terminal(&mut self) {
        let own = &self.family.own;
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
            &|all| one(all).shown = vec![0; SHOWN + 1].into(),
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
