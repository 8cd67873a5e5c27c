//! Programs of strangers, and chains of turns against plain copies.

use afresh_budget::meter::{Meter, peak};

use super::build::put;
use super::*;
use crate::{OpenError, Origin, PageMap};

#[global_allocator]
static METER: Meter = Meter;

/// A turn with this program, and a root that fits it.
fn crafted(change: impl Fn(&mut Head), body: &[u8]) -> Result<Turn, TurnError> {
    let len = body.len() as u64;
    let mut head = Head {
        zstd: false,
        before: 10,
        pages: 10,
        state_before: 5,
        state: 0,
        body: len,
        stored: len,
        parent: [3; 32],
        root: [0; 32],
    };
    change(&mut head);
    head.root = head.root_of(body);
    Turn::parse(&[head.print(), body.to_vec()].concat(), &Limits::default())
}

fn numbers(numbers: &[u64]) -> Vec<u8> {
    let mut out = Vec::new();
    numbers.iter().for_each(|number| put(&mut out, *number));
    out
}

#[test]
fn hostile_programs_are_refused_by_name() {
    crafted(|_| {}, &numbers(&[10 << 2, 0])).unwrap();
    let refused: [(&str, Vec<u8>, &str); 12] = [
        ("copies what the parent lacks", numbers(&[10 << 2, 1]), "parent does not have"),
        ("copies far away", numbers(&[10 << 2, u64::MAX]), "parent does not have"),
        ("copies nothing", numbers(&[0, 0]), "no page"),
        ("makes too many", numbers(&[11 << 2 | 1]), "more than there are"),
        ("makes most", numbers(&[u64::MAX >> 2 << 2 | 1]), "more than there are"),
        ("makes too few", numbers(&[9 << 2 | 1]), "middle of a step"),
        ("patches outside", numbers(&[1 << 2 | 2, 10, 0, 1, 7]), "parent does not have"),
        ("patches nothing", numbers(&[2, 0]), "changes nothing"),
        (
            "patches past the page",
            numbers(&[1 << 2 | 2, 0, 4090, 7, 1]),
            "past the end of its page",
        ),
        (
            "patches far",
            numbers(&[2 << 2 | 2, 0, 4095, 1, 1, u64::MAX, 1]),
            "past the end of its page",
        ),
        ("whole without bytes", numbers(&[u64::MAX >> 2 << 2 | 3]), "middle of a step"),
        ("goes on", numbers(&[10 << 2, 0, 0]), "after its end"),
    ];
    for (what, body, why) in refused {
        let error = crafted(|_| {}, &body).unwrap_err().to_string();
        assert!(error.contains(why), "{what}: {error}");
    }
    let copy = numbers(&[10 << 2, 0]);
    let state = |steps: &[u64]| [copy.clone(), numbers(steps)].concat();
    for (what, body, why) in [
        ("copies what the state lacks", state(&[4 << 1, 2]), "parent does not have"),
        ("makes too much", state(&[5 << 1, 0]), "too much"),
        ("makes nothing", state(&[0, 0]), "makes nothing"),
        ("bytes that are not there", state(&[4 << 1 | 1, 7]), "middle of a step"),
    ] {
        let error = crafted(|head| head.state = 4, &body).unwrap_err().to_string();
        assert!(error.contains(why), "{what}: {error}");
    }
}

#[test]
fn false_lengths_cost_nothing() {
    let bomb = |len: usize| zstd::bulk::compress(&vec![0; len], 19).unwrap();
    let say = |claimed: u64, stored: &[u8]| {
        let mut head = crafted(|_| {}, &numbers(&[10 << 2, 0])).unwrap().head;
        (head.zstd, head.body, head.stored) = (true, claimed, stored.len() as u64);
        let bytes = [head.print(), stored.to_vec()].concat();
        Turn::parse(&bytes, &Limits::default()).unwrap_err()
    };
    // More comes than was said, and what was said is never reserved.
    assert_eq!(say(100, &bomb(64 << 20)), TurnError::Decompress);
    assert_eq!(say(200 << 20, &bomb(100)), TurnError::Decompress);
    assert_eq!(say(1 << 40, &bomb(100)), field("body", 1 << 40));
    let limits = Limits { memory: 9 * PAGE_SIZE as u64, ..Limits::default() };
    let turn = crafted(|_| {}, &numbers(&[10 << 2, 0])).unwrap();
    let error = Turn::parse(turn.bytes(), &limits).unwrap_err().to_string();
    assert!(error.contains("`memory`"), "{error}");
    for (at, wrong) in [(0, 1), (8, 2), (12, 9), (96, 0), (56, 99)] {
        let mut bytes = turn.bytes().to_vec();
        bytes[at] ^= wrong.max(1);
        Turn::parse(&bytes, &Limits::default()).unwrap_err();
    }
    for len in 0..turn.bytes().len() {
        Turn::parse(&turn.bytes()[..len], &Limits::default()).unwrap_err();
    }
}

