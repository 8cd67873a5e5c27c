//! Two writers of one session in an object store: each of them appends turns and saves the session
//! whole. Each acknowledged save is part of the meaning of the name.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use afresh_store::remote::{Remote, RemoteError, ReplacedName, RetryPolicy};
use afresh_store::{Encoding, Journal, MemoryPages, SaveError, Snapshot, Store};
use object_store::path::Path;

use super::servers::{Kind, Server, retry};
use crate::support::objects::{Server as MemoryServer, ServerFault};
use crate::support::{memory, options, store};
use crate::turns::turn;

/// A memory with a guest state.
fn save(local: &Store, name: &str, state: Vec<u8>) -> Snapshot {
    let mut save = options();
    save.state = state;
    local.save(name, &MemoryPages(memory(&[1, 2]).0), &save).unwrap();
    local.load(name).unwrap()
}

fn push(
    remote: &Remote,
    local: &Store,
    state: Vec<u8>,
    replaced: ReplacedName<'_>,
) -> Result<Journal, RemoteError> {
    let snapshot = save(local, "whole", state);
    remote.push_turns(local, &snapshot, "a", Encoding::Raw, replaced, &mut |_| {})
}

/// Appends a turn after which the state is `now`.
fn append(journal: &mut Journal, was: &[u8], now: &[u8]) -> Result<u64, SaveError> {
    let pages = memory(&[1, 2]).0;
    journal.append(&turn((&pages, was), (&pages, now), journal.last()), None)
}

fn is_moved(error: &RemoteError) -> bool {
    matches!(error, RemoteError::Save(SaveError::Moved(_)))
}

fn in_memory(server: &Arc<MemoryServer>) -> Remote {
    let retry = RetryPolicy {
        attempts: 2,
        timeout: Duration::from_secs(120),
        pause: Duration::from_millis(1),
        outage: Duration::ZERO,
    };
    Remote::with_objects(server.clone(), Path::from("team"), retry).unwrap()
}

/// Adds numbers to the state of the session until `count` of them are acknowledged, and returns
/// these.
fn write(remote: &Remote, writer: u8, count: u8) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let local = store(dir.path());
    let mut acknowledged = Vec::new();
    for number in 0.. {
        if acknowledged.len() == usize::from(count) {
            break;
        }
        let token = writer * 100 + number % 100;
        let opened = remote.load("a").unwrap();
        let mut journal = opened.resume_turns().unwrap().unwrap();
        let mut now = opened.state().to_vec();
        if now.contains(&token) {
            continue;
        }
        now.push(token);
        let saved = if number % 3 == 2 || journal.is_nearly_full() {
            match push(remote, &local, now, ReplacedName::Snapshot(&opened)) {
                Ok(_) => true,
                Err(error) if is_moved(&error) => false,
                Err(error) => panic!("{error}"),
            }
        } else {
            match append(&mut journal, opened.state(), &now) {
                Ok(_) => true,
                Err(SaveError::Moved(_)) => false,
                Err(error) => panic!("{error}"),
            }
        };
        if saved {
            acknowledged.push(token);
        }
    }
    acknowledged
}

fn check_two_writers(remotes: [Remote; 2]) {
    let dir = tempfile::tempdir().unwrap();
    push(&remotes[0], &store(dir.path()), Vec::new(), ReplacedName::Any).unwrap();
    let acknowledged: Vec<u8> = std::thread::scope(|threads| {
        let writers = [1, 2].map(|writer| {
            let remote = &remotes[usize::from(writer) - 1];
            threads.spawn(move || write(remote, writer, 12))
        });
        writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect()
    });
    let mut found = remotes[0].load("a").unwrap().state().to_vec();
    let mut acknowledged = acknowledged;
    found.sort_unstable();
    acknowledged.sort_unstable();
    assert_eq!(found, acknowledged);
}

#[test]
fn two_writers_of_one_name_lose_no_acknowledged_save() {
    let server = MemoryServer::new();
    check_two_writers([in_memory(&server), in_memory(&server)]);
    let Some(server) = Server::start(Kind::S3) else { return };
    check_two_writers([(); 2].map(|()| server.remote(server.address, retry())));
}

