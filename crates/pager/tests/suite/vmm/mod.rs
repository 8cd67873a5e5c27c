//! The VMM handshake, with a client that follows the published protocol and clients that do not.
#![cfg(not(miri))]

mod bench;
mod client;
mod clients;
mod control;
mod freeze;
mod huge_pages;
mod kill;
mod order;
mod process;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use afresh_pager::vmm::{VmmError, VmmOptions, serve};
use afresh_pager::{PageSource, SourceError};
use afresh_sys::inject::{self, Plan};
use afresh_sys::{Advice, Call, PAGE_SIZE, PageRange};
use client::{PAGES, send, vmm, with_server};

/// Every byte of page `n` is `n + 1`; from page `fails_at` on reading fails.
struct NumberedSource {
    fails_at: usize,
}

impl PageSource for NumberedSource {
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

#[test]
fn a_guest_finds_every_page_whether_streamed_or_on_demand() {
    let source = NumberedSource { fails_at: usize::MAX };
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
            if !stream && window == 1 {
                assert_eq!(served.faults, PAGES);
            } else if !stream {
                // One a window, and one more where a page is touched while its window is being
                // filled.
                assert!((2 + 4..PAGES / 4).contains(&served.faults), "{served:?}");
            }
        }
    }
}

#[test]
fn a_discarded_page_reads_as_zero_and_its_neighbours_as_before() {
    let source = NumberedSource { fails_at: usize::MAX };
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
    let source = NumberedSource { fails_at: usize::MAX };
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
    let source = NumberedSource { fails_at: usize::MAX };
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
fn a_vmm_keeps_running_after_its_pager_has_exited() {
    let source = NumberedSource { fails_at: usize::MAX };
    for complete in [true, false] {
        let Some(vmm) = vmm() else { return };
        let ((), served) = with_server(
            &source,
            |options| options.stream = false,
            |socket| {
                send(socket, vmm.message().as_bytes(), &[vmm.uffd.as_fd()]);
                if complete { vmm.touch_all() } else { assert_eq!(vmm.peek(5), 6) }
            },
        );
        assert_eq!(served.is_ok(), complete, "{served:?}");
        // The VMM still has its userfaultfd, which no process reads.
        let (done, seen) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let vmm = &vmm;
            scope.spawn(move || {
                vmm.memory.advise(PageRange::new(5, 1), Advice::Discard).unwrap();
                done.send([4, 5, 6].map(|page| vmm.peek(page))).unwrap();
            });
            let seen = seen.recv_timeout(Duration::from_secs(120));
            if seen.is_err() {
                println!("a discard or a fault waits for the pager that has exited");
                std::process::abort();
            }
            assert_eq!(seen.unwrap(), [5, 0, 7]);
        });
    }
}

/// The VMM and the pager share the open file, and so its flags.
#[test]
fn a_vmm_that_makes_its_userfaultfd_block_does_not_hang_its_service() {
    let Some(vmm) = vmm() else { return };
    let (ours, theirs) = UnixStream::pair().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (done, ended) = std::sync::mpsc::channel();
    let of_service = stop.clone();
    // Not joined: a service that hangs would hang the test.
    std::thread::spawn(move || {
        let source = NumberedSource { fails_at: usize::MAX };
        let mut options = VmmOptions::new(&of_service);
        (options.stream, options.window, options.end_on_failure) = (false, 1, false);
        let _ = done.send(serve(&theirs, &source, &options));
    });
    send(&ours, vmm.message().as_bytes(), &[vmm.uffd.as_fd()]);
    assert_eq!(vmm.peek(5), 6);
    // SAFETY: changes the flags of a descriptor that is open.
    let blocks = unsafe { libc::fcntl(vmm.uffd.as_fd().as_raw_fd(), libc::F_SETFL, 0) };
    assert_eq!(blocks, 0);
    // The service looks for events several times meanwhile.
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(vmm.peek(7), 8);
    stop.store(true, Ordering::Release);
    let served = ended.recv_timeout(Duration::from_secs(60)).expect("the service hangs");
    assert!(matches!(served, Err(VmmError::Stopped(298))), "{served:?}");
}

