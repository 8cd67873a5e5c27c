//! Pipes, event counters and timers: calls that make them, and how bytes move through them.

use afresh_snapshot::OutputStream;
use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::channels::{Ancillary, ChannelEnd};
use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::kernel::poll_events::{IN, OUT};
use crate::sentry::kernel::signals::SignalInfo;
use crate::sentry::kernel::threads::{Wait, WaitReason};
use crate::sentry::kernel::time::nanoseconds;
use crate::sentry::kernel::timer_fd::TimerFd;
use crate::sentry::mm::user_memory::copy_out;
use crate::sentry::net::sockets::{ReceivedMessage, SentControl, SocketState};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::clock::length_in;
use crate::sentry::syscalls::file::Pair;
use crate::sentry::syscalls::stream_write::{PIPE_BUF, StreamWrite};

impl Sentry {
    /// `pipe2(2)`: `O_DIRECT` is accepted, and the pipe is a byte stream as without it.
    pub(in crate::sentry) fn sys_pipe2(
        &mut self,
        process: &mut Process,
        to: u64,
        flags: u64,
    ) -> SyscallResult {
        let flags = flags as i32;
        if flags & !(libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_DIRECT) != 0 {
            return Err(Errno::INVAL.into());
        }
        let close = flags & libc::O_CLOEXEC != 0;
        let kept = flags & libc::O_NONBLOCK;
        let state = self.change();
        let channel = state.channels.add().ok_or(Errno::MFILE)?;
        let end = |writes: bool| {
            Description::new(FileObject::Pipe { channel, writes }, kept | i32::from(writes))
        };
        let numbers = state.add_pair(end(false), end(true), close)?;
        self.report_pair(process, to, numbers)
    }

    /// `pipe(2)`: as `pipe2`.
    pub(in crate::sentry) fn sys_pipe(&mut self, process: &mut Process, fds: u64) -> SyscallResult {
        self.sys_pipe2(process, fds, 0)
    }

    /// Stores the numbers of two new descriptors, which are closed where that fails.
    pub(in crate::sentry) fn report_pair(
        &mut self,
        process: &mut Process,
        to: u64,
        numbers: Pair,
    ) -> SyscallResult {
        let stored = copy_out(process, to, &numbers);
        if stored.is_err() {
            let [a, b, c, d, e, f, g, h] = numbers;
            let new = [[a, b, c, d], [e, f, g, h]].map(|bytes| u32::from_le_bytes(bytes).into());
            self.change().close_all(&new);
        }
        stored.map(|()| ZERO)
    }

    /// The capacity of a pipe, which may be changed.
    pub(in crate::sentry) fn pipe_size(
        &mut self,
        descriptor: u64,
        new: Option<u64>,
    ) -> SyscallResult {
        let ends = self.state.table.get(descriptor)?.open.ends();
        let &(channel, _) = ends.first().ok_or(Errno::BADF)?;
        let size = match new {
            Some(bytes) => self.change().channels.resize(channel, bytes)?,
            None => self.state.channels.get(channel).ok_or(Errno::BADF)?.capacity(),
        };
        Ok(SyscallControl::Value(size as u64))
    }

    /// `eventfd2(2)`, as on Linux.
    pub(in crate::sentry) fn sys_eventfd2(&mut self, count: u64, flags: u64) -> SyscallResult {
        let flags = flags as i32;
        let known = libc::EFD_CLOEXEC | libc::EFD_NONBLOCK | libc::EFD_SEMAPHORE;
        if flags & !known != 0 {
            return Err(Errno::INVAL.into());
        }
        let semaphore = flags & libc::EFD_SEMAPHORE != 0;
        let count = count & u64::from(u32::MAX);
        self.add(
            FileObject::Event { count, semaphore, edges: 0 },
            flags & !libc::EFD_SEMAPHORE | libc::O_RDWR,
        )
    }

    /// `eventfd(2)`: as `eventfd2`.
    pub(in crate::sentry) fn sys_eventfd(&mut self, count: u64) -> SyscallResult {
        self.sys_eventfd2(count, 0)
    }

