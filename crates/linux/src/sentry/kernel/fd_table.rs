//! Descriptors: small numbers for open files, which several of them may share.

mod closing;
mod holders;
mod parcels;
mod sharing;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use afresh_files::{Node, OpenFile};
use rustix::io::Errno;

use crate::sentry::abi::KERNEL_LARGEFILE;
use crate::sentry::fs::proc_dir::ProcDir;
use crate::sentry::fs::proc_settings::ProcFile;
use crate::sentry::kernel::async_files::AsyncFiles;
use crate::sentry::kernel::device::Device;
use crate::sentry::kernel::epoll_set::EpollSet;
use crate::sentry::kernel::held_file::{HeldFiles, held_description};
use crate::sentry::kernel::in_flight_fds::InFlightFds;
use crate::sentry::kernel::inotify::Inotify;
use crate::sentry::kernel::open_fifo::Fifo;
use crate::sentry::kernel::poll_events::MAX_EVENTS;
use crate::sentry::kernel::resource_limits::DESCRIPTORS;
use crate::sentry::kernel::timer_fd::TimerFd;
use crate::sentry::net::sockets::Socket;
use crate::sentry::tty::terminals::TerminalEnd;

/// The flag of an open file that the open itself has made. A process does not see it.
pub(in crate::sentry) const CREATED: u32 = libc::O_CREAT as u32;

/// Open descriptions of a guest (`fs.file-max`), and descriptors of all its processes.
pub(in crate::sentry) const MAX_DESCRIPTIONS: usize = 1 << 16;

pub(in crate::sentry) const MAX_ALL_DESCRIPTORS: usize = 1 << 18;

/// The object of an open description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FileObject {
    /// The requests.
    Input,
    /// The answers.
    Output,
    /// Messages.
    Messages,
    /// A file or directory of the tree; of one that was only named (`O_PATH`), neither read nor
    /// written.
    File(OpenFile),
    Device(Device, OpenFile),
    /// One end of a pipe.
    Pipe {
        channel: u64,
        writes: bool,
    },
    /// A named pipe.
    Fifo(Fifo),
    Terminal(TerminalEnd),
    /// Files that are watched (`inotify`).
    Watches(Inotify),
    /// A counter (`eventfd`).
    Event {
        count: u64,
        semaphore: bool,
        edges: u64,
    },
    Timer(TimerFd),
    /// A set of descriptors to wait for (`epoll`).
    Epoll(EpollSet),
    Socket(Socket),
    /// A directory of `/proc` that is in no tree, and how far it was listed.
    Folder(ProcDir, u64),
    /// A process (`pidfd`).
    Process(u32),
    /// Signals of this set, to be read (`signalfd`).
    Signals(u64),
    /// A named queue of messages (`mq_open`).
    Queue(u32),
    /// A file of `/proc` that is made when it is read.
    Proc(ProcFile),
}

impl FileObject {
    /// The channels that it has an end of, and whether it writes them.
    pub(crate) fn ends(&self) -> Vec<(u64, bool)> {
        match self {
            Self::Pipe { channel, writes } => vec![(*channel, *writes)],
            Self::Fifo(fifo) => fifo.ends(),
            Self::Socket(socket) => socket.ends(),
            _ => Vec::new(),
        }
    }

    /// The file of the tree that it is open on.
    pub(crate) fn file(&self) -> Option<&OpenFile> {
        match self {
            Self::File(open) | Self::Device(_, open) => Some(open),
            Self::Fifo(Fifo { open, .. }) | Self::Terminal(TerminalEnd { open, .. }) => Some(open),
            _ => None,
        }
    }

    /// Whether it is a standard stream, which a guest sees as a pipe.
    pub(crate) fn is_standard(&self) -> bool {
        matches!(self, Self::Input | Self::Output | Self::Messages)
    }

    /// Whether bytes come and go by themselves.
    pub(crate) fn is_stream(&self) -> bool {
        use FileObject::{
            Epoll, Event, Fifo, Pipe, Process, Queue, Signals, Socket, Terminal, Timer, Watches,
        };
        let numbered = matches!(self, Event { .. } | Timer(_) | Epoll(_) | Fifo(_));
        numbered
            || matches!(
                self,
                Terminal(_)
                    | Watches(_)
                    | Pipe { .. }
                    | Socket(_)
                    | Process(_)
                    | Signals(_)
                    | Queue(_)
            )
    }
}

/// An open file: shared by descriptors that were duplicated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Description {
    pub(crate) open: FileObject,
    /// As `fcntl(F_GETFL)` returns them.
    pub(crate) flags: u32,
    /// Where a file was found that was opened by a name: a directory, and the name there.
    pub(crate) found: Option<(Node, Arc<[u8]>)>,
}

