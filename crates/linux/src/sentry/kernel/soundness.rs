//! Whether a state is one that a guest can have.
//!
//! Promises: [`Kernel::check`] accepts a state before it is saved and before it is opened, so a
//! snapshot that was written can be opened. May break it: a limit here that system calls do not
//! keep.

use std::collections::BTreeSet;

use afresh_files::{Kind, Node, OpenFile, Stat};

use crate::sentry::fs::special_files::FIFO;
use crate::sentry::kernel::device::Device;
use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::kernel::fifos::opening;
use crate::sentry::kernel::held_files::UNHELD;
use crate::sentry::kernel::identity::FIRST;
use crate::sentry::kernel::poll_events::MAX_EVENTS;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::mm::layout::Layout;
use crate::sentry::name_lengths::NAME;
use crate::sentry::tty::terminals::{FIRST_DEVICE, TerminalEnd};
use crate::shared_memory_file::MAX_OFFSET;

type Soundness = Result<(), &'static str>;

fn ensure(holds: bool, error: &'static str) -> Soundness {
    if holds { Ok(()) } else { Err(error) }
}

impl Kernel {
    /// The first error of this state, if a guest cannot have it.
    pub(in crate::sentry) fn check(&self) -> Soundness {
        self.processes.check(&self.layout)?;
        self.table.check(|process| self.processes.lives(process))?;
        self.table.descriptions().try_for_each(|(_, open)| self.check_description(open))?;
        self.check_streams()?;
        self.check_processes()?;
        self.check_memory()?;
        ensure(self.names.is_sound(), "an invalid host name")?;
        ensure(self.locks.is_sound(), "it has more locks than a program may have")?;
        let lives = |process| self.processes.lives(process);
        ensure(self.semaphores.is_sound(lives), "a set of semaphores is invalid")?;
        let used = self.described_namespaces();
        ensure(self.namespaces.is_sound(lives, used), "a user namespace is invalid")?;
        let exists = |process| self.processes.exists(process);
        ensure(self.namespaces.users.is_sound(exists), "a user is invalid")?;
        ensure(self.tunables.is_sound(lives), "a number of a process is invalid")?;
        ensure(self.queues.is_sound(), "a queue of messages is invalid")?;
        let queues = self.table.descriptions().filter_map(|(_, d)| match d.open {
            FileObject::Queue(id) => Some(id),
            _ => None,
        });
        ensure(self.named_queues.is_sound(queues), "a named queue of messages is invalid")?;
        ensure(self.are_watches_bounded(), "it watches more files than a program may")?;
        ensure(self.are_interests_bounded(), "it has more sets of descriptors than a program may")?;
        let nested = self.check_nesting().is_ok();
        ensure(nested, "its sets of descriptors contain too many others, or each other")?;
        ensure(self.are_held_files_sound(), UNHELD)?;
        self.check_extensions()
    }

