//! Processes that share images, and resets to them.

use std::os::fd::{AsRawFd, BorrowedFd};

use afresh_memory::{Slot, SlotConfig};
#[cfg(feature = "seal")]
use afresh_store::{Access, seal::SealKey};
use afresh_store::{ReplacedName, TurnBuilder, archive};
use afresh_sys::{SplitMix64, child_passes, run_isolated};

use super::*;

/// The inode of a file.
fn inode(file: BorrowedFd<'_>) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap().ino()
}

fn inode_of(image: &Image) -> u64 {
    let files = image.files().unwrap();
    let inodes: Vec<u64> = files.iter().map(|file| inode(file.file().unwrap())).collect();
    assert!(!inodes.is_empty() && inodes.iter().all(|inode| *inode == inodes[0]));
    inodes[0]
}

#[test]
fn processes_that_open_a_snapshot_map_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = save(&dir.path().join("store"), "a", 7, Encoding::Raw);
    let server = Server::start(dir.path(), BUDGET);
    let (client, reports) = client(&server.socket);
    let image = shared(&client, &snapshot);
    assert!(has_content(&image, 7));
    let inode = inode_of(&image);
    for _ in 0..3 {
        let same = child_passes(|| {
            let other = ImageClient::new(&server.socket, |_| ());
            let other = shared(&other, &snapshot);
            inode_of(&other) == inode && has_content(&other, 7)
        });
        assert!(same);
    }
    // Both are complete when they are opened.
    let memory = open(&snapshot, &client);
    assert_eq!((memory.faults(), memory.pages().is_complete()), (0, true));
    assert_eq!(inode_of(memory.pages()), inode);
    assert_eq!(reports.load(Ordering::Relaxed), 0);
    assert_eq!(server.failures(), Vec::<String>::new());
}

#[test]
fn snapshots_with_the_same_memory_share_it_in_any_encoding() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    let raw = save(&one, "a", 7, Encoding::Raw);
    let compressed = save(&two, "b", 7, Encoding::Zstd);
    let other = save(&two, "c", 8, Encoding::Zstd);
    assert_ne!(raw.id(), compressed.id());
    assert_eq!(raw.memory_digest(), compressed.memory_digest());
    assert_ne!(raw.memory_digest(), other.memory_digest());
    let server = Server::start(dir.path(), BUDGET);
    let (client, _) = client(&server.socket);
    let images = [&raw, &compressed, &other].map(|snapshot| shared(&client, snapshot));
    assert_eq!(inode_of(&images[0]), inode_of(&images[1]));
    assert_ne!(inode_of(&images[0]), inode_of(&images[2]));
    assert!(has_content(&images[1], 7) && has_content(&images[2], 8));
}

#[test]
fn slots_of_a_shared_image_reset_to_its_bytes_and_change_no_other_process() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = save(&dir.path().join("store"), "a", 7, Encoding::Raw);
    let server = Server::start(dir.path(), BUDGET);
    let (client, _) = client(&server.socket);
    let image = shared(&client, &snapshot);
    let expected = content(7);
    let mut random = SplitMix64::new(11);
    for strategy in afresh_memory::Strategy::FORCED {
        let config = SlotConfig { strategy, ..SlotConfig::default() };
        let mut slot = match Slot::new(&image, config) {
            Ok(slot) => slot,
            Err(error) => {
                println!("SKIPPED: {strategy}: {error}");
                continue;
            }
        };
        let mut bytes = vec![0; PAGES * PAGE_SIZE];
        for _ in 0..5 {
            for _ in 0..40 {
                let at = random.below(bytes.len() - 8);
                slot.write(at, &random.next_word().to_le_bytes()).unwrap();
            }
            slot.reset().unwrap();
            slot.read(0, &mut bytes).unwrap();
            assert!(bytes == expected, "{strategy}");
        }
        // Written pages are copies.
        slot.write(0, b"private").unwrap();
        assert!(has_content(&image, 7));
    }
    assert!(child_passes(|| {
        let other = ImageClient::new(&server.socket, |_| ());
        has_content(&shared(&other, &snapshot), 7)
    }));
}

#[test]
fn a_process_keeps_a_shared_image_after_the_end_of_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = save(&dir.path().join("store"), "a", 7, Encoding::Raw);
    let server = Server::start(dir.path(), BUDGET);
    let (client, reports) = client(&server.socket);
    let image = shared(&client, &snapshot);
    drop(server);
    assert!(has_content(&image, 7));
    // Without a server the process makes its own image, and reports that once.
    for _ in 0..3 {
        assert!(has_content(open(&snapshot, &client).pages(), 7));
    }
    assert_eq!(reports.load(Ordering::Relaxed), 1);
}

