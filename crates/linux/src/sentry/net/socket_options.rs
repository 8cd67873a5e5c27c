//! Options of sockets: options that were set are returned, and those that only the system knows
//! have its values. Time limits of waits hold, and the buffers of local sockets have the size that
//! was set.
//!
//! Promises: their number and their sizes are limited. A frozen one is checked before it counts.

use std::collections::BTreeMap;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::platform::Process;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::channels::MAX_SOCKET_BYTES;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::poll_events::IN;
use crate::sentry::net::option_rules::{encode_option, first_value};
use crate::sentry::net::sockets::{NETLINK, NETLINK_BUFFER, Socket, SocketState};
use crate::sentry::{Kernel, Sentry, SyscallResult, ZERO, copy_in, copy_out};

/// Time limits with 64-bit seconds, which the older ones have here as well.
const SO_RCVTIMEO_NEW: i32 = 66;
const SO_SNDTIMEO_NEW: i32 = 67;
/// Options that a socket may have set, and bytes of each.
pub(in crate::sentry) const OPTIONS: usize = 64;
pub(in crate::sentry) const MAX_OPTION_SIZE: usize = 64;
/// Minimum and maximum sizes of buffers, which Linux doubles.
const MIN_SEND_BUFFER: u32 = 4608;
const MIN_RECEIVE_BUFFER: u32 = 2304;
const MAX_BUFFER: u32 = 2 * MAX_SOCKET_BYTES as u32;
/// Bytes of a packet over loopback, and of its content. A connection that is not made assumes
/// `FIRST_SEGMENT`.
const LOOPBACK_PACKET: u32 = 65_535;
const LOOPBACK_SEGMENT: u32 = 65_483;
const FIRST_SEGMENT: u32 = 536;
/// Segment sizes that a program may ask for.
const SEGMENTS: std::ops::RangeInclusive<u32> = 88..=32_767;

/// Options that were set, by level and name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SocketOptions(BTreeMap<(i32, i32), Vec<u8>>);

impl SocketOptions {
    pub(in crate::sentry) fn is_sound(&self) -> bool {
        self.0.len() <= OPTIONS && self.0.values().all(|value| value.len() <= MAX_OPTION_SIZE)
    }

    /// An option that is a number.
    pub(in crate::sentry) fn number(&self, level: i32, name: i32) -> Option<i32> {
        let value =
            self.get(level, name).map(<[u8]>::to_vec).or_else(|| first_value(level, name))?;
        Some(i32::from_le_bytes(value.get(..4)?.try_into().ok()?))
    }

    /// Bytes that the sender's buffer has room for, if that was set. Half of it is for bookkeeping,
    /// as in Linux.
    pub(in crate::sentry) fn send_room(&self) -> Option<usize> {
        let value = self.get(libc::SOL_SOCKET, libc::SO_SNDBUF)?.get(..4)?;
        Some(u32::from_le_bytes(value.try_into().ok()?) as usize / 2)
    }

    fn get(&self, level: i32, name: i32) -> Option<&[u8]> {
        self.0.get(&(level, name)).map(Vec::as_slice)
    }

    /// Whether an option is on.
    pub(in crate::sentry) fn is_on(&self, level: i32, name: i32) -> bool {
        self.get(level, name).is_some_and(|value| value.iter().any(|byte| *byte != 0))
    }

    /// Whether a close breaks the connection off (`SO_LINGER` of no seconds).
    pub(in crate::sentry) fn breaks_off(&self) -> bool {
        let value = self.get(libc::SOL_SOCKET, libc::SO_LINGER);
        value.is_some_and(|value| value.len() == 8 && value[0] != 0 && value[4..] == [0; 4])
    }

    /// Nanoseconds that a wait for `events` lasts at most, if that was set.
    fn patience(&self, events: u16) -> Option<u64> {
        let name = if events & IN != 0 { libc::SO_RCVTIMEO } else { libc::SO_SNDTIMEO };
        let value = self.get(libc::SOL_SOCKET, name)?.get(..16)?;
        let word = |at: usize| u64::from_le_bytes(value[at..at + 8].try_into().expect("8 bytes"));
        if word(0) > i64::MAX as u64 {
            return Some(0);
        }
        let length =
            word(0).saturating_mul(1_000_000_000).saturating_add(word(8).saturating_mul(1000));
        (length > 0).then_some(length)
    }
}

/// Read-only options.
const READ_ONLY: [i32; 8] = [
    libc::SO_TYPE,
    libc::SO_ERROR,
    libc::SO_DOMAIN,
    libc::SO_PROTOCOL,
    libc::SO_ACCEPTCONN,
    libc::SO_PEERCRED,
    libc::SO_PEERSEC,
    libc::SO_COOKIE,
];

