//! The examples do what they say.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc;

use afresh::Reference;
use afresh::store::{FilePages, GuestBuild, SaveOptions, Store};
use afresh_sys::{Interest, PAGE_SIZE, PageRange, Protection, Reservation, Uffd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

#[path = "../examples/arena.rs"]
mod arena;
#[path = "../examples/micro_vm.rs"]
mod micro_vm;
#[path = "../examples/pager.rs"]
mod pager;
#[path = "../examples/per_request.rs"]
mod per_request;
#[path = "../examples/snapshot.rs"]
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
fn a_snapshot_goes_on_where_the_guest_was() {
    let here = tempfile::tempdir().unwrap();
    snapshot::save(&here.path().join("learnt.afresh")).unwrap();
    let there = tempfile::tempdir().unwrap();
    let moved = there.path().join("anything");
    std::fs::copy(here.path().join("learnt.afresh"), &moved).unwrap();
    drop(here);
    assert_eq!(snapshot::open(&moved).unwrap(), "42");
}

#[test]
fn a_micro_vm_starts_every_call_from_one_state() {
    let hash = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests/vm/hash");
    if !hash.exists() {
        println!("SKIPPED: {} is not built; `cargo xtask guests` builds it", hash.display());
        return;
    }
    if let Err(error) = std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        println!("SKIPPED: /dev/kvm: {error}");
        return;
    }
    assert!(!micro_vm::call(&hash, b"abc").unwrap().is_empty());
}

#[test]
fn an_arena_is_zero_for_every_request() {
    let used = arena::requests(20).unwrap();
    assert!(used.len() == 20 && used.iter().all(|bytes| *bytes == used[0]), "{used:?}");
}

/// Sends what a monitor sends: its mapping, and the userfaultfd it registered that with.
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

#[test]
fn the_pager_serves_a_monitor() {
    const PAGES: usize = 64;
    let uffd = match Uffd::open_for_pager() {
        Ok(uffd) => uffd,
        Err(error) => {
            println!("SKIPPED: {error}");
            return;
        }
    };
    let dir = tempfile::tempdir().unwrap();
    let raw = dir.path().join("raw");
    let expected: Vec<u8> = (0..PAGES).flat_map(|page| vec![page as u8; PAGE_SIZE]).collect();
    std::fs::write(&raw, &expected).unwrap();
    let build = GuestBuild {
        kind: "raw".to_owned(),
        module: "none".to_owned(),
        engine: "none".to_owned(),
        cpu: Vec::new(),
    };
    let path = dir.path().join("store");
    let store = Store::create(&path).unwrap();
    store.save("base", &FilePages::open(&raw).unwrap(), &SaveOptions::new(build)).unwrap();
    let snapshot: Reference = format!("{}@base", path.display()).parse().unwrap();
    let socket = dir.path().join("socket");
    let (ready, is_ready) = mpsc::channel();
    std::thread::scope(|scope| {
        let (snapshot, at) = (&snapshot, &socket);
        let pager = scope.spawn(move || {
            pager::serve_one(snapshot, at, || ready.send(()).unwrap()).map_err(|e| e.to_string())
        });
        is_ready.recv().unwrap();
        let memory = Reservation::new(PAGES).unwrap();
        let all = PageRange::new(0, PAGES);
        memory.map_anonymous(all, Protection::ReadWrite).unwrap();
        uffd.register(memory.page_ptr(0), all.byte_len(), Interest::MISSING).unwrap();
        let stream = UnixStream::connect(&socket).unwrap();
        hand_over(&stream, &memory, &uffd);
        let mut seen = vec![0; PAGES * PAGE_SIZE];
        for page in (0..PAGES).rev() {
            let to = seen[page * PAGE_SIZE..][..PAGE_SIZE].as_mut_ptr();
            // SAFETY: the page lies in the reservation, which is readable and which only the kernel fills;
            // the buffer has room for it.
            unsafe { to.copy_from_nonoverlapping(memory.page_ptr(page), PAGE_SIZE) };
        }
        assert!(seen == expected);
        drop((stream, uffd, memory));
        let served = pager.join().unwrap().unwrap().unwrap();
        assert!(served.faults > 0, "{served:?}");
    });
}
