//! Metrics and readiness of a controller at work, and the tenant of its lease.

use std::sync::Arc;

use serde_json::json;
use tokio::task::JoinHandle;

use crate::condition::{self, FINISHED};
use crate::context::Context;
use crate::controller::{LeaseSettings, run};
use crate::health::Monitor;
use crate::mock::{Faults, World, script, wait_for};
use crate::resource::{ClaimKind, SandboxKind, TemplateKind};
use crate::server::{CLUSTER_LABEL, CONTROLLER_LABEL, NAMESPACE_LABEL, UID_LABEL};
use crate::tenant::TENANT_ANNOTATION;

/// Whether the metrics have a line.
fn has(monitor: &Monitor, line: &str) -> bool {
    monitor.text().lines().any(|found| found == line)
}

/// Renews the lease of a controller, also after a test has written it meanwhile.
fn renew(context: &Arc<Context>) -> JoinHandle<()> {
    let lease = context.lease.clone();
    tokio::spawn(async move {
        loop {
            lease.hold().await;
            lease.acquire().await.expect("leases are allowed");
        }
    })
}

async fn wait_for_line(context: &Context, line: &str) {
    wait_for(line, async || has(&context.monitor, line).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_life_of_a_claim_is_in_the_metrics() {
    let world = World::new().await;
    let context = world.context().await;
    let _controller = World::run(&context);
    world.add::<TemplateKind>("a", "script", script());
    world.add::<ClaimKind>("a", "one", json!({"sandboxTemplateRef": {"name": "script"}}));
    world.sandbox_reason("a", "one", "DependenciesReady").await;
    for kind in ["SandboxClaim", "Sandbox"] {
        wait_for_line(&context, &format!("afresh_kube_ready_seconds_count{{kind=\"{kind}\"}} 1"))
            .await;
    }
    // Checks that follow add no time.
    wait_for("further checks", async || {
        let checks =
            world.afresh.requests().iter().filter(|it| it.starts_with("GET /sand")).count();
        (checks > 3).then_some(())
    })
    .await;
    assert!(has(&context.monitor, "afresh_kube_ready_seconds_count{kind=\"Sandbox\"} 1"));
    wait_for_line(&context, "afresh_kube_sandboxes_total{event=\"made\"} 1").await;
    world.cluster.delete("sandboxclaims", "a", "one");
    wait_for_line(&context, "afresh_kube_sandboxes_total{event=\"ended\"} 1").await;
    let failed = "afresh_kube_reconciles_total{kind=\"Sandbox\",result=\"failure\"} 0";
    assert!(has(&context.monitor, failed), "{}", context.monitor.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_of_the_server_are_counted_until_they_end() {
    let world = World::new().await;
    let context = world.context().await;
    let _controller = World::run(&context);
    world.add::<SandboxKind>("a", "one", script());
    world.sandbox_reason("a", "one", "DependenciesReady").await;
    world.afresh.fail(Faults { proxy: true, ..Faults::default() });
    world.sandbox_reason("a", "one", "ServerUnavailable").await;
    wait_for_line(&context, "afresh_kube_failing 1").await;
    assert!(!has(&context.monitor, "afresh_kube_errors_total{source=\"server\"} 0"));
    assert!(has(&context.monitor, "afresh_kube_errors_total{source=\"kubernetes\"} 0"));
    world.afresh.fail(Faults::default());
    wait_for_line(&context, "afresh_kube_failing 0").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_no_status_names_is_adopted_and_a_lost_one_counted() {
    let world = World::new().await;
    let context = world.context().await;
    world.add::<SandboxKind>("a", "one", script());
    let object = world.object::<SandboxKind>("a", "one").expect("it exists");
    let labels = [
        (CLUSTER_LABEL, "cluster"),
        (CONTROLLER_LABEL, "default/one"),
        (NAMESPACE_LABEL, "a"),
        (UID_LABEL, object.uid()),
    ];
    let id = world.afresh.make(&labels);
    let _controller = World::run(&context);
    world.sandbox_reason("a", "one", "DependenciesReady").await;
    assert!(has(&context.monitor, "afresh_kube_sandboxes_total{event=\"adopted\"} 1"));
    assert!(has(&context.monitor, "afresh_kube_sandboxes_total{event=\"made\"} 0"));
    world.afresh.remove(&id);
    world.sandbox_reason("a", "one", "PodFailed").await;
    assert!(has(&context.monitor, "afresh_kube_sandboxes_total{event=\"lost\"} 1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_another_tenant_than_that_of_the_lease_finishes_not_even_one_object() {
    let world = World::new().await;
    let context = world.context().await;
    let renewals = renew(&context);
    let running = World::run(&context);
    world.add::<SandboxKind>("a", "one", script());
    world.sandbox_reason("a", "one", "DependenciesReady").await;
    let noted = async |tenant: Option<&str>| {
        wait_for("the tenant in the lease", async || {
            let lease = world.cluster.get("leases", "default", "default-one")?;
            let found = lease["metadata"]["annotations"][TENANT_ANNOTATION].as_str();
            (found == tenant).then_some(())
        })
        .await;
    };
    noted(Some("acme")).await;
    let of_another =
        Faults { forgetful: true, empty: true, tenant: Some("other"), ..Faults::default() };
    world.afresh.fail(of_another.clone());
    let refused = async || {
        wait_for("the refusal to finish", async || {
            let found = world.object::<SandboxKind>("a", "one")?;
            let conditions = found.status().conditions;
            assert!(!condition::is_true(&conditions, FINISHED), "{conditions:?}");
            let ready = condition::find(&conditions, condition::READY)?;
            ready.message.contains("is of the tenant `other`").then_some(())
        })
        .await;
    };
    refused().await;
    // Also by a controller that starts with that key.
    drop(running);
    renewals.abort();
    let none = json!({"spec": {"holderIdentity": ""}});
    world.cluster.patch("leases", "default", "default-one", &none);
    let context = world.context_of("two", world.settings.clone()).await;
    let renewals = renew(&context);
    let _controller = World::run(&context);
    world.afresh.fail(Faults::default());
    world.sandbox_reason("a", "one", "DependenciesReady").await;
    world.afresh.fail(of_another);
    refused().await;
    // Without the annotation the next tenant is accepted.
    let removed = json!({"metadata": {"annotations": {TENANT_ANNOTATION: null}}});
    world.cluster.patch("leases", "default", "default-one", &removed);
    world.sandbox_reason("a", "one", "PodFailed").await;
    renewals.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_is_ready_while_it_reaches_the_api_and_the_server() {
    let world = World::new().await;
    world.cluster.set_down(true);
    let start = |identity: &str| {
        let lease = LeaseSettings {
            namespace: "default".to_owned(),
            name: "default-one".to_owned(),
            identity: identity.to_owned(),
        };
        let monitor = Arc::new(Monitor::default());
        let (client, server, settings) = (world.client(), world.server(), world.settings.clone());
        let (cluster, never) = (Some("cluster".to_owned()), std::future::pending());
        let running = run(client, server, settings, cluster, lease, monitor.clone(), never);
        (tokio::spawn(running), monitor)
    };
    let (first, monitor) = start("one");
    let faults = |monitor: &Monitor| {
        let checks = monitor.checks().into_iter().filter(|(_, fault)| fault.is_some());
        checks.map(|(check, _)| check).collect::<Vec<_>>()
    };
    wait_for("the probe of the server", async || (faults(&monitor) == ["api"]).then_some(())).await;
    assert!(!monitor.holds_lease() && monitor.dead_loops().is_empty());
    world.cluster.set_down(false);
    wait_for("the lease", async || monitor.holds_lease().then_some(())).await;
    wait_for("readiness", async || faults(&monitor).is_empty().then_some(())).await;
    // One that stands by is ready too.
    let (second, standby) = start("two");
    wait_for("readiness", async || faults(&standby).is_empty().then_some(())).await;
    assert!(!standby.holds_lease() && has(&standby, "afresh_kube_lease_held 0"));
    assert!(has(&monitor, "afresh_kube_lease_held 1"));
    first.abort();
    second.abort();
}
