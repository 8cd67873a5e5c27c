//! A page of a lazily filled image becomes visible only when it is complete and checked: to other
//! threads, to the kernel and to forked children, under any setting of huge pages for shared
//! memory.
#![cfg(not(miri))]

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use afresh_memory::{Feature, Features, Image, Slot, SlotConfig, TrackError, Tracker, TrackerKind};
use afresh_pager::{LazyImage, Options, PageSource, SourceError};
use afresh_sys::{PAGE_SIZE, PageRange};

const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes that the source leaves in its buffer before it writes the right ones.
const UNCHECKED: u8 = 0xee;

/// The byte that fills a page.
fn byte_of(page: usize) -> u8 {
    (page % 200) as u8 + 1
}

/// Delivers pages as a slow disk with a bad sector does: other bytes first, one half after the
/// other.
struct SlowSource {
    pages: usize,
    pause: Duration,
    /// A page that never gets its digest.
    spoilt: Option<usize>,
    /// Set while unchecked bytes of the spoilt page are where they were asked for.
    exposed: AtomicBool,
    set: Vec<PageRange>,
    /// Whether fault handlers may call it.
    direct: bool,
}

impl SlowSource {
    fn new(pages: usize, pause: Duration) -> Self {
        let exposed = AtomicBool::new(false);
        Self { pages, pause, spoilt: None, exposed, set: Vec::new(), direct: true }
    }
}

impl PageSource for SlowSource {
    fn pages(&self) -> usize {
        self.pages
    }

    unsafe fn read(&self, first: usize, to: *mut u8, pages: usize) -> Result<(), SourceError> {
        let half = PAGE_SIZE / 2;
        // SAFETY: the caller vouches for the memory.
        unsafe { to.write_bytes(UNCHECKED, pages * PAGE_SIZE) };
        for part in 0..2 {
            if !self.pause.is_zero() {
                std::thread::sleep(self.pause);
            }
            for page in 0..pages {
                // SAFETY: as above.
                unsafe {
                    to.add(page * PAGE_SIZE + part * half).write_bytes(byte_of(first + page), half);
                };
            }
            if self.spoilt.is_some_and(|page| (first..first + pages).contains(&page)) {
                self.exposed.store(true, Ordering::Release);
                std::thread::sleep(Duration::from_millis(300));
                return Err(SourceError::TooShort { pages: first, wanted: first + 1 });
            }
        }
        Ok(())
    }

    fn signal_safe(&self) -> bool {
        self.direct
    }

    fn working_set(&self) -> Vec<PageRange> {
        self.set.clone()
    }
}

/// A guest adapter's tracker that says of every page that it was written.
#[derive(Default)]
struct PageRanges(Vec<PageRange>);

// SAFETY: says of every watched page that it was written, and protects none.
unsafe impl Tracker for PageRanges {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Other("own")
    }

    fn watch(&mut self, range: PageRange) -> Result<(), TrackError> {
        self.0.push(range);
        Ok(())
    }

    fn drain(&mut self, written: &mut Vec<PageRange>) -> Result<(), TrackError> {
        written.extend_from_slice(&self.0);
        Ok(())
    }

    fn arm(&mut self, _: &[PageRange]) -> Result<(), TrackError> {
        Ok(())
    }

    fn open(&mut self, _: &[PageRange]) -> Result<(), TrackError> {
        Ok(())
    }
}

/// Handler of the missing pages of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The faulting thread.
    Thread,
    /// The thread that answers for the kernel's faults.
    Kernel,
}

impl Kind {
    /// Both, or those that the host has.
    fn all() -> Vec<Kind> {
        let kinds = [(Kind::Thread, Feature::UffdSigbus), (Kind::Kernel, Feature::UffdKernel)];
        let (here, missing): (Vec<_>, Vec<_>) =
            kinds.into_iter().partition(|(_, feature)| Features::host().has(*feature));
        missing.iter().for_each(|(kind, feature)| {
            println!("SKIPPED: {kind:?}: this host has no {}", feature.name());
        });
        here.into_iter().map(|(kind, _)| kind).collect()
    }

    fn slot(self, image: &Image) -> Slot {
        match self {
            Kind::Thread => Slot::new(image, SlotConfig::default()).unwrap(),
            Kind::Kernel => {
                let own = |_, _| Ok(Box::<PageRanges>::default() as Box<dyn Tracker>);
                Slot::with_tracker(image, SlotConfig::default(), own).unwrap()
            }
        }
    }
}

/// The bytes of a page, as the guest sees them.
fn page_at(base: usize, page: usize) -> Vec<u8> {
    let mut bytes = vec![0; PAGE_SIZE];
    let from = (base + page * PAGE_SIZE) as *const u8;
    // The end first, and alone: what is put in place from its beginning on is torn there.
    // SAFETY: callers pass pages inside a live slot.
    let end = unsafe { from.add(PAGE_SIZE - 1).read_volatile() };
    // SAFETY: as above.
    unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), PAGE_SIZE) };
    bytes[PAGE_SIZE - 1] = end;
    bytes
}

