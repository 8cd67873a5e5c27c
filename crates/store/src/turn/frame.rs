//! Frames of a journal: the bytes around a turn, and the frame that closes a journal.
//!
//! Promises: a frame that was cut off differs from a damaged one, because its length has a check of
//! its own.

use crate::Sha256;

/// Bytes before a turn: its length, and what comes with it.
pub(super) const FRAME: usize = 8;
/// Bytes after a turn.
pub(super) const CHECK: usize = 32;
/// Frames begin at multiples of this, so that no disk writes half of their first bytes.
pub(super) const ALIGN: usize = 8;
/// The parts that accompany a turn, in the first byte of the second number: a signature before it.
/// The other three are a check of the length.
pub(super) const SIGNED: u8 = 1;
/// The same byte of a frame that closes a journal of objects. It has no turn.
const CLOSING: u8 = 2;
/// Bytes of a frame that closes a journal.
pub(crate) const CLOSING_LEN: u64 = (FRAME + CHECK) as u64;
const CHECK_CONTEXT: &str = "afresh 2026-11 journal version 1 frame";

/// The check of frame `number`, of these bytes without it.
pub(super) fn check(base: &Sha256, number: usize, frame: &[u8]) -> [u8; CHECK] {
    let mut hasher = blake3::Hasher::new_derive_key(CHECK_CONTEXT);
    hasher.update(&base.0);
    hasher.update(&(number as u64).to_le_bytes());
    hasher.update(frame);
    hasher.finalize().into()
}

/// The first bytes of frame `number`: its length is checked on its own, so that a turn that was cut
/// off differs from a file that was damaged.
pub(super) fn head(base: &Sha256, number: usize, len: u32, what: u8) -> [u8; FRAME] {
    let mut head = [0; FRAME];
    head[..4].copy_from_slice(&len.to_le_bytes());
    head[4] = what;
    let sum = check(base, number, &head[..5]);
    head[5..].copy_from_slice(&sum[..3]);
    head
}

/// The frame that closes a journal of objects behind `number` turns. It takes the place of the next
/// turn, so an append after it is refused.
pub(crate) fn closing(base: &Sha256, number: usize) -> Vec<u8> {
    let head = head(base, number, 0, CLOSING);
    [&head[..], &check(base, number, &head)].concat()
}

/// The name of the file or object of turn `number`, in a journal that has one for each. All have as
/// many digits, so names are in the order of turns.
pub(crate) fn turn_name(number: usize) -> String {
    format!("{number:08}")
}
