//! Readiness of descriptors and threads: from the state alone, without the guest's memory.

use std::collections::{BTreeMap, BTreeSet};

use crate::sentry::kernel::channels::Channel;
use crate::sentry::kernel::device::Device;
use crate::sentry::kernel::epoll::ReadySets;
use crate::sentry::kernel::epoll_set::{EpollInterest, EpollSet};
use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::kernel::input_source::InputSource;
use crate::sentry::kernel::poll_events::{ALWAYS, ERR, HUP, IN, OUT, RDHUP, SEND_ROOM};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::streams::Streams;
use crate::sentry::kernel::threads::{Thread, Wait, WaitReason};
use crate::sentry::kernel::time::MonotonicTime;
use crate::sentry::net::sockets::{Socket, SocketState};

/// A thread of the current process that queries readiness, and the caller's pending input.
#[derive(Clone, Copy, Debug)]
pub(in crate::sentry) struct PortCaller<'a> {
    pub(in crate::sentry) streams: &'a Streams,
    pub(in crate::sentry) thread: u32,
}

/// Sets that were looked at, and whether each has an interest in the caller's input.
#[derive(Debug, Default)]
struct InputSets(BTreeMap<u64, bool>);

/// Items that the readiness of an object looks at: the connections that a listener has.
fn looks(open: &FileObject) -> usize {
    match open {
        FileObject::Socket(Socket { stage: SocketState::Listening(queue), .. }) => queue.len(),
        _ => 0,
    }
}

impl Kernel {
    /// The readiness of a description, if it is open, and a number that grows whenever it becomes
    /// ready for more, which is 0 for a set: see [`Self::set_edges`]. Questions with the same
    /// `sets` are one.
    pub(in crate::sentry) fn readiness(
        &self,
        asker: PortCaller<'_>,
        id: u64,
        sets: &mut ReadySets,
    ) -> Option<(u16, u64)> {
        Some(match &self.table.description(id)?.open {
            FileObject::Epoll(set) => {
                (if self.is_set_ready(asker, id, set, sets) { IN } else { 0 }, 0)
            }
            open @ FileObject::Signals(_) => {
                sets.note_signals();
                self.object_readiness(asker, open)
            }
            open => {
                sets.count(looks(open));
                self.object_readiness(asker, open)
            }
        })
    }

    /// A number that differs whenever a set has had a further event: a sum over its interests.
    fn set_edges(
        &self,
        asker: PortCaller<'_>,
        id: u64,
        set: &EpollSet,
        sets: &mut ReadySets,
    ) -> u64 {
        if let Some(edges) = sets.edges(id) {
            return edges;
        }
        let begun = sets.begin_edges(id);
        let sum = set.interests().fold(0u64, |sum, interest| {
            sets.count(1);
            let id = interest.description;
            let edges = match self.table.description(id).map(|found| &found.open) {
                None => return sum,
                Some(FileObject::Epoll(inner)) => self.set_edges(asker, id, inner, sets),
                Some(open) => {
                    if matches!(open, FileObject::Signals(_)) {
                        sets.note_signals();
                    }
                    sets.count(looks(open));
                    self.object_readiness(asker, open).1
                }
            };
            // An interest without edges counts, too, and none stands for another one.
            sum.wrapping_add(edges.wrapping_add(1).wrapping_mul(id.wrapping_mul(2) | 1))
        });
        sets.end_edges(id, begun, sum);
        sum
    }

