//! Restores that are interrupted, and sources that are taken away under them: the store stays
//! whole, a running restore keeps the content it began with or ends in an error that says why, and
//! no page is wrong.
#![cfg(not(miri))]

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use afresh_memory::{Feature, Features, Slot, SlotConfig};
use afresh_pager::{
    FileSource, FillStrategy, LazyImage, Options, Restore, RestoreError, SnapshotSource,
};
use afresh_store::{Encoding, GuestBuild, MemoryPages, SaveRequest, Snapshot, Store};
use afresh_sys::{PAGE_SIZE, PageRange, Reservation};

const PAGES: usize = 3000;
const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// Noise that follows from `seed`, with zero pages in between.
fn content(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0u8; PAGES * PAGE_SIZE];
    for (page, bytes) in bytes.chunks_exact_mut(PAGE_SIZE).enumerate() {
        if page % 50 > 45 {
            continue;
        }
        let mut state = seed << 32 | page as u64;
        for word in bytes.chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(77);
            word.copy_from_slice(&(state ^ state >> 31).to_le_bytes());
        }
    }
    bytes
}

fn save(store: &Store, seed: u64, encoding: Encoding) {
    let mut options = SaveRequest::new(GuestBuild {
        kind: "arena".into(),
        module: "m".into(),
        engine: "e".into(),
        cpu: Vec::new(),
    });
    options.options.encoding = encoding;
    store.save("a", &MemoryPages(content(seed)), &options).unwrap();
}

fn has_userfaultfd() -> bool {
    let has = Features::host().has(Feature::UffdSigbus);
    if !has {
        println!("SKIPPED: userfaultfd in SIGBUS mode is not to be had here");
    }
    has
}

/// The ways to restore that read the source while the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Interruption {
    Slots,
    Stream,
    MapDetach,
}

const WAYS: [Interruption; 3] =
    [Interruption::Slots, Interruption::Stream, Interruption::MapDetach];

/// Those that a snapshot allows: what is compressed cannot be mapped.
fn ways(snapshot: &Snapshot) -> &'static [Interruption] {
    if snapshot.layers()[0].encoding() == Encoding::Raw { &WAYS } else { &WAYS[..2] }
}

/// A restore under way.
enum RunningRestore {
    Slots(LazyImage, Box<Slot>),
    Range(Restore, Arc<Reservation>),
}

impl RunningRestore {
    /// Begins one; without a background, only what is touched is fetched.
    fn start(way: Interruption, snapshot: Snapshot, background: bool) -> Self {
        let mut options = Options::default();
        if !background {
            options.background = false;
        }
        if way == Interruption::Slots {
            let image = LazyImage::start(Arc::new(SnapshotSource::new(snapshot)), &options);
            let image = image.unwrap();
            let slot = Slot::new(image.image(), SlotConfig::default()).unwrap();
            return Self::Slots(image, Box::new(slot));
        }
        let source = match way {
            Interruption::MapDetach => SnapshotSource::checked(snapshot).unwrap(),
            _ => SnapshotSource::new(snapshot),
        };
        options.strategy = Some(match way {
            Interruption::MapDetach => FillStrategy::MapDetach,
            _ => FillStrategy::Stream,
        });
        let memory = Arc::new(Reservation::aligned(PAGES, 2 << 20).unwrap());
        let range = PageRange::new(0, PAGES);
        let restore = Restore::start(memory.clone(), range, Arc::new(source), &options).unwrap();
        Self::Range(restore, memory)
    }

    /// Whether the page is what `content` says, as the guest sees it.
    fn check(&self, page: usize, content: &[u8]) {
        let mut bytes = vec![0; PAGE_SIZE];
        match self {
            Self::Slots(_, slot) => slot.read(page * PAGE_SIZE, &mut bytes).unwrap(),
            Self::Range(_, memory) => {
                for (at, byte) in bytes.iter_mut().enumerate() {
                    // SAFETY: inside the restored range, which only this thread uses.
                    *byte = unsafe { memory.page_ptr(page).add(at).read_volatile() };
                }
            }
        }
        assert!(bytes == content[page * PAGE_SIZE..][..PAGE_SIZE], "page {page}");
    }

    fn wait(&self) -> Result<(), RestoreError> {
        match self {
            Self::Slots(image, _) => image.wait(TEST_TIMEOUT),
            Self::Range(restore, _) => restore.wait(TEST_TIMEOUT),
        }
    }

    fn check_all(&self, content: &[u8]) {
        self.wait().unwrap();
        (0..PAGES).for_each(|page| self.check(page, content));
    }
}

/// Every file below `dir`, but the locks.
fn files(dir: &Path) -> BTreeSet<PathBuf> {
    let mut out = BTreeSet::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            out.extend(files(&path));
        } else if !path.to_string_lossy().ends_with("-lock") {
            out.insert(path);
        }
    }
    out
}

/// This process's own child, running the test `name` again with `variable` set to `value`.
fn again(name: &str, variable: &str, value: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = afresh_sys::test_command(name);
    command.env(variable, value);
    command
}

