//! Values of programs, as JSON where they can be, and as text where the guest shows none itself.
//!
//! Promises: nesting ends at [`MAX_DEPTH`], and a value takes at most [`MAX_JSON`] bytes of memory.
//! May break it: a value of `serde_json` that takes more than is charged for it; a test measures
//! that.

use afresh_budget::{Budget, BudgetExceeded, Charge};
use minicbor::Decoder;
use minicbor::data::Type;
use minicbor::decode::Error;
use serde_json::{Map, Number, Value};

use crate::tag::{DAY, DECIMAL, FLOATS, INTEGERS, MAX_DEPTH, SET, TIMESTAMP, TUPLE, UUID};

/// Maximum bytes of memory that one value may take as JSON.
const MAX_JSON: usize = 64 << 20;
/// Maximum lists and objects around a part of a JSON value. Parsers refuse more than 127, and
/// servers enclose the value in further objects.
const MAX_JSON_DEPTH: usize = 100;
/// Bytes of the tables of an object, for each entry.
const ENTRY: usize = 64;

/// Reads the next value as JSON. Bytes, functions, numbers that are too large, values nested deeper
/// than [`MAX_JSON_DEPTH`] and values that take more than [`MAX_JSON`] have none. A damaged value
/// is an error.
pub(crate) fn read(from: &mut Decoder<'_>) -> Result<Option<Value>, Error> {
    let begin = from.position();
    let mut values = Values { from, charge: Budget::new("value", MAX_JSON).empty() };
    match values.read(0) {
        Ok(value) => Ok(value),
        Err(ConversionFailure::TooLarge) => {
            from.set_position(begin);
            from.skip()?;
            Ok(None)
        }
        Err(ConversionFailure::Damaged(error)) => Err(error),
    }
}

enum ConversionFailure {
    Damaged(Error),
    TooLarge,
}

impl From<Error> for ConversionFailure {
    fn from(error: Error) -> Self {
        Self::Damaged(error)
    }
}

impl From<BudgetExceeded> for ConversionFailure {
    fn from(_: BudgetExceeded) -> Self {
        Self::TooLarge
    }
}

/// Reads nested values. Their size in memory is charged first.
struct Values<'a, 'b> {
    from: &'a mut Decoder<'b>,
    charge: Charge,
}

impl Values<'_, '_> {
    fn read(&mut self, depth: usize) -> Result<Option<Value>, ConversionFailure> {
        if depth > MAX_DEPTH {
            return Err(Error::message("it is nested too deep").into());
        }
        // A list that grows has room for twice its members, and for their copies.
        self.charge.add_items::<Value>(3)?;
        let from = &mut *self.from;
        Ok(match from.datatype()? {
            Type::Undefined => {
                from.undefined()?;
                None
            }
            Type::Null => {
                from.null()?;
                Some(Value::Null)
            }
            Type::Bool => Some(Value::Bool(from.bool()?)),
            Type::F32 | Type::F64 => Number::from_f64(from.f64()?).map(Value::Number),
            Type::String => {
                let text = from.str()?;
                self.charge.add(text.len())?;
                Some(Value::String(text.to_owned()))
            }
            Type::Bytes => {
                from.bytes()?;
                None
            }
            Type::Array => self.list(depth)?,
            Type::Map => self.map(depth)?,
            Type::Tag => match from.tag()? {
                TUPLE | SET => self.list(depth)?,
                TIMESTAMP | DAY | DECIMAL => self.read(depth + 1)?,
                UUID => Some(Value::String(uuid(self.from.bytes()?)?)),
                INTEGERS => Some(self.words(|word| Some(i64::from_le_bytes(word).into()))?),
                FLOATS => {
                    let number =
                        |word| Number::from_f64(f64::from_le_bytes(word)).map(Value::Number);
                    Some(self.words(number)?)
                }
                _ => {
                    self.read(depth + 1)?;
                    None
                }
            },
            Type::Simple | Type::Break | Type::Unknown(_) => {
                return Err(Error::message("it is not a value").into());
            }
            _ => {
                let number = i128::from(from.int()?);
                let small = i64::try_from(number).map(Number::from);
                small.or_else(|_| u64::try_from(number).map(Number::from)).ok().map(Value::Number)
            }
        })
    }

