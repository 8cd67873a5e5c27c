//! Pipes, event counters and timers: calls that make them, and how bytes move through them.

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::channels::End as ChannelEnd;
use super::clock_calls::{length_in, moment_after, nanoseconds, now_moment, passed};
use super::encode::Bytes;
use super::message_calls::Came;
use super::readiness::{IN, OUT};
use super::signals::Info;
use super::sockets::Stage;
use super::table::{Description, Open};
use super::threads::{Moment, On, Wait};
use super::{Channel, DONE, Outcome, Person, Served, copy_out};
use crate::platform::Process;

/// A timer that is read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Timer {
    pub(crate) at: Option<Moment>,
    pub(crate) every: u64,
    pub(crate) clock: u64,
}

impl Timer {
    /// How often it has run out since it was read.
    pub(crate) fn expired(&self) -> u64 {
        let now = now_moment();
        match self.at {
            Some(at) if at <= now && self.every > 0 => (now - at) / self.every + 1,
            Some(at) if at <= now => 1,
            _ => 0,
        }
    }

    fn take(&mut self) -> u64 {
        let expired = self.expired();
        if expired > 0 {
            let next = |at: Moment| at.saturating_add(expired.saturating_mul(self.every));
            self.at = self.at.filter(|_| self.every > 0).map(next);
        }
        expired
    }

    fn left(&self) -> u64 {
        self.at.map_or(0, |at| at.saturating_sub(now_moment()).max(1))
    }
}

impl Person {
    pub(super) fn pipe(&mut self, process: &mut Process, to: u64, flags: u64) -> Served {
        let flags = flags as i32;
        if flags & !(libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_DIRECT) != 0 {
            return Err(Errno::INVAL.into());
        }
        let close = flags & libc::O_CLOEXEC != 0;
        let kept = flags & libc::O_NONBLOCK;
        let state = self.change();
        let channel = state.channels.add().ok_or(Errno::MFILE)?;
        let end = |writes: bool| {
            Description::new(Open::Pipe { channel, writes }, kept | i32::from(writes))
        };
        let numbers = state.add_pair(end(false), end(true), close)?;
        copy_out(process, to, &numbers)?;
        Ok(DONE)
    }

    /// How much a pipe holds, which may be changed.
    pub(super) fn pipe_size(&mut self, descriptor: u64, new: Option<u64>) -> Served {
        let ends = self.state.table.get(descriptor)?.open.ends();
        let &(channel, _) = ends.first().ok_or(Errno::BADF)?;
        let size = match new {
            Some(bytes) => self.change().channels.resize(channel, bytes)?,
            None => self.state.channels.get(channel).ok_or(Errno::BADF)?.capacity(),
        };
        Ok(Outcome::Value(size as u64))
    }

    pub(super) fn event(&mut self, count: u64, flags: u64) -> Served {
        let flags = flags as i32;
        let known = libc::EFD_CLOEXEC | libc::EFD_NONBLOCK | libc::EFD_SEMAPHORE;
        if flags & !known != 0 {
            return Err(Errno::INVAL.into());
        }
        let semaphore = flags & libc::EFD_SEMAPHORE != 0;
        let count = count & u64::from(u32::MAX);
        self.add(
            Open::Event { count, semaphore, edges: 0 },
            flags & !libc::EFD_SEMAPHORE | libc::O_RDWR,
        )
    }

    pub(super) fn timer(&mut self, clock: u64, flags: u64) -> Served {
        if flags as i32 & !(libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) != 0 {
            return Err(Errno::INVAL.into());
        }
        moment_after(clock, std::time::Duration::ZERO, false)?;
        self.add(Open::Timer(Timer { clock, ..Timer::default() }), flags as i32 | libc::O_RDWR)
    }

    pub(super) fn set_timer(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        flags: u64,
        new: u64,
        old: u64,
    ) -> Served {
        let Open::Timer(timer) = &self.state.table.get(descriptor)?.open else {
            return Err(Errno::INVAL.into());
        };
        let timer = timer.clone();
        let every = nanoseconds(length_in(process, new)?);
        let first = length_in(process, new.wrapping_add(16))?;
        let at = match first.is_zero() {
            true => None,
            false => Some(moment_after(timer.clock, first, flags & 1 != 0)?),
        };
        self.tell_timer(process, &timer, old)?;
        self.change().table.get_mut(descriptor)?.open =
            Open::Timer(Timer { at, every, clock: timer.clock });
        Ok(DONE)
    }

    pub(super) fn timer_left(&mut self, process: &mut Process, descriptor: u64, to: u64) -> Served {
        let Open::Timer(timer) = &self.state.table.get(descriptor)?.open else {
            return Err(Errno::INVAL.into());
        };
        self.tell_timer(process, timer, to)?;
        Ok(DONE)
    }

