//! Every strategy against a plain byte vector, while the guest runs.
#![cfg(not(miri))]

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh_pager::{
    Answer, FileSource, FillStrategy, MemfdSource, Options, PageSource, Recorder, Restore,
    RestoreError, SnapshotSource, SourceError,
};
use afresh_store::{Encoding, GuestBuild, MemoryPages, SaveRequest, Store};
use afresh_sys::{Feature, Features, Memfd, PAGE_SIZE, PageRange, Reservation};

const PAGES: usize = 1500;
const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// A small generator, so that every run touches pages in the same order.
struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }
}

fn content() -> Vec<u8> {
    let mut random = Random(7);
    let mut bytes = vec![0; PAGES * PAGE_SIZE];
    for page in bytes.chunks_exact_mut(PAGE_SIZE) {
        // Every eighth page stays zero.
        if random.next(8) != 0 {
            page.iter_mut().for_each(|b| *b = random.next(256) as u8);
        }
    }
    bytes
}

fn file(dir: &Path, bytes: &[u8]) -> File {
    let path = dir.join("pages");
    File::create(&path).unwrap().write_all(bytes).unwrap();
    File::open(path).unwrap()
}

fn memfd(bytes: &[u8]) -> Arc<dyn PageSource> {
    let file = Memfd::new(c"held").unwrap();
    file.write_at(bytes, 0).unwrap();
    file.seal().unwrap();
    Arc::new(MemfdSource::new(Arc::new(file), PAGES))
}

fn snapshot(dir: &Path, bytes: &[u8], encoding: Encoding, set: Vec<PageRange>) -> SnapshotSource {
    let store = Store::create(dir.join("store")).unwrap();
    let mut save = SaveRequest::new(GuestBuild {
        kind: "arena".into(),
        module: "none".into(),
        engine: "none".into(),
        cpu: Vec::new(),
    });
    save.options.encoding = encoding;
    save.options.working_set = set;
    store.save("a", &MemoryPages(bytes.to_vec()), &save).unwrap();
    SnapshotSource::new(store.load("a").unwrap())
}

fn target() -> (Arc<Reservation>, PageRange) {
    // An offset that distinguishes pages of the target from those of the source.
    (Arc::new(Reservation::aligned(PAGES + 20, 2 << 20).unwrap()), PageRange::new(10, PAGES))
}

fn peek(memory: &Reservation, at: usize) -> u8 {
    // SAFETY: the tests touch only the range that is being restored.
    unsafe { memory.page_ptr(10).add(at).read_volatile() }
}

fn poke(memory: &Reservation, at: usize, byte: u8) {
    // SAFETY: as for `peek`.
    unsafe { memory.page_ptr(10).add(at).write_volatile(byte) }
}

/// Restores while two threads read and write at random, each its own half of the pages, and
/// compares.
fn check(source: Arc<dyn PageSource>, options: &Options) {
    let mut expected = content();
    let (memory, range) = target();
    let restore = match Restore::start(memory.clone(), range, source, options) {
        Ok(restore) => restore,
        Err(RestoreError::Unsupported { why, .. }) if why.contains("userfaultfd") => {
            println!("SKIPPED: {options:?}: {why}");
            return;
        }
        Err(error) => panic!("{options:?}: {error}"),
    };
    let halves: Vec<_> = expected.chunks_mut(PAGES / 2 * PAGE_SIZE).enumerate().collect();
    std::thread::scope(|scope| {
        for (number, half) in halves {
            let memory = &memory;
            scope.spawn(move || {
                let mut random = Random(number as u64 + 1);
                for _ in 0..3000 {
                    let at = random.next(half.len());
                    let absolute = number * (PAGES / 2 * PAGE_SIZE) + at;
                    assert_eq!(peek(memory, absolute), half[at], "at {absolute}");
                    if random.next(3) == 0 {
                        half[at] = random.next(256) as u8;
                        poke(memory, absolute, half[at]);
                    }
                }
            });
        }
    });
    restore.resolve(PageRange::new(100, 50)).unwrap();
    restore.wait(TEST_TIMEOUT).unwrap();
    assert!(restore.status().done);
    drop(restore);
    for (at, byte) in expected.iter().enumerate() {
        assert_eq!(peek(&memory, at), *byte, "{options:?} at {at}");
    }
}

