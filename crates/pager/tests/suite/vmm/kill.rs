//! Pagers that are killed while their VMM reads its memory.

use std::io::BufRead;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use afresh_pager::vmm::{EndpointOptions, HostEvent, Listener, VmmHost, Watchdog, run_watchdog};
use afresh_pager::{PageSource, SourceError};
use afresh_sys::PAGE_SIZE;

use super::client::PAGES;
use super::process::{VmmProcess, numbered};

const PAGER: &str = "vmm::kill::plays_the_pager_when_it_is_started_as_one";
const WATCHDOG: &str = "vmm::kill::plays_the_watchdog_when_it_is_started_as_one";
/// The socket, in the pager's process.
const SOCKET: &str = "AFRESH_TEST_PAGER_SOCKET";
/// Set in a pager that freezes the memory of its VMM.
const FREEZES: &str = "AFRESH_TEST_PAGER_FREEZES";
/// Set in a pager that fills pages ahead of faults.
const STREAMS: &str = "AFRESH_TEST_PAGER_STREAMS";
/// Set in a pager that accepts a VMM and never takes its handshake.
const HESITATES: &str = "AFRESH_TEST_PAGER_HESITATES";
/// Set in a pager that can start no thread until a VMM has connected.
const STARVES: &str = "AFRESH_TEST_PAGER_STARVES";
const IS_WATCHDOG: &str = "AFRESH_TEST_WATCHDOG";

struct NumberedPages;

impl PageSource for NumberedPages {
    fn pages(&self) -> usize {
        let serves = std::thread::current().name().is_some_and(|name| name.starts_with("vmm-"));
        if serves && std::env::var_os(HESITATES).is_some() {
            println!("\nACCEPTED");
            loop {
                std::thread::park();
            }
        }
        PAGES
    }

    unsafe fn read(&self, first: usize, to: *mut u8, pages: usize) -> Result<(), SourceError> {
        for page in 0..pages {
            // SAFETY: the caller vouches for the memory.
            unsafe { to.add(page * PAGE_SIZE).write_bytes(numbered(first + page), PAGE_SIZE) };
        }
        Ok(())
    }
}

