//! Options of sockets: options that were set are returned, and those that only the system knows have its values. Time
//! limits of waits hold; all other options have no effect here, since there is no network for them to affect.
//!
//! Promises: their number and their sizes are limited. A frozen one is checked before it counts.

use std::collections::BTreeMap;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::platform::Process;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::readiness::IN;
use crate::sentry::net::sockets::{Socket, SocketState};
use crate::sentry::{Sentry, SyscallResult, ZERO, copy_in, copy_out};

/// Options that a socket may have set, and bytes of each.
const OPTIONS: usize = 64;
const MAX_OPTION_SIZE: usize = 64;
/// Minimum and maximum sizes of buffers, which Linux doubles.
const BUFFERS: std::ops::RangeInclusive<u32> = 2304..=425_984;

/// Options that were set, by level and name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SocketOptions(BTreeMap<(i32, i32), Vec<u8>>);

impl SocketOptions {
    pub(in crate::sentry) fn is_sound(&self) -> bool {
        self.0.len() <= OPTIONS && self.0.values().all(|value| value.len() <= MAX_OPTION_SIZE)
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
const READ_ONLY: [i32; 6] = [
    libc::SO_TYPE,
    libc::SO_ERROR,
    libc::SO_DOMAIN,
    libc::SO_PROTOCOL,
    libc::SO_ACCEPTCONN,
    libc::SO_PEERCRED,
];
/// Options that are on or off.
const SWITCHES: [i32; 9] = [
    libc::SO_DEBUG,
    libc::SO_REUSEADDR,
    libc::SO_REUSEPORT,
    libc::SO_KEEPALIVE,
    libc::SO_BROADCAST,
    libc::SO_DONTROUTE,
    libc::SO_OOBINLINE,
    libc::SO_PASSCRED,
    libc::SO_TIMESTAMP,
];

/// Refuses options of unknown protocols.
fn check_level(socket: &Socket, level: u64) -> Result<(), Errno> {
    let transport = if socket.is_for_datagrams() { libc::IPPROTO_UDP } else { libc::IPPROTO_TCP };
    let known = [libc::SOL_SOCKET, libc::IPPROTO_IP, transport, libc::IPPROTO_IPV6];
    match (socket.own.is_internet(), level as i32) {
        (_, libc::SOL_SOCKET) => Ok(()),
        (true, level) if known.contains(&level) => Ok(()),
        (true, _) => Err(Errno::NOPROTOOPT),
        (false, _) => Err(Errno::OPNOTSUPP),
    }
}

/// An option as it is kept.
fn encode_option(level: i32, name: i32, value: &[u8]) -> Result<Vec<u8>, Errno> {
    let int = value.get(..4).map(|v| u32::from_le_bytes([v[0], v[1], v[2], v[3]]));
    let own = level == libc::SOL_SOCKET;
    match name {
        libc::SO_RCVTIMEO | libc::SO_SNDTIMEO if own => {
            let value = value.get(..16).ok_or(Errno::INVAL)?;
            let micros = u64::from_le_bytes(value[8..].try_into().map_err(|_| Errno::INVAL)?);
            if micros >= 1_000_000 {
                return Err(Errno::DOM);
            }
            Ok(value.to_vec())
        }
        libc::SO_LINGER if own => Ok(value.get(..8).ok_or(Errno::INVAL)?.to_vec()),
        libc::SO_SNDBUF | libc::SO_RCVBUF if own => {
            let wanted = int.ok_or(Errno::INVAL)?.min(*BUFFERS.end() / 2) * 2;
            Ok(wanted.max(*BUFFERS.start()).to_le_bytes().to_vec())
        }
        name if own && SWITCHES.contains(&name)
            || level == libc::IPPROTO_TCP && name == libc::TCP_NODELAY =>
        {
            Ok(u32::from(int.ok_or(Errno::INVAL)? != 0).to_le_bytes().to_vec())
        }
        _ => Ok(value[..value.len().min(MAX_OPTION_SIZE)].to_vec()),
    }
}

/// `struct tcp_info` with only the state.
fn tcp_info(socket: &Socket) -> Vec<u8> {
    const LEN: usize = 104;
    let state = match &socket.stage {
        SocketState::Connected { incoming: Some(_), outgoing: Some(_) } => 1,
        SocketState::Connected { outgoing: None, .. } => 5,
        SocketState::Connected { .. } => 8,
        SocketState::Reaching { .. } => 2,
        SocketState::Listening(_) => 10,
        SocketState::New | SocketState::Refused(_) | SocketState::Datagrams { .. } => 7,
    };
    let mut bytes = vec![0; LEN];
    bytes[0] = state;
    bytes
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
        check_level(self.socket_of(a[0])?, a[1])?;
        if level == libc::SOL_SOCKET && READ_ONLY.contains(&name) {
            return Err(Errno::NOPROTOOPT.into());
        }
        let value = encode_option(level, name, &value)?;
        let options = &mut self.socket_mut(a[0])?.options.0;
        if options.len() >= OPTIONS && !options.contains_key(&(level, name)) {
            return Err(Errno::NOBUFS.into());
        }
        options.insert((level, name), value);
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
        check_level(socket, a[1])?;
        let int = |value: i32| value.to_le_bytes().to_vec();
        let (level, name) = (a[1] as i32, a[2] as i32);
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
                let user = if mate == 0 { u32::MAX } else { crate::sentry::USER as u32 };
                StructBuilder::default().int(mate).int(user).int(user).0
            }
            _ if set.is_some() => set.unwrap_or_default(),
            (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_RCVBUF) => {
                // As in Linux, including its bookkeeping bytes.
                int(2 * crate::sentry::kernel::channels::CAPACITY as i32)
            }
            (libc::SOL_SOCKET, libc::SO_LINGER) => vec![0; 8],
            (libc::IPPROTO_IP, libc::IP_OPTIONS) => Vec::new(),
            (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => b"cubic\0".to_vec(),
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => int(536),
            (libc::IPPROTO_TCP, libc::TCP_INFO) => tcp_info(socket),
            (libc::SOL_SOCKET, libc::SO_PEERSEC) => return Err(Errno::NOPROTOOPT.into()),
            (libc::SOL_SOCKET, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO) => vec![0; 16],
            (libc::SOL_SOCKET, libc::SO_RCVLOWAT | libc::SO_SNDLOWAT) => int(1),
            (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS) => {
                int(64)
            }
            _ => int(0),
        };
        let room = copy_in(process, a[4], 4)?;
        let room = i32::from_le_bytes([room[0], room[1], room[2], room[3]]);
        if room < 0 {
            return Err(Errno::INVAL.into());
        }
        let told = &value[..value.len().min(room as usize)];
        copy_out(process, a[3], told)?;
        copy_out(process, a[4], &(told.len() as u32).to_le_bytes())?;
        Ok(ZERO)
    }