/// The fault of a page, if any.
fn wrong(base: usize, page: usize) -> Option<String> {
    let bytes = page_at(base, page);
    let at = bytes.iter().position(|byte| *byte != byte_of(page))?;
    Some(format!("page {page}, byte {at}: {:#x} instead of {:#x}", bytes[at], byte_of(page)))
}

#[test]
fn no_thread_ever_sees_a_part_of_a_page() {
    const PAGES: usize = 600;
    for kind in Kind::all() {
        for (direct, streams) in [(true, false), (true, true), (false, true)] {
            let source =
                SlowSource { direct, ..SlowSource::new(PAGES, Duration::from_micros(300)) };
            let options = Options {
                background: streams,
                window: Some(16),
                timeout: TEST_TIMEOUT,
                ..Options::default()
            };
            let image = LazyImage::start(Arc::new(source), &options).unwrap();
            let slots: Vec<Slot> = (0..2).map(|_| kind.slot(image.image())).collect();
            std::thread::scope(|scope| {
                for seed in 0..4 {
                    let base = slots[seed % 2].base() as usize;
                    scope.spawn(move || {
                        for step in 0..PAGES {
                            let page = (step * 7 + seed * 151) % PAGES;
                            let wrong = wrong(base, page);
                            assert_eq!(wrong, None, "{kind:?}, direct {direct}, stream {streams}");
                        }
                    });
                }
            });
            image.wait(TEST_TIMEOUT).unwrap();
        }
    }
}

/// Runs `name` again in a new process with `argument`, and returns its exit status.
fn in_a_child(name: &str, argument: &str) -> std::process::Output {
    afresh_sys::test_command(name)
        .arg("--test-threads=1")
        .env("AFRESH_TEST_CHILD", argument)
        .output()
        .unwrap()
}

/// The argument of this process, if [`in_a_child`] started it.
fn child_argument() -> Option<String> {
    std::env::var("AFRESH_TEST_CHILD").ok()
}

#[test]
fn a_spoilt_byte_is_never_read() {
    const NAME: &str = "page_visibility::a_spoilt_byte_is_never_read";
    const SPOILT: usize = 21;
    let Some(argument) = child_argument() else {
        for kind in Kind::all() {
            for direct in [true, false] {
                let end = in_a_child(NAME, &format!("{kind:?} {direct}"));
                assert_eq!(
                    end.status.signal(),
                    Some(libc::SIGSEGV),
                    "{kind:?}, direct {direct}: {}{}",
                    String::from_utf8_lossy(&end.stdout),
                    String::from_utf8_lossy(&end.stderr),
                );
            }
        }
        return;
    };
    let kind = if argument.starts_with("Thread") { Kind::Thread } else { Kind::Kernel };
    let direct = argument.ends_with("true");
    let source = Arc::new(SlowSource {
        spoilt: Some(SPOILT),
        direct,
        ..SlowSource::new(64, Duration::from_millis(20))
    });
    let options = Options { background: false, window: Some(16), ..Options::default() };
    let image = LazyImage::start(source.clone(), &options).unwrap();
    let slot = kind.slot(image.image());
    let base = slot.base() as usize;
    let touch = move || {
        // SAFETY: inside the slot, which lives as long as the process.
        let read = unsafe { ((base + SPOILT * PAGE_SIZE) as *const u8).read_volatile() };
        println!("read {read:#x} where nothing must be read");
        std::process::exit(3);
    };
    std::thread::spawn(touch);
    // The second one comes while the first one's bytes are there, and not yet checked.
    while !source.exposed.load(Ordering::Acquire) {
        std::thread::yield_now();
    }
    touch();
}

/// The host's setting for huge pages of shared memory, changed for the time of a test.
struct HugeShared {
    before: String,
    /// Held, so that one test at a time changes it.
    _lock: std::fs::File,
}

impl HugeShared {
    const PATH: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

    fn take() -> io::Result<Self> {
        let path = std::env::temp_dir().join("afresh-test-shmem-enabled.lock");
        let lock = std::fs::File::options().create(true).append(true).open(path)?;
        lock.lock()?;
        let list = std::fs::read_to_string(Self::PATH)?;
        let word = list.split(['[', ']']).nth(1).unwrap_or("never");
        std::fs::write(Self::PATH, word)?;
        Ok(Self { before: word.to_owned(), _lock: lock })
    }
}

impl Drop for HugeShared {
    fn drop(&mut self) {
        if let Err(error) = std::fs::write(Self::PATH, &self.before) {
            println!("{} stays changed: {error}", Self::PATH);
        }
    }
}