/// Runs in the process of the pager. In others it does nothing.
#[test]
fn plays_the_pager_when_it_is_started_as_one() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let watchdog =
        Watchdog::start(afresh_sys::test_command(WATCHDOG).env(IS_WATCHDOG, "1")).unwrap();
    let failed = Arc::new(AtomicBool::new(false));
    let fails = failed.clone();
    let host = VmmHost::new(Some(watchdog), move |event| {
        fails.fetch_or(matches!(event, HostEvent::Failed { .. }), Ordering::SeqCst);
    });
    let mut endpoint = EndpointOptions::new("vm", "numbered", socket);
    endpoint.stream = std::env::var_os(STREAMS).is_some();
    endpoint.window = 1;
    host.open_endpoint(endpoint, Arc::new(NumberedPages)).unwrap();
    if std::env::var_os(STARVES).is_some() {
        limit_memory(|used| Some(used + (1 << 20)));
        println!("\nOPEN");
        while !failed.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        limit_memory(|_| None);
    }
    println!("\nOPEN");
    while std::env::var_os(FREEZES).is_some() {
        match host.vm("vm") {
            Ok(vm) if vm.stats().present > 0 => {
                vm.freeze(None).unwrap();
                break;
            }
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    println!("\nFROZEN");
    loop {
        std::thread::park();
    }
}

/// Limits the addresses of this process, given those that it uses: a thread needs 2 MiB for its
/// stack.
fn limit_memory(limit: impl Fn(u64) -> Option<u64>) {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    let current = limit(pages * PAGE_SIZE as u64);
    let limit = rustix::process::Rlimit { current, maximum: None };
    rustix::process::setrlimit(rustix::process::Resource::As, limit).unwrap();
}

/// Runs in the process of the watchdog. In others it does nothing.
#[test]
fn plays_the_watchdog_when_it_is_started_as_one() {
    use std::os::fd::AsFd;
    if std::env::var_os(IS_WATCHDOG).is_some() {
        run_watchdog(&std::io::stdin().as_fd().try_clone_to_owned().unwrap().into()).unwrap();
        std::process::exit(0);
    }
}

/// Starts a pager that does as `habit`, a variable, says.
fn start_pager(
    socket: &Path,
    habit: Option<&str>,
) -> (Child, impl Iterator<Item = String> + use<>) {
    let mut command = afresh_sys::test_command(PAGER);
    if let Some(habit) = habit {
        command.env(habit, "1");
        // A thread that makes its arena of malloc maps 128 MiB and gives half of it back. A limit
        // that is set between the two leaves room for a thread.
        command.env("MALLOC_ARENA_MAX", "1");
    }
    let mut pager = command.env(SOCKET, socket).stdout(Stdio::piped()).spawn().unwrap();
    let output = std::io::BufReader::new(pager.stdout.take().unwrap());
    let mut lines = output.lines().map(Result::unwrap);
    assert!(lines.any(|line| line == "OPEN"));
    (pager, lines)
}

#[test]
fn a_killed_pager_leaves_no_frozen_page_protected() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let (mut pager, mut lines) = start_pager(&socket, Some(FREEZES));
    let Some(mut vmm) = VmmProcess::start(&socket) else {
        pager.kill().unwrap();
        pager.wait().unwrap();
        return;
    };
    assert_eq!(vmm.peek(7), numbered(7));
    assert!(lines.any(|line| line == "FROZEN"));
    pager.kill().unwrap();
    pager.wait().unwrap();
    // Waits until the watchdog has lifted the protection.
    vmm.ask("poke 7 200").unwrap();
    assert_eq!(vmm.peek(7), 200);
    vmm.command("peek 8");
    assert_eq!((vmm.answer(), vmm.wait().signal()), (None, Some(libc::SIGBUS)));
}

#[test]
fn a_killed_pager_leaves_no_page_of_zeros_and_no_vmm_that_waits() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    // More by command: `cargo xtask soak --pager`.
    let kills = std::env::var("AFRESH_TEST_KILLS").map_or(50, |text| text.parse().unwrap());
    let habits = [None, Some(STREAMS), Some(FREEZES)];
    let (mut whole, mut ended) = (0, 0);
    for attempt in 0..kills {
        let (mut pager, _lines) = start_pager(&socket, habits[attempt as usize / 2 % habits.len()]);
        let Some(mut vmm) = VmmProcess::start(&socket) else {
            pager.kill().unwrap();
            pager.wait().unwrap();
            return;
        };
        assert_eq!(vmm.peek(PAGES - 1), numbered(PAGES - 1));
        if attempt % 2 == 1 {
            // The last copy of the userfaultfd but those of the pager and its watchdog.
            vmm.ask("close").unwrap();
        }
        vmm.command("check");
        // Somewhere in its faults, or after them.
        std::thread::sleep(Duration::from_micros(attempt * 7919 % 15_000));
        pager.kill().unwrap();
        pager.wait().unwrap();
        match vmm.answer() {
            Some(answer) => {
                assert_eq!(answer, "whole", "attempt {attempt}");
                whole += 1;
            }
            None => {
                assert_eq!(vmm.wait().signal(), Some(libc::SIGBUS), "attempt {attempt}");
                ended += 1;
            }
        }
    }
    println!("{whole} VMMs found all content, {ended} were ended");
}

/// Sends a signal to a child.
fn signal(child: &Child, signal: libc::c_int) {
    // SAFETY: a plain call, with the number of a child that was not waited for.
    assert_eq!(unsafe { libc::kill(child.id() as libc::pid_t, signal) }, 0);
}