impl Description {
    /// One that has no name.
    pub(crate) fn new(open: FileObject, flags: i32) -> Self {
        Self { open, flags: flags as u32, found: None }
    }

    /// Where the next read or write of a file begins.
    pub(crate) fn offset(&self) -> u64 {
        match &self.open {
            FileObject::File(open) => open.offset,
            FileObject::Proc(file) => file.offset,
            _ => 0,
        }
    }

    pub(crate) fn reads(&self) -> bool {
        let access = (self.flags & libc::O_ACCMODE as u32) as i32;
        !self.is_path() && matches!(access, libc::O_RDONLY | libc::O_RDWR)
    }

    pub(crate) fn writes(&self) -> bool {
        let access = (self.flags & libc::O_ACCMODE as u32) as i32;
        !self.is_path() && matches!(access, libc::O_WRONLY | libc::O_RDWR)
    }

    /// Refuses a read or a write at a position of an open file without positions.
    pub(in crate::sentry) fn check_positions(&self) -> Result<(), Errno> {
        let unseekable = self.open.is_standard() || self.open.is_stream();
        if unseekable { Err(Errno::SPIPE) } else { Ok(()) }
    }

    /// Whether it only names a file (`O_PATH`).
    pub(crate) fn is_path(&self) -> bool {
        self.flags & libc::O_PATH as u32 != 0
    }

    /// The flags that a process sees. Linux adds one for large files to each open of a file.
    pub(in crate::sentry) fn status_flags(&self) -> u32 {
        const LARGE_FILE: u32 = KERNEL_LARGEFILE as u32;
        if self.is_path() {
            return self.flags & (libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW) as u32;
        }
        let opened = matches!(
            self.open,
            FileObject::File(_)
                | FileObject::Device(..)
                | FileObject::Fifo(_)
                | FileObject::Folder(..)
                | FileObject::Proc(_)
                | FileObject::Terminal(_)
        );
        let flags = self.flags & !CREATED;
        if opened { flags | LARGE_FILE } else { flags }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Descriptor {
    description: u64,
    close_on_exec: bool,
}

/// All descriptors of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FdTable {
    /// The current process's.
    descriptors: BTreeMap<u32, Descriptor>,
    /// Those of the other processes.
    others: BTreeMap<u32, BTreeMap<u32, Descriptor>>,
    descriptions: BTreeMap<u64, Description>,
    /// Processes that use the table of another, and those.
    shared: BTreeMap<u32, u32>,
    /// Descriptors of each description, of all processes and in flight.
    holders: BTreeMap<u64, u32>,
    /// Descriptions that watch files.
    watching: BTreeSet<u64>,
    /// Descriptors that the resumed call uses, though they are closed.
    pub(super) held: HeldFiles,
    next: u64,
    /// Numbers that the current process may have descriptors of.
    room: u32,
    carried: InFlightFds,
    /// Owners of descriptions and the signals that they get.
    pub(in crate::sentry) async_files: AsyncFiles,
}

/// The error of parts that do not fit together.
pub(in crate::sentry) const UNFIT: &str = "its descriptors do not fit together";

/// A table taken apart.
pub(in crate::sentry) struct FdTableParts<D> {
    /// Process, number, description, and whether it is closed on `exec`.
    pub(in crate::sentry) descriptors: Vec<(u32, u32, u64, bool)>,
    pub(in crate::sentry) descriptions: BTreeMap<u64, D>,
    pub(in crate::sentry) next: u64,
    pub(in crate::sentry) carried: InFlightFds,
}

impl FdTable {
    /// Input, output and messages.
    pub(crate) fn new() -> Self {
        let (descriptors, others) = (BTreeMap::new(), BTreeMap::new());
        let mut table = Self {
            descriptors,
            others,
            shared: BTreeMap::new(),
            descriptions: BTreeMap::new(),
            holders: BTreeMap::new(),
            watching: BTreeSet::new(),
            held: HeldFiles::new(),
            next: 0,
            room: DESCRIPTORS,
            carried: InFlightFds::default(),
            async_files: AsyncFiles::default(),
        };
        for (number, (open, flags)) in [
            (FileObject::Input, libc::O_RDONLY),
            (FileObject::Output, libc::O_WRONLY),
            (FileObject::Messages, libc::O_WRONLY),
        ]
        .into_iter()
        .enumerate()
        {
            let description = Description::new(open, flags);
            table.descriptions.insert(number as u64, description);
            let descriptor = Descriptor { description: number as u64, close_on_exec: false };
            table.descriptors.insert(number as u32, descriptor);
            table.next = number as u64 + 1;
        }
        table.count_holders();
        table
    }

