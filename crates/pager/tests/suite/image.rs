//! Slots of the engine on images that a snapshot fills while they run.
#![cfg(not(miri))]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use afresh_memory::{Feature, Features, ImageBuilder, Slot, SlotConfig};
use afresh_pager::{
    LazyImage, Options, PageSink, PageSource, Recorder, SnapshotMemory, SnapshotOptions,
    SnapshotSource, SourceError,
};
use afresh_store::{Encoding, GuestBuild, MemoryPages, SaveRequest, Snapshot, Store};
use afresh_sys::{
    Advice, HUGE_PAGES, HUGE_SIZE, Memfd, PAGE_SIZE, PageRange, Protection, Reservation, folios,
};

const PAGES: usize = 3000;
const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// Runs of noise, with zero pages in between.
fn content() -> Vec<u8> {
    let mut bytes = vec![0u8; PAGES * PAGE_SIZE];
    let mut state = 9u64;
    for (page, bytes) in bytes.chunks_exact_mut(PAGE_SIZE).enumerate() {
        if page % 50 > 40 || (800..1200).contains(&page) {
            continue;
        }
        for byte in bytes {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (state >> 56) as u8;
        }
    }
    bytes
}

fn build() -> GuestBuild {
    GuestBuild { kind: "arena".into(), module: "m".into(), engine: "e".into(), cpu: Vec::new() }
}

fn save(dir: &Path, encoding: Encoding, set: Vec<PageRange>) -> Snapshot {
    let store = Store::create(dir).unwrap();
    let mut options = SaveRequest::new(build());
    options.options.encoding = encoding;
    options.options.working_set = set;
    store.save("a", &MemoryPages(content()), &options).unwrap();
    store.load("a").unwrap()
}

fn slot(image: &LazyImage) -> Option<Slot> {
    if !Features::host().has(Feature::UffdSigbus) {
        println!("SKIPPED: userfaultfd in SIGBUS mode is not to be had here");
        return None;
    }
    Some(Slot::new(image.image(), SlotConfig::default()).unwrap())
}

fn check(slot: &Slot, page: usize, content: &[u8]) {
    let mut bytes = vec![0; PAGE_SIZE];
    slot.read(page * PAGE_SIZE, &mut bytes).unwrap();
    assert!(bytes == content[page * PAGE_SIZE..][..PAGE_SIZE], "page {page}");
}

#[test]
fn guests_run_on_a_snapshot_that_is_still_being_read() {
    let content = content();
    let sets =
        [vec![], vec![PageRange::new(3, 5), PageRange::new(1000, 3), PageRange::new(2990, 10)]];
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        for set in &sets {
            let dir = tempfile::tempdir().unwrap();
            let snapshot = save(dir.path(), encoding, set.clone());
            let source: Arc<dyn PageSource> = Arc::new(SnapshotSource::new(snapshot));
            let image = LazyImage::start(source.clone(), &Options::default()).unwrap();
            let Some(mut one) = slot(&image) else { return };
            let mut two = slot(&image).unwrap();
            for step in 0..400 {
                let page = step * 7919 % PAGES;
                check(&one, page, &content);
                two.write(page * PAGE_SIZE, b"dirt").unwrap();
                check(&two, (page + 1) % PAGES, &content);
                two.reset().unwrap();
                check(&two, page, &content);
            }
            image.wait(TEST_TIMEOUT).unwrap();
            assert!(image.image().is_complete());
            one.reset().unwrap();
            assert_eq!((one.verify().unwrap(), two.verify().unwrap()), (vec![], vec![]));
            // The threads end a moment after they have declared the end.
            let end = Instant::now() + TEST_TIMEOUT;
            while Arc::strong_count(&source) > 1 && Instant::now() < end {
                std::thread::yield_now();
            }
            assert_eq!(Arc::strong_count(&source), 1, "the source is let go");
        }
    }
}

