//! Decodes values in postcard's form, within a limit on their memory.
//!
//! An empty list is one byte of input and 24 bytes of memory; an empty map that has an entry takes
//! a whole node. So the length of the input bounds the memory badly. [`decode`] subtracts the
//! memory of each item from a limit before the item is decoded. A [`Decoder`] has one limit for all
//! parts of a state.
//!
//! Promises: strings, lists, sets, maps and boxed structures take no more memory than was
//! subtracted, copies during growth included. A length in the input reserves nothing. May break
//! it: an implementation of `Deserialize` by hand that allocates what it does not read.

use std::cell::Cell;
use std::fmt;

use serde::Deserialize;
use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error, MapAccess, SeqAccess, VariantAccess, Visitor,
};

/// Maximum bytes of the state of a guest once it is decoded, all of its parts together: three
/// million elements of tables, for example.
pub const MAX_DECODED: usize = 512 << 20;
/// States of at most this many bytes are within [`MAX_DECODED`] whatever they hold: a byte becomes
/// at most 512.
pub const MAX_UNCHECKED: usize = 1 << 20;

/// A vector that has just grown has the old items and room for twice as many.
const LIST_ITEMS: usize = 3;
/// A hash table that has just grown, with an eighth of it free.
const MAP_ITEMS: usize = 4;
/// Items of the smallest node or vector, and one.
const FIRST_ITEMS: usize = 12;
/// Pointers of a node of a tree, and the counters of an `Arc`.
const NODE: usize = 128;
/// The share of an entry in the nodes above it.
const ENTRY: usize = 16;

/// The reason why a value was not decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// It would take more memory than the limit, in bytes.
    Exceeded {
        /// The limit.
        limit: usize,
    },
    /// The bytes have another form.
    Malformed(String),
}

impl fmt::Display for DecodeError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exceeded { limit } => {
                write!(formatter, "decoded, it takes more than {limit} bytes")
            }
            Self::Malformed(why) => formatter.write_str(why),
        }
    }
}

impl std::error::Error for DecodeError {}

/// Decodes a `T` that takes at most `limit` bytes from the start of `bytes`; returns it with the
/// bytes after it.
///
/// # Errors
/// [`DecodeError`]: it takes more, or the bytes are not those of a `T`.
pub fn decode<'a, T: Deserialize<'a>>(
    bytes: &'a [u8],
    limit: usize,
) -> Result<(T, &'a [u8]), DecodeError> {
    let mut decoder = Decoder::new(bytes, limit);
    Ok((decoder.decode()?, decoder.rest()))
}

/// Decodes values that follow one another, within one limit for all of them.
#[derive(Debug)]
pub struct Decoder<'a> {
    rest: &'a [u8],
    room: Room,
    limit: usize,
}

impl<'a> Decoder<'a> {
    /// A decoder of `bytes`, whose values take at most `limit` bytes together.
    #[must_use]
    pub fn new(bytes: &'a [u8], limit: usize) -> Self {
        let room = Room { left: Cell::new(limit), exceeded: Cell::new(false) };
        Self { rest: bytes, room, limit }
    }

    /// Bytes after the decoded values.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Decodes the next value.
    ///
    /// # Errors
    /// [`DecodeError`]: it and those before it take more than the limit, or the bytes are not those
    /// of a `T`.
    pub fn decode<T: Deserialize<'a>>(&mut self) -> Result<T, DecodeError> {
        let (value, rest) = self.read(self.rest)?;
        self.rest = rest;
        Ok(value)
    }

    /// Decodes a value from the start of other bytes, such as a decoded list, within what is left
    /// of the limit.
    ///
    /// # Errors
    /// As [`Decoder::decode`].
    pub fn decode_inner<'b, T: Deserialize<'b>>(
        &mut self,
        bytes: &'b [u8],
    ) -> Result<T, DecodeError> {
        Ok(self.read(bytes)?.0)
    }

    fn read<'b, T: Deserialize<'b>>(&self, bytes: &'b [u8]) -> Result<(T, &'b [u8]), DecodeError> {
        let mut inner = postcard::Deserializer::from_bytes(bytes);
        let decoded = T::deserialize(BoundedDecoder { inner: &mut inner, room: &self.room });
        let decoded = decoded.and_then(|value| Ok((value, inner.finalize()?)));
        decoded.map_err(|error| match self.room.exceeded.get() {
            true => DecodeError::Exceeded { limit: self.limit },
            false => DecodeError::Malformed(error.to_string()),
        })
    }
}

