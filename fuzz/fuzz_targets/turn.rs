//! Any bytes as a turn of a session: it is refused, or its result is exactly as its bytes describe.
//! Under `cfg(fuzzing)` digests are not compared, so that the code behind them is reached.
//! It takes memory in proportion to its bytes.
#![no_main]

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use afresh_store::{Limits, Turn, TurnPiece};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

const PAGE: usize = 4096;
/// Bytes of memory for a byte of the turn.
const EACH: usize = 64;
/// Memory for tables and messages.
const ROOM: usize = 1 << 20;

fuzz_target!(|data: &[u8]| {
    let limits = Limits { memory: 64 << 20, expansion: 64, ..Limits::default() };
    let (parsed, _) = within(data.len() * EACH + ROOM, || Turn::parse(data, &limits));
    let Some(turn) = accepted(parsed) else { return };
    let mut made = 0;
    let pieces = turn.pieces(|piece| {
        made += match piece {
            TurnPiece::Copy { from, len } => {
                assert!(from + len <= turn.before(), "it takes over what is not there");
                len
            }
            TurnPiece::Zero { len } => len,
            TurnPiece::Patch { from, patch } => {
                assert!(from < turn.before(), "it patches what is not there");
                patch.apply(&mut [7; PAGE]);
                1
            }
            TurnPiece::Whole(bytes) => bytes.len() / PAGE,
        };
        Ok::<_, ()>(())
    });
    pieces.expect("nothing fails");
    assert_eq!(made, turn.pages(), "it makes as many pages as it says");
    // The states' lengths are in the header.
    let length = |at: usize| data[at..at + 8].iter().rev().fold(0, |n, b| n << 8 | usize::from(*b));
    let (before, after) = (length(32), length(40));
    if before <= 1 << 20 && after <= 1 << 20 {
        let state = turn.state(&vec![1; before]).expect("it was checked");
        assert_eq!(state.len(), after);
        assert!(turn.state(&vec![1; before + 1]).is_err(), "of another length");
    }
});