    /// Its parts. The current process is `own`. Shared descriptors are those of the owner.
    pub(in crate::sentry) fn parts(&self, own: u32) -> FdTableParts<&Description> {
        let own = self.table_owner(own);
        let all =
            self.others.iter().map(|(&id, list)| (id, list)).chain([(own, &self.descriptors)]);
        let descriptors = all.flat_map(|(id, list)| {
            list.iter().map(move |(&number, d)| (id, number, d.description, d.close_on_exec))
        });
        let descriptions = self.descriptions.iter().map(|(&id, description)| (id, description));
        FdTableParts {
            descriptors: descriptors.collect(),
            descriptions: descriptions.collect(),
            next: self.next,
            carried: self.carried.clone(),
        }
    }

    /// The table of these parts, if they fit together and belong to processes that are known.
    pub(in crate::sentry) fn from_parts(
        parts: FdTableParts<Description>,
        own: u32,
        lives: impl Fn(u32) -> bool,
    ) -> Option<Self> {
        let FdTableParts { descriptors, descriptions, next, carried } = parts;
        let mut others: BTreeMap<u32, BTreeMap<u32, Descriptor>> = BTreeMap::new();
        for (process, number, description, close_on_exec) in descriptors {
            let descriptor = Descriptor { description, close_on_exec };
            others.entry(process).or_default().insert(number, descriptor);
        }
        let descriptors = others.remove(&own).unwrap_or_default();
        let (holders, watching) = (BTreeMap::new(), BTreeSet::new());
        let (room, held) = (DESCRIPTORS, HeldFiles::new());
        let mut table = Self {
            descriptors,
            others,
            shared: BTreeMap::new(),
            descriptions,
            holders,
            watching,
            held,
            next,
            room,
            carried,
            async_files: AsyncFiles::default(),
        };
        table.count_holders();
        table.fits(lives).then_some(table)
    }

    /// Whether its parts fit together and belong to processes that live.
    fn fits(&self, lives: impl Fn(u32) -> bool) -> bool {
        let lists = self.others.iter().filter(|(_, list)| !list.is_empty());
        let lists = lists.map(|(process, list)| (lives(*process), list));
        let is_open = |(number, descriptor): (&u32, &Descriptor)| {
            *number < DESCRIPTORS && self.descriptions.contains_key(&descriptor.description)
        };
        let mut all = lists.chain([(true, &self.descriptors)]);
        all.all(|(lives, list)| lives && list.iter().all(is_open))
            && self.descriptions.keys().next_back().is_none_or(|last| *last < self.next)
    }

    /// The first error of a table that a guest cannot have, if any.
    pub(in crate::sentry) fn check(&self, lives: impl Fn(u32) -> bool) -> Result<(), &'static str> {
        if !self.fits(lives) {
            return Err(UNFIT);
        }
        let fits = self.descriptions.len() <= MAX_DESCRIPTIONS
            && self.check_all(0).is_ok()
            && self.next < MAX_EVENTS;
        if fits { Ok(()) } else { Err("it has more descriptors than a program may have") }
    }

    pub(crate) fn get(&self, descriptor: u64) -> Result<&Description, Errno> {
        self.descriptions.get(&self.id(descriptor)?).ok_or(Errno::BADF)
    }

    pub(crate) fn get_mut(&mut self, descriptor: u64) -> Result<&mut Description, Errno> {
        let id = self.id(descriptor)?;
        self.description_mut(id).ok_or(Errno::BADF)
    }

    /// The description of `descriptor`.
    pub(crate) fn id(&self, descriptor: u64) -> Result<u64, Errno> {
        let number = descriptor as u32;
        let open = || self.descriptors.get(&number).map(|descriptor| descriptor.description);
        held_description(&self.held, number).or_else(open).ok_or(Errno::BADF)
    }

