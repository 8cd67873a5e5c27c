//! Options of sockets: options that were set are returned, and those that only the system knows
//! have its values. Time limits of waits hold, and the buffers of local sockets have the size that
//! was set.
//!
//! Promises: their number and their sizes are limited. A frozen one is checked before it counts.

mod calls;

use std::collections::BTreeMap;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::channels::MAX_SOCKET_BYTES;
use crate::sentry::kernel::poll_events::IN;
use crate::sentry::net::option_rules::first_value;
use crate::sentry::net::sockets::{Socket, SocketState};

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

/// Options that were set, by level and name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SocketOptions(pub(super) BTreeMap<(i32, i32), Vec<u8>>);

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
