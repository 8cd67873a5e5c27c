//! Options of sockets that a guest may set and get: their values before they are set, and the
//! values that Linux takes.
//!
//! Promises: an option that is not here is an error (`ENOPROTOOPT`), and so is a value that Linux
//! refuses. Options in this list are returned as they were set; few of them have an effect, for
//! there is no network that they could affect.

use rustix::io::Errno;

/// The values that an option takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AcceptedValues {
    /// 0 or not 0.
    Switch,
    /// Any number.
    Any,
    /// A number in this range; the error for others.
    Within(i32, i32, Errno),
    /// Only 0: the error for a caller without privileges, or for a device that does not exist.
    Off(Errno),
    /// None: it is only returned.
    Fixed,
}

/// An option that is a number.
struct OptionRule {
    level: i32,
    name: i32,
    accepted: AcceptedValues,
    /// Its value before it is set.
    first: i32,
}

const fn rule(level: i32, name: i32, accepted: AcceptedValues, first: i32) -> OptionRule {
    OptionRule { level, name, accepted, first }
}

const fn within(least: i32, most: i32) -> AcceptedValues {
    AcceptedValues::Within(least, most, Errno::INVAL)
}

const SOCKET: i32 = libc::SOL_SOCKET;
const TCP: i32 = libc::IPPROTO_TCP;
const UDP: i32 = libc::IPPROTO_UDP;
const IP: i32 = libc::IPPROTO_IP;
const IPV6: i32 = libc::IPPROTO_IPV6;
use AcceptedValues::{Any, Fixed, Off, Switch};

// Names that the C library's bindings lack.
const SO_LOCK_FILTER: i32 = 44;
const SO_MAX_PACING_RATE: i32 = 47;
const SO_INCOMING_CPU: i32 = 49;
const SO_ZEROCOPY: i32 = 60;
const SO_BUF_LOCK: i32 = 72;
const SO_RCVMARK: i32 = 75;
const IP_RECVFRAGSIZE: i32 = 25;
const IPV6_MULTICAST_ALL: i32 = 29;
pub(super) const IPV6_RECVORIGDSTADDR: i32 = 74;
const IPV6_AUTOFLOWLABEL: i32 = 70;
const UDP_NO_CHECK6_TX: i32 = 101;
const UDP_NO_CHECK6_RX: i32 = 102;

/// Longest keep-alive interval in seconds, and the most probes.
const MAX_KEEPALIVE: i32 = 32767;
const MAX_PROBES: i32 = 127;
/// Seconds of `TCP_LINGER2` before it is set, and the most.
const FIN_TIMEOUT: i32 = 60;
const MAX_FIN_TIMEOUT: i32 = 120;
/// Smallest buffer of a receiver.
const MIN_RECEIVE_BUFFER: i32 = 2304;
/// Longest name of a congestion control, with its end, and the known ones.
const CONGESTION_LEN: usize = 16;
const CONGESTION_CONTROLS: [&[u8]; 2] = [b"cubic", b"reno"];
/// The only device.
const DEVICE: &[u8] = b"lo";

