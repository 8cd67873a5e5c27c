//! Frames from guests: their kinds, and the stream of a Linux program that they arrive in.
//!
//! Promises: a stream keeps at most the bytes of one frame, and of none that is longer than its
//! limit. May break it: nothing outside.

/// Maximum bytes of a frame in a stream, where the host has no other limit.
pub(crate) const MAX_FRAME: usize = 64 << 20;

/// First bytes of frames of [`CallConvention::Frame`](crate::CallConvention::Frame). `driver.py` is
/// the other side.
mod kind {
    pub(super) const ANSWER: u8 = 0;
    pub(super) const STDOUT: u8 = 1;
    pub(super) const STDERR: u8 = 2;
    pub(super) const TOOL: u8 = 3;
    pub(super) const ENDED: u8 = 5;
    pub(super) const TERMINAL_OUTPUT: u8 = 7;
    pub(super) const DISPLAYED: u8 = 8;
}

/// A frame from a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frame<'a> {
    /// The answer to the call.
    Answer(&'a [u8]),
    /// Output.
    Stdout(&'a [u8]),
    /// Error output.
    Stderr(&'a [u8]),
    /// A call of a host function.
    Tool(&'a [u8]),
    /// The end of a command of a Linux program: its number and its status.
    Ended(u32, i32),
    /// Output of the terminal of a command, after its number.
    TerminalOutput(u32, &'a [u8]),
    /// A result of code of a Linux program: an object in JSON.
    Displayed(&'a [u8]),
}

impl<'a> Frame<'a> {
    /// Reads a frame; `None` for one of an unknown kind, or one that is too short.
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (kind, inside) = bytes.split_first()?;
        Some(match *kind {
            kind::ANSWER => Self::Answer(inside),
            kind::STDOUT => Self::Stdout(inside),
            kind::STDERR => Self::Stderr(inside),
            kind::TOOL => Self::Tool(inside),
            kind::ENDED => {
                let (number, status) = inside.split_first_chunk::<4>()?;
                let status = status.first_chunk::<4>()?;
                Self::Ended(u32::from_le_bytes(*number), i32::from_le_bytes(*status))
            }
            kind::TERMINAL_OUTPUT => {
                let (number, shown) = inside.split_first_chunk::<4>()?;
                Self::TerminalOutput(u32::from_le_bytes(*number), shown)
            }
            kind::DISPLAYED => Self::Displayed(inside),
            _ => return None,
        })
    }
}

/// Bytes of a length, and of the kind of the frame behind it.
const HEAD: usize = 5;

/// Frames in a stream, each after its length.
#[derive(Debug, Default)]
pub(crate) struct FrameStream {
    /// The first bytes of a frame, from its length on.
    rest: Vec<u8>,
    /// Bytes of a long answer that are still to come.
    skipped: usize,
}

/// A frame of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum StreamedFrame<'a> {
    /// All bytes of it.
    Whole(&'a [u8]),
    /// An answer of so many bytes, which is beyond the limit and is not kept.
    LongAnswer(usize),
}

impl FrameStream {
    /// Adds a piece of the stream and passes each frame of at most `limit` bytes, and each answer,
    /// to `take`. Returns `false` for another frame that is longer, and as soon as `take` does.
    pub(crate) fn push(
        &mut self,
        mut piece: &[u8],
        limit: usize,
        mut take: impl FnMut(StreamedFrame<'_>) -> bool,
    ) -> bool {
        loop {
            let dropped = self.skipped.min(piece.len());
            self.skipped -= dropped;
            piece = &piece[dropped..];
            self.fill(&mut piece, HEAD);
            let Some((length, kind)) = self.rest.split_first_chunk::<4>() else { return true };
            let length = u32::from_le_bytes(*length) as usize;
            let Some(kind) = kind.first() else {
                // A frame has a kind.
                return length > 0;
            };
            if length > limit {
                if *kind != kind::ANSWER || !take(StreamedFrame::LongAnswer(length - 1)) {
                    return false;
                }
                self.skipped = length - 1;
                self.rest.clear();
                continue;
            }
            self.fill(&mut piece, 4 + length);
            let Some(frame) = self.rest.get(4..4 + length) else { return true };
            if !take(StreamedFrame::Whole(frame)) {
                return false;
            }
            self.rest.clear();
            if piece.is_empty() {
                self.rest.shrink_to(1 << 16);
                return true;
            }
        }
    }

    /// Moves bytes of `piece` until there are `len`.
    fn fill(&mut self, piece: &mut &[u8], len: usize) {
        let missing = len.saturating_sub(self.rest.len());
        let (taken, after) = piece.split_at(missing.min(piece.len()));
        // It grows with the bytes that arrive, to the length of the frame at most.
        if self.rest.capacity() - self.rest.len() < taken.len() {
            self.rest.reserve_exact(missing.min(self.rest.len().max(taken.len())));
        }
        self.rest.extend_from_slice(taken);
        *piece = after;
    }
}
