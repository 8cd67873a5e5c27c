//! The VMM handshake, with a client that follows the published protocol and clients that do not.
#![cfg(not(miri))]

use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use afresh_pager::vmm::{Served, VmmError, VmmOptions, serve};
use afresh_pager::{PageSource, SourceError};
use afresh_sys::{Advice, Interest, PAGE_SIZE, PageRange, Protection, Reservation, Uffd};
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
    let uffd = match Uffd::open_for_pager() {
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
    source: &Numbered,
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
