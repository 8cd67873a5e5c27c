//! The life of sandboxes: claims, restarts of the controller, suspension, and ends.

use afresh_kube::condition;
use afresh_kube::resource::{ClaimKind, SandboxKind};
use afresh_kube::server::{
    CLUSTER_LABEL, CONTROLLER_LABEL, NAMESPACE_LABEL, NewSandbox, UID_LABEL,
};
use futures_util::StreamExt;
use jiff::{SignedDuration, Timestamp};
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::cluster::{CLUSTER, Cluster, claim, template};
use crate::process::WAIT_TIMEOUT;

#[tokio::test(flavor = "multi_thread")]
async fn an_applied_claim_gets_a_sandbox_that_runs_code_and_ends_with_it() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("applied").await;
    let _controller = space.control();
    let said = cluster.apply(&format!(
        "apiVersion: extensions.agents.x-k8s.io/v1alpha1\nkind: SandboxClaim\n\
         metadata: {{ name: demo, namespace: {} }}\n\
         spec: {{ sandboxTemplateRef: {{ name: script }} }}\n",
        space.name
    ));
    assert!(said.contains("demo serverside-applied"), "{said}");
    let ready = ["wait", "-n", &space.name, "--for=condition=Ready", "sandboxclaim/demo"];
    cluster.kubectl(&[&ready[..], &["--timeout=60s"]].concat());
    let sandbox = space.claim("demo").await.unwrap().status().sandbox;
    assert_eq!(sandbox.name.as_deref(), Some("demo"));
    let id = sandbox.access.sandbox_id.unwrap();
    let ports = sandbox.access.ports.unwrap();
    assert_eq!(ports[0].url, format!("http://8000-{id}.sandboxes.test"));
    let secret = sandbox.access.secret_name.unwrap();
    let output = space.run_code(&secret, "20 + 22").await;
    assert!(output.contains("42"), "{output}");
    let table = cluster.kubectl(&["get", "-n", &space.name, "sandboxclaims,sandboxes"]);
    assert!(table.contains("DependenciesReady") && table.contains(&id), "{table}");

    cluster.kubectl(&["delete", "-n", &space.name, "sandboxclaim/demo", "--timeout=60s"]);
    assert!(space.remotes().await.is_empty());
    space.is_gone::<SandboxKind>("demo").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_takes_the_sandbox_that_one_before_it_made_and_did_not_note() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("adopted").await;
    // The state that a controller leaves when it ends between creation and the write of the status.
    let object = space.add::<SandboxKind>("one", template()).await;
    let metadata: BTreeMap<String, String> = [
        (UID_LABEL, object.uid()),
        (NAMESPACE_LABEL, &space.name),
        (CLUSTER_LABEL, CLUSTER),
        (CONTROLLER_LABEL, &space.controller()),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into();
    let envs = BTreeMap::new();
    let time = Duration::from_secs(600);
    let new = NewSandbox {
        key: "lifecycle",
        template: "script",
        template_only: true,
        envs: &envs,
        metadata: &metadata,
        time,
    };
    let made = space.server.create(&new).await.unwrap();

    let controller = space.control();
    let found = space.sandbox_reason("one", "DependenciesReady").await;
    assert_eq!(found.status().access.sandbox_id, Some(made.id.clone()));
    let secret = space.secret_of("one").await;
    let output = space.run_code(&secret, "globalThis.seen = 41").await;
    assert!(output.contains("41"), "{output}");
    // Further starts change nothing.
    controller.stop().await;
    let _controller = space.control();
    space.add::<ClaimKind>("two", claim()).await;
    space.ready("two").await;
    let output = space.run_code(&secret, "globalThis.seen + 1").await;
    assert!(output.contains("42"), "{output}");
    let ids: Vec<_> = space.remotes().await.into_iter().map(|remote| remote.id).collect();
    assert!(ids.len() == 2 && ids.contains(&made.id), "{ids:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspended_sandbox_keeps_its_memory() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("suspended").await;
    let _controller = space.control();
    space.add::<SandboxKind>("one", template()).await;
    let id = space.sandbox_reason("one", "DependenciesReady").await.status().access.sandbox_id;
    let secret = space.secret_of("one").await;
    space.run_code(&secret, "globalThis.seen = 41").await;
    cluster.kubectl(&["scale", "-n", &space.name, "--replicas=0", "sandboxes.agents.x-k8s.io/one"]);
    let found = space.sandbox_reason("one", "SandboxSuspended").await;
    assert!(condition::is_true(&found.status().conditions, condition::SUSPENDED));
    assert!(space.remotes().await[0].is_paused());
    cluster.kubectl(&["scale", "-n", &space.name, "--replicas=1", "sandboxes.agents.x-k8s.io/one"]);
    let found = space.sandbox_reason("one", "DependenciesReady").await;
    assert_eq!(found.status().access.sandbox_id, id);
    let output = space.run_code(&secret, "globalThis.seen + 1").await;
    assert!(output.contains("42"), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_end_at_their_shutdown_time_by_their_policy() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("ended").await;
    let _controller = space.control();
    for (name, policy) in
        [("retained", "Retain"), ("deleted", "Delete"), ("foreground", "DeleteForeground")]
    {
        space.add::<ClaimKind>(name, claim()).await;
        space.ready(name).await;
        // Whole seconds, as the API requires.
        let soon = Timestamp::now() + SignedDuration::from_secs(1);
        let soon = Timestamp::from_second(soon.as_second()).unwrap().to_string();
        let lifecycle = json!({"shutdownTime": soon, "shutdownPolicy": policy});
        space.change::<ClaimKind>(name, json!({"spec": {"lifecycle": lifecycle}})).await;
    }
    space.claim_reason("retained", "ClaimExpired").await;
    assert_eq!(space.claim("retained").await.unwrap().status().sandbox.access.sandbox_id, None);
    space.is_gone::<ClaimKind>("deleted").await;
    space.is_gone::<ClaimKind>("foreground").await;
    for name in ["retained", "deleted", "foreground"] {
        space.is_gone::<SandboxKind>(name).await;
    }
    assert!(space.remotes().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_sandbox_was_ended_elsewhere_is_finished() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("finished").await;
    let _controller = space.control();
    space.add::<ClaimKind>("one", claim()).await;
    let id = space.ready("one").await.status().sandbox.access.sandbox_id.unwrap();
    space.server.kill(&id).await.unwrap();
    let message = space.claim_reason("one", "PodFailed").await;
    assert!(message.contains(&id), "{message}");
    let conditions = space.claim("one").await.unwrap().status().conditions;
    assert!(condition::is_true(&conditions, condition::FINISHED));
    assert!(space.remotes().await.is_empty(), "its memory is lost, so it is not made anew");
    let ttl = json!({"spec": {"lifecycle": {"ttlSecondsAfterFinished": 0}}});
    space.change::<ClaimKind>("one", ttl.clone()).await;
    space.claim_reason("one", "ClaimExpired").await;
    let delete = json!({"spec": {"lifecycle": {"shutdownPolicy": "Delete"}}});
    space.change::<ClaimKind>("one", delete).await;
    space.is_gone::<ClaimKind>("one").await;
}

/// Prints times, and asserts none.
#[tokio::test(flavor = "multi_thread")]
async fn times_from_creation_to_ready_are_measured() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("measured").await;
    let _controller = space.control();
    let watch = watcher(space.api::<ClaimKind>(), watcher::Config::default()).applied_objects();
    let mut watch = std::pin::pin!(watch);
    let mut times = Vec::new();
    for number in 0..21 {
        let name = format!("claim-{number}");
        let begun = Instant::now();
        space.add::<ClaimKind>(&name, claim()).await;
        let ready = async {
            while let Some(claim) = watch.next().await {
                let claim = claim.unwrap();
                let conditions = claim.status().conditions;
                if claim.name() == name && condition::is_true(&conditions, condition::READY) {
                    return;
                }
            }
        };
        tokio::time::timeout(WAIT_TIMEOUT, ready).await.unwrap();
        times.push(begun.elapsed());
    }
    // The first one waits for the lease.
    times.remove(0);
    times.sort();
    println!(
        "from creation to Ready: shortest {:?}, median {:?}, longest {:?}",
        times[0], times[10], times[19]
    );
}
