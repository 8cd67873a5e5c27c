//! Namespaces with many or slow objects.

use std::time::Duration;

use serde_json::json;

use crate::mock::{Faults, World, script};
use crate::resource::{ClaimKind, SandboxKind, TemplateKind};

#[tokio::test(flavor = "multi_thread")]
async fn many_claims_of_one_namespace_do_not_delay_that_of_another() {
    let world = World::new().await;
    let context = world.context().await;
    for number in 0..10_000 {
        let spec = json!({"sandboxTemplateRef": {"name": "script"}});
        world.add::<ClaimKind>("many", &format!("claim-{number}"), spec);
    }
    world.add::<TemplateKind>("many", "script", script());
    world.add::<TemplateKind>("one", "script", script());
    world.add::<ClaimKind>("one", "claim", json!({"sandboxTemplateRef": {"name": "script"}}));
    let _controller = World::run(&context);
    world.sandbox_reason("one", "claim", "DependenciesReady").await;
    let before = world.afresh.ids().len();
    assert!(before < 5_000, "{before} sandboxes of the others were made before");
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_requests_of_one_namespace_do_not_delay_those_of_another() {
    let world = World::new().await;
    let context = world.context().await;
    let slow = [("slow".to_owned(), Duration::from_secs(3600))].into();
    world.afresh.fail(Faults { slow, ..Faults::default() });
    for number in 0..200 {
        world.add::<SandboxKind>("slow", &number.to_string(), script());
    }
    let _controller = World::run(&context);
    world.add::<SandboxKind>("other", "one", script());
    world.sandbox_reason("other", "one", "DependenciesReady").await;
}