const CHILD: &str = "AFRESH_TEST_RESTORE_FROM";

#[test]
fn kill_during_a_restore_leaves_the_store_whole_and_nothing_behind() {
    if let Some(dir) = std::env::var_os(CHILD) {
        let store = Store::open(dir).unwrap();
        let content = content(1);
        for round in 0.. {
            let snapshot = store.load("a").unwrap();
            let ways = ways(&snapshot);
            let running = RunningRestore::start(ways[round % ways.len()], snapshot, true);
            println!("restoring");
            (0..PAGES).step_by(41).for_each(|page| running.check(page, &content));
            running.wait().unwrap();
        }
    }
    if !has_userfaultfd() {
        return;
    }
    let shared = || -> BTreeSet<_> {
        let list = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        let names = list.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.contains("afresh") && !name.contains("fuzz")).collect()
    };
    let (content, shared_before) = (content(1), shared());
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        let dir = tempfile::tempdir().unwrap();
        let temporary = tempfile::tempdir().unwrap();
        let store = Store::create(dir.path()).unwrap();
        save(&store, 1, encoding);
        let before = files(dir.path());
        for attempt in 0..9u64 {
            let mut child = again(
                "interrupted::kill_during_a_restore_leaves_the_store_whole_and_nothing_behind",
                CHILD,
                dir.path(),
            )
            .env("TMPDIR", temporary.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            // Another way, and another moment of it, each time.
            for _ in 0..=attempt % 3 {
                assert!(lines.any(|line| line.unwrap().contains("restoring")));
            }
            std::thread::sleep(Duration::from_micros(attempt * 531));
            child.kill().unwrap();
            assert_eq!(child.wait().unwrap().signal(), Some(9), "it was at work until then");
            store.load("a").unwrap().verify().unwrap();
        }
        assert_eq!(files(dir.path()), before);
        assert_eq!(store.gc().unwrap().files, 0);
        assert_eq!(files(temporary.path()), BTreeSet::new());
        let snapshot = store.load("a").unwrap();
        for way in ways(&snapshot) {
            RunningRestore::start(*way, snapshot.clone(), true).check_all(&content);
        }
    }
    assert_eq!(shared(), shared_before);
}

const SAVER: &str = "AFRESH_TEST_SAVE_OVER";

/// Another process saves over the name, and removes what nothing names any more.
#[test]
fn a_running_restore_keeps_its_content_when_its_snapshot_is_replaced_and_removed() {
    if let Some(dir) = std::env::var_os(SAVER) {
        let store = Store::open(dir).unwrap();
        save(&store, 2, Encoding::Raw);
        assert!(store.gc().unwrap().files > 0);
        return;
    }
    if !has_userfaultfd() {
        return;
    }
    let (old, new) = (content(1), content(2));
    for way in WAYS {
        for background in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let store = Store::create(dir.path()).unwrap();
            save(&store, 1, Encoding::Raw);
            let running = RunningRestore::start(way, store.load("a").unwrap(), background);
            running.check(7, &old);
            let name = "interrupted::a_running_restore_keeps_its_content_when_its_snapshot_is_replaced_and_removed";
            assert!(again(name, SAVER, dir.path()).output().unwrap().status.success());
            running.check(2900, &old);
            let fresh = RunningRestore::start(way, store.load("a").unwrap(), true);
            fresh.check(7, &new);
            running.check_all(&old);
            fresh.check_all(&new);
            assert_eq!(store.gc().unwrap().files, 0);
        }
    }
}

/// The page layer, made writable: a disk or a careless tool respects no mode.
fn layer(store: &Store) -> File {
    let path = store.blob_path(store.load("a").unwrap().layers()[0].digest());
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    File::options().read(true).write(true).open(&path).unwrap()
}

/// Changes of a file that is in use.
#[derive(Clone, Copy, Debug)]
enum Harm {
    /// In the middle of a page. A mapping reads the rest of it as zeros.
    CutShort,
    Emptied,
    Overwritten,
}

impl Harm {
    fn befall(self, file: &File) {
        // Longer than file systems that count time in ticks take for one.
        std::thread::sleep(Duration::from_millis(20));
        match self {
            Harm::CutShort => file.set_len(100 * PAGE_SIZE as u64 + 99).unwrap(),
            Harm::Emptied => file.set_len(0).unwrap(),
            Harm::Overwritten => (0..PAGES / 2).for_each(|page| {
                file.write_all_at(&[0x5a; 64], (page * PAGE_SIZE) as u64 + 300).unwrap();
            }),
        }
    }
}

const HARMS: [Harm; 3] = [Harm::CutShort, Harm::Emptied, Harm::Overwritten];

