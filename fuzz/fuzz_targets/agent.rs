//! Any bytes as the stream of a guest's agent: frames are the same however the stream is cut, and
//! the stream keeps no more than its bytes, nor than its limit.
#![no_main]

#[path = "../../crates/interpreter/src/frame.rs"]
mod frame;

use std::hash::{DefaultHasher, Hash, Hasher};

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use frame::{Frame, FrameStream, MAX_FRAME, StreamedFrame};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Memory beside the stream.
const ROOM: usize = 4 << 10;

/// A limit of frames that streams of the corpus exceed.
const SHORT_LIMIT: usize = 64;

/// Whether the stream was taken, and a digest of its frames.
fn frames(stream: &[u8], size: usize, limit: usize) -> Result<u64, &'static str> {
    let (mut hash, mut frames) = (DefaultHasher::new(), FrameStream::default());
    for piece in stream.chunks(size) {
        let taken = frames.push(piece, limit, |frame| {
            let bytes = match frame {
                StreamedFrame::Whole(bytes) => bytes,
                StreamedFrame::LongAnswer(len) => {
                    assert!(len >= limit);
                    len.hash(&mut hash);
                    return true;
                }
            };
            assert!(bytes.len() <= limit);
            let frame = Frame::parse(bytes);
            bytes.hash(&mut hash);
            let inside = match frame {
                Some(Frame::Answer(inside) | Frame::Stdout(inside) | Frame::Stderr(inside)) => {
                    inside
                }
                Some(
                    Frame::Tool(inside)
                    | Frame::TerminalOutput(_, inside)
                    | Frame::Displayed(inside),
                ) => inside,
                Some(Frame::Ended(..)) => &[],
                None => return false,
            };
            assert!(inside.len() < bytes.len());
            true
        });
        if !taken {
            return Err("a frame was refused");
        }
    }
    Ok(hash.finish())
}

fuzz_target!(|data: &[u8]| {
    let Some((size, stream)) = data.split_first() else { return };
    let limit = if size % 2 == 0 { SHORT_LIMIT } else { MAX_FRAME };
    let size = usize::from(*size).max(1);
    // The stream's bytes, twice while the list grows.
    let (cut, _) = within(3 * stream.len().min(limit) + ROOM, || frames(stream, size, limit));
    assert_eq!(accepted(cut), frames(stream, stream.len().max(1), limit).ok());
});