fn every_variant() -> Vec<Options> {
    let mut all = Vec::new();
    for strategy in FillStrategy::ALL {
        for answer in [Answer::Sigbus, Answer::Thread] {
            for window in [None, Some(1), Some(16)] {
                let mut options = Options::with(strategy);
                options.answer = answer;
                options.window = window;
                options.background = false;
                all.push(options.clone());
                options.background = true;
                options.streams = 2;
                all.push(options);
            }
        }
    }
    all
}

#[test]
fn every_strategy_restores_a_file_while_the_guest_runs() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = content();
    let set = [PageRange::new(3, 5), PageRange::new(600, 1), PageRange::new(1400, 100)];
    let compact: Vec<u8> =
        set.iter().flat_map(|r| bytes[r.byte_start()..][..r.byte_len()].to_vec()).collect();
    std::fs::write(dir.path().join("set"), compact).unwrap();
    for options in every_variant() {
        if options.strategy == Some(FillStrategy::Held) {
            continue;
        }
        let source = FileSource::new(file(dir.path(), &bytes))
            .unwrap()
            .with_working_set(set.to_vec(), File::open(dir.path().join("set")).unwrap());
        check(Arc::new(source), &options);
    }
}

#[test]
fn every_strategy_restores_a_held_image() {
    let bytes = content();
    for options in every_variant() {
        check(memfd(&bytes), &options);
    }
}

#[test]
fn snapshots_are_restored_and_checked_on_the_way() {
    let bytes = content();
    let set = vec![PageRange::new(0, 40), PageRange::new(77, 3)];
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        for strategy in [FillStrategy::Read, FillStrategy::Stream, FillStrategy::WorkingSet] {
            for (answer, ahead) in
                [(Answer::Sigbus, true), (Answer::Thread, true), (Answer::Sigbus, false)]
            {
                let dir = tempfile::tempdir().unwrap();
                let mut options = Options::with(strategy);
                options.answer = answer;
                options.background = ahead;
                check(Arc::new(snapshot(dir.path(), &bytes, encoding, set.clone())), &options);
            }
        }
    }
}

#[test]
fn the_automatic_choice_fits_the_source() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = content();
    let plain = FileSource::new(file(dir.path(), &bytes)).unwrap();
    let cold = snapshot(dir.path(), &bytes, Encoding::Zstd, vec![PageRange::new(0, 40)]);
    let poorer = Features::host().without(Feature::UffdSigbus);
    let poor = |source: &dyn PageSource| FillStrategy::choose(source, true, &poorer);
    assert_eq!(poor(&*memfd(&bytes)), FillStrategy::Held);
    assert_eq!(poor(&plain), FillStrategy::MapDetach);
    assert_eq!(poor(&cold), FillStrategy::Read);
    if !Features::host().has(Feature::UffdSigbus) {
        println!("SKIPPED: the choice where there is userfaultfd: this host has none");
        return;
    }
    let choose =
        |source: &dyn PageSource, written| FillStrategy::choose(source, written, Features::host());
    assert_eq!(choose(&plain, false), FillStrategy::MapDetach);
    assert_eq!(choose(&plain, true), FillStrategy::Stream);
    assert_eq!(choose(&*memfd(&bytes), false), FillStrategy::Held);
    assert_eq!(choose(&cold, false), FillStrategy::WorkingSet);
    let cold = snapshot(dir.path(), &bytes, Encoding::Zstd, Vec::new());
    assert_eq!(choose(&cold, false), FillStrategy::Stream);
    check(Arc::new(cold), &Options::default());
    check(Arc::new(plain), &Options::default());
}

