//! The wrappers against the real kernel: each promise that the engine leans on.
#![cfg(not(miri))]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use afresh_sys::{
    Advice, Feature, Features, Interest, Memfd, PAGE_SIZE, PageRange, Protection, Reservation,
    SysError, Uffd, UffdMode, fault, pagemap,
};

fn missing(feature: Feature) -> bool {
    match Features::host().why_missing(feature) {
        Some(why) => {
            println!("SKIPPED: {}: {why}", feature.name());
            true
        }
        None => false,
    }
}

fn image(pages: usize, byte: u8) -> Memfd {
    let file = Memfd::new(c"test").unwrap();
    file.write_at(&vec![byte; pages * PAGE_SIZE], 0).unwrap();
    file.seal().unwrap();
    file
}

fn poke(memory: &Reservation, page: usize, byte: u8) {
    // SAFETY: the tests map these pages readable and writable before they poke them.
    unsafe { memory.page_ptr(page).write_volatile(byte) };
}

fn peek(memory: &Reservation, page: usize) -> u8 {
    // SAFETY: as for `poke`.
    unsafe { memory.page_ptr(page).read_volatile() }
}

/// Lifts protection page by page and counts, as a tracker does.
struct LiftHandler {
    uffd: Uffd,
    count: AtomicUsize,
}

impl fault::FaultHandler for LiftHandler {
    fn on_fault(&self, fault: &fault::Fault) -> bool {
        self.count.fetch_add(1, Ordering::Relaxed);
        let page = (fault.address & !(PAGE_SIZE - 1)) as *const u8;
        self.uffd.write_protect(page, PAGE_SIZE, false).is_ok()
    }
}

#[test]
fn a_forked_child_cannot_touch_the_protection_of_its_parent() {
    if missing(Feature::UffdSigbus) {
        return;
    }
    let file = image(1, 7);
    let memory = Reservation::new(1).unwrap();
    let all = PageRange::new(0, 1);
    memory.map_private(all, Protection::ReadWrite, &file, 0).unwrap();
    let uffd = Uffd::open(UffdMode::Sigbus).unwrap();
    let start = memory.base().as_ptr();
    uffd.register(start, PAGE_SIZE, Interest::WRITES).unwrap();
    // SAFETY: the child makes two calls that do not allocate, and ends at once.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = |result: Result<(), SysError>| result.is_err_and(|e| e.errno == libc::ESRCH);
        let both = refused(uffd.write_protect(start, PAGE_SIZE, false))
            && refused(uffd.unregister(start, PAGE_SIZE));
        // SAFETY: ends the child without running anything else.
        unsafe { libc::_exit(i32::from(!both)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    uffd.unregister(start, PAGE_SIZE).unwrap();
}

#[test]
fn a_write_to_a_protected_page_of_a_private_file_reaches_the_handler_once() {
    if missing(Feature::UffdSigbus) {
        return;
    }
    let file = image(8, 7);
    let memory = Reservation::new(8).unwrap();
    let all = PageRange::new(0, 8);
    memory.map_private(all, Protection::ReadWrite, &file, 0).unwrap();
    let lift =
        Arc::new(LiftHandler { uffd: Uffd::open(UffdMode::Sigbus).unwrap(), count: 0.into() });
    lift.uffd.register(memory.base().as_ptr(), all.byte_len(), Interest::WRITES).unwrap();
    lift.uffd.write_protect(memory.base().as_ptr(), all.byte_len(), true).unwrap();
    let _registration =
        fault::register(memory.base().as_ptr(), all.byte_len(), lift.clone()).unwrap();
    assert_eq!(peek(&memory, 3), 7);
    poke(&memory, 3, 1);
    poke(&memory, 3, 2);
    poke(&memory, 5, 1);
    assert_eq!(lift.count.load(Ordering::Relaxed), 2);
    memory.advise(all, Advice::Discard).unwrap();
    assert_eq!((peek(&memory, 3), peek(&memory, 5)), (7, 7));
}

#[test]
fn a_scan_lists_written_pages_even_past_its_batch_and_ignores_unpopulated_ones() {
    if missing(Feature::UffdAsync) || missing(Feature::PagemapScan) {
        return;
    }
    let pages = 4096;
    let memory = Reservation::new(pages).unwrap();
    let all = PageRange::new(0, pages);
    memory.map_anonymous(all, Protection::ReadWrite).unwrap();
    let uffd = Uffd::open(UffdMode::Async).unwrap();
    uffd.register(memory.base().as_ptr(), all.byte_len(), Interest::WRITES).unwrap();
    uffd.write_protect(memory.base().as_ptr(), all.byte_len(), true).unwrap();
    for page in (0..pages).step_by(2) {
        poke(&memory, page, 1);
    }
    let mut found = Vec::new();
    pagemap::written(memory.base().as_ptr(), pages, |run| found.push(run)).unwrap();
    let expected: Vec<_> = (0..pages).step_by(2).map(|p| PageRange::new(p, 1)).collect();
    assert_eq!(found, expected);
}

#[test]
fn a_sealed_image_can_not_be_written() {
    let file = image(1, 1);
    assert_eq!(file.write_at(&[0], 0).unwrap_err().errno, libc::EPERM);
    let memory = Reservation::new(1).unwrap();
    assert!(memory.map_shared(PageRange::new(0, 1), Protection::ReadWrite, &file, 0).is_err());
}

#[test]
fn overlapping_fault_ranges_are_refused_and_a_dropped_one_is_free_again() {
    struct NeverHandler;
    impl fault::FaultHandler for NeverHandler {
        fn on_fault(&self, _: &fault::Fault) -> bool {
            false
        }
    }
    let memory = Reservation::new(4).unwrap();
    let at = |page| memory.page_ptr(page).cast_const();
    let first = fault::register(at(0), 2 * PAGE_SIZE, Arc::new(NeverHandler)).unwrap();
    assert!(fault::register(at(1), 2 * PAGE_SIZE, Arc::new(NeverHandler)).is_err());
    let second = fault::register(at(2), 2 * PAGE_SIZE, Arc::new(NeverHandler)).unwrap();
    drop(first);
    drop(second);
    drop(fault::register(at(1), 2 * PAGE_SIZE, Arc::new(NeverHandler)).unwrap());
}

#[test]
fn an_unhandled_fault_still_ends_the_process_with_its_signal() {
    if std::env::var_os("AFRESH_TEST_CRASH").is_some() {
        struct NeverHandler;
        impl fault::FaultHandler for NeverHandler {
            fn on_fault(&self, _: &fault::Fault) -> bool {
                false
            }
        }
        let memory = Reservation::new(1).unwrap();
        let start = memory.base().as_ptr();
        let _registration = fault::register(start, PAGE_SIZE, Arc::new(NeverHandler)).unwrap();
        poke(&memory, 0, 1);
        unreachable!("the write must not succeed");
    }
    use std::os::unix::process::ExitStatusExt;
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "an_unhandled_fault_still_ends_the_process_with_its_signal"])
        .env("AFRESH_TEST_CRASH", "1")
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(libc::SIGSEGV));
}

#[test]
fn an_aligned_reservation_is_aligned_and_its_slack_is_given_back() {
    let memory = Reservation::aligned(3, 2 << 20).unwrap();
    assert_eq!(memory.base().as_ptr() as usize % (2 << 20), 0);
    memory.map_anonymous(PageRange::new(0, 3), Protection::ReadWrite).unwrap();
    poke(&memory, 2, 9);
    assert_eq!(peek(&memory, 2), 9);
    assert!(memory.map_anonymous(PageRange::new(2, 2), Protection::ReadWrite).is_err());
}