    /// The readiness of an object that is no set.
    fn object_readiness(&self, asker: PortCaller<'_>, open: &FileObject) -> (u16, u64) {
        let streams = asker.streams;
        let when = |holds: bool, events: u16| if holds { events } else { 0 };
        match open {
            FileObject::Input => {
                let edges = match &streams.source {
                    Some(source) => source.edges(),
                    None => streams.input.len() as u64 + u64::from(streams.ended),
                };
                (streams.input_events(), edges)
            }
            FileObject::Output | FileObject::Messages => (OUT, 0),
            FileObject::Device(Device::Generation(watch), _) => {
                let generation = streams.generation.get();
                (when(watch.differs(generation), IN), generation)
            }
            FileObject::File(_)
            | FileObject::Device(..)
            | FileObject::Folder(..)
            | FileObject::Proc(_) => (IN | OUT, 0),
            FileObject::Epoll(_) => (0, 0),
            FileObject::Pipe { channel, writes } => {
                let Some(channel) = self.channels.get(*channel) else { return (ERR, 0) };
                match writes {
                    true => {
                        let events = when(channel.is_writable(), OUT)
                            | when(channel.readers == 0, ERR | OUT);
                        (events, channel.write_edges())
                    }
                    false => {
                        let events =
                            when(!channel.is_empty(), IN) | when(channel.writers == 0, HUP);
                        (events, channel.read_edges())
                    }
                }
            }
            FileObject::Fifo(fifo) => {
                let Some(channel) = self.channels.get(fifo.channel) else { return (ERR, 0) };
                let access = fifo.open.access;
                let ended = channel.writers == 0 && !fifo.unmet;
                let reads = when(!channel.is_empty(), IN) | when(ended, HUP);
                let writes =
                    when(channel.is_writable(), OUT) | when(channel.readers == 0, ERR | OUT);
                let events = when(access.read, reads) | when(access.write, writes);
                (events, channel.edges)
            }
            FileObject::Watches(watches) => watches.readiness(),
            FileObject::Terminal(end) => self.terminals.readiness(end),
            FileObject::Signals(set) => {
                let own =
                    self.processes.current.threads.get(asker.thread).map(|thread| &thread.pending);
                let all = || own.into_iter().chain([&self.processes.current.pending]);
                let pending = all().fold(0, |all, pending| all | pending.set());
                (when(pending & set != 0, IN), all().map(|pending| pending.came).sum())
            }
            FileObject::Queue(id) => self.named_queues.get(*id).map_or((ERR, 0), |queue| {
                (when(!queue.is_empty(), IN) | when(!queue.is_full(), OUT), queue.edges)
            }),
            FileObject::Process(id) => {
                let ended = !self.processes.lives(*id);
                (when(ended, IN), u64::from(ended))
            }
            FileObject::Event { count, edges, .. } => {
                (when(*count > 0, IN) | when(*count < u64::MAX - 1, OUT), *edges)
            }
            FileObject::Timer(timer) => {
                let expired = timer.expired(streams.clock.now());
                (when(expired > 0, IN), expired)
            }
            FileObject::Socket(socket) => match &socket.stage {
                SocketState::New => (OUT | HUP, 0),
                SocketState::Reaching { .. } => (0, 0),
                SocketState::Refused(_) => (IN | OUT | ERR | HUP, 1),
                SocketState::Datagrams { .. } => self.mail_readiness(socket),
                SocketState::Listening(queue) => {
                    let room = queue.len() <= socket.backlog_len();
                    let (mut ready, mut late) = (false, 0);
                    let now = if queue.is_empty() { 0 } else { streams.clock.now() };
                    for at in self.acceptable(queue, now) {
                        ready = true;
                        // One that was deferred is ready later than it came.
                        late += u64::from(queue[at].until.is_some());
                    }
                    (when(ready, IN) | when(room, SEND_ROOM), socket.edges + late)
                }
                SocketState::Connected { incoming, outgoing } => {
                    let read = incoming.and_then(|id| self.channels.get(id));
                    let write = outgoing.and_then(|id| self.channels.get(id));
                    let local = !socket.own.is_internet();
                    let ended = read.is_none_or(Channel::has_ended);
                    let deaf =
                        write.is_none_or(|channel| channel.readers == 0 || local && channel.shut);
                    let reset = read.is_some_and(|channel| channel.reset);
                    // A local peer that has closed can neither send nor receive.
                    let hung = ended && outgoing.is_none() || local && ended && deaf || reset;
                    let held =
                        |channel: &Channel| !channel.is_empty() || channel.letter().is_some();
                    let takes = |channel: &Channel| match socket.packets {
                        true => channel.takes_any(),
                        false => channel.is_writable(),
                    };
                    let events = when(ended || read.is_some_and(held), IN)
                        | when(ended, RDHUP)
                        | when(hung, HUP)
                        | when(reset, ERR)
                        | when(deaf || write.is_some_and(takes), OUT);
                    let edges = |channel: Option<&Channel>| {
                        channel.map_or(1 << 32, |channel| channel.edges)
                    };
                    (events, edges(read) + edges(write))
                }
            },
        }
    }

    /// Whether a set has an event; `sets` has the answers so far.
    pub(in crate::sentry) fn is_set_ready(
        &self,
        asker: PortCaller<'_>,
        id: u64,
        set: &EpollSet,
        sets: &mut ReadySets,
    ) -> bool {
        if let Some(ready) = sets.answer(id) {
            return ready;
        }
        let begun = sets.begin_set(id);
        let ready = set.interests().any(|interest| self.concern(asker, interest, sets).is_some());
        sets.end_set(id, begun, ready);
        ready
    }

    /// The events that an interest would report now, and its state; `None` without events.
    pub(in crate::sentry) fn concern(
        &self,
        asker: PortCaller<'_>,
        interest: &EpollInterest,
        sets: &mut ReadySets,
    ) -> Option<(u16, u64)> {
        sets.count(1);
        let id = interest.description;
        let (events, mut edges) = self.readiness(asker, id, sets)?;
        let reported = events & (interest.events() | ALWAYS);
        if reported == 0 || interest.is_off() {
            return None;
        }
        // Only edges need all interests of a set.
        if interest.is_edge()
            && let FileObject::Epoll(set) = &self.table.description(id)?.open
        {
            edges = self.set_edges(asker, id, set, sets);
        }
        let again = !interest.is_edge() || interest.reported != Some(edges);
        again.then_some((reported, edges))
    }

