//! A guest's state as plain bytes, for snapshots, and back.
//!
//! Bytes from a snapshot may come from a stranger. They name no host path that the caller did not
//! grant, request no more than every guest may have, and are refused if they are inconsistent. No
//! host path is opened before that is known.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;

use afresh_files::{Budget, Kind, Node, OpenFile, SavedTree, Time, Tree};
use serde::{Deserialize, Serialize};

use crate::base::{self, Base};
use crate::error::{FreezeError, Incompatible, ThawError};
use crate::sentry::fs::devices::{Device, FIFO};
use crate::sentry::fs::proc_paths::ProcDir;
use crate::sentry::fs::root_files;
use crate::sentry::fs::seals::Seals;
use crate::sentry::kernel::channels::Channels;
use crate::sentry::kernel::epoll::EpollSet;
use crate::sentry::kernel::fd_table::{Description, FdTable, FdTableParts, FileObject};
use crate::sentry::kernel::fifos::{Fifo, opening};
use crate::sentry::kernel::file_locks::FileLocks;
use crate::sentry::kernel::generation::GenerationWatch;
use crate::sentry::kernel::in_flight_fds::InFlightFds;
use crate::sentry::kernel::inotify::Inotify;
use crate::sentry::kernel::message_queues::MessageQueues;
use crate::sentry::kernel::posix_queues::PosixQueues;
use crate::sentry::kernel::process::Process;
use crate::sentry::kernel::process_table::{FIRST, PackedProcessTable};
use crate::sentry::kernel::semaphores::Semaphores;
use crate::sentry::kernel::signals::PendingSignals;
use crate::sentry::kernel::threads::Threads;
use crate::sentry::kernel::timer_fd::TimerFd;
use crate::sentry::kernel::timers::Timers;
use crate::sentry::mm::layout::Layout;
use crate::sentry::mm::shared_segments::SharedSegments;
use crate::sentry::net::dns::ResolvedNames;
use crate::sentry::net::sockets::Socket;
use crate::sentry::tty::terminals::{FIRST_DEVICE, TerminalEnd, Terminals};
use crate::sentry::{Kernel, NAME};

/// [`Kernel`] but for its files, in a form that is written down.
#[derive(Serialize, Deserialize)]
pub(crate) struct PackedKernel {
    layout: Layout,
    layers: Vec<Vec<u8>>,
    /// Process, number, description, and whether it is closed on `exec`.
    descriptors: Vec<(u32, u32, u64, bool)>,
    descriptions: Vec<(u64, PackedDescription)>,
    next: u64,
    carried: InFlightFds,
    directory: Node,
    umask: u32,
    handlers: Vec<(u64, [u8; 32])>,
    pending: PendingSignals,
    timers: Timers,
    threads: Threads,
    channels: Channels,
    terminals: Terminals,
    locks: FileLocks,
    seals: Seals,
    moves: u32,
    system_v: SharedSegments,
    semaphores: Semaphores,
    queues: MessageQueues,
    named_queues: PosixQueues,
    names: ResolvedNames,
    processes: PackedProcessTable,
}

/// Grants and limits of the opener of a snapshot.
#[derive(Debug)]
pub(crate) struct OpenerGrants {
    /// Paths of the host, sorted.
    pub(crate) granted: Vec<PathBuf>,
    /// Maximum bytes of mappings.
    pub(crate) memory: u64,
    pub(crate) storage: Budget,
}

/// The open object, its flags, and the place where it was found.
type PackedDescription = (PackedOpen, u32, Option<(Node, Vec<u8>)>);

#[derive(Serialize, Deserialize)]
enum PackedOpen {
    Input,
    Output,
    Messages,
    /// With the size that it had, and when it was changed.
    File(OpenFile, u64, Time),
    /// With its number.
    Device(u64, OpenFile),
    Pipe(u64, bool),
    Fifo(Fifo),
    Terminal(TerminalEnd),
    Watches(Inotify),
    Event(u64, bool, u64),
    Timer(TimerFd),
    Epoll(EpollSet),
    Socket(Socket),
    Folder(ProcDir, u64),
    Process(u32),
    Signals(u64),
    Generation(GenerationWatch, OpenFile),
    Queue(u32),
}

/// A state that does not fit together.
pub(crate) fn damaged(what: &str) -> ThawError {
    ThawError::State(what.to_owned())
}

