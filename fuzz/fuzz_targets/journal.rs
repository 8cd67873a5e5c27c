//! Any bytes as the journal of a session: it is refused, or the memory and the state after its
//! turns are those that plain copies make. Under `cfg(fuzzing)` digests are not compared. The
//! reader takes memory in proportion to the journal's bytes and to its limits.
//!
//! The first byte of an input chooses: a whole journal, one in which each turn names the turn
//! before it, or the programs of turns, to which the harness adds frames and headers.
#![no_main]

use std::ops::Range;
use std::rc::Rc;

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use afresh_store::fuzzing::ReplayedJournal;
use afresh_store::{Limits, Sha256, Turn, TurnPiece};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

const PAGE: usize = 4096;
/// Lengths in bytes: the header of a journal, head and check of a frame, and a signature.
const JOURNAL: usize = 64;
const FRAME: usize = 8;
const CHECK: usize = 32;
const SIGNATURE: usize = 96;
/// Length of the header of a turn, which ends with the digests of its parent and of itself.
const HEADER: usize = 128;
const PARENT: usize = 64;
const ROOT: usize = 96;

/// Maximum pages and bytes of state of the snapshot.
const MAX_PAGES: usize = 64;
const MAX_STATE: usize = 4 << 10;

const INDEX: u64 = 64 << 10;
const TURNS: u64 = 4 << 20;
const LIMITS: Limits = Limits {
    memory: 4 << 20,
    content: u64::MAX,
    expansion: 64,
    index: INDEX,
    program: 0,
    turns: TURNS,
};
/// Memory for a byte of the journal: a turn is kept as it is stored, and as a program.
const EACH: usize = 4;
/// The programs, and the states before and after a turn. A program grows by doubling.
const ROOM_TURNS: usize = 4 * TURNS as usize;
/// Memory for the indexes, and for the window of a compressed turn.
const ROOM: usize = 4 * INDEX as usize + (12 << 20);

fn number(bytes: &[u8], at: usize, len: usize) -> usize {
    let bytes = bytes.get(at..at + len).unwrap_or_default();
    bytes.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte))
}

/// A journal out of programs. Each follows a head of ten bytes: its length, parts of the frame, the
/// encoding, and lengths of the memory and the state after it, and of a compressed program.
fn framed(mut data: &[u8]) -> Vec<u8> {
    let mut journal = [&b"AFRESHJN\x01\0\0\0"[..], &[0; JOURNAL - 12]].concat();
    let (mut pages, mut state) = (4, 16);
    let mut turns = 0u8;
    while let Some((head, rest)) = data.split_at_checked(10) {
        let (body, rest) = rest.split_at(number(head, 0, 2).min(rest.len()));
        data = rest;
        let (signed, zstd) = (head[2] & 1, usize::from(head[3] & 1));
        let (before, state_before) = (pages, state);
        (pages, state) = (number(head, 4, 2), number(head, 6, 2));
        let claimed = if zstd == 1 { number(head, 8, 2) << 4 } else { body.len() };
        let len = (HEADER + body.len()) as u32;
        journal.extend_from_slice(&len.to_le_bytes());
        journal.extend_from_slice(&[signed, 1, 1, 1]);
        journal.resize(journal.len() + usize::from(signed) * SIGNATURE, 0);
        journal.extend_from_slice(b"AFRESHTN\x01\0\0\0");
        journal.extend_from_slice(&(zstd as u32).to_le_bytes());
        for length in [before, pages, state_before, state, claimed, body.len()] {
            journal.extend_from_slice(&(length as u64).to_le_bytes());
        }
        turns = turns.wrapping_add(1);
        journal.extend_from_slice(&[0; 32]);
        journal.extend_from_slice(&[turns; 32]);
        journal.extend_from_slice(body);
        journal.resize((journal.len() + CHECK).next_multiple_of(8), 0);
    }
    journal.extend_from_slice(data);
    journal
}

