//! Output as progress of a call, while it runs.
//!
//! Promises: a character that a program writes in parts arrives whole. Output is dropped where the
//! client reads slower than the program writes.

use afresh_interpreter::Stream;
use tokio::sync::mpsc;

/// Reports the output of one program as text.
#[derive(Debug)]
pub(crate) struct Progress {
    to: mpsc::Sender<String>,
    /// The first bytes of an incomplete character, for each stream.
    begun: [Vec<u8>; 2],
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

impl Progress {
    pub(crate) fn new(to: mpsc::Sender<String>) -> Self {
        Self { to, begun: Default::default() }
    }

    pub(crate) fn report(&mut self, stream: Stream, bytes: &[u8]) {
        let begun = &mut self.begun[usize::from(stream == Stream::Stderr)];
        begun.extend_from_slice(bytes);
        let rest = begun.split_off(begun.len() - incomplete(begun));
        let whole = std::mem::replace(begun, rest);
        self.send(&whole);
    }

    fn send(&self, bytes: &[u8]) {
        if !bytes.is_empty() {
            let _ = self.to.try_send(String::from_utf8_lossy(bytes).into_owned());
        }
    }
}

impl Drop for Progress {
    /// The program has ended, so that no character is completed any more.
    fn drop(&mut self) {
        self.begun.iter().for_each(|begun| self.send(begun));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_written_in_parts_arrives_whole() {
        let (to, mut from) = mpsc::channel(64);
        let mut progress = Progress::new(to);
        let smile = "\u{1f642}".as_bytes();
        progress.report(Stream::Stdout, &[b"a", &smile[..1]].concat());
        progress.report(Stream::Stderr, b"\xc3");
        progress.report(Stream::Stdout, &smile[1..3]);
        progress.report(Stream::Stdout, &smile[3..]);
        progress.report(Stream::Stderr, b"\xa9\xff\xc3");
        drop(progress);
        let mut pieces = Vec::new();
        while let Ok(piece) = from.try_recv() {
            pieces.push(piece);
        }
        assert_eq!(pieces, ["a", "\u{1f642}", "\u{e9}\u{fffd}", "\u{fffd}"]);
    }
}