const RULES: [OptionRule; 88] = [
    rule(SOCKET, libc::SO_DEBUG, Off(Errno::ACCESS), 0),
    rule(SOCKET, libc::SO_REUSEADDR, Switch, 0),
    rule(SOCKET, libc::SO_REUSEPORT, Switch, 0),
    rule(SOCKET, libc::SO_KEEPALIVE, Switch, 0),
    rule(SOCKET, libc::SO_BROADCAST, Switch, 0),
    rule(SOCKET, libc::SO_DONTROUTE, Switch, 0),
    rule(SOCKET, libc::SO_OOBINLINE, Switch, 0),
    rule(SOCKET, libc::SO_PASSCRED, Switch, 0),
    rule(SOCKET, libc::SO_PASSSEC, Switch, 0),
    rule(SOCKET, libc::SO_NO_CHECK, Switch, 0),
    rule(SOCKET, libc::SO_RXQ_OVFL, Switch, 0),
    rule(SOCKET, SO_RCVMARK, Switch, 0),
    rule(SOCKET, libc::SO_BSDCOMPAT, Any, 0),
    rule(SOCKET, libc::SO_PRIORITY, AcceptedValues::Within(0, 6, Errno::PERM), 0),
    rule(SOCKET, libc::SO_RCVLOWAT, Any, 1),
    rule(SOCKET, libc::SO_SNDLOWAT, Fixed, 1),
    rule(SOCKET, libc::SO_TIMESTAMP, Switch, 0),
    rule(SOCKET, libc::SO_TIMESTAMPNS, Switch, 0),
    rule(SOCKET, libc::SO_TIMESTAMPING, Off(Errno::OPNOTSUPP), 0),
    rule(SOCKET, libc::SO_MARK, Off(Errno::PERM), 0),
    rule(SOCKET, libc::SO_PEEK_OFF, Off(Errno::OPNOTSUPP), -1),
    rule(SOCKET, SO_LOCK_FILTER, Switch, 0),
    rule(SOCKET, libc::SO_BUSY_POLL, Off(Errno::PERM), 0),
    rule(SOCKET, SO_MAX_PACING_RATE, Any, -1),
    rule(SOCKET, SO_INCOMING_CPU, Any, -1),
    rule(SOCKET, SO_ZEROCOPY, Off(Errno::OPNOTSUPP), 0),
    rule(SOCKET, libc::SO_SNDBUFFORCE, AcceptedValues::Within(1, 0, Errno::PERM), 0),
    rule(SOCKET, libc::SO_RCVBUFFORCE, AcceptedValues::Within(1, 0, Errno::PERM), 0),
    rule(SOCKET, SO_BUF_LOCK, within(0, 3), 0),
    rule(TCP, libc::TCP_NODELAY, Switch, 0),
    rule(TCP, libc::TCP_CORK, Switch, 0),
    rule(TCP, libc::TCP_QUICKACK, Switch, 1),
    rule(TCP, libc::TCP_KEEPIDLE, within(1, MAX_KEEPALIVE), 7200),
    rule(TCP, libc::TCP_KEEPINTVL, within(1, MAX_KEEPALIVE), 75),
    rule(TCP, libc::TCP_KEEPCNT, within(1, MAX_PROBES), 9),
    rule(TCP, libc::TCP_SYNCNT, within(1, MAX_PROBES), 6),
    rule(TCP, libc::TCP_LINGER2, Any, FIN_TIMEOUT),
    rule(TCP, libc::TCP_DEFER_ACCEPT, Any, 0),
    rule(TCP, libc::TCP_WINDOW_CLAMP, Any, 65536),
    rule(TCP, libc::TCP_USER_TIMEOUT, within(0, i32::MAX), 0),
    rule(TCP, libc::TCP_FASTOPEN, within(0, i32::MAX), 0),
    rule(TCP, libc::TCP_FASTOPEN_CONNECT, Switch, 0),
    rule(TCP, libc::TCP_NOTSENT_LOWAT, Any, 0),
    rule(TCP, libc::TCP_THIN_LINEAR_TIMEOUTS, within(0, 1), 0),
    rule(TCP, libc::TCP_THIN_DUPACK, within(0, 1), 0),
    rule(TCP, libc::TCP_TIMESTAMP, Off(Errno::PERM), 0),
    rule(TCP, libc::TCP_REPAIR, Off(Errno::PERM), 0),
    rule(TCP, libc::TCP_SAVE_SYN, within(0, 2), 0),
    rule(UDP, libc::UDP_CORK, Off(Errno::OPNOTSUPP), 0),
    rule(UDP, UDP_NO_CHECK6_TX, Switch, 0),
    rule(UDP, UDP_NO_CHECK6_RX, Switch, 0),
    rule(UDP, libc::UDP_SEGMENT, Off(Errno::OPNOTSUPP), 0),
    rule(UDP, libc::UDP_GRO, Switch, 0),
    rule(IP, libc::IP_TOS, Any, 0),
    rule(IP, libc::IP_TTL, within(-1, 255), 64),
    rule(IP, libc::IP_MTU_DISCOVER, within(0, 5), 1),
    rule(IP, libc::IP_RECVERR, Switch, 0),
    rule(IP, libc::IP_FREEBIND, Switch, 0),
    rule(IP, libc::IP_MINTTL, within(0, 255), 0),
    rule(IP, libc::IP_BIND_ADDRESS_NO_PORT, Switch, 0),
    rule(IP, libc::IP_TRANSPARENT, Off(Errno::PERM), 0),
    rule(IP, libc::IP_MULTICAST_TTL, within(-1, 255), 1),
    rule(IP, libc::IP_MULTICAST_LOOP, Switch, 1),
    rule(IP, libc::IP_MULTICAST_ALL, Switch, 1),
    rule(IP, libc::IP_RECVOPTS, Switch, 0),
    rule(IP, libc::IP_RETOPTS, Switch, 0),
    rule(IP, libc::IP_PKTINFO, Switch, 0),
    rule(IP, libc::IP_RECVTTL, Switch, 0),
    rule(IP, libc::IP_RECVTOS, Switch, 0),
    rule(IP, IP_RECVFRAGSIZE, Switch, 0),
    rule(IP, libc::IP_RECVORIGDSTADDR, Switch, 0),
    rule(IPV6, IPV6_RECVORIGDSTADDR, Switch, 0),
    rule(SOCKET, libc::SO_DETACH_FILTER, AcceptedValues::Within(1, 0, Errno::NOENT), 0),
    rule(TCP, libc::TCP_INQ, within(0, 1), 0),
    rule(IPV6, libc::IPV6_RECVPKTINFO, Switch, 0),
    rule(IPV6, libc::IPV6_RECVHOPLIMIT, Switch, 0),
    rule(IPV6, libc::IPV6_RECVTCLASS, Switch, 0),
    rule(IPV6, libc::IPV6_RECVRTHDR, Switch, 0),
    rule(IPV6, libc::IPV6_RECVDSTOPTS, Switch, 0),
    rule(IPV6, IPV6_AUTOFLOWLABEL, Switch, 0),
    rule(IPV6, libc::IPV6_V6ONLY, Switch, 0),
    rule(IPV6, libc::IPV6_UNICAST_HOPS, within(-1, 255), 64),
    rule(IPV6, libc::IPV6_MULTICAST_HOPS, within(-1, 255), 1),
    rule(IPV6, libc::IPV6_MULTICAST_LOOP, within(0, 1), 1),
    rule(IPV6, IPV6_MULTICAST_ALL, within(0, 1), 1),
    rule(IPV6, libc::IPV6_MTU_DISCOVER, within(0, 5), 1),
    rule(IPV6, libc::IPV6_RECVERR, Switch, 0),
    rule(IPV6, libc::IPV6_TCLASS, within(-1, 255), 0),
];

