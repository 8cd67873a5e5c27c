//! Values on their way in and out, as CBOR (RFC 8949).
//!
//! | here | there |
//! |---|---|
//! | undefined, null, booleans, strings | the same |
//! | numbers | integers where they are whole and exact, else 64-bit floats |
//! | BigInt | integers, of any size by tags 2 and 3 |
//! | ArrayBuffer, Uint8Array | bytes |
//! | arrays, other typed arrays | arrays; numbers of typed arrays as in memory, by tags 79 and 86 |
//! | Map | maps; Set: tag 258 and an array; Date: tag 1 and seconds; on the way in also as text, by tags 0 and 1004 |
//! | strings | on the way in also UUIDs (tag 37) and decimal numbers (tag 65585) |
//! | other objects | maps of own properties |
//! | functions, symbols, promises, errors, regular expressions | tag 39 and `[kind, text]`: only named, never carried |
//!
//! Nothing deeper than [`MAX_DEPTH`] is carried, so that a cycle ends.

use minicbor::data::{Tag, Type as Item};
use minicbor::{Decoder, Encoder};
use rquickjs::function::Args;
use rquickjs::{
    Array, ArrayBuffer, BigInt, Ctx, Function, IntoJs, Object, Persistent, Type, TypedArray, Value,
};

/// How deep a value may be nested.
const MAX_DEPTH: usize = 128;
/// A date and time as text, in local time where it names no zone.
const TIMESTAMP: Tag = Tag::new(0);
const DATE: Tag = Tag::new(1);
const POSITIVE: Tag = Tag::new(2);
const NEGATIVE: Tag = Tag::new(3);
const NAMED: Tag = Tag::new(39);
const SET: Tag = Tag::new(258);
/// A day as text.
const DAY: Tag = Tag::new(1004);
const UUID: Tag = Tag::new(37);
/// A private tag: a decimal number as text.
const DECIMAL: Tag = Tag::new(65_585);
/// Many integers as in memory, 64 bits each and little-endian.
const INTEGERS: Tag = Tag::new(79);
/// The same in floating point.
const FLOATS: Tag = Tag::new(86);
/// Maximum elements of an array. A sparse one can have more than could be written within hours.
const MAX_ARRAY: usize = 1 << 24;
/// The largest whole number that a number holds exactly.
const EXACT: f64 = 9_007_199_254_740_991.0;

/// Why a value cannot be carried.
#[derive(Debug)]
pub(crate) struct Failed(pub(crate) String);

impl From<rquickjs::Error> for Failed {
    fn from(error: rquickjs::Error) -> Self {
        Self(error.to_string())
    }
}

impl From<minicbor::decode::Error> for Failed {
    fn from(error: minicbor::decode::Error) -> Self {
        Self(format!("the host's value cannot be decoded: {error}"))
    }
}

impl From<minicbor::encode::Error<std::convert::Infallible>> for Failed {
    fn from(error: minicbor::encode::Error<std::convert::Infallible>) -> Self {
        Self(error.to_string())
    }
}

type Result<T> = std::result::Result<T, Failed>;

