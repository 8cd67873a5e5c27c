//! Where a guest may connect to outside of itself: destinations by name, which its opener grants.
//!
//! Promises: only granted destinations are connected to. A granted name without an address leads
//! neither to this host nor to its link-local neighbours, nor to the metadata service of its cloud,
//! for every resolution by its owner. May break it: the owner of a granted name decides which
//! server is behind it, as everywhere.

use std::fmt;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::BorrowedFd;
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};
use serde::Deserialize;

use crate::filter::EgressFilter;

/// Forms of a destination; the end of an error message.
const FORMS: &str = "use NAME:PORT, as in api.example.org:443, *.example.org:443, 192.0.2.7:5432 or db:*, or \
                     NAME:PORT=HOST:PORT for a server that is elsewhere";
/// Longest name.
const NAME: usize = 253;

/// Text that is not a [`Destination`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no destination: {why}; {FORMS}")]
pub struct ParseDestinationError {
    text: String,
    why: &'static str,
}

/// A place that a guest may connect to by TCP: `NAME:PORT` or `NAME:PORT=HOST:PORT`.
///
/// NAME is the name of a host, `*.` and the end of one, or an address; PORT is a number, or `*` for
/// any. The guest resolves names through DNS as programs do. With HOST:PORT, that server is the
/// target, which may be on this host; without it, the target is the name's present address, but
/// never this host itself.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Destination {
    name: HostPattern,
    port: Option<u16>,
    server: Option<(String, u16)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HostPattern {
    /// In lower case.
    Exactly(String),
    /// A dot and a suffix.
    Ending(String),
    Address(IpAddr),
}

impl HostPattern {
    /// A name, `*.` and the end of one, or an address.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let lower = text.to_ascii_lowercase();
        match (text.parse(), lower.strip_prefix("*.")) {
            (Ok(address), _) => Some(Self::Address(address)),
            (Err(_), Some(ending)) if is_name(ending) => Some(Self::Ending(format!(".{ending}"))),
            (Err(_), None) if is_name(&lower) => Some(Self::Exactly(lower)),
            _ => None,
        }
    }

    /// Whether it is loopback, which a guest has itself.
    fn is_loopback(&self) -> bool {
        match self {
            Self::Exactly(name) => name == "localhost",
            Self::Ending(_) => false,
            Self::Address(address) => address.to_canonical().is_loopback(),
        }
    }

    /// Whether it is, or covers, a name. Letters of both cases are equal, as in DNS: the state of a
    /// guest, which a stranger may have made, has the name.
    pub(crate) fn matches_name(&self, name: &str) -> bool {
        match self {
            Self::Exactly(own) => own.eq_ignore_ascii_case(name),
            // A name of DNS may have any bytes; this one becomes a host in requests.
            Self::Ending(end) => {
                let start = name.len().checked_sub(end.len());
                let found = start.and_then(|start| name.get(start..));
                found.is_some_and(|found| found.eq_ignore_ascii_case(end)) && is_name(name)
            }
            Self::Address(_) => false,
        }
    }

    /// Whether some host is meant by both.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Ending(own), Self::Ending(other)) => {
                own.ends_with(other) || other.ends_with(own)
            }
            (one, Self::Exactly(name)) | (Self::Exactly(name), one) => one.matches_name(name),
            (one, other) => one == other,
        }
    }
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exactly(name) => f.write_str(name),
            Self::Ending(end) => write!(f, "*{end}"),
            Self::Address(address) => address.fmt(f),
        }
    }
}

/// The destination of a guest connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationQuery<'a> {
    /// A name.
    Name(&'a str),
    /// An address that stands for no name.
    Address(IpAddr),
}

/// Where a connection that is granted goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    host: String,
    port: u16,
    /// Whether its opener gave the address.
    known: bool,
    /// The filter that decides about its addresses, if it does.
    filter: Option<EgressFilter>,
}

fn split_port(text: &str) -> Option<(&str, &str)> {
    let (name, port) = text.rsplit_once(':')?;
    let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    (!name.is_empty()).then_some((name, port))
}

fn is_name(text: &str) -> bool {
    let label = |label: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        (1..=63).contains(&label.len()) && label.bytes().all(plain)
    };
    text.len() <= NAME && text.split('.').all(label)
}

impl FromStr for Destination {
    type Err = ParseDestinationError;

