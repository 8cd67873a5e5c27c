//! JSON of strangers, decoded within a budget.
//!
//! Promises: a value with more bytes, levels or values than the limits is an error before the
//! memory for it is allocated. The decoded value takes at most the bytes of its text and half a
//! MiB.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Maximum bytes of one value.
pub const MAX_BYTES: usize = 256 << 10;
/// Maximum levels of lists and objects.
const MAX_LEVELS: usize = 32;
/// Maximum values, with [`OBJECT_UNITS`] for each object.
const MAX_UNITS: usize = 16 << 10;
/// An object allocates room for its first entries at once.
const OBJECT_UNITS: usize = 20;

/// Decodes a text.
///
/// # Errors
/// If it is beyond a limit, or is no JSON.
pub fn decode(text: &str) -> Result<Value, String> {
    if text.len() > MAX_BYTES {
        return Err(format!("has {} bytes, and may have {MAX_BYTES}", text.len()));
    }
    let units = Cell::new(MAX_UNITS);
    let seed = Budget { levels: MAX_LEVELS, units: &units };
    let mut text = serde_json::Deserializer::from_str(text);
    seed.deserialize(&mut text).map_err(|error| error.to_string())
}

/// The rest of the limits, for one value.
#[derive(Clone, Copy)]
struct Budget<'a> {
    levels: usize,
    units: &'a Cell<usize>,
}

impl Budget<'_> {
    fn charge<E: Error>(self, units: usize) -> Result<(), E> {
        let left = self.units.get().checked_sub(units);
        self.units.set(left.ok_or_else(|| E::custom(format!("has over {MAX_UNITS} values")))?);
        Ok(())
    }

    fn descend<E: Error>(self) -> Result<Self, E> {
        let levels = self.levels.checked_sub(1);
        let levels = levels.ok_or_else(|| E::custom(format!("has over {MAX_LEVELS} levels")))?;
        Ok(Self { levels, ..self })
    }
}

impl<'de> DeserializeSeed<'de> for Budget<'_> {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        self.charge(1)?;
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Budget<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let within = self.descend()?;
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(within)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let within = self.descend()?;
        self.charge(OBJECT_UNITS)?;
        let mut fields = Map::new();
        while let Some(name) = entries.next_key::<String>()? {
            self.charge(1)?;
            fields.insert(name, entries.next_value_seed(within)?);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_within_the_limits_is_decoded_as_serde_does() {
        let text = r#"{"a": [1, -2, 0.5, "b", null, true, {}], "c": {"d": []}}"#;
        assert_eq!(decode(text), Ok(serde_json::from_str(text).unwrap()));
        let nested = "[".repeat(MAX_LEVELS) + &"]".repeat(MAX_LEVELS);
        assert!(decode(&nested).is_ok());
    }

    #[test]
    fn levels_values_and_bytes_have_limits() {
        for levels in [MAX_LEVELS + 1, 127, 129, 50_000] {
            let text = "[".repeat(levels) + &"]".repeat(levels);
            assert!(decode(&text).unwrap_err().contains("over 32 levels"), "{levels}");
        }
        let objects = format!("[{}{{}}]", r#"{"":0},"#.repeat(1000));
        assert!(decode(&objects).unwrap_err().contains("values"));
        let numbers = format!("[{}0]", "0,".repeat(MAX_UNITS));
        assert!(decode(&numbers).unwrap_err().contains("values"));
        let text = format!("{:?}", "a".repeat(MAX_BYTES));
        assert!(decode(&text).unwrap_err().contains("bytes"));
        assert!(decode("{").is_err());
    }
}
