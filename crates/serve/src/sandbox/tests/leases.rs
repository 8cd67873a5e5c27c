//! A call whose sandbox may be another host's before the call ends.

use std::sync::atomic::Ordering;

use super::faulty_store::FaultyStore;
use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_call_ends_with_the_lease() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let store = FaultyStore::open(&config.dir);
    let all = open_with(&config, store.clone()).await;
    let sandbox = make(&all, options(HOUR)).await;
    log(&all, &sandbox, "00000001").await.unwrap();
    let calling = {
        let (all, sandbox) = (all.clone(), sandbox.clone());
        tokio::spawn(async move { log(&all, &sandbox, "?never").await })
    };
    until("the call does not begin", async || sandbox.life.try_lock().is_err()).await;
    // It runs by now, or is refused by the same check.
    tokio::time::sleep(Duration::from_secs(1)).await;
    store.has_lost_lease.store(true, Ordering::Relaxed);
    let ended = tokio::time::timeout(TEST_TIMEOUT, calling).await.expect("the call runs on");
    // It has run, so a client must not repeat it without a look.
    let refusal = ended.unwrap().unwrap_err();
    assert_eq!((refusal.status.as_u16(), refusal.later), (504, false));
    assert_eq!(log(&all, &sandbox, "00000002").await.unwrap_err().status.as_u16(), 503);
    // The lease is back, and the call was undone.
    store.has_lost_lease.store(false, Ordering::Relaxed);
    assert_eq!(log(&all, &sandbox, "00000003").await.unwrap(), "0000000100000003");
}