#[test]
fn nothing_of_the_source_is_mapped_or_open_when_a_restore_ends() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pages").canonicalize().unwrap_or(dir.path().join("pages"));
    let in_use = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let mut open = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
        maps.contains(path.to_str().unwrap()) || open.any(|target| target == path)
    };
    let bytes = content();
    for strategy in [
        FillStrategy::MapDetach,
        FillStrategy::Read,
        FillStrategy::Stream,
        FillStrategy::WorkingSet,
    ] {
        let source = Arc::new(FileSource::new(file(dir.path(), &bytes)).unwrap());
        let (memory, range) = target();
        let restore =
            Restore::start(memory.clone(), range, source, &Options::with(strategy)).unwrap();
        assert_eq!(peek(&memory, 9000), bytes[9000]);
        restore.wait(TEST_TIMEOUT).unwrap();
        assert!(!in_use(), "{}", strategy.name());
        assert_eq!(peek(&memory, PAGES * PAGE_SIZE - 1), bytes[PAGES * PAGE_SIZE - 1]);
    }
}

#[test]
fn a_restored_guest_can_be_saved_over_its_own_file_while_it_is_streamed() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = content();
    let path = dir.path().join("pages");
    for strategy in [FillStrategy::MapDetach, FillStrategy::Stream] {
        let source = Arc::new(FileSource::new(file(dir.path(), &bytes)).unwrap());
        let (memory, range) = target();
        let restore =
            Restore::start(memory.clone(), range, source, &Options::with(strategy)).unwrap();
        bytes[5] ^= 0xff;
        poke(&memory, 5, bytes[5]);
        // The next checkpoint replaces the name; the restore continues with its open file.
        let saved: Vec<u8> = (0..bytes.len()).map(|at| peek(&memory, at)).collect();
        assert!(saved == bytes);
        std::fs::write(dir.path().join("next"), &saved).unwrap();
        std::fs::rename(dir.path().join("next"), &path).unwrap();
        restore.wait(TEST_TIMEOUT).unwrap();
        assert!((0..bytes.len()).all(|at| peek(&memory, at) == bytes[at]));
    }
}

/// Behaviour of a source from page 700 on.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Error,
    Hang,
    Panic,
}

struct FaultySource(Fault);

impl PageSource for FaultySource {
    fn pages(&self) -> usize {
        PAGES
    }

    unsafe fn read(&self, first: usize, to: *mut u8, pages: usize) -> Result<(), SourceError> {
        if first + pages > 700 {
            match self.0 {
                Fault::Error => return Err(SourceError::Io(std::io::Error::other("disk on fire"))),
                Fault::Hang => std::thread::sleep(Duration::from_secs(3600)),
                Fault::Panic => panic!("the source has a bug"),
            }
        }
        // SAFETY: the caller vouches for the memory.
        unsafe { to.write_bytes(1, pages * PAGE_SIZE) };
        Ok(())
    }
}

/// Options with this time limit, which only a source that hangs is to use up.
fn faulty_options(timeout: Duration) -> Vec<Options> {
    let mut all = Vec::new();
    for ahead in [true, false] {
        for answer in [Answer::Sigbus, Answer::Thread] {
            let mut options = Options::with(FillStrategy::Stream);
            options.answer = answer;
            options.background = ahead;
            options.timeout = timeout;
            all.push(options);
        }
    }
    all
}

const CHILD: &str = "AFRESH_TEST_FAULT";

