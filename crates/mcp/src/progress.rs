//! Output as progress of a call, while it runs.
//!
//! Promises: a character that a program writes in parts arrives whole. Output is dropped where the
//! client reads slower than the program writes.

use afresh_interpreter::{CharacterJoiner, Stream};
use tokio::sync::mpsc;

/// Reports the output of one program as text.
#[derive(Debug)]
pub(crate) struct Progress {
    to: mpsc::Sender<String>,
    /// For each stream.
    characters: [CharacterJoiner; 2],
}

impl Progress {
    pub(crate) fn new(to: mpsc::Sender<String>) -> Self {
        Self { to, characters: Default::default() }
    }

    pub(crate) fn report(&mut self, stream: Stream, bytes: &[u8]) {
        let whole = self.characters[usize::from(stream == Stream::Stderr)].join(bytes);
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
        let begun = self.characters.each_mut().map(CharacterJoiner::finish);
        begun.iter().for_each(|begun| self.send(begun));
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