    fn map(&mut self, depth: usize) -> Result<Option<Value>, ConversionFailure> {
        let mut all = (depth < MAX_JSON_DEPTH).then(Map::new);
        for _ in 0..length(self.from.map()?)? {
            self.charge.add(ENTRY)?;
            let (key, value) = (self.read(depth + 1)?, self.read(depth + 1)?);
            let key = match key {
                Some(Value::String(key)) => Some(key),
                // As in JavaScript and Python's `json`.
                Some(key @ (Value::Number(_) | Value::Bool(_) | Value::Null)) => {
                    Some(key.to_string())
                }
                _ => None,
            };
            all = match (all, key, value) {
                (Some(mut all), Some(key), Some(value)) => {
                    all.insert(key, value);
                    Some(all)
                }
                _ => None,
            };
        }
        Ok(all.map(Value::Object))
    }

    fn list(&mut self, depth: usize) -> Result<Option<Value>, ConversionFailure> {
        let mut all = (depth < MAX_JSON_DEPTH).then(Vec::new);
        for _ in 0..length(self.from.array()?)? {
            let value = self.read(depth + 1)?;
            all = all.zip(value).map(|(mut all, value)| {
                all.push(value);
                all
            });
        }
        Ok(all.map(Value::Array))
    }

    /// Numbers as they are laid out in memory; values without a JSON number become null, as in
    /// JavaScript.
    fn words(
        &mut self,
        each: impl Fn([u8; 8]) -> Option<Value>,
    ) -> Result<Value, ConversionFailure> {
        let (words, rest) = self.from.bytes()?.as_chunks::<8>();
        if !rest.is_empty() {
            return Err(Error::message("numbers are cut off").into());
        }
        self.charge.add_items::<Value>(words.len())?;
        Ok(words.iter().map(|word| each(*word).unwrap_or(Value::Null)).collect())
    }
}

/// The text of a UUID.
fn uuid(bytes: &[u8]) -> Result<String, Error> {
    let bytes: [u8; 16] = bytes.try_into().map_err(|_| Error::message("a UUID is cut off"))?;
    let digits = format!("{:032x}", u128::from_be_bytes(bytes));
    let parts = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
    Ok(parts.join("-"))
}

fn length(given: Option<u64>) -> Result<u64, Error> {
    given.ok_or_else(|| Error::message("a length is missing"))
}