/// A guest that touches a page whose filler fails is ended by SIGSEGV: it reads nothing, and never
/// hangs.
#[test]
fn a_dead_or_stuck_filler_never_yields_a_page_and_never_hangs_the_guest() {
    use std::os::unix::process::ExitStatusExt;
    if let Ok(number) = std::env::var(CHILD) {
        let number: usize = number.parse().unwrap();
        let fault = [Fault::Error, Fault::Hang, Fault::Panic][number % 3];
        let short = Duration::from_millis(200);
        let timeout = if matches!(fault, Fault::Hang) { short } else { TEST_TIMEOUT };
        let options = &faulty_options(timeout)[number / 3];
        let (memory, range) = target();
        let restore =
            Restore::start(memory.clone(), range, Arc::new(FaultySource(fault)), options).unwrap();
        let byte = peek(&memory, 1000 * PAGE_SIZE);
        println!("READ {byte}");
        drop(restore);
        std::process::exit(3);
    }
    for number in 0..faulty_options(TEST_TIMEOUT).len() * 3 {
        let started = Instant::now();
        let output = afresh_sys::test_command(
            "restore::a_dead_or_stuck_filler_never_yields_a_page_and_never_hangs_the_guest",
        )
        .env(CHILD, number.to_string())
        .output()
        .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!text.contains("READ"), "{number}: {text}");
        assert_eq!(output.status.signal(), Some(11), "{number}: {output:?}");
        assert!(started.elapsed() < TEST_TIMEOUT, "{number} hung");
    }
}

#[test]
fn a_failed_restore_names_its_cause() {
    for options in faulty_options(TEST_TIMEOUT) {
        let (memory, range) = target();
        let source = Arc::new(FaultySource(Fault::Error));
        let restore = Restore::start(memory, range, source, &options).unwrap();
        let error = restore
            .resolve(PageRange::new(900, 1))
            .and_then(|()| restore.wait(TEST_TIMEOUT))
            .unwrap_err();
        assert!(error.to_string().contains("disk on fire"), "{options:?}: {error}");
    }
}

#[test]
fn damaged_pages_of_a_snapshot_are_never_seen() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = content();
    drop(snapshot(dir.path(), &bytes, Encoding::Raw, Vec::new()));
    let store = Store::open(dir.path().join("store")).unwrap();
    let layer = store.blob_path(store.load("a").unwrap().layers()[0].digest());
    let mut blob = std::fs::read(&layer).unwrap();
    blob[5 * PAGE_SIZE] ^= 1;
    std::fs::remove_file(&layer).unwrap();
    std::fs::write(&layer, blob).unwrap();
    let source = Arc::new(SnapshotSource::new(store.load("a").unwrap()));
    let (memory, range) = target();
    let restore =
        Restore::start(memory, range, source, &Options::with(FillStrategy::Stream)).unwrap();
    let error = restore.wait(TEST_TIMEOUT).unwrap_err().to_string();
    assert!(error.contains("do not match their digest"), "{error}");
    assert!(SnapshotSource::checked(store.load("a").unwrap()).is_err());
}

#[test]
fn a_source_shorter_than_the_memory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source = Arc::new(FileSource::new(file(dir.path(), &[1; PAGE_SIZE])).unwrap());
    let (memory, range) = target();
    let error = Restore::start(memory, range, source, &Options::default()).unwrap_err();
    assert!(matches!(error, RestoreError::Source(SourceError::TooShort { .. })), "{error}");
}

#[test]
fn a_recorded_working_set_is_read_from_its_compact_copy_alone() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = content();
    drop(snapshot(dir.path(), &bytes, Encoding::Raw, Vec::new()));
    let store = Store::open(dir.path().join("store")).unwrap();
    let touched: Vec<usize> = (0..PAGES).step_by(37).collect();
    let mut recorder = Recorder::new();
    for _ in 0..2 {
        let (memory, range) = target();
        let source = Arc::new(SnapshotSource::new(store.load("a").unwrap()));
        let restore = Restore::start(memory.clone(), range, source, &Options::recording()).unwrap();
        touched.iter().for_each(|page| {
            peek(&memory, page * PAGE_SIZE);
        });
        recorder.add(&restore.present());
    }
    let set = recorder.pages(0.5);
    assert_eq!(set, touched.iter().map(|p| PageRange::new(*p, 1)).collect::<Vec<_>>());
    store.set_working_set("a", &store.load("a").unwrap(), &set).unwrap();

    // The page layer is emptied after it was opened: nothing can be read from it.
    let loaded = store.load("a").unwrap();
    let layer = store.blob_path(loaded.layers()[0].digest());
    let file = File::options().write(true).open(&layer);
    match file.and_then(|file| file.set_len(0)) {
        Ok(()) => {}
        Err(error) => println!("SKIPPED: emptying a read-only file: {error}"),
    }
    let (memory, range) = target();
    let mut options = Options::with(FillStrategy::WorkingSet);
    options.background = false;
    let source = Arc::new(SnapshotSource::new(loaded));
    assert_eq!(FillStrategy::choose(&*source, false, Features::host()), FillStrategy::WorkingSet);
    let restore = Restore::start(memory.clone(), range, source, &options).unwrap();
    for page in touched {
        assert_eq!(peek(&memory, page * PAGE_SIZE + 9), bytes[page * PAGE_SIZE + 9]);
    }
    assert_eq!(restore.status().faults, 0);
}

