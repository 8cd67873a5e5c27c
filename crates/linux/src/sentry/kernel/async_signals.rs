//! Signals to the owners of open files (`SIGIO`): the file is ready, or a directory has changed.
//!
//! Promises: a signal is sent before the call that caused it returns, and only to processes that
//! the owner's setter may signal. May break it: an event that no call of the guest and no server
//! outside causes.

use std::collections::BTreeSet;

use afresh_files::Node;

use crate::sentry::Sentry;
use crate::sentry::kernel::async_files::{
    AsyncFile, DN_MULTISHOT, OwnerKind, POLL_MSG, SeenEvents, band,
};
use crate::sentry::kernel::device::Device;
use crate::sentry::kernel::epoll::ReadySets;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::readiness::PortCaller;
use crate::sentry::kernel::signals::{KERNEL, SignalInfo};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::streams::Streams;
use crate::sentry::kernel::users::{EFFECTIVE, REAL, SAVED};
use crate::sentry::net::sockets::SocketState;

/// Events of an open file that begin signals, and their codes.
type ReadyFile = (u64, SeenEvents, Vec<i32>);

/// The origin of the readiness of an open file, apart from the file.
enum EventSource {
    Channels(Vec<u64>),
    /// Something that changes by itself, or is not noted.
    Other,
}

impl Kernel {
    /// The origin of the readiness of an open file.
    fn event_source(&self, id: u64) -> EventSource {
        let channels = match self.table.description(id).map(|found| &found.open) {
            None | Some(FileObject::Output | FileObject::Messages) => Vec::new(),
            Some(FileObject::Device(Device::Random, _)) => Vec::new(),
            Some(FileObject::Pipe { channel, .. }) => vec![*channel],
            Some(FileObject::Fifo(fifo)) => vec![fifo.channel],
            Some(FileObject::Socket(socket)) => match &socket.stage {
                SocketState::New | SocketState::Reaching { .. } | SocketState::Refused(_) => {
                    Vec::new()
                }
                SocketState::Connected { incoming, outgoing } => {
                    incoming.iter().chain(outgoing).copied().collect()
                }
                SocketState::Datagrams { inbox, mate, .. } => {
                    let mate = mate.and_then(|mate| self.datagram_socket(mate));
                    [*inbox].into_iter().chain(mate.map(|(_, inbox)| inbox)).collect()
                }
                // The time of a deferred connection passes by itself.
                SocketState::Listening(queue) if !queue.is_empty() => return EventSource::Other,
                SocketState::Listening(_) => Vec::new(),
            },
            Some(_) => return EventSource::Other,
        };
        EventSource::Channels(channels)
    }

    /// Begins a look at open files that send signals, and returns those that may have had an event.
    fn take_touched_files(&mut self) -> BTreeSet<u64> {
        let channels = self.channels.take_touched();
        let files = &mut self.table.async_files;
        channels.into_iter().for_each(|id| files.touch(id));
        let touched = files.take_touched();
        for id in &touched {
            let source = self.event_source(*id);
            self.table.async_files.watch(*id, matches!(source, EventSource::Other));
            if let EventSource::Channels(channels) = source {
                channels.into_iter().for_each(|channel| self.channels.watch(channel, *id));
            }
        }
        &touched | self.table.async_files.watched()
    }

    /// The events of an open file, and the number of arrivals there.
    pub(in crate::sentry) fn seen_events(&self, streams: &Streams, id: u64) -> SeenEvents {
        let asker = PortCaller { streams, thread: self.current().threads.current_id() };
        let Some((events, edges)) = self.readiness(asker, id, &mut ReadySets::default()) else {
            return SeenEvents::default();
        };
        let passed = |id: u64| self.channels.get(id).map_or(0, |channel| channel.passed());
        let taken = |id: u64| self.channels.get(id).map_or(0, |channel| channel.bytes_read());
        let (arrivals, departures) = match self.table.description(id).map(|found| &found.open) {
            Some(FileObject::Pipe { channel, writes: false }) => (passed(*channel), 0),
            Some(FileObject::Pipe { channel, writes: true }) => (passed(*channel), taken(*channel)),
            Some(FileObject::Fifo(fifo)) => (passed(fifo.channel), taken(fifo.channel)),
            Some(FileObject::Socket(socket)) => match &socket.stage {
                SocketState::Connected { incoming: Some(id), .. } => (passed(*id), 0),
                SocketState::Datagrams { inbox, .. } => (passed(*inbox), 0),
                SocketState::Listening(_) => (socket.edges, 0),
                _ => (0, 0),
            },
            Some(FileObject::Watches(_)) => (edges, 0),
            // A terminal counts reads among its edges.
            _ => (0, 0),
        };
        SeenEvents { events, arrivals, departures }
    }