#[test]
fn turns_that_copy_one_another_again_and_again_meet_a_limit() {
    // Each has all pages of the one before twice: in twenty turns a million of runs out of a few
    // bytes.
    const INDEX: u64 = 1 << 20;
    let limits = Limits { index: INDEX, ..Limits::default() };
    let chain = || {
        let mut space = Space::new(2, Vec::new(), &limits)?;
        (0..24).try_for_each(|_| {
            let turn = double(space.pages() as u64);
            apply(&mut space, &turn)
        })
    };
    let (result, most) = peak(chain);
    let error = result.unwrap_err().to_string();
    assert!(error.contains("`index`"), "{error}");
    assert!(most < 4 * INDEX as usize, "{most} bytes");
}

/// A turn that makes all `pages` pages of the one before twice, and one more.
fn double(pages: u64) -> Turn {
    let body = numbers(&[1 << 2 | 1, pages << 2, 0, pages << 2, 0]);
    sized(pages, 2 * pages + 1, &body)
}

fn sized(before: u64, pages: u64, body: &[u8]) -> Turn {
    let sizes = |head: &mut Head| {
        (head.before, head.pages, head.state_before) = (before, pages, 0);
    };
    crafted(sizes, body).unwrap()
}

fn apply(space: &mut Space, turn: &Turn) -> Result<(), OpenError> {
    space.expect(&turn.head)?;
    space.apply(turn)
}

/// Applies a chain of turns and returns its cost. The upper bound that writers use holds for each
/// turn.
fn chain(limits: Limits, turns: impl Iterator<Item = Turn>) -> (Result<(), OpenError>, ChainCost) {
    let mut space = Space::new(2, Vec::new(), &limits).unwrap();
    for turn in turns {
        let expected = space.cost().after(&turn);
        if let Err(error) = apply(&mut space, &turn) {
            return (Err(error), space.cost());
        }
        let cost = space.cost();
        assert!(cost.runs <= expected.runs && cost.work <= expected.work, "{expected:?}: {cost:?}");
    }
    (space.finish(), space.cost())
}

#[test]
fn a_chain_that_moves_many_runs_again_and_again_meets_a_limit() {
    const TURNS: u64 = 64 << 20;
    let limits = Limits { turns: TURNS, ..Limits::default() };
    // A hundred thousand runs, then a small turn after the other that takes over all of them.
    let mut pages = 2;
    let grow = (0..16).map(|_| {
        let turn = double(pages);
        pages = 2 * pages + 1;
        turn
    });
    let grow: Vec<Turn> = grow.collect();
    let same = sized(pages, pages, &numbers(&[pages << 2, 0]));
    let (result, cost) = chain(limits, grow.into_iter().chain(std::iter::repeat_n(same, 1000)));
    let error = result.unwrap_err().to_string();
    assert!(error.contains("work") && error.contains("--limit turns=SIZE"), "{error}");
    // Beyond the limit by the one step that met it.
    assert!(cost.runs > 50_000 && cost.work < TURNS + TURNS / 8, "{cost:?}");
}

#[test]
fn a_chain_that_looks_pages_up_again_and_again_meets_a_limit() {
    // Single pages from both ends in turn: every step needs a search.
    const PAGES: u64 = 1 << 16;
    let body: Vec<u64> = (0..PAGES).flat_map(|n| [1 << 2, n % 2 * (PAGES - 1)]).collect();
    let first = sized(2, PAGES, &numbers(&[PAGES << 2 | 1]));
    let again = sized(PAGES, PAGES, &numbers(&body));
    let turns = std::iter::once(first).chain(std::iter::repeat_n(again, 1000));
    let limits = Limits { turns: 256 << 20, ..Limits::default() };
    let mut lookups = 0;
    let (result, cost) = chain(limits, turns.inspect(|turn| lookups += turn.shape.lookups));
    let error = result.unwrap_err().to_string();
    assert!(error.contains("work") && error.contains("--limit turns=SIZE"), "{error}");
    // The turn that exceeds the limit is counted and not applied.
    assert!(lookups - PAGES <= (256 << 20) / super::cost::LOOKUP_WORK, "{lookups}: {cost:?}");
}

#[test]
fn steps_of_the_state_are_counted() {
    const STEPS: u64 = 1 << 16;
    let state = |steps: u64| -> Vec<u64> { (0..steps).flat_map(|_| [1 << 1, 0]).collect() };
    let body = [numbers(&[10 << 2, 0]), numbers(&state(STEPS))].concat();
    let turn = crafted(|head| (head.state, head.state_before) = (STEPS, STEPS), &body).unwrap();
    let mut space = Space::new(10, vec![0; STEPS as usize], &Limits::default()).unwrap();
    apply(&mut space, &turn).unwrap();
    assert!(space.cost().work >= super::cost::TURN_WORK + STEPS * super::cost::RUN_WORK);
}