#[test]
fn a_source_cut_short_or_overwritten_under_a_restore_is_an_error_that_says_so() {
    if !has_userfaultfd() {
        return;
    }
    let says = |error: &str| {
        ["digest", "changed", "cut short", "truncated", "ended early", "fill whole buffer"]
            .iter()
            .any(|word| error.contains(word))
    };
    for harm in HARMS {
        for way in WAYS {
            let dir = tempfile::tempdir().unwrap();
            let store = Store::create(dir.path()).unwrap();
            save(&store, 1, Encoding::Raw);
            let (file, snapshot) = (layer(&store), store.load("a").unwrap());
            let mut options = Options { background: false, ..Options::default() };
            if way == Interruption::Slots {
                let source = Arc::new(SnapshotSource::new(snapshot));
                let image = LazyImage::start(source, &options).unwrap();
                let slot = Slot::new(image.image(), SlotConfig::default()).unwrap();
                harm.befall(&file);
                let error = image.wait(TEST_TIMEOUT).unwrap_err().to_string();
                assert!(says(&error), "{harm:?}, {way:?}: {error}");
                let error = slot.read(0, &mut [0; 8]).unwrap_err().to_string();
                assert!(says(&error), "{harm:?}, {way:?}: {error}");
                continue;
            }
            let memory = Arc::new(Reservation::aligned(PAGES, 2 << 20).unwrap());
            let begin = |source: SnapshotSource, options: &Options| {
                let range = PageRange::new(0, PAGES);
                Restore::start(memory.clone(), range, Arc::new(source), options).unwrap()
            };
            let restore = if way == Interruption::MapDetach {
                // Between the check and the restore, so that the pager meets it for certain.
                let source = SnapshotSource::checked(snapshot).unwrap();
                harm.befall(&file);
                options.strategy = Some(FillStrategy::MapDetach);
                begin(source, &options)
            } else {
                options.strategy = Some(FillStrategy::Stream);
                let restore = begin(SnapshotSource::new(snapshot), &options);
                harm.befall(&file);
                restore
            };
            let error = restore.wait(TEST_TIMEOUT).unwrap_err().to_string();
            assert!(says(&error), "{harm:?}, {way:?}: {error}");
        }
    }
}

/// Pages that were read once, and found right, are read again.
#[test]
fn a_layer_overwritten_after_its_pages_were_checked_is_noticed_when_they_are_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path()).unwrap();
    save(&store, 1, Encoding::Raw);
    let (file, snapshot) = (layer(&store), store.load("a").unwrap());
    let mut page = [0; PAGE_SIZE];
    snapshot.read(3, &mut page).unwrap();
    snapshot.read(3, &mut page).unwrap();
    Harm::Overwritten.befall(&file);
    let error = snapshot.read(3, &mut page).unwrap_err().to_string();
    assert!(error.contains("changed"), "{error}");
}

const VICTIM: &str = "AFRESH_TEST_CUT";

/// A guest that runs on a mapping of a file which is cut short is ended as by every failed restore.
/// It is not ended by SIGBUS, and sees no page of another content than the snapshot.
#[test]
fn a_guest_on_a_mapped_file_that_is_cut_short_is_ended_by_sigsegv_and_sees_no_wrong_page() {
    const LARGE: usize = 16 * PAGES;
    if let Ok(number) = std::env::var(VICTIM) {
        let file = tempfile::tempfile().unwrap();
        let pages: Vec<u8> = (0..LARGE).flat_map(|_| [0x77; PAGE_SIZE]).collect();
        file.write_all_at(&pages, 0).unwrap();
        let source = Arc::new(FileSource::new(file.try_clone().unwrap()).unwrap());
        let memory = Arc::new(Reservation::aligned(LARGE, 2 << 20).unwrap());
        let range = PageRange::new(0, LARGE);
        let options = Options::with(FillStrategy::MapDetach);
        let restore = Restore::start(memory.clone(), range, source, &options).unwrap();
        // Before, while, and after the pager has faulted pages in. The guest reads all the time, so
        // that it is often the first to meet a missing page.
        let delay = Duration::from_micros(number.parse::<u64>().unwrap() * 400);
        let cut = std::thread::spawn(move || {
            std::thread::sleep(delay);
            file.set_len(PAGE_SIZE as u64).unwrap();
        });
        let mut last = false;
        while !last {
            last = cut.is_finished();
            for page in (1..LARGE).rev() {
                // SAFETY: inside the restored range, which only this thread uses.
                let byte = unsafe { memory.page_ptr(page).read_volatile() };
                assert_eq!(byte, 0x77);
            }
        }
        std::process::exit(if restore.wait(TEST_TIMEOUT).is_ok() { 3 } else { 4 });
    }
    let mut ended = 0;
    for number in 0..8 {
        let name = "interrupted::a_guest_on_a_mapped_file_that_is_cut_short_is_ended_by_sigsegv_and_sees_no_wrong_page";
        let output = again(name, VICTIM, number.to_string()).output().unwrap();
        match (output.status.signal(), output.status.code()) {
            (Some(11), None) => ended += 1,
            // It was all in place already.
            (None, Some(3)) => {}
            _ => panic!("{number}: {output:?}"),
        }
    }
    assert!(ended > 0, "the file was never cut in time");
}