/// The helpers of the prelude, which no program can replace.
pub(crate) struct Helpers(Persistent<Object<'static>>);

impl Helpers {
    pub(crate) fn new(helpers: Persistent<Object<'static>>) -> Self {
        Self(helpers)
    }

    /// Calls the helper of this name.
    pub(crate) fn call<'js, R: rquickjs::FromJs<'js>>(
        &self,
        ctx: &Ctx<'js>,
        name: &str,
        arguments: impl rquickjs::function::IntoArgs<'js>,
    ) -> rquickjs::Result<R> {
        let helpers = self.0.clone().restore(ctx)?;
        helpers.get::<_, Function<'_>>(name)?.call(arguments)
    }

    /// A string as UTF-8; invalid parts are replaced.
    pub(crate) fn text<'js>(&self, ctx: &Ctx<'js>, value: &Value<'js>) -> Result<String> {
        let Some(string) = value.as_string() else {
            return Err(Failed("it is no string".to_owned()));
        };
        match string.to_string() {
            Ok(text) => Ok(text),
            Err(_) => {
                let well: rquickjs::String<'_> = self.call(ctx, "wellFormed", (value.clone(),))?;
                Ok(well.to_string()?)
            }
        }
    }

    /// As a prompt would show it.
    pub(crate) fn show<'js>(&self, ctx: &Ctx<'js>, value: Value<'js>) -> Result<String> {
        let shown: Value<'_> = self.call(ctx, "show", (value,))?;
        self.text(ctx, &shown)
    }

    /// Writes a value.
    pub(crate) fn encode<'js>(
        &self,
        ctx: &Ctx<'js>,
        value: Value<'js>,
        out: &mut Encoder<&mut Vec<u8>>,
        depth: usize,
    ) -> Result<()> {
        if depth > MAX_DEPTH {
            return Err(Failed(format!(
                "it is nested deeper than {MAX_DEPTH} levels, or refers to itself"
            )));
        }
        match value.type_of() {
            Type::Undefined | Type::Uninitialized => out.undefined()?,
            Type::Null => out.null()?,
            Type::Bool => out.bool(value.as_bool().unwrap_or_default())?,
            Type::Int => out.i32(value.as_int().unwrap_or_default())?,
            Type::Float => number(value.as_float().unwrap_or(f64::NAN), out)?,
            Type::String => out.str(&self.text(ctx, &value)?)?,
            Type::BigInt => return self.encode_bigint(ctx, value, out),
            Type::Array => {
                let array = Array::from_value(value)?;
                // As a float: the array's own function expects fewer than 2^31.
                let length: f64 = array.as_object().get("length")?;
                if length > MAX_ARRAY as f64 {
                    return Err(Failed(format!(
                        "an array has {length} elements; at most {MAX_ARRAY} are carried, and typed arrays of any length"
                    )));
                }
                out.array(length as u64)?;
                for at in 0..array.len() {
                    self.encode(ctx, array.get(at)?, out, depth + 1)?;
                }
                out
            }
            Type::Function | Type::Constructor => return self.name(ctx, "function", value, out),
            Type::Symbol => return self.name(ctx, "symbol", value, out),
            Type::Promise => return self.name(ctx, "promise", value, out),
            Type::Exception => return self.name(ctx, "error", value, out),
            Type::Object | Type::Proxy => return self.encode_object(ctx, value, out, depth),
            other => return self.name(ctx, other.as_str(), value, out),
        };
        Ok(())
    }

    fn name<'js>(
        &self,
        ctx: &Ctx<'js>,
        kind: &str,
        value: Value<'js>,
        out: &mut Encoder<&mut Vec<u8>>,
    ) -> Result<()> {
        let shown = self.show(ctx, value)?;
        out.tag(NAMED)?.array(2)?.str(kind)?.str(&shown)?;
        Ok(())
    }

    fn encode_bigint<'js>(
        &self,
        ctx: &Ctx<'js>,
        value: Value<'js>,
        out: &mut Encoder<&mut Vec<u8>>,
    ) -> Result<()> {
        let text: Value<'_> = self.call(ctx, "hex", (value,))?;
        let text = self.text(ctx, &text)?;
        if let Ok(number) = i64::from_str_radix(&text, 16) {
            out.i64(number)?;
            return Ok(());
        }
        // Tag 3 means minus one minus the number that follows.
        let (negative, digits) = match text.strip_prefix('-') {
            Some(digits) => (true, digits),
            None => (false, &*text),
        };
        let mut bytes = magnitude(digits);
        if negative {
            decrement(&mut bytes);
        }
        out.tag(if negative { NEGATIVE } else { POSITIVE })?.bytes(&bytes)?;
        Ok(())
    }

    /// Writes the numbers of a typed array, as they are in memory; `false` for one whose numbers
    /// need another form.
    fn encode_words<'js>(
        &self,
        ctx: &Ctx<'js>,
        value: &Value<'js>,
        out: &mut Encoder<&mut Vec<u8>>,
    ) -> Result<bool> {
        let name: String = self.call(ctx, "viewName", (value.clone(),))?;
        let bytes: TypedArray<'_, u8> = self.call(ctx, "viewBytes", (value.clone(),))?;
        let Some(bytes) = bytes.as_raw() else {
            return Err(Failed("its buffer is detached".to_owned()));
        };
        // SAFETY: the buffer belongs to the array, which is held here, and no program runs while
        // the bytes are read.
        let bytes = unsafe { bytes.as_ref() };
        let (tag, words) = match &*name {
            "Int8Array" => (INTEGERS, integers(bytes, i8::from_le_bytes)),
            "Uint8ClampedArray" => (INTEGERS, integers(bytes, u8::from_le_bytes)),
            "Int16Array" => (INTEGERS, integers(bytes, i16::from_le_bytes)),
            "Uint16Array" => (INTEGERS, integers(bytes, u16::from_le_bytes)),
            "Int32Array" => (INTEGERS, integers(bytes, i32::from_le_bytes)),
            "Uint32Array" => (INTEGERS, integers(bytes, u32::from_le_bytes)),
            "BigInt64Array" => (INTEGERS, bytes.to_vec()),
            "Float32Array" => (FLOATS, floats(bytes)),
            "Float64Array" => (FLOATS, bytes.to_vec()),
            _ => return Ok(false),
        };
        out.tag(tag)?.bytes(&words)?;
        Ok(true)
    }

    fn encode_object<'js>(
        &self,
        ctx: &Ctx<'js>,
        value: Value<'js>,
        out: &mut Encoder<&mut Vec<u8>>,
        depth: usize,
    ) -> Result<()> {
        let list = |name: &str| self.call::<Array<'_>>(ctx, name, (value.clone(),));
        match self.call::<i32>(ctx, "kind", (value.clone(),))? {
            1 => {
                let millis: f64 = self.call(ctx, "time", (value,))?;
                out.tag(DATE)?.f64(millis / 1000.0)?;
            }
            2 => {
                let flat = list("entries")?;
                out.map(flat.len() as u64 / 2)?;
                for at in 0..flat.len() {
                    self.encode(ctx, flat.get(at)?, out, depth + 1)?;
                }
            }
            6 if self.encode_words(ctx, &value, out)? => {}
            kind @ (3 | 6) => {
                let members = list("members")?;
                if kind == 3 {
                    out.tag(SET)?;
                }
                out.array(members.len() as u64)?;
                for at in 0..members.len() {
                    self.encode(ctx, members.get(at)?, out, depth + 1)?;
                }
            }
            kind @ (4 | 5) => {
                let view: TypedArray<'_, u8> = match kind {
                    4 => TypedArray::from_value(value)?,
                    _ => self.call(ctx, "bytes", (value,))?,
                };
                let Some(bytes) = view.as_raw() else {
                    return Err(Failed("its buffer is detached".to_owned()));
                };
                // SAFETY: the buffer belongs to the array, which is held here, and no program runs
                // before the bytes are copied.
                out.bytes(unsafe { bytes.as_ref() })?;
            }
            7 => return self.name(ctx, "error", value, out),
            8 => return self.name(ctx, "promise", value, out),
            9 => return self.name(ctx, "regexp", value, out),
            _ => {
                let object = Object::from_value(value)?;
                let keys = object.keys::<Value<'_>>().collect::<rquickjs::Result<Vec<_>>>()?;
                out.map(keys.len() as u64)?;
                for key in keys {
                    out.str(&self.text(ctx, &key)?)?;
                    self.encode(ctx, object.get(key)?, out, depth + 1)?;
                }
            }
        }
        Ok(())
    }

    /// Reads a value.
    pub(crate) fn decode<'js>(
        &self,
        ctx: &Ctx<'js>,
        from: &mut Decoder<'_>,
        depth: usize,
    ) -> Result<Value<'js>> {
        if depth > MAX_DEPTH {
            return Err(Failed(format!("it is nested deeper than {MAX_DEPTH} levels")));
        }
        Ok(match from.datatype()? {
            Item::Undefined => {
                from.undefined()?;
                Value::new_undefined(ctx.clone())
            }
            Item::Null => {
                from.null()?;
                Value::new_null(ctx.clone())
            }
            Item::Bool => Value::new_bool(ctx.clone(), from.bool()?),
            // As a float, because an integer has no minus zero.
            Item::F16 | Item::F32 | Item::F64 => Value::new_float(ctx.clone(), from.f64()?),
            Item::String => rquickjs::String::from_str(ctx.clone(), from.str()?)?.into_value(),
            Item::Bytes => {
                let buffer = ArrayBuffer::new_copy(ctx.clone(), from.bytes()?)?;
                TypedArray::<u8>::from_arraybuffer(buffer)?.into_value()
            }
            Item::Array => self.decode_array(ctx, from, depth)?.into_value(),
            Item::Map => self.decode_map(ctx, from, depth)?,
            Item::Tag => self.decode_tagged(ctx, from, depth)?,
            Item::Int => {
                let digits = from.int()?.to_string();
                self.call(ctx, "bigint", (digits,))?
            }
            _ => {
                let whole = from.i64()?;
                match whole.unsigned_abs() as f64 <= EXACT {
                    true => Value::new_number(ctx.clone(), whole as f64),
                    false => BigInt::from_i64(ctx.clone(), whole)?.into_js(ctx)?,
                }
            }
        })
    }

    fn decode_array<'js>(
        &self,
        ctx: &Ctx<'js>,
        from: &mut Decoder<'_>,
        depth: usize,
    ) -> Result<Array<'js>> {
        let array = Array::new(ctx.clone())?;
        for at in 0..length(from.array()?)? {
            array.set(at as usize, self.decode(ctx, from, depth + 1)?)?;
        }
        Ok(array)
    }

    fn decode_map<'js>(
        &self,
        ctx: &Ctx<'js>,
        from: &mut Decoder<'_>,
        depth: usize,
    ) -> Result<Value<'js>> {
        let count = length(from.map()?)?;
        let start = from.position();
        let object = Object::new(ctx.clone())?;
        for _ in 0..count {
            if from.datatype()? != Item::String {
                // Keys that an object cannot have.
                from.set_position(start);
                let flat = Array::new(ctx.clone())?;
                for at in 0..count as usize * 2 {
                    flat.set(at, self.decode(ctx, from, depth + 1)?)?;
                }
                return Ok(self.call(ctx, "map", (flat,))?);
            }
            let key = from.str()?;
            object.set(key, self.decode(ctx, from, depth + 1)?)?;
        }
        Ok(object.into_value())
    }

    fn decode_tagged<'js>(
        &self,
        ctx: &Ctx<'js>,
        from: &mut Decoder<'_>,
        depth: usize,
    ) -> Result<Value<'js>> {
        let tag = from.tag()?;
        Ok(match tag {
            DATE => self.call(ctx, "date", (from.f64()?,))?,
            DECIMAL => rquickjs::String::from_str(ctx.clone(), from.str()?)?.into_value(),
            UUID => {
                let bytes = from.bytes()?;
                let bytes = <[u8; 16]>::try_from(bytes)
                    .map_err(|_| Failed("a UUID is cut off".to_owned()))?;
                let all = format!("{:032x}", u128::from_be_bytes(bytes));
                let parts = [&all[..8], &all[8..12], &all[12..16], &all[16..20], &all[20..]];
                rquickjs::String::from_str(ctx.clone(), &parts.join("-"))?.into_value()
            }
            TIMESTAMP | DAY => self.call(ctx, "moment", (from.str()?,))?,
            SET => {
                let members = self.decode_array(ctx, from, depth)?;
                self.call(ctx, "set", (members,))?
            }
            POSITIVE | NEGATIVE => {
                let digits: String =
                    from.bytes()?.iter().map(|byte| format!("{byte:02x}")).collect();
                let number: Value<'_> =
                    self.call(ctx, "bigint", (format!("0x{digits}0").as_str(),))?;
                // A digit was added so that the text is not empty; the helper that knows the sign
                // removes it.
                self.call(ctx, "unpad", (number, tag == NEGATIVE))?
            }
            other => {
                return Err(Failed(format!("values with tag {} are not known", other.as_u64())));
            }
        })
    }

    /// Arguments of a call.
    pub(crate) fn decode_arguments<'js>(
        &self,
        ctx: &Ctx<'js>,
        from: &mut Decoder<'_>,
    ) -> Result<Args<'js>> {
        let mut arguments = Args::new_unsized(ctx.clone());
        for _ in 0..length(from.array()?)? {
            arguments.push_arg(self.decode(ctx, from, 1)?)?;
        }
        Ok(arguments)
    }
}