    fn from_str(text: &str) -> Result<Self, ParseDestinationError> {
        let bad = |why| ParseDestinationError { text: text.chars().take(300).collect(), why };
        let (wanted, server) = match text.split_once('=') {
            Some((wanted, server)) => (wanted, Some(server)),
            None => (text, None),
        };
        let (name, port) = split_port(wanted).ok_or_else(|| bad("it names no port"))?;
        let number = |port: &str| port.parse::<u16>().ok().filter(|port| *port > 0);
        let port = match port {
            "*" => None,
            port => Some(number(port).ok_or_else(|| bad("its port is invalid"))?),
        };
        let name = HostPattern::parse(name).ok_or_else(|| bad("its name is invalid"))?;
        if name.is_loopback() {
            return Err(bad(
                "loopback is the guest itself, which needs no grant; for a server of this host give \
                 another name, as in web.test:80=127.0.0.1:8080",
            ));
        }
        let server = server.map(|server| {
            let (host, port) = split_port(server).ok_or_else(|| bad("its server has no port"))?;
            let port = number(port).ok_or_else(|| bad("its server's port is invalid"))?;
            if host.parse::<IpAddr>().is_err() && !is_name(host) {
                return Err(bad("its server's name is invalid"));
            }
            Ok((host.to_owned(), port))
        });
        Ok(Self { name, port, server: server.transpose()? })
    }
}

impl TryFrom<String> for Destination {
    type Error = ParseDestinationError;

    fn try_from(text: String) -> Result<Self, ParseDestinationError> {
        text.parse()
    }
}

impl Destination {
    /// The name, if it names one host or the hosts below a name.
    pub(crate) fn pattern(&self) -> &HostPattern {
        &self.name
    }

    /// The port, unless any is meant.
    pub(crate) fn port(&self) -> Option<u16> {
        self.port
    }

    /// Whether a connection to `asked` at `port` has this destination.
    pub(crate) fn covers(&self, asked: DestinationQuery<'_>, port: u16) -> bool {
        self.is_meant(asked) && self.port.is_none_or(|own| own == port)
    }

    /// The server of a connection that this destination covers.
    pub(crate) fn server(&self, asked: DestinationQuery<'_>, port: u16) -> Server {
        match (&self.server, asked) {
            (Some((host, port)), _) => Server::new(host.clone(), *port, true),
            (None, DestinationQuery::Name(name)) => Server::new(name.to_owned(), port, false),
            (None, DestinationQuery::Address(address)) => {
                Server::new(address.to_string(), port, true)
            }
        }
    }

    pub(crate) fn is_meant(&self, asked: DestinationQuery<'_>) -> bool {
        match (&self.name, asked) {
            (name, DestinationQuery::Name(asked)) => name.matches_name(asked),
            (HostPattern::Address(own), DestinationQuery::Address(address)) => *own == address,
            _ => false,
        }
    }
}

/// Addresses at which clouds give a host its credentials, or serve it alone, outside of the
/// link-local ranges.
const CLOUD_V4: [Ipv4Addr; 3] = [
    // Azure's WireServer.
    Ipv4Addr::new(168, 63, 129, 16),
    // Alibaba's metadata.
    Ipv4Addr::new(100, 100, 100, 200),
    // Oracle's metadata of older images.
    Ipv4Addr::new(192, 0, 0, 192),
];
/// The first two segments of such ranges of IPv6: of AWS (metadata, DNS and time), Google, Oracle
/// and Scaleway.
const CLOUD_V6: [[u16; 2]; 4] =
    [[0xfd00, 0x0ec2], [0xfd20, 0x00ce], [0xfd00, 0x00c1], [0xfd00, 0x0042]];

/// Whether an address belongs to this host, to its link, to its cloud's metadata, or to no single
/// host.
fn is_near(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(ip) => is_near_v4(ip),
        IpAddr::V6(ip) => is_near_v6(ip) || translated(ip).into_iter().flatten().any(is_near_v4),
    }
}

fn is_near_v4(ip: Ipv4Addr) -> bool {
    ip.is_loopback()
        || ip.octets()[0] == 0
        || ip.is_link_local()
        || ip.is_multicast()
        || ip.is_broadcast()
        || CLOUD_V4.contains(&ip)
}

fn is_near_v6(ip: Ipv6Addr) -> bool {
    let [first, second, ..] = ip.segments();
    ip.is_loopback()
        || ip.is_unspecified()
        || ip.is_multicast()
        // Link-local, and the site-local addresses of before.
        || matches!(first & 0xffc0, 0xfe80 | 0xfec0)
        || CLOUD_V6.contains(&[first, second])
}

