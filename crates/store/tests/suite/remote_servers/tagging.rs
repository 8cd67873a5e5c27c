//! Tags of registries that honour conditions of a write, ignore them, or misunderstand them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use afresh_store::remote::{Remote, RemoteError, ReplacedName, RetryPolicy};
use afresh_store::{Encoding, SaveError, Sha256, Snapshot, Store};

use super::local;
use super::stub::{Stub, answer};

/// How a registry treats the conditions of a write.
#[derive(Clone, Copy, PartialEq)]
enum Conditions {
    Honoured,
    Ignored,
    /// Each conditional write is refused.
    Misunderstood,
}

/// The moment at which another writer changes the tag.
#[derive(Clone, Copy, PartialEq)]
enum Intrusion {
    No,
    BeforeTheWrite,
    /// And another one before the first, which left the tag as it was.
    BeforeTheSecondWrite,
    AfterTheWrite,
}

/// A registry with one tag.
struct Tags {
    /// The target of the tag.
    now: Option<Sha256>,
    /// The id that the next write gives it.
    ours: Sha256,
    theirs: Sha256,
    intrusion: Intrusion,
    /// Reads after a write that still show the target before it.
    stale: usize,
    before: Option<Sha256>,
    /// Whether the answer to the next write is an error, although it took effect.
    loses: bool,
}

fn tag(tags: &Mutex<Tags>, conditions: Conditions, request: &str) -> Vec<u8> {
    let mut tags = tags.lock().unwrap();
    if request.starts_with("HEAD") {
        let seen = if tags.stale > 0 && tags.before.is_some() {
            tags.stale -= 1;
            tags.before
        } else {
            tags.now
        };
        return match seen {
            Some(id) => {
                let head = format!("Docker-Content-Digest: {id}\r\nETag: \"{id}\"\r\n");
                answer("200 OK", &head, b"")
            }
            None => answer("404 Not Found", "", b""),
        };
    }
    if !request.starts_with("PUT") {
        return answer("404 Not Found", "", b"");
    }
    if tags.intrusion == Intrusion::BeforeTheSecondWrite {
        // Another writer replaces the tag and puts it back.
        tags.intrusion = Intrusion::BeforeTheWrite;
        return answer("412 Precondition Failed", "", b"{}");
    }
    if tags.intrusion == Intrusion::BeforeTheWrite {
        tags.now = Some(tags.theirs);
    }
    let lower = request.to_lowercase();
    let value = |name: &str| lower.split_once(name).and_then(|(_, rest)| rest.split("\r\n").next());
    let holds = match (value("if-match: "), value("if-none-match: ")) {
        (Some(mark), _) => tags.now.is_some_and(|id| format!("\"{id}\"") == mark),
        (None, Some(_)) => tags.now.is_none(),
        (None, None) => true,
    };
    let conditional = value("if-match: ").or(value("if-none-match: ")).is_some();
    if conditions == Conditions::Misunderstood && conditional
        || conditions == Conditions::Honoured && !holds
    {
        return answer("412 Precondition Failed", "", b"{}");
    }
    tags.before = tags.now;
    tags.now = Some(tags.ours);
    if tags.intrusion == Intrusion::AfterTheWrite {
        tags.now = Some(tags.theirs);
    }
    match std::mem::take(&mut tags.loses) {
        true => answer("502 Bad Gateway", "", b""),
        false => answer("201 Created", "", b""),
    }
}

