//! A guest's state as plain bytes, for snapshots, and back.
//!
//! Bytes from a snapshot may come from a stranger. They name no host path that the caller did not
//! grant, request no more than every guest may have, and are refused if they are inconsistent. No
//! host path is opened before that is known.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;

use afresh_files::{Budget, Kind, Node, OpenFile, SavedTree, Stat, Time};
use serde::{Deserialize, Serialize};

use crate::base::{self, Base};
use crate::error::{FreezeError, Incompatible, ThawError};
use crate::sentry::fs::proc_dir::ProcDir;
use crate::sentry::fs::proc_settings::ProcFile;
use crate::sentry::fs::root_files;
use crate::sentry::fs::seals::Seals;
use crate::sentry::kernel::channels::Channels;
use crate::sentry::kernel::device::{Device, GenerationWatch};
use crate::sentry::kernel::epoll_set::EpollSet;
use crate::sentry::kernel::fd_table::{Description, FdTable, FdTableParts, FileObject, UNFIT};
use crate::sentry::kernel::file_locks::FileLocks;
use crate::sentry::kernel::held_file::PackedHeldFiles;
use crate::sentry::kernel::held_files::UNHELD;
use crate::sentry::kernel::identity::FIRST;
use crate::sentry::kernel::in_flight_fds::InFlightFds;
use crate::sentry::kernel::inotify::Inotify;
use crate::sentry::kernel::keys::Keys;
use crate::sentry::kernel::message_queues::MessageQueues;
use crate::sentry::kernel::open_fifo::Fifo;
use crate::sentry::kernel::packed_extensions::PackedExtensions;
use crate::sentry::kernel::peer_credentials::{PeerCredentials, PeerUsers};
use crate::sentry::kernel::posix_queues::PosixQueues;
use crate::sentry::kernel::process::Process;
use crate::sentry::kernel::process_table::PackedProcessTable;
use crate::sentry::kernel::process_tunables::ProcessTunables;
use crate::sentry::kernel::semaphores::Semaphores;
use crate::sentry::kernel::signals::PendingSignals;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::threads::Threads;
use crate::sentry::kernel::timer_fd::TimerFd;
use crate::sentry::kernel::timers::Timers;
use crate::sentry::kernel::user_namespaces::UserNamespaces;
use crate::sentry::kernel::users::Users;
use crate::sentry::mm::layout::Layout;
use crate::sentry::mm::layout::locks::PackedLocks;
use crate::sentry::mm::shared_segments::SharedSegments;
use crate::sentry::net::dns::ResolvedNames;
use crate::sentry::net::sockets::Socket;
use crate::sentry::tty::terminals::{TerminalEnd, Terminals};

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

/// The part of a state that version 12 of snapshots added.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct PackedAdditions {
    namespaces: UserNamespaces,
    /// Locked memory, by the owner of the memory.
    locks: Vec<(u32, PackedLocks)>,
    /// Added by version 13, and stored behind these.
    #[serde(skip)]
    pub(crate) tunables: ProcessTunables,
    /// Added by version 16, and stored behind these.
    #[serde(skip)]
    pub(crate) users: PackedUsers,
    /// Added by version 17, and stored behind these.
    #[serde(skip)]
    pub(crate) roots: PackedRoots,
    /// Added by version 18, and stored behind these.
    #[serde(skip)]
    pub(crate) held: PackedHeldFiles,
    /// Added by version 19, and stored behind these.
    #[serde(skip)]
    pub(crate) extensions: PackedExtensions,
}

/// The processes with another root directory than the root of the tree.
pub(crate) type PackedRoots = BTreeMap<u32, Node>;

/// The part of a state that version 16 of snapshots added.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PackedUsers {
    users: Users,
    peers: PeerUsers,
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
    Proc(ProcFile),
}

/// The errors of a peer with a user that it cannot have, and of too many files.
const PEER: &str = "a user of a peer is invalid";
const FILES: &str = "it has more files than a program may have";

/// A state that does not fit together.
pub(crate) fn damaged(what: &str) -> ThawError {
    ThawError::State(what.to_owned())
}

/// All peers of sockets, and senders of messages.
fn peers<'a>(
    descriptions: &'a mut [(u64, PackedDescription)],
    channels: &'a mut Channels,
) -> impl Iterator<Item = &'a mut PeerCredentials> {
    let sockets = descriptions.iter_mut().filter_map(|(_, (open, ..))| match open {
        PackedOpen::Socket(socket) => Some(socket),
        _ => None,
    });
    sockets.flat_map(Socket::peers_mut).chain(channels.senders_mut())
}