    /// When a wait for `events` of a description ends by its socket's options: as they were when it began, or from
    /// now on.
    pub(in crate::sentry) fn limited(&self, open: &FileObject, events: u16) -> Option<u64> {
        let FileObject::Socket(socket) = open else { return None };
        let length = socket.options.patience(events)?;
        let begun = self.resumed.as_ref().and_then(|wait| wait.until);
        Some(begun.unwrap_or_else(|| self.now().saturating_add(length)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_kept_as_linux_keeps_them_and_bounded() {
        let int = |value: u32| value.to_le_bytes();
        let own = libc::SOL_SOCKET;
        assert_eq!(encode_option(own, libc::SO_REUSEADDR, &int(7)).unwrap(), int(1));
        assert_eq!(encode_option(own, libc::SO_SNDBUF, &int(100_000)).unwrap(), int(200_000));
        assert_eq!(encode_option(own, libc::SO_RCVBUF, &int(u32::MAX)).unwrap(), int(425_984));
        assert_eq!(encode_option(own, libc::SO_RCVBUF, &int(0)).unwrap(), int(2304));
        assert_eq!(encode_option(own, libc::SO_RCVTIMEO, &[0; 15]), Err(Errno::INVAL));
        assert_eq!(encode_option(own, libc::SO_RCVTIMEO, &[0xff; 16]), Err(Errno::DOM));
        assert_eq!(encode_option(libc::IPPROTO_IP, 1, &[7; 99]).unwrap().len(), MAX_OPTION_SIZE);
        let mut options = SocketOptions::default();
        (0..OPTIONS as i32)
            .for_each(|name| drop(options.0.insert((0, name), vec![0; MAX_OPTION_SIZE])));
        assert!(options.is_sound());
        options.0.insert((1, 0), Vec::new());
        assert!(!options.is_sound());
    }
}
