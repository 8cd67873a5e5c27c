//! The VMM handshake, with a client that follows the published protocol and clients that do not.
#![cfg(not(miri))]

use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use afresh_pager::vmm::{Served, VmmError, VmmOptions, serve};
use afresh_pager::{PageSource, SourceError, Take};
use afresh_sys::{
    Advice, Interest, PAGE_SIZE, PageRange, Protection, Reservation, SysError, Uffd, UffdMode,
};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const PAGES: usize = 300;

/// Every byte of page `n` is `n + 1`; from page `fails_at` on reading fails.
struct Numbered {
    fails_at: usize,
}

impl PageSource for Numbered {
    fn pages(&self) -> usize {
        PAGES
    }

    unsafe fn read(&self, first: usize, to: *mut u8, pages: usize) -> Result<(), SourceError> {
        if first + pages > self.fails_at {
            return Err(SourceError::Io(std::io::Error::other("disk on fire")));
        }
        for page in 0..pages {
            let byte = (first + page + 1) as u8;
            // SAFETY: the caller vouches for the memory.
            unsafe { to.add(page * PAGE_SIZE).write_bytes(byte, PAGE_SIZE) };
        }
        Ok(())
    }
}

/// A VMM's memory: two mappings of the source with a hole between them.
struct Vmm {
    memory: Reservation,
    uffd: Uffd,
}

const FIRST: PageRange = PageRange::new(0, 100);
const SECOND: PageRange = PageRange::new(150, 200);

fn vmm() -> Option<Vmm> {
    vmm_with(Uffd::open_for_pager())
}

fn vmm_with(uffd: Result<Uffd, SysError>) -> Option<Vmm> {
    let uffd = match uffd {
        Ok(uffd) => uffd,
        Err(error) => {
            println!("SKIPPED: {error}");
            return None;
        }
    };
    let memory = Reservation::new(SECOND.end()).unwrap();
    for range in [FIRST, SECOND] {
        memory.map_anonymous(range, Protection::ReadWrite).unwrap();
        memory.advise(range, Advice::NoHugePage).unwrap();
        let start = memory.page_ptr(range.start);
        uffd.register(start, range.byte_len(), Interest::MISSING).unwrap();
    }
    Some(Vmm { memory, uffd })
}

impl Vmm {
    fn message(&self) -> String {
        let address = |range: PageRange| self.memory.page_ptr(range.start) as usize;
        format!(
            r#"[{{"base_host_virt_addr":{},"size":{},"offset":0,"page_size":4096,"page_size_kib":4096}},
               {{"base_host_virt_addr":{},"size":{},"offset":{},"page_size":4096}}]"#,
            address(FIRST),
            FIRST.byte_len(),
            address(SECOND),
            SECOND.byte_len(),
            FIRST.byte_len(),
        )
    }

    /// Leaves no page missing, so that the service can end without closing any.
    fn touch_all(&self) {
        for page in [FIRST, SECOND].into_iter().flat_map(|range| range.start..range.end()) {
            self.peek(page);
        }
    }

    fn peek(&self, page: usize) -> u8 {
        // SAFETY: the tests touch only the two mappings.
        unsafe { self.memory.page_ptr(page).add(77).read_volatile() }
    }
}

fn send(stream: &UnixStream, text: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    sendmsg(stream, &[IoSlice::new(text)], &mut control, SendFlags::empty()).unwrap();
}

/// Serves in a thread while `guest` runs.
fn with_server<R>(
    source: &dyn PageSource,
    change: impl Fn(&mut VmmOptions<'_>) + Sync,
    guest: impl FnOnce(&UnixStream) -> R,
) -> (R, Result<Served, VmmError>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let mut options = VmmOptions::new(&stop);
            options.handshake = Duration::from_millis(300);
            options.end_on_failure = false;
            change(&mut options);
            serve(&theirs, source, &options)
        });
        let result = guest(&ours);
        stop.store(true, Ordering::Release);
        (result, server.join().unwrap())
    })
}

#[test]
fn a_guest_finds_every_page_whether_streamed_or_on_demand() {
    let source = Numbered { fails_at: usize::MAX };
    for stream in [false, true] {
        for window in [1, 64] {
            let Some(vmm) = vmm() else { return };
            let ((), served) = with_server(
                &source,
                |options| (options.stream, options.window) = (stream, window),
                |socket| {
                    send(socket, vmm.message().as_bytes(), &[vmm.uffd.as_fd()]);
                    for page in (0..100).rev() {
                        assert_eq!(vmm.peek(page), (page + 1) as u8);
                    }
                    for page in 0..200 {
                        assert_eq!(vmm.peek(150 + page), (100 + page + 1) as u8);
                    }
                },
            );
            let served = served.unwrap();
            assert_eq!(served.pages, PAGES);
            if !stream {
                assert_eq!(served.faults, if window == 1 { PAGES } else { 2 + 4 });
            }
        }
    }
}