    /// `timerfd_create(2)`: timers of every clock count the time that the guest runs, and the alarm
    /// clocks are `EINVAL`.
    pub(in crate::sentry) fn sys_timerfd_create(
        &mut self,
        clock: u64,
        flags: u64,
    ) -> SyscallResult {
        if flags as i32 & !(libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) != 0 {
            return Err(Errno::INVAL.into());
        }
        self.moment_after(clock, std::time::Duration::ZERO, false)?;
        self.add(
            FileObject::Timer(TimerFd { clock, ..TimerFd::default() }),
            flags as i32 | libc::O_RDWR,
        )
    }

    /// `timerfd_settime(2)`: `TFD_TIMER_CANCEL_ON_SET` changes nothing, because no clock of a guest
    /// is set.
    pub(in crate::sentry) fn sys_timerfd_settime(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        flags: u64,
        new: u64,
        old: u64,
    ) -> SyscallResult {
        let FileObject::Timer(timer) = &self.state.table.get(descriptor)?.open else {
            return Err(Errno::INVAL.into());
        };
        if flags as i32 & !(libc::TFD_TIMER_ABSTIME | libc::TFD_TIMER_CANCEL_ON_SET) != 0 {
            return Err(Errno::INVAL.into());
        }
        let timer = timer.clone();
        let every = nanoseconds(length_in(process, new)?);
        let first = length_in(process, new.wrapping_add(16))?;
        let at = match first.is_zero() {
            true => None,
            false => Some(self.moment_after(timer.clock, first, flags & 1 != 0)?),
        };
        self.write_timer(process, &timer, old)?;
        self.change().table.get_mut(descriptor)?.open =
            FileObject::Timer(TimerFd { at, every, clock: timer.clock });
        Ok(ZERO)
    }

    /// `timerfd_gettime(2)`, as on Linux.
    pub(in crate::sentry) fn sys_timerfd_gettime(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        to: u64,
    ) -> SyscallResult {
        let FileObject::Timer(timer) = &self.state.table.get(descriptor)?.open else {
            return Err(Errno::INVAL.into());
        };
        self.write_timer(process, timer, to)?;
        Ok(ZERO)
    }

    fn write_timer(&self, process: &mut Process, timer: &TimerFd, to: u64) -> SyscallResult<()> {
        if to == 0 {
            return Ok(());
        }
        let time = |bytes: StructBuilder, nanos: u64| {
            bytes.word(nanos / 1_000_000_000).word(nanos % 1_000_000_000)
        };
        copy_out(
            process,
            to,
            &time(time(StructBuilder::default(), timer.every), timer.left(self.now())).0,
        )
    }

    /// A wait for `events` of an open description; an error if it is non-blocking.
    pub(in crate::sentry) fn wait_for(
        &self,
        descriptor: u64,
        events: u16,
        done: u64,
    ) -> SyscallResult {
        let description = self.state.table.get(descriptor)?;
        if description.flags & libc::O_NONBLOCK as u32 != 0 {
            return if done > 0 {
                Ok(SyscallControl::Value(done))
            } else {
                Err(Errno::AGAIN.into())
            };
        }
        let until = self.limited(&description.open, events);
        if self.passed(until) {
            return if done > 0 {
                Ok(SyscallControl::Value(done))
            } else {
                Err(Errno::AGAIN.into())
            };
        }
        let reason = WaitReason::Files(vec![(self.state.table.id(descriptor)?, events)]);
        Ok(SyscallControl::Wait(Wait { done, ..Wait::new(reason, until) }))
    }

    /// Reads a pipe, a socket, a counter or a timer into pieces of memory; `stays` leaves the bytes
    /// there.
    pub(in crate::sentry) fn take(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
        stays: bool,
    ) -> SyscallResult {
        let (outcome, came) = self.take_with(process, descriptor, pieces, stays)?;
        if let Some(parcel) = came.parcel.filter(|_| !came.stays) {
            // A reader without room for descriptors gets none.
            self.change().drop_parcel(parcel);
        }
        Ok(outcome)
    }