impl Kernel {
    /// The state, and the files that the guest has written.
    pub(crate) fn pack(&self) -> Result<(PackedKernel, Vec<u8>), FreezeError> {
        let lost = |error: &dyn std::fmt::Display| FreezeError::State(error.to_string());
        let stat = |open: &OpenFile| self.tree.stat(open.node).map_err(|error| lost(&error));
        let FdTableParts { descriptors, descriptions: open, next, carried } =
            self.table.parts(self.processes.current_id());
        let mut descriptions = Vec::new();
        for (id, description) in open {
            let open = match &description.open {
                FileObject::Input => PackedOpen::Input,
                FileObject::Output => PackedOpen::Output,
                FileObject::Messages => PackedOpen::Messages,
                FileObject::File(open) => {
                    let stat = stat(open)?;
                    PackedOpen::File(open.clone(), stat.size, stat.times.modified)
                }
                FileObject::Device(Device::Generation(watch), open) => {
                    PackedOpen::Generation(*watch, open.clone())
                }
                FileObject::Device(_, open) => PackedOpen::Device(stat(open)?.device, open.clone()),
                FileObject::Pipe { channel, writes } => PackedOpen::Pipe(*channel, *writes),
                FileObject::Fifo(fifo) => PackedOpen::Fifo(fifo.clone()),
                FileObject::Terminal(end) => PackedOpen::Terminal(end.clone()),
                FileObject::Watches(watches) => PackedOpen::Watches(watches.clone()),
                FileObject::Event { count, semaphore, edges } => {
                    PackedOpen::Event(*count, *semaphore, *edges)
                }
                FileObject::Timer(timer) => PackedOpen::Timer(timer.clone()),
                FileObject::Epoll(set) => PackedOpen::Epoll(set.clone()),
                FileObject::Socket(socket) => PackedOpen::Socket(socket.clone()),
                FileObject::Folder(folder, at) => PackedOpen::Folder(*folder, *at),
                FileObject::Process(id) => PackedOpen::Process(*id),
                FileObject::Signals(set) => PackedOpen::Signals(*set),
                FileObject::Queue(id) => PackedOpen::Queue(*id),
            };
            let found = description.found.as_ref().map(|(above, name)| (*above, name.to_vec()));
            descriptions.push((id, (open, description.flags, found)));
        }
        let (current, processes) = PackedProcessTable::split(self.processes.clone());
        let Process { directory, umask, handlers, pending, timers, threads, .. } = current;
        let packed = PackedKernel {
            layout: self.layout.clone(),
            layers: self.layers.iter().map(|path| root_files::bytes(path).to_vec()).collect(),
            descriptors,
            descriptions,
            next,
            carried,
            directory,
            umask,
            handlers: handlers.into_iter().collect(),
            pending,
            timers,
            threads,
            channels: self.channels.clone(),
            terminals: self.terminals.clone(),
            locks: self.locks.clone(),
            seals: self.seals.lasting(&self.tree),
            moves: self.moves,
            system_v: self.system_v.clone(),
            semaphores: self.semaphores.clone(),
            queues: self.queues.clone(),
            named_queues: self.named_queues.clone(),
            names: self.names.clone(),
            processes,
        };
        let files = self.tree.saved().map_err(|error| lost(&error))?;
        Ok((packed, files.to_bytes()))
    }