#[test]
fn hostile_clients_are_refused_by_name_and_in_time() {
    let source = NumberedSource { fails_at: usize::MAX };
    let Some(vmm) = vmm() else { return };
    let null = File::open("/dev/null").unwrap();
    type Client<'a> = Box<dyn FnOnce(&UnixStream) + 'a>;
    let text = vmm.message();
    let text = text.as_bytes();
    let fd = || vmm.uffd.as_fd();
    let clients: Vec<(Client<'_>, &str)> = vec![
        (Box::new(|_| ()), "in time"),
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
            }),
            "not registered",
        ),
    ];
    for (client, word) in clients {
        let start = Instant::now();
        let ((), served) = with_server(
            &source,
            |options| {
                if word == "in time" {
                    options.handshake = Duration::from_millis(300);
                }
            },
            |socket| {
                client(socket);
                // Until the service refuses it, and closes the connection.
                let _ = std::io::Read::read(&mut &*socket, &mut [0]);
            },
        );
        match served {
            Err(error) => assert!(error.to_string().contains(word), "{word}: {error}"),
            Ok(served) => panic!("{word}: served {served:?}"),
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{word}");
    }
}

const CHILD: &str = "AFRESH_TEST_VMM";

#[test]
fn a_page_that_can_not_be_filled_raises_sigbus() {
    use std::os::unix::process::ExitStatusExt;
    if std::env::var_os(CHILD).is_some() {
        let Some(vmm) = vmm() else { std::process::exit(9) };
        let source = NumberedSource { fails_at: 120 };
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
    let output = afresh_sys::test_command("vmm::a_page_that_can_not_be_filled_raises_sigbus")
        .env(CHILD, "1")
        .output()
        .unwrap();
    if output.status.code() == Some(9) {
        println!("SKIPPED: no userfaultfd");
        return;
    }
    assert!(!String::from_utf8_lossy(&output.stdout).contains("READ"), "{output:?}");
    assert_eq!(output.status.signal(), Some(7), "{output:?}");
    assert!(start.elapsed() < Duration::from_secs(60));
}

/// In a separate process that waits for a page, while its message cannot be taken from the stream.
#[test]
fn a_vmm_whose_service_does_not_begin_is_ended_and_not_left_waiting() {
    use std::os::unix::process::ExitStatusExt;
    const NAME: &str = "vmm::a_vmm_whose_service_does_not_begin_is_ended_and_not_left_waiting";
    if std::env::var_os(CHILD).is_some() {
        let Some(vmm) = vmm() else { std::process::exit(9) };
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let stop = AtomicBool::new(false);
            // The look at the message succeeds.
            let plan = Plan { call: Some(Call::Receive), after: 1, times: 1, errno: libc::EIO };
            let source = NumberedSource { fails_at: usize::MAX };
            let (result, failed) =
                inject::with(plan, || serve(&theirs, &source, &VmmOptions::new(&stop)));
            println!("SERVED {} {failed}", result.is_ok());
        });
        send(&ours, vmm.message().as_bytes(), &[vmm.uffd.as_fd()]);
        // SAFETY: ends a VMM that waits without end.
        unsafe { libc::alarm(60) };
        println!("READ {}", vmm.peek(5));
        std::process::exit(3);
    }
    let output = afresh_sys::test_command(NAME).env(CHILD, "1").output().unwrap();
    if output.status.code() == Some(9) {
        println!("SKIPPED: no userfaultfd");
        return;
    }
    assert!(!String::from_utf8_lossy(&output.stdout).contains("READ"), "{output:?}");
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
}

/// In a separate process that waits for a page, while its handshake is refused.
#[test]
fn a_refused_vmm_is_ended_and_not_left_waiting() {
    use std::os::unix::process::ExitStatusExt;
    const NAME: &str = "vmm::a_refused_vmm_is_ended_and_not_left_waiting";
    if std::env::var_os(CHILD).is_some() {
        let Some(vmm) = vmm() else { std::process::exit(9) };
        let source = NumberedSource { fails_at: usize::MAX };
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
    let child = afresh_sys::test_command(NAME)
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
