//! Pagers that are killed while their VMM reads its memory.

use std::io::BufRead;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

use afresh_pager::vmm::{DoorOptions, Keeper, VmmHost, keep};
use afresh_pager::{PageSource, SourceError};
use afresh_sys::PAGE_SIZE;

use super::client::PAGES;
use super::process::{VmmProcess, numbered};

const PAGER: &str = "vmm::kill::plays_the_pager_when_it_is_started_as_one";
const KEEPER: &str = "vmm::kill::plays_the_keeper_when_it_is_started_as_one";
/// The socket, in the pager's process.
const SOCKET: &str = "AFRESH_TEST_PAGER_SOCKET";
/// Set in a pager that freezes the memory of its VMM.
const FREEZES: &str = "AFRESH_TEST_PAGER_FREEZES";
/// Set in a pager that fills pages ahead of faults.
const STREAMS: &str = "AFRESH_TEST_PAGER_STREAMS";
const IS_KEEPER: &str = "AFRESH_TEST_KEEPER";

struct NumberedPages;

impl PageSource for NumberedPages {
    fn pages(&self) -> usize {
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
    let keeper = Keeper::start(afresh_sys::again(KEEPER).env(IS_KEEPER, "1")).unwrap();
    let host = VmmHost::new(Some(keeper), |_| {});
    let mut door = DoorOptions::new("vm", "numbered", socket);
    door.stream = std::env::var_os(STREAMS).is_some();
    door.window = 1;
    host.open_door(door, Arc::new(NumberedPages)).unwrap();
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

/// Runs in the process of the keeper. In others it does nothing.
#[test]
fn plays_the_keeper_when_it_is_started_as_one() {
    use std::os::fd::AsFd;
    if std::env::var_os(IS_KEEPER).is_some() {
        keep(&std::io::stdin().as_fd().try_clone_to_owned().unwrap().into()).unwrap();
        std::process::exit(0);
    }
}

/// Starts a pager that does as `habit`, a variable, says.
fn start_pager(
    socket: &Path,
    habit: Option<&str>,
) -> (Child, impl Iterator<Item = String> + use<>) {
    let mut command = afresh_sys::again(PAGER);
    if let Some(habit) = habit {
        command.env(habit, "1");
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
    // Waits until the keeper has lifted the protection.
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
            // The last copy of the userfaultfd but those of the pager and its keeper.
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