impl Kernel {
    /// The state, and the files that the guest has written. A state that could not be opened is
    /// refused.
    pub(crate) fn pack(&self) -> Result<(PackedKernel, PackedAdditions, Vec<u8>), FreezeError> {
        let lost = |error: &dyn std::fmt::Display| FreezeError::State(error.to_string());
        self.check().map_err(|error| lost(&error))?;
        self.check_storage()?;
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
                FileObject::Proc(file) => PackedOpen::Proc(*file),
            };
            let found = description.found.as_ref().map(|(above, name)| (*above, name.to_vec()));
            descriptions.push((id, (open, description.flags, found)));
        }
        let (current, processes) = PackedProcessTable::split(self.processes.clone());
        let Process { directory, umask, handlers, pending, timers, threads, .. } = current;
        let rooted = |process: &Process| Some((process.info.id, process.root?));
        let roots = self.processes.iter().filter_map(rooted).collect();
        let mut packed = PackedKernel {
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
        let locks = self.memories().into_iter();
        let locks = locks.filter_map(|(id, layout)| Some((id, layout.packed_locks()?)));
        let (namespaces, locks) = (self.namespaces.clone(), locks.collect());
        let tunables = self.tunables.clone();
        let peers = PeerUsers::of(peers(&mut packed.descriptions, &mut packed.channels));
        if !peers.is_sound(self.namespaces.users.owner[0]) {
            return Err(lost(&PEER));
        }
        let users = PackedUsers { users: self.namespaces.users.clone(), peers };
        let held = self.packed_held();
        let extensions = self.pack_extensions();
        let additions =
            PackedAdditions { namespaces, locks, tunables, users, roots, held, extensions };
        Ok((packed, additions, files.to_bytes()))
    }

    /// Refuses files beyond the limit of storage, as an opener with that limit does. A guest can
    /// have them: its memory pays for bytes that it writes through shared mappings.
    fn check_storage(&self) -> Result<(), FreezeError> {
        let (used, allowed) = (self.tree.used(), self.tree.budget());
        if used.files > allowed.files {
            return Err(FreezeError::State(FILES.to_owned()));
        }
        let (used, limit) = (used.bytes, allowed.bytes);
        if used <= limit {
            return Ok(());
        }
        Err(FreezeError::State(format!(
            "its files and shared memory have {used} bytes, and its storage limit is {limit}: remove \
             files and unmap shared memory, or start it with a larger `storage_limit`"
        )))
    }

    /// The state that was packed, over `base` and the opener's grants, which must include all
    /// directories that it had. The opener's limits replace its own.
    pub(crate) fn unpack(
        mut packed: PackedKernel,
        additions: PackedAdditions,
        files: &[u8],
        base: Option<Arc<Base>>,
        opener: &OpenerGrants,
    ) -> Result<Self, ThawError> {
        let mut processes = packed.processes.joined(|info| Process {
            info,
            directory: packed.directory,
            root: None,
            umask: packed.umask & 0o777,
            handlers: packed.handlers.into_iter().collect(),
            pending: packed.pending,
            timers: packed.timers,
            threads: packed.threads,
        });
        // Of processes that do not fit together, nothing else is looked at.
        processes.check(&packed.layout).map_err(damaged)?;
        if !processes.set_roots(additions.roots) {
            return Err(damaged("a root directory of no process"));
        }
        let path = |bytes| PathBuf::from(OsString::from_vec(bytes));
        let layers: Vec<PathBuf> = packed.layers.into_iter().map(path).collect();
        let below = root_files::over_named(base::over(base.as_ref()), &layers, &opener.granted)?;
        let saved = SavedTree::from_bytes(files).map_err(Incompatible::Files)?;
        // The layers below count against no budget, and the opener allows so many files.
        let allowed = Budget { files: opener.storage.files, ..below.budget() };
        let tree = below.with_budget(allowed).restored(&saved).map_err(Incompatible::Files)?;
        let tree = tree.with_budget(opener.storage);
        let limit =
            |what, needed, limit, way_out| Incompatible::Limit { what, needed, limit, way_out };
        let used = tree.used();
        if used.bytes > opener.storage.bytes {
            return Err(limit("storage", used.bytes, opener.storage.bytes, "storage_limit").into());
        }
        if used.files > opener.storage.files {
            return Err(damaged(FILES));
        }
        if packed.seals != packed.seals.lasting(&tree) {
            return Err(damaged("a seal is not on a file"));
        }
        let PackedUsers { users, peers: found } = additions.users;
        let all = peers(&mut packed.descriptions, &mut packed.channels);
        found.give(users.owner[0], all).ok_or_else(|| damaged(PEER))?;
        let mut descriptions = BTreeMap::new();
        for (id, (open, flags, found)) in packed.descriptions {
            let open = match open {
                PackedOpen::Input => FileObject::Input,
                PackedOpen::Output => FileObject::Output,
                PackedOpen::Messages => FileObject::Messages,
                PackedOpen::File(open, size, modified) => {
                    let stat = tree.stat(open.node);
                    let same = |stat: &Stat| (stat.size, stat.times.modified) == (size, modified);
                    if stat.is_ok_and(|stat| stat.kind == Kind::File && !same(&stat)) {
                        let path = PathBuf::from(format!("descriptor {id}"));
                        return Err(
                            Incompatible::File { path, why: "its file has changed since" }.into()
                        );
                    }
                    FileObject::File(open)
                }
                PackedOpen::Device(number, open) => {
                    let device = Device::of(number).ok_or_else(|| damaged("an unknown device"))?;
                    FileObject::Device(device, open)
                }
                PackedOpen::Pipe(channel, writes) => FileObject::Pipe { channel, writes },
                PackedOpen::Fifo(fifo) => FileObject::Fifo(fifo),
                PackedOpen::Terminal(end) => FileObject::Terminal(end),
                PackedOpen::Watches(watches) => FileObject::Watches(watches),
                PackedOpen::Event(count, semaphore, edges) => {
                    FileObject::Event { count, semaphore, edges }
                }
                PackedOpen::Timer(timer) => FileObject::Timer(timer),
                PackedOpen::Epoll(set) => FileObject::Epoll(set),
                PackedOpen::Socket(socket) => FileObject::Socket(socket),
                PackedOpen::Folder(folder, at) => FileObject::Folder(folder, at),
                PackedOpen::Process(id) => FileObject::Process(id),
                PackedOpen::Signals(set) => FileObject::Signals(set),
                PackedOpen::Queue(id) => FileObject::Queue(id),
                PackedOpen::Proc(file) => FileObject::Proc(file),
                PackedOpen::Generation(watch, open) => {
                    FileObject::Device(Device::Generation(watch), open)
                }
            };
            let found = found.map(|(above, name)| (above, name.into()));
            descriptions.insert(id, Description { open, flags, found });
        }
        let (descriptors, next) = (packed.descriptors, packed.next);
        let parts = FdTableParts { descriptors, descriptions, next, carried: packed.carried };
        let table = FdTable::from_parts(parts, FIRST, |id| processes.lives(id))
            .ok_or_else(|| damaged(UNFIT))?;
        let layouts = processes.layouts().chain([&packed.layout]);
        let shared = layouts.flat_map(Layout::shared);
        let shares = shared.map(|shared| shared.share.node).collect();
        let mut namespaces = additions.namespaces;
        namespaces.users = users;
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
            namespaces,
            tunables: additions.tunables,
            map_files: BTreeMap::new(),
            keys: Keys::default(),
            names: packed.names,
            slacks: Default::default(),
            exits: Default::default(),
            shared_parts: Default::default(),
            system_times: Default::default(),
            queue_notices: Default::default(),
            closed: Default::default(),
            shares,
            shared_bytes: 0,
            stored_shares: 0,
            processes,
        };
        state.find_inner_sets();
        let held = state.unpack_held(additions.held);
        held.ok_or_else(|| damaged(UNHELD))?;
        for (memory, locks) in additions.locks {
            let layout = state.layout_of_mut(memory);
            if !layout.is_some_and(|layout| layout.unpack_locks(locks)) {
                return Err(damaged("memory is locked that is not mapped"));
            }
        }
        state.unpack_extensions(additions.extensions).map_err(damaged)?;
        state.check().map_err(damaged)?;
        state.cut_lines();
        state.drop_unowned();
        state.count_watchers();
        state.heed_limits();
        let live = state.writable_shares();
        state.count_thawed(&live);
        let needed = state.limit_memory(opener.memory);
        if needed > opener.memory {
            return Err(limit("memory", needed, opener.memory, "memory_limit").into());
        }
        Ok(state)
    }
}

#[cfg(test)]
impl PackedKernel {
    /// Adds directories without a name, which are one byte each.
    pub(crate) fn add_empty_layers(&mut self, count: usize) {
        self.layers.resize(self.layers.len() + count, Vec::new());
    }

    /// Removes the granted host directories.
    pub(crate) fn remove_layers(&mut self) {
        self.layers.clear();
    }

    /// Adds open files of the shortest form.
    pub(crate) fn add_descriptions(&mut self, count: usize) {
        let description = || (PackedOpen::Input, 0, None);
        self.descriptions.extend((0..count as u64).map(|id| (id, description())));
    }
}
