//! Where a guest may connect to outside of itself: destinations by name, which its opener grants.
//!
//! Promises: what is not granted is not connected to. A name that is granted without an address leads neither to this host
//! nor to what is only next to it on the wire, whatever its owner says that it means. May break it: whoever may say what a
//! granted name means decides which server is behind it, as anywhere.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::str::FromStr;

use serde::Deserialize;

/// What a destination may look like; the end of an error message.
const FORMS: &str = "use NAME:PORT, as in api.example.org:443, *.example.org:443, 192.0.2.7:5432 or db:*, or \
                     NAME:PORT=HOST:PORT for a server that is elsewhere";
/// Longest name.
const NAME: usize = 253;

/// Text that is no [`Destination`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no destination: {why}; {FORMS}")]
pub struct BadDestination {
    text: String,
    why: &'static str,
}

/// A place that a guest may connect to by TCP: `NAME:PORT` or `NAME:PORT=HOST:PORT`.
///
/// NAME is the name of a host, `*.` and the end of one, or an address; PORT is a number, or `*` for any. The guest finds
/// names by asking for them as programs do. Where HOST:PORT is given, that is the server that is connected to, also one of
/// this host; without it, it is whatever the name means here and now, but not this host itself.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Destination {
    name: Name,
    port: Option<u16>,
    server: Option<(String, u16)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Name {
    /// In lower case.
    Exactly(String),
    /// A dot, and what follows.
    Ending(String),
    Address(IpAddr),
}

/// What a guest asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked<'a> {
    /// In lower case.
    Name(&'a str),
    Address(IpAddr),
}

/// Where a connection that is granted goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Server {
    host: String,
    port: u16,
    /// Whether its opener has said which it is.
    known: bool,
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
    type Err = BadDestination;

    fn from_str(text: &str) -> Result<Self, BadDestination> {
        let bad = |why| BadDestination { text: text.chars().take(300).collect(), why };
        let (wanted, server) = match text.split_once('=') {
            Some((wanted, server)) => (wanted, Some(server)),
            None => (text, None),
        };
        let (name, port) = split_port(wanted).ok_or_else(|| bad("it names no port"))?;
        let number = |port: &str| port.parse::<u16>().ok().filter(|port| *port > 0);
        let port = match port {
            "*" => None,
            port => Some(number(port).ok_or_else(|| bad("its port is none"))?),
        };
        let lower = name.to_ascii_lowercase();
        let name = match (name.parse(), lower.strip_prefix("*.")) {
            (Ok(address), _) => Name::Address(address),
            (Err(_), Some(ending)) if is_name(ending) => Name::Ending(format!(".{ending}")),
            (Err(_), None) if is_name(&lower) => Name::Exactly(lower),
            _ => return Err(bad("its name is none")),
        };
        let server = server.map(|server| {
            let (host, port) = split_port(server).ok_or_else(|| bad("its server has no port"))?;
            let port = number(port).ok_or_else(|| bad("its server's port is none"))?;
            if host.parse::<IpAddr>().is_err() && !is_name(host) {
                return Err(bad("its server's name is none"));
            }
            Ok((host.to_owned(), port))
        });
        Ok(Self { name, port, server: server.transpose()? })
    }
}

impl TryFrom<String> for Destination {
    type Error = BadDestination;

    fn try_from(text: String) -> Result<Self, BadDestination> {
        text.parse()
    }
}

impl Destination {
    fn is_meant(&self, asked: Asked<'_>) -> bool {
        match (&self.name, asked) {
            (Name::Exactly(own), Asked::Name(name)) => own == name,
            (Name::Ending(end), Asked::Name(name)) => name.ends_with(end) && name.len() > end.len(),
            (Name::Address(own), Asked::Address(address)) => *own == address,
            _ => false,
        }
    }
}

/// Whether a name is granted, at whatever port.
pub(crate) fn knows(granted: &[Destination], name: &str) -> bool {
    granted.iter().any(|one| one.is_meant(Asked::Name(name)))
}

