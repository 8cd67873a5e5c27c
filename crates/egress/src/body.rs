//! Bodies: their bytes, however they are framed, and chunks for the next hop.
//!
//! Promises: a decoder takes no byte behind its body, and writes only content. Chunks of requests
//! have no extensions and no trailers; those of responses are dropped.

use crate::request_head::BodyFraming;

/// Maximum bytes of the line of a chunk, and of a trailer.
const MAX_LINE: usize = 8 << 10;
/// Maximum lines of trailers.
const MAX_TRAILERS: usize = 128;

/// The next part of a chunked body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChunkState {
    Size,
    Data(u64),
    DataEnd,
    Trailer(usize),
    End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    Length(u64),
    Chunks(ChunkState),
    UntilClose,
}

/// Takes the content of one body out of the bytes of a connection.
#[derive(Clone, Debug)]
pub struct BodyDecoder {
    framing: Framing,
    /// Whether extensions and trailers are refused.
    strict: bool,
}

impl BodyDecoder {
    /// For the body of a request.
    #[must_use]
    pub fn of_request(framing: BodyFraming) -> Self {
        Self::new(framing, true)
    }

    /// For the body of a response.
    pub(crate) fn of_response(framing: BodyFraming) -> Self {
        Self::new(framing, false)
    }

    fn new(framing: BodyFraming, strict: bool) -> Self {
        let framing = match framing {
            BodyFraming::Length(length) => Framing::Length(length),
            BodyFraming::Chunked => Framing::Chunks(ChunkState::Size),
            BodyFraming::UntilClose => Framing::UntilClose,
        };
        Self { framing, strict }
    }

    /// Whether the body is over.
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.framing, Framing::Length(0) | Framing::Chunks(ChunkState::End))
    }

    /// Whether the end of the connection is the end of the body.
    pub(crate) fn ends_with_connection(&self) -> bool {
        self.framing == Framing::UntilClose
    }

    /// Appends content from the beginning of `bytes` to `out`, up to `room` bytes. Returns the
    /// number of bytes taken.
    ///
    /// # Errors
    /// The reason that the framing is invalid.
    pub fn decode(
        &mut self,
        bytes: &[u8],
        room: usize,
        out: &mut Vec<u8>,
    ) -> Result<usize, &'static str> {
        let room_end = out.len() + room;
        let mut at = 0;
        loop {
            let rest = &bytes[at..];
            let room = room_end - out.len();
            let state = match &mut self.framing {
                Framing::UntilClose => {
                    let len = rest.len().min(room);
                    out.extend_from_slice(&rest[..len]);
                    return Ok(at + len);
                }
                Framing::Length(left) => {
                    let len =
                        rest.len().min(room).min(usize::try_from(*left).unwrap_or(usize::MAX));
                    out.extend_from_slice(&rest[..len]);
                    *left -= len as u64;
                    return Ok(at + len);
                }
                Framing::Chunks(state) => state,
            };
            match *state {
                ChunkState::End => return Ok(at),
                ChunkState::Data(left) => {
                    let len = rest.len().min(room).min(usize::try_from(left).unwrap_or(usize::MAX));
                    if len == 0 {
                        return Ok(at);
                    }
                    out.extend_from_slice(&rest[..len]);
                    at += len;
                    *state = match left - len as u64 {
                        0 => ChunkState::DataEnd,
                        left => ChunkState::Data(left),
                    };
                }
                ChunkState::Size | ChunkState::DataEnd | ChunkState::Trailer(_) => {
                    let Some(end) = rest.iter().position(|byte| *byte == b'\n') else {
                        return if rest.len() > MAX_LINE {
                            Err("a line of its body is too long")
                        } else {
                            Ok(at)
                        };
                    };
                    let line = rest[..end]
                        .strip_suffix(b"\r")
                        .ok_or("a line of its body has a bare line feed")?;
                    *state = next(*state, line, self.strict)?;
                    at += end + 1;
                }
            }
        }
    }
}