/// How a plain value shows that the guest did not show itself.
pub(crate) fn text(from: &mut Decoder<'_>) -> Result<String, Error> {
    if matches!(from.datatype()?, Type::F32 | Type::F64) {
        let number = from.f64()?;
        return Ok(match number {
            _ if number.is_nan() => "NaN".to_owned(),
            _ if number.is_infinite() => {
                if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
            }
            _ if number == 0.0 && number.is_sign_negative() => "-0".to_owned(),
            _ => number.to_string(),
        });
    }
    Ok(read(from)?.map_or_else(|| "?".to_owned(), |value| value.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static METER: afresh_budget::meter::Meter = afresh_budget::meter::Meter;

    #[test]
    fn only_values_with_a_json_form_become_json() {
        let read = |bytes: &[u8]| read(&mut Decoder::new(bytes));
        let json = |bytes: &[u8]| read(bytes).unwrap().map(|value| value.to_string());
        assert_eq!(
            json(b"\xa2\x61a\x82\x01\xf6\x05\xf5").as_deref(),
            Some(r#"{"a":[1,null],"5":true}"#)
        );
        assert_eq!(json(b"\xda\x00\x01\x00\x30\x82\x01\x02").as_deref(), Some("[1,2]"));
        assert_eq!(json(b"\xd8\x4f\x48\xff\xff\xff\xff\xff\xff\xff\xff").as_deref(), Some("[-1]"));
        assert_eq!(
            json(b"\x1b\xff\xff\xff\xff\xff\xff\xff\xff").as_deref(),
            Some("18446744073709551615")
        );
        assert_eq!(json(b"\x3b\xff\xff\xff\xff\xff\xff\xff\xff"), None);
        assert_eq!(json(b"\x82\x01\x41x"), None);
        assert_eq!(json(b"\xd8\x27\x82\x61f\x61g"), None);
        assert_eq!(json(b"\xda\x00\x01\x00\x31\x631.0").as_deref(), Some("\"1.0\""));
        assert_eq!(
            json(&[&b"\xd8\x25\x50"[..], &[0xab; 16]].concat()).as_deref(),
            Some("\"abababab-abab-abab-abab-abababababab\"")
        );
        for broken in [
            &b"\x82\x01"[..],
            b"\x9f\x01\xff",
            b"\xff",
            b"\xd8\x4f\x41x",
            b"\xd8\x25\x41x",
            b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff",
        ] {
            assert!(read(broken).is_err(), "{broken:?}");
        }
        assert!(read(&[0x81; 200]).is_err());
    }

    #[test]
    fn deep_values_have_no_json() {
        let nested = |head: &[u8], levels: usize| {
            let value = [head.repeat(levels), b"\xf6".to_vec()].concat();
            read(&mut Decoder::new(&value)).unwrap()
        };
        for head in [&b"\x81"[..], b"\xa1\x01"] {
            let text = nested(head, MAX_JSON_DEPTH).unwrap().to_string();
            serde_json::from_str::<Value>(&text).unwrap();
            assert_eq!(nested(head, MAX_JSON_DEPTH + 1), None);
            assert_eq!(nested(head, MAX_DEPTH), None);
        }
    }

    #[test]
    fn a_value_keeps_to_its_budget() {
        let list = |head: &[u8], member: &[u8], count: u32| {
            [head, &count.to_be_bytes(), &member.repeat(count as usize)].concat()
        };
        let pairs = |count: u32| -> Vec<u8> {
            let entries =
                (0..count).flat_map(|n| [&b"\x64"[..], &n.to_be_bytes(), b"\xf6"].concat());
            // Keys are text of four letters.
            [&b"\xba"[..], &count.to_be_bytes()].concat().into_iter().chain(entries).collect()
        };
        for bytes in [
            list(b"\x9a", b"\xf6", 10 << 20),
            list(b"\x9a", b"\x80", 4 << 20),
            list(b"\x9a", b"\x61x", 4 << 20),
            list(b"\x9a", b"\x81\xf6", 4 << 20),
            [&b"\xd8\x4f\x5a"[..], &(8u32 << 20).to_be_bytes(), &vec![1; 8 << 20]].concat(),
            pairs(1 << 7),
        ] {
            let (value, most) = afresh_budget::meter::peak(|| read(&mut Decoder::new(&bytes)));
            assert!(most <= MAX_JSON, "{most} bytes for {}", bytes.len());
            assert_eq!(value.unwrap().is_none(), bytes.len() > 1 << 20, "{}", bytes.len());
        }
        let small = list(b"\x9a", b"\xf6", 1000);
        assert_eq!(read(&mut Decoder::new(&small)).unwrap(), Some(vec![Value::Null; 1000].into()));
    }

    #[test]
    fn plain_values_show_as_javascript_shows_them() {
        let text = |bytes: &[u8]| text(&mut Decoder::new(bytes)).unwrap();
        assert_eq!(text(b"\xf5"), "true");
        assert_eq!(text(b"\x62a\""), "\"a\\\"\"");
        assert_eq!(text(b"\x18\x2a"), "42");
        assert_eq!(text(&[0xfb, 0x80, 0, 0, 0, 0, 0, 0, 0]), "-0");
        assert_eq!(text(&[0xfb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0]), "1.5");
        assert_eq!(text(&[0xfa, 0x7f, 0xc0, 0, 0]), "NaN");
    }
}