    /// The objects of the descriptors of a process, by number: of `other`, or the current one.
    pub(in crate::sentry) fn listed(
        &self,
        other: Option<u32>,
    ) -> impl Iterator<Item = (u32, u64, &Description)> + '_ {
        let list = match other {
            // A shared table may be that of the current process.
            Some(id) if self.is_shared(id) => {
                Some(self.others.get(&self.table_owner(id)).unwrap_or(&self.descriptors))
            }
            Some(id) => self.others.get(&id),
            None => Some(&self.descriptors),
        };
        list.into_iter().flatten().filter_map(|(&number, descriptor)| {
            let id = descriptor.description;
            Some((number, id, self.descriptions.get(&id)?))
        })
    }

    /// The number of the next description: it grows with every opened object.
    pub(in crate::sentry) fn next_id(&self) -> u64 {
        self.next
    }

    pub(crate) fn description(&self, id: u64) -> Option<&Description> {
        self.descriptions.get(&id)
    }

    pub(crate) fn description_mut(&mut self, id: u64) -> Option<&mut Description> {
        self.async_files.touch(id);
        self.descriptions.get_mut(&id)
    }

    pub(crate) fn descriptions(&self) -> impl DoubleEndedIterator<Item = (u64, &Description)> + '_ {
        self.descriptions.iter().map(|(&id, description)| (id, description))
    }

    pub(crate) fn descriptions_mut(&mut self) -> impl Iterator<Item = &mut Description> + '_ {
        self.async_files.touch_all();
        self.descriptions.values_mut()
    }

    /// Refuses `more` descriptors beyond those that all processes may have together.
    fn check_all(&self, more: usize) -> Result<(), Errno> {
        let others: usize = self.others.values().map(BTreeMap::len).sum();
        let all = others + self.descriptors.len() + more;
        if all <= MAX_ALL_DESCRIPTORS { Ok(()) } else { Err(Errno::NFILE) }
    }

    /// Refuses a process with descriptors like the current ones if there are too many.
    pub(in crate::sentry) fn check_fork(&self) -> Result<(), Errno> {
        self.check_all(self.descriptors.len())
    }

    /// As [`FdTable::check_fork`], where the parent gets a descriptor of the process.
    pub(in crate::sentry) fn check_described_fork(&self) -> Result<(), Errno> {
        self.check_room()?;
        self.check_all(self.descriptors.len() + 1)
    }

    fn free(&self, from: u32) -> Result<u32, Errno> {
        self.check_all(1)?;
        // Without gaps, the number behind the last is the first.
        let len = self.descriptors.len() as u32;
        let last = self.descriptors.last_key_value().map_or(0, |(number, _)| number + 1);
        if last == len && from <= len && len < self.room {
            return Ok(len);
        }
        let taken = self.descriptors.range(from..).map(|(number, _)| *number);
        let first =
            from + taken.zip(from..).take_while(|(number, next)| number == next).count() as u32;
        if first < self.room { Ok(first) } else { Err(Errno::MFILE) }
    }

    /// Whether a further descriptor fits.
    pub(crate) fn check_room(&self) -> Result<(), Errno> {
        self.check_all(1)?;
        // Fewer descriptors than numbers leave one free.
        if self.descriptors.len() >= self.room as usize {
            self.free(0)?;
        }
        if self.descriptions.len() < MAX_DESCRIPTIONS { Ok(()) } else { Err(Errno::NFILE) }
    }

    /// A new descriptor for a new description, which is returned if the table is full.
    pub(crate) fn add(
        &mut self,
        description: Description,
        close_on_exec: bool,
    ) -> Result<u32, (Errno, Box<Description>)> {
        let number = match self.check_room().and_then(|()| self.free(0)) {
            Ok(number) => number,
            Err(errno) => return Err((errno, Box::new(description))),
        };
        let id = self.next;
        self.next += 1;
        if matches!(description.open, FileObject::Watches(_)) {
            self.watching.insert(id);
        }
        self.descriptions.insert(id, description);
        self.hold(id);
        self.descriptors.insert(number, Descriptor { description: id, close_on_exec });
        Ok(number)
    }

    /// A new descriptor of the description of `old`: the first free one at or above `from`.
    pub(crate) fn duplicate(
        &mut self,
        old: u64,
        from: u64,
        close_on_exec: bool,
    ) -> Result<u32, Errno> {
        self.get(old)?;
        let from = u32::try_from(from).ok().filter(|from| *from < self.room).ok_or(Errno::INVAL)?;
        let number = self.free(from)?;
        self.alias(old, number, close_on_exec)
    }

    /// Makes `new` a descriptor of the description of `old`. Returns the object that was closed by
    /// it.
    pub(crate) fn replace(
        &mut self,
        old: u64,
        new: u64,
        close_on_exec: bool,
    ) -> Result<(u32, Option<Description>), Errno> {
        self.get(old)?;
        let new = u32::try_from(new).ok().filter(|new| *new < self.room).ok_or(Errno::BADF)?;
        self.check_all(1)?;
        let gone = match u64::from(new) != old {
            true => self.close(u64::from(new)).unwrap_or_default(),
            false => None,
        };
        Ok((self.alias(old, new, close_on_exec)?, gone))
    }

    fn alias(&mut self, old: u64, new: u32, close_on_exec: bool) -> Result<u32, Errno> {
        let description = self.descriptors.get(&(old as u32)).ok_or(Errno::BADF)?.description;
        self.descriptors.insert(new, Descriptor { description, close_on_exec });
        self.hold(description);
        Ok(new)
    }

    /// Closes a descriptor. Returns the object whose last descriptor it was.
    pub(crate) fn close(&mut self, descriptor: u64) -> Result<Option<Description>, Errno> {
        let gone = self.descriptors.remove(&(descriptor as u32)).ok_or(Errno::BADF)?;
        Ok(self.release(gone.description))
    }

    pub(crate) fn closes_on_exec(&self, descriptor: u64) -> Result<bool, Errno> {
        Ok(self.descriptors.get(&(descriptor as u32)).ok_or(Errno::BADF)?.close_on_exec)
    }

    pub(crate) fn set_close_on_exec(&mut self, descriptor: u64, on: bool) -> Result<(), Errno> {
        self.descriptors.get_mut(&(descriptor as u32)).ok_or(Errno::BADF)?.close_on_exec = on;
        Ok(())
    }

    /// The limit of descriptors of the current process; existing ones stay.
    pub(in crate::sentry) fn set_room(&mut self, room: u32) {
        self.room = room;
    }

    /// Has the descriptors of process `to` be the current ones, and keeps those of `from`.
    pub(in crate::sentry) fn switch(&mut self, from: u32, to: u32) {
        let (from, to) = (self.table_owner(from), self.table_owner(to));
        if from == to {
            return;
        }
        let now = self.others.remove(&to).unwrap_or_default();
        let left = std::mem::replace(&mut self.descriptors, now);
        self.others.insert(from, left);
    }

    /// Gives process `id` descriptors like the current ones.
    pub(in crate::sentry) fn fork(&mut self, id: u32) {
        let own: Vec<u64> = self.descriptors.values().map(|own| own.description).collect();
        own.into_iter().for_each(|id| self.hold(id));
        self.others.insert(id, self.descriptors.clone());
    }

    /// Removes process `id`, which has closed all its descriptors.
    pub(in crate::sentry) fn drop_process(&mut self, id: u32) {
        self.shared.remove(&id);
        let left = self.others.remove(&id);
        debug_assert!(left.is_none_or(|left| left.is_empty()), "its descriptors are counted");
    }

    /// Descriptors that are closed when another program runs.
    pub(in crate::sentry) fn closing(&self) -> Vec<u64> {
        let closing = self.descriptors.iter().filter(|(_, d)| d.close_on_exec);
        closing.map(|(&number, _)| u64::from(number)).collect()
    }

    /// All descriptors in `range`.
    pub(crate) fn numbers(&self, first: u64, last: u64) -> Vec<u64> {
        self.descriptors
            .keys()
            .map(|&n| u64::from(n))
            .filter(|n| (first..=last).contains(n))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_of_all_processes_are_bounded_and_closed_together() {
        let mut table = FdTable::new();
        assert_eq!(table.add(Description::new(FileObject::Process(2), 0), false).ok(), Some(3));
        assert_eq!((table.free(1), table.free(9)), (Ok(4), Ok(9)));
        let all: BTreeMap<u32, Descriptor> = (0..MAX_ALL_DESCRIPTORS as u32 - 6)
            .map(|number| (number, Descriptor { description: 3, close_on_exec: false }))
            .collect();
        table.others.insert(9, all);
        table.count_holders();
        assert_eq!((table.check_fork(), table.check_room()), (Err(Errno::NFILE), Ok(())));
        assert_eq!((table.duplicate(3, 8, false), table.replace(3, 7, false).err()), (Ok(8), None));
        assert_eq!(table.duplicate(3, 0, false), Err(Errno::NFILE));
        assert_eq!(table.replace(3, 20, false).err(), Some(Errno::NFILE));
        // Another process has it open.
        assert_eq!(table.close_all(&[3, 7, 8, 99]), []);
        table.others.remove(&9);
        table.count_holders();
        let last = table.duplicate(0, 5, false).unwrap();
        assert!(table.close_all(&[0]).is_empty() && table.close_all(&[u64::from(last)]).len() == 1);
        let many = (10..MAX_DESCRIPTIONS as u64 + 10)
            .map(|id| (id, Description::new(FileObject::Process(2), 0)));
        table.descriptions.extend(many);
        assert_eq!(table.check_room(), Err(Errno::NFILE));
    }
}