    fn tell_timer(&self, process: &mut Process, timer: &Timer, to: u64) -> Served<()> {
        if to == 0 {
            return Ok(());
        }
        let time = |bytes: Bytes, nanos: u64| {
            bytes.word(nanos / 1_000_000_000).word(nanos % 1_000_000_000)
        };
        copy_out(process, to, &time(time(Bytes::default(), timer.every), timer.left()).0)
    }

    /// A wait for `events` of what `descriptor` is open on; an error if it does not wait.
    pub(super) fn wait_for(&self, descriptor: u64, events: u16, done: u64) -> Served {
        let description = self.state.table.get(descriptor)?;
        if description.flags & libc::O_NONBLOCK as u32 != 0 {
            return if done > 0 { Ok(Outcome::Value(done)) } else { Err(Errno::AGAIN.into()) };
        }
        let until = self.limited(&description.open, events);
        if passed(until) {
            return if done > 0 { Ok(Outcome::Value(done)) } else { Err(Errno::AGAIN.into()) };
        }
        let on = On::Files(vec![(self.state.table.id(descriptor)?, events)]);
        Ok(Outcome::Wait(Wait { done, ..Wait::new(on, until) }))
    }

    /// Reads a pipe, a socket, a counter or a timer into pieces of memory; `stays` leaves the bytes there.
    pub(super) fn take(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
        stays: bool,
    ) -> Served {
        let (outcome, came) = self.take_with(process, descriptor, pieces, stays)?;
        if let Some(parcel) = came.parcel {
            // Who does not ask for descriptors gets none.
            self.change().drop_parcel(parcel);
        }
        Ok(outcome)
    }

    /// As [`Person::take`], with what came with the bytes.
    pub(super) fn take_with(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
        stays: bool,
    ) -> Served<(Outcome, Came)> {
        let alone = |outcome: Served| Ok((outcome?, Came::default()));
        let wanted: u64 = pieces.iter().map(|(_, len)| len).sum();
        let channel = match &self.state.table.get(descriptor)?.open {
            Open::Pipe { channel, writes: false } => *channel,
            Open::Fifo(fifo) if fifo.open.access.read => fifo.channel,
            Open::Pipe { .. } | Open::Fifo(_) => return Err(Errno::BADF.into()),
            Open::Socket(socket) => match &socket.stage {
                Stage::Connected { incoming: Some(incoming), .. } if socket.packets => {
                    let incoming = *incoming;
                    return self.take_packet(process, descriptor, incoming, pieces, stays);
                }
                Stage::Connected { incoming: Some(incoming), .. } => *incoming,
                Stage::Connected { incoming: None, .. } => return alone(Ok(DONE)),
                Stage::Datagrams { inbox, .. } => {
                    let inbox = *inbox;
                    return self.take_letter(process, descriptor, inbox, pieces, stays);
                }
                _ => return Err(Errno::NOTCONN.into()),
            },
            Open::Watches(_) => {
                return alone(self.read_events(process, descriptor, pieces, wanted));
            }
            Open::Terminal(_) => {
                return alone(self.take_typed(process, descriptor, pieces, wanted));
            }
            Open::Event { .. } | Open::Timer(_) => {
                return alone(self.take_count(process, descriptor, pieces, wanted));
            }
            Open::Signals(set) => {
                let set = *set;
                return alone(self.read_signals(process, descriptor, set, pieces));
            }
            _ => return Err(Errno::INVAL.into()),
        };
        if wanted == 0 {
            return alone(Ok(DONE));
        }
        let held = self.state.channels.get(channel).ok_or(Errno::IO)?;
        if held.is_empty() {
            return match held.writers {
                0 => alone(Ok(DONE)),
                _ => alone(self.wait_for(descriptor, IN, 0)),
            };
        }
        let bytes = held.peek(wanted.min(held.together() as u64) as usize);
        let mut rest = &bytes[..];
        for &(to, len) in pieces {
            let (now, later) = rest.split_at(rest.len().min(len as usize));
            copy_out(process, to, now)?;
            rest = later;
        }
        let mut came = Came::default();
        if !stays && let Some(channel) = self.change().channels.get_mut(channel) {
            came.parcel = channel.skip(bytes.len());
        }
        Ok((Outcome::Value(bytes.len() as u64), came))
    }

