//! Ends of sandboxes, and the number that a tenant may have.

use std::sync::atomic::Ordering;

use super::faulty_store::FaultyStore;
use super::*;
use crate::sandbox::lifecycle::saving::SaveMode;
use crate::sandbox::records::directory_store::DirectoryStore;

/// The tenants of other sandboxes. One alone does not get all places.
const OTHERS: [&str; 4] = ["a", "b", "c", "d"];
const ENTER_TIMEOUT: Duration = Duration::from_millis(10);
/// Longer than some attempts of a save take.
const RETRY_TIMEOUT: Duration = Duration::from_secs(3);

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_sandbox_does_not_wait_for_saves_of_others() {
    let dir = tempfile::tempdir().unwrap();
    let all = open(&config(&dir)).await;
    // Saves that last as long as the test have all places.
    let mut places = Vec::new();
    for queue in [&all.idle_saves, &all.pauses] {
        for other in OTHERS {
            while let Ok(place) = queue.enter(&all.accounts, &other.into(), ENTER_TIMEOUT).await {
                places.push(place);
            }
        }
    }
    assert!(places.len() >= 2);
    let paused = make(&all, CreateOptions { pause_at_end: true, ..options(Duration::ZERO) }).await;
    let ended = make(&all, options(Duration::ZERO)).await;
    all.sweep();
    until("the end waits", async || all.of(TENANT, &ended.id).is_err()).await;
    // One that must be saved waits for its place.
    assert!(!paused.lifetime().paused);
    drop(places);
    until("the pause waits", async || paused.lifetime().paused).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_sandboxes_and_killed_ones_that_still_run_count() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&dir);
    config.max_sandboxes = 2;
    let all = open(&config).await;
    let (paused, killed) = (make(&all, options(HOUR)).await, make(&all, options(HOUR)).await);
    let own = paused.clone();
    all.with(&paused, move |session| lock(&own.mark).set_mark(session, true)).await.unwrap();
    all.save(&paused, SaveMode { pause: true, ..SaveMode::default() }).await.unwrap();
    assert!(!lock(&paused.mark).is_set(), "a paused sandbox holds a state of its guest");
    let refused = async || {
        let refused = all.create(&TENANT.into(), options(HOUR)).await.err();
        refused.is_some_and(|refusal| refusal.status.as_u16() == 429)
    };
    assert!(refused().await, "a paused sandbox does not count");
    // A call has it.
    let life = killed.life.clone().lock_owned().await;
    all.kill(&killed).await.unwrap();
    assert!(all.of(TENANT, &killed.id).is_err());
    assert!(refused().await, "a killed sandbox whose call runs does not count");
    drop(life);
    until("the killed sandbox counts for ever", async || !refused().await).await;
    assert!(refused().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn live_and_locked_sandboxes_are_unsaved() {
    let dir = tempfile::tempdir().unwrap();
    let all = open(&config(&dir)).await;
    assert_eq!(all.count_unsaved(), 0);
    let (one, two) = (make(&all, options(HOUR)).await, make(&all, options(HOUR)).await);
    assert_eq!(all.count_unsaved(), 2);
    for sandbox in [&one, &two] {
        all.save(sandbox, SaveMode::default()).await.unwrap();
    }
    assert_eq!(all.count_unsaved(), 0);
    let _call = one.life.clone().lock_owned().await;
    assert_eq!(all.count_unsaved(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn forks_beyond_the_limit_make_no_session() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&dir);
    config.max_sandboxes = 3;
    let all = open(&config).await;
    let sandbox = make(&all, options(HOUR)).await;
    let refused = all.fork(&sandbox, 3, HOUR).await.err().expect("there are too many");
    assert_eq!(refused.budget.map(|excess| excess.name), Some("max-sandboxes"));
    let calls = || all.accounts.of(&TENANT.into()).totals().calls;
    assert_eq!(calls(), 0, "the sandbox was called");
    assert_eq!(all.fork(&sandbox, 2, HOUR).await.unwrap().len(), 2);
    assert_eq!(calls(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_ends_without_a_sandbox_whose_call_hangs() {
    let dir = tempfile::tempdir().unwrap();
    let all = open(&config(&dir)).await;
    let sandboxes = [make(&all, options(HOUR)).await, make(&all, options(HOUR)).await];
    let [hanging, other] = &sandboxes;
    let is_overdue = async || {
        all.find_overdue_calls(ENTER_TIMEOUT);
        all.has_overdue_calls.load(Ordering::Relaxed)
    };
    // A call holds both for ever.
    let _life = hanging.life.clone().lock_owned().await;
    let place = all.pauses.enter(&all.accounts, &TENANT.into(), HOUR).await.unwrap();
    let running = hanging.commands.hold(place);
    // It waits for a processor, which is no fault.
    assert!(!all.has_calls_past(Duration::ZERO));
    hanging.commands.begin_run();
    until("no fault", is_overdue).await;
    let saving = all.save_all_within(ENTER_TIMEOUT, ENTER_TIMEOUT);
    let complete = tokio::time::timeout(TEST_TIMEOUT, saving).await;
    assert!(!complete.expect("the server waits for ever"), "the sandbox is saved");
    assert!(is_saved(other).await);
    drop(running);
    assert!(!is_overdue().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ending_server_waits_for_a_call_within_its_time_limit() {
    let dir = tempfile::tempdir().unwrap();
    let all = open(&config(&dir)).await;
    let sandbox = make(&all, options(HOUR)).await;
    let life = sandbox.life.clone().lock_owned().await;
    sandbox.commands.begin_run();
    let ending = all.clone();
    let saving = tokio::spawn(async move { ending.save_all_within(ENTER_TIMEOUT, HOUR).await });
    // Longer than the server waits for a call that is past its limit.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    drop(life);
    assert!(saving.await.unwrap(), "the call that ended is not saved");
    assert!(is_saved(&sandbox).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hung_call_takes_no_retry_from_later_sandboxes() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let store = FaultyStore::open(&config.dir);
    let all = open_with(&config, store.clone()).await;
    make(&all, options(HOUR)).await;
    make(&all, options(HOUR)).await;
    // In the order of the saves, among those with a call.
    let sandboxes: Vec<_> = lock(&all.all).values().cloned().collect();
    let [hanging, other] = &sandboxes[..] else { panic!("there are two sandboxes") };
    let _life = hanging.life.clone().lock_owned().await;
    let life = other.life.clone().lock_owned().await;
    store.hides_update.store(true, Ordering::Relaxed);
    let ending = all.clone();
    let saving =
        tokio::spawn(async move { ending.save_all_within(RETRY_TIMEOUT, ENTER_TIMEOUT).await });
    until("nothing ends", async || all.ending.load(Ordering::Relaxed)).await;
    // After the order is known.
    tokio::time::sleep(ENTER_TIMEOUT * 10).await;
    drop(life);
    assert!(!saving.await.unwrap(), "a call that hangs is saved");
    assert!(is_saved(other).await, "its save is not tried again");
    assert!(!store.hides_update.load(Ordering::Relaxed));
}

/// A server that dies within the call must not have the sandbox again.
#[tokio::test(flavor = "multi_thread")]
async fn a_kill_within_a_call_is_recorded_before_it_is_acknowledged() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let all = open(&config).await;
    let sandbox = make(&all, options(HOUR)).await;
    all.save(&sandbox, SaveMode { pause: true, ..SaveMode::default() }).await.unwrap();
    all.resume(&sandbox, Some(HOUR)).await.unwrap();
    let records = || DirectoryStore::open(&config.dir).unwrap().records(&config.dir).unwrap();
    assert_eq!(records().len(), 1);
    // A call has it.
    let life = sandbox.life.clone().lock_owned().await;
    all.kill(&sandbox).await.unwrap();
    assert!(records().is_empty(), "the record is still there");
    // A save that had begun before writes none.
    let late = all.ledger.update(&*sandbox, sandbox.record(), None, false).await;
    assert_eq!(late.unwrap_err().status.as_u16(), 404);
    assert!(records().is_empty(), "a late save brings the record back");
    drop(life);
    until("its state stays", async || state_names(dir.path()).is_empty()).await;
}
