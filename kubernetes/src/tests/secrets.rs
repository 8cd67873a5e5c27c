//! Secrets with tokens.

use std::time::Duration;

use kube::api::ObjectMeta;
use serde_json::json;

use crate::mock::{World, script, wait_for};
use crate::resource::{Sandbox, SandboxKind};
use crate::sandbox::secret_name;

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_secret_is_made_again_and_no_secret_is_read_or_changed() {
    let world = World::new().await;
    let mut settings = world.settings.clone();
    settings.resync = Duration::from_millis(10);
    let context = world.context_of("one", settings).await;
    let _controller = World::run(&context);
    world.add::<SandboxKind>("a", "one", script());
    let ready = world.sandbox_reason("a", "one", "DependenciesReady").await;
    let name = ready.status().access.secret_name.expect("it has one");
    let before = world.cluster.get("secrets", "a", &name).expect("it exists");
    world.cluster.remove("secrets", "a", &name);
    let after = wait_for("the Secret", async || world.cluster.get("secrets", "a", &name)).await;
    assert_eq!((&after["data"], &after["immutable"]), (&before["data"], &json!(true)));
    assert_eq!(after["metadata"]["ownerReferences"][0]["uid"], ready.uid());
    let requests = world.cluster.requests();
    let mut of_secrets = requests.iter().filter(|request| request.contains("/secrets"));
    assert!(of_secrets.all(|request| request.starts_with("POST")), "{requests:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_with_the_longest_name_has_a_secret() {
    let world = World::new().await;
    let context = world.context().await;
    let _controller = World::run(&context);
    let name = format!("{}.{}", "a".repeat(227), "b".repeat(25));
    assert_eq!(name.len(), 253);
    world.add::<SandboxKind>("a", &name, script());
    let ready = world.sandbox_reason("a", &name, "DependenciesReady").await;
    let secret = ready.status().access.secret_name.expect("it has one");
    assert!(secret.len() <= 253, "{secret}");
    assert_eq!(world.cluster.names("secrets", "a"), [secret]);
}

#[test]
fn names_of_secrets_are_dns_names_and_differ_with_their_content() {
    let sandbox = |name: &str, uid: &str| {
        let metadata = ObjectMeta {
            name: Some(name.to_owned()),
            uid: Some(uid.to_owned()),
            ..ObjectMeta::default()
        };
        Sandbox::new(metadata, json!({}))
    };
    for length in 1..=252 {
        let name = format!("{}.b", "a".repeat(length));
        let secret = secret_name(&sandbox(&name[..name.len().min(253)], "1"), "id", "url");
        assert!(secret.len() <= 253 && !secret.contains(".-"), "{secret}");
    }
    let name = "a".repeat(253);
    let mut all = [("1", "id", "url"), ("2", "id", "url"), ("1", "jd", "url"), ("1", "id", "v")]
        .map(|(uid, id, url)| secret_name(&sandbox(&name, uid), id, url));
    all.sort();
    assert!(all.windows(2).all(|pair| pair[0] != pair[1]), "{all:?}");
}
