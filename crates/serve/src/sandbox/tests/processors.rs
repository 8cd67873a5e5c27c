//! Calls that wait for a processor, and work that waits for the network.

use std::sync::atomic::{AtomicBool, Ordering};

use super::faulty_store::FaultyStore;
use super::*;
use crate::sandbox::tenants::cpu_scheduler::CpuScheduler;

/// A server with one processor for calls.
async fn open_narrow(config: &SandboxConfig, store: Arc<FaultyStore>) -> Arc<Sandboxes> {
    let mut all = open_with(config, store).await;
    let only = Arc::get_mut(&mut all).expect("nothing else has it yet");
    only.processors = CpuScheduler::busy(1);
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_whose_client_leaves_before_it_begins_never_begins() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let all = open_narrow(&config, FaultyStore::open(&config.dir)).await;
    let sandbox = make(&all, options(HOUR)).await;
    log(&all, &sandbox, "00000001").await.unwrap();
    let processors = all.processors.clone();
    // Another call of the tenant computes, and makes no decision.
    let turn = processors.enter(&TENANT.into(), 1, || true).unwrap();
    let ran = Arc::new(AtomicBool::new(false));
    let calling = {
        let (all, sandbox, ran) = (all.clone(), sandbox.clone(), ran.clone());
        tokio::spawn(async move {
            let work = move |_: &mut afresh::Session| {
                ran.store(true, Ordering::Relaxed);
                Ok(())
            };
            all.with(&sandbox, work).await
        })
    };
    until("the call does not wait", async || processors.count() == (1, 1)).await;
    calling.abort();
    assert!(calling.await.unwrap_err().is_cancelled());
    drop(turn);
    // Its turn comes after it, if it comes at all.
    assert_eq!(log(&all, &sandbox, "00000002").await.unwrap(), "0000000100000002");
    assert!(!ran.load(Ordering::Relaxed), "the call began without its client");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restore_that_waits_for_its_state_takes_no_processor() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let store = FaultyStore::open(&config.dir);
    let all = open_narrow(&config, store.clone()).await;
    let sandbox = make(&all, options(HOUR)).await;
    log(&all, &sandbox, "00000001").await.unwrap();
    all.pause(&sandbox, true).await.unwrap();
    all.resume(&sandbox, Some(HOUR)).await.unwrap();
    let (processors, fetched) = (all.processors.clone(), Arc::new(AtomicBool::new(false)));
    let seen = fetched.clone();
    *lock(&store.on_fetch) = Some(Box::new(move || {
        assert_eq!(processors.count(), (0, 0));
        seen.store(true, Ordering::Relaxed);
    }));
    assert_eq!(log(&all, &sandbox, "00000002").await.unwrap(), "0000000100000002");
    assert!(fetched.load(Ordering::Relaxed));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_timeout_beyond_the_clock_limits_no_call() {
    let dir = tempfile::tempdir().unwrap();
    let config =
        SandboxConfig { call_timeout: Duration::MAX, timeout: Duration::MAX, ..config(&dir) };
    let all = open_narrow(&config, FaultyStore::open(&config.dir)).await;
    let sandbox = make(&all, options(Duration::MAX)).await;
    all.with(&sandbox, |_| Ok(())).await.unwrap();
    all.pause(&sandbox, true).await.unwrap();
    all.resume(&sandbox, Some(Duration::MAX)).await.unwrap();
    all.with(&sandbox, |_| Ok(())).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_time_of_a_fetch_is_no_wait_for_a_processor() {
    const LIMIT: Duration = Duration::from_secs(3);
    let dir = tempfile::tempdir().unwrap();
    let config = SandboxConfig { call_timeout: LIMIT, ..config(&dir) };
    let store = FaultyStore::open(&config.dir);
    let all = open_narrow(&config, store.clone()).await;
    let sandbox = make(&all, options(HOUR)).await;
    all.with(&sandbox, |_| Ok(())).await.unwrap();
    all.pause(&sandbox, true).await.unwrap();
    all.resume(&sandbox, Some(HOUR)).await.unwrap();
    let (processors, fetched) = (all.processors.clone(), Arc::new(AtomicBool::new(false)));
    let seen = fetched.clone();
    *lock(&store.on_fetch) = Some(Box::new(move || {
        let (processors, (taken, taking)) = (processors.clone(), std::sync::mpsc::channel());
        std::thread::spawn(move || {
            let turn = processors.enter(&TENANT.into(), 1, || true).unwrap();
            taken.send(()).unwrap();
            while processors.count() != (1, 1) {
                std::thread::yield_now();
            }
            // Longer than the interval in which the call checks its deadline.
            std::thread::sleep(Duration::from_millis(200));
            drop(turn);
        });
        taking.recv().unwrap();
        std::thread::sleep(LIMIT);
        seen.store(true, Ordering::Relaxed);
    }));
    all.with(&sandbox, |_| Ok(())).await.unwrap();
    assert!(fetched.load(Ordering::Relaxed));
}

#[cfg(linux_guests)]
#[tokio::test(flavor = "multi_thread")]
async fn connections_of_a_call_count_for_its_tenant() {
    use afresh::linux::ConnectionOwner;

    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let all = open_narrow(&config, FaultyStore::open(&config.dir)).await;
    let sandbox = make(&all, options(HOUR)).await;
    let owner = all.with(&sandbox, |_| Ok(ConnectionOwner::present())).await.unwrap();
    assert_eq!(owner, ConnectionOwner::new(TENANT));
}
