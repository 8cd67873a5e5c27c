//! Specifications: fields that are not served, variables, templates and pools.

use afresh_kube::resource::{ClaimKind, PoolKind, SandboxKind, TemplateKind};
use serde_json::json;

use crate::cluster::{Cluster, claim, template};
use crate::process::wait_for;

#[tokio::test(flavor = "multi_thread")]
async fn a_field_that_is_not_served_is_named_until_it_is_removed() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("unsupported").await;
    let _controller = space.control();
    let mut spec = template();
    spec["podTemplate"]["spec"]["hostNetwork"] = true.into();
    spec["networkPolicy"] = json!({"egress": [{}]});
    space.add::<TemplateKind>("other", spec).await;
    space.add::<ClaimKind>("one", json!({"sandboxTemplateRef": {"name": "other"}})).await;
    let message = space.claim_reason("one", "UnsupportedField").await;
    assert!(message.contains("spec.podTemplate.spec.hostNetwork"), "{message}");
    assert!(message.contains("spec.networkPolicy is not supported: `net` of"), "{message}");
    let removed =
        json!({"spec": {"networkPolicy": null, "podTemplate": {"spec": {"hostNetwork": null}}}});
    space.change::<TemplateKind>("other", removed).await;
    space.ready("one").await;
    // A change that would need another sandbox.
    let other = json!({"spec": {"sandboxTemplateRef": {"name": "script"}}});
    space.change::<ClaimKind>("one", other).await;
    let message = space.claim_reason("one", "SpecChanged").await;
    assert!(message.contains("no effect"), "{message}");
    let before = json!({"spec": {"sandboxTemplateRef": {"name": "other"}}});
    space.change::<ClaimKind>("one", before).await;
    space.ready("one").await;
    let labels = json!({"spec": {"podTemplate": {"metadata": {"labels": {"a": "b"}}}}});
    space.change::<SandboxKind>("one", labels).await;
    space.sandbox_reason("one", "SpecChanged").await;
    // On the claim itself.
    let mut spec = claim();
    spec["additionalPodMetadata"] = json!({"annotations": {"a": "b"}});
    space.add::<ClaimKind>("two", spec).await;
    let message = space.claim_reason("two", "UnsupportedField").await;
    assert!(message.contains("spec.additionalPodMetadata.annotations"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn variables_and_labels_of_a_claim_reach_its_sandbox() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("variables").await;
    let _controller = space.control();
    let mut spec = claim();
    spec["env"] = json!([{"name": "STAGE", "value": "test"}]);
    spec["additionalPodMetadata"] = json!({"labels": {"team": "a"}});
    space.add::<ClaimKind>("one", spec).await;
    let message = space.claim_reason("one", "EnvVarsInjectionRejected").await;
    assert!(message.contains("envVarsInjectionPolicy"), "{message}");
    let allowed = json!({"spec": {"envVarsInjectionPolicy": "Allowed"}});
    space.change::<TemplateKind>("script", allowed).await;
    // A module has no environment, which the server reports by name.
    let message = space.claim_reason("one", "SandboxRejected").await;
    assert!(message.contains("400"), "{message}");
    let env = json!({"spec": {"env": null}});
    space.change::<ClaimKind>("one", env).await;
    space.delete::<ClaimKind>("one").await;
    space.is_gone::<ClaimKind>("one").await;
    let mut spec = claim();
    spec["additionalPodMetadata"] = json!({"labels": {"team": "a"}});
    space.add::<ClaimKind>("one", spec).await;
    space.ready("one").await;
    assert_eq!(space.remotes().await[0].metadata["team"], "a");
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_wait_for_their_template_and_their_pool() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("pools").await;
    let _controller = space.control();
    let mut spec = json!({"sandboxTemplateRef": {"name": "late"}, "warmpool": "fast"});
    space.add::<ClaimKind>("one", spec.clone()).await;
    space.claim_reason("one", "TemplateNotFound").await;
    space.add::<TemplateKind>("late", template()).await;
    space.claim_reason("one", "WarmPoolNotFound").await;
    spec["replicas"] = 3.into();
    let pool = json!({"sandboxTemplateRef": {"name": "late"}, "replicas": 3});
    space.add::<PoolKind>("fast", pool).await;
    space.ready("one").await;
    let ready = wait_for("the pool", async || {
        let pool = space.api::<PoolKind>().get("fast").await.unwrap().status();
        (pool.ready_replicas == 3).then_some(pool)
    })
    .await;
    assert_eq!(ready.conditions[0].reason, "TemplateIsWarm");
    assert_eq!(space.remotes().await.len(), 1, "a pool makes no sandbox");
    // A template that the afresh server does not have.
    let image = json!([{"name": "main", "image": "absent"}]);
    let image = json!({"spec": {"podTemplate": {"spec": {"containers": image}}}});
    space.change::<TemplateKind>("late", image).await;
    wait_for("the pool without its template", async || {
        let pool = space.api::<PoolKind>().get("fast").await.unwrap().status();
        (pool.ready_replicas == 0).then_some(())
    })
    .await;
    space.add::<ClaimKind>("two", json!({"sandboxTemplateRef": {"name": "late"}})).await;
    let message = space.claim_reason("two", "TemplateNotFound").await;
    assert!(message.contains("`absent`"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn templates_of_other_runtimes_are_left_to_other_controllers_on_request() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("runtimes").await;
    let _controller = space.control_with(|settings| settings.ignore_other_runtimes = true);
    let pod = json!({"runtimeClassName": "gvisor", "containers": [{"name": "a", "image": "b"}]});
    space.add::<TemplateKind>("other", json!({"podTemplate": {"spec": pod}})).await;
    // Claims whose time is over.
    let lifecycle = json!({"shutdownTime": "2026-01-01T00:00:00Z", "shutdownPolicy": "Delete"});
    let mut spec = json!({"sandboxTemplateRef": {"name": "other"}});
    spec["lifecycle"] = lifecycle.clone();
    space.add::<ClaimKind>("other", spec).await;
    let mut spec = claim();
    spec["lifecycle"] = lifecycle;
    space.add::<ClaimKind>("over", spec).await;
    space.is_gone::<ClaimKind>("over").await;
    space.add::<ClaimKind>("own", claim()).await;
    space.ready("own").await;
    let other = space.claim("other").await.unwrap();
    assert!(other.status().conditions.is_empty());
    assert!(other.metadata.finalizers.is_none());
}