/// Two threads count in every page without pause while the mapping is replaced, or the pages stream
/// in, under them: every increment must be there at the end.
#[test]
fn a_guest_that_never_stops_writing_loses_no_write() {
    const LARGE: usize = 8192;
    let dir = tempfile::tempdir().unwrap();
    // Repeated, because the race is between two instructions.
    let detach = [FillStrategy::MapDetach; 6];
    for strategy in detach.into_iter().chain([FillStrategy::Stream, FillStrategy::WorkingSet]) {
        let zeros_and_marks: Vec<u8> = (0..LARGE)
            .flat_map(|page| {
                let mut bytes = vec![0; PAGE_SIZE];
                bytes[8] = page as u8;
                bytes
            })
            .collect();
        let mut source = FileSource::new(file(dir.path(), &zeros_and_marks)).unwrap();
        if strategy == FillStrategy::WorkingSet {
            let set = vec![PageRange::new(0, 3), PageRange::new(4000, 1)];
            let path = dir.path().join("set");
            let compact: Vec<u8> = set
                .iter()
                .flat_map(|r| zeros_and_marks[r.byte_start()..][..r.byte_len()].to_vec())
                .collect();
            std::fs::write(&path, compact).unwrap();
            source = source.with_working_set(set, File::open(path).unwrap());
        }
        let memory = Arc::new(Reservation::aligned(LARGE, 2 << 20).unwrap());
        let all = PageRange::new(0, LARGE);
        let restore =
            Restore::start(memory.clone(), all, Arc::new(source), &Options::with(strategy))
                .unwrap();
        let word = |page: usize, thread: usize| {
            // SAFETY: inside the restored range; each thread has its own word in each page.
            unsafe { memory.page_ptr(page).add(64 * (thread + 1)).cast::<u32>() }
        };
        let rounds: Vec<u32> = std::thread::scope(|scope| {
            let count = |thread: usize| {
                let (restore, word) = (&restore, &word);
                move || {
                    let mut random = Random(thread as u64 + 9);
                    let mut rounds = 0;
                    // A round more after the end, on memory that is all ours.
                    loop {
                        let last = restore.status().done;
                        let skip = random.next(LARGE);
                        for n in 0..LARGE {
                            let at = word((n * 17 + skip) % LARGE, thread);
                            // SAFETY: as above.
                            unsafe { at.write_volatile(at.read_volatile() + 1) };
                        }
                        rounds += 1;
                        if last {
                            return rounds;
                        }
                    }
                }
            };
            let threads = [scope.spawn(count(0)), scope.spawn(count(1))];
            threads.map(|thread| thread.join().unwrap()).to_vec()
        });
        restore.wait(TEST_TIMEOUT).unwrap();
        for page in 0..LARGE {
            for (thread, rounds) in rounds.iter().enumerate() {
                // SAFETY: as above.
                let found = unsafe { word(page, thread).read_volatile() };
                assert_eq!(found, *rounds, "{} page {page}", strategy.name());
            }
            // SAFETY: as above.
            let mark = unsafe { memory.page_ptr(page).add(8).read_volatile() };
            assert_eq!(mark, page as u8);
        }
    }
}
