//! A whole snapshot, as a stranger might make it: it is refused, or every consumer of it reads the
//! same pages, inside the memory that they were given.
//!
//! The input is the claims of the parts: index spaces, extents, a working set. Digests and lengths
//! are made right, so that an input is refused only for its meaning. An accepted snapshot is read
//! page by page, restored eagerly and lazily next to foreign memory, and put into an image.
#![no_main]

#[path = "../../crates/store/tests/suite/support/forge.rs"]
mod forge;

use std::sync::Arc;
use std::time::Duration;

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use afresh_pager::{FillStrategy, LazyImage, Options, PageSource, Restore, SnapshotSource};
use afresh_store::{Access, Limits, Store};
use afresh_sys::{PageRange, Protection, Reservation};
use forge::{BASE, DELTA, Layer, PAGE, Snapshot, WORKING_SET, ZERO};
use libfuzzer_sys::arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Memory for a snapshot of a few layers and extents.
const ROOM: usize = 16 << 20;
/// Longest memory that is looked at page by page.
const MAX_PAGES: usize = 2048;
/// Pages next to a restored memory that must stay as they are.
const BESIDE: usize = 1024;
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Input(Snapshot);

/// Mostly a number that makes sense, now and then any.
fn number(u: &mut Unstructured<'_>, sensible: u64) -> Result<u64> {
    match u.arbitrary::<u8>()? {
        0 => u.arbitrary(),
        1 => Ok(sensible),
        2 => Ok(sensible.saturating_add(u.arbitrary::<u16>()?.into())),
        byte => Ok(u64::from(byte - 3) % sensible.max(1)),
    }
}

/// A layer of a memory of `pages` pages.
fn layer(u: &mut Unstructured<'_>, role: u32, pages: u64) -> Result<Layer> {
    let pages = if u.ratio(1, 8)? { number(u, pages)? } else { pages };
    let stored = u.int_in_range(0..=6)?;
    let mut extents = Vec::new();
    let mut from = 0u64;
    for _ in 0..u.int_in_range(0..=5)? {
        let first = from.saturating_add(number(u, 4)?);
        let len = number(u, 4)?;
        let at = if u.ratio(1, 4)? { ZERO } else { number(u, stored as u64)? };
        extents.push((first, len, at));
        from = first.saturating_add(len);
    }
    let mut layer = Layer::new(role, pages, stored, &extents);
    layer.group_pages = *u.choose(&[1, 2, 16, 512, 3])?;
    Ok(layer)
}

impl<'a> Arbitrary<'a> for Input {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        let pages = match u.int_in_range(0..=7)? {
            0 => number(u, 1 << 32)?,
            1 => 600,
            _ => u.int_in_range(0..=40)?,
        };
        let mut layers = vec![layer(u, BASE, pages)?];
        for _ in 0..u.int_in_range(0..=2)? {
            layers.push(layer(u, DELTA, pages)?);
        }
        let set = if u.arbitrary()? { Some(layer(u, WORKING_SET, pages)?) } else { None };
        Ok(Self(Snapshot::new(pages, layers, set)))
    }
}

fuzz_target!(|input: Input| {
    let Ok(dir) = tempfile::tempdir() else { return };
    input.0.write(dir.path(), "a");
    let limits = Limits { memory: 1 << 30, content: 64 << 20, ..Limits::default() };
    let access = Access::new().with_limits(limits);
    let Ok(store) = Store::open(dir.path()) else { return };
    let (snapshot, _) = within(ROOM, || store.load_with("a", &access));
    let Some(snapshot) = accepted(snapshot) else { return };
    let _ = within(ROOM, || snapshot.inspect());
    let _ = within(ROOM, || snapshot.page_summary(7));
    let pages = snapshot.pages();
    if snapshot.verify().is_err() || pages > MAX_PAGES {
        return;
    }
    let mut whole = vec![0; pages * PAGE];
    snapshot.read(0, &mut whole).expect("verified contents are read");
    for page in 0..pages {
        let mut one = [0; PAGE];
        snapshot.read(page, &mut one).expect("verified contents are read");
        assert!(one[..] == whole[page * PAGE..][..PAGE]);
    }
    assert!(snapshot.working_set().iter().all(|run| run.end() <= pages));
    let source: Arc<dyn PageSource> = Arc::new(SnapshotSource::new(snapshot.clone()));
    for strategy in [FillStrategy::Read, FillStrategy::WorkingSet, FillStrategy::Stream] {
        restore(&source, strategy, &whole);
    }
    if let Ok(source) = SnapshotSource::checked(snapshot) {
        restore(&(Arc::new(source) as Arc<dyn PageSource>), FillStrategy::MapDetach, &whole);
    }
    for window in [None, Some(1)] {
        let options = Options { window, ..Options::default() };
        let Ok(image) = LazyImage::start(source.clone(), &options) else { continue };
        if image.image().complete().is_ok() {
            let mut found = vec![1; whole.len()];
            image.image().read(0, &mut found);
            assert!(found == whole, "an image shows other pages");
        }
    }
});

/// Restores into the middle of a memory whose ends must not change.
fn restore(source: &Arc<dyn PageSource>, strategy: FillStrategy, whole: &[u8]) {
    let own = PageRange::new(BESIDE, whole.len() / PAGE);
    let Ok(memory) = Reservation::new(own.end() + BESIDE) else { return };
    let memory = Arc::new(memory);
    let all = PageRange::new(0, memory.pages());
    if memory.map_anonymous(all, Protection::ReadWrite).is_err() {
        return;
    }
    let options = Options::with(strategy);
    let Ok(restore) = Restore::start(memory.clone(), own, source.clone(), &options) else { return };
    if restore.wait(OPEN_TIMEOUT).is_err() {
        return;
    }
    let bytes = |range: PageRange| {
        // SAFETY: inside the reservation and mapped; the restore is over, and there is no other
        // writer.
        unsafe { std::slice::from_raw_parts(memory.page_ptr(range.start), range.byte_len()) }
    };
    assert!(bytes(own) == whole, "{} brought other pages", strategy.name());
    for beside in [PageRange::new(0, BESIDE), PageRange::new(own.end(), BESIDE)] {
        assert!(bytes(beside).iter().all(|byte| *byte == 0), "{} wrote beside", strategy.name());
    }
}