#[test]
fn patches_are_counted_for_each_page_that_needs_them() {
    // A page that is patched again and again, and then copied.
    let patch = || sized(2, 2, &numbers(&[1 << 2 | 2, 0, 0, 1, 7, 1 << 2, 1]));
    let patched = |count| std::iter::repeat_with(patch).take(count);
    let copies = 100_000;
    let body: Vec<u64> = (0..copies).flat_map(|_| [1 << 2, 0]).collect();
    let many = || std::iter::once(sized(2, copies, &numbers(&body)));
    let (result, cost) = chain(Limits::default(), patched(100).chain(many()));
    result.unwrap();
    // Three bytes for each patch, and the cost of every patch.
    assert_eq!(cost.patches, copies * 100 * (3 + super::body::PATCH_OVERHEAD));
    let (result, _) = chain(Limits::default(), patched(1000).chain(many()));
    let error = result.unwrap_err().to_string();
    assert!(error.contains("patches") && error.contains("`turns`"), "{error}");
    // However short it is, a turn adds at most one patch to a page.
    let (result, _) = chain(Limits::default(), patched(5000));
    assert!(result.unwrap_err().to_string().contains("work"));
}

#[test]
fn a_program_of_short_steps_takes_no_more_memory_than_its_bytes() {
    // Each of a byte, for a page of zeros.
    const STEPS: u64 = 1 << 20;
    let body = vec![1 << 2 | 1; STEPS as usize];
    let stored = zstd::bulk::compress(&body, 3).unwrap();
    let mut head = sized(0, STEPS, &body).head;
    (head.zstd, head.stored) = (true, stored.len() as u64);
    let bytes = [head.print(), stored].concat();
    let (turn, most) = peak(|| Turn::parse(&bytes, &Limits::default()));
    assert_eq!(turn.unwrap().pages() as u64, STEPS);
    // The program, a smaller allocation before it, and a window.
    assert!(most < body.len() * 2 + (2 << 20), "{most} bytes for a program of {STEPS}");
}

/// A few numbers of chance.
fn next(seed: &mut u64) -> usize {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    (*seed >> 8) as usize
}

type Page = [u8; PAGE_SIZE];

#[test]
fn a_chain_of_turns_makes_what_plain_copies_say() {
    for seed in 1..40 {
        let mut seed = seed * 77;
        let seed = &mut seed;
        let mut pages: Vec<Page> = (0..30).map(|n| [n as u8 / 3; PAGE_SIZE]).collect();
        let base = pages.clone();
        let mut state: Vec<u8> = (0..50).collect();
        let limits = Limits::default();
        let mut space = Space::new(pages.len(), state.clone(), &limits).unwrap();
        for _ in 0..12 {
            let (was, state_was) = (pages.clone(), state.clone());
            let mut builder = TurnBuilder::new(was.len());
            pages.clear();
            let mut at = 0;
            while at < was.len() {
                match next(seed) % 8 {
                    0 => {
                        builder.zero(2);
                        pages.extend([[0; PAGE_SIZE]; 2]);
                    }
                    1 => at += next(seed) % 2,
                    2..=4 => {
                        let mut page = was[at];
                        for _ in 0..next(seed) % 5 {
                            page[next(seed) % PAGE_SIZE] = next(seed) as u8;
                        }
                        builder.page(Some((at, &was[at])), &page);
                        pages.push(page);
                        at += 1;
                    }
                    5 => {
                        let page = std::array::from_fn(|_| next(seed) as u8);
                        builder.page(None, &page);
                        pages.push(page);
                        at += 1;
                    }
                    _ => {
                        let len = (next(seed) % 4 + 1).min(was.len() - at);
                        builder.copy(at, len);
                        pages.extend_from_slice(&was[at..at + len]);
                        at += len;
                    }
                }
            }
            state.rotate_left(3);
            state.push(next(seed) as u8);
            let turn = builder.finish(&state_was, &state, [0; 32]).unwrap();
            let turn = Turn::own(turn.bytes()).unwrap();
            apply(&mut space, &turn).unwrap();
        }
        assert_eq!((space.pages(), space.state()), (pages.len(), &state[..]));
        let whole = PageMap::new(base.len(), std::iter::empty());
        let map = space.map(&whole).unwrap();
        assert_eq!(map.pages(), pages.len());
        for (number, expected) in pages.iter().enumerate() {
            let run = map.within(afresh_sys::PageRange::new(number, 1)).next().unwrap();
            if let Origin::Turn { page } = run.origin {
                let mut made = [0; PAGE_SIZE];
                let read = |at: usize, out: &mut [u8]| {
                    out.copy_from_slice(&base[at]);
                    Ok(())
                };
                space.read(page, &mut made, read).unwrap();
                assert!(made == *expected, "page {number}");
            }
        }
    }
}