/// Whether a socket has options of a level. The error differs between calls that set one and calls
/// that get one.
fn check_level(socket: &Socket, level: i32, sets: bool) -> Result<(), Errno> {
    let transport = if socket.is_for_datagrams() { libc::IPPROTO_UDP } else { libc::IPPROTO_TCP };
    let newer = i32::from(socket.family) == libc::AF_INET6;
    let known =
        level == libc::IPPROTO_IP || level == transport || level == libc::IPPROTO_IPV6 && newer;
    match (socket.own.is_internet(), level) {
        (_, libc::SOL_SOCKET) => Ok(()),
        (true, _) if known => Ok(()),
        (true, _) if sets => Err(Errno::NOPROTOOPT),
        _ => Err(Errno::OPNOTSUPP),
    }
}

/// The size of a buffer as it is kept: twice the given one, within bounds.
fn encode_size(name: i32, value: &[u8]) -> Result<Vec<u8>, Errno> {
    let given = value.get(..4).ok_or(Errno::INVAL)?;
    let given = u32::from_le_bytes(given.try_into().map_err(|_| Errno::INVAL)?);
    let least = if name == libc::SO_SNDBUF { MIN_SEND_BUFFER } else { MIN_RECEIVE_BUFFER };
    let kept = (given.min(MAX_BUFFER / 2) * 2).max(least);
    Ok(kept.to_le_bytes().to_vec())
}

/// Bytes in the directions of a connection so far: received and sent.
type Traffic = [u64; 2];

/// `struct tcp_info` of a connection without delay or loss. `ended` is whether its peer sends no
/// more.
fn tcp_info(socket: &Socket, [received, sent]: Traffic, ended: bool) -> Vec<u8> {
    // Microseconds until a packet is repeated, and bytes of a packet.
    const REPEAT: u32 = 204_000;
    const WINDOW: u32 = 10;
    let (segment, path) = (LOOPBACK_SEGMENT, LOOPBACK_PACKET);
    let state = match &socket.stage {
        SocketState::Connected { outgoing: Some(_), .. } if ended => 8,
        SocketState::Connected { outgoing: Some(_), .. } => 1,
        SocketState::Connected { .. } if ended => 7,
        SocketState::Connected { .. } => 5,
        SocketState::Reaching { .. } => 2,
        SocketState::Listening(_) => 10,
        SocketState::New | SocketState::Refused(_) | SocketState::Datagrams { .. } => 7,
    };
    let head = StructBuilder::default().int(state).int(0);
    // From `tcpi_rto` to `tcpi_total_retrans`.
    let words = [
        REPEAT,
        40_000,
        segment,
        segment,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        path,
        segment,
        30,
        15,
        i32::MAX as u32,
        WINDOW,
        segment,
        3,
        0,
        path,
        0,
    ];
    let words = words.into_iter().fold(head, StructBuilder::int);
    let rates = words.word(0).word(u64::MAX).word(sent).word(received);
    let packets = |bytes: u64| bytes.div_ceil(u64::from(segment)).min(u64::from(u32::MAX)) as u32;
    let counts = [packets(sent), packets(received), 0, 15, packets(received), packets(sent)];
    let counts = counts.into_iter().fold(rates, StructBuilder::int);
    counts.zeros(32).int(packets(sent)).int(0).word(sent).zeros(40).0
}

impl Sentry {
    pub(in crate::sentry) fn sys_setsockopt(
        &mut self,
        process: &Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        self.socket_of(a[0])?;
        let (level, name, len) = (a[1] as i32, a[2] as i32, a[4] as i32);
        if len <= 0 && level == libc::SOL_SOCKET {
            return Err(Errno::INVAL.into());
        }
        let value = copy_in(process, a[3], (len.max(0) as usize).min(MAX_OPTION_SIZE))?;
        let socket = self.socket_of(a[0])?;
        check_level(socket, level, true)?;
        let name = match name {
            SO_RCVTIMEO_NEW if level == libc::SOL_SOCKET => libc::SO_RCVTIMEO,
            SO_SNDTIMEO_NEW if level == libc::SOL_SOCKET => libc::SO_SNDTIMEO,
            name => name,
        };
        if level == libc::SOL_SOCKET && READ_ONLY.contains(&name) {
            return Err(Errno::NOPROTOOPT.into());
        }
        if (level, name) == (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) && socket.own.port() != 0 {
            return Err(Errno::INVAL.into());
        }
        let value = match (level, name) {
            (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_RCVBUF) => encode_size(name, &value)?,
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => {
                let given = value.get(..4).ok_or(Errno::INVAL)?;
                let given = u32::from_le_bytes(given.try_into().map_err(|_| Errno::INVAL)?);
                if given != 0 && !SEGMENTS.contains(&given) {
                    return Err(Errno::INVAL.into());
                }
                given.to_le_bytes().to_vec()
            }
            _ => {
                let open = matches!(
                    socket.stage,
                    SocketState::Connected { .. } | SocketState::Listening(_)
                );
                encode_option((level, name), &value, (!socket.is_for_datagrams(), open))?
            }
        };
        let options = &mut self.socket_mut(a[0])?.options.0;
        if options.len() >= OPTIONS && !options.contains_key(&(level, name)) {
            return Err(Errno::NOBUFS.into());
        }
        options.insert((level, name), value);
        let description = self.state.table.id(a[0])?;
        self.change().heed_options(description);
        Ok(ZERO)
    }

