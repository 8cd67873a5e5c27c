//! Values without parts.

use minicbor::Decoder;
use minicbor::data::{Tag, Type};

use super::{Costs, DecodeError};
use crate::tag::{
    COMPLEX, DATE, DAY, DECIMAL, FLOATS, INTEGERS, NAMED, NEGATIVE, POSITIVE, TIMESTAMP, UUID,
};

/// A value without parts, as it is in the guest's bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Scalar<'b> {
    /// `undefined` of JavaScript.
    Undefined,
    /// Null or None.
    Null,
    /// A truth value.
    Bool(bool),
    /// An integer of at most 64 bits and a sign.
    Integer(i128),
    /// A number in floating point.
    Float(f64),
    /// Text.
    Text(&'b str),
    /// Bytes.
    Bytes(&'b [u8]),
    /// Seconds from 1970 in UTC.
    Date(f64),
    /// A date and time as text.
    Timestamp(&'b str),
    /// A day as text.
    Day(&'b str),
    /// A decimal number as text.
    Decimal(&'b str),
    /// A UUID.
    Uuid([u8; 16]),
    /// Real and imaginary part.
    Complex(f64, f64),
    /// An integer of any size, most significant byte first.
    Positive(&'b [u8]),
    /// The bits of a negative integer, inverted.
    Negative(&'b [u8]),
    /// Little-endian integers of 64 bits.
    Integers(&'b [[u8; 8]]),
    /// Little-endian numbers in floating point.
    Floats(&'b [[u8; 8]]),
    /// A kind and a text in place of a value that stays in the guest, for example a function.
    Opaque {
        /// Its kind.
        kind: &'b str,
        /// Its text.
        text: &'b str,
    },
}

impl<'b> Scalar<'b> {
    /// Reads the next value, which is of a kind without parts and tag.
    #[inline]
    pub(super) fn read(from: &mut Decoder<'b>, kind: Type) -> Result<Self, DecodeError> {
        Ok(match kind {
            Type::Undefined => {
                from.undefined()?;
                Self::Undefined
            }
            Type::Null => {
                from.null()?;
                Self::Null
            }
            Type::Bool => Self::Bool(from.bool()?),
            Type::F16 | Type::F32 | Type::F64 => Self::Float(from.f64()?),
            Type::String => Self::Text(from.str()?),
            Type::Bytes => Self::Bytes(from.bytes()?),
            Type::StringIndef | Type::BytesIndef | Type::ArrayIndef | Type::MapIndef => {
                return Err(DecodeError::NoLength);
            }
            Type::Simple | Type::Break | Type::Unknown(_) => return Err(DecodeError::NotValue),
            _ => Self::Integer(from.int()?.into()),
        })
    }

    /// Reads what follows a tag of such a value.
    pub(super) fn read_tagged(from: &mut Decoder<'b>, tag: Tag) -> Result<Self, DecodeError> {
        Ok(match tag {
            DATE => Self::Date(from.f64()?),
            TIMESTAMP => Self::Timestamp(from.str()?),
            DAY => Self::Day(from.str()?),
            DECIMAL => Self::Decimal(from.str()?),
            UUID => {
                let bytes = from.bytes()?.try_into();
                Self::Uuid(bytes.map_err(|_| DecodeError::CutUuid)?)
            }
            COMPLEX => {
                pair(from)?;
                Self::Complex(from.f64()?, from.f64()?)
            }
            NAMED => {
                pair(from)?;
                Self::Opaque { kind: from.str()?, text: from.str()? }
            }
            INTEGERS => Self::Integers(words(from)?),
            FLOATS => Self::Floats(words(from)?),
            POSITIVE => Self::Positive(from.bytes()?),
            NEGATIVE => Self::Negative(from.bytes()?),
            other => return Err(DecodeError::UnknownTag(other.as_u64())),
        })
    }

    /// Bytes of its object.
    #[inline]
    pub(super) fn cost(&self, costs: &Costs) -> usize {
        let text = |text: &str| {
            let width = if text.is_ascii() { 1 } else { costs.wide };
            costs.text.saturating_add(text.len().saturating_mul(width))
        };
        let packed = |count: usize| {
            costs.list.saturating_add(count.saturating_mul(costs.slot + costs.number))
        };
        match self {
            Self::Undefined | Self::Null | Self::Bool(_) => 0,
            Self::Integer(_) | Self::Float(_) => costs.number,
            Self::Text(content) => text(content),
            Self::Bytes(bytes) => costs.text.saturating_add(bytes.len()),
            Self::Date(_) | Self::Uuid(_) | Self::Complex(..) => costs.object,
            // The text itself, and the same again in the object.
            Self::Timestamp(content) | Self::Day(content) | Self::Decimal(content) => {
                costs.object.saturating_add(text(content).saturating_mul(2))
            }
            Self::Opaque { kind, text: shown } => {
                costs.object.saturating_add(text(kind)).saturating_add(text(shown))
            }
            // The bytes, the number, and its inverse.
            Self::Positive(bytes) | Self::Negative(bytes) => {
                costs.object.saturating_add(bytes.len().saturating_mul(4))
            }
            Self::Integers(words) | Self::Floats(words) => packed(words.len()),
        }
    }
}

/// The head of an array of two.
fn pair(from: &mut Decoder<'_>) -> Result<(), DecodeError> {
    match from.array()? {
        Some(2) => Ok(()),
        Some(_) => Err(DecodeError::NotValue),
        None => Err(DecodeError::NoLength),
    }
}

/// Numbers as they are laid out in memory.
fn words<'b>(from: &mut Decoder<'b>) -> Result<&'b [[u8; 8]], DecodeError> {
    match from.bytes()?.as_chunks::<8>() {
        (words, []) => Ok(words),
        _ => Err(DecodeError::CutNumbers),
    }
}