    /// Those of the open files that have had an event.
    fn ready_files(&self, streams: &Streams, ids: &BTreeSet<u64>) -> Vec<ReadyFile> {
        let ready = ids.iter().filter_map(|&id| {
            let file = self.table.async_files.of(id);
            let now = self.seen_events(streams, id);
            let open = self.table.description(id).map(|found| &found.open);
            let is_pipe = matches!(open, Some(FileObject::Pipe { .. } | FileObject::Fifo(_)));
            (now != file.seen).then(|| (id, now, file.seen.codes(now, is_pipe)))
        });
        ready.collect()
    }

    /// Sends the owner of an open file a signal about it.
    fn signal_owner(&mut self, file: &AsyncFile, number: u32, code: i32) {
        let owner = file.owner;
        let plain = SignalInfo::new(libc::SIGIO as u8, libc::SI_KERNEL, KERNEL, 0);
        let info = match file.signal {
            0 => plain.clone(),
            signal => SignalInfo::of_descriptor(signal, code, band(code), number),
        };
        let targets = match owner.kind {
            _ if owner.id == 0 => Vec::new(),
            OwnerKind::Group => self.processes.group(owner.id),
            OwnerKind::Process => vec![self.home_of_thread(owner.id).unwrap_or(owner.id)],
            OwnerKind::Thread => self.home_of_thread(owner.id).into_iter().collect(),
        };
        let thread = (owner.kind == OwnerKind::Thread).then_some(owner.id);
        for target in targets {
            if !self.processes.lives(target) || !self.may_own(owner.users, target) {
                continue;
            }
            // A signal that does not fit is replaced by one without information.
            if !self.send_to(target, thread, info.clone()) {
                self.send_to(target, thread, plain.clone());
            }
        }
    }

    /// Whether users that have set an owner may signal a process.
    fn may_own(&self, [real, effective]: [u32; 2], target: u32) -> bool {
        let ids = self.ids_of(target).user;
        let same = |user: u32| [ids[REAL], ids[SAVED]].contains(&user);
        effective == 0 || same(real) || same(effective)
    }

    /// The real and the effective user of the current process.
    pub(in crate::sentry) fn owning_users(&self) -> [u32; 2] {
        let ids = self.ids().user;
        [ids[REAL], ids[EFFECTIVE]]
    }

    /// Signals events (`DN_…`) of a directory.
    pub(in crate::sentry) fn notice_directory(&mut self, directory: Node, events: u32) {
        if !self.table.async_files.has_noticed() {
            return;
        }
        let opened = |id: &u64| match self.table.description(*id).map(|found| &found.open) {
            Some(FileObject::File(open)) => open.node == directory,
            _ => false,
        };
        let all: Vec<u64> = self.table.async_files.noticed().filter(opened).collect();
        for id in all {
            let file = self.table.async_files.of(id);
            let Some(notice) = file.notice.filter(|notice| notice.mask & events != 0) else {
                continue;
            };
            self.signal_owner(&file, notice.number, POLL_MSG);
            if notice.mask & DN_MULTISHOT == 0 {
                // It sends fewer signals than before.
                let _ = self.table.async_files.set(id, |file| file.notice = None);
            }
        }
    }
}

impl Sentry {
    /// Sends signals about open files that have had an event.
    pub(in crate::sentry) fn signal_ready_files(&mut self) {
        if !self.state.table.async_files.has_ready() {
            return;
        }
        let state = &self.state;
        let ready = match state.table.async_files.is_touched() || state.channels.is_touched() {
            true => {
                let touched = self.change().take_touched_files();
                self.state.ready_files(&self.streams, &touched)
            }
            false => state.ready_files(&self.streams, state.table.async_files.watched()),
        };
        if ready.is_empty() {
            return;
        }
        let state = self.change();
        for (id, seen, codes) in ready {
            state.table.async_files.see(id, seen);
            let file = state.table.async_files.of(id);
            let Some(number) = file.number else { continue };
            codes.into_iter().for_each(|code| state.signal_owner(&file, number, code));
        }
    }
}