    /// The pending error, which is cleared.
    fn take_error(&mut self, descriptor: u64) -> SyscallResult<i32> {
        if let SocketState::Refused(error) = self.socket_of(descriptor)?.stage {
            self.socket_mut(descriptor)?.stage = SocketState::New;
            return Ok(error);
        }
        if let SocketState::Connected { incoming: Some(incoming), .. } =
            self.socket_of(descriptor)?.stage
            && self.state.channels.get(incoming).is_some_and(|channel| channel.reset)
        {
            return Ok(self.take_reset(incoming).raw_os_error());
        }
        Ok(if self.take_refusal(descriptor)? { libc::ECONNREFUSED } else { 0 })
    }

    pub(in crate::sentry) fn sys_getsockopt(
        &mut self,
        process: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        let socket = self.socket_of(a[0])?;
        let int = |value: i32| value.to_le_bytes().to_vec();
        let (level, name) = (a[1] as i32, a[2] as i32);
        check_level(socket, level, false)?;
        let name = match name {
            SO_RCVTIMEO_NEW if level == libc::SOL_SOCKET => libc::SO_RCVTIMEO,
            SO_SNDTIMEO_NEW if level == libc::SOL_SOCKET => libc::SO_SNDTIMEO,
            name => name,
        };
        let set = socket.options.get(level, name).map(<[u8]>::to_vec);
        let value = match (level, name) {
            (libc::SOL_SOCKET, libc::SO_TYPE) => int(match () {
                () if socket.is_for_datagrams() => libc::SOCK_DGRAM,
                () if socket.packets => libc::SOCK_SEQPACKET,
                () => libc::SOCK_STREAM,
            }),
            (libc::SOL_SOCKET, libc::SO_ERROR) => int(self.take_error(a[0])?),
            (libc::SOL_SOCKET, libc::SO_DOMAIN) => int(socket.family.into()),
            (libc::SOL_SOCKET, libc::SO_PROTOCOL) => int(match socket.own.is_internet() {
                true if socket.is_for_datagrams() => libc::IPPROTO_UDP,
                true => libc::IPPROTO_TCP,
                false => 0,
            }),
            (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => {
                int(matches!(socket.stage, SocketState::Listening(_)).into())
            }
            (libc::SOL_SOCKET, libc::SO_PEERCRED) => {
                // The peer of an IP connection is unknown.
                let mate = if socket.own.is_internet() { 0 } else { socket.mate };
                let (user, group) = match mate {
                    0 => (u32::MAX, u32::MAX),
                    _ => (self.state.user_id(), self.state.group_id()),
                };
                StructBuilder::default().int(mate).int(user).int(group).0
            }
            (libc::SOL_SOCKET, libc::SO_COOKIE) => {
                (self.state.table.id(a[0])? + 1).to_le_bytes().to_vec()
            }
            (libc::IPPROTO_TCP, libc::TCP_INFO) => {
                let ended = match socket.stage {
                    SocketState::Connected { incoming: Some(id), .. } => {
                        self.state.channels.get(id).is_none_or(|channel| channel.writers == 0)
                    }
                    _ => false,
                };
                tcp_info(socket, self.traffic(socket), ended)
            }
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) if socket.is_connected() => {
                int(LOOPBACK_SEGMENT as i32)
            }
            (libc::IPPROTO_IP, libc::IP_MTU) | (libc::IPPROTO_IPV6, libc::IPV6_MTU) => {
                if !socket.is_connected() && socket.peer.0.is_empty() {
                    return Err(Errno::NOTCONN.into());
                }
                int(LOOPBACK_PACKET as i32 + 1)
            }
            _ if set.is_some() => set.unwrap_or_default(),
            (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_RCVBUF)
                if i32::from(socket.family) == NETLINK =>
            {
                int(NETLINK_BUFFER as i32)
            }
            (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_RCVBUF) => {
                // As in Linux, including its bookkeeping bytes.
                int(2 * crate::sentry::kernel::channels::CAPACITY as i32)
            }
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => int(FIRST_SEGMENT as i32),
            _ => first_value(level, name).ok_or(Errno::NOPROTOOPT)?,
        };
        let room = copy_in(process, a[4], 4)?;
        let room = i32::from_le_bytes([room[0], room[1], room[2], room[3]]);
        if room < 0 {
            return Err(Errno::INVAL.into());
        }
        // A small number of IP fits a byte.
        let byte = level == libc::IPPROTO_IP
            && (1..4).contains(&room)
            && value.len() == 4
            && value[1..] == [0; 3];
        let reply = &value[..value.len().min(if byte { 1 } else { room as usize })];
        copy_out(process, a[3], reply)?;
        copy_out(process, a[4], &(reply.len() as u32).to_le_bytes())?;
        Ok(ZERO)
    }