    /// Whether a wait of thread `id` is over. Sets that other threads have asked about answer from
    /// `sets`.
    pub(crate) fn is_over(
        &self,
        streams: &Streams,
        id: u32,
        wait: &Wait,
        now: MonotonicTime,
        sets: &mut ReadySets,
    ) -> bool {
        sets.count(wait.reason.looks() + self.looks_beside(&wait.reason));
        if wait.woken || wait.until.is_some_and(|until| until <= now) {
            return true;
        }
        match &wait.reason {
            WaitReason::Futex { .. }
            | WaitReason::Futexes { .. }
            | WaitReason::Fifo(_)
            | WaitReason::Nothing => false,
            WaitReason::Stop => !self.is_about_to_stop(),
            WaitReason::Lock(lock) => self.locks.against(lock).is_none(),
            WaitReason::Semaphores(id, operations) => self.semaphores.is_over(*id, operations),
            WaitReason::MessageRoom(id, len) => self.queues.has_room(*id, *len),
            WaitReason::Message(id, wanted) => self.queues.has_message(*id, *wanted),
            // Others of its threads may wait already.
            WaitReason::Children(asked) => self.processes.answers(*asked),
            WaitReason::Borrower(child) => self.processes.is_grown(*child),
            WaitReason::Signals(set) => {
                let own =
                    self.processes.current.threads.get(id).map_or(0, |thread| thread.pending.set());
                (own | self.processes.current.pending.set()) & set != 0
            }
            WaitReason::Files(list) => {
                let asker = PortCaller { streams, thread: id };
                sets.begin_thread();
                list.iter().any(|(description, events)| {
                    let ready = self.readiness(asker, *description, sets);
                    ready.is_none_or(|(ready, _)| ready & (events | ALWAYS) != 0)
                })
            }
        }
    }

    /// Messages and processes that an answer looks at, whether a wait is over.
    fn looks_beside(&self, reason: &WaitReason) -> usize {
        match reason {
            // The queue of a wait for room, and the lengths of all; the messages of one are looked
            // at twice.
            WaitReason::MessageRoom(id, _) | WaitReason::Message(id, _) => self.queues.looks(*id),
            WaitReason::Children(_) => 3 * self.processes.len(),
            _ => 0,
        }
    }

    /// Whether a thread waits for the caller's input on descriptor 0.
    pub(in crate::sentry) fn awaits_input(&self) -> bool {
        let (mut threads, mut sets) = (self.processes.threads(), InputSets::default());
        threads.any(|(_, thread)| self.reads_input(thread, &mut sets))
    }

    /// Whether the current process is in the stub, because its current thread waits or has ended.
    pub(crate) fn rests(&self) -> bool {
        let current =
            self.processes.current.threads.get(self.processes.current.threads.current_id());
        let id = self.processes.current.threads.current_id();
        self.processes.tracing.is_stopped(id) || current.is_none_or(|thread| thread.wait.is_some())
    }

    /// Whether all threads wait.
    pub(crate) fn all_wait(&self) -> bool {
        let mut threads = self.processes.threads();
        threads.all(|(id, thread)| thread.wait.is_some() || self.processes.tracing.is_stopped(id))
    }

    /// Whether a thread does. Sets that other threads wait for answer from `sets`.
    fn reads_input(&self, thread: &Thread, sets: &mut InputSets) -> bool {
        let mut is_input = |id: u64| {
            self.table.description(id).is_some_and(|description| match &description.open {
                FileObject::Input => true,
                FileObject::Epoll(set) => *sets.0.entry(id).or_insert_with(|| {
                    set.interests().any(|interest| {
                        let found = self.table.description(interest.description);
                        found.is_some_and(|d| d.open == FileObject::Input)
                            && interest.events() & IN != 0
                    })
                }),
                _ => false,
            })
        };
        match &thread.wait {
            Some(Wait { reason: WaitReason::Files(list), .. }) => {
                list.iter().any(|(id, _)| is_input(*id))
            }
            _ => false,
        }
    }

    /// The input source through which a guest can be called when all its threads wait. After a call
    /// it is the same again: a program that answers lines may open a port for its own use, and that
    /// listener does not complete the call.
    pub(crate) fn ear(&self, called: Option<InputSource>) -> Option<InputSource> {
        match called {
            None | Some(InputSource::Input) if self.awaits_input() => Some(InputSource::Input),
            None | Some(InputSource::Port) => self.listener().map(|_| InputSource::Port),
            Some(InputSource::Input) => None,
        }
    }