/// The state behind a line.
fn next(state: ChunkState, line: &[u8], strict: bool) -> Result<ChunkState, &'static str> {
    Ok(match state {
        ChunkState::Size => {
            let digits = match line.iter().position(|byte| *byte == b';') {
                Some(_) if strict => return Err("a chunk of its body has an extension"),
                Some(at) => line[..at].trim_ascii_end(),
                None if strict => line,
                None => line.trim_ascii_end(),
            };
            if digits.is_empty() || digits.len() > 15 || !digits.iter().all(u8::is_ascii_hexdigit) {
                return Err("the size of a chunk is invalid");
            }
            let value = |digit: &u8| u64::from(char::from(*digit).to_digit(16).unwrap_or(0));
            match digits.iter().fold(0, |sum, digit| sum << 4 | value(digit)) {
                0 => ChunkState::Trailer(0),
                size => ChunkState::Data(size),
            }
        }
        ChunkState::DataEnd if line.is_empty() => ChunkState::Size,
        ChunkState::DataEnd => return Err("a chunk of its body is longer than its size"),
        ChunkState::Trailer(_) if line.is_empty() => ChunkState::End,
        ChunkState::Trailer(_) if strict => return Err("its body has trailers"),
        ChunkState::Trailer(count) if count < MAX_TRAILERS => ChunkState::Trailer(count + 1),
        ChunkState::Trailer(_) => return Err("its body has too many trailers"),
        other => other,
    })
}

/// Appends `content` as a chunk; empty content is no chunk.
pub(crate) fn push_chunk(content: &[u8], out: &mut Vec<u8>) {
    if !content.is_empty() {
        out.extend_from_slice(format!("{:x}\r\n", content.len()).as_bytes());
        out.extend_from_slice(content);
        out.extend_from_slice(b"\r\n");
    }
}

/// The end of a chunked body.
pub(crate) const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(decoder: &mut BodyDecoder, bytes: &[u8]) -> Result<(Vec<u8>, usize), &'static str> {
        let mut out = Vec::new();
        let taken = decoder.decode(bytes, usize::MAX >> 1, &mut out)?;
        Ok((out, taken))
    }

    #[test]
    fn chunks_of_requests_have_content_alone() {
        let strict = || BodyDecoder::of_request(BodyFraming::Chunked);
        let mut decoder = strict();
        let found = decode(&mut decoder, b"3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\nGET /").unwrap();
        assert_eq!((&found.0[..], found.1, decoder.is_done()), (&b"abc0123456789"[..], 28, true));
        for bad in [
            "3;a=b\r\nabc\r\n",
            "3\nabc\r\n",
            "3 \r\nabc",
            "\r\n",
            "-1\r\n",
            "0x3\r\n",
            "3\r\nabcd\r\n",
            "0\r\nX: 1\r\n\r\n",
            "1234567812345678\r\n",
        ] {
            assert!(decode(&mut strict(), bad.as_bytes()).is_err(), "{bad:?}");
        }
        let mut lax = BodyDecoder::of_response(BodyFraming::Chunked);
        let found = decode(&mut lax, b"3;a=b\r\nabc\r\n0\r\nX: 1\r\n\r\n").unwrap();
        assert_eq!((&found.0[..], lax.is_done()), (&b"abc"[..], true));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

        #[test]
        fn pieces_do_not_matter(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..5),
            step in 1usize..20,
            room in 1usize..9,
        ) {
            let mut wire = Vec::new();
            parts.iter().for_each(|part| push_chunk(part, &mut wire));
            wire.extend_from_slice(LAST_CHUNK);
            let len = wire.len();
            wire.extend_from_slice(b"next");
            let mut decoder = BodyDecoder::of_request(BodyFraming::Chunked);
            let (mut at, mut end, mut out) = (0, 0, Vec::new());
            while !decoder.is_done() {
                end = (end + step).min(wire.len());
                at += decoder.decode(&wire[at..end], room, &mut out).unwrap();
            }
            prop_assert_eq!((at, out), (len, parts.concat()));
        }
    }
}
