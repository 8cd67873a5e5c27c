//! Faults: a lost server, a second controller, objects and sandboxes without each other.

use afresh_kube::resource::{ClaimKind, SandboxKind};
use std::time::Duration;

use crate::cluster::{Cluster, claim, template};
use crate::process::wait_for;

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_server_is_a_condition_until_it_is_back() {
    let Some(cluster) = Cluster::shared().await else { return };
    let mut afresh = cluster.own_afresh().await;
    let mut space = cluster.space("lost").await;
    (space.server, space.url) = (afresh.client(), afresh.url());
    let _controller = space.control();
    space.add::<ClaimKind>("before", claim()).await;
    space.ready("before").await;
    afresh.stop();
    space.add::<ClaimKind>("during", claim()).await;
    let message = space.claim_reason("during", "ServerUnavailable").await;
    assert!(message.contains("does not answer"), "{message}");
    assert!(!message.contains("127.0.0.1"), "users read it: {message}");
    // The resync notices it for the other one.
    space.claim_reason("before", "ServerUnavailable").await;
    // An object waits for the end of its sandbox.
    space.delete::<ClaimKind>("before").await;
    let deleted = space.sandbox_reason("before", "ServerUnavailable").await;
    assert!(deleted.metadata.finalizers.is_some());
    afresh.start_again().await;
    space.ready("during").await;
    space.is_gone::<ClaimKind>("before").await;
    assert_eq!(space.remotes().await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_controller_waits_for_the_lease_of_the_first() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("lease").await;
    let first = space.control();
    space.add::<ClaimKind>("one", claim()).await;
    space.ready("one").await;
    let second = space.control();
    let holder = async || {
        let path = "jsonpath={.spec.holderIdentity}";
        cluster.kubectl(&["get", "-n", &space.name, "lease", "afresh-kube", "-o", path])
    };
    let held_by_first = holder().await;
    assert!(!second.has_ended());
    first.stop().await;
    wait_for("the second controller", async || {
        let holder = holder().await;
        (!holder.is_empty() && holder != held_by_first).then_some(())
    })
    .await;
    space.add::<ClaimKind>("two", claim()).await;
    space.ready("two").await;
    assert_eq!(space.remotes().await.len(), 2);
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sandboxes_whose_object_is_gone_are_ended() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("orphans").await;
    let controller = space.control();
    space.add::<SandboxKind>("kept", template()).await;
    space.add::<SandboxKind>("removed", template()).await;
    let kept = space.sandbox_reason("kept", "DependenciesReady").await;
    space.sandbox_reason("removed", "DependenciesReady").await;
    controller.stop().await;
    // Somebody removes an object without its finalizer.
    let none = serde_json::json!({"metadata": {"finalizers": null}});
    space.change::<SandboxKind>("removed", none).await;
    space.delete::<SandboxKind>("removed").await;
    assert_eq!(space.remotes().await.len(), 2);
    let _controller = space.control_with(|settings| settings.orphan_age = Duration::ZERO);
    let left = wait_for("the sweep", async || {
        let left = space.remotes().await;
        (left.len() == 1).then_some(left)
    })
    .await;
    assert_eq!(Some(&left[0].id), kept.status().access.sandbox_id.as_ref());
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_of_others_with_the_same_name_are_left_alone() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("foreign").await;
    let foreign = space.add::<SandboxKind>("two", template()).await;
    let _controller = space.control();
    space.add::<ClaimKind>("two", claim()).await;
    space.claim_reason("two", "SandboxNameConflict").await;
    space.delete::<ClaimKind>("two").await;
    space.is_gone::<ClaimKind>("two").await;
    let left = space.sandbox_reason("two", "DependenciesReady").await;
    assert_eq!(left.uid(), foreign.uid());
}