#[test]
fn a_whole_save_replaces_no_turn_of_another_writer() {
    let dir = tempfile::tempdir().unwrap();
    let local = store(dir.path());
    let remote = in_memory(&MemoryServer::new());
    let mine = push(&remote, &local, vec![0], ReplacedName::Any).unwrap();
    let opened = remote.load("a").unwrap();
    let mut other = opened.resume_turns().unwrap().unwrap();
    append(&mut other, &[0], &[0, 1]).unwrap();
    for replaced in [ReplacedName::Journal(&mine), ReplacedName::Snapshot(&opened)] {
        let refused = push(&remote, &local, vec![2], replaced).unwrap_err();
        assert!(is_moved(&refused), "{refused}");
        assert_eq!(remote.load("a").unwrap().state(), [0, 1]);
    }
    // The other writer appends a turn, and replaces its own turns. The first one is refused from
    // then on.
    append(&mut other, &[0, 1], &[0, 1, 2]).unwrap();
    let mut new = push(&remote, &local, vec![3], ReplacedName::Journal(&other)).unwrap();
    assert!(matches!(append(&mut other, &[0, 1, 2], &[4]), Err(SaveError::Moved(_))));
    append(&mut new, &[3], &[3, 4]).unwrap();
    assert_eq!(remote.load("a").unwrap().state(), [3, 4]);
    // A save that replaces any meaning closes the session, too.
    let plain = save(&local, "plain", vec![5]);
    let id = remote.push(&local, &plain, "a", Encoding::Raw, &mut |_| {}).unwrap();
    assert!(matches!(append(&mut new, &[3, 4], &[6]), Err(SaveError::Moved(_))));
    assert_eq!(remote.load("a").unwrap().state(), [5]);
    // Two sessions of one snapshot: the second is refused.
    let opened = remote.load("a").unwrap();
    drop(remote.begin_turns("a", &opened, ReplacedName::Snapshot(&opened)).unwrap());
    for replaced in [ReplacedName::Snapshot(&opened), ReplacedName::Manifest(id)] {
        assert!(is_moved(&remote.begin_turns("a", &opened, replaced).unwrap_err()));
    }
}

#[test]
fn a_whole_save_that_fails_at_any_request_keeps_the_session() {
    let mut failed = 0;
    for after in 0..40 {
        let dir = tempfile::tempdir().unwrap();
        let local = store(dir.path());
        let server = MemoryServer::new();
        let remote = in_memory(&server);
        let mut mine = push(&remote, &local, vec![0], ReplacedName::Any).unwrap();
        append(&mut mine, &[0], &[0, 1]).unwrap();
        server.be(ServerFault::Reset { after, times: usize::MAX });
        let saved = push(&remote, &local, vec![0, 1, 2], ReplacedName::Journal(&mine));
        let requests = server.requests.load(Ordering::Relaxed);
        server.be(ServerFault::Nothing);
        if saved.is_ok() {
            assert!(requests <= after);
            assert_eq!(remote.load("a").unwrap().state(), [0, 1, 2]);
            break;
        }
        failed += 1;
        let opened = remote.load("a").unwrap();
        assert_eq!(opened.state(), [0, 1], "after {after} requests");
        // The journal is open, or closed: then the next save replaces it.
        let mut resumed = opened.resume_turns().unwrap().unwrap();
        let closed = resumed.is_nearly_full();
        let appended = append(&mut mine, &[0, 1], &[0, 1, 3]);
        assert_eq!(appended.is_err(), closed, "after {after} requests");
        if closed {
            assert!(mine.is_nearly_full());
            assert!(matches!(append(&mut resumed, &[0, 1], &[4]), Err(SaveError::Moved(_))));
            push(&remote, &local, vec![0, 1, 3], ReplacedName::Snapshot(&opened)).unwrap();
            let refused = push(&remote, &local, vec![5], ReplacedName::Journal(&mine)).unwrap_err();
            assert!(is_moved(&refused), "{refused}");
        }
        assert_eq!(remote.load("a").unwrap().state(), [0, 1, 3], "after {after} requests");
    }
    assert!(failed > 5, "{failed}");
}
