//! Values of guests as objects of a host language, which an [`ObjectBuilder`] makes.
//!
//! Promises: an object is charged to the caller's [`Charge`] before it is made. Nesting ends at
//! [`MAX_DEPTH`]. Each byte is read once, so the time is in proportion to the bytes, whatever they
//! contain. May break it: a builder whose objects are larger than its [`Costs`].

mod error;
mod scalar;
#[cfg(any(test, fuzzing))]
pub mod testing;

use afresh_budget::Charge;
use minicbor::Decoder;
use minicbor::data::{Tag, Type};

use crate::tag::{
    COMPLEX, DATE, DAY, DECIMAL, FLOATS, INTEGERS, MAX_DEPTH, NAMED, NEGATIVE, POSITIVE, SET,
    TIMESTAMP, TUPLE, UUID,
};
pub use error::DecodeError;
pub use scalar::Scalar;

/// Items after which [`ObjectBuilder::pause`] is called.
const PAUSE_INTERVAL: usize = 1 << 14;

/// Upper bounds of the bytes that objects of a builder occupy.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// A reference in a list.
    pub slot: usize,
    /// A number of at most 64 bits.
    pub number: usize,
    /// Text or bytes, without the content.
    pub text: usize,
    /// A byte of UTF-8 in text that is not ASCII.
    pub wide: usize,
    /// An empty list or tuple.
    pub list: usize,
    /// An empty map or set.
    pub map: usize,
    /// The table of a map or set that is not empty.
    pub table: usize,
    /// An entry of a map.
    pub entry: usize,
    /// A member of a set.
    pub member: usize,
    /// A pair of a key and a value.
    pub pair: usize,
    /// An object of a class.
    pub object: usize,
}

/// The set or list that a builder made of the members of a set.
pub enum BuiltSet<T> {
    /// A set.
    Set(T),
    /// A list, because a set would have lost a member.
    List(T),
}

/// A key and a value.
pub type Pair<T> = (T, T);

/// Makes the objects of a host language.
pub trait ObjectBuilder {
    /// An object.
    type Object;
    /// A list under construction.
    type List;
    /// A map under construction.
    type Map;
    /// The error of a value that was refused.
    type Error;

    /// The sizes of objects.
    const COSTS: Costs;

    /// The error for a value that the decoder refuses.
    fn refuse(&self, error: DecodeError) -> Self::Error;

    /// Called after many items: other threads may run meanwhile.
    fn pause(&mut self) {}

    /// Makes an object without parts.
    ///
    /// # Errors
    /// The builder's own.
    fn scalar(&mut self, scalar: Scalar<'_>) -> Result<Self::Object, Self::Error>;

    /// An empty list.
    ///
    /// # Errors
    /// The builder's own.
    fn begin_list(&mut self) -> Result<Self::List, Self::Error>;

    /// Adds an item.
    ///
    /// # Errors
    /// The builder's own.
    fn push(&mut self, list: &mut Self::List, item: Self::Object) -> Result<(), Self::Error>;

    /// A complete list.
    ///
    /// # Errors
    /// The builder's own.
    fn list(&mut self, list: Self::List) -> Result<Self::Object, Self::Error>;

    /// A tuple of the items.
    ///
    /// # Errors
    /// The builder's own.
    fn tuple(&mut self, list: Self::List) -> Result<Self::Object, Self::Error>;

    /// A set of the items. Each can be a key.
    ///
    /// # Errors
    /// The builder's own.
    fn set(&mut self, list: Self::List) -> Result<BuiltSet<Self::Object>, Self::Error>;

    /// An empty map.
    ///
    /// # Errors
    /// The builder's own.
    fn begin_map(&mut self) -> Result<Self::Map, Self::Error>;

    /// Adds an entry, whose key can be one. Returns both where the map has an equal key.
    ///
    /// # Errors
    /// The builder's own.
    fn insert(
        &mut self,
        map: &mut Self::Map,
        key: Self::Object,
        value: Self::Object,
    ) -> Result<Option<Pair<Self::Object>>, Self::Error>;

    /// A complete map.
    ///
    /// # Errors
    /// The builder's own.
    fn map(&mut self, map: Self::Map) -> Result<Self::Object, Self::Error>;

    /// The entries of a map as a list of pairs, with the keys as they were given.
    ///
    /// # Errors
    /// The builder's own.
    fn pairs(&mut self, map: Self::Map) -> Result<Self::List, Self::Error>;

    /// A pair.
    ///
    /// # Errors
    /// The builder's own.
    fn pair(&mut self, key: Self::Object, value: Self::Object)
    -> Result<Self::Object, Self::Error>;
}

/// An object with the answer whether it can be the key of a map or a member of a set. One that
/// contains a map, or a set that became a list, cannot: a key is converted once, and not at each
/// level above it.
struct BuiltObject<T> {
    object: T,
    is_key: bool,
}

struct Entry<T> {
    key: BuiltObject<T>,
    value: T,
}

/// Reads values, and charges their objects to one charge.
pub struct ObjectReader<'b, B> {
    from: Decoder<'b>,
    builder: B,
    charge: Charge,
    items: usize,
    /// Keys and sets around the current value, whose lists may be copied into keys.
    keys: usize,
}

