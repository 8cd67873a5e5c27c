//! Decoding of streamed output, whose pieces end anywhere.

/// Decodes UTF-8 piece by piece. Invalid bytes become U+FFFD.
#[derive(Default)]
pub(crate) struct Utf8Decoder {
    /// The start of a character whose rest has not come yet: three bytes at most.
    partial: Vec<u8>,
}

impl Utf8Decoder {
    /// The text of the next piece, without a character that it only begins.
    pub(crate) fn decode(&mut self, piece: &[u8]) -> String {
        self.partial.extend_from_slice(piece);
        let complete = match std::str::from_utf8(&self.partial) {
            Ok(_) => self.partial.len(),
            Err(_) => self.partial.len() - unfinished(&self.partial),
        };
        let text = String::from_utf8_lossy(&self.partial[..complete]).into_owned();
        self.partial.drain(..complete);
        text
    }
}

/// The number of bytes at the end that begin a character without finishing it.
fn unfinished(bytes: &[u8]) -> usize {
    (1..=bytes.len().min(3))
        .find(|&count| match std::str::from_utf8(&bytes[bytes.len() - count..]) {
            Ok(_) => false,
            // No length: the bytes are a valid start, cut off by the end.
            Err(error) => error.valid_up_to() == 0 && error.error_len().is_none(),
        })
        .unwrap_or(0)
}