    /// The state that was packed, over `base` and the opener's grants, which must include all
    /// directories that it had. The opener's limits replace its own.
    pub(crate) fn unpack(
        packed: PackedKernel,
        files: &[u8],
        base: Option<Arc<Base>>,
        opener: &OpenerGrants,
    ) -> Result<Self, ThawError> {
        let processes = packed.processes.joined(|info| Process {
            info,
            directory: packed.directory,
            umask: packed.umask & 0o777,
            handlers: packed.handlers.into_iter().collect(),
            pending: packed.pending,
            timers: packed.timers,
            threads: packed.threads,
        });
        processes.check(&packed.layout).map_err(damaged)?;
        let path = |bytes| PathBuf::from(OsString::from_vec(bytes));
        let layers: Vec<PathBuf> = packed.layers.into_iter().map(path).collect();
        let below = root_files::over_named(base::over(base.as_ref()), &layers, &opener.granted)?;
        let saved = SavedTree::from_bytes(files).map_err(Incompatible::Files)?;
        let tree = below.restored(&saved).map_err(Incompatible::Files)?.with_budget(opener.storage);
        let limit =
            |what, needed, limit, way_out| Incompatible::Limit { what, needed, limit, way_out };
        let used = tree.used();
        if used.bytes > opener.storage.bytes {
            return Err(limit("storage", used.bytes, opener.storage.bytes, "storage_limit").into());
        }
        if used.files > opener.storage.files {
            return Err(damaged("it has more files than a program may have"));
        }
        let mut descriptions = BTreeMap::new();
        for (id, (open, flags, found)) in packed.descriptions {
            let open = match open {
                PackedOpen::Input => FileObject::Input,
                PackedOpen::Output => FileObject::Output,
                PackedOpen::Messages => FileObject::Messages,
                PackedOpen::File(open, size, modified) => {
                    let stat = stat_open_file(&tree, &open)?;
                    if stat.kind == Kind::File
                        && (stat.size, stat.times.modified) != (size, modified)
                    {
                        let path = PathBuf::from(format!("descriptor {id}"));
                        return Err(
                            Incompatible::File { path, why: "its file has changed since" }.into()
                        );
                    }
                    FileObject::File(open)
                }
                PackedOpen::Device(number, open) => {
                    stat_open_file(&tree, &open)?;
                    let device = Device::of(number).ok_or_else(|| damaged("an unknown device"))?;
                    FileObject::Device(device, open)
                }
                PackedOpen::Pipe(channel, writes) => FileObject::Pipe { channel, writes },
                PackedOpen::Fifo(fifo) => {
                    let stat = stat_open_file(&tree, &fifo.open)?;
                    if stat.kind != Kind::Device || stat.device != FIFO {
                        return Err(damaged("a named pipe has another kind of file"));
                    }
                    FileObject::Fifo(fifo)
                }
                PackedOpen::Terminal(end) => {
                    stat_open_file(&tree, &end.open)?;
                    FileObject::Terminal(end)
                }
                PackedOpen::Watches(watches) if watches.is_sound() => FileObject::Watches(watches),
                PackedOpen::Watches(_) => return Err(damaged("a watcher of files is invalid")),
                PackedOpen::Event(count, semaphore, edges) => {
                    FileObject::Event { count, semaphore, edges }
                }
                PackedOpen::Timer(timer) => FileObject::Timer(timer),
                PackedOpen::Epoll(set) if set.is_sound() => FileObject::Epoll(set),
                PackedOpen::Epoll(_) => return Err(damaged("a set of descriptors is invalid")),
                PackedOpen::Socket(socket) if socket.is_sound() => FileObject::Socket(socket),
                PackedOpen::Socket(_) => return Err(damaged("a socket is invalid")),
                // Its process may have ended: it is empty then.
                PackedOpen::Folder(folder, at) => FileObject::Folder(folder, at),
                // A number that is not given yet would be another's later.
                PackedOpen::Process(id)
                    if (FIRST..processes.current.threads.next()).contains(&id) =>
                {
                    FileObject::Process(id)
                }
                PackedOpen::Signals(set) => FileObject::Signals(set),
                PackedOpen::Queue(id) => FileObject::Queue(id),
                PackedOpen::Generation(watch, open) if watch.is_sound() => {
                    stat_open_file(&tree, &open)?;
                    FileObject::Device(Device::Generation(watch), open)
                }
                PackedOpen::Generation(..) => {
                    return Err(damaged("a descriptor of the generation sends no signal"));
                }
                PackedOpen::Process(_) => return Err(damaged("a descriptor of no process")),
            };
            if found.as_ref().is_some_and(|(_, name)| name.len() > NAME) {
                return Err(damaged("the name of an open file is longer than names are"));
            }
            let found = found.map(|(above, name)| (above, name.into()));
            descriptions.insert(id, Description { open, flags, found });
        }
        let (descriptors, next) = (packed.descriptors, packed.next);
        let parts = FdTableParts { descriptors, descriptions, next, carried: packed.carried };
        let table = FdTable::from_parts(parts, FIRST, |id| processes.lives(id))
            .ok_or_else(|| damaged("its descriptors do not fit together"))?;
        let mut ends: Vec<_> = table.descriptions().flat_map(|(_, d)| d.open.ends()).collect();
        let threads = processes.threads();
        for opening in threads.filter_map(|(_, thread)| opening(thread)) {
            let stat = stat_open_file(&tree, &opening.fifo.open)?;
            if !opening.is_sound(stat.kind, stat.device) {
                return Err(damaged("a thread waits to open what is no named pipe"));
            }
            ends.extend(opening.fifo.ends());
        }
        packed.channels.check(&ends).map_err(damaged)?;
        let terminals = table.descriptions().filter_map(|(_, d)| match &d.open {
            FileObject::Terminal(end) => Some(end),
            _ => None,
        });
        let is_terminal = |node: Node, id: u32| {
            let device = tree.stat(node).map(|stat| (stat.kind, stat.device));
            device == Ok((Kind::Device, FIRST_DEVICE + u64::from(id)))
        };
        packed.terminals.check(terminals, is_terminal).map_err(damaged)?;
        let is_open = |id| table.description(id).is_some();
        if !table.carried().is_sound(is_open, packed.channels.parcels()) {
            return Err(damaged("descriptors in flight are invalid"));
        }
        if !processes.current.pending.is_sound() {
            return Err(damaged("an invalid signal"));
        }
        if !packed.names.is_sound() {
            return Err(damaged("an invalid host name"));
        }
        if !processes.current.timers.is_sound() {
            return Err(damaged("an invalid timer"));
        }
        if !packed.semaphores.is_sound(|process| processes.lives(process)) {
            return Err(damaged("a set of semaphores is invalid"));
        }
        if !packed.queues.is_sound() {
            return Err(damaged("a queue of messages is invalid"));
        }
        let queues = table.descriptions().filter_map(|(_, d)| match d.open {
            FileObject::Queue(id) => Some(id),
            _ => None,
        });
        if !packed.named_queues.is_sound(queues) {
            return Err(damaged("a named queue of messages is invalid"));
        }
        let layouts = processes.layouts().chain([&packed.layout]);
        let shared: Vec<_> = layouts.flat_map(Layout::shared).collect();
        let shares: BTreeSet<Node> = shared.iter().map(|shared| shared.share.node).collect();
        if shared.iter().any(|s| s.share.offset(s.range.start) > i64::MAX as u64 / 2) {
            return Err(damaged("memory is shared beyond the end of any file"));
        }
        let file = |node: &Node| tree.stat(*node).map(|stat| stat.kind) == Ok(Kind::File);
        if !packed.seals.is_sound(|node| file(&node)) {
            return Err(damaged("a seal is not on a file"));
        }
        if !packed.system_v.is_sound(|node| file(&node)) {
            return Err(damaged("a segment of shared memory is invalid"));
        }
        if !shares.iter().all(file) {
            return Err(damaged("memory is shared through what is no file"));
        }
        if processes.current.handlers.keys().any(|number| !(1..=64).contains(number)) {
            return Err(damaged("a handler of no signal"));
        }
        let directory = |node| tree.stat(node).map(|stat| stat.kind) == Ok(Kind::Directory);
        if !processes.iter().all(|process| directory(process.directory)) {
            return Err(damaged("its directory is invalid"));
        }
        let mut state = Self {
            layout: packed.layout,
            tree,
            base,
            layers: layers.into(),
            table,
            channels: packed.channels,
            terminals: packed.terminals,
            locks: packed.locks,
            seals: packed.seals,
            watchers: 0,
            moves: packed.moves,
            system_v: packed.system_v,
            semaphores: packed.semaphores,
            queues: packed.queues,
            named_queues: packed.named_queues,
            names: packed.names,
            closed: Default::default(),
            shares,
            shared_bytes: 0,
            processes,
        };
        state.cut_lines();
        state.drop_unowned();
        state.count_watchers();
        state.heed_limits();
        let live = state.writable_shares();
        state.count_thawed(&live);
        if state.check_nesting().is_err() {
            return Err(damaged("its sets of descriptors contain too many others, or each other"));
        }
        let needed = state.limit_memory(opener.memory);
        if needed > opener.memory {
            return Err(limit("memory", needed, opener.memory, "memory_limit").into());
        }
        Ok(state)
    }
}

/// The kind of an open file.
fn stat_open_file(tree: &Tree, open: &OpenFile) -> Result<afresh_files::Stat, ThawError> {
    let stat = tree.stat(open.node).ok();
    if open.offset > i64::MAX as u64 {
        return Err(damaged("an offset is negative"));
    }
    stat.ok_or_else(|| damaged("an open file does not exist"))
}

#[cfg(test)]
impl PackedKernel {
    /// Adds directories without a name, which are one byte each.
    pub(crate) fn add_empty_layers(&mut self, count: usize) {
        self.layers.resize(self.layers.len() + count, Vec::new());
    }

    /// Adds open files of the shortest form.
    pub(crate) fn add_descriptions(&mut self, count: usize) {
        let description = || (PackedOpen::Input, 0, None);
        self.descriptions.extend((0..count as u64).map(|id| (id, description())));
    }
}