#[test]
fn a_recorded_working_set_is_there_before_the_guest_starts() {
    let dir = tempfile::tempdir().unwrap();
    let content = content();
    let snapshot = save(dir.path(), Encoding::Raw, vec![]);
    let touched = [PageRange::new(7, 3), PageRange::new(1500, 1), PageRange::new(2999, 1)];
    let mut recorder = Recorder::new();
    for _ in 0..2 {
        let source = Arc::new(SnapshotSource::new(snapshot.clone()));
        let image = LazyImage::record(source).unwrap();
        let Some(slot) = slot(&image) else { return };
        touched.iter().flat_map(|run| run.start..run.end()).for_each(|p| check(&slot, p, &content));
        recorder.add(&image.touched());
    }
    assert_eq!(
        recorder.pages(1.0),
        [touched[0], touched[1]],
        "page 2999 is zero, and so in no set"
    );
    let snapshot = save(dir.path(), Encoding::Raw, recorder.pages(1.0));
    let options = Options { background: false, ..Options::default() };
    let image = LazyImage::start(Arc::new(SnapshotSource::new(snapshot)), &options).unwrap();
    let slot = slot(&image).unwrap();
    touched.iter().flat_map(|run| run.start..run.end()).for_each(|p| check(&slot, p, &content));
    assert_eq!(image.faults(), 0);
    // SAFETY: a page of the slot, which nothing writes.
    let byte = unsafe { slot.base().add(500 * PAGE_SIZE + 9).read_volatile() };
    assert_eq!(byte, content[500 * PAGE_SIZE + 9]);
    assert_eq!(image.faults(), 1);
}

#[test]
fn a_save_beside_the_snapshot_reads_the_pages_that_changed_and_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let mut content = content();
    let snapshot = save(dir.path(), Encoding::Raw, vec![]);
    let opened = SnapshotMemory::record(snapshot.clone()).unwrap();
    if opened.pages().is_complete() {
        println!("SKIPPED: the host cannot fill images lazily");
        return;
    }
    // Three pages are stored anew, and one of them is as before.
    let mut changed = Vec::new();
    for page in [7, 900, 1500] {
        let bytes = &mut content[page * PAGE_SIZE..][..PAGE_SIZE];
        bytes[9] ^= u8::from(page != 1500);
        let mut builder = ImageBuilder::new(1);
        builder.segment(0, bytes).unwrap();
        changed.push((page, builder.build().unwrap()));
    }
    let image = opened.pages().with_parts(PAGES, &changed).unwrap();
    let changed = opened.pages().differing_content(&image).unwrap();
    assert_eq!(changed, [PageRange::new(7, 1), PageRange::new(900, 1)]);
    let options =
        SnapshotOptions { parent: Some(snapshot), changed: Some(changed), ..Default::default() };
    let store = Store::open(dir.path()).unwrap();
    SnapshotMemory::from(image).save(&store, "next", build(), Vec::new(), &options).unwrap();
    let touched: usize = opened.touched().iter().map(|run| run.len).sum();
    assert!(touched <= 64, "{touched} pages were read");
    let saved = store.load("next").unwrap();
    assert_eq!(saved.layers()[1].stored(), 2);
    let mut bytes = vec![0; PAGES * PAGE_SIZE];
    saved.read(0, &mut bytes).unwrap();
    assert!(bytes == content);
}

/// The largest file below `dir`, which is the page layer.
fn layer(dir: &Path) -> PathBuf {
    let blobs = std::fs::read_dir(dir.join("blobs/sha256")).unwrap();
    blobs.map(|e| e.unwrap().path()).max_by_key(|p| p.metadata().unwrap().len()).unwrap()
}

#[test]
fn damage_in_the_file_is_an_error_and_no_guest_sees_it() {
    use std::os::unix::fs::{FileExt, PermissionsExt};
    let dir = tempfile::tempdir().unwrap();
    let content = content();
    drop(save(dir.path(), Encoding::Raw, vec![]));
    let path = layer(dir.path());
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let middle = file.metadata().unwrap().len() / 2;
    let mut byte = [0];
    file.read_exact_at(&mut byte, middle).unwrap();
    file.write_all_at(&[byte[0] ^ 4], middle).unwrap();
    let snapshot = Store::open(dir.path()).unwrap().load("a").unwrap();
    let image =
        LazyImage::start(Arc::new(SnapshotSource::new(snapshot)), &Options::default()).unwrap();
    let Some(mut slot) = slot(&image) else { return };
    let error = image.wait(TEST_TIMEOUT).unwrap_err().to_string();
    assert!(error.contains("digest"), "{error}");
    let mut bytes = vec![0; PAGE_SIZE];
    let refused = slot.read(0, &mut bytes).unwrap_err().to_string();
    assert!(refused.contains("digest"), "{refused}");
    assert!(slot.reset().is_err());
    let again = Slot::new(image.image(), SlotConfig::default());
    let untouched = bytes.iter().all(|b| *b == 0) || bytes == content[..PAGE_SIZE];
    assert!(untouched && again.is_err_and(|e| e.to_string().contains("digest")));
}

/// Delivers nothing until it is released.
struct StuckSource(AtomicBool);

