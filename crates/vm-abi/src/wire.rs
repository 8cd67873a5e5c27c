//! The wire format of host functions, both ways: values one after another, little-endian, without
//! padding; `bool` is one byte, 0 or 1; byte strings and text are a `u32` length and the bytes.
//!
//! Promises: bytes that are not exactly one value of the type are refused, on either side.

use alloc::string::String;
use alloc::vec::Vec;

/// Reads one value from the front of a byte string.
pub trait FromWire: Sized {
    /// The value, or `None` where the bytes are too short or malformed.
    fn from_wire(bytes: &mut &[u8]) -> Option<Self>;
}

/// Appends one value to a byte string.
pub trait IntoWire {
    /// Appends the value.
    fn into_wire(self, out: &mut Vec<u8>);
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl FromWire for $number {
            fn from_wire(bytes: &mut &[u8]) -> Option<Self> {
                let (head, tail) = bytes.split_first_chunk()?;
                *bytes = tail;
                Some(<$number>::from_le_bytes(*head))
            }
        }
        impl IntoWire for $number {
            fn into_wire(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
numbers!(u8, u16, u32, u64, i8, i16, i32, i64, f32, f64);

impl FromWire for () {
    fn from_wire(_: &mut &[u8]) -> Option<Self> {
        Some(())
    }
}

impl IntoWire for () {
    fn into_wire(self, _: &mut Vec<u8>) {}
}

impl FromWire for bool {
    fn from_wire(bytes: &mut &[u8]) -> Option<Self> {
        match u8::from_wire(bytes)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

impl IntoWire for bool {
    fn into_wire(self, out: &mut Vec<u8>) {
        out.push(u8::from(self));
    }
}

impl FromWire for Vec<u8> {
    fn from_wire(bytes: &mut &[u8]) -> Option<Self> {
        let len = u32::from_wire(bytes)? as usize;
        let (head, tail) = bytes.split_at_checked(len)?;
        *bytes = tail;
        Some(head.to_vec())
    }
}

impl IntoWire for &[u8] {
    fn into_wire(self, out: &mut Vec<u8>) {
        // A longer string would be ambiguous, so it is refused.
        u32::try_from(self.len()).unwrap_or(u32::MAX).into_wire(out);
        out.extend_from_slice(self);
    }
}

impl IntoWire for Vec<u8> {
    fn into_wire(self, out: &mut Vec<u8>) {
        self.as_slice().into_wire(out);
    }
}

impl FromWire for String {
    fn from_wire(bytes: &mut &[u8]) -> Option<Self> {
        String::from_utf8(Vec::from_wire(bytes)?).ok()
    }
}

impl IntoWire for &str {
    fn into_wire(self, out: &mut Vec<u8>) {
        self.as_bytes().into_wire(out);
    }
}

impl IntoWire for String {
    fn into_wire(self, out: &mut Vec<u8>) {
        self.as_str().into_wire(out);
    }
}

/// Errors that a host function reports to the guest instead of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HostError {
    /// The arguments do not decode.
    Arguments,
    /// The function failed.
    Failed,
}

impl core::fmt::Display for HostError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Arguments => "the arguments do not decode as the host function's types",
            Self::Failed => "the host function failed",
        })
    }
}

impl core::error::Error for HostError {}

/// Return types of a host function: a value, or a `Result` of one and a [`HostError`].
pub trait HostReturn {
    /// Encodes the value, or passes the error on.
    ///
    /// # Errors
    /// The function's own.
    fn encode(self) -> Result<Vec<u8>, HostError>;
}

impl<T: IntoWire> HostReturn for T {
    fn encode(self) -> Result<Vec<u8>, HostError> {
        let mut out = Vec::new();
        self.into_wire(&mut out);
        Ok(out)
    }
}

impl<T: IntoWire> HostReturn for Result<T, HostError> {
    fn encode(self) -> Result<Vec<u8>, HostError> {
        self.and_then(T::encode)
    }
}
