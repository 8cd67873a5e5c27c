//! Output in pieces that end anywhere, as pieces that end with whole characters of UTF-8.
//!
//! Promises: the bytes are those of the stream, in order, and at most three of them wait for the
//! next piece. Bytes that are no text are passed on.

use std::borrow::Cow;

/// Joins the characters of one stream.
#[derive(Debug, Default)]
pub struct CharacterJoiner {
    /// The first bytes of an incomplete character.
    begun: Vec<u8>,
}

impl CharacterJoiner {
    /// The bytes that wait and the next piece, without a character that is not complete yet.
    pub fn join<'b>(&mut self, piece: &'b [u8]) -> Cow<'b, [u8]> {
        let mut joined = Cow::Borrowed(piece);
        if !self.begun.is_empty() {
            joined = Cow::Owned([&self.begun[..], piece].concat());
        }
        let end = joined.len() - incomplete(&joined);
        self.begun = joined[end..].to_vec();
        match &mut joined {
            Cow::Borrowed(bytes) => *bytes = &bytes[..end],
            Cow::Owned(bytes) => bytes.truncate(end),
        }
        joined
    }

    /// The bytes that wait, at the end of the stream.
    pub fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.begun)
    }
}

/// The number of bytes at the end that begin an incomplete character.
fn incomplete(bytes: &[u8]) -> usize {
    let begins = |length: &usize| bytes[bytes.len() - length] & 0xc0 != 0x80;
    let length = (1..=bytes.len().min(3)).find(begins).unwrap_or(0);
    match std::str::from_utf8(&bytes[bytes.len() - length..]) {
        Err(error) if error.error_len().is_none() => length,
        _ => 0,
    }
}