impl PageSource for StuckSource {
    fn pages(&self) -> usize {
        64
    }

    unsafe fn read(&self, _: usize, _: *mut u8, _: usize) -> Result<(), SourceError> {
        while !self.0.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(SourceError::TooShort { pages: 0, wanted: 1 })
    }
}

#[test]
fn a_source_that_hangs_ends_in_an_error_within_its_patience() {
    let source = Arc::new(StuckSource(AtomicBool::new(false)));
    let options = Options { timeout: Duration::from_millis(300), ..Options::default() };
    let image = LazyImage::start(source.clone(), &options).unwrap();
    let started = Instant::now();
    let error = image.image().resolve(PageRange::new(5, 1)).unwrap_err().to_string();
    assert!(error.contains("stuck"), "{error}");
    assert!(started.elapsed() < TEST_TIMEOUT);
    source.0.store(true, Ordering::Release);
}

/// How the reading of a working set ends.
#[derive(Clone, Copy)]
enum SetEnd {
    Whole,
    Damaged,
    Panic,
}

/// Reads its working set once it is released.
struct SetSource {
    content: Vec<u8>,
    released: AtomicBool,
    end: SetEnd,
}

const SET: [PageRange; 2] = [PageRange::new(3, 5), PageRange::new(1500, 3)];

impl PageSource for SetSource {
    fn pages(&self) -> usize {
        PAGES
    }

    unsafe fn read(&self, first: usize, to: *mut u8, pages: usize) -> Result<(), SourceError> {
        let bytes = &self.content[first * PAGE_SIZE..][..pages * PAGE_SIZE];
        // SAFETY: the caller promises room for so many pages.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn is_near(&self) -> bool {
        true
    }

    fn working_set(&self) -> Vec<PageRange> {
        SET.to_vec()
    }

    fn read_working_set(&self, take: &mut PageSink<'_>) -> Result<(), SourceError> {
        while !self.released.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let bytes = |run: PageRange| &self.content[run.start * PAGE_SIZE..][..run.byte_len()];
        take(SET[0], bytes(SET[0]))?;
        match self.end {
            SetEnd::Whole => take(SET[1], bytes(SET[1])),
            SetEnd::Damaged => Err(SourceError::Io(std::io::Error::other("a damaged set"))),
            SetEnd::Panic => panic!("a planned panic"),
        }
    }
}

/// An image of such a source, and a slot of it.
fn start_with_set(end: SetEnd) -> Option<(Arc<SetSource>, LazyImage, Slot)> {
    if !Features::host().has(Feature::UffdSigbus) {
        println!("SKIPPED: userfaultfd in SIGBUS mode is not to be had here");
        return None;
    }
    let released = AtomicBool::new(false);
    let source = Arc::new(SetSource { content: content(), released, end });
    let image = LazyImage::start(source.clone(), &Options::default()).unwrap();
    let slot = slot(&image)?;
    Some((source, image, slot))
}

#[test]
fn guests_wait_for_the_pages_of_a_working_set_that_is_being_read_and_for_no_others() {
    let Some((source, image, slot)) = start_with_set(SetEnd::Whole) else { return };
    let content = content();
    check(&slot, 500, &content);
    let base = slot.base() as usize;
    std::thread::scope(|scope| {
        for page in [4, 1501, 1502, 7] {
            let content = &content;
            scope.spawn(move || {
                // SAFETY: a page of the slot, which outlives the scope; nothing writes it.
                let byte = unsafe { ((base + page * PAGE_SIZE + 9) as *const u8).read_volatile() };
                assert_eq!(byte, content[page * PAGE_SIZE + 9], "page {page}");
            });
        }
        source.released.store(true, Ordering::Release);
    });
    image.wait(TEST_TIMEOUT).unwrap();
    (0..PAGES).for_each(|page| check(&slot, page, &content));
}

/// Pages of [`ZeroSource`] without content. The first gap is bridged, the second is not.
const ZEROS: [PageRange; 2] = [PageRange::new(10, 8), PageRange::new(100, 200)];
/// Its working set.
const ZERO_SET: PageRange = PageRange::new(5, 300);

/// Stores no zeros, but its working set has them. It passes on some pages twice.
struct ZeroSource {
    content: Vec<u8>,
    near: bool,
    released: AtomicBool,
}

impl PageSource for ZeroSource {
    fn pages(&self) -> usize {
        PAGES
    }

    fn occupied(&self) -> Vec<PageRange> {
        let [small, large] = ZEROS;
        let between = |from: usize, to: usize| PageRange::new(from, to - from);
        vec![
            between(0, small.start),
            between(small.end(), large.start),
            between(large.end(), PAGES),
        ]
    }

