//! Controllers that lost their lease.

use std::sync::Arc;

use serde_json::json;

use crate::context::Failure;
use crate::controller::{LeaseSettings, reconcile_all, run};
use crate::health::Monitor;
use crate::mock::{World, script, wait_for};
use crate::resource::SandboxKind;
use crate::sandbox::reconcile;
use crate::server::{CLUSTER_LABEL, CONTROLLER_LABEL, NAMESPACE_LABEL, UID_LABEL};

/// Gives the lease of a context to another holder, as another controller takes it.
fn take_lease(world: &World) {
    let holder = json!({"spec": {"holderIdentity": "another"}});
    world.cluster.patch("leases", "default", "default-one", &holder);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_without_the_lease_makes_no_sandbox_and_writes_no_status() {
    let world = World::new().await;
    let context = world.context().await;
    world.add::<SandboxKind>("a", "one", script());
    let mut object = world.object::<SandboxKind>("a", "one").expect("it exists");
    take_lease(&world);
    let refused = reconcile(&mut object, &context).await;
    assert!(matches!(refused, Err(Failure::LeaseLost)), "{refused:?}");
    assert!(world.afresh.ids().is_empty());
    let object = world.object::<SandboxKind>("a", "one").expect("it exists");
    assert!(object.status().conditions.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_of_an_older_version_of_the_object_is_not_written() {
    let world = World::new().await;
    let context = world.context().await;
    world.add::<SandboxKind>("a", "one", script());
    let old = world.object::<SandboxKind>("a", "one").expect("it exists");
    world.cluster.patch("sandboxes", "a", "one", &json!({"status": {"replicas": 1}}));
    let mut status = old.status();
    status.access.sandbox_id = Some("of the former leader".to_owned());
    let failure = context.write_status(&old, &status).await.expect_err("it is older");
    assert!(!failure.is_reported(), "{failure}");
    let object = world.object::<SandboxKind>("a", "one").expect("it exists");
    assert_eq!(object.status().access.sandbox_id, None);
}

/// The worst time for a host to stop: after its look at the lease, before its request.
#[tokio::test(flavor = "multi_thread")]
async fn of_two_sandboxes_for_one_object_the_older_one_stays() {
    let world = World::new().await;
    let context = world.context().await;
    world.add::<SandboxKind>("a", "one", script());
    let mut object = world.object::<SandboxKind>("a", "one").expect("it exists");
    let uid = object.uid().to_owned();
    let labels = [
        (CLUSTER_LABEL, "cluster"),
        (CONTROLLER_LABEL, "default/one"),
        (NAMESPACE_LABEL, "a"),
        (UID_LABEL, uid.as_str()),
    ];
    // It appears between the list and the creation.
    let first = world.afresh.make_hidden_until_creation(&labels);
    reconcile(&mut object, &context).await.expect("it is reconciled");
    assert_eq!(world.afresh.ids(), std::slice::from_ref(&first));
    let object = world.object::<SandboxKind>("a", "one").expect("it exists");
    assert_eq!(object.status().access.sandbox_id, Some(first));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_controllers_at_work_leave_one_sandbox_for_each_object() {
    let world = World::new().await;
    let context = world.context().await;
    for number in 0..50 {
        world.add::<SandboxKind>(&format!("space-{}", number % 5), &format!("{number}"), script());
    }
    // Both believe that they hold the lease.
    let tasks =
        [(); 2].map(|()| tokio::spawn(reconcile_all(Arc::clone(&context), std::future::pending())));
    for number in 0..50 {
        let (namespace, name) = (format!("space-{}", number % 5), format!("{number}"));
        world.sandbox_reason(&namespace, &name, "DependenciesReady").await;
    }
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    for task in tasks {
        assert!(task.await.expect_err("it was ended").is_cancelled());
    }
    crate::sweep::sweep(&context).await.expect("a sweep");
    assert_eq!(world.afresh.ids().len(), 50);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_outlives_an_outage_of_the_api_and_a_lost_lease() {
    let world = World::new().await;
    world.cluster.set_down(true);
    world.cluster.add("namespaces", "", "kube-system", json!({}));
    let lease = LeaseSettings {
        namespace: "default".to_owned(),
        name: "default-one".to_owned(),
        identity: "one".to_owned(),
    };
    let (client, server, settings) = (world.client(), world.server(), world.settings.clone());
    let monitor = Arc::new(Monitor::default());
    let noted = Arc::clone(&monitor);
    let never = std::future::pending();
    let running = tokio::spawn(run(client, server, settings, None, lease, noted, never));
    wait_for("the first request", async || (!world.cluster.requests().is_empty()).then_some(()))
        .await;
    world.cluster.set_down(false);
    world.add::<SandboxKind>("a", "one", script());
    world.sandbox_reason("a", "one", "DependenciesReady").await;
    take_lease(&world);
    // Its holder leaves.
    let none = json!({"spec": {"holderIdentity": ""}});
    world.cluster.patch("leases", "default", "default-one", &none);
    wait_for("the lease", async || {
        let lease = world.cluster.get("leases", "default", "default-one")?;
        (lease["spec"]["holderIdentity"] == "one").then_some(())
    })
    .await;
    world.add::<SandboxKind>("a", "two", script());
    world.sandbox_reason("a", "two", "DependenciesReady").await;
    assert!(!running.is_finished());
    running.abort();
}