fn find(level: i32, name: i32) -> Option<&'static OptionRule> {
    RULES.iter().find(|rule| (rule.level, rule.name) == (level, name))
}

/// The value of an option that was not set.
pub(in crate::sentry) fn first_value(level: i32, name: i32) -> Option<Vec<u8>> {
    match (level, name) {
        (SOCKET, libc::SO_LINGER) => return Some(vec![0; 8]),
        (SOCKET, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO) => return Some(vec![0; 16]),
        (SOCKET, libc::SO_BINDTODEVICE) | (IP, libc::IP_OPTIONS) => return Some(Vec::new()),
        (TCP, libc::TCP_CONGESTION) => return Some(congestion(b"cubic")),
        (TCP, libc::TCP_ULP) => return Some(Vec::new()),
        _ => {}
    }
    Some(find(level, name)?.first.to_le_bytes().to_vec())
}

fn congestion(name: &[u8]) -> Vec<u8> {
    let mut value = name.to_vec();
    value.resize(CONGESTION_LEN, 0);
    value
}

/// The value of an option that is a string, and of one that is a structure.
fn other_value(level: i32, name: i32, value: &[u8]) -> Option<Result<Vec<u8>, Errno>> {
    let text = value.split(|byte| *byte == 0).next().unwrap_or_default();
    Some(match (level, name) {
        (SOCKET, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO) => match value.get(..16) {
            None => Err(Errno::INVAL),
            Some(value) => {
                let micros = u64::from_le_bytes(value[8..].try_into().expect("8 bytes"));
                if micros < 1_000_000 { Ok(value.to_vec()) } else { Err(Errno::DOM) }
            }
        },
        (SOCKET, libc::SO_LINGER) => value.get(..8).map(<[u8]>::to_vec).ok_or(Errno::INVAL),
        (SOCKET, libc::SO_BINDTODEVICE) => match text {
            b"" => Ok(Vec::new()),
            DEVICE => Ok([DEVICE, &[0]].concat()),
            _ => Err(Errno::NODEV),
        },
        (TCP, libc::TCP_CONGESTION) if text.is_empty() => Err(Errno::INVAL),
        (TCP, libc::TCP_CONGESTION) => match CONGESTION_CONTROLS.contains(&text) {
            true => Ok(congestion(text)),
            false => Err(Errno::NOENT),
        },
        (TCP, libc::TCP_ULP) => Err(Errno::NOENT),
        // No interface has groups.
        (IP, libc::IP_ADD_MEMBERSHIP | libc::IP_DROP_MEMBERSHIP) => match value.get(..8) {
            Some([224..=239, ..]) if name == libc::IP_ADD_MEMBERSHIP => Err(Errno::NODEV),
            Some([224..=239, ..]) => Err(Errno::ADDRNOTAVAIL),
            _ => Err(Errno::INVAL),
        },
        (IP, libc::IP_OPTIONS) if value.is_empty() => Ok(Vec::new()),
        (IP, libc::IP_OPTIONS) => Err(Errno::INVAL),
        _ => return None,
    })
}

