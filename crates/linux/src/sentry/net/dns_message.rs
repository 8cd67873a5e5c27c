//! Messages of DNS: the question that a guest sends, and the answer to it.
//!
//! Promises: a question is within its message, and its name has at most [`MAX_NAME`] bytes.
//! May break it: nothing outside.

use std::net::Ipv4Addr;

/// Bytes of a message before its question.
pub(super) const HEAD: usize = 12;
/// Longest name.
pub(super) const MAX_NAME: usize = 253;
/// Maximum time to live of an answer, in seconds.
const MAX_TTL: u32 = 60;
/// The class of the internet.
pub(super) const INTERNET: u16 = 1;
/// The type of an IPv4 address.
pub(super) const ADDRESS: u16 = 1;

/// A question: a name in lower case, and its type.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DnsQuestion<'a> {
    pub(super) name: String,
    pub(super) kind: u16,
    /// The question as it stands in the message.
    pub(super) bytes: &'a [u8],
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// The only question of a message.
pub(super) fn question(message: &[u8]) -> Option<DnsQuestion<'_>> {
    let flags = half(message, 2)?;
    // A question in the usual way, and one.
    if flags & 0xf800 != 0 || half(message, 4)? != 1 {
        return None;
    }
    let (mut at, mut name) = (HEAD, String::new());
    loop {
        let len = usize::from(*message.get(at)?);
        at += 1;
        match len {
            0 => break,
            1..=63 => {
                let label = std::str::from_utf8(message.get(at..at + len)?).ok()?;
                if !name.is_empty() {
                    name.push('.');
                }
                name.push_str(label);
                at += len;
                if name.len() > MAX_NAME {
                    return None;
                }
            }
            // A name in a question points nowhere.
            _ => return None,
        }
    }
    let (kind, class) = (half(message, at)?, half(message, at + 2)?);
    name.make_ascii_lowercase();
    (class == INTERNET).then_some(DnsQuestion { name, kind, bytes: &message[HEAD..at + 4] })
}

/// The answer to a message, in its form: how it went, and an address.
pub(super) fn answer(
    message: &[u8],
    asked: Option<&DnsQuestion<'_>>,
    how: u8,
    address: Option<Ipv4Addr>,
) -> Vec<u8> {
    let flag = |holds: bool| u8::from(holds);
    let mut out = message[..2].to_vec();
    // An answer, with authority; recursion if it is wanted, which there is.
    out.push(0x84 | message[2] & 1);
    out.push(0x80 | how);
    let (one, given) = (flag(asked.is_some()), flag(address.is_some()));
    out.extend([0, one, 0, given, 0, 0, 0, 0]);
    out.extend(asked.map_or(&[][..], |asked| asked.bytes));
    if let Some(address) = address {
        // The name is the question's.
        out.extend([0xc0, HEAD as u8]);
        out.extend(ADDRESS.to_be_bytes());
        out.extend(INTERNET.to_be_bytes());
        out.extend(MAX_TTL.to_be_bytes());
        out.extend([0, 4]);
        out.extend(address.octets());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(name: &str, kind: u16) -> Vec<u8> {
        let mut message = vec![7, 9, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in name.split('.').filter(|label| !label.is_empty()) {
            message.push(label.len() as u8);
            message.extend(label.bytes());
        }
        message.push(0);
        message.extend(kind.to_be_bytes());
        message.extend(INTERNET.to_be_bytes());
        message
    }

    #[test]
    fn a_question_is_read_as_it_is_written() {
        let message = ask("Api.Example.ORG", ADDRESS);
        let read = question(&message).unwrap();
        assert_eq!((&*read.name, read.kind), ("api.example.org", ADDRESS));
        assert_eq!(read.bytes, &message[HEAD..]);
        let out = answer(&message, Some(&read), 0, Some(Ipv4Addr::new(198, 18, 0, 1)));
        assert_eq!(&out[..HEAD], [7, 9, 0x85, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
        assert_eq!(&out[out.len() - 4..], [198, 18, 0, 1]);
    }

    #[test]
    fn an_invalid_dns_question_is_refused() {
        let good = ask("a.b", ADDRESS);
        assert!(question(&good).is_some());
        for cut in 0..good.len() {
            assert_eq!(question(&good[..cut]), None, "{cut} bytes");
        }
        for (at, byte) in [(2, 0x80), (5, 2), (HEAD, 0xc0), (HEAD, 64), (HEAD + 1, 0xff)] {
            let mut bad = good.clone();
            bad[at] = byte;
            assert_eq!(question(&bad), None, "{at}: {byte}");
        }
        let long = ask(&"a.".repeat(130), ADDRESS);
        assert_eq!(question(&long), None);
    }
}