/// A push over `expected` to a registry in the state that `prepare` makes, and the target of the
/// tag afterwards.
fn push(
    (local, snapshot): (&Store, &Snapshot),
    conditions: Conditions,
    prepare: impl Fn(&mut Tags),
) -> (Result<Sha256, RemoteError>, Option<Sha256>, Sha256) {
    let (old, theirs) = (Sha256::of(b"old"), Sha256::of(b"theirs"));
    let mut state = Tags {
        now: Some(old),
        ours: snapshot.id(),
        theirs,
        intrusion: Intrusion::No,
        stale: 0,
        before: None,
        loses: false,
    };
    prepare(&mut state);
    let tags = Arc::new(Mutex::new(state));
    let shared = tags.clone();
    let stub = Stub::new(move |request| match request.split(' ').nth(1) {
        Some(path) if path.contains("/manifests/x") => tag(&shared, conditions, request),
        _ if request.starts_with("POST") => answer("202 Accepted", "Location: /upload\r\n", b""),
        _ if request.starts_with("PUT") => answer("201 Created", "", b""),
        _ => answer("404 Not Found", "", b""),
    });
    let retry =
        RetryPolicy { attempts: 3, pause: Duration::from_millis(1), ..super::servers::retry() };
    let url = format!("oci://{}/a", stub.address);
    let remote = Remote::open_with(&url, retry, &[]).unwrap();
    let replaced = ReplacedName::Manifest(old);
    let pushed = remote.push_over(local, snapshot, "x", Encoding::Raw, replaced, &mut |_| {});
    let now = tags.lock().unwrap().now;
    (pushed, now, theirs)
}

fn is_moved(pushed: &Result<Sha256, RemoteError>) -> bool {
    matches!(pushed, Err(RemoteError::Save(SaveError::Moved(_))))
}

#[test]
fn a_tag_replaces_no_other_target_where_conditions_are_honoured() {
    let dir = tempfile::tempdir().unwrap();
    let (here, snapshot, _) = local(dir.path(), 1, 30);
    let from = (&here, &snapshot);
    let (pushed, now, _) = push(from, Conditions::Honoured, |_| {});
    assert_eq!((pushed.unwrap(), now), (snapshot.id(), Some(snapshot.id())));
    // Another writer between the comparison and the write.
    let (pushed, now, theirs) =
        push(from, Conditions::Honoured, |tags| tags.intrusion = Intrusion::BeforeTheWrite);
    assert!(is_moved(&pushed), "{pushed:?}");
    assert_eq!(now, Some(theirs), "the other writer's tag stays");
    let twice = |tags: &mut Tags| tags.intrusion = Intrusion::BeforeTheSecondWrite;
    let (pushed, now, theirs) = push(from, Conditions::Honoured, twice);
    assert!(is_moved(&pushed), "{pushed:?}");
    assert_eq!(now, Some(theirs), "a second write has the condition, too");
    // The answer to the write is lost, and its repetition refused.
    let (pushed, now, _) = push(from, Conditions::Honoured, |tags| tags.loses = true);
    assert_eq!((pushed.unwrap(), now), (snapshot.id(), Some(snapshot.id())));
}

#[test]
fn a_tag_that_another_writer_replaced_is_an_error_in_any_registry() {
    let dir = tempfile::tempdir().unwrap();
    let (here, snapshot, _) = local(dir.path(), 1, 30);
    let from = (&here, &snapshot);
    for conditions in [Conditions::Honoured, Conditions::Ignored, Conditions::Misunderstood] {
        let (pushed, now, theirs) =
            push(from, conditions, |tags| tags.intrusion = Intrusion::AfterTheWrite);
        assert!(is_moved(&pushed), "{pushed:?}");
        assert_eq!(now, Some(theirs));
        let (pushed, _, _) = push(from, conditions, |tags| tags.now = Some(tags.theirs));
        assert!(is_moved(&pushed), "{pushed:?}");
        let (pushed, _, _) = push(from, conditions, |tags| tags.now = None);
        assert!(is_moved(&pushed), "{pushed:?}");
    }
    for conditions in [Conditions::Ignored, Conditions::Misunderstood] {
        let (pushed, now, _) = push(from, conditions, |_| {});
        assert_eq!((pushed.unwrap(), now), (snapshot.id(), Some(snapshot.id())));
    }
}

#[test]
fn a_tag_that_is_read_from_a_cache_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let (here, snapshot, _) = local(dir.path(), 1, 30);
    let from = (&here, &snapshot);
    let (pushed, _, _) = push(from, Conditions::Ignored, |tags| tags.stale = 2);
    assert_eq!(pushed.unwrap(), snapshot.id());
    let (pushed, _, _) = push(from, Conditions::Ignored, |tags| tags.stale = usize::MAX);
    let error = pushed.unwrap_err().to_string();
    assert!(error.contains("still shows its earlier target"), "{error}");
}