    /// Bytes that a connection has received and sent.
    fn traffic(&self, socket: &Socket) -> Traffic {
        let SocketState::Connected { incoming, outgoing } = socket.stage else { return [0; 2] };
        [incoming, outgoing].map(|id| {
            id.and_then(|id| self.state.channels.get(id)).map_or(0, |channel| channel.passed())
        })
    }

    /// When a wait for `events` of a description ends by its socket's options: as they were when it
    /// began, or from now on.
    pub(in crate::sentry) fn limited(&self, open: &FileObject, events: u16) -> Option<u64> {
        let FileObject::Socket(socket) = open else { return None };
        let length = socket.options.patience(events)?;
        let begun = self.resumed.as_ref().and_then(|wait| wait.until);
        Some(begun.unwrap_or_else(|| self.now().saturating_add(length)))
    }
}

impl Kernel {
    /// Puts options of a local socket into effect that concern its channels: the size of its
    /// sender's buffer, and whether it wants credentials.
    pub(in crate::sentry) fn heed_options(&mut self, description: u64) {
        let Some(FileObject::Socket(socket)) =
            self.table.description(description).map(|description| &description.open)
        else {
            return;
        };
        if socket.own.is_internet() {
            let size = socket.options.number(libc::SOL_SOCKET, libc::SO_RCVBUF);
            if let (SocketState::Datagrams { inbox, .. }, Some(size)) = (&socket.stage, size) {
                self.channels.set_capacity(*inbox, size as usize / 2);
            }
            return;
        }
        let named = socket.options.is_on(libc::SOL_SOCKET, libc::SO_PASSCRED);
        let room = socket.options.send_room();
        let (incoming, outgoing) = match &socket.stage {
            SocketState::Connected { incoming, outgoing } => (*incoming, *outgoing),
            SocketState::Datagrams { inbox, mate, .. } => {
                let other = mate.and_then(|mate| self.table.description(mate));
                let other = match other.map(|other| &other.open) {
                    Some(FileObject::Socket(Socket {
                        stage: SocketState::Datagrams { inbox, .. },
                        ..
                    })) => Some(*inbox),
                    _ => None,
                };
                (Some(*inbox), other)
            }
            _ => return,
        };
        if let Some(channel) = incoming.and_then(|id| self.channels.get_mut(id)) {
            channel.named = named;
        }
        if let (Some(id), Some(room)) = (outgoing, room) {
            self.channels.set_capacity(id, room);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_kept_as_linux_keeps_them_and_bounded() {
        let size = |name, value: u32| {
            let kept = encode_size(name, &value.to_le_bytes()).unwrap();
            u32::from_le_bytes(kept.try_into().unwrap())
        };
        assert_eq!(size(libc::SO_SNDBUF, 100_000), 200_000);
        assert_eq!(size(libc::SO_RCVBUF, u32::MAX), MAX_BUFFER);
        assert_eq!((size(libc::SO_RCVBUF, 0), size(libc::SO_SNDBUF, 0)), (2304, 4608));
        assert_eq!(tcp_info(&Socket::new(libc::AF_INET as u16), [0; 2], false).len(), 248);
        let mut options = SocketOptions::default();
        (0..OPTIONS as i32)
            .for_each(|name| drop(options.0.insert((0, name), vec![0; MAX_OPTION_SIZE])));
        assert!(options.is_sound());
        options.0.insert((1, 0), Vec::new());
        assert!(!options.is_sound());
    }
}