#[test]
fn untouched_pages_are_right_however_the_host_treats_huge_pages_of_shared_memory() {
    // Whole huge pages, which a mapping of their size is aligned for, and parts at the end.
    const SIZES: [usize; 2] = [6 * 512, 5 * 512 + 100];
    let setting = match HugeShared::take() {
        Ok(setting) => setting,
        Err(error) => {
            println!("SKIPPED: {} cannot be set here: {error}", HugeShared::PATH);
            return;
        }
    };
    for value in ["always", "within_size", "advise", "never"] {
        if let Err(error) = std::fs::write(HugeShared::PATH, value) {
            println!("SKIPPED: shmem_enabled={value}: {error}");
            continue;
        }
        let sets = [vec![], vec![PageRange::new(700, 3), PageRange::new(2000, 1)]];
        for (kind, pages) in Kind::all().into_iter().flat_map(|kind| SIZES.map(|n| (kind, n))) {
            for set in &sets {
                let source =
                    SlowSource { set: set.clone(), ..SlowSource::new(pages, Duration::ZERO) };
                let options = Options { background: false, ..Options::default() };
                let image = LazyImage::start(Arc::new(source), &options).unwrap();
                let mut slot = kind.slot(image.image());
                let base = slot.base() as usize;
                for page in (0..pages).step_by(37).chain(695..710).chain([1999, 2000, 2001]) {
                    assert_eq!(wrong(base, page), None, "{value}, {kind:?}, {pages}, set {set:?}");
                }
                slot.write(900 * PAGE_SIZE + 5, b"dirt").unwrap();
                slot.reset().unwrap();
                assert_eq!(wrong(base, 900), None, "{value}, {kind:?}, after a reset");
                assert_eq!(slot.verify().unwrap(), [], "{value}, {kind:?}");
            }
        }
    }
    drop(setting);
}

/// The byte that a child made by fork reads at `page`, or `None` when the access ended it. It dumps
/// core then, if the host lets it, which reads all of its memory.
fn child_looks(base: usize, page: usize, write: bool) -> Option<u8> {
    let at = (base + page * PAGE_SIZE) as *mut u8;
    let dir = tempfile::tempdir().unwrap();
    let path = std::ffi::CString::new(dir.path().as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: the child only touches memory and ends.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", io::Error::last_os_error());
    if child == 0 {
        // SAFETY: changes settings of the child; the structure lives through both calls.
        unsafe {
            let mut limit: libc::rlimit = std::mem::zeroed();
            libc::getrlimit(libc::RLIMIT_CORE, &mut limit);
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_CORE, &limit);
            libc::chdir(path.as_ptr());
        }
        if write {
            // SAFETY: whether the page of the slot can be written is what is asked.
            unsafe { at.add(9).write_volatile(1) };
        }
        // SAFETY: as above; ends the child without running anything else.
        unsafe { libc::_exit(i32::from(at.read_volatile())) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status) as u8)
}

#[test]
fn a_forked_child_gets_the_content_or_dies_and_takes_nothing_from_its_parent() {
    const PAGES: usize = 300;
    for kind in Kind::all() {
        let options = Options { background: false, ..Options::default() };
        let image =
            LazyImage::start(Arc::new(SlowSource::new(PAGES, Duration::ZERO)), &options).unwrap();
        let mut slot = kind.slot(image.image());
        let base = slot.base() as usize;
        assert_eq!(wrong(base, 5), None);
        for (page, write) in [(5, false), (40, false), (90, true), (140, false)] {
            let seen = child_looks(base, page, write);
            assert!(
                seen.is_none_or(|byte| byte == byte_of(page)),
                "{kind:?}: the child read {seen:?} at page {page}"
            );
            assert_eq!(wrong(base, page), None, "{kind:?}: the parent, afterwards");
        }
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), []);
        // Once everything is there, nothing is kept from children any more.
        image.wait(TEST_TIMEOUT).unwrap();
        slot.reset().unwrap();
        for page in [5, 41, 200] {
            assert_eq!(child_looks(base, page, false), Some(byte_of(page)), "{kind:?}");
        }
    }
}

#[test]
fn a_forked_child_gets_an_error_for_pages_that_will_not_come() {
    const PAGES: usize = 300;
    for kind in Kind::all() {
        let options = Options { background: false, ..Options::default() };
        let image =
            LazyImage::start(Arc::new(SlowSource::new(PAGES, Duration::ZERO)), &options).unwrap();
        let mut slot = kind.slot(image.image());
        slot.fetch(0, 1).unwrap();
        // SAFETY: the child uses what it inherited, allocates, and ends; the parent's other threads
        // hold no lock of this process that it needs.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "{}", io::Error::last_os_error());
        if child == 0 {
            let mut byte = [0];
            let refused = slot.read(200 * PAGE_SIZE, &mut byte).is_err()
                && slot.fetch(200 * PAGE_SIZE, 1).is_err()
                && slot.reset().is_err()
                && image.image().resolve(PageRange::new(200, 1)).is_err();
            // The child has the pages that had arrived.
            let there = image.image().resolve(PageRange::new(0, 1)).is_ok()
                && image.image().page(0).is_some_and(|page| page[7] == byte_of(0));
            drop(slot);
            // SAFETY: ends the child without running anything else.
            unsafe { libc::_exit(i32::from(!refused) + 2 * i32::from(!there)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child just made.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "{kind:?}: {:?}", io::Error::last_os_error());
        assert_eq!(wrong(slot.base() as usize, 200), None, "{kind:?}: the parent goes on");
    }
}
