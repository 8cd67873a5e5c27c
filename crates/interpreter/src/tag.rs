//! Tags of program values, in addition to the tags of CBOR itself (RFC 8949, 8746 and the IANA
//! registry).

use minicbor::data::Tag;

/// How deep a value may be nested.
pub const MAX_DEPTH: usize = 128;
/// A date and time as text.
pub const TIMESTAMP: Tag = Tag::new(0);
/// A day as text.
pub const DAY: Tag = Tag::new(1004);
/// A list that was a set.
pub const SET: Tag = Tag::new(258);
/// A private tag: a list that was a tuple.
pub const TUPLE: Tag = Tag::new(65_584);
/// The 16 bytes of a UUID.
pub const UUID: Tag = Tag::new(37);
/// A private tag: a decimal number as Python writes it.
pub const DECIMAL: Tag = Tag::new(65_585);
/// Many integers as in memory, 64 bits each and little-endian.
pub const INTEGERS: Tag = Tag::new(79);
/// The same in floating point.
pub const FLOATS: Tag = Tag::new(86);
/// Seconds from 1970.
pub const DATE: Tag = Tag::new(1);
/// An integer of any size.
pub const POSITIVE: Tag = Tag::new(2);
/// A negative one, whose bits are inverted.
pub const NEGATIVE: Tag = Tag::new(3);
/// A kind and a text in place of a value that stays in the guest.
pub const NAMED: Tag = Tag::new(39);
/// Real and imaginary part.
pub const COMPLEX: Tag = Tag::new(43_000);