/// The addresses of IPv4 that one of IPv6 may reach: written in it, by NAT64 (RFC 6052, RFC 8215)
/// or by 6to4.
pub(crate) fn translated(ip: Ipv6Addr) -> [Option<Ipv4Addr>; 2] {
    let bits = ip.to_bits();
    let last = Ipv4Addr::from_bits((bits & u128::from(u32::MAX)) as u32);
    let [first, second, third, ..] = ip.segments();
    let nat64 = matches!([first, second, third], [0x64, 0xff9b, 0 | 1]).then_some(last);
    let own = (first == 0x2002).then(|| Ipv4Addr::from_bits((bits >> 80) as u32));
    [ip.to_ipv4().or(nat64), own]
}

/// The error of a connection that a filter denies, as by a firewall.
pub const DENIED: i32 = Errno::ACCESS.raw_os_error();

/// How long it may take to connect to one address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// The number of an error that the kernel or a resolver gave.
fn number(error: &std::io::Error) -> i32 {
    match error.kind() {
        ErrorKind::TimedOut => Errno::TIMEDOUT.raw_os_error(),
        _ => error.raw_os_error().unwrap_or(Errno::HOSTUNREACH.raw_os_error()),
    }
}

/// Connects to an address, until the other end of `guest` is closed. The stream does not block.
fn connect_to(address: &SocketAddr, guest: BorrowedFd<'_>) -> Result<TcpStream, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    match connect(&socket, address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(error) => return Err(error),
    }
    let until = Instant::now() + CONNECT_TIMEOUT;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Errno::TIMEDOUT);
        }
        // An end is reported without being asked for.
        let mut fds = [
            PollFd::new(&socket, PollFlags::OUT),
            PollFd::from_borrowed_fd(guest, PollFlags::empty()),
        ];
        match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        if !fds[1].revents().is_empty() {
            return Err(Errno::CANCELED);
        }
        if !fds[0].revents().is_empty() {
            sockopt::socket_error(&socket)??;
            return Ok(TcpStream::from(socket));
        }
    }
}

impl Server {
    fn new(host: String, port: u16, known: bool) -> Self {
        Self { host, port, known, filter: None }
    }

    /// The same server, with addresses as far as `filter` admits them.
    pub(crate) fn filtered(mut self, filter: EgressFilter) -> Self {
        self.filter = Some(filter);
        self
    }

    /// Connects to it. May take the full time of a resolver, and of each address, unless the other
    /// end of `guest` is closed before. The stream does not block.
    ///
    /// # Errors
    /// The number of the error of the last address; [`DENIED`] where a filter admits none of them.
    pub fn connect(&self, guest: BorrowedFd<'_>) -> Result<TcpStream, i32> {
        let mut addresses = self.addresses().map_err(|error| number(&error))?;
        if let Some(filter) = self.filter.as_ref().filter(|_| !addresses.is_empty()) {
            addresses.retain(|address| filter.admits_address(address.ip()));
            if addresses.is_empty() {
                return Err(DENIED);
            }
        }
        let mut last = Errno::HOSTUNREACH.raw_os_error();
        for address in addresses {
            match connect_to(&address, guest) {
                Ok(stream) if !self.may_have(&stream) => {}
                Ok(stream) => {
                    // Writes are gathered already.
                    let set = stream.set_nodelay(true);
                    return set.map(|()| stream).map_err(|error| number(&error));
                }
                Err(Errno::CANCELED) => return Err(Errno::CANCELED.raw_os_error()),
                Err(error) => last = error.raw_os_error(),
            }
        }
        Err(last)
    }

    /// Whether the guest may use a new connection: one that leads back to this host, through any of
    /// its addresses, is allowed only if the option says so.
    fn may_have(&self, made: &TcpStream) -> bool {
        let same = |own: SocketAddr, other: SocketAddr| own.ip() == other.ip();
        self.known
            || made.local_addr().is_ok_and(|own| made.peer_addr().is_ok_and(|p| !same(own, p)))
    }

