//! Messages of netlink: a header, a body, and attributes.

use crate::sentry::abi::StructBuilder;

/// Bytes of `struct nlmsghdr`.
pub(in crate::sentry) const HEADER: usize = 16;
/// Bytes of the head of an attribute.
const ATTRIBUTE_HEAD: usize = 4;

/// An attribute of a message, padded.
pub(in crate::sentry) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = StructBuilder::default().half(4 + value.len() as u16).half(kind).0;
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// An attribute that is a number.
pub(in crate::sentry) fn number(kind: u16, value: u32) -> Vec<u8> {
    attribute(kind, &value.to_le_bytes())
}

/// The value of an attribute of this kind in a list of attributes: the last one, as in Linux.
pub(in crate::sentry) fn value_of(mut list: &[u8], kind: u16) -> Option<&[u8]> {
    let mut found = None;
    while list.len() >= ATTRIBUTE_HEAD {
        let len = usize::from(u16::from_le_bytes([list[0], list[1]]));
        let Some(value) = list.get(ATTRIBUTE_HEAD..len) else { break };
        if u16::from_le_bytes([list[2], list[3]]) == kind {
            found = Some(value);
        }
        list = list.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

/// A message to the socket on `port` that answers the request `sequence`.
pub(in crate::sentry) fn message(
    kind: u16,
    flags: i32,
    (sequence, port): (u32, u32),
    body: &[u8],
) -> Vec<u8> {
    let len = (HEADER + body.len()) as u32;
    let head = StructBuilder::default().int(len).half(kind).half(flags as u16);
    [&head.int(sequence).int(port).0[..], body].concat()
}
