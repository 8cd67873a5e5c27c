//! Frames from guests: their kinds, and the stream of a Linux program that they arrive in.
//!
//! Promises: a stream keeps at most the bytes of one frame, which has at most [`MAX_FRAME`] bytes.
//! May break it: nothing outside.

/// Maximum bytes of a frame in a stream. Its first bytes are kept until the rest arrives.
const MAX_FRAME: usize = 64 << 20;

/// First bytes of frames of [`CallConvention::Frame`](crate::CallConvention::Frame). `driver.py` is
/// the other side.
mod kind {
    pub(super) const ANSWER: u8 = 0;
    pub(super) const STDOUT: u8 = 1;
    pub(super) const STDERR: u8 = 2;
    pub(super) const TOOL: u8 = 3;
    pub(super) const ENDED: u8 = 5;
    pub(super) const SHOWN: u8 = 7;
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
    Shown(u32, &'a [u8]),
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
            kind::SHOWN => {
                let (number, shown) = inside.split_first_chunk::<4>()?;
                Self::Shown(u32::from_le_bytes(*number), shown)
            }
            kind::DISPLAYED => Self::Displayed(inside),
            _ => return None,
        })
    }
}

/// Frames in a stream, each after its length.
#[derive(Debug, Default)]
pub(crate) struct FrameStream {
    /// The first bytes of a frame.
    rest: Vec<u8>,
}

impl FrameStream {
    /// Adds a piece of the stream and passes each whole frame to `take`. Returns `false` for a
    /// frame that is too long, and as soon as `take` does.
    pub(crate) fn push(&mut self, piece: &[u8], mut take: impl FnMut(&[u8]) -> bool) -> bool {
        self.rest.extend_from_slice(piece);
        let mut at = 0;
        while let Some((length, after)) = self.rest[at..].split_first_chunk::<4>() {
            let length = u32::from_le_bytes(*length) as usize;
            if length > MAX_FRAME {
                return false;
            }
            let Some(frame) = after.get(..length) else { break };
            if !take(frame) {
                return false;
            }
            at += 4 + length;
        }
        self.rest.drain(..at);
        true
    }
}