#[test]
fn a_discarded_page_reads_as_zero_and_its_neighbours_as_before() {
    let source = Numbered { fails_at: usize::MAX };
    for stream in [false, true] {
        let Some(vmm) = vmm() else { return };
        let ((), served) = with_server(
            &source,
            |options| options.stream = stream,
            |socket| {
                send(socket, vmm.message().as_bytes(), &[vmm.uffd.as_fd()]);
                assert_eq!(vmm.peek(10), 11);
                vmm.memory.advise(PageRange::new(9, 3), Advice::Discard).unwrap();
                vmm.memory.advise(PageRange::new(90, 2), Advice::Discard).unwrap();
                let seen: Vec<u8> = (8..13).map(|page| vmm.peek(page)).collect();
                assert_eq!(seen, [9, 0, 0, 0, 13]);
                assert_eq!([89, 90, 91, 92].map(|page| vmm.peek(page)), [90, 0, 0, 93]);
                vmm.touch_all();
            },
        );
        let served = served.unwrap();
        assert_eq!((served.removals, served.zeroed), (2, 5));
    }
}

#[test]
fn a_message_may_come_in_pieces() {
    let source = Numbered { fails_at: usize::MAX };
    let Some(vmm) = vmm() else { return };
    let ((), served) = with_server(
        &source,
        |_| {},
        |socket| {
            let text = vmm.message();
            let (head, tail) = text.as_bytes().split_at(50);
            send(socket, head, &[]);
            std::thread::sleep(Duration::from_millis(20));
            send(socket, tail, &[vmm.uffd.as_fd()]);
            assert_eq!(vmm.peek(99), 100);
            vmm.touch_all();
        },
    );
    served.unwrap();
}

#[test]
fn a_service_that_is_ended_closes_what_is_missing() {
    let source = Numbered { fails_at: usize::MAX };
    let Some(vmm) = vmm() else { return };
    let (bytes, served) = with_server(
        &source,
        |options| (options.stream, options.window) = (false, 1),
        |socket| {
            send(socket, vmm.message().as_bytes(), &[vmm.uffd.as_fd()]);
            let bytes = (vmm.peek(5), vmm.peek(6));
            // Waits until the service has read of it.
            vmm.memory.advise(PageRange::new(5, 1), Advice::Discard).unwrap();
            bytes
        },
    );
    assert_eq!(bytes, (6, 7));
    assert!(matches!(served, Err(VmmError::Stopped(299))), "{served:?}");
}

