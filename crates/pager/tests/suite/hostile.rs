//! Snapshots from strangers whose parts contradict each other, and page sources with false ranges.
//! They are refused or clipped, and only the memory that is being filled is written.
//!
//! A test that could crash runs in a separate process.
#![cfg(not(miri))]

#[path = "../../../store/tests/suite/support/forge.rs"]
mod forge;

use std::sync::Arc;
use std::time::Duration;

use afresh_pager::{
    FillStrategy, LazyImage, Options, PageSource, Piece, Restore, SnapshotMemory, SnapshotSource,
    SourceError,
};
use afresh_store::Store;
use afresh_sys::{PAGE_SIZE, PageRange, Protection, Reservation};
use forge::{BASE, DELTA, Layer, Snapshot, WORKING_SET, ZERO};

const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Set in the process that may crash.
const CHILD: &str = "AFRESH_HOSTILE_CHILD";
/// Pages of the memory that every snapshot here claims.
const PAGES: u64 = 8;

/// Whether this is the child; otherwise runs `test` again in a child, which must end well.
fn in_a_child(test: &str) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let out = afresh_sys::test_command(test).env(CHILD, "1").output().unwrap();
    let said =
        String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{test} ended with {}:\n{said}", out.status);
    false
}

/// Snapshots whose layers have other index spaces than the memory they are layers of.
fn contradictions() -> Vec<(&'static str, Snapshot)> {
    let base = || Layer::new(BASE, PAGES, 4, &[(0, 4, 0)]);
    let set = |pages, extents: &[_]| {
        Some(Layer::new(WORKING_SET, pages, pages.min(600) as usize, extents))
    };
    vec![
        // The stored pages end at 4, so the inserter of a lazy image is shorter than the memory.
        (
            "a run that straddles the end",
            Snapshot::new(PAGES, vec![base()], set(600, &[(2, 500, 0)])),
        ),
        ("a run past the end", Snapshot::new(PAGES, vec![base()], set(4096, &[(3000, 600, 0)]))),
        (
            "many runs past the end",
            Snapshot::new(PAGES, vec![base()], set(1 << 20, &[(1, 1, 0), (1 << 19, 512, 0)])),
        ),
        ("a shorter one", Snapshot::new(PAGES, vec![base()], set(4, &[(1, 1, 0)]))),
        (
            "a layer longer than the memory",
            Snapshot::new(PAGES, vec![Layer::new(BASE, 4096, 600, &[(3000, 600, 0)])], None),
        ),
        (
            "a delta longer than the memory",
            Snapshot::new(
                PAGES,
                vec![base(), Layer::new(DELTA, 1 << 20, 1, &[(1 << 19, 1, 0)])],
                None,
            ),
        ),
        ("zeros past the end", Snapshot::new(PAGES, vec![base()], set(4096, &[(4000, 96, ZERO)]))),
    ]
}

#[test]
fn a_layer_of_another_index_space_is_refused_without_harm() {
    if !in_a_child("hostile::a_layer_of_another_index_space_is_refused_without_harm") {
        return;
    }
    for (what, snapshot) in contradictions() {
        let dir = tempfile::tempdir().unwrap();
        snapshot.write(dir.path(), "a");
        let opened = Store::open(dir.path()).unwrap().load("a");
        if let Ok(opened) = &opened {
            restore_beside(opened, what);
            let memory = SnapshotMemory::load(opened.clone(), &Options::default());
            drop(memory.map(|memory| memory.wait(TEST_TIMEOUT)));
        }
        let error = opened.map(|_| ()).expect_err(what).to_string();
        assert!(error.contains("pages"), "{what}: {error}");
    }
}

/// Restores into the first half of a memory; the second half has another owner.
fn restore_beside(snapshot: &afresh_store::Snapshot, what: &str) {
    let (own, all) = (snapshot.pages(), snapshot.pages() + 4096);
    let memory = Arc::new(Reservation::new(all).unwrap());
    memory.map_anonymous(PageRange::new(0, all), Protection::ReadWrite).unwrap();
    let source: Arc<dyn PageSource> = Arc::new(SnapshotSource::new(snapshot.clone()));
    for strategy in FillStrategy::ALL {
        let restore = Restore::start(
            memory.clone(),
            PageRange::new(0, own),
            source.clone(),
            &Options::with(strategy),
        );
        drop(restore.map(|restore| restore.wait(TEST_TIMEOUT)));
        untouched(&memory, PageRange::new(own, all - own), &format!("{what}, {}", strategy.name()));
    }
}

/// The memory next to the restored part is still empty.
fn untouched(memory: &Reservation, beside: PageRange, what: &str) {
    for page in beside.start..beside.end() {
        // SAFETY: inside the reservation, mapped readable by the caller, and not written by others.
        let bytes = unsafe { std::slice::from_raw_parts(memory.page_ptr(page), PAGE_SIZE) };
        assert!(bytes.iter().all(|byte| *byte == 0), "{what}: page {page} beside it was written");
    }
}