    /// Its addresses, as far as a guest may have them. May take the full time of a resolver.
    fn addresses(&self) -> std::io::Result<Vec<SocketAddr>> {
        let all = (self.host.as_str(), self.port).to_socket_addrs()?;
        Ok(all.filter(|address| self.known || !is_near(address.ip())).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn granted(texts: &[&str]) -> Vec<Destination> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn granted_destinations_are_distinguished_from_others() {
        let all = granted(&[
            "Api.Example.org:443",
            "*.example.net:*",
            "192.0.2.7:5432",
            "[2001:db8::1]:80",
            "db:5432=127.0.0.1:15432",
        ]);
        let server = |asked, port| {
            all.iter().find(|one| one.covers(asked, port)).map(|one| one.server(asked, port))
        };
        let knows = |name| all.iter().any(|one| one.is_meant(DestinationQuery::Name(name)));
        let name = |name, port| server(DestinationQuery::Name(name), port);
        assert_eq!(
            name("api.example.org", 443).map(|s| (s.host, s.known)),
            Some(("api.example.org".into(), false))
        );
        assert_eq!(name("api.example.org", 80), None);
        assert!(name("a.b.example.net", 1).is_some() && name("example.net", 1).is_none());
        for bad in [
            "badexample.net",
            ".example.net",
            "x/v1?.example.net",
            "x..example.net",
            "x\r\n.example.net",
        ] {
            assert!(name(bad, 1).is_none() && !knows(bad), "{bad:?}");
        }
        assert_eq!(
            name("db", 5432).map(|s| (s.host, s.port, s.known)),
            Some(("127.0.0.1".into(), 15432, true))
        );
        let address =
            |text: &str, port| server(DestinationQuery::Address(text.parse().unwrap()), port);
        assert!(address("192.0.2.7", 5432).is_some() && address("192.0.2.8", 5432).is_none());
        assert!(address("2001:db8::1", 80).is_some());
        assert!(knows("db") && !knows("192.0.2.7") && !knows("dbx"));
    }

    #[test]
    fn text_that_is_no_destination_is_refused_with_the_way_out() {
        let long = format!("{}:1", "a.".repeat(200));
        for text in [
            "",
            "host",
            ":443",
            "host:0",
            "host:70000",
            "a..b:1",
            "*:1",
            "h*st:1",
            "a b:1",
            "x:1=y",
            "x:1=:2",
            "x:1=y:0",
            "localhost:80",
            "127.0.0.1:80=web.test:80",
            "[::ffff:127.0.0.1]:80",
            &long,
        ] {
            let error = text.parse::<Destination>().unwrap_err().to_string();
            assert!(error.contains("NAME:PORT"), "{text}: {error}");
        }
    }

    #[test]
    fn a_name_leads_not_to_this_host_unless_its_opener_says_so() {
        for near in [
            "127.0.0.1",
            "0.0.0.0",
            "169.254.169.254",
            "::1",
            "fe80::1",
            "::ffff:127.0.0.1",
            "224.0.0.1",
            "::",
            "0.1.2.3",
            "168.63.129.16",
            "100.100.100.200",
            "192.0.0.192",
            "fd00:ec2::254",
            "fd00:ec2::253",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "fd00:42::42",
            "fec0::1",
            "::169.254.169.254",
            "::ffff:168.63.129.16",
            "64:ff9b::169.254.169.254",
            "64:ff9b:1::7f00:1",
            "2002:a9fe:a9fe::1",
        ] {
            assert!(is_near(near.parse().unwrap()), "{near}");
        }
        for far in [
            "192.0.2.1",
            "10.0.0.1",
            "2001:db8::1",
            "fd00::1",
            "64:ff9b::192.0.2.1",
            "2002:c000:201::1",
        ] {
            assert!(!is_near(far.parse().unwrap()), "{far}");
        }
        let server = |known| Server::new("localhost".into(), 1, known);
        assert!(server(false).addresses().unwrap().is_empty());
        assert!(!server(true).addresses().unwrap().is_empty());
        // The attempt ends when the guest has closed its end.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (guest, own) = std::os::unix::net::UnixStream::pair().unwrap();
        let server_at = |port| Server::new("127.0.0.1".into(), port, true);
        assert!(server_at(port).connect(own.as_fd()).is_ok());
        drop(listener);
        assert_eq!(
            server_at(port).connect(own.as_fd()).unwrap_err(),
            Errno::CONNREFUSED.raw_os_error()
        );
        drop(guest);
        assert_eq!(
            server_at(port).connect(own.as_fd()).unwrap_err(),
            Errno::CANCELED.raw_os_error()
        );
        // It may have used any of its addresses: only the connection shows it.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let made = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!server(false).may_have(&made) && server(true).may_have(&made));
    }
}
