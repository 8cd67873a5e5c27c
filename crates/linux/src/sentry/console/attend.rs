//! The console between two calls: input, signals and the size of the terminal.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use afresh_files::{Access, New, Refused, Tree, Walk};
use afresh_snapshot::{OutputSource, OutputStream};

use super::{Control, HostTerminal, RunControl};
use crate::sentry::Sentry;
use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::kernel::identity::FIRST;
use crate::sentry::kernel::signals::{KERNEL, SignalInfo};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::time::now;
use crate::sentry::tty::terminals::{FIRST_DEVICE, Terminal, TerminalEnd};

/// The terminal number of a run.
const TERMINAL: u32 = 0;

/// Interval of checks for typed bytes and new connections while the guest runs.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

impl Kernel {
    /// Makes a terminal whose master the host has, of `rows` and `columns`: the controlling
    /// terminal of the first process, and the object of those standard descriptors that `standard`
    /// names.
    pub(crate) fn attach_terminal(
        &mut self,
        standard: [bool; 3],
        [rows, columns]: [u16; 2],
    ) -> Result<(), Refused> {
        let path = format!("/dev/pts/{TERMINAL}");
        let place = self.tree.walk(path.as_bytes(), Walk::new(Tree::ROOT).name())?;
        let device = New::Device(FIRST_DEVICE + u64::from(TERMINAL));
        let node = self.tree.create_at(&place, device, 0o620, now())?;
        self.tree.hold(node)?;
        let mut terminal = Terminal::new(node);
        (terminal.locked, terminal.window) = (false, [rows, columns, 0, 0]);
        (terminal.session, terminal.group) = (Some(FIRST), FIRST);
        let access = Access { read: true, write: true, append: false };
        for number in (0..3).filter(|number| standard[*number]) {
            let open = self.tree.open(node, access)?;
            let end = TerminalEnd { id: Some(TERMINAL), master: false, hung: false, open };
            let found = Some((place.directory, place.name.clone()));
            let object = FileObject::Terminal(end);
            if let Ok(description) = self.table.get_mut(number as u64) {
                *description = Description { found, ..Description::new(object, libc::O_RDWR) };
                terminal.slaves += 1;
            }
        }
        self.terminals.add(TERMINAL, terminal);
        Ok(())
    }
}

impl Sentry {
    /// Moves pending host input to the guest, and terminal output to the host.
    pub(crate) fn attend(&mut self) {
        let Some(mut console) = self.console.take() else { return };
        for control in console.control.iter().flat_map(RunControl::take) {
            match control {
                Control::Signal(signal) => {
                    let info = SignalInfo::new(signal, 0, KERNEL, 0);
                    self.change().send_to(FIRST, None, info);
                }
                Control::Resize([rows, columns]) => self.resize([rows, columns, 0, 0]),
            }
        }
        if let Some(host) = &mut console.terminal {
            if host.looked.elapsed() >= LOOK_INTERVAL {
                self.type_in(host);
            }
            self.show();
        }
        if console.published.are_due(LOOK_INTERVAL) {
            self.admit_connections(&mut console.published.list);
        }
        self.console = Some(console);
    }

    fn resize(&mut self, window: [u16; 4]) {
        let Some(terminal) = self.state.terminals.get(TERMINAL) else { return };
        if terminal.window == window {
            return;
        }
        let group = terminal.group;
        let state = self.change();
        if let Some(terminal) = state.terminals.get_mut(TERMINAL) {
            terminal.window = window;
        }
        state.signal_group(group, libc::SIGWINCH);
    }

    fn type_in(&mut self, host: &mut HostTerminal) {
        let state = self.change();
        let Some(terminal) = state.terminals.get_mut(TERMINAL) else { return };
        let ended = host.ended;
        for (group, signal) in host.type_in(terminal) {
            state.signal_group(group, signal);
        }
        if host.ended && !ended {
            let leader = state.terminals.get(TERMINAL).and_then(|terminal| terminal.session);
            state.hang_up_terminal(TERMINAL);
            for signal in [libc::SIGHUP, libc::SIGCONT] {
                let info = SignalInfo::new(signal as u8, 0x80, KERNEL, 0);
                if let Some(leader) = leader.filter(|leader| state.processes.lives(*leader)) {
                    state.send_to(leader, None, info);
                }
            }
        }
    }

    /// Writes terminal output to the host.
    fn show(&mut self) {
        let Some(terminal) = self.state.terminals.get(TERMINAL) else { return };
        if terminal.shown.is_empty() {
            return;
        }
        let Some(terminal) = self.change().terminals.get_mut(TERMINAL) else { return };
        let bytes: Vec<u8> = terminal.shown.drain(..).collect();
        terminal.edges += 1;
        let from = OutputSource::from(OutputStream::Output);
        // A host that shows nothing any more has hung up, and its input says so.
        let _ = self.streams.put_out(from, &bytes, self.output_limit);
    }

    /// Whether the host can wake up a guest in which nothing can run: with input, a signal, or a
    /// connection to a published port.
    pub(crate) fn may_be_woken(&self) -> bool {
        let Some(console) = &self.console else { return false };
        if self.streams.source.is_none() && self.streams.stops_at_end && self.state.awaits_input() {
            return false;
        }
        let terminal = console.terminal.as_ref().is_some_and(|host| !host.ended);
        let publishes = !console.published.list.is_empty();
        console.control.is_some() || terminal || publishes || self.wants_input()
    }

    fn wants_input(&self) -> bool {
        self.streams.source.is_some() && self.state.awaits_input()
    }

    /// Waits until the host or a server has something for the guest, or `ends` is readable, for
    /// `length` at most.
    pub(crate) fn await_host(&mut self, ends: BorrowedFd<'_>, length: Duration) {
        let wants_input = self.wants_input();
        let Some(mut console) = self.console.take() else { return };
        // The guest may have begun to listen before it waits.
        let is_changed = self.admit_connections(&mut console.published.list);
        let console = self.console.insert(console);
        if is_changed {
            return;
        }
        let (mut terminal, mut takes) = (None, false);
        if let Some(host) = &mut console.terminal {
            let room = self.state.terminals.get(TERMINAL).is_some_and(Terminal::takes);
            takes = !host.ended && room;
            // It is looked at whenever the guest has waited.
            host.looked = host.looked.checked_sub(LOOK_INTERVAL).unwrap_or(host.looked);
            terminal = Some(&host.input);
        }
        let control = console.control.as_ref().map(|control| control.0.wake.as_fd());
        let terminal = terminal.filter(|_| takes).map(AsFd::as_fd);
        let input = self.streams.source.as_ref().filter(|_| wants_input);
        let fds = [Some(ends), control, terminal, input.map(|input| input.fd.as_fd())];
        let published = console.published.acceptors(&self.state);
        let length = console.published.bounded(length);
        let fds: Vec<_> = fds.into_iter().flatten().chain(published).collect();
        self.lines.wait_with(&self.state, &fds, length);
    }
}