fn is_ended_by_a_missing_page(vmm: &mut VmmProcess) -> bool {
    vmm.command("peek 7");
    (vmm.answer(), vmm.wait().signal()) == (None, Some(libc::SIGBUS))
}

#[test]
fn a_pager_that_is_killed_before_it_accepts_leaves_no_vmm_that_waits() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let (mut pager, _lines) = start_pager(&socket, None);
    signal(&pager, libc::SIGSTOP);
    let vmm = VmmProcess::start(&socket);
    pager.kill().unwrap();
    pager.wait().unwrap();
    let Some(mut vmm) = vmm else { return };
    assert!(is_ended_by_a_missing_page(&mut vmm));
}

#[test]
fn a_pager_that_is_killed_before_it_takes_a_handshake_leaves_no_vmm_that_waits() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let (mut pager, mut lines) = start_pager(&socket, Some(HESITATES));
    let vmm = VmmProcess::start(&socket);
    let accepted = vmm.is_none() || lines.any(|line| line == "ACCEPTED");
    pager.kill().unwrap();
    pager.wait().unwrap();
    let Some(mut vmm) = vmm else { return };
    assert!(accepted && is_ended_by_a_missing_page(&mut vmm));
}

/// Kills a VMM that does not end, so that a test fails and does not hang.
fn watched(vmm: &VmmProcess) -> impl Drop + use<> {
    struct KillTimer(std::sync::mpsc::Sender<()>);
    impl Drop for KillTimer {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }
    let pid = vmm.child.id() as libc::pid_t;
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        if ended.recv_timeout(Duration::from_secs(60)).is_err() {
            // SAFETY: a plain call, with the number of a child that was not waited for.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
    });
    KillTimer(done)
}

#[test]
fn a_vmm_without_a_thread_for_it_is_served_by_the_next_attempt() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let (mut pager, mut lines) = start_pager(&socket, Some(STARVES));
    let vmm = VmmProcess::start(&socket);
    if let Some(mut vmm) = vmm {
        let _watched = watched(&vmm);
        assert!(lines.any(|line| line == "OPEN"), "the pager found a thread");
        assert_eq!(vmm.peek(7), numbered(7));
    }
    pager.kill().unwrap();
    pager.wait().unwrap();
}

#[test]
fn a_pager_that_is_killed_while_it_accepts_leaves_no_vmm_that_waits() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let kills = std::env::var("AFRESH_TEST_KILLS").map_or(50, |text| text.parse().unwrap());
    for attempt in 0_u64..kills {
        let (mut pager, _lines) = start_pager(&socket, None);
        signal(&pager, libc::SIGSTOP);
        let Some(mut vmm) = VmmProcess::start(&socket) else {
            pager.kill().unwrap();
            pager.wait().unwrap();
            return;
        };
        let _watched = watched(&vmm);
        signal(&pager, libc::SIGCONT);
        let began = Instant::now();
        while began.elapsed() < Duration::from_micros(attempt * 7919 % 1000) {
            std::hint::spin_loop();
        }
        pager.kill().unwrap();
        pager.wait().unwrap();
        assert!(is_ended_by_a_missing_page(&mut vmm), "attempt {attempt}");
    }
}

#[test]
fn a_endpoint_for_one_vmm_leaves_no_other_that_waits() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let listener = Listener::bind(&socket).unwrap();
    let Some(mut first) = VmmProcess::start(&socket) else { return };
    let Some(mut second) = VmmProcess::start(&socket) else { return };
    let host = VmmHost::new(None, |_| {});
    let mut endpoint = EndpointOptions::new("vm", "numbered", &socket);
    endpoint.once = true;
    host.open_endpoint_at(listener, endpoint, Arc::new(NumberedPages)).unwrap();
    assert_eq!(first.peek(7), numbered(7));
    assert!(is_ended_by_a_missing_page(&mut second));
    drop(first);
    host.stop();
}