    unsafe fn read(&self, first: usize, to: *mut u8, pages: usize) -> Result<(), SourceError> {
        let bytes = &self.content[first * PAGE_SIZE..][..pages * PAGE_SIZE];
        // SAFETY: the caller promises room for so many pages.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn is_near(&self) -> bool {
        self.near
    }

    fn working_set(&self) -> Vec<PageRange> {
        vec![ZERO_SET]
    }

    fn read_working_set(&self, take: &mut PageSink<'_>) -> Result<(), SourceError> {
        while !self.released.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        for run in [PageRange::new(5, 10), PageRange::new(12, 293)] {
            take(run, &self.content[run.start * PAGE_SIZE..][..run.byte_len()])?;
        }
        Ok(())
    }
}

/// Whether the files of an image have no page of its zeros from `first` to `end`.
fn is_hole(image: &LazyImage, first: usize, end: usize) -> bool {
    let files = image.image().files().unwrap();
    let file = files.iter().find(|file| file.pages().contains(end)).unwrap();
    let at = |page: usize| ((file.first() + page - file.pages().start) * PAGE_SIZE) as u64;
    let start = at(end) - ((end - first) * PAGE_SIZE) as u64;
    let data = rustix::fs::seek(file.file().unwrap(), rustix::fs::SeekFrom::Data(start)).unwrap();
    data == at(end)
}

#[test]
fn zeros_of_a_working_set_are_not_stored_and_guests_may_read_them_first() {
    if !Features::host().has(Feature::UffdSigbus) {
        return println!("SKIPPED: userfaultfd in SIGBUS mode is not to be had here");
    }
    let mut content = content();
    ZEROS.iter().for_each(|run| content[run.start * PAGE_SIZE..][..run.byte_len()].fill(0));
    for near in [true, false] {
        let released = AtomicBool::new(!near);
        let source = Arc::new(ZeroSource { content: content.clone(), near, released });
        let image = LazyImage::start(source.clone(), &Options::default()).unwrap();
        let slot = slot(&image).unwrap();
        let base = slot.base() as usize;
        let first_byte = |page: usize| {
            // SAFETY: a page of the slot, which nothing writes.
            unsafe { ((base + page * PAGE_SIZE) as *const u8).read_volatile() }
        };
        for page in ZEROS[1].start..ZEROS[1].end() {
            assert_eq!(first_byte(page), 0, "page {page}");
        }
        std::thread::scope(|scope| {
            for page in ZEROS[0].start - 1..ZEROS[0].end() + 1 {
                let expected = content[page * PAGE_SIZE];
                scope.spawn(move || assert_eq!(first_byte(page), expected, "page {page}"));
            }
            source.released.store(true, Ordering::Release);
        });
        image.wait(TEST_TIMEOUT).unwrap();
        (0..PAGES).for_each(|page| check(&slot, page, &content));
        assert!(is_hole(&image, ZEROS[1].start, ZEROS[1].end()), "zeros are stored");
    }
}

#[test]
fn a_working_set_that_cannot_be_read_fails_the_image_by_name() {
    for (end, cause) in [(SetEnd::Damaged, "a damaged set"), (SetEnd::Panic, "has ended")] {
        let Some((source, image, mut slot)) = start_with_set(end) else { return };
        source.released.store(true, Ordering::Release);
        let error = image.wait(TEST_TIMEOUT).unwrap_err().to_string();
        assert!(error.contains(cause), "{error}");
        for page in [1501, 4, 900] {
            let refused = slot.read(page * PAGE_SIZE, &mut [0]).unwrap_err().to_string();
            assert!(refused.contains(cause), "page {page}: {refused}");
        }
        let refused = slot.reset().unwrap_err().to_string();
        assert!(refused.contains(cause), "{refused}");
        let again = Slot::new(image.image(), SlotConfig::default());
        assert!(again.is_err_and(|error| error.to_string().contains(cause)));
    }
}

#[test]
fn dropping_the_image_early_ends_the_filling() {
    let dir = tempfile::tempdir().unwrap();
    let source: Arc<dyn PageSource> =
        Arc::new(SnapshotSource::new(save(dir.path(), Encoding::Raw, vec![])));
    let options = Options { background: false, ..Options::default() };
    drop(LazyImage::start(source.clone(), &options).unwrap());
    let end = Instant::now() + TEST_TIMEOUT;
    while Arc::strong_count(&source) > 1 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(Arc::strong_count(&source), 1);
}

