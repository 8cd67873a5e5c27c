//! Values of programs, as JSON where they can be, and as text where the guest shows none itself.
//!
//! What it promises: nesting ends at [`DEEPEST`], and room is made for what was read, not for what is announced.

use minicbor::Decoder;
use minicbor::data::Type;
use minicbor::decode::Error;
use serde_json::{Map, Number, Value};

use crate::tag::{DAY, DEEPEST, FLOATS, INTEGERS, SET, TIMESTAMP, TUPLE};

/// Reads the next value: as JSON, or nothing where it is none (bytes, functions, numbers that are too large). What cannot be
/// read is an error.
pub(crate) fn read(from: &mut Decoder<'_>, depth: usize) -> Result<Option<Value>, Error> {
    if depth > DEEPEST {
        return Err(Error::message("it is nested too deep"));
    }
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
        Type::String => Some(Value::String(from.str()?.to_owned())),
        Type::Bytes => {
            from.bytes()?;
            None
        }
        Type::Array => list(from, depth)?,
        Type::Map => {
            let mut all = Some(Map::new());
            for _ in 0..length(from.map()?)? {
                let (key, value) = (read(from, depth + 1)?, read(from, depth + 1)?);
                let key = match key {
                    Some(Value::String(key)) => Some(key),
                    // As JavaScript and Python's `json` have it.
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
            all.map(Value::Object)
        }
        Type::Tag => match from.tag()? {
            TUPLE | SET => list(from, depth)?,
            TIMESTAMP | DAY => read(from, depth + 1)?,
            INTEGERS => Some(words(from, |word| Some(i64::from_le_bytes(word).into()))?),
            FLOATS => {
                let number = |word| Number::from_f64(f64::from_le_bytes(word)).map(Value::Number);
                Some(words(from, number)?)
            }
            _ => {
                read(from, depth + 1)?;
                None
            }
        },
        Type::Simple | Type::Break | Type::Unknown(_) => {
            return Err(Error::message("it is not a value"));
        }
        _ => {
            let number = i128::from(from.int()?);
            let small = i64::try_from(number).map(Number::from);
            small.or_else(|_| u64::try_from(number).map(Number::from)).ok().map(Value::Number)
        }
    })
}

fn length(given: Option<u64>) -> Result<u64, Error> {
    given.ok_or_else(|| Error::message("a length is missing"))
}

fn list(from: &mut Decoder<'_>, depth: usize) -> Result<Option<Value>, Error> {
    let mut all = Some(Vec::new());
    for _ in 0..length(from.array()?)? {
        let value = read(from, depth + 1)?;
        all = all.zip(value).map(|(mut all, value)| {
            all.push(value);
            all
        });
    }
    Ok(all.map(Value::Array))
}

/// Numbers as they lie in memory; what JSON has no number for is null there, as in JavaScript.
fn words(from: &mut Decoder<'_>, each: impl Fn([u8; 8]) -> Option<Value>) -> Result<Value, Error> {
    let (words, rest) = from.bytes()?.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(Error::message("numbers are cut off"));
    }
    Ok(words.iter().map(|word| each(*word).unwrap_or(Value::Null)).collect())
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
    Ok(read(from, 0)?.map_or_else(|| "?".to_owned(), |value| value.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_json_is_json_and_nothing_else_is() {
        let read = |bytes: &[u8]| read(&mut Decoder::new(bytes), 0);
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
        for broken in [
            &b"\x82\x01"[..],
            b"\x9f\x01\xff",
            b"\xff",
            b"\xd8\x4f\x41x",
            b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff",
        ] {
            assert!(read(broken).is_err(), "{broken:?}");
        }
        assert!(read(&[0x81; 200]).is_err());
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
