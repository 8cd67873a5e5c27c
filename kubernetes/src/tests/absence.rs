//! Sandboxes that a server does not know, and those of wrong specifications.

use serde_json::json;

use crate::condition::{self, FINISHED};
use crate::mock::{Faults, World, script, wait_for};
use crate::resource::SandboxKind;

#[tokio::test(flavor = "multi_thread")]
async fn the_404_of_a_proxy_ends_nothing() {
    let world = World::new().await;
    let context = world.context().await;
    let _controller = World::run(&context);
    world.add::<SandboxKind>("a", "one", script());
    let ready = world.sandbox_reason("a", "one", "DependenciesReady").await;
    world.afresh.fail(Faults { proxy: true, ..Faults::default() });
    world.sandbox_reason("a", "one", "ServerUnavailable").await;
    // Its object waits, since the sandbox is not known to have ended.
    world.cluster.delete("sandboxes", "a", "one");
    tokio::time::sleep(world.settings.confirmation * 3).await;
    assert_eq!(world.afresh.ids().len(), 1);
    let found = world.object::<SandboxKind>("a", "one").expect("it waits");
    assert!(!condition::is_true(&found.status().conditions, FINISHED));
    assert_eq!(found.status().access.sandbox_id, ready.status().access.sandbox_id);
    world.afresh.fail(Faults::default());
    wait_for("the end", async || {
        let gone = world.object::<SandboxKind>("a", "one").is_none();
        (gone && world.afresh.ids().is_empty()).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_sandbox_is_looked_for_again_before_it_counts_as_ended() {
    let world = World::new().await;
    let mut settings = world.settings.clone();
    settings.confirmation = std::time::Duration::from_secs(3600);
    let context = world.context_of("one", settings).await;
    let running = World::run(&context);
    world.add::<SandboxKind>("a", "one", script());
    let ready = world.sandbox_reason("a", "one", "DependenciesReady").await;
    // A server that starts again, and has not read its store.
    world.afresh.fail(Faults { forgetful: true, ..Faults::default() });
    let ids = world.afresh.ids();
    world.sandbox_reason("a", "one", "SandboxNotFound").await;
    world.afresh.fail(Faults::default());
    world.sandbox_reason("a", "one", "DependenciesReady").await;
    // One that is not in the list either.
    let sandbox = world.afresh.get(&ids[0]).expect("it exists");
    world.afresh.remove(&ids[0]);
    let found = world.sandbox_reason("a", "one", "SandboxNotFound").await;
    assert!(!condition::is_true(&found.status().conditions, FINISHED));
    assert_eq!(found.status().access.sandbox_id, ready.status().access.sandbox_id);
    world.afresh.put(&ids[0], sandbox);
    world.cluster.patch("sandboxes", "a", "one", &json!({"metadata": {"annotations": {"a": "b"}}}));
    world.sandbox_reason("a", "one", "DependenciesReady").await;
    drop(running);
    // With the confirmation.
    let context = world.context_of("two", world.settings.clone()).await;
    let _controller = World::run(&context);
    world.afresh.remove(&ids[0]);
    let found = world.sandbox_reason("a", "one", "PodFailed").await;
    assert!(condition::is_true(&found.status().conditions, FINISHED));
    assert!(world.afresh.ids().is_empty(), "its memory is lost, so it is not made anew");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_another_tenant_finishes_no_object() {
    let world = World::new().await;
    let context = world.context().await;
    let running = World::run(&context);
    for name in ["one", "two", "three"] {
        world.add::<SandboxKind>("a", name, script());
        world.sandbox_reason("a", name, "DependenciesReady").await;
    }
    let ids = world.afresh.ids();
    world.afresh.fail(Faults { forgetful: true, empty: true, ..Faults::default() });
    let refused = async |name: &str| {
        wait_for("the refusal to finish", async || {
            let found = world.object::<SandboxKind>("a", name)?;
            let conditions = found.status().conditions;
            assert!(!condition::is_true(&conditions, FINISHED), "{conditions:?}");
            let ready = condition::find(&conditions, condition::READY)?;
            ready.message.contains("knows 0 sandboxes of this controller").then_some(())
        })
        .await;
    };
    for name in ["one", "two", "three"] {
        refused(name).await;
    }
    // Also a controller that starts with that key.
    drop(running);
    let context = world.context_of("two", world.settings.clone()).await;
    let _controller = World::run(&context);
    for name in ["one", "two", "three"] {
        refused(name).await;
    }
    world.afresh.fail(Faults::default());
    for name in ["one", "two", "three"] {
        world.sandbox_reason("a", name, "DependenciesReady").await;
    }
    assert_eq!(world.afresh.ids(), ids);
    // Of all, one that has ended counts as such.
    world.afresh.remove(&ids[0]);
    world.sandbox_reason("a", "one", "PodFailed").await;
    world.afresh.remove(&ids[1]);
    world.sandbox_reason("a", "two", "PodFailed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_whose_sandbox_is_found_again_is_not_finished() {
    let world = World::new().await;
    let context = world.context().await;
    let _controller = World::run(&context);
    world.add::<SandboxKind>("a", "one", script());
    let ready = world.sandbox_reason("a", "one", "DependenciesReady").await;
    let id = world.afresh.ids().remove(0);
    let sandbox = world.afresh.get(&id).expect("it exists");
    world.afresh.remove(&id);
    world.sandbox_reason("a", "one", "PodFailed").await;
    world.afresh.put(&id, sandbox);
    let found = world.sandbox_reason("a", "one", "DependenciesReady").await;
    assert!(condition::find(&found.status().conditions, FINISHED).is_none());
    assert_eq!(found.status().access, ready.status().access);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_entry_of_others_stops_no_object() {
    let world = World::new().await;
    let context = world.context().await;
    let _controller = World::run(&context);
    world.add::<SandboxKind>("a", "one", script());
    world.sandbox_reason("a", "one", "DependenciesReady").await;
    world.afresh.fail(Faults { partial: true, ..Faults::default() });
    world.add::<SandboxKind>("a", "two", script());
    world.sandbox_reason("a", "two", "DependenciesReady").await;
    world.cluster.delete("sandboxes", "a", "one");
    wait_for("the end of the first", async || {
        (world.object::<SandboxKind>("a", "one").is_none() && world.afresh.ids().len() == 1)
            .then_some(())
    })
    .await;
    // The sandbox could be the one that the list lacks.
    let ids = world.afresh.ids();
    world.afresh.remove(&ids[0]);
    world.sandbox_reason("a", "two", "ServerUnavailable").await;
    tokio::time::sleep(world.settings.confirmation * 2).await;
    let found = world.object::<SandboxKind>("a", "two").expect("it exists");
    assert!(!condition::is_true(&found.status().conditions, FINISHED));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_cannot_be_paused_does_not_count_as_paused() {
    let world = World::new().await;
    let context = world.context().await;
    let _controller = World::run(&context);
    world.add::<SandboxKind>("a", "one", script());
    world.sandbox_reason("a", "one", "DependenciesReady").await;
    world.afresh.fail(Faults { restless: true, ..Faults::default() });
    world.cluster.patch("sandboxes", "a", "one", &json!({"spec": {"replicas": 0}}));
    world.sandbox_reason("a", "one", "SandboxRejected").await;
    world.afresh.fail(Faults::default());
    world.sandbox_reason("a", "one", "SandboxSuspended").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_whose_specification_is_wrong_lives_on() {
    let world = World::new().await;
    let context = world.context().await;
    let _controller = World::run(&context);
    let changes = [
        ("SpecChanged", json!({"podTemplate": {"metadata": {"labels": {"a": "b"}}}})),
        ("UnsupportedField", json!({"podTemplate": {"spec": {"hostNetwork": true}}})),
        ("UnsupportedField", json!({"podTemplate": null})),
    ];
    for (number, (reason, change)) in changes.into_iter().enumerate() {
        let name = format!("sandbox-{number}");
        world.add::<SandboxKind>("a", &name, script());
        let ready = world.sandbox_reason("a", &name, "DependenciesReady").await;
        let id = ready.status().access.sandbox_id.expect("it has one");
        world.cluster.patch("sandboxes", "a", &name, &json!({"spec": change}));
        world.sandbox_reason("a", &name, reason).await;
        world.afresh.set_time_left(&id, 60);
        wait_for("more time", async || {
            let end = world.afresh.get(&id)?["endAt"].as_str()?.parse().ok()?;
            (crate::sandbox::until(end).as_secs() > 3000).then_some(())
        })
        .await;
    }
}