/// Memory that is left.
#[derive(Debug)]
struct Room {
    left: Cell<usize>,
    exceeded: Cell<bool>,
}

impl Room {
    fn take<E: Error>(&self, bytes: usize) -> Result<(), E> {
        let Some(left) = self.left.get().checked_sub(bytes) else {
            self.exceeded.set(true);
            return Err(E::custom("it takes too much memory"));
        };
        self.left.set(left);
        Ok(())
    }
}

/// Subtracts memory and passes calls to another implementation of the same trait of serde.
struct BoundedDecoder<'m, T> {
    inner: T,
    room: &'m Room,
}

/// A visitor. The items of a `list` are on the heap, those of a structure inside it.
struct BoundedVisitor<'m, V> {
    inner: V,
    room: &'m Room,
    list: bool,
}

/// Items of a list, a map or a structure.
struct Items<'m, A> {
    inner: A,
    room: &'m Room,
    list: bool,
    first: bool,
    /// Bytes of the last key.
    key: usize,
}

impl<'m, A> Items<'m, A> {
    fn new(inner: A, room: &'m Room, list: bool) -> Self {
        Self { inner, room, list, first: true, key: 0 }
    }

    /// Subtracts an item of `size` bytes, times the factor for growth.
    fn item<E: Error>(&mut self, size: usize, times: usize) -> Result<(), E> {
        if !self.list {
            return Ok(());
        }
        let first = if std::mem::take(&mut self.first) { FIRST_ITEMS * size + NODE } else { 0 };
        // A set of single bytes has at most 256 items.
        let node = if size > 1 { ENTRY } else { 0 };
        // One of no bytes takes time: the input may claim any number of them.
        self.room.take(first.saturating_add(times * size + node).max(1))
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Items<'_, A> {
    type Error = A::Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, A::Error> {
        let item = self.inner.next_element_seed(BoundedDecoder { inner: seed, room: self.room })?;
        // Before the list stores it.
        if item.is_some() {
            self.item(size_of::<T::Value>(), LIST_ITEMS)?;
        }
        Ok(item)
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Items<'_, A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        let key = self.inner.next_key_seed(BoundedDecoder { inner: seed, room: self.room })?;
        self.key = size_of::<K::Value>();
        Ok(key)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        let value = self.inner.next_value_seed(BoundedDecoder { inner: seed, room: self.room })?;
        // A key and a value may each be aligned to the other.
        self.item((self.key + size_of::<V::Value>()).next_multiple_of(8), MAP_ITEMS)?;
        Ok(value)
    }
}

impl<'de, T: DeserializeSeed<'de>> DeserializeSeed<'de> for BoundedDecoder<'_, T> {
    type Value = T::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T::Value, D::Error> {
        self.inner.deserialize(BoundedDecoder { inner: deserializer, room: self.room })
    }
}

impl<'de, 'm, A: EnumAccess<'de>> EnumAccess<'de> for BoundedDecoder<'m, A> {
    type Error = A::Error;
    type Variant = BoundedDecoder<'m, A::Variant>;

    fn variant_seed<V: DeserializeSeed<'de>>(
        self,
        seed: V,
    ) -> Result<(V::Value, Self::Variant), A::Error> {
        let room = self.room;
        let (value, inner) = self.inner.variant_seed(BoundedDecoder { inner: seed, room })?;
        Ok((value, BoundedDecoder { inner, room }))
    }
}

impl<'de, A: VariantAccess<'de>> VariantAccess<'de> for BoundedDecoder<'_, A> {
    type Error = A::Error;