    /// The kind of an open file.
    fn stat_open_file(&self, open: &OpenFile) -> Result<Stat, &'static str> {
        ensure(open.offset <= i64::MAX as u64, "an offset is negative")?;
        self.tree.stat(open.node).map_err(|_| "an open file does not exist")
    }

    fn is_file(&self, node: Node) -> bool {
        self.tree.stat(node).map(|stat| stat.kind) == Ok(Kind::File)
    }

    fn check_description(&self, description: &Description) -> Soundness {
        match &description.open {
            FileObject::Input
            | FileObject::Output
            | FileObject::Messages
            | FileObject::Pipe { .. }
            | FileObject::Timer(_)
            | FileObject::Signals(_)
            // Their process may have ended: it is empty then.
            | FileObject::Folder(..)
            | FileObject::Queue(_) => {}
            FileObject::File(open) | FileObject::Terminal(TerminalEnd { open, .. }) => {
                self.stat_open_file(open)?;
            }
            FileObject::Device(device, open) => {
                let stat = self.stat_open_file(open)?;
                ensure(Device::of(stat.device).is_some(), "an unknown device")?;
                let sound = !matches!(device, Device::Generation(watch) if !watch.is_sound());
                ensure(sound, "a descriptor of the generation sends no signal")?;
            }
            FileObject::Fifo(fifo) => {
                let stat = self.stat_open_file(&fifo.open)?;
                let is_fifo = stat.kind == Kind::Device && stat.device == FIFO;
                ensure(is_fifo, "a named pipe has another kind of file")?;
            }
            FileObject::Watches(watches) => {
                ensure(watches.is_sound(), "a watcher of files is invalid")?;
            }
            FileObject::Event { count, edges, .. } => {
                ensure(*count < u64::MAX && *edges < MAX_EVENTS, "a counter is invalid")?;
            }
            FileObject::Epoll(set) => ensure(set.is_sound(), "a set of descriptors is invalid")?,
            FileObject::Socket(socket) => ensure(socket.is_sound(), "a socket is invalid")?,
            FileObject::Proc(file) => ensure(file.is_sound(), "a file of /proc is invalid")?,
            FileObject::Process(id) => {
                // A number that is not given yet would be another's later.
                let given = (FIRST..self.current().threads.next()).contains(id);
                ensure(given, "a descriptor of no process")?;
            }
        }
        let short = description.found.as_ref().is_none_or(|(_, name)| name.len() <= NAME);
        ensure(short, "the name of an open file is longer than names are")
    }

    /// Pipes, connections, terminals, and descriptors in flight.
    fn check_streams(&self) -> Soundness {
        let (table, tree) = (&self.table, &self.tree);
        let mut ends: Vec<_> = table.descriptions().flat_map(|(_, d)| d.open.ends()).collect();
        for opening in self.processes.threads().filter_map(|(_, thread)| opening(thread)) {
            let stat = self.stat_open_file(&opening.fifo.open)?;
            let sound = opening.is_sound(stat.kind, stat.device);
            ensure(sound, "a thread waits to open what is no named pipe")?;
            ends.extend(opening.fifo.ends());
        }
        self.channels.check(&ends)?;
        let terminals = table.descriptions().filter_map(|(_, d)| match &d.open {
            FileObject::Terminal(end) => Some(end),
            _ => None,
        });
        let is_terminal = |node: Node, id: u32| {
            let device = tree.stat(node).map(|stat| (stat.kind, stat.device));
            device == Ok((Kind::Device, FIRST_DEVICE + u64::from(id)))
        };
        self.terminals.check(terminals, is_terminal)?;
        let is_open = |id| table.description(id).is_some();
        let carried = table.carried().is_sound(is_open, self.channels.parcels());
        ensure(carried, "descriptors in flight are invalid")?;
        ensure(self.check_corked(0).is_ok(), "its unfinished datagrams are more than it may have")
    }

    /// The current process, and the directories of all.
    fn check_processes(&self) -> Soundness {
        let current = self.current();
        ensure(current.pending.is_sound(), "an invalid signal")?;
        ensure(current.timers.is_sound(), "an invalid timer")?;
        let handled = current.handlers.keys().all(|number| (1..=64).contains(number));
        ensure(handled, "a handler of no signal")?;
        let directory = |node| self.tree.stat(node).map(|stat| stat.kind) == Ok(Kind::Directory);
        let placed = self
            .processes
            .iter()
            .all(|process| directory(process.directory) && process.root.is_none_or(directory));
        ensure(placed, "its directory is invalid")
    }

    /// Shared memory and its files.
    fn check_memory(&self) -> Soundness {
        let layouts = self.processes.layouts().chain([&self.layout]);
        let shared: Vec<_> = layouts.flat_map(Layout::shared).collect();
        let within = shared.iter().all(|s| {
            let (from, to) = (s.share.offset(s.range.start), s.share.offset(s.range.end));
            from < to && to <= MAX_OFFSET
        });
        ensure(within, "memory is shared beyond the end of any file")?;
        let seals = self.seals.lasting(&self.tree);
        ensure(seals.is_sound(|node| self.is_file(node)), "a seal is not on a file")?;
        let segments = self.system_v.is_sound(|node| self.is_file(node));
        ensure(segments, "a segment of shared memory is invalid")?;
        let shares: BTreeSet<Node> = shared.iter().map(|shared| shared.share.node).collect();
        let files = shares.iter().all(|node| self.is_file(*node));
        ensure(files, "memory is shared through what is no file")
    }
}

#[cfg(test)]
mod tests {
    use afresh_files::{Budget, Tree};

    use super::*;
    use rustix::io::Errno;

    use crate::sentry::kernel::epoll::MAX_NESTING;
    use crate::sentry::kernel::epoll_set::EpollInterest;
    use crate::sentry::kernel::shared_parts::SharedPart;
    use crate::sentry::kernel::tracing::Trace;

    fn new() -> Kernel {
        Kernel::new(Layout::new(1 << 20), Tree::new(Budget::default()), None, Vec::new())
    }

    /// Opens an object, and returns its description.
    fn open(state: &mut Kernel, open: FileObject) -> u64 {
        let descriptor = state.table.add(Description::new(open, 0), false).unwrap();
        state.table.id(descriptor.into()).unwrap()
    }

    /// A set with `len` interests in a description.
    fn set(description: u64, len: u32) -> FileObject {
        let interest =
            EpollInterest { description, wanted: 1, data: 0, reported: None, off: false };
        FileObject::Epoll((0..len).map(|number| (number, interest.clone())).collect())
    }

