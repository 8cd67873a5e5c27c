//! Encodes values in postcard's form, so that [`decode`] accepts them.

use postcard::ser_flavors::Flavor;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::decode::{DecodeError, MAX_DECODED, MAX_UNCHECKED, decode};

/// A piece of so many bytes is a string or a list of bytes: all else is written in smaller ones.
const MIN_LONG_PIECE: usize = 64;
/// Bytes of such a piece once it is decoded, for each of it: its counters and its rounding are less
/// than it.
const CHARGE_OF_LONG_BYTE: usize = 2;

/// Encoded bytes, and the number of them that are in long pieces.
#[derive(Default)]
struct EncodedBytes {
    bytes: Vec<u8>,
    long: usize,
}

impl Flavor for EncodedBytes {
    type Output = Self;

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.bytes.push(byte);
        Ok(())
    }

    fn try_extend(&mut self, piece: &[u8]) -> postcard::Result<()> {
        self.long += if piece.len() >= MIN_LONG_PIECE { piece.len() } else { 0 };
        self.bytes.extend_from_slice(piece);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<Self> {
        Ok(self)
    }
}

/// Encodes a value that [`decode`] reads within [`MAX_DECODED`]. Values of at most
/// [`MAX_UNCHECKED`] bytes must be within that.
///
/// Only a value with more bytes than that, strings and lists of bytes
/// ([`serialize_bytes`](serde::Serializer::serialize_bytes)) aside, is decoded to find out.
///
/// # Errors
/// [`DecodeError`]: decoded, it takes more memory.
pub fn encode<T: Serialize + DeserializeOwned>(value: &T) -> Result<Vec<u8>, DecodeError> {
    let EncodedBytes { bytes, long } =
        postcard::serialize_with_flavor(value, EncodedBytes::default())
            .map_err(|error| DecodeError::Malformed(error.to_string()))?;
    let times = MAX_DECODED / MAX_UNCHECKED;
    let others = (bytes.len() - long).saturating_mul(times);
    if others.saturating_add(CHARGE_OF_LONG_BYTE.saturating_mul(long)) > MAX_DECODED {
        decode::<T>(&bytes, MAX_DECODED)?;
    }
    Ok(bytes)
}
