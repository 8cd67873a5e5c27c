//! One malformed object harms no other one.

use serde_json::{Value, json};

use crate::condition::{self, READY};
use crate::context::key_of;
use crate::mock::{PLANTED_PANIC, World, script, wait_for};
use crate::resource::{ClaimKind, PoolKind, SandboxKind, TemplateKind};

fn deep(levels: usize) -> Value {
    (0..levels).fold(json!("end"), |within, _| json!({"a": within}))
}

/// Specifications with the shape of a pod template at no level.
fn malformed() -> Vec<Value> {
    let mut all = vec![json!([]), json!(5), json!(null), json!({"podTemplate": []})];
    for place in ["metadata", "spec"] {
        for value in [json!([]), json!(5), json!("a"), deep(40), deep(200)] {
            let mut spec = script();
            spec["podTemplate"][place] = value;
            all.push(spec);
        }
    }
    for value in [json!([]), json!(5), json!([[]]), json!([5]), json!([{"env": {}}])] {
        let mut spec = script();
        spec["podTemplate"]["spec"]["containers"] = value;
        all.push(spec);
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_objects_get_a_condition_and_stop_no_other() {
    let world = World::new().await;
    let context = world.context().await;
    let _controller = World::run(&context);
    let all = malformed();
    for (number, spec) in all.iter().enumerate() {
        let name = format!("bad-{number}");
        world.add::<SandboxKind>("a", &name, spec.clone());
        world.add::<TemplateKind>("a", &name, spec.clone());
        let template = json!({"sandboxTemplateRef": {"name": name}});
        world.add::<ClaimKind>("a", &format!("of-{name}"), template.clone());
        world.add::<PoolKind>("a", &name, template);
        // The same shapes where a claim and a pool are.
        world.add::<ClaimKind>("a", &format!("is-{name}"), spec.clone());
        world.add::<PoolKind>("a", &format!("is-{name}"), spec.clone());
    }
    world.add::<TemplateKind>("a", "good", script());
    world.add::<ClaimKind>("a", "good", json!({"sandboxTemplateRef": {"name": "good"}}));
    world.sandbox_reason("a", "good", "DependenciesReady").await;
    for (number, spec) in all.iter().enumerate() {
        let name = format!("bad-{number}");
        let found = wait_for(&format!("a condition of {name}"), async || {
            let conditions = world.object::<SandboxKind>("a", &name)?.status().conditions;
            condition::find(&conditions, READY).cloned()
        })
        .await;
        // `metadata: {}` with labels that are absent is well-formed.
        let is_good = found.reason == "DependenciesReady";
        assert!(is_good || found.reason == "UnsupportedField", "{spec}: {found:?}");
        for name in [format!("of-{name}"), format!("is-{name}")] {
            wait_for(&format!("a condition of the claim {name}"), async || {
                let conditions = world.object::<ClaimKind>("a", &name)?.status().conditions;
                condition::find(&conditions, READY).cloned()
            })
            .await;
        }
    }
    let deepest = world.sandbox_reason("a", "bad-8", "UnsupportedField").await;
    let conditions = deepest.status().conditions;
    assert!(conditions[0].message.contains("over 32 levels"), "{conditions:?}");
    // Managers of fields are as deep.
    let managers = json!([{"fieldsV1": deep(200)}]);
    let object = json!({"metadata": {"managedFields": managers}, "spec": script()});
    world.cluster.add("sandboxes", "a", "managed", object);
    world.sandbox_reason("a", "managed", "DependenciesReady").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_is_a_condition_of_its_object() {
    let world = World::new().await;
    let context = world.context().await;
    let _controller = World::run(&context);
    world.add::<SandboxKind>("a", PLANTED_PANIC, script());
    world.sandbox_reason("a", PLANTED_PANIC, "InternalError").await;
    world.add::<SandboxKind>("a", "good", script());
    world.sandbox_reason("a", "good", "DependenciesReady").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_is_gone_leaves_nothing() {
    let world = World::new().await;
    let context = world.context().await;
    let _controller = World::run(&context);
    world.add::<SandboxKind>("a", "one", script());
    let object = world.sandbox_reason("a", "one", "DependenciesReady").await;
    world.cluster.delete("sandboxes", "a", "one");
    wait_for("the end", async || world.afresh.ids().is_empty().then_some(())).await;
    wait_for("the object's end", async || {
        world.object::<SandboxKind>("a", "one").is_none().then_some(())
    })
    .await;
    wait_for("its observation", async || {
        context.observation(&object).secret.is_none().then_some(())
    })
    .await;
    assert!(context.interests.of(&key_of(&object)).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_of_a_pool_gets_the_template_of_the_pool() {
    let world = World::new().await;
    let context = world.context().await;
    let _controller = World::run(&context);
    world.add::<ClaimKind>("a", "one", json!({"warmPoolRef": {"name": "fast"}}));
    wait_for("the wait for the pool", async || {
        let conditions = world.object::<ClaimKind>("a", "one")?.status().conditions;
        (condition::find(&conditions, READY)?.reason == "WarmPoolNotFound").then_some(())
    })
    .await;
    world.add::<PoolKind>("a", "fast", json!({"sandboxTemplateRef": {"name": "script"}}));
    wait_for("the wait for the template", async || {
        let conditions = world.object::<ClaimKind>("a", "one")?.status().conditions;
        (condition::find(&conditions, READY)?.reason == "TemplateNotFound").then_some(())
    })
    .await;
    world.add::<TemplateKind>("a", "script", script());
    world.sandbox_reason("a", "one", "DependenciesReady").await;
}