/// The length that was given: the host always gives one.
fn length(given: Option<u64>) -> Result<u64> {
    given.ok_or_else(|| Failed("a length is missing".to_owned()))
}

fn number<'o, 'v>(
    value: f64,
    out: &'o mut Encoder<&'v mut Vec<u8>>,
) -> Result<&'o mut Encoder<&'v mut Vec<u8>>> {
    let whole = value.trunc() == value
        && value.abs() <= EXACT
        && !(value == 0.0 && value.is_sign_negative());
    Ok(if whole { out.i64(value as i64)? } else { out.f64(value)? })
}

/// The bytes of a hexadecimal number, the highest first.
fn magnitude(digits: &str) -> Vec<u8> {
    let value = |digit: u8| (digit as char).to_digit(16).unwrap_or_default() as u8;
    let (first, pairs) = digits.as_bytes().split_at(digits.len() % 2);
    let odd = first.iter().map(|digit| value(*digit));
    odd.chain(pairs.chunks_exact(2).map(|pair| value(pair[0]) << 4 | value(pair[1]))).collect()
}

/// Numbers of `N` bytes each as integers of 64 bits.
fn integers<const N: usize, T: Into<i64>>(bytes: &[u8], number: impl Fn([u8; N]) -> T) -> Vec<u8> {
    let (numbers, _) = bytes.as_chunks::<N>();
    numbers.iter().flat_map(|one| number(*one).into().to_le_bytes()).collect()
}

/// Numbers in single precision as numbers in double precision.
fn floats(bytes: &[u8]) -> Vec<u8> {
    let (numbers, _) = bytes.as_chunks::<4>();
    numbers.iter().flat_map(|one| f64::from(f32::from_le_bytes(*one)).to_le_bytes()).collect()
}

/// Takes one away from a number above 0.
fn decrement(bytes: &mut [u8]) {
    for byte in bytes.iter_mut().rev() {
        let (less, borrowed) = byte.overflowing_sub(1);
        *byte = less;
        if !borrowed {
            return;
        }
    }
}
