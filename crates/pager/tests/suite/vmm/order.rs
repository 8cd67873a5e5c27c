//! In which order pages come, and what is asked of the source for that.

use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use afresh_pager::{PageSink, PageSource, SourceError};
use afresh_sys::{Advice, PAGE_SIZE, PageRange, Reservation, Uffd, UffdMode};

use super::client::{FIRST, PAGES, SECOND, send, vmm, vmm_with, with_server};

/// A source whose answers a test watches and holds back.
#[derive(Default)]
struct WatchedSource {
    distant: bool,
    /// Pages whose reading waits until the gate is open.
    held: Option<PageRange>,
    open: AtomicBool,
    /// Only requests of so many pages are.
    held_from: usize,
    reads: AtomicUsize,
    set: Vec<PageRange>,
    /// The first of the working set and other pages.
    order: Mutex<Vec<&'static str>>,
    /// Every other page is zero.
    sparse: bool,
}

impl WatchedSource {
    fn byte(&self, page: usize) -> u8 {
        if self.sparse && page % 2 == 1 { 0 } else { (page + 1) as u8 }
    }
}

impl PageSource for WatchedSource {
    fn pages(&self) -> usize {
        PAGES
    }

    fn is_distant(&self) -> bool {
        self.distant
    }

    unsafe fn read(&self, first: usize, to: *mut u8, pages: usize) -> Result<(), SourceError> {
        self.reads.fetch_add(1, Ordering::AcqRel);
        self.order.lock().unwrap().push("pages");
        let wanted = PageRange::new(first, pages);
        if pages >= self.held_from && self.held.is_some_and(|held| held.intersect(wanted).is_some())
        {
            while !self.open.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        for page in 0..pages {
            // SAFETY: the caller vouches for the memory.
            unsafe { to.add(page * PAGE_SIZE).write_bytes(self.byte(first + page), PAGE_SIZE) };
        }
        Ok(())
    }

    fn working_set(&self) -> Vec<PageRange> {
        self.set.clone()
    }

    fn read_working_set(&self, take: &mut PageSink<'_>) -> Result<(), SourceError> {
        self.order.lock().unwrap().push("set");
        for run in &self.set {
            let bytes: Vec<u8> =
                (run.start..run.end()).flat_map(|page| [self.byte(page); PAGE_SIZE]).collect();
            take(*run, &bytes)?;
        }
        Ok(())
    }
}

/// The page of the source that is at `page` of the memory.
fn of_source(page: usize) -> usize {
    if FIRST.contains(page) { page } else { page - SECOND.start + FIRST.len }
}

fn all_pages() -> impl Iterator<Item = usize> {
    [FIRST, SECOND].into_iter().flat_map(|range| range.start..range.end())
}

#[test]
fn a_fault_does_not_wait_for_streamed_pages() {
    let Some(vmm) = vmm() else { return };
    let held = Some(PageRange::new(0, 64));
    let source = WatchedSource { held, ..WatchedSource::default() };
    let (send_seen, seen) = std::sync::mpsc::channel();
    let (answered, served) = with_server(
        &source,
        |_| {},
        |socket| {
            send(socket, vmm.message().as_bytes(), &[vmm.uffd.as_fd()]);
            // The streaming thread is stuck now, or will be.
            while source.reads.load(Ordering::Acquire) == 0 {
                std::thread::yield_now();
            }
            std::thread::scope(|scope| {
                let vmm = &vmm;
                scope.spawn(move || send_seen.send(vmm.peek(300)).unwrap());
                let answered = seen.recv_timeout(Duration::from_secs(120));
                source.open.store(true, Ordering::Release);
                vmm.touch_all();
                answered
            })
        },
    );
    assert_eq!(answered.unwrap(), (of_source(300) + 1) as u8);
    served.unwrap();
}

#[test]
fn a_fault_in_what_is_being_streamed_from_far_away_asks_for_itself() {
    let Some(vmm) = vmm() else { return };
    // Only large requests are held back.
    let held = Some(PageRange::new(0, PAGES));
    let source = WatchedSource { held, held_from: 65, distant: true, ..WatchedSource::default() };
    let (send_seen, seen) = std::sync::mpsc::channel();
    let (answered, served) = with_server(
        &source,
        |_| {},
        |socket| {
            send(socket, vmm.message().as_bytes(), &[vmm.uffd.as_fd()]);
            while source.reads.load(Ordering::Acquire) < 2 {
                std::thread::yield_now();
            }
            std::thread::scope(|scope| {
                let vmm = &vmm;
                scope.spawn(move || send_seen.send([70, 300].map(|page| vmm.peek(page))).unwrap());
                let answered = seen.recv_timeout(Duration::from_secs(120));
                source.open.store(true, Ordering::Release);
                vmm.touch_all();
                answered
            })
        },
    );
    assert_eq!(answered.unwrap(), [70, 300].map(|page| (of_source(page) + 1) as u8));
    assert_eq!(served.unwrap().pages, PAGES);
}

#[test]
fn zero_pages_take_no_memory() {
    let source = WatchedSource { sparse: true, ..WatchedSource::default() };
    for stream in [true, false] {
        let Some(vmm) = vmm() else { return };
        let ((), served) = with_server(
            &source,
            |options| options.stream = stream,
            |socket| {
                send(socket, vmm.message().as_bytes(), &[vmm.uffd.as_fd()]);
                for page in all_pages() {
                    assert_eq!(vmm.peek(page), source.byte(of_source(page)), "page {page}");
                }
            },
        );
        let served = served.unwrap();
        assert_eq!((served.pages, served.empty), (PAGES, PAGES / 2));
        let resident = resident_kib(&vmm.memory);
        assert!(resident <= PAGES / 2 * 4, "{resident} KiB are resident");
    }
}

/// Memory that the mappings inside `memory` hold, by the kernel's account.
fn resident_kib(memory: &Reservation) -> usize {
    let range = memory.page_ptr(0) as usize..memory.page_ptr(memory.pages()) as usize;
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut inside, mut sum) = (false, 0);
    for line in text.lines() {
        let first = line.split([' ', '-']).next().unwrap();
        if let (Ok(start), true) = (usize::from_str_radix(first, 16), line.contains('-')) {
            inside = range.contains(&start);
        } else if let (Some(rest), true) = (line.strip_prefix("Rss:"), inside) {
            sum += rest.trim().trim_end_matches(" kB").parse::<usize>().unwrap();
        }
    }
    sum
}

