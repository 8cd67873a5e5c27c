//! Hosts that do not fit a fleet are refused, and leave it as it was; sandboxes of templates that a
//! host does not have; many lists at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::NatsServer;
use super::sweep::{sandbox, saved, state};
use crate::fleet::placement_store::TakeOutcome;
use crate::fleet::routing::no_template;
use crate::fleet::{Fleet, FleetConfig, backup, collect, drain, init, lease_renewal, nats, nodes};

/// The reason why no host with this configuration joins.
async fn refusal(config: &FleetConfig) -> String {
    match Fleet::join(config).await {
        Ok(_) => panic!("it has joined"),
        Err(error) => chain(&error),
    }
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(|error| error.to_string()).collect::<Vec<_>>().join(": ")
}

#[tokio::test(flavor = "multi_thread")]
async fn buckets_of_fewer_replicas_than_configured_are_refused() {
    let Some(server) = NatsServer::start() else { return };
    let mut config = server.config();
    // No command of an operator makes buckets, of however many replicas.
    assert!(nodes(&config).await.is_err());
    assert!(drain(&config, "one").await.is_err());
    let dir = tempfile::tempdir().unwrap();
    config.store = Some(dir.path().join("store").to_string_lossy().into_owned());
    assert!(collect(&config, Duration::ZERO).await.is_err());
    assert!(backup(&config, &dir.path().join("backup")).await.is_err());
    config.store = None;
    config.replicas = 3;
    let why = refusal(&config).await;
    assert!(!why.contains("has 1 replicas"), "a command has made the bucket: {why}");
    config.replicas = 1;
    init(&config).await.unwrap();
    config.replicas = 3;
    let why = refusal(&config).await;
    let expected = "the bucket afresh-default-hosts has 1 replicas, and 3 are configured";
    assert!(why.contains(expected) && why.contains("--replicas 3"), "{why}");
    let why = chain(&init(&config).await.unwrap_err());
    assert!(why.contains(expected), "{why}");
    // The commands of operators set no number of replicas.
    assert!(nodes(&config).await.unwrap().is_empty());
    config.replicas = 1;
    Fleet::join(&config).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_with_a_lease_of_another_length_is_refused() {
    let Some(server) = NatsServer::start() else { return };
    let first = server.host().await;
    let mut config = server.config();
    for seconds in [299, 301] {
        config.lease = Duration::from_secs(seconds);
        let why = refusal(&config).await;
        let expected = format!("has a lease of 300000 ms, and {seconds}000 ms are configured");
        assert!(why.contains(&expected), "{why}");
    }
    // It has left nothing.
    assert_eq!(lease_renewal::list_lives(&first.links).await.unwrap().len(), 1);
    server.host().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_without_the_template_leaves_a_sandbox_to_one_that_has_it() {
    let Some(server) = NatsServer::start() else { return };
    let (first, without, with) = (server.host().await, server.host().await, server.host().await);
    let free = sandbox(600_000);
    let mut owned_entry = saved(&first, &free).await;
    first.change(&mut owned_entry, free.clone(), state(), true).await.unwrap();
    let entry = without.look_up(&free.id).await.unwrap().unwrap();
    let refused = without.take(&free.id, |record| Err(no_template(&record.template))).await;
    let Err(refused) = refused else { panic!("it has taken it") };
    assert!(refused.message.contains("template `script`"), "{}", refused.message);
    let left = with.look_up(&free.id).await.unwrap().unwrap();
    assert_eq!((left.owner, left.record.generation), (None, entry.record.generation));
    let taken = with.take(&free.id, |_| Ok(())).await.unwrap();
    assert!(matches!(taken, TakeOutcome::Ours(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn many_lists_at_a_time_take_few_consumers() {
    /// Lists that are read at a time, as `nats` allows.
    const MAX_LISTS: usize = 16;
    let Some(server) = NatsServer::start() else { return };
    let host = server.host().await;
    for _ in 0..50 {
        host.enter(sandbox(600_000)).await.unwrap();
    }
    let ended = Arc::new(AtomicBool::new(false));
    let watch = tokio::spawn({
        let (host, ended) = (host.clone(), ended.clone());
        async move {
            let context = async_nats::jetstream::new(host.links.client.clone());
            let mut bucket = context.get_stream("KV_afresh-default-sandboxes").await.unwrap();
            let mut most = 0;
            while !ended.load(Ordering::Relaxed) {
                most = most.max(bucket.info().await.unwrap().state.consumer_count);
            }
            most
        }
    });
    let mut lists = tokio::task::JoinSet::new();
    for _ in 0..200 {
        let links = host.clone();
        lists.spawn(async move {
            let links = &links.links;
            nats::all(&links.client, &links.sandboxes, ">", usize::MAX).await.unwrap().len()
        });
    }
    assert!(lists.join_all().await.into_iter().all(|found| found == 50));
    ended.store(true, Ordering::Relaxed);
    let most = watch.await.unwrap();
    assert!((1..=MAX_LISTS).contains(&most), "{most}");
}