/// An option as it is kept. `stream` is whether its socket is a byte stream, and `open` whether it
/// was connected or listens.
pub(in crate::sentry) fn encode_option(
    (level, name): (i32, i32),
    value: &[u8],
    (stream, open): (bool, bool),
) -> Result<Vec<u8>, Errno> {
    if let Some(value) = other_value(level, name, value) {
        return value;
    }
    // Some options of IP may be a byte.
    let int = match (value.get(..4), value.first()) {
        (Some(v), _) => Ok(i32::from_le_bytes([v[0], v[1], v[2], v[3]])),
        (None, Some(byte)) if level == IP => Ok(i32::from(*byte)),
        (None, None) if level == IP => Ok(0),
        _ => Err(Errno::INVAL),
    };
    let rule = find(level, name).ok_or(Errno::NOPROTOOPT)?;
    let given = int?;
    let kept = match rule.accepted {
        Fixed => return Err(Errno::NOPROTOOPT),
        Switch => i32::from(given != 0),
        Off(errno) if given != rule.first && given != 0 => return Err(errno),
        AcceptedValues::Within(least, most, errno) if !(least..=most).contains(&given) => {
            return Err(errno);
        }
        Off(_) | Any | AcceptedValues::Within(..) => given,
    };
    let kept = match (level, name) {
        (SOCKET, libc::SO_RCVLOWAT) if kept < 0 => i32::MAX,
        (SOCKET, libc::SO_RCVLOWAT) => kept.max(1),
        (TCP, libc::TCP_LINGER2) if kept < 0 => -1,
        (TCP, libc::TCP_LINGER2) if kept == 0 => FIN_TIMEOUT,
        (TCP, libc::TCP_LINGER2) => kept.min(MAX_FIN_TIMEOUT),
        (TCP, libc::TCP_WINDOW_CLAMP) if kept == 0 && open => return Err(Errno::INVAL),
        (TCP, libc::TCP_WINDOW_CLAMP) if kept != 0 => kept.max(MIN_RECEIVE_BUFFER / 2),
        (TCP, libc::TCP_DEFER_ACCEPT) => kept.max(0),
        (IP, libc::IP_TTL) if kept == 0 => return Err(Errno::INVAL),
        (IP, libc::IP_TTL) if kept < 0 => rule.first,
        (IP, libc::IP_TOS) if stream => kept & 0xfc,
        (IP, libc::IP_TOS) => kept & 0xff,
        (IP, libc::IP_MULTICAST_TTL) if stream => return Err(Errno::INVAL),
        (IP, libc::IP_MULTICAST_TTL) if kept < 0 => rule.first,
        (IPV6, libc::IPV6_MULTICAST_HOPS) if stream => return Err(Errno::NOPROTOOPT),
        (IPV6, libc::IPV6_UNICAST_HOPS | libc::IPV6_MULTICAST_HOPS | libc::IPV6_TCLASS)
            if kept < 0 =>
        {
            rule.first
        }
        _ => kept,
    };
    Ok(kept.to_le_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_takes_what_linux_takes() {
        let set = |level, name, value: i32| {
            let kept = encode_option((level, name), &value.to_le_bytes(), (true, true))?;
            Ok(i32::from_le_bytes(kept.try_into().expect("a number")))
        };
        assert_eq!(set(SOCKET, libc::SO_REUSEADDR, 7), Ok(1));
        assert_eq!(set(SOCKET, -1, 7), Err(Errno::NOPROTOOPT));
        assert_eq!(set(SOCKET, libc::SO_MARK, 1), Err(Errno::PERM));
        assert_eq!(set(SOCKET, libc::SO_SNDLOWAT, 1), Err(Errno::NOPROTOOPT));
        assert_eq!(set(TCP, libc::TCP_KEEPIDLE, 0), Err(Errno::INVAL));
        assert_eq!(set(TCP, libc::TCP_KEEPCNT, 127), Ok(127));
        assert_eq!(set(TCP, libc::TCP_LINGER2, 500), Ok(120));
        assert_eq!(set(TCP, libc::TCP_LINGER2, -5), Ok(-1));
        assert_eq!(set(IP, libc::IP_TTL, -1), Ok(64));
        assert_eq!(set(SOCKET, libc::SO_TIMESTAMPING, 1), Err(Errno::OPNOTSUPP));
        let text = |name: &[u8]| encode_option((TCP, libc::TCP_CONGESTION), name, (true, true));
        assert_eq!(text(b"reno"), Ok(congestion(b"reno")));
        assert_eq!(text(b"vegas\0"), Err(Errno::NOENT));
        let limit = |bytes: &[u8]| encode_option((SOCKET, libc::SO_RCVTIMEO), bytes, (true, true));
        assert_eq!(limit(&[0; 15]), Err(Errno::INVAL));
        assert_eq!(limit(&[0xff; 16]), Err(Errno::DOM));
        // A byte is enough for an option of IP, and none is 0.
        assert_eq!(
            encode_option((IP, libc::IP_TOS), &[0x20], (false, false)),
            Ok(vec![0x20, 0, 0, 0])
        );
        assert_eq!(encode_option((IP, libc::IP_TOS), &[], (false, false)), Ok(vec![0; 4]));
        assert_eq!(encode_option((TCP, libc::TCP_NODELAY), &[1], (true, false)), Err(Errno::INVAL));
    }

    #[test]
    fn each_option_has_one_rule_and_a_first_value() {
        for (at, rule) in RULES.iter().enumerate() {
            let same = |other: &OptionRule| (other.level, other.name) == (rule.level, rule.name);
            assert!(!RULES[..at].iter().any(same), "{} {}", rule.level, rule.name);
            assert_eq!(first_value(rule.level, rule.name).map(|value| value.len()), Some(4));
        }
        assert_eq!(first_value(SOCKET, 9999), None);
    }
}