#[test]
fn images_that_no_process_has_make_room_for_others() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let snapshots = [1, 2, 3].map(|n| save(&store, &format!("s{n}"), n, Encoding::Raw));
    // Room for one image.
    let server = Server::start(dir.path(), 8 << 20);
    let (client, _) = client(&server.socket);
    let first = shared(&client, &snapshots[0]);
    let charged = server.server.charged();
    assert!((4 << 20..8 << 20).contains(&charged), "{charged}");
    // The first image is in use, so there is no room.
    request_failing(&client, &server, &snapshots[1]);
    assert!(server.failures()[0].contains("raise --budget"), "{:?}", server.failures());
    assert_eq!(server.server.charged(), charged);
    let probe = afresh_sys::SealedMemfd::new(afresh_sys::Memfd::new(c"probe").unwrap()).unwrap();
    if let Err(error) = probe.is_held_elsewhere() {
        return println!("SKIPPED: {error}");
    }
    drop(first);
    assert!(has_content(&shared(&client, &snapshots[2]), 3));
}

#[test]
fn an_image_that_one_request_names_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = save(&dir.path().join("store"), "a", 7, Encoding::Raw);
    let server = Server::start(dir.path(), BUDGET);
    let (client, reports) = client(&server.socket);
    // A busy host can answer late, and then the server may have the request.
    if client.fetch(&snapshot).is_ok_and(|image| image.is_none()) {
        // The request of another memory is answered after a fill would have begun.
        let other = save(&dir.path().join("store"), "b", 8, Encoding::Raw);
        assert!(has_content(&shared(&client, &other), 8));
        assert_eq!(server.added(), [other.id()]);
    }
    assert!(has_content(&shared(&client, &snapshot), 7));
    assert_eq!(reports.load(Ordering::Relaxed), 0);
}

#[test]
fn a_process_with_many_separate_files_makes_its_own_images() {
    const TEST: &str = "images::sharing::a_process_with_many_separate_files_makes_its_own_images";
    run_isolated(TEST, || {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = save(&dir.path().join("store"), "a", 7, Encoding::Raw);
        let server = Server::start(dir.path(), BUDGET);
        let (client, reports) = client(&server.socket);
        let mut images = vec![shared(&client, &snapshot)];
        while Image::has_room_for_sealed() {
            images.push(shared(&client, &snapshot));
            assert!(images.len() < 1000);
        }
        // Now the client does not even connect.
        drop(server);
        assert!(client.fetch(&snapshot).unwrap().is_none());
        assert!(has_content(open(&snapshot, &client).pages(), 7));
        assert_eq!(reports.load(Ordering::Relaxed), 0);
        // With room for a file it does.
        images.pop();
        assert!(client.fetch(&snapshot).is_err());
    });
}

/// Checks that no server shares `snapshot`, which has [`content`] of `number`.
fn is_not_shared(dir: &Path, snapshot: &Snapshot, number: u8) {
    let server = Server::start(dir, BUDGET);
    let (client, reports) = client(&server.socket);
    for _ in 0..3 {
        assert!(client.fetch(snapshot).unwrap().is_none());
    }
    assert!(has_content(open(snapshot, &client).pages(), number));
    if snapshot.memory_digest().is_none() {
        assert!(server.server.add(snapshot).unwrap_err().to_string().contains("not shared"));
    }
    assert_eq!(server.server.charged(), 0);
    assert_eq!(reports.load(Ordering::Relaxed), 0);
    assert_eq!((server.added(), server.failures()), (Vec::new(), Vec::new()));
}

#[test]
fn archives_and_sessions_with_turns_are_not_shared() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let plain = save(&root, "plain", 7, Encoding::Raw);
    assert_eq!(plain.directory(), Some(&*root));
    assert!(plain.memory_digest().is_some());

    let path = dir.path().join("archive");
    archive::export(&plain, &path, None).unwrap();
    let archived = archive::open(&path).unwrap();
    assert_eq!(archived.directory(), None);
    is_not_shared(dir.path(), &archived, 7);

    let store = Store::open(&root).unwrap();
    let mut journal = store.begin_turns("turns", &plain, ReplacedName::Any).unwrap();
    let mut turn = TurnBuilder::new(PAGES);
    let (old, new) = (content(7), content(8));
    let (old, new) = (old.as_chunks::<PAGE_SIZE>().0, new.as_chunks::<PAGE_SIZE>().0);
    for (number, (old, new)) in old.iter().zip(new).enumerate() {
        turn.page(Some((number, old)), new);
    }
    let turn = turn.finish(plain.state(), b"later", journal.last()).unwrap();
    journal.append(&turn, None).unwrap();
    let turns = store.load("turns").unwrap();
    assert_eq!(turns.memory_digest(), None);
    is_not_shared(dir.path(), &turns, 8);
}

#[cfg(feature = "seal")]
#[test]
fn sealed_snapshots_are_not_shared() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let plain = save(&root, "plain", 7, Encoding::Raw);
    let (store, key) = (Store::open(&root).unwrap(), SealKey::generate().unwrap());
    let mut request = SaveRequest::new(plain.guest().clone());
    request.options.seal = Some(key.clone());
    store.save("sealed", &MemoryPages(content(8)), &request).unwrap();
    let sealed = store.load_with("sealed", &Access::new().with_key(key)).unwrap();
    assert_eq!(sealed.memory_digest(), None);
    is_not_shared(dir.path(), &sealed, 8);
}
