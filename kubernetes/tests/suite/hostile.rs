//! Users who may write objects and their statuses, and nothing else.

use afresh_kube::condition;
use afresh_kube::resource::{ClaimKind, SandboxKind, TemplateKind};
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::cluster::{Cluster, KEY, Space, claim, template};
use crate::process::wait_for;

/// An object of `agents.x-k8s.io` or its extensions, as JSON.
fn object(space: &Space, kind: &str, version: &str, name: &str, spec: &Value) -> String {
    let group = if kind == "Sandbox" { "agents" } else { "extensions.agents" };
    json!({
        "apiVersion": format!("{group}.x-k8s.io/{version}"), "kind": kind,
        "metadata": {"name": name, "namespace": space.name}, "spec": spec,
    })
    .to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn deep_objects_stop_no_other() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("deep").await;
    let _controller = space.control();
    let deep = (0..200).fold(json!("end"), |within, _| json!({"a": within}));
    let mut spec = template();
    spec["podTemplate"]["spec"]["affinity"] = deep;
    cluster.apply(&object(&space, "Sandbox", "v1beta1", "deep", &spec));
    cluster.apply(&object(&space, "SandboxTemplate", "v1beta1", "deep", &spec));
    let of_deep = json!({"sandboxTemplateRef": {"name": "deep"}});
    cluster.apply(&object(&space, "SandboxClaim", "v1beta1", "of-deep", &of_deep));
    let found = space.sandbox_reason("deep", "UnsupportedField").await;
    let conditions = found.status().conditions;
    let ready = condition::find(&conditions, condition::READY).unwrap();
    assert!(ready.message.contains("over 32 levels"), "{}", ready.message);
    let message = space.claim_reason("of-deep", "UnsupportedField").await;
    assert!(message.contains("over 32 levels"), "{message}");
    space.add::<ClaimKind>("good", claim()).await;
    space.ready("good").await;
    space.delete::<SandboxKind>("deep").await;
    space.is_gone::<SandboxKind>("deep").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forged_status_is_corrected_and_ends_no_sandbox_of_others() {
    let Some(cluster) = Cluster::shared().await else { return };
    let (victims, space) = (cluster.space("victims").await, cluster.space("forgers").await);
    let _controllers = [victims.control(), space.control()];
    victims.add::<SandboxKind>("one", template()).await;
    let victim = victims.sandbox_reason("one", "DependenciesReady").await;
    let victim = victim.status().access.sandbox_id.unwrap();
    space.add::<SandboxKind>("two", template()).await;
    let own = space.sandbox_reason("two", "DependenciesReady").await.status().access.sandbox_id;
    let forge = async || {
        let status = Patch::Merge(json!({"status": {"sandboxID": victim}}));
        let api = space.api::<SandboxKind>();
        api.patch_status("two", &PatchParams::default(), &status).await.unwrap();
    };
    forge().await;
    wait_for("the right status", async || {
        let status = space.api::<SandboxKind>().get("two").await.unwrap().status();
        (status.access.sandbox_id == own).then_some(())
    })
    .await;
    forge().await;
    space.delete::<SandboxKind>("two").await;
    space.is_gone::<SandboxKind>("two").await;
    assert!(space.remotes().await.is_empty());
    assert_eq!(victims.remotes().await[0].id, victim);
}

/// E2B has names for the first template, and a snapshot may have one of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_with_the_name_of_a_template_gives_its_memory_to_no_object() {
    let Some(cluster) = Cluster::shared().await else { return };
    let afresh = cluster.own_afresh().await;
    let mut space = cluster.space("snapshots").await;
    (space.server, space.url) = (afresh.client(), afresh.url());
    let _controller = space.control();
    let with_image = |image: &str| {
        let mut spec = template();
        spec["podTemplate"]["spec"]["containers"][0]["image"] = image.into();
        spec
    };
    space.add::<SandboxKind>("before", with_image("base")).await;
    let before = space.sandbox_reason("before", "DependenciesReady").await;
    let id = before.status().access.sandbox_id.unwrap();
    let secret = space.secret_of("before").await;
    let output = space.run_code(&secret, "globalThis.secret = 41").await;
    assert!(output.contains("41"), "{output}");
    let url = afresh.url().join(&format!("sandboxes/{id}/snapshots")).unwrap();
    let named = json!({"name": "base"}).to_string();
    let request = reqwest::Client::new().post(url).header("X-API-Key", KEY);
    let answer = request.header("Content-Type", "application/json").body(named).send().await;
    let status = answer.unwrap().status();
    assert!(status.is_success(), "{status}");
    for (name, image) in [("after", "base"), ("other", "absent"), ("parent", "..")] {
        space.add::<SandboxKind>(name, with_image(image)).await;
        space.sandbox_reason(name, "TemplateNotFound").await;
    }
    space.add::<SandboxKind>("script", with_image("script")).await;
    space.sandbox_reason("script", "DependenciesReady").await;
    assert_eq!(space.remotes().await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_definitions_limit_what_an_object_has() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("limits").await;
    let variable = |name: &str, value: String| json!({"name": name, "value": value});
    let many: Vec<_> = (0..257).map(|n| variable(&format!("V{n}"), String::new())).collect();
    for (field, value, wanted) in [
        ("env", json!(many), "at most 256"),
        ("env", json!([variable("A", "a".repeat(40_000))]), "32768"),
        ("warmpool", json!("a".repeat(300)), "253"),
        ("additionalPodMetadata", json!({"labels": {"a": "b".repeat(300)}}), "256"),
        ("unknown", json!(1), "unknown"),
    ] {
        let mut spec = claim();
        spec[field] = value;
        let text = object(&space, "SandboxClaim", "v1beta1", "refused", &spec);
        let message = cluster.try_apply(&text).unwrap_err();
        assert!(message.contains(wanted), "{field}: {message}");
    }
    let text = object(&space, "SandboxClaim", "v1beta1", "refused", &json!({}));
    let message = cluster.try_apply(&text).unwrap_err();
    assert!(message.contains("spec.warmPoolRef must name"), "{message}");
    let mut spec = template();
    spec["replicas"] = 0.into();
    spec["operatingMode"] = "Running".into();
    let text = object(&space, "Sandbox", "v1beta1", "refused", &spec);
    let message = cluster.try_apply(&text).unwrap_err();
    assert!(message.contains("spec.operatingMode is Running"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn both_versions_are_served() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("versions").await;
    let _controller = space.control();
    cluster.apply(&object(&space, "SandboxClaim", "v1alpha1", "alpha", &claim()));
    let pool = json!({"sandboxTemplateRef": {"name": "script"}, "replicas": 2});
    cluster.apply(&object(&space, "SandboxWarmPool", "v1beta1", "fast", &pool));
    let of_pool = json!({"warmPoolRef": {"name": "fast"}});
    cluster.apply(&object(&space, "SandboxClaim", "v1beta1", "beta", &of_pool));
    for name in ["alpha", "beta"] {
        space.ready(name).await;
        for version in ["v1alpha1", "v1beta1"] {
            let kind = format!("sandboxclaims.{version}.extensions.agents.x-k8s.io/{name}");
            let path = "jsonpath={.status.conditions[0].reason}";
            let reason = cluster.kubectl(&["get", "-n", &space.name, &kind, "-o", path]);
            assert_eq!(reason, "DependenciesReady", "{kind}");
        }
    }
    let mut spec = template();
    spec["operatingMode"] = "Suspended".into();
    cluster.apply(&object(&space, "Sandbox", "v1beta1", "mode", &spec));
    space.sandbox_reason("mode", "SandboxSuspended").await;
    space.change::<SandboxKind>("mode", json!({"spec": {"operatingMode": "Running"}})).await;
    space.sandbox_reason("mode", "DependenciesReady").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rights_of_the_chart_reach_no_other_secret_or_lease() {
    let Some(cluster) = Cluster::shared().await else { return };
    let space = cluster.space("rights").await;
    cluster.kubectl(&["create", "-n", &space.name, "secret", "generic", "other"]);
    let client = space.controller_client();
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &space.name);
    let is_refused = |result: Result<(), kube::Error>| {
        assert!(
            matches!(&result, Err(kube::Error::Api(status)) if status.code == 403),
            "{result:?}"
        );
    };
    is_refused(secrets.get("other").await.map(drop));
    is_refused(secrets.list(&ListParams::default()).await.map(drop));
    let patch = Patch::Merge(json!({"data": {}}));
    is_refused(secrets.patch("other", &PatchParams::default(), &patch).await.map(drop));
    is_refused(secrets.delete("other", &kube::api::DeleteParams::default()).await.map(drop));
    let leases: Api<k8s_openapi::api::coordination::v1::Lease> =
        Api::namespaced(client.clone(), &space.name);
    is_refused(leases.get("other").await.map(drop));
    let templates = space.api::<TemplateKind>();
    let spec = template();
    let text = json!({"metadata": {"name": "two"}, "spec": spec}).to_string();
    let own = serde_json::from_str(&text).unwrap();
    templates.create(&PostParams::default(), &own).await.unwrap();
    let of_controller: Api<afresh_kube::resource::SandboxTemplate> =
        Api::namespaced(client, &space.name);
    let patch = Patch::Merge(json!({"spec": {"service": false}}));
    is_refused(of_controller.patch("two", &PatchParams::default(), &patch).await.map(drop));
}