    /// As [`Sentry::take`], with the data that came with the bytes.
    pub(in crate::sentry) fn take_with(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
        stays: bool,
    ) -> SyscallResult<(SyscallControl, ReceivedMessage)> {
        let alone = |outcome: SyscallResult| Ok((outcome?, ReceivedMessage::default()));
        let wanted: u64 = pieces.iter().map(|(_, len)| len).sum();
        let channel = match &self.state.table.get(descriptor)?.open {
            FileObject::Pipe { channel, writes: false } => *channel,
            FileObject::Fifo(fifo) if fifo.open.access.read => fifo.channel,
            FileObject::Pipe { .. } | FileObject::Fifo(_) => return Err(Errno::BADF.into()),
            FileObject::Socket(socket) => match &socket.stage {
                SocketState::Connected { incoming: Some(incoming), .. } if socket.packets => {
                    let incoming = *incoming;
                    return self.take_packet(process, descriptor, incoming, pieces, stays);
                }
                SocketState::Connected { incoming: Some(incoming), .. } => *incoming,
                SocketState::Connected { incoming: None, .. } => return alone(Ok(ZERO)),
                SocketState::Datagrams { inbox, .. } => {
                    let inbox = *inbox;
                    return self.take_letter(process, descriptor, inbox, pieces, stays);
                }
                SocketState::Reaching { .. } => {
                    return alone(self.wait_for(descriptor, IN, 0));
                }
                SocketState::Refused(error) => {
                    let error = Errno::from_raw_os_error(*error);
                    self.socket_mut(descriptor)?.stage = SocketState::New;
                    return Err(error.into());
                }
                _ if socket.is_local() && !socket.packets => return Err(Errno::INVAL.into()),
                _ => return Err(Errno::NOTCONN.into()),
            },
            FileObject::Watches(_) => {
                return alone(self.read_events(process, descriptor, pieces, wanted));
            }
            FileObject::Terminal(_) => {
                return alone(self.take_typed(process, descriptor, pieces, wanted));
            }
            FileObject::Event { .. } | FileObject::Timer(_) => {
                return alone(self.take_count(process, descriptor, pieces, wanted));
            }
            FileObject::Queue(id) => {
                let id = *id;
                return alone(self.read_queue(process, id, pieces));
            }
            FileObject::Signals(set) => {
                let set = *set;
                return alone(self.read_signals(process, descriptor, set, pieces));
            }
            _ => return Err(Errno::INVAL.into()),
        };
        if wanted == 0 {
            return alone(Ok(ZERO));
        }
        let held = self.state.channels.get(channel).ok_or(Errno::IO)?;
        if held.is_empty() {
            return match held.has_ended() {
                _ if held.reset => Err(self.take_reset(channel).into()),
                true => alone(Ok(ZERO)),
                false => alone(self.wait_for(descriptor, IN, 0)),
            };
        }
        let bytes = held.peek(wanted.min(held.together() as u64) as usize);
        let mut rest = &bytes[..];
        for &(to, len) in pieces {
            let (now, later) = rest.split_at(rest.len().min(len as usize));
            copy_out(process, to, now)?;
            rest = later;
        }
        let (parcel, sender) = (held.parcel(bytes.len()), held.sender());
        let from = self.is_local(descriptor).then(|| self.named_peer(descriptor)).transpose()?;
        if !stays && let Some(channel) = self.change().channels.get_mut(channel) {
            let _ = channel.skip(bytes.len());
        }
        let came = ReceivedMessage { from, parcel, stays, sender, ..ReceivedMessage::default() };
        Ok((SyscallControl::Value(bytes.len() as u64), came))
    }

    fn take_count(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
        wanted: u64,
    ) -> SyscallResult {
        let &[(to, 8..), ..] = pieces else { return Err(Errno::INVAL.into()) };
        if wanted < 8 {
            return Err(Errno::INVAL.into());
        }
        let now = self.now();
        let count = match &self.state.table.get(descriptor)?.open {
            FileObject::Event { count: 1.., semaphore: true, .. } => 1,
            FileObject::Event { count, .. } => *count,
            FileObject::Timer(timer) => timer.expired(now),
            _ => 0,
        };
        if count == 0 {
            return self.wait_for(descriptor, IN, 0);
        }
        copy_out(process, to, &count.to_le_bytes())?;
        match &mut self.change().table.get_mut(descriptor)?.open {
            FileObject::Event { count: held, edges, .. } => {
                *held -= count;
                *edges += 1;
            }
            FileObject::Timer(timer) => drop(timer.take(now)),
            _ => {}
        }
        Ok(SyscallControl::Value(8))
    }

