//! Families of sandboxes, and connections that wait.

use super::*;

fn sandbox(id: &str) -> Sandbox {
    let now = Instant::now();
    let times = Lifetime { ends: now, used: now, paused: false, pause_at_end: false };
    let (of, settings) = (("t".into(), "x".to_owned()), SandboxSettings::default());
    Sandbox::new(id.to_owned(), String::new(), of, settings, Residency::Saved, times)
}

#[cfg(linux_guests)]
#[test]
fn connections_that_wait_leave_room_for_calls() {
    let sandbox = sandbox("a");
    let wait = |kind| sandbox.wait(kind).ok();
    let connections: Vec<_> =
        (0..MAX_WAITING_CALLS).filter_map(|_| wait(Operation::Connection)).collect();
    assert_eq!(connections.len(), MAX_WAITING_CONNECTIONS);
    let calls: Vec<_> = (0..MAX_WAITING_CALLS).filter_map(|_| wait(Operation::Call)).collect();
    assert_eq!(calls.len(), MAX_WAITING_CALLS - MAX_WAITING_CONNECTIONS);
    assert!(wait(Operation::Slice).is_none());
    drop(connections);
    assert!(wait(Operation::Connection).is_some());
}

#[test]
fn a_family_is_that_of_those_that_live() {
    let source = sandbox("a");
    assert!(!source.is_branched());
    // The session is forked, and the forks are refused.
    let fork_group = source.fork_group();
    assert!(source.is_branched());
    let forks = [sandbox("b"), sandbox("c")];
    forks.iter().for_each(|fork| fork.join(&fork_group));
    drop(fork_group);
    assert!(source.is_branched() && forks[0].is_branched());
    drop(forks);
    assert!(!source.is_branched());
    let fork = sandbox("d");
    fork.join(&source.fork_group());
    source.has_checkpoints.store(true, Ordering::Relaxed);
    source.leave_fork_group();
    assert!(!source.is_branched() && !fork.is_branched());
}