/// Where a connection goes that is granted.
pub(crate) fn server(granted: &[Destination], asked: Asked<'_>, port: u16) -> Option<Server> {
    let meant =
        |one: &&Destination| one.is_meant(asked) && one.port.is_none_or(|granted| granted == port);
    let found = granted.iter().find(meant)?;
    Some(match (&found.server, asked) {
        (Some((host, port)), _) => Server { host: host.clone(), port: *port, known: true },
        (None, Asked::Name(name)) => Server { host: name.to_owned(), port, known: false },
        (None, Asked::Address(address)) => Server { host: address.to_string(), port, known: true },
    })
}

/// Whether an address is this host's own, or of what is next to it on the wire, or of nobody in particular.
fn is_near(address: IpAddr) -> bool {
    let v4 = |ip: Ipv4Addr| {
        ip.is_loopback()
            || ip.is_unspecified()
            || ip.is_link_local()
            || ip.is_multicast()
            || ip.is_broadcast()
    };
    let v6 = |ip: Ipv6Addr| {
        let link_local = ip.segments()[0] & 0xffc0 == 0xfe80;
        ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() || link_local
    };
    match address {
        IpAddr::V4(ip) => v4(ip),
        IpAddr::V6(ip) => v6(ip) || ip.to_ipv4().is_some_and(v4),
    }
}

impl Server {
    /// Whether a connection that was made may be had: one that leads back to this host only where its opener said so, whichever
    /// of the host's addresses it took.
    pub(crate) fn may_have(&self, made: &TcpStream) -> bool {
        let same = |own: SocketAddr, other: SocketAddr| own.ip() == other.ip();
        self.known
            || made.local_addr().is_ok_and(|own| made.peer_addr().is_ok_and(|p| !same(own, p)))
    }

    /// Its addresses, as far as a guest may have them. May take as long as a resolver does.
    pub(crate) fn addresses(&self) -> std::io::Result<Vec<SocketAddr>> {
        let all = (self.host.as_str(), self.port).to_socket_addrs()?;
        Ok(all.filter(|address| self.known || !is_near(address.ip())).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granted(texts: &[&str]) -> Vec<Destination> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn what_is_granted_is_told_from_what_is_not() {
        let all = granted(&[
            "Api.Example.org:443",
            "*.example.net:*",
            "192.0.2.7:5432",
            "[2001:db8::1]:80",
            "db:5432=127.0.0.1:15432",
        ]);
        let name = |name, port| server(&all, Asked::Name(name), port);
        assert_eq!(
            name("api.example.org", 443).map(|s| (s.host, s.known)),
            Some(("api.example.org".into(), false))
        );
        assert_eq!(name("api.example.org", 80), None);
        assert!(name("a.b.example.net", 1).is_some() && name("example.net", 1).is_none());
        assert!(name("badexample.net", 1).is_none() && name(".example.net", 1).is_none());
        assert_eq!(
            name("db", 5432).map(|s| (s.host, s.port, s.known)),
            Some(("127.0.0.1".into(), 15432, true))
        );
        let address = |text: &str, port| server(&all, Asked::Address(text.parse().unwrap()), port);
        assert!(address("192.0.2.7", 5432).is_some() && address("192.0.2.8", 5432).is_none());
        assert!(address("2001:db8::1", 80).is_some());
        assert!(knows(&all, "db") && !knows(&all, "192.0.2.7") && !knows(&all, "dbx"));
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
        ] {
            assert!(is_near(near.parse().unwrap()), "{near}");
        }
        for far in ["192.0.2.1", "10.0.0.1", "2001:db8::1", "fd00::1"] {
            assert!(!is_near(far.parse().unwrap()), "{far}");
        }
        let server = |known| Server { host: "localhost".into(), port: 1, known };
        assert!(server(false).addresses().unwrap().is_empty());
        assert!(!server(true).addresses().unwrap().is_empty());
        // By whatever address of its own: only the connection tells.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let made = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!server(false).may_have(&made) && server(true).may_have(&made));
    }
}