    fn unit_variant(self) -> Result<(), A::Error> {
        self.inner.unit_variant()
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, A::Error> {
        self.inner.newtype_variant_seed(BoundedDecoder { inner: seed, room: self.room })
    }

    fn tuple_variant<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, A::Error> {
        let visitor = BoundedVisitor { inner: visitor, room: self.room, list: false };
        self.inner.tuple_variant(len, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        let visitor = BoundedVisitor { inner: visitor, room: self.room, list: false };
        self.inner.struct_variant(fields, visitor)
    }
}

/// Visits a plain value.
macro_rules! visit {
    ($($method:ident: $type:ty,)*) => {$(
        fn $method<E: Error>(self, value: $type) -> Result<V::Value, E> {
            self.inner.$method(value)
        }
    )*};
}

/// Visits a value whose bytes may be copied.
macro_rules! visit_bytes {
    ($($method:ident: $type:ty,)*) => {$(
        fn $method<E: Error>(self, value: $type) -> Result<V::Value, E> {
            self.room.take(value.len().saturating_add(ENTRY))?;
            self.inner.$method(value)
        }
    )*};
}

impl<'de, V: Visitor<'de>> Visitor<'de> for BoundedVisitor<'_, V> {
    type Value = V::Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(formatter)
    }

    visit! {
        visit_bool: bool,
        visit_i8: i8,
        visit_i16: i16,
        visit_i32: i32,
        visit_i64: i64,
        visit_i128: i128,
        visit_u8: u8,
        visit_u16: u16,
        visit_u32: u32,
        visit_u64: u64,
        visit_u128: u128,
        visit_f32: f32,
        visit_f64: f64,
        visit_char: char,
    }

    visit_bytes! {
        visit_str: &str,
        visit_borrowed_str: &'de str,
        visit_string: String,
        visit_bytes: &[u8],
        visit_borrowed_bytes: &'de [u8],
        visit_byte_buf: Vec<u8>,
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        self.inner.visit_some(BoundedDecoder { inner: deserializer, room: self.room })
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> Result<V::Value, D::Error> {
        self.inner.visit_newtype_struct(BoundedDecoder { inner: deserializer, room: self.room })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<V::Value, A::Error> {
        self.inner.visit_seq(Items::new(items, self.room, self.list))
    }

    fn visit_map<A: MapAccess<'de>>(self, entries: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(Items::new(entries, self.room, self.list))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, variant: A) -> Result<V::Value, A::Error> {
        self.inner.visit_enum(BoundedDecoder { inner: variant, room: self.room })
    }
}

/// The place of the parts of a value.
enum Kind {
    /// It has none, or its visitor subtracts them.
    Plain,
    /// Inside it. It may be boxed.
    Whole,
    /// On the heap.
    List,
}

/// Deserializes with arguments that pass unchanged.
macro_rules! deserialize {
    ($($method:ident($($name:ident: $type:ty),*): $kind:expr,)*) => {$(
        fn $method<V: Visitor<'de>>(
            self,
            $($name: $type,)*
            visitor: V,
        ) -> Result<V::Value, D::Error> {
            if matches!($kind, Kind::Whole) {
                self.room.take(size_of::<V::Value>())?;
            }
            let list = matches!($kind, Kind::List);
            self.inner.$method($($name,)* BoundedVisitor { inner: visitor, room: self.room, list })
        }
    )*};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for BoundedDecoder<'_, D> {
    type Error = D::Error;

    deserialize! {
        deserialize_any(): Kind::Plain,
        deserialize_bool(): Kind::Plain,
        deserialize_i8(): Kind::Plain,
        deserialize_i16(): Kind::Plain,
        deserialize_i32(): Kind::Plain,
        deserialize_i64(): Kind::Plain,
        deserialize_i128(): Kind::Plain,
        deserialize_u8(): Kind::Plain,
        deserialize_u16(): Kind::Plain,
        deserialize_u32(): Kind::Plain,
        deserialize_u64(): Kind::Plain,
        deserialize_u128(): Kind::Plain,
        deserialize_f32(): Kind::Plain,
        deserialize_f64(): Kind::Plain,
        deserialize_char(): Kind::Plain,
        deserialize_str(): Kind::Plain,
        deserialize_string(): Kind::Plain,
        deserialize_bytes(): Kind::Plain,
        deserialize_byte_buf(): Kind::Plain,
        deserialize_option(): Kind::Plain,
        deserialize_unit(): Kind::Plain,
        deserialize_identifier(): Kind::Plain,
        deserialize_ignored_any(): Kind::Plain,
        deserialize_unit_struct(name: &'static str): Kind::Plain,
        deserialize_newtype_struct(name: &'static str): Kind::Whole,
        deserialize_tuple(len: usize): Kind::Whole,
        deserialize_tuple_struct(name: &'static str, len: usize): Kind::Whole,
        deserialize_struct(name: &'static str, fields: &'static [&'static str]): Kind::Whole,
        deserialize_enum(name: &'static str, variants: &'static [&'static str]): Kind::Whole,
        deserialize_seq(): Kind::List,
        deserialize_map(): Kind::List,
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}