impl<'b, B: ObjectBuilder> ObjectReader<'b, B> {
    /// Reads from `from`. The budget of `charge` limits all objects together.
    pub fn new(from: Decoder<'b>, builder: B, charge: Charge) -> Self {
        Self { from, builder, charge, items: 0, keys: 0 }
    }

    /// Bytes read so far.
    pub fn position(&self) -> usize {
        self.from.position()
    }

    /// Bytes charged so far.
    pub fn charged(&self) -> usize {
        self.charge.bytes()
    }

    /// Reads the next value.
    ///
    /// # Errors
    /// [`DecodeError`] as the builder's error, and the builder's own.
    pub fn read(&mut self) -> Result<B::Object, B::Error> {
        Ok(self.read_nested(0)?.object)
    }

    fn add(&mut self, bytes: usize) -> Result<(), B::Error> {
        self.charge.add(bytes).map_err(|exceeded| self.builder.refuse(exceeded.into()))
    }

    /// The result of a step of CBOR.
    fn step<T>(
        &mut self,
        step: impl FnOnce(&mut Decoder<'b>) -> Result<T, minicbor::decode::Error>,
    ) -> Result<T, B::Error> {
        step(&mut self.from).map_err(|error| self.builder.refuse(error.into()))
    }

    fn scalar(&mut self, scalar: Scalar<'_>) -> Result<BuiltObject<B::Object>, B::Error> {
        self.add(scalar.cost(&B::COSTS))?;
        Ok(BuiltObject { object: self.builder.scalar(scalar)?, is_key: true })
    }

    fn read_nested(&mut self, depth: usize) -> Result<BuiltObject<B::Object>, B::Error> {
        if depth > MAX_DEPTH {
            return Err(self.builder.refuse(DecodeError::TooDeep));
        }
        self.items += 1;
        if self.items.is_multiple_of(PAUSE_INTERVAL) {
            self.builder.pause();
        }
        self.add(B::COSTS.slot)?;
        match self.step(|from| from.datatype())? {
            Type::Array => {
                let (list, is_key, _) = self.read_items(depth)?;
                Ok(BuiltObject { object: self.builder.list(list)?, is_key })
            }
            Type::Map => Ok(BuiltObject { object: self.read_map(depth)?, is_key: false }),
            Type::Tag => {
                let tag = self.step(Decoder::tag)?;
                self.read_tagged(tag, depth)
            }
            kind => {
                let scalar = Scalar::read(&mut self.from, kind);
                let scalar = scalar.map_err(|error| self.builder.refuse(error))?;
                self.scalar(scalar)
            }
        }
    }

    /// A number of parts.
    fn length(
        &mut self,
        head: impl FnOnce(&mut Decoder<'b>) -> Result<Option<u64>, minicbor::decode::Error>,
    ) -> Result<u64, B::Error> {
        let length = self.step(head)?;
        length.ok_or_else(|| self.builder.refuse(DecodeError::NoLength))
    }

    /// The items of an array, whether each can be a key, and their number.
    fn read_items(&mut self, depth: usize) -> Result<(B::List, bool, usize), B::Error> {
        // A key is a copy of its list.
        let copies = if self.keys > 0 { 2 } else { 1 };
        self.add(copies * B::COSTS.list)?;
        let mut list = self.builder.begin_list()?;
        let (mut are_keys, mut count) = (true, 0);
        for _ in 0..self.length(|from| from.array())? {
            // The copy, and the room for twice its items while it grows.
            self.add((copies - 1) * 3 * B::COSTS.slot)?;
            let item = self.read_nested(depth + 1)?;
            are_keys &= item.is_key;
            count += 1;
            self.builder.push(&mut list, item.object)?;
        }
        Ok((list, are_keys, count))
    }

    /// A map; a list of pairs where a map would lose an entry.
    fn read_map(&mut self, depth: usize) -> Result<B::Object, B::Error> {
        self.add(B::COSTS.map)?;
        let mut map = self.builder.begin_map()?;
        let entries = self.length(|from| from.map())?;
        if entries > 0 {
            self.add(B::COSTS.table)?;
        }
        for before in 0..entries {
            self.add(B::COSTS.entry)?;
            let Entry { key, value } = self.read_entry(depth)?;
            let refused = match key.is_key {
                true => self.builder.insert(&mut map, key.object, value)?,
                false => Some((key.object, value)),
            };
            if let Some((key, value)) = refused {
                let before = usize::try_from(before).unwrap_or(usize::MAX);
                self.add(before.saturating_mul(B::COSTS.pair))?;
                let list = self.builder.pairs(map)?;
                return self.read_pairs(list, key, value, entries - before as u64 - 1, depth);
            }
        }
        self.builder.map(map)
    }

    fn read_entry(&mut self, depth: usize) -> Result<Entry<B::Object>, B::Error> {
        self.keys += 1;
        let key = self.read_nested(depth + 1)?;
        self.keys -= 1;
        Ok(Entry { key, value: self.read_nested(depth + 1)?.object })
    }

    /// Adds a pair, and the remaining entries of a map, to the list.
    fn read_pairs(
        &mut self,
        mut list: B::List,
        mut key: B::Object,
        mut value: B::Object,
        remaining: u64,
        depth: usize,
    ) -> Result<B::Object, B::Error> {
        for _ in 0..remaining {
            self.add_pair(&mut list, key, value)?;
            let next = self.read_entry(depth)?;
            (key, value) = (next.key.object, next.value);
        }
        self.add_pair(&mut list, key, value)?;
        self.builder.list(list)
    }

    fn add_pair(
        &mut self,
        list: &mut B::List,
        key: B::Object,
        value: B::Object,
    ) -> Result<(), B::Error> {
        self.add(B::COSTS.pair)?;
        let pair = self.builder.pair(key, value)?;
        self.builder.push(list, pair)
    }

    fn read_set(&mut self, depth: usize) -> Result<BuiltObject<B::Object>, B::Error> {
        self.keys += 1;
        let (members, are_keys, count) = self.read_items(depth)?;
        self.keys -= 1;
        if !are_keys {
            return Ok(BuiltObject { object: self.builder.list(members)?, is_key: false });
        }
        // A set that is a key is a copy too.
        let copies = if self.keys > 0 { 2 } else { 1 };
        let table = B::COSTS.map + B::COSTS.table;
        self.add(copies * table.saturating_add(count.saturating_mul(B::COSTS.member)))?;
        Ok(match self.builder.set(members)? {
            BuiltSet::Set(object) => BuiltObject { object, is_key: true },
            BuiltSet::List(object) => BuiltObject { object, is_key: false },
        })
    }

    fn read_tagged(&mut self, tag: Tag, depth: usize) -> Result<BuiltObject<B::Object>, B::Error> {
        match tag {
            TUPLE => {
                let (list, is_key, count) = self.read_items(depth)?;
                // The list exists until the tuple does.
                self.add(B::COSTS.list + count.saturating_mul(B::COSTS.slot))?;
                return Ok(BuiltObject { object: self.builder.tuple(list)?, is_key });
            }
            SET => return self.read_set(depth),
            DATE | TIMESTAMP | DAY | DECIMAL | UUID | COMPLEX | INTEGERS | FLOATS | POSITIVE
            | NEGATIVE | NAMED => {}
            other => return Err(self.builder.refuse(DecodeError::UnknownTag(other.as_u64()))),
        }
        let scalar = Scalar::read_tagged(&mut self.from, tag);
        let scalar = scalar.map_err(|error| self.builder.refuse(error))?;
        self.scalar(scalar)
    }
}

#[cfg(test)]
mod tests {
    use afresh_budget::Budget;
    use afresh_budget::meter::peak;

    use super::testing::{Tree, TreeBuilder};
    use super::*;

    fn read(bytes: &[u8], limit: usize) -> (Result<Tree, DecodeError>, usize, usize) {
        let charge = Budget::new("value", limit).empty();
        let mut reader = ObjectReader::new(Decoder::new(bytes), TreeBuilder::default(), charge);
        let value = reader.read();
        (value, reader.builder.calls, reader.charged())
    }

    fn head(major: u8, count: usize) -> Vec<u8> {
        [&[major << 5 | 26][..], &u32::try_from(count).unwrap().to_be_bytes()].concat()
    }

    #[test]
    fn values_of_every_kind_are_read() {
        let shown = |bytes: &[u8]| match read(bytes, 1 << 20).0 {
            Ok(value) => value.to_string(),
            Err(error) => error.to_string(),
        };
        for (bytes, value) in [
            (&b"\x84\xf7\xf6\xf5\x20"[..], "[undefined, null, true, -1]"),
            (
                b"\x82\xfa\x3f\x80\x00\x00\x1b\xff\xff\xff\xff\xff\xff\xff\xff",
                "[1.0, 18446744073709551615]",
            ),
            (b"\xa2\x61a\x41x\x01\x80", "{\"a\": b[78], 1: []}"),
            (b"\xda\x00\x01\x00\x30\x82\x01\x02", "(1, 2)"),
            (b"\xd9\x01\x02\x82\x01\x02", "set[1, 2]"),
            // Equal members, and a member that is a map.
            (b"\xd9\x01\x02\x82\x01\x01", "[1, 1]"),
            (b"\xd9\x01\x02\x82\x01\xa0", "[1, {}]"),
            // Equal keys, and a key that is a map.
            (b"\xa3\x01\x02\x03\x04\x01\x05", "[(1, 2), (3, 4), (1, 5)]"),
            (b"\xa2\x01\x02\xa0\x03", "[(1, 2), ({}, 3)]"),
            (b"\xd8\x4f\x48\xff\xff\xff\xff\xff\xff\xff\xff", "[-1]"),
            (b"\xd8\x56\x48\x00\x00\x00\x00\x00\x00\xf8\x3f", "[1.5]"),
            (b"\xd9\xa7\xf8\x82\xfa\x3f\x80\x00\x00\xfa\x40\x00\x00\x00", "1.0+2.0i"),
            (b"\xc1\xfa\x3f\x80\x00\x00", "date 1.0"),
            (b"\xc0\x61t", "time t"),
            (b"\xd9\x03\xec\x61d", "day d"),
            (b"\xda\x00\x01\x00\x31\x631.0", "decimal 1.0"),
            (b"\xc2\x42\x01\x00", "b[1, 0]"),
            (b"\xc3\x41\x01", "b[fe]"),
            (b"\xd8\x27\x82\x61f\x61g", "f g"),
            (b"\xd8\x4f\x41x", "packed numbers in the guest value are cut off"),
            (b"\xd8\x25\x41x", "a UUID in the guest value does not have 16 bytes"),
            (b"\x9f\x01\xff", "a length is missing in the guest's value"),
            (b"\xff", "the guest's bytes are not a value"),
            (b"\xd8\x63\x01", "the guest's value has parts of an unknown kind (tag 99)"),
            (&[0x81; 200], "the value of the guest is nested deeper than 128 levels"),
        ] {
            assert_eq!(shown(bytes), value, "{bytes:x?}");
        }
        assert!(shown(b"\x82\x01").contains("cannot be decoded"));
    }

    /// Values whose objects are many times larger than their bytes.
    fn amplifying() -> Vec<Vec<u8>> {
        const COUNT: usize = 100_000;
        let list = |item: &[u8]| [head(4, COUNT), item.repeat(COUNT)].concat();
        let numbers = |major, stride: usize| -> Vec<u8> {
            let items = (0..COUNT).flat_map(|n| [head(0, n), b"\xf6".repeat(stride - 1)].concat());
            head(major, COUNT).into_iter().chain(items).collect()
        };
        vec![
            list(b"\xf6"),
            list(b"\x80"),
            list(b"\xa0"),
            list(b"\x81\xf6"),
            list(b"\x60"),
            numbers(5, 2),
            [&b"\xd9\x01\x02"[..], &numbers(4, 1)].concat(),
            // Equal keys: pairs.
            [head(5, COUNT), b"\x01\xf6".repeat(COUNT)].concat(),
            // A key that is a long list, and a member that is one.
            [&b"\xa1"[..], &list(b"\xf6"), b"\xf6"].concat(),
            [&b"\xd9\x01\x02\x81"[..], &list(b"\x80")].concat(),
            [&b"\xd8\x4f\x5a"[..], &0x000c_0000_u32.to_be_bytes(), &vec![1; 0xc_0000]].concat(),
        ]
    }

    #[test]
    fn objects_are_charged_before_they_are_made() {
        for (number, bytes) in amplifying().iter().enumerate() {
            for limit in [64 << 10, 1 << 20, 1 << 30] {
                let ((value, _, charged), most) = peak(|| read(bytes, limit));
                assert!(most <= charged.max(1 << 10), "{number}: {most} bytes, {charged} charged");
                let fits = limit == 1 << 30;
                assert_eq!(value.is_ok(), fits, "{number}: {value:?}");
                assert!(fits || matches!(value, Err(DecodeError::TooLarge { .. })));
            }
        }
    }

    #[test]
    fn a_length_alone_allocates_nothing() {
        for head in [0x9b, 0xbb] {
            let bytes = [head, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
            let ((value, _, charged), _) = peak(|| read(&bytes, usize::MAX));
            assert!(value.is_err());
            assert!(charged < 4 << 10, "{charged}");
        }
    }

    #[test]
    fn nested_maps_with_equal_keys_are_read_once() {
        // Each map has a map at its first key, and then the first key again.
        let nest = |begin: &[u8], middle: &[u8], end: &[u8]| {
            [begin.repeat(100), middle.to_vec(), end.repeat(100)].concat()
        };
        for bytes in [
            nest(b"\xa2\x01", b"\xf6", b"\x01\xf6"),
            // A map whose key is a map, and a set in a set with equal members.
            nest(b"\xa1", b"\xf6", b"\xf6"),
            nest(b"\xd9\x01\x02\x83\x01\x01", b"\xf6", b""),
        ] {
            let (value, calls, charged) = read(&bytes, 1 << 20);
            assert!(value.is_ok(), "{value:?}");
            assert!(calls <= 4 * bytes.len(), "{calls} calls for {} bytes", bytes.len());
            assert!(charged <= 4096 * bytes.len(), "{charged} bytes for {}", bytes.len());
        }
    }
}
