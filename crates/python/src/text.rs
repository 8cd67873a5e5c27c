//! Decoding of streamed output, whose pieces end anywhere.

use afresh_interpreter::CharacterJoiner;

/// Decodes UTF-8 piece by piece. Invalid bytes become U+FFFD.
#[derive(Default)]
pub(crate) struct Utf8Decoder(CharacterJoiner);

impl Utf8Decoder {
    /// The text of the next piece, without a character that it only begins.
    pub(crate) fn decode(&mut self, piece: &[u8]) -> String {
        String::from_utf8_lossy(&self.0.join(piece)).into_owned()
    }
}