    #[test]
    fn only_the_levels_of_sets_within_sets_are_limited() {
        let mut state = new();
        let mut inner = open(&mut state, set(0, 20_000));
        for level in 0..=MAX_NESTING {
            state.find_inner_sets();
            assert_eq!((state.check_nesting(), state.check()), (Ok(()), Ok(())), "{level}");
            assert!(state.pack().is_ok());
            inner = open(&mut state, set(inner, 9));
        }
        state.find_inner_sets();
        assert_eq!(state.check_nesting(), Err(Errno::LOOP));
        assert!(state.check().is_err());
        // Two sets in each other.
        let mut state = new();
        let first = open(&mut state, set(0, 1));
        let second = open(&mut state, set(first, 1));
        state.table.description_mut(first).unwrap().open = set(second, 1);
        state.find_inner_sets();
        assert_eq!(state.check_nesting(), Err(Errno::LOOP));
    }

    #[test]
    fn a_state_that_cannot_be_opened_is_not_saved() {
        let odd: [&dyn Fn(&mut Kernel); 4] = [
            &|state| {
                let (count, semaphore, edges) = (0, false, MAX_EVENTS);
                open(state, FileObject::Event { count, semaphore, edges });
            },
            &|state| {
                open(state, FileObject::Event { count: u64::MAX, semaphore: false, edges: 0 });
            },
            &|state| {
                state.processes.current.handlers.insert(65, [0; 32]);
            },
            &|state| state.processes.current.info.memory += 1,
        ];
        for (index, change) in odd.iter().enumerate() {
            let mut state = new();
            assert!(state.pack().is_ok());
            change(&mut state);
            assert!(state.check().is_err() && state.pack().is_err(), "{index}");
        }
    }

    #[test]
    fn a_save_refuses_parts_of_processes_for_the_reason_that_an_opener_has() {
        const ABSENT: u32 = 99;
        type Change = fn(&mut Kernel);
        let odd: [(Change, &str); 6] = [
            (
                |state| state.table.async_files.set(99, |file| file.signal = 9).unwrap(),
                "the owner of an open file is invalid",
            ),
            (|state| state.slacks.fork(7, ABSENT), "the timer slack of a process is invalid"),
            (
                |state| state.system_times.spend(ABSENT, 5),
                "the system time of a process is invalid",
            ),
            (
                |state| state.table.share(ABSENT, FIRST),
                "processes share descriptors or directories that they cannot",
            ),
            (
                |state| state.shared_parts.share(SharedPart::Io, ABSENT, FIRST),
                "processes share descriptors or directories that they cannot",
            ),
            (
                |state| {
                    let trace = Trace::new(ABSENT, FIRST, 0, false);
                    state.processes.tracing.insert(FIRST, trace);
                },
                "a trace of a thread is invalid",
            ),
        ];
        for (change, reason) in odd {
            let (mut state, mut opened) = (new(), new());
            change(&mut state);
            let saved = state.pack().err().expect(reason).to_string();
            assert!(saved.contains(reason), "{saved}");
            let parts = state.pack_extensions();
            let opened = opened.unpack_extensions(parts).and_then(|()| opened.check());
            assert_eq!(opened, Err(reason));
        }
    }

    #[test]
    fn a_shared_file_counts_once_however_often_it_is_mapped() {
        let mut state = new();
        let node = state.tree.create_unnamed(0o600, Default::default()).unwrap();
        state.keep_shared(node).unwrap();
        for at in [4, 8, 12] {
            let len = 400 << 10;
            let (start, _) = state.layout.map(Some(at << 20), false, len, 3, None).unwrap();
            let share = crate::sentry::mm::file_backing::FileBacking::new(node, start, 0);
            state.layout.share(start..start + len, share);
            state.count_thawed(&BTreeSet::new());
        }
        assert!(state.layout.bytes() > state.layout.limit());
        assert_eq!((state.layout.bytes_everywhere(), state.check()), (400 << 10, Ok(())));
        let thread = state.current().threads.current().clone();
        state.add_child(thread, true).unwrap();
        assert_eq!(state.check(), Ok(()));
    }

    #[test]
    fn a_guest_beyond_a_lowered_limit_is_saved() {
        let mut state = new();
        state.layout.map(Some(4 << 20), false, 400 << 10, 3, None).unwrap();
        let thread = state.current().threads.current().clone();
        state.add_child(thread, true).unwrap();
        assert_eq!(state.limit_memory(4096), 800 << 10);
        assert_eq!((state.check(), state.pack().is_ok()), (Ok(()), true));
    }
}
