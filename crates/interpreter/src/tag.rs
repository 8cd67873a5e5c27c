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
