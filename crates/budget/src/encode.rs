//! Encodes values in postcard's form, so that a [`Decoder`] accepts them.

use postcard::ser_flavors::Flavor;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::decode::{DecodeError, Decoder, MAX_DECODED, MAX_UNCHECKED};

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

/// Encodes values, one after the other, that a [`Decoder`] reads within [`MAX_DECODED`].
#[derive(Debug, Default)]
pub struct Encoder {
    bytes: Vec<u8>,
    /// An upper bound of the memory of the decoded values.
    bound: usize,
}

impl Encoder {
    /// Encodes one more value.
    ///
    /// # Errors
    /// [`DecodeError::Malformed`]: it has no such form.
    pub fn encode<T: Serialize>(&mut self, value: &T) -> Result<(), DecodeError> {
        let EncodedBytes { bytes, long } =
            postcard::serialize_with_flavor(value, EncodedBytes::default())
                .map_err(|error| DecodeError::Malformed(error.to_string()))?;
        let others = (bytes.len() - long).saturating_mul(MAX_DECODED / MAX_UNCHECKED);
        let bound = others.saturating_add(CHARGE_OF_LONG_BYTE.saturating_mul(long));
        self.bound = self.bound.saturating_add(bound);
        self.bytes.extend(bytes);
        Ok(())
    }

    /// The bytes. Values of at most [`MAX_UNCHECKED`] bytes must be within the limit. Only if they
    /// have more bytes than that, strings and lists of bytes
    /// ([`serialize_bytes`](serde::Serializer::serialize_bytes)) aside, `check` decodes all of them
    /// to find out.
    ///
    /// # Errors
    /// [`DecodeError`]: decoded, they take more memory.
    pub fn finish(
        self,
        check: impl FnOnce(&mut Decoder<'_>) -> Result<(), DecodeError>,
    ) -> Result<Vec<u8>, DecodeError> {
        if self.bound > MAX_DECODED {
            check(&mut Decoder::new(&self.bytes, MAX_DECODED))?;
        }
        Ok(self.bytes)
    }
}

/// Encodes one value, as [`Encoder`] does.
///
/// # Errors
/// As [`Encoder::encode`] and [`Encoder::finish`].
pub fn encode<T: Serialize + DeserializeOwned>(value: &T) -> Result<Vec<u8>, DecodeError> {
    let mut encoder = Encoder::default();
    encoder.encode(value)?;
    encoder.finish(|decoder| decoder.decode::<T>().map(drop))
}