#[test]
fn however_many_images_are_live_each_is_filled_lazily_and_with_its_own_pages() {
    let dir = tempfile::tempdir().unwrap();
    let content = content();
    let snapshot = save(dir.path(), Encoding::Raw, vec![]);
    let options = Options { background: false, ..Options::default() };
    let open = || LazyImage::start(Arc::new(SnapshotSource::new(snapshot.clone())), &options);
    let images: Vec<LazyImage> = (0..130).map(|_| open().unwrap()).collect();
    assert!(images.iter().all(|image| !image.image().is_complete()), "one was read at once");
    // Neighbours in a file of many, each with other pages in place.
    let mut slots = Vec::new();
    for (number, image) in images.iter().enumerate().skip(95) {
        let Some(slot) = slot(image) else { return };
        for page in [number, 2 * number, 2500 - number] {
            check(&slot, page, &content);
        }
        slots.push(slot);
    }
    drop(images);
    for (number, slot) in slots.iter_mut().enumerate() {
        check(slot, 3 * number + 500, &content);
        slot.write(number * PAGE_SIZE, b"dirt").unwrap();
        slot.reset().unwrap();
        check(slot, number, &content);
    }
}

/// Whether the kernel makes a folio of 2 MiB of pages of a memory file.
fn makes_folios() -> bool {
    let all = PageRange::new(0, HUGE_PAGES);
    let file = Memfd::new(c"folio").unwrap();
    file.write_at(&vec![1; all.byte_len()], 0).unwrap();
    let view = Reservation::aligned(HUGE_PAGES, HUGE_SIZE).unwrap();
    view.map_shared(all, Protection::Read, &file, 0).unwrap();
    view.advise(all, Advice::Collapse).is_ok()
}

/// Huge pages of the content without a gap that is too long to be filled.
const WHOLE_HUGE_PAGES: [usize; 3] = [0, 3, 4];

#[test]
fn a_complete_image_gets_folios_of_2_mib_under_its_slots() {
    if !makes_folios() {
        return println!("SKIPPED: this kernel collapses no memory files");
    }
    let dir = tempfile::tempdir().unwrap();
    let snapshot = save(dir.path(), Encoding::Raw, vec![]);
    let source: Arc<dyn PageSource> = Arc::new(SnapshotSource::new(snapshot));
    let image = LazyImage::start(source, &Options::default()).unwrap();
    let Some(mut before) = slot(&image) else { return };
    // Written and read pages are mapped while their neighbours move.
    before.write(5 * PAGE_SIZE, b"dirt").unwrap();
    let content = content();
    (0..PAGES).step_by(3).filter(|page| *page != 6).for_each(|page| check(&before, page, &content));
    image.wait(TEST_TIMEOUT).unwrap();
    let began = Instant::now();
    while image.huge_folios() < WHOLE_HUGE_PAGES.len() {
        assert!(began.elapsed() < TEST_TIMEOUT, "{} folios", image.huge_folios());
        std::thread::sleep(Duration::from_millis(20));
    }
    let after = slot(&image).unwrap();
    for page in 0..PAGES {
        check(&after, page, &content);
        if page != 5 {
            check(&before, page, &content);
        }
    }
    let mut dirt = [0; 4];
    before.read(5 * PAGE_SIZE, &mut dirt).unwrap();
    assert_eq!(&dirt, b"dirt");
    before.reset().unwrap();
    check(&before, 5, &content);
    assert!(before.verify().unwrap().is_empty());
    for file in image.image().files().unwrap() {
        let pages = PageRange::new(file.first(), file.pages().len);
        // Visible only to a privileged process.
        let Some(found) = folios::of(file.file().unwrap(), pages) else { return };
        let huge = WHOLE_HUGE_PAGES.map(|number| PageRange::new(number * HUGE_PAGES, HUGE_PAGES));
        let expected = huge.iter().filter_map(|huge| huge.intersect(file.pages()));
        let expected: usize = expected.map(|part| part.len).sum();
        assert_eq!(found.get(&2048).copied().unwrap_or(0), expected, "{found:?}");
    }
}

#[test]
fn an_image_that_is_filled_on_demand_keeps_its_pages() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = save(dir.path(), Encoding::Raw, vec![]);
    let source: Arc<dyn PageSource> = Arc::new(SnapshotSource::new(snapshot));
    let options = Options { background: false, ..Options::default() };
    let image = LazyImage::start(source, &options).unwrap();
    image.wait(TEST_TIMEOUT).unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(image.huge_folios(), 0);
}
