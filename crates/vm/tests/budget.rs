//! A guest program takes no more memory than its file until it is accepted.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use afresh_budget::meter::{Meter, peak};
use afresh_memory::{Image, ImageBuilder};
use afresh_pager::Options;
use afresh_store::{Access, Limits, Store};
use afresh_vm::{ElfError, Frozen, Program, Sandbox, SnapshotMemory, SnapshotOptions};
use proptest::prelude::*;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const DT_RELR: u64 = 36;
const DT_RELRSZ: u64 = 35;
const DT_RELRENT: u64 = 37;

/// A program of one executable segment, the file, and one writable segment of `data` bytes without
/// content. Its `DT_RELR` table is `relr`.
fn program(data: u64, relr: &[u64]) -> Vec<u8> {
    let (headers, dynamic) = (64, 64 + 3 * 56);
    let table = dynamic + 4 * 16;
    let len = (table + 8 * relr.len()) as u64;
    let writable = len.next_multiple_of(4096);
    let mut file = Vec::new();
    file.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    for (value, size) in [
        (3u64, 2),
        (62, 2),
        (1, 4),
        (64, 8),
        (headers, 8),
        (0, 8),
        (0, 4),
        (64, 2),
        (56, 2),
        (3, 2),
        (0, 2),
        (0, 2),
        (0, 2),
    ] {
        file.extend(&value.to_le_bytes()[..size]);
    }
    let dynamic = dynamic as u64;
    for (kind, flags, offset, address, in_file, size) in [
        (PT_LOAD, 5u32, 0, 0, len, len),
        (PT_LOAD, 6, 0, writable, 0, data),
        (PT_DYNAMIC, 4, dynamic, dynamic, 64, 64),
    ] {
        file.extend(kind.to_le_bytes());
        file.extend(flags.to_le_bytes());
        for value in [offset, address, address, in_file, size, 4096] {
            file.extend(value.to_le_bytes());
        }
    }
    for (tag, value) in
        [(DT_RELR, table as u64), (DT_RELRSZ, 8 * relr.len() as u64), (DT_RELRENT, 8), (0, 0)]
    {
        file.extend(tag.to_le_bytes());
        file.extend(value.to_le_bytes());
    }
    relr.iter().for_each(|word| file.extend(word.to_le_bytes()));
    file
}

/// The beginning of the writable segment of [`program`] for `words` words of relocations.
fn writable(words: usize) -> u64 {
    ((64 + 3 * 56 + 4 * 16 + 8 * words) as u64).next_multiple_of(4096)
}

#[test]
fn a_table_of_relocations_takes_no_memory() {
    let _shared = share_resident();
    const WORDS: usize = 1 << 18;
    // Every bit is set, so that a word names 63 places: 380 MiB as a list.
    let data = 63 * 8 * WORDS as u64 + 4096;
    let mut table = vec![u64::MAX; WORDS];
    table[0] = writable(WORDS);
    let file = program(data, &table);
    let (parsed, most) = peak(|| Program::parse(&file).map(|program| program.span()));
    assert_eq!(parsed.unwrap(), writable(WORDS) + data);
    assert!(most < 64 << 10, "{most} bytes for a file of {}", file.len());
}

#[test]
fn a_table_that_names_places_again_and_again_is_refused() {
    let _shared = share_resident();
    const WORDS: usize = 1 << 16;
    let place = writable(WORDS);
    let table: Vec<u64> =
        (0..WORDS).map(|word| if word % 2 == 0 { place } else { u64::MAX }).collect();
    let file = program(1 << 16, &table);
    let (parsed, most) = peak(|| Program::parse(&file).map(|_| ()));
    assert_eq!(parsed, Err(ElfError::TooManyRelocations));
    assert!(most < 64 << 10, "{most} bytes for a file of {}", file.len());
}

/// The resident memory of the process is that of all its tests. A test that reads it runs alone,
/// and those that allocate many megabytes hold this lock shared.
static RESIDENT: RwLock<()> = RwLock::new(());

/// Lets no test run that reads [`resident`].
fn share_resident() -> RwLockReadGuard<'static, ()> {
    RESIDENT.read().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of memory that the process holds.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn a_program_of_zeros_takes_no_memory() {
    let _alone = RESIDENT.write().unwrap_or_else(PoisonError::into_inner);
    const LEN: usize = 256 << 20;
    let mut digest = blake3::Hasher::new();
    for _ in 0..LEN >> 20 {
        digest.update(&[0; 1 << 20]);
    }
    let digest = *digest.finalize().as_bytes();
    let regions: [(u64, u8); 0] = [];
    let features: [&str; 0] = [];
    let state = (
        digest,
        LEN as u64,
        1u64 << 20,
        1u64 << 16,
        4096u64,
        &regions[..],
        0u64,
        "",
        &features[..],
    );
    let state = postcard::to_allocvec(&state).unwrap();
    let memory = SnapshotMemory::from(Image::zero(LEN / 4096 + 1));
    let frozen = Frozen::from_parts(memory, &state).unwrap();
    let before = resident();
    let (thawed, most) = peak(|| Sandbox::builder().thaw(&frozen));
    let error = thawed.unwrap_err().to_string();
    assert!(error.contains("ELF"), "{error}");
    assert!(most < 4 << 20, "{most} bytes");
    assert!(resident() < before + (64 << 20), "{before}, then {}", resident());
}

