//! A server that fails most requests gets about one attempt for each: retries have a budget.

use std::time::{Duration, Instant};

use afresh_store::Encoding;
use afresh_store::remote::{Remote, RetryCounts, RetryPolicy};

use super::local;
use super::proxy::{Fault, Proxy};
use super::servers::{KINDS, Kind, Server, retry};

/// Retries that a full budget allows, and those that time adds.
fn allowed(start: Instant) -> u64 {
    100 + start.elapsed().as_secs() + 1
}

fn policy() -> RetryPolicy {
    RetryPolicy { pause: Duration::from_micros(100), ..retry() }
}

/// Requests until the budget is spent, at most 400; returns the last error.
fn spend(remote: &Remote) -> String {
    let errors = (0..400).map(|_| remote.tags().unwrap_err().to_string());
    let mut errors = errors.skip_while(|error| !error.contains("it was not tried again"));
    errors.next().expect("the budget is spent")
}

#[test]
fn retries_stop_when_most_requests_fail_and_return_with_successes() {
    for kind in KINDS {
        let Some(server) = Server::start(kind) else { continue };
        let proxy = Proxy::before(server.address);
        let remote = server.remote(proxy.address, policy());
        remote.tags().unwrap();
        assert_eq!(remote.retry_counts(), RetryCounts::default());
        proxy.be(Fault::Reset { after: 0 }, usize::MAX);
        let start = Instant::now();
        let error = spend(&remote);
        assert!(
            ["reset", "closed", "end of file", "error sending"].iter().any(|w| error.contains(w)),
            "{error}"
        );
        for _ in 0..100 {
            remote.tags().unwrap_err();
        }
        let counts = remote.retry_counts();
        assert!(counts.retries <= allowed(start), "{kind:?}: {counts:?}");
        assert!(counts.refused >= 100 - start.elapsed().as_secs().min(99), "{kind:?}: {counts:?}");
        // The counts of the process have those of all remotes.
        let all = RetryCounts::of_process();
        assert!(all.retries >= counts.retries && all.refused >= counts.refused);
        // A clone has the same budget, another remote its own.
        let again = remote.clone();
        again.tags().unwrap_err();
        assert_ne!(remote.retry_counts(), counts);
        let other = server.remote(proxy.address, policy());
        let error = other.tags().unwrap_err().to_string();
        assert!(!error.contains("it was not tried again"), "{error}");
        // The server is back: successes pay for the next retry.
        proxy.be(Fault::Nothing, 0);
        // A connection from before may still break, and there is no retry for it.
        let answered = (0..100).filter(|_| remote.tags().is_ok()).take(10).count();
        assert_eq!(answered, 10, "{kind:?}");
        let before = remote.retry_counts().retries;
        proxy.be(Fault::Reset { after: 0 }, 1);
        while proxy.left() > 0 {
            remote.tags().unwrap();
        }
        assert!(remote.retry_counts().retries > before, "{kind:?}");
    }
}

#[test]
fn parts_of_uploads_have_the_same_budget() {
    let Some(server) = Server::start(Kind::S3) else { return };
    let proxy = Proxy::before(server.address);
    let remote = server.remote(proxy.address, policy());
    let dir = tempfile::tempdir().unwrap();
    // Three parts.
    let (here, snapshot, _) = local(dir.path(), 1, 5000);
    // Breaks once the first part is sent.
    let push = |name: &str| {
        let broken = |_| proxy.be(Fault::Reset { after: 0 }, usize::MAX);
        let pushed = remote.push(&here, &snapshot, name, Encoding::Raw, &mut { broken });
        pushed.unwrap_err().to_string()
    };
    let error = push("a");
    assert!(!error.contains("it was not tried again"), "{error}");
    assert!(remote.retry_counts().retries > 0);
    spend(&remote);
    proxy.be(Fault::Nothing, 0);
    let (before, start) = (remote.retry_counts(), Instant::now());
    let error = push("b");
    assert!(error.contains("it was not tried again"), "{error}");
    // The requests before the upload succeeded and paid for a few.
    let retries = remote.retry_counts().retries - before.retries;
    assert!(retries <= 10 + start.elapsed().as_secs(), "{retries} retries");
    proxy.be(Fault::Nothing, 0);
    remote.push(&here, &snapshot, "a", Encoding::Raw, &mut |_| {}).unwrap();
}