/// The whole turns of a journal: a writer that was killed leaves a part of one at the end.
fn turns(journal: &[u8]) -> Vec<Range<usize>> {
    let (mut turns, mut at) = (Vec::new(), JOURNAL);
    while at + FRAME <= journal.len() && journal[at..at + FRAME] != [0; FRAME] {
        let signature = if journal[at + 4] == 1 { SIGNATURE } else { 0 };
        let turn = at + FRAME + signature;
        let end = turn + number(journal, at, 4);
        at = (end + CHECK).next_multiple_of(8);
        if at > journal.len() {
            break;
        }
        turns.push(turn..end);
    }
    turns
}

/// Makes each turn name the turn before it, and the first the snapshot `base`.
fn chain(journal: &mut [u8], base: [u8; 32]) {
    let mut parent = base;
    for turn in turns(journal) {
        if let Some(turn) = journal[turn].get_mut(..HEADER) {
            turn[PARENT..ROOT].copy_from_slice(&parent);
            parent.copy_from_slice(&turn[ROOT..]);
        }
    }
}

fn base_page(page: usize) -> [u8; PAGE] {
    [page as u8 + 1; PAGE]
}

/// A memory and a state as plain copies.
struct PlainGuest {
    pages: Vec<Rc<[u8; PAGE]>>,
    state: Vec<u8>,
}

impl PlainGuest {
    fn apply(&mut self, turn: &Turn) {
        let zero = Rc::new([0; PAGE]);
        let mut pages = Vec::new();
        let done = turn.pieces(|piece| {
            match piece {
                TurnPiece::Copy { from, len } => {
                    pages.extend_from_slice(&self.pages[from..from + len]);
                }
                TurnPiece::Zero { len } => pages.resize(pages.len() + len, zero.clone()),
                TurnPiece::Patch { from, patch } => {
                    let mut page = *self.pages[from];
                    patch.apply(&mut page);
                    pages.push(Rc::new(page));
                }
                TurnPiece::Whole(bytes) => {
                    let whole = bytes.as_chunks::<PAGE>().0;
                    pages.extend(whole.iter().map(|page| Rc::new(*page)));
                }
            }
            Ok::<_, ()>(())
        });
        done.expect("nothing fails");
        self.state = turn.state(&self.state).expect("the reader accepted it");
        self.pages = pages;
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((kind, data)) = data.split_first() else { return };
    let mut journal = if *kind == b't' { framed(data) } else { data.to_vec() };
    let mut base = [0; 32];
    if let Some(named) = journal.get(16..48) {
        base.copy_from_slice(named);
    }
    if *kind != b'j' {
        chain(&mut journal, base);
    }
    let turns = turns(&journal);
    let first = turns.first().map_or(&[][..], |turn| &journal[turn.clone()]);
    let pages = number(first, 16, 8).min(MAX_PAGES);
    let state: Vec<u8> = (0..number(first, 32, 8).min(MAX_STATE)).map(|n| n as u8).collect();
    let memory = (pages, state.clone());
    let bytes = journal.clone();
    let most = journal.len() * EACH + ROOM_TURNS + ROOM;
    let (replayed, _) = within(most, || ReplayedJournal::new(bytes, Sha256(base), memory, &LIMITS));
    let Some(replayed) = accepted(replayed) else { return };
    assert_eq!(replayed.turns(), turns.len(), "a whole turn was dropped");
    let pages = (0..pages).map(|page| Rc::new(base_page(page))).collect();
    let mut plain = PlainGuest { pages, state };
    for turn in turns {
        let turn = Turn::parse(&journal[turn], &LIMITS).expect("the reader accepted it");
        plain.apply(&turn);
    }
    assert!(plain.state == replayed.state(), "another state");
    assert_eq!(replayed.pages(), plain.pages.len());
    for (number, expected) in plain.pages.iter().enumerate() {
        let base = |page: usize, out: &mut [u8]| out.copy_from_slice(&base_page(page));
        let (page, _) = within(ROOM, || replayed.page(number, base));
        assert!(page.expect("nothing fails") == **expected, "page {number} has other bytes");
    }
});