    fn take_count(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
        wanted: u64,
    ) -> Served {
        let &[(to, 8..), ..] = pieces else { return Err(Errno::INVAL.into()) };
        if wanted < 8 {
            return Err(Errno::INVAL.into());
        }
        let count = match &self.state.table.get(descriptor)?.open {
            Open::Event { count: 1.., semaphore: true, .. } => 1,
            Open::Event { count, .. } => *count,
            Open::Timer(timer) => timer.expired(),
            _ => 0,
        };
        if count == 0 {
            return self.wait_for(descriptor, IN, 0);
        }
        copy_out(process, to, &count.to_le_bytes())?;
        match &mut self.change().table.get_mut(descriptor)?.open {
            Open::Event { count: held, edges, .. } => {
                *held -= count;
                *edges += 1;
            }
            Open::Timer(timer) => drop(timer.take()),
            _ => {}
        }
        Ok(Outcome::Value(8))
    }

    /// Writes to a pipe, a socket or a counter.
    pub(super) fn pour(&mut self, descriptor: u64, bytes: &[u8], quiet: bool) -> Served {
        match &self.state.table.get(descriptor)?.open {
            Open::Socket(socket) if socket.is_for_datagrams() => {
                self.post_letter(descriptor, bytes, None, &[])
            }
            _ => self.pour_with(descriptor, bytes, quiet, &[]),
        }
    }

    /// As [`Person::pour`], but for datagrams; the first of the bytes that find room go with descriptors.
    pub(super) fn pour_with(
        &mut self,
        descriptor: u64,
        bytes: &[u8],
        quiet: bool,
        rights: &[u64],
    ) -> Served {
        let channel = match &self.state.table.get(descriptor)?.open {
            Open::Pipe { channel, writes: true } => *channel,
            Open::Fifo(fifo) if fifo.open.access.write => fifo.channel,
            Open::Socket(socket) => match &socket.stage {
                Stage::Connected { outgoing: Some(outgoing), .. } if socket.packets => {
                    let outgoing = *outgoing;
                    return self.put_packet(descriptor, outgoing, bytes, quiet, rights);
                }
                Stage::Connected { outgoing: Some(outgoing), .. } => *outgoing,
                Stage::Connected { outgoing: None, .. } => return self.broken_pipe(quiet),
                _ => return Err(Errno::NOTCONN.into()),
            },
            Open::Terminal(_) => return self.put_shown(descriptor, bytes),
            Open::Event { count, .. } => {
                let added: [u8; 8] =
                    bytes.get(..8).and_then(|b| b.try_into().ok()).ok_or(Errno::INVAL)?;
                let new = match u64::from_le_bytes(added) {
                    u64::MAX => return Err(Errno::INVAL.into()),
                    added => count.checked_add(added).filter(|new| *new < u64::MAX),
                };
                let Some(new) = new else { return self.wait_for(descriptor, OUT, 0) };
                if let Open::Event { count, edges, .. } =
                    &mut self.change().table.get_mut(descriptor)?.open
                {
                    *count = new;
                    *edges += 1;
                }
                return Ok(Outcome::Value(8));
            }
            Open::Process(_) | Open::Signals(_) => return Err(Errno::INVAL.into()),
            _ => return Err(Errno::BADF.into()),
        };
        let held = self.state.channels.get(channel).ok_or(Errno::IO)?;
        if held.readers == 0 {
            return self.broken_pipe(quiet);
        }
        if held.end == ChannelEnd::Listens {
            let from = self.writer(Channel::Output);
            return Ok(match self.streams.put_out(from, bytes, self.output_limit) {
                Ok(()) => Outcome::Value(bytes.len() as u64),
                Err(end) => Outcome::End(end),
            });
        }
        // What goes on goes on behind what is done.
        let done = self.resumed.as_ref().map_or(0, |wait| wait.done) as usize;
        let rest = &bytes[done.min(bytes.len())..];
        // What fits into the least room is written as a whole or not yet.
        let whole = bytes.len() <= 4096 && held.room() < rest.len();
        let put = if whole || held.room() == 0 || rest.is_empty() {
            0
        } else {
            let state = self.change();
            let parcel = match rights {
                [_, ..] if done == 0 => Some(state.table.carry(rights)?),
                _ => None,
            };
            state.channels.get_mut(channel).map_or(0, |channel| {
                let put = channel.push(rest);
                if let Some(parcel) = parcel {
                    channel.attach(parcel, put);
                }
                put
            })
        };
        let done = (done + put) as u64;
        if done == bytes.len() as u64 {
            return Ok(Outcome::Value(done));
        }
        self.wait_for(descriptor, OUT, done)
    }

    pub(super) fn broken_pipe(&mut self, quiet: bool) -> Served {
        if !quiet {
            let id = self.state.threads.current_id();
            let own = u64::from(self.state.family.own.id);
            self.change().send(Some(id), Info::new(libc::SIGPIPE as u8, 0, own, 0));
        }
        Err(Errno::PIPE.into())
    }
}