    /// The description of the socket that listens on the lowest port.
    pub(crate) fn listener(&self) -> Option<u64> {
        let port = |(id, description): (u64, &Description)| match &description.open {
            FileObject::Socket(socket) if socket.own.is_internet() => {
                matches!(socket.stage, SocketState::Listening(_)).then(|| (socket.own.port(), id))
            }
            _ => None,
        };
        self.table.descriptions().filter_map(port).min().map(|(_, id)| id)
    }

    /// Whether a process other than the servers is active though all wait: one that starts a server
    /// and polls it, or has sent it a request. A process that waits for a child counts as the child
    /// does.
    pub(crate) fn is_underway(&self) -> bool {
        let works = |wait: &Wait| {
            !matches!(
                wait.reason,
                WaitReason::Children(_) | WaitReason::Borrower(_) | WaitReason::Stop
            )
        };
        let servers = self.servers();
        let mut others = self.processes.iter().filter(|p| !servers.contains(&p.info.id));
        others.any(|process| {
            let mut threads = process.threads.iter();
            threads.any(|(_, thread)| thread.wait.as_ref().is_none_or(works))
        })
    }

    /// Whether a timer expires after `now` in a process that may still answer the input: any except
    /// pure servers, which wake up periodically.
    pub(crate) fn may_answer(&self, now: MonotonicTime) -> bool {
        let (servers, mut sets) = (self.servers(), InputSets::default());
        let mut reads = |id: u32| {
            let process = self.processes.get(id);
            let mut threads = process.into_iter().flat_map(|process| process.threads.iter());
            threads.any(|(_, thread)| self.reads_input(thread, &mut sets))
        };
        if servers.iter().any(|id| reads(*id)) {
            return self.next_moment(now).is_some();
        }
        let others = || self.processes.iter().filter(|p| !servers.contains(&p.info.id));
        let threads = others().flat_map(|process| process.threads.iter());
        let waits = threads.filter_map(|(_, t)| t.wait.as_ref().and_then(|w| w.until));
        let rings = others().filter_map(|process| process.timers.next());
        waits.chain(rings).chain(self.timers()).any(|at| at > now)
    }

    /// The processes that listen on a socket, and their descendants.
    fn servers(&self) -> BTreeSet<u32> {
        let own = self.processes.current_id();
        let listens = |id: u64| {
            self.table.description(id).is_some_and(|description| match &description.open {
                FileObject::Socket(socket) => matches!(socket.stage, SocketState::Listening(_)),
                _ => false,
            })
        };
        let mut servers: BTreeSet<u32> = (self.table.parts(own).descriptors.iter())
            .filter(|(_, _, description, _)| listens(*description))
            .map(|(process, ..)| *process)
            .collect();
        // Their children have higher PIDs.
        let parents: BTreeMap<u32, u32> =
            self.processes.infos().map(|info| (info.id, info.parent)).collect();
        for (id, parent) in &parents {
            if servers.contains(parent) {
                servers.insert(*id);
            }
        }
        servers
    }

    /// The next moment at which something happens by itself, later than `now`.
    pub(crate) fn next_moment(&self, now: MonotonicTime) -> Option<MonotonicTime> {
        self.moments().chain(self.deferrals()).filter(|at| *at > now).min()
    }

    /// Time until the next event, while all wait.
    pub(crate) fn due(&self, now: MonotonicTime) -> Option<MonotonicTime> {
        let deferrals = self.deferrals().filter(|at| *at > now);
        self.moments().chain(deferrals).min().map(|at| at.saturating_sub(now))
    }

    fn moments(&self) -> impl Iterator<Item = MonotonicTime> + '_ {
        let threads = self.processes.threads();
        let waits = threads.filter_map(|(_, t)| t.wait.as_ref().and_then(|w| w.until));
        waits.chain(self.timers()).chain(self.rings_at()).chain(self.channels.cork_ends())
    }

    /// The moments of timers that descriptors stand for, which belong to no single process.
    fn timers(&self) -> impl Iterator<Item = MonotonicTime> + '_ {
        self.table.descriptions().filter_map(|(_, d)| match &d.open {
            FileObject::Timer(timer) => timer.at,
            _ => None,
        })
    }

    /// When the next alarm rings, if one does.
    pub(crate) fn rings_at(&self) -> Option<MonotonicTime> {
        self.processes.iter().filter_map(|process| process.timers.next()).min()
    }

    /// Whether nothing but the current thread ever does anything.
    pub(crate) fn is_alone(&self) -> bool {
        let rings = self.processes.current.timers.next().is_some() || self.is_measured();
        self.processes.current.threads.len() == 1 && !rings && self.processes.is_single()
    }
}