    /// Writes to a pipe, a socket or a counter.
    pub(in crate::sentry) fn pour(&mut self, descriptor: u64, bytes: &[u8]) -> SyscallResult {
        self.pour_part(descriptor, &StreamWrite::whole(bytes))
    }

    /// As [`Sentry::pour`], of a write whose bytes are read in parts.
    pub(in crate::sentry) fn pour_part(
        &mut self,
        descriptor: u64,
        written: &StreamWrite<'_>,
    ) -> SyscallResult {
        match &self.state.table.get(descriptor)?.open {
            FileObject::Socket(socket) if socket.is_for_datagrams() => {
                self.post_letter(descriptor, &written.bytes, None, SentControl::default())
            }
            _ => self.pour_with(descriptor, written, false, SentControl::default()),
        }
    }

    /// As [`Sentry::pour`], but for datagrams; the first of the bytes that find room go with the
    /// descriptors of `control`.
    pub(in crate::sentry) fn pour_with(
        &mut self,
        descriptor: u64,
        written: &StreamWrite<'_>,
        quiet: bool,
        control: SentControl<'_>,
    ) -> SyscallResult {
        let bytes = &written.bytes[..];
        let channel = match &self.state.table.get(descriptor)?.open {
            FileObject::Pipe { channel, writes: true } => *channel,
            FileObject::Fifo(fifo) if fifo.open.access.write => fifo.channel,
            FileObject::Socket(socket) => match &socket.stage {
                SocketState::Connected { outgoing: Some(outgoing), .. } if socket.packets => {
                    let outgoing = *outgoing;
                    return self.put_packet(descriptor, outgoing, bytes, control);
                }
                SocketState::Connected { outgoing: Some(outgoing), .. } => *outgoing,
                SocketState::Connected { outgoing: None, .. } if socket.packets => {
                    return Err(Errno::PIPE.into());
                }
                SocketState::Connected { outgoing: None, .. } => return self.broken_pipe(quiet),
                SocketState::Reaching { .. } => return self.wait_for(descriptor, OUT, 0),
                _ if socket.own.is_internet() => return self.broken_pipe(quiet),
                _ => return Err(Errno::NOTCONN.into()),
            },
            FileObject::Terminal(_) => return self.put_shown(descriptor, written),
            FileObject::Event { count, .. } => {
                let added: [u8; 8] =
                    bytes.get(..8).and_then(|b| b.try_into().ok()).ok_or(Errno::INVAL)?;
                let new = match u64::from_le_bytes(added) {
                    u64::MAX => return Err(Errno::INVAL.into()),
                    added => count.checked_add(added).filter(|new| *new < u64::MAX),
                };
                let Some(new) = new else { return self.wait_for(descriptor, OUT, 0) };
                if let FileObject::Event { count, edges, .. } =
                    &mut self.change().table.get_mut(descriptor)?.open
                {
                    *count = new;
                    *edges += 1;
                }
                return Ok(SyscallControl::Value(8));
            }
            FileObject::Process(_)
            | FileObject::Signals(_)
            | FileObject::Queue(_)
            | FileObject::Timer(_) => {
                return Err(Errno::INVAL.into());
            }
            _ => return Err(Errno::BADF.into()),
        };
        let held = self.state.channels.get(channel).ok_or(Errno::IO)?;
        if held.readers == 0 || held.shut && self.is_local(descriptor) {
            let incoming = self.incoming(descriptor);
            let reset =
                incoming.and_then(|id| self.state.channels.get(id)).is_some_and(|c| c.reset);
            let done = self.resumed_bytes();
            let is_socket = self.socket_of(descriptor).is_ok();
            // Bytes that were written before count; the error comes with the next call.
            if done > 0 && is_socket {
                return Ok(SyscallControl::Value(done));
            }
            if reset && let Some(incoming) = incoming {
                return Err(self.take_reset(incoming).into());
            }
            // The first bytes to a peer that has closed are sent, and answered by a reset. One with
            // unread bytes has reset the connection as it closed.
            let first = is_socket && !self.is_local(descriptor) && !held.shut && held.is_empty();
            if first && let Some(channel) = self.change().channels.get_mut(channel) {
                channel.shut = true;
                return Ok(SyscallControl::Value(written.len));
            }
            // The signal of a pipe comes with a part as well.
            return self.broken_pipe(quiet).or_else(|error| match done {
                0 => Err(error),
                done => Ok(SyscallControl::Value(done)),
            });
        }
        if held.end == ChannelEnd::Listens {
            let from = self.output_source(OutputStream::Output);
            return Ok(match self.streams.put_out(from, bytes, self.output_limit) {
                Ok(()) => SyscallControl::Value(bytes.len() as u64),
                Err(end) => SyscallControl::End(end),
            });
        }
        // A resumed write continues after the bytes that it has written.
        let done = self.resumed_bytes();
        let rest = written.after(done);
        // A write of at most `PIPE_BUF` bytes is atomic.
        let whole = written.len <= PIPE_BUF && held.room() < rest.len();
        let put = if whole || held.room() == 0 || rest.is_empty() {
            0
        } else {
            let rights = if done == 0 { control.rights } else { &[] };
            let data = match self.is_local(descriptor) {
                true => self.pack_up(descriptor, channel, SentControl { rights, ..control })?,
                false => Ancillary::default(),
            };
            self.change().channels.get_mut(channel).map_or(0, |channel| {
                let put = channel.push(rest);
                channel.attach(data, put);
                put
            })
        };
        if self.holds_back(descriptor, control.more) {
            let now = self.now();
            self.change().channels.hold_back(channel, put, now);
        } else {
            self.change().channels.release_cork(channel);
        }
        let done = done + put as u64;
        if done >= written.len {
            return Ok(SyscallControl::Value(done));
        }
        self.wait_for(descriptor, OUT, done)
    }

