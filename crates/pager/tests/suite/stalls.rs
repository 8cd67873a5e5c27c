//! Memory that is being filled, in processes that are stopped for a while or fork.
#![cfg(not(miri))]

use std::io::{Read, Write};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use afresh_pager::{Answer, FillStrategy, Options, PageSource, Restore, SourceError};
use afresh_sys::planted::{Bug, must_be_caught};
use afresh_sys::{Feature, Features, PAGE_SIZE, PageRange, Reservation};

const PAGES: usize = 600;
/// Set in the process that is stopped.
const CHILD: &str = "AFRESH_TEST_STOPPED";

fn target() -> (Arc<Reservation>, PageRange) {
    (Arc::new(Reservation::new(PAGES).unwrap()), PageRange::new(0, PAGES))
}

fn peek(memory: &Reservation, page: usize) -> u8 {
    // SAFETY: the tests read pages of the target that they made.
    unsafe { memory.page_ptr(page).read_volatile() }
}

/// Every byte is 7. With `asks`, each read first waits for a byte on standard input.
struct ConstantSource {
    asks: bool,
}

impl PageSource for ConstantSource {
    fn pages(&self) -> usize {
        PAGES
    }

    unsafe fn read(&self, _: usize, to: *mut u8, pages: usize) -> Result<(), SourceError> {
        if self.asks {
            println!("READING");
            std::io::stdin().read_exact(&mut [0])?;
        }
        // SAFETY: the caller vouches for the memory.
        unsafe { to.write_bytes(7, pages * PAGE_SIZE) };
        Ok(())
    }
}

fn on_demand(answer: Answer) -> Options {
    Options { background: false, answer, ..Options::with(FillStrategy::Stream) }
}

#[test]
fn a_process_that_was_stopped_longer_than_the_limit_is_filled_when_it_continues() {
    const NAME: &str =
        "stalls::a_process_that_was_stopped_longer_than_the_limit_is_filled_when_it_continues";
    const LIMIT: Duration = Duration::from_secs(5);
    if let Ok(answer) = std::env::var(CHILD) {
        let answer = if answer == "thread" { Answer::Thread } else { Answer::Sigbus };
        let options = Options { timeout: LIMIT, ..on_demand(answer) };
        let (memory, range) = target();
        let source = Arc::new(ConstantSource { asks: true });
        let restore = match Restore::start(memory.clone(), range, source, &options) {
            Ok(restore) => restore,
            Err(error) => {
                println!("SKIPPED: {error}");
                return;
            }
        };
        assert_eq!(peek(&memory, 3), 7);
        drop(restore);
        return;
    }
    for answer in ["thread", "sigbus"] {
        let mut child = afresh_sys::test_command(NAME)
            .env(CHILD, answer)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = child.id() as i32;
        let mut said = String::new();
        let mut output = child.stdout.take().unwrap();
        let mut byte = [0];
        while !said.contains("READING") && !said.contains("SKIPPED") {
            assert_eq!(output.read(&mut byte).unwrap(), 1, "{answer}: {said}");
            said.push(char::from(byte[0]));
        }
        // SAFETY: stops and continues a child of this test.
        unsafe { libc::kill(pid, libc::SIGSTOP) };
        std::thread::sleep(LIMIT + Duration::from_secs(1));
        // One byte for every read that may come.
        child.stdin.take().unwrap().write_all(&[0; 64]).unwrap();
        // SAFETY: as above.
        unsafe { libc::kill(pid, libc::SIGCONT) };
        let status = child.wait().unwrap();
        output.read_to_string(&mut said).unwrap();
        assert!(status.success(), "{answer}: {status}: {said}");
    }
}

#[test]
fn a_forked_child_never_reads_zeros_where_pages_are_missing() {
    for strategy in [FillStrategy::Stream, FillStrategy::WorkingSet] {
        let (memory, range) = target();
        let options = Options { strategy: Some(strategy), ..on_demand(Answer::Sigbus) };
        let source = Arc::new(ConstantSource { asks: false });
        let restore = match Restore::start(memory.clone(), range, source, &options) {
            Ok(restore) => restore,
            Err(error) => return println!("SKIPPED: {error}"),
        };
        let read_in_child = |page| {
            // SAFETY: the child reads memory and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // The default action, without the message of the handler of Rust.
                // SAFETY: sets an action and ends the child.
                unsafe {
                    libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                    libc::_exit(i32::from(peek(&memory, page)));
                }
            }
            let mut status = 0;
            // SAFETY: waits for a child of this test.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            status
        };
        let status = read_in_child(PAGES - 1);
        assert!(
            libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV,
            "{status:#x}"
        );
        assert_eq!(peek(&memory, PAGES - 1), 7);
        restore.wait(Duration::from_secs(60)).unwrap();
        let status = read_in_child(0);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "{status:#x}");
    }
}

#[test]
fn memory_that_children_inherit_too_early_is_caught() {
    if !Features::host().has(Feature::UffdSigbus) {
        return println!("SKIPPED: no userfaultfd in SIGBUS mode here");
    }
    let test = "stalls::a_forked_child_never_reads_zeros_where_pages_are_missing";
    must_be_caught(&[Bug::Withhold], &[test]);
}
