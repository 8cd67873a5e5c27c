//! Only sandboxes of the object, the namespace, the cluster and the controller are touched.

use std::sync::Arc;

use serde_json::json;

use crate::context::{Context, Settings};
use crate::lease::LeaseHolder;
use crate::mock::{World, script, wait_for};
use crate::resource::{CONTROLLER_ANNOTATION, PoolKind, SandboxKind, TemplateKind};
use crate::sandbox::creation_key;
use crate::server::{CLUSTER_LABEL, CONTROLLER_LABEL, NAMESPACE_LABEL, UID_LABEL};
use crate::sweep::{SweepReport, sweep};

#[tokio::test(flavor = "multi_thread")]
async fn a_forged_status_reaches_no_sandbox_of_another_object() {
    let world = World::new().await;
    let context = world.context().await;
    let _controller = World::run(&context);
    world.add::<SandboxKind>("victim", "one", script());
    let victim = world.sandbox_reason("victim", "one", "DependenciesReady").await;
    let victim = victim.status().access.sandbox_id.unwrap();
    world.add::<SandboxKind>("attacker", "two", script());
    let own = world.sandbox_reason("attacker", "two", "DependenciesReady").await;
    let own = own.status().access.sandbox_id.unwrap();
    for forged in [victim.as_str(), "absent", "../sandboxes", ""] {
        let status = json!({"status": {"sandboxID": forged}});
        world.cluster.patch("sandboxes", "attacker", "two", &status);
        wait_for("the right status", async || {
            let status = world.object::<SandboxKind>("attacker", "two")?.status();
            (status.access.sandbox_id.as_deref() == Some(&own)).then_some(())
        })
        .await;
    }
    let before = world.afresh.requests().len();
    // At its end, too: the controller sees the forged status of a deleted object.
    let deleted = json!({
        "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "status": {"sandboxID": victim},
    });
    world.cluster.patch("sandboxes", "attacker", "two", &deleted);
    wait_for("the end of the object", async || {
        world.object::<SandboxKind>("attacker", "two").is_none().then_some(())
    })
    .await;
    assert_eq!(world.afresh.ids(), std::slice::from_ref(&victim));
    let touched: Vec<_> = world.afresh.requests().split_off(before);
    let of_victim = |request: &&String| request.contains(&victim) && !request.starts_with("GET");
    assert_eq!(touched.iter().find(of_victim), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_controllers_of_one_cluster_leave_each_other_alone() {
    let world = World::new().await;
    let first = world.context().await;
    let settings = Settings { controller: "default/two".to_owned(), ..world.settings.clone() };
    let second = world.context_of("default/two", settings).await;
    let running = World::run(&first);
    world.add::<SandboxKind>("a", "one", script());
    world.sandbox_reason("a", "one", "DependenciesReady").await;
    let object = world.object::<SandboxKind>("a", "one").unwrap();
    // Their labels differ, and the server refuses a key with another request.
    let key = creation_key(&object, &first);
    assert_ne!(key, creation_key(&object, &second));
    assert_eq!(key, creation_key(&object, &*world.context().await));
    drop(running);
    let ids = world.afresh.ids();
    assert_eq!(ids.len(), 1);
    let _second = World::run(&second);
    world.add::<SandboxKind>("a", "two", script());
    world.sandbox_reason("a", "two", "DependenciesReady").await;
    for (context, name) in [(&first, "default/one"), (&second, "default/two")] {
        assert_eq!(sweep(context).await.unwrap(), SweepReport::default());
        let own = world
            .afresh
            .ids()
            .into_iter()
            .filter(|id| world.afresh.get(id).unwrap()["metadata"][CONTROLLER_LABEL] == name);
        assert_eq!(own.count(), 1);
    }
    // The end of an object waits for its own controller.
    world.cluster.delete("sandboxes", "a", "one");
    world.cluster.delete("sandboxes", "a", "two");
    wait_for("the end of the second", async || {
        world.object::<SandboxKind>("a", "two").is_none().then_some(())
    })
    .await;
    assert_eq!(world.afresh.ids(), ids);
    let _first = World::run(&first);
    wait_for("the end of the first", async || world.afresh.ids().is_empty().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_creation_whose_answer_is_lost_makes_no_second_sandbox() {
    let world = World::new().await;
    let context = world.context().await;
    world.afresh.fail(crate::mock::Faults { lost_answers: 2, ..Default::default() });
    let _controller = World::run(&context);
    world.add::<SandboxKind>("a", "one", script());
    world.sandbox_reason("a", "one", "DependenciesReady").await;
    assert_eq!((world.afresh.creations(), world.afresh.ids().len()), (1, 1));
    let ended = world.afresh.requests().iter().any(|request| request.starts_with("DELETE"));
    assert!(!ended, "a second one was ended");
    // Another object has another key.
    world.add::<SandboxKind>("b", "one", script());
    world.sandbox_reason("b", "one", "DependenciesReady").await;
    assert_eq!(world.afresh.creations(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_is_removed_before_the_finalizer_gets_no_sandbox() {
    let world = World::new().await;
    let context = world.context().await;
    world.add::<SandboxKind>("a", "one", script());
    let mut object = world.object::<SandboxKind>("a", "one").expect("it exists");
    world.cluster.remove("sandboxes", "a", "one");
    let refused = crate::sandbox::reconcile(&mut object, &context).await;
    assert!(matches!(refused, Err(crate::context::Failure::Gone)), "{refused:?}");
    assert_eq!(world.afresh.creations(), 0);
    // Nor one of the same name.
    world.add::<SandboxKind>("a", "one", script());
    let refused = crate::sandbox::reconcile(&mut object, &context).await;
    assert!(refused.is_err(), "{refused:?}");
    assert_eq!(world.afresh.creations(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sandbox_of_an_object_that_is_removed_by_force_is_ended_at_once() {
    let world = World::new().await;
    let context = world.context().await;
    let _controller = World::run(&context);
    let slow = [("a".to_owned(), std::time::Duration::from_millis(300))].into();
    world.afresh.fail(crate::mock::Faults { slow, ..Default::default() });
    world.add::<SandboxKind>("a", "one", script());
    wait_for("the creation", async || {
        world.afresh.requests().iter().any(|request| request == "POST /sandboxes").then_some(())
    })
    .await;
    world.cluster.remove("sandboxes", "a", "one");
    wait_for("its end", async || {
        (world.afresh.creations() == 1 && world.afresh.ids().is_empty()).then_some(())
    })
    .await;
    world.afresh.fail(Default::default());
    let by_force = |name: &str| {
        let none = json!({"metadata": {"finalizers": null}});
        world.cluster.patch("sandboxes", "a", name, &none);
        world.cluster.delete("sandboxes", "a", name);
    };
    world.add::<SandboxKind>("a", "two", script());
    world.sandbox_reason("a", "two", "DependenciesReady").await;
    by_force("two");
    wait_for("the end of the second", async || world.afresh.ids().is_empty().then_some(())).await;
    // Also where another object has its name at once.
    world.add::<SandboxKind>("a", "two", script());
    world.sandbox_reason("a", "two", "DependenciesReady").await;
    let before = world.afresh.ids();
    by_force("two");
    world.add::<SandboxKind>("a", "two", script());
    world.sandbox_reason("a", "two", "DependenciesReady").await;
    wait_for("the end of the former", async || {
        let ids = world.afresh.ids();
        (ids.len() == 1 && ids != before).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_two_controllers_writes_the_status_of_a_pool() {
    let (world, bare) = (World::new().await, World::new().await);
    bare.afresh.fail(crate::mock::Faults { bare: true, ..Default::default() });
    let first = world.context().await;
    let settings = Settings { controller: "default/two".to_owned(), ..world.settings.clone() };
    let lease = LeaseHolder::new(
        world.client(),
        "default",
        "default-two",
        "two".to_owned(),
        Arc::default(),
    );
    lease.acquire().await.expect("the lease is free");
    let cluster = "cluster".to_owned();
    let second = Context::new(
        world.client(),
        bare.server(),
        settings,
        cluster,
        lease.into(),
        Arc::default(),
    );
    let _controllers = [World::run(&first), World::run(&second.into())];
    world.add::<TemplateKind>("a", "script", script());
    world.add::<PoolKind>("a", "fast", json!({"sandboxTemplateRef": {"name": "script"}}));
    let owner = wait_for("the status", async || {
        let pool = world.object::<PoolKind>("a", "fast")?;
        let owner = pool.annotation(CONTROLLER_ANNOTATION)?.to_owned();
        (!pool.status().conditions.is_empty()).then_some(owner)
    })
    .await;
    let writes = || {
        let all = world.cluster.requests().into_iter();
        all.filter(|request| request.starts_with("PATCH") && request.contains("pools/fast")).count()
    };
    tokio::time::sleep(world.settings.resync * 4).await;
    let before = writes();
    tokio::time::sleep(world.settings.resync * 10).await;
    assert_eq!(writes(), before, "the pool is one of {owner}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_goes_past_a_sandbox_that_cannot_be_ended() {
    let world = World::new().await;
    let context = world.context().await;
    let labels = |uid: &'static str, controller: &'static str| {
        [
            (CLUSTER_LABEL, "cluster"),
            (CONTROLLER_LABEL, controller),
            (NAMESPACE_LABEL, "a"),
            (UID_LABEL, uid),
        ]
    };
    let ids: Vec<_> =
        ["1", "2", "3"].map(|uid| world.afresh.make(&labels(uid, "default/one"))).into();
    let other = world.afresh.make(&labels("4", "default/other"));
    let faults = crate::mock::Faults { immortal: [ids[0].clone()].into(), ..Default::default() };
    world.afresh.fail(faults);
    assert_eq!(sweep(&context).await.unwrap(), SweepReport { ended: 2, failed: 1 });
    assert_eq!(world.afresh.ids(), [ids[0].clone(), other.clone()]);
    world.afresh.fail(Default::default());
    assert_eq!(sweep(&context).await.unwrap(), SweepReport { ended: 1, failed: 0 });
    assert_eq!(world.afresh.ids(), [other]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_follows_no_forged_status() {
    let world = World::new().await;
    let context = world.context().await;
    let running = World::run(&context);
    world.add::<SandboxKind>("a", "one", script());
    world.sandbox_reason("a", "one", "DependenciesReady").await;
    drop(running);
    let ids = world.afresh.ids();
    world.cluster.patch("sandboxes", "a", "one", &json!({"status": {"sandboxID": "absent"}}));
    assert_eq!(sweep(&context).await.unwrap(), SweepReport::default());
    assert_eq!(world.afresh.ids(), ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn images_are_templates_or_those_of_the_option() {
    let world = World::new().await;
    let context = world.context().await;
    let running = World::run(&context);
    let image = |image: &str| {
        let mut spec = script();
        spec["podTemplate"]["spec"]["containers"][0]["image"] = image.into();
        spec
    };
    for (name, with, reason) in [
        ("one", "script", "DependenciesReady"),
        ("two", "script:one", "DependenciesReady"),
        ("three", "snapshot-of-another-tenant", "TemplateNotFound"),
        ("four", "script:two", "TemplateNotFound"),
        ("five", "..", "TemplateNotFound"),
    ] {
        world.add::<SandboxKind>("a", name, image(with));
        world.sandbox_reason("a", name, reason).await;
    }
    assert_eq!(world.afresh.ids().len(), 2);
    let before = world.afresh.requests().len();
    assert!(!world.server().has_template("..").await.expect("an answer"));
    let further = world.afresh.requests().split_off(before);
    assert!(!further.iter().any(|request| request.starts_with("GET /templates")), "{further:?}");
    let images = vec!["golden-*".to_owned(), "script:one".to_owned()];
    let controller = "default/two".to_owned();
    let settings = Settings { images, controller, ..world.settings.clone() };
    let context = world.context_of("two", settings).await;
    drop(running);
    let _controller = World::run(&context);
    for (name, with, reason) in [
        ("one", "golden-1", "DependenciesReady"),
        ("two", "script:one", "DependenciesReady"),
        ("three", "script", "ImageNotAllowed"),
        ("four", "silver", "ImageNotAllowed"),
    ] {
        world.add::<SandboxKind>("b", name, image(with));
        world.sandbox_reason("b", name, reason).await;
    }
}