    /// Whether the bytes of a send wait for others: those of TCP, as the call or an option says.
    fn holds_back(&self, descriptor: u64, more: bool) -> bool {
        self.socket_of(descriptor).is_ok_and(|socket| {
            let corked = || socket.options.is_on(libc::IPPROTO_TCP, libc::TCP_CORK);
            socket.own.is_internet() && (more || corked())
        })
    }

    /// The channel that a connected socket reads.
    fn incoming(&self, descriptor: u64) -> Option<u64> {
        match &self.state.table.get(descriptor).ok()?.open {
            FileObject::Socket(socket) => match socket.stage {
                SocketState::Connected { incoming, .. } => incoming,
                _ => None,
            },
            _ => None,
        }
    }

    /// Whether a descriptor is a socket of this machine alone.
    pub(in crate::sentry) fn is_local(&self, descriptor: u64) -> bool {
        match self.state.table.get(descriptor).map(|description| &description.open) {
            Ok(FileObject::Socket(socket)) => !socket.own.is_internet(),
            _ => false,
        }
    }

    /// The error of a connection that its peer broke off, which is reported once.
    pub(in crate::sentry) fn take_reset(&mut self, incoming: u64) -> Errno {
        if let Some(channel) = self.change().channels.get_mut(incoming) {
            (channel.reset, channel.shut) = (false, true);
            channel.edges += 1;
        }
        Errno::CONNRESET
    }

    pub(in crate::sentry) fn broken_pipe(&mut self, quiet: bool) -> SyscallResult {
        if !quiet {
            let id = self.state.current().threads.current_id();
            let own = self.state.sender(self.state.processes.current_id());
            self.change().send(Some(id), SignalInfo::new(libc::SIGPIPE as u8, 0, own, 0));
        }
        Err(Errno::PIPE.into())
    }

    /// The error of a write to the host's output that failed there.
    pub(in crate::sentry) fn output_failed(&mut self) -> SyscallResult {
        match self.console.as_ref().and_then(|console| console.failure.errno()) {
            Some(errno) => Err(errno.into()),
            None => self.broken_pipe(false),
        }
    }
}