#[test]
fn a_distant_source_is_asked_few_times() {
    for stream in [true, false] {
        let Some(vmm) = vmm() else { return };
        let source = WatchedSource { distant: true, ..WatchedSource::default() };
        let ((), served) = with_server(
            &source,
            |options| (options.stream, options.window) = (stream, 1),
            |socket| {
                send(socket, vmm.message().as_bytes(), &[vmm.uffd.as_fd()]);
                for page in all_pages() {
                    assert_eq!(vmm.peek(page), (of_source(page) + 1) as u8);
                }
            },
        );
        assert_eq!(served.unwrap().pages, PAGES);
        let reads = source.reads.load(Ordering::Acquire);
        assert!(reads <= 8, "{reads} requests for {PAGES} pages");
    }
}

#[test]
fn the_working_set_comes_first_and_from_its_compact_copy() {
    let Some(vmm) = vmm() else { return };
    let set = vec![PageRange::new(7, 3), PageRange::new(95, 10), PageRange::new(299, 1)];
    let source = WatchedSource { set, ..WatchedSource::default() };
    let ((), served) = with_server(
        &source,
        |_| {},
        |socket| {
            send(socket, vmm.message().as_bytes(), &[vmm.uffd.as_fd()]);
            while source.reads.load(Ordering::Acquire) == 0 {
                std::thread::yield_now();
            }
            for page in all_pages() {
                assert_eq!(vmm.peek(page), (of_source(page) + 1) as u8);
            }
        },
    );
    let served = served.unwrap();
    assert_eq!(served.pages, PAGES);
    assert_eq!(source.order.lock().unwrap()[0], "set");
}

#[test]
fn a_page_discarded_unseen_reads_as_zero_and_the_fault_is_not_repeated() {
    for stream in [true, false] {
        // Without remove events the pager does not notice.
        let Some(vmm) = vmm_with(Uffd::open(UffdMode::Events)) else { return };
        let source = WatchedSource::default();
        let (seen, served) = with_server(
            &source,
            |options| options.stream = stream,
            |socket| {
                send(socket, vmm.message().as_bytes(), &[vmm.uffd.as_fd()]);
                vmm.touch_all();
                vmm.memory.advise(PageRange::new(20, 2), Advice::Discard).unwrap();
                let (send_seen, seen) = std::sync::mpsc::channel();
                std::thread::scope(|scope| {
                    let vmm = &vmm;
                    scope.spawn(move || {
                        send_seen.send([19, 20, 21, 22].map(|page| vmm.peek(page))).unwrap();
                    });
                    let seen = seen.recv_timeout(Duration::from_secs(120));
                    if seen.is_err() {
                        // Ends the threads that still wait.
                        let start = vmm.memory.page_ptr(FIRST.start);
                        vmm.uffd.unregister(start, FIRST.byte_len()).unwrap();
                    }
                    seen
                })
            },
        );
        assert_eq!(seen.unwrap(), [20, 0, 0, 23]);
        assert_eq!(served.unwrap().zeroed, 2);
    }
}

#[test]
fn a_flood_of_events_does_not_keep_the_service_from_ending() {
    let Some(vmm) = vmm() else { return };
    let source = WatchedSource::default();
    let flooding = AtomicBool::new(true);
    let started = Instant::now();
    std::thread::scope(|scope| {
        let ((), _) = with_server(
            &source,
            |_| {},
            |socket| {
                send(socket, vmm.message().as_bytes(), &[vmm.uffd.as_fd()]);
                vmm.touch_all();
                for page in 0..4 {
                    let (vmm, flooding) = (&vmm, &flooding);
                    scope.spawn(move || {
                        while flooding.load(Ordering::Acquire) {
                            vmm.memory
                                .advise(PageRange::new(page * 10, 2), Advice::Discard)
                                .unwrap();
                        }
                    });
                }
                std::thread::sleep(Duration::from_millis(100));
            },
        );
        // A thread that waits for the reader of an event continues when the reader ends.
        flooding.store(false, Ordering::Release);
        while uffd_has_events(&vmm.uffd) {}
    });
    assert!(started.elapsed() < Duration::from_secs(60));
}

/// Reads what events there are; whether there were any.
fn uffd_has_events(uffd: &Uffd) -> bool {
    let mut any = false;
    for _ in 0..100 {
        any |= uffd.next_event().is_ok_and(|event| event.is_some());
        std::thread::sleep(Duration::from_millis(1));
    }
    any
}
