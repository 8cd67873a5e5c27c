//! The examples run as documented.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use afresh::Reference;
use afresh::store::{FilePages, GuestBuild, SaveRequest, Store};
use afresh_sys::{Interest, PAGE_SIZE, PageRange, Protection, Reservation, Uffd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

#[path = "../../examples/arena.rs"]
mod arena;
#[path = "../../examples/micro_vm.rs"]
mod micro_vm;
#[path = "../../examples/pager.rs"]
mod pager;
#[path = "../../examples/per_request.rs"]
mod per_request;
#[path = "../../examples/session.rs"]
mod session;
#[path = "../../examples/snapshot.rs"]
mod snapshot;

#[test]
fn a_request_finds_nothing_of_another() {
    let answers = per_request::serve().unwrap();
    assert_eq!(answers.len(), 100);
    for (number, answer) in answers.iter().enumerate() {
        assert_eq!(*answer, format!("seen: 1, last: {}", number % 25 % 10));
    }
}

#[test]
fn a_snapshot_continues_from_the_state_of_the_guest() {
    let here = tempfile::tempdir().unwrap();
    snapshot::save(&here.path().join("learnt.afresh")).unwrap();
    let there = tempfile::tempdir().unwrap();
    let moved = there.path().join("anything");
    std::fs::copy(here.path().join("learnt.afresh"), &moved).unwrap();
    drop(here);
    assert_eq!(snapshot::open(&moved).unwrap(), "42");
}

#[test]
fn a_session_searches_by_forks_and_goes_back() {
    let moves = session::search(100).unwrap();
    let (add, double) = ("add", "double");
    assert_eq!(moves, [add, double, double, double, add, add, add, add, add]);
    let (before, after) = session::try_and_go_back().unwrap();
    assert_eq!((before, after), (607, 607));
}

#[test]
fn a_micro_vm_starts_every_call_from_one_state() {
    let Some(hash) = crate::common::machine::find("hash") else { return };
    assert!(!micro_vm::call(&hash, b"abc").unwrap().is_empty());
}

#[test]
fn an_arena_is_zero_for_every_request() {
    let used = arena::requests(20).unwrap();
    assert!(used.len() == 20 && used.iter().all(|bytes| *bytes == used[0]), "{used:?}");
}

/// Sends as a monitor does: its mapping, and the userfaultfd that covers it.
fn hand_over(stream: &UnixStream, memory: &Reservation, uffd: &Uffd) {
    let text = format!(
        r#"[{{"base_host_virt_addr":{},"size":{},"offset":0,"page_size":4096}}]"#,
        memory.page_ptr(0) as usize,
        memory.pages() * PAGE_SIZE,
    );
    let fds = [uffd.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(stream, &[IoSlice::new(text.as_bytes())], &mut control, SendFlags::empty()).unwrap();
}

/// Where the monitor finds its pager.
const SOCKET: &str = "AFRESH_TEST_MONITOR_SOCKET";
const MONITOR_PAGES: usize = 64;

/// The monitor: a separate process, because the pager serves one until it exits.
fn monitor(socket: &Path) {
    let uffd = Uffd::open_for_pager().unwrap();
    let memory = Reservation::new(MONITOR_PAGES).unwrap();
    let all = PageRange::new(0, MONITOR_PAGES);
    memory.map_anonymous(all, Protection::ReadWrite).unwrap();
    uffd.register(memory.page_ptr(0), all.byte_len(), Interest::MISSING).unwrap();
    let stream = UnixStream::connect(socket).unwrap();
    hand_over(&stream, &memory, &uffd);
    for page in (0..MONITOR_PAGES).rev() {
        let mut seen = [0xff; PAGE_SIZE];
        // SAFETY: the page is in the reservation, which is readable and filled only by the kernel;
        // the buffer has room for it.
        unsafe { seen.as_mut_ptr().copy_from_nonoverlapping(memory.page_ptr(page), PAGE_SIZE) };
        assert!(seen.iter().all(|byte| *byte == page as u8), "page {page}");
    }
}

#[test]
fn the_pager_serves_a_monitor() {
    if let Some(socket) = std::env::var_os(SOCKET) {
        return monitor(Path::new(&socket));
    }
    if let Err(error) = Uffd::open_for_pager() {
        println!("SKIPPED: {error}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let raw = dir.path().join("raw");
    let content: Vec<u8> =
        (0..MONITOR_PAGES).flat_map(|page| vec![page as u8; PAGE_SIZE]).collect();
    std::fs::write(&raw, content).unwrap();
    let build = GuestBuild {
        kind: "raw".to_owned(),
        module: "none".to_owned(),
        engine: "none".to_owned(),
        cpu: Vec::new(),
    };
    let path = dir.path().join("store");
    let store = Store::create(&path).unwrap();
    store.save("base", &FilePages::open(&raw).unwrap(), &SaveRequest::new(build)).unwrap();
    let snapshot: Reference = format!("{}@base", path.display()).parse().unwrap();
    let socket = dir.path().join("socket");
    let mut child = None;
    let served = pager::serve_one(&snapshot, &socket, || {
        let mut monitor = afresh_sys::test_command("examples::the_pager_serves_a_monitor");
        monitor.env(SOCKET, &socket);
        monitor.stdout(std::process::Stdio::null());
        child = Some(monitor.spawn().unwrap());
    });
    assert!(child.unwrap().wait().unwrap().success());
    let served = served.unwrap().unwrap();
    // The monitor's requests and the pages ahead of them vary from run to run.
    assert_eq!(served.pages, MONITOR_PAGES, "{served:?}");
}