#[test]
fn hostile_clients_are_refused_by_name_and_in_time() {
    let source = Numbered { fails_at: usize::MAX };
    let Some(vmm) = vmm() else { return };
    let null = File::open("/dev/null").unwrap();
    type Client<'a> = Box<dyn FnOnce(&UnixStream) + 'a>;
    let text = vmm.message();
    let text = text.as_bytes();
    let fd = || vmm.uffd.as_fd();
    let clients: Vec<(Client<'_>, &str)> = vec![
        (Box::new(|_| std::thread::sleep(Duration::from_millis(500))), "in time"),
        (Box::new(|s| send(s, &text[..60], &[])), "in time"),
        (Box::new(|s| send(s, text, &[])), "no descriptor"),
        (Box::new(|s| send(s, text, &[null.as_fd()])), "no userfaultfd"),
        (Box::new(|s| send(s, text, &[fd(), fd()])), "more than one"),
        (Box::new(|s| send(s, b"hello", &[fd()])), "expected"),
        (Box::new(|s| send(s, &b"[".repeat(1000), &[fd()])), "recursion"),
        (
            Box::new(|s| {
                send(s, br#"[{"base_host_virt_addr":4096,"size":4096,"offset":4096000}]"#, &[fd()]);
            }),
            "outside",
        ),
        (
            // In order, but not registered with the descriptor.
            Box::new(|s| {
                send(s, br#"[{"base_host_virt_addr":4096,"size":4096,"offset":0}]"#, &[fd()]);
                std::thread::sleep(Duration::from_secs(4));
            }),
            "not registered",
        ),
    ];
    for (client, word) in clients {
        let start = Instant::now();
        let ((), served) = with_server(
            &source,
            |_| {},
            |socket| {
                client(socket);
                if word == "in time" {
                    std::thread::sleep(Duration::from_millis(400));
                }
            },
        );
        match served {
            Err(error) => assert!(error.to_string().contains(word), "{word}: {error}"),
            Ok(served) => panic!("{word}: served {served:?}"),
        }
        assert!(start.elapsed() < Duration::from_secs(6), "{word}");
    }
}

const CHILD: &str = "AFRESH_TEST_VMM";

#[test]
fn a_page_that_can_not_be_filled_raises_sigbus() {
    use std::os::unix::process::ExitStatusExt;
    if std::env::var_os(CHILD).is_some() {
        let Some(vmm) = vmm() else { std::process::exit(9) };
        let source = Numbered { fails_at: 120 };
        let (byte, _) = with_server(
            &source,
            |_| {},
            |socket| {
                send(socket, vmm.message().as_bytes(), &[vmm.uffd.as_fd()]);
                vmm.peek(340)
            },
        );
        println!("READ {byte}");
        std::process::exit(3);
    }
    let start = Instant::now();
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_page_that_can_not_be_filled_raises_sigbus", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    if output.status.code() == Some(9) {
        println!("SKIPPED: no userfaultfd");
        return;
    }
    assert!(!String::from_utf8_lossy(&output.stdout).contains("READ"), "{output:?}");
    assert_eq!(output.status.signal(), Some(7), "{output:?}");
    assert!(start.elapsed() < Duration::from_secs(5));
}

/// A source whose answers a test watches and holds back.
#[derive(Default)]
struct Watched {
    distant: bool,
    /// Pages whose reading waits until the gate is open.
    held: Option<PageRange>,
    open: AtomicBool,
    /// Only requests of so many pages are.
    held_from: usize,
    reads: AtomicUsize,
    set: Vec<PageRange>,
    /// What came first: the working set, or anything else.
    order: Mutex<Vec<&'static str>>,
    /// Every other page is zero.
    sparse: bool,
}

impl Watched {
    fn byte(&self, page: usize) -> u8 {
        if self.sparse && page % 2 == 1 { 0 } else { (page + 1) as u8 }
    }
}

impl PageSource for Watched {
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

    fn read_working_set(&self, take: &mut Take<'_>) -> Result<(), SourceError> {
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
fn a_fault_does_not_wait_for_what_is_streamed() {
    let Some(vmm) = vmm() else { return };
    let held = Some(PageRange::new(0, 64));
    let source = Watched { held, ..Watched::default() };
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
                let answered = seen.recv_timeout(Duration::from_secs(30));
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
    let source = Watched { held, held_from: 65, distant: true, ..Watched::default() };
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
                let answered = seen.recv_timeout(Duration::from_secs(30));
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
fn what_is_zero_takes_no_memory() {
    let source = Watched { sparse: true, ..Watched::default() };
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
        let source = Watched { distant: true, ..Watched::default() };
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
    let source = Watched { set, ..Watched::default() };
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
fn a_page_that_is_discarded_unseen_reads_as_zero_and_nobody_turns_in_a_circle() {
    for stream in [true, false] {
        // Without remove events the pager is not told.
        let Some(vmm) = vmm_with(Uffd::open(UffdMode::Events)) else { return };
        let source = Watched::default();
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
                    let seen = seen.recv_timeout(Duration::from_secs(30));
                    if seen.is_err() {
                        // Ends whoever still waits.
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
    let source = Watched::default();
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
        // Whoever waits for an event to be read goes on when nobody reads any more.
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

/// A handshake that is refused, in a process of its own, which waits for a page meanwhile.
#[test]
fn a_refused_vmm_is_ended_and_not_left_waiting() {
    use std::os::unix::process::ExitStatusExt;
    const NAME: &str = "a_refused_vmm_is_ended_and_not_left_waiting";
    if std::env::var_os(CHILD).is_some() {
        let Some(vmm) = vmm() else { std::process::exit(9) };
        let source = Watched::default();
        let (byte, _) = with_server(
            &source,
            |options| options.end_on_failure = true,
            |socket| {
                let text = vmm.message().replace("\"offset\":0", "\"offset\":40960000");
                send(socket, text.as_bytes(), &[vmm.uffd.as_fd()]);
                vmm.peek(5)
            },
        );
        println!("READ {byte}");
        std::process::exit(3);
    }
    let (done, ended) = std::sync::mpsc::channel();
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture"])
        .env(CHILD, "1")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id() as i32;
    std::thread::spawn(move || done.send(child.wait_with_output()));
    let Ok(output) = ended.recv_timeout(Duration::from_secs(60)) else {
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        panic!("the VMM waits for pages that nobody will bring");
    };
    let output = output.unwrap();
    if output.status.code() == Some(9) {
        println!("SKIPPED: no userfaultfd");
        return;
    }
    assert!(!String::from_utf8_lossy(&output.stdout).contains("READ"), "{output:?}");
    assert_eq!(output.status.signal(), Some(7), "{output:?}");
}