/// A source of eight pages with false positions.
struct Liar {
    occupied: Vec<PageRange>,
    set: Vec<PageRange>,
    pieces: Option<Vec<PageRange>>,
}

impl PageSource for Liar {
    fn pages(&self) -> usize {
        PAGES as usize
    }

    fn occupied(&self) -> Vec<PageRange> {
        self.occupied.clone()
    }

    unsafe fn read(&self, _: usize, to: *mut u8, pages: usize) -> Result<(), SourceError> {
        // SAFETY: the caller vouches for the memory.
        unsafe { to.write_bytes(7, pages * PAGE_SIZE) };
        Ok(())
    }

    fn pieces(&self) -> Option<Vec<Piece<'_>>> {
        let piece = |pages: &PageRange| Piece { pages: *pages, file: None };
        Some(self.pieces.as_ref()?.iter().map(piece).collect())
    }

    fn working_set(&self) -> Vec<PageRange> {
        self.set.clone()
    }
}

/// Found by fuzzing: with another working set a guest would depend on how it is restored.
#[test]
fn a_working_set_that_is_no_copy_of_its_pages_does_not_pass_verification() {
    let base = || Layer::new(BASE, PAGES, 4, &[(0, 4, 0)]);
    // Stored page `n` holds `n | 1` throughout.
    for (set, wrong) in [
        (&[(0, 2, 0), (3, 1, 3)][..], None),
        (&[(0, 1, 0), (3, 1, 1)], Some(3)),
        (&[(1, 1, ZERO)], Some(1)),
        (&[(6, 1, 0)], Some(6)),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let set = Layer::new(WORKING_SET, PAGES, 4, set);
        Snapshot::new(PAGES, vec![base()], Some(set)).write(dir.path(), "a");
        let snapshot = Store::open(dir.path()).unwrap().load("a").unwrap();
        for verified in [snapshot.verify(), snapshot.check(&mut |_, _| ())] {
            let said = verified.err().map(|error| error.to_string());
            let wanted = wrong.map(|page| format!("copy of page {page} is not that page"));
            assert_eq!(said.is_some(), wanted.is_some(), "{said:?}");
            assert!(said.unwrap_or_default().contains(&wanted.unwrap_or_default()));
        }
    }
}

#[test]
fn ranges_from_a_source_are_checked() {
    if !in_a_child("hostile::ranges_from_a_source_are_checked") {
        return;
    }
    let run = PageRange::new;
    let all = || vec![run(0, PAGES as usize)];
    let lies = [
        (all(), vec![run(3000, 600), run(0, 1)], None),
        (all(), vec![run(7, 600)], None),
        (all(), vec![run(1 << 50, 1), run(1 << 40, 1), run(5, 1), run(2, 2)], None),
        (vec![run(6, 500)], all(), None),
        (vec![run(5, 2), run(1, 2)], vec![run(1, 1)], None),
        (vec![run(1 << 50, 1)], vec![], None),
        (all(), vec![], Some(vec![run(0, 3), run(4, 4)])),
        (all(), vec![], Some(vec![run(0, 3), run(3, 4000)])),
        (all(), vec![], Some(vec![run(0, 3)])),
        (all(), vec![], Some(vec![run(4, 4), run(0, 4)])),
    ];
    for (number, (occupied, set, pieces)) in lies.into_iter().enumerate() {
        let source: Arc<dyn PageSource> = Arc::new(Liar { occupied, set, pieces });
        for strategy in FillStrategy::ALL {
            let (own, beside) = (PageRange::new(0, 8), PageRange::new(8, 4096));
            let memory = Arc::new(Reservation::new(beside.end()).unwrap());
            memory.map_anonymous(PageRange::new(0, beside.end()), Protection::ReadWrite).unwrap();
            let options = Options::with(strategy);
            let restore = Restore::start(memory.clone(), own, source.clone(), &options);
            drop(restore.map(|restore| restore.wait(TEST_TIMEOUT)));
            untouched(&memory, beside, &format!("lie {number}, {}", strategy.name()));
        }
        for options in [Options::default(), Options { window: Some(1), ..Options::default() }] {
            let image = LazyImage::start(source.clone(), &options);
            drop(image.map(|image| image.wait(TEST_TIMEOUT)));
        }
        drop(LazyImage::record(source).map(|image| image.wait(TEST_TIMEOUT)));
    }
}

#[test]
fn a_held_file_has_no_more_pages_than_it_holds() {
    let file = afresh_sys::Memfd::new(c"short").unwrap();
    file.set_len(3 * PAGE_SIZE).unwrap();
    assert_eq!(afresh_pager::MemfdSource::new(Arc::new(file), 64).pages(), 3);
}