/// The state of a frozen guest of `file`, with one region of `claimed` bytes.
fn claiming_state(file: &[u8], claimed: u64) -> Vec<u8> {
    let features: [&str; 0] = [];
    let regions = [(claimed, 0u8)];
    let state = (
        *blake3::hash(file).as_bytes(),
        file.len() as u64,
        1u64 << 20,
        1u64 << 16,
        4096u64,
        &regions[..],
        0u64,
        "",
        &features[..],
    );
    postcard::to_allocvec(&state).unwrap()
}

#[test]
fn page_tables_of_a_claimed_memory_are_held_against_the_limit() {
    let _shared = share_resident();
    let file = program(4096, &[writable(1)]);
    // Tables of 16 MiB.
    let claimed = 8u64 << 30;
    let state = claiming_state(&file, claimed);
    let own = (claimed >> 12) as usize;
    let all = own + file.len().div_ceil(4096);
    let mut pages = ImageBuilder::new(all);
    pages.segment(own * 4096, &file).unwrap();
    let memory = SnapshotMemory::from(pages.build().unwrap());
    let frozen = Frozen::from_parts(memory, &state).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path()).unwrap();
    frozen.save(&store, "a", &SnapshotOptions::default()).unwrap();
    // The snapshot's pages are within the limit, and its tables are not.
    let limits = Limits { memory: (all as u64) << 12, ..Limits::default() };
    let saved = store.load_with("a", &Access::new().with_limits(limits)).unwrap();
    let frozen = Frozen::load(saved, &Options::default()).unwrap();
    let (thawed, most) = peak(|| Sandbox::builder().thaw(&frozen));
    let error = thawed.unwrap_err().to_string();
    assert!(error.contains("--limit memory=SIZE"), "{error}");
    assert!(most < 1 << 20, "{most} bytes");
}

#[test]
fn page_tables_of_a_claimed_memory_take_little() {
    let _shared = share_resident();
    let file = program(4096, &[writable(1)]);
    // Tables for each page of it would be 30 MiB, and are copied twice.
    let claimed = 15u64 << 30;
    let state = claiming_state(&file, claimed);
    // The guest's space ends with a page that is not mapped.
    let own = ((0x40000 + (1 << 20) + claimed) >> 12) as usize + 2;
    let all = own + file.len().div_ceil(4096);
    let mut pages = ImageBuilder::new(all);
    pages.segment(own * 4096, &file).unwrap();
    let memory = SnapshotMemory::from(pages.build().unwrap());
    let frozen = Frozen::from_parts(memory, &state).unwrap();
    let (thawed, most) = peak(|| Sandbox::builder().thaw(&frozen));
    if let Err(error) = &thawed {
        let error = error.to_string();
        assert!(error.contains("KVM"), "{error}");
        return println!("SKIPPED: {error}");
    }
    assert!(most < 8 << 20, "{most} bytes");
}

#[test]
fn a_state_that_lists_millions_of_names_is_refused() {
    let _shared = share_resident();
    let regions: [(u64, u8); 0] = [];
    let features = vec![""; 8 << 20];
    let state =
        ([0u8; 32], 0u64, 1u64 << 20, 1u64 << 16, 4096u64, &regions[..], 0u64, "", &features[..]);
    let state = postcard::to_allocvec(&state).unwrap();
    let memory = SnapshotMemory::from(Image::zero(300));
    let (thawed, most) = peak(|| Frozen::from_parts(memory, &state).map(drop));
    let error = thawed.unwrap_err().to_string();
    assert!(error.contains("bytes long"), "{error}");
    assert!(most < 64 << 10, "{most} bytes for a state of {}", state.len());
}

proptest! {
    #[test]
    fn no_file_costs_more_than_it_is_long(
        words in proptest::collection::vec(prop_oneof![Just(u64::MAX), (0u64..1 << 16).prop_map(|n| 2 * n), any::<u64>()], 0..200),
        changes in proptest::collection::vec((0usize..4096, any::<u8>()), 0..8),
    ) {
        let _shared = share_resident();
        let mut file = program(1 << 20, &words);
        for (at, byte) in changes {
            let at = at % file.len();
            file[at] = byte;
        }
        let (_, most) = peak(|| Program::parse(&file).map(|program| program.entry()));
        prop_assert!(most <= file.len() + (16 << 10), "{} bytes for a file of {}", most, file.len());
    }
}
