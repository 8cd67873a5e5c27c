//! Pauses without memory.

use serde_json::Value;

use super::*;
use crate::sandbox::tenants::budgets::Limits;

const FILE: &str = "/home/user/kept";

/// Saves a sandbox as the sweep saves an idle one.
async fn save(all: &Arc<Sandboxes>, sandbox: &Arc<Sandbox>) {
    all.save(sandbox, Default::default()).await.unwrap();
    assert!(is_saved(sandbox).await);
}

/// Limits the memory of the tenant.
fn limit(all: &Arc<Sandboxes>, config: &mut SandboxConfig, memory: Option<u64>) {
    let limits = Limits { memory, ..Limits::default() };
    config.budgets.tenants.insert(TENANT.to_owned(), limits);
    all.renew(config);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_saved_sandbox_is_paused_without_memory_and_needs_none_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&dir);
    let all = open(&config).await;
    let sandbox = make(&all, options(HOUR)).await;
    log(&all, &sandbox, "00000001").await.unwrap();
    write(&all, &sandbox, FILE, "kept").await;
    save(&all, &sandbox).await;
    limit(&all, &mut config, Some(1));
    all.pause(&sandbox, false).await.unwrap();
    assert!(is_saved(&sandbox).await && sandbox.lifetime().paused);
    limit(&all, &mut config, None);
    // Another server does the same: the record has it.
    all.release();
    drop((all, sandbox));
    let all = open(&config).await;
    let sandbox = lock(&all.all).values().next().unwrap().clone();
    all.resume(&sandbox, Some(HOUR)).await.unwrap();
    assert_eq!(log(&all, &sandbox, "00000002").await.unwrap(), "00000002");
    assert_eq!(read(&all, &sandbox, FILE).await, "kept");
    // Its next save has its memory.
    save(&all, &sandbox).await;
    assert_eq!(log(&all, &sandbox, "00000003").await.unwrap(), "0000000200000003");
    all.pause(&sandbox, true).await.unwrap();
    all.resume(&sandbox, Some(HOUR)).await.unwrap();
    assert_eq!(log(&all, &sandbox, "00000004").await.unwrap(), "000000020000000300000004");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_is_restarted_from_the_template_that_it_began_in_alone() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let all = open(&config).await;
    let (plain, unknown) = (make(&all, options(HOUR)).await, make(&all, options(HOUR)).await);
    for sandbox in [&plain, &unknown] {
        log(&all, sandbox, "00000001").await.unwrap();
        save(&all, sandbox).await;
    }
    // An earlier version has recorded no base.
    let file = record_file(dir.path(), &unknown.id);
    let mut record: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert!(record.as_object_mut().unwrap().remove("base").is_some(), "{record}");
    std::fs::write(&file, record.to_string()).unwrap();
    let (plain, unknown) = (plain.id.clone(), unknown.id.clone());
    all.release();
    drop(all);
    let all = open(&config).await;
    let refuse = async |all: &Arc<Sandboxes>, id: &str, why: &str| {
        let sandbox = all.of(TENANT, id).unwrap();
        let refused = all.pause(&sandbox, false).await.unwrap_err();
        assert_eq!(refused.status.as_u16(), 400);
        assert!(refused.message.contains(why), "{}", refused.message);
        assert!(!sandbox.lifetime().paused);
        // With its memory it is paused.
        all.pause(&sandbox, true).await.unwrap();
        all.resume(&sandbox, Some(HOUR)).await.unwrap();
        assert!(log(all, &sandbox, "00000002").await.unwrap().starts_with("00000001"));
        save(all, &sandbox).await;
    };
    refuse(&all, &unknown, "the state that it began in is not known").await;
    let fork = all.of(TENANT, &plain).unwrap();
    let fork = all.fork(&fork, 1, HOUR).await.unwrap().remove(0);
    all.pause(&fork, false).await.unwrap();
    all.resume(&fork, Some(HOUR)).await.unwrap();
    assert_eq!(log(&all, &fork, "00000005").await.unwrap(), "00000005");
    let saved = all.of(TENANT, &plain).unwrap();
    all.pause(&saved, true).await.unwrap();
    all.resume(&saved, Some(HOUR)).await.unwrap();
    all.release();
    drop((all, fork, saved));
    // The template of this name is another one now.
    let mut other = config.clone();
    other.templates[0].warm.push(afresh::Call::text("warm", [] as [&str; 0]));
    let all = open(&other).await;
    refuse(&all, &plain, "the template that it began in has changed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_of_a_sandbox_has_its_base() {
    let dir = tempfile::tempdir().unwrap();
    let all = open(&config(&dir)).await;
    let sandbox = make(&all, options(HOUR)).await;
    log(&all, &sandbox, "00000001").await.unwrap();
    let keep =
        crate::sandbox::catalog::snapshots::SnapshotOptions::of_sandbox(&sandbox, Vec::new());
    let snapshot = all.keep(&sandbox, keep).await.unwrap();
    let of = |template: &str| CreateOptions { template: template.to_owned(), ..options(HOUR) };
    let made = make(&all, of(&snapshot.id)).await;
    assert_eq!(log(&all, &made, "00000002").await.unwrap(), "0000000100000002");
    all.pause(&made, false).await.unwrap();
    all.resume(&made, Some(HOUR)).await.unwrap();
    assert_eq!(log(&all, &made, "00000003").await.unwrap(), "00000003");
    // One of a build is restarted from the build, while that exists.
    let built = crate::sandbox::records::record::BuiltTemplate {
        id: "b".to_owned(),
        template: "web".to_owned(),
        made: 0,
        unknown: Default::default(),
    };
    let keep = crate::sandbox::catalog::snapshots::SnapshotOptions::of_sandbox(
        &sandbox,
        vec!["web".to_owned()],
    );
    let keep = crate::sandbox::catalog::snapshots::SnapshotOptions { built: Some(built), ..keep };
    let build = all.keep(&sandbox, keep).await.unwrap();
    let made = make(&all, of("web")).await;
    log(&all, &made, "00000002").await.unwrap();
    all.pause(&made, false).await.unwrap();
    all.resume(&made, Some(HOUR)).await.unwrap();
    assert_eq!(log(&all, &made, "00000003").await.unwrap(), "0000000100000003");
    save(&all, &made).await;
    all.pause(&made, false).await.unwrap();
    all.forget(build).await.unwrap();
    // Its memory was to be dropped, and the build is not there: it keeps the memory.
    all.resume(&made, Some(HOUR)).await.unwrap();
    assert_eq!(log(&all, &made, "00000004").await.unwrap(), "000000010000000300000004");
    let refused = all.pause(&made, false).await.unwrap_err();
    assert!(refused.message.contains("was deleted"), "{}", refused.message);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_sandbox_is_charged_with_the_memory_that_it_has_then() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&dir);
    let all = open(&config).await;
    for saved in [false, true] {
        let sandbox = make(&all, options(HOUR)).await;
        log(&all, &sandbox, "!0000001").await.unwrap();
        // Memory is not measured after each call.
        let is_charged = async || {
            log(&all, &sandbox, "00000001").await.unwrap();
            sandbox.charge.expected() > 16 << 20
        };
        until("its memory is not charged", is_charged).await;
        if saved {
            save(&all, &sandbox).await;
        }
        all.pause(&sandbox, false).await.unwrap();
        assert_eq!(sandbox.charge.memory(), 0);
        // Enough for the guest of the template, and not for the memory that was dropped.
        limit(&all, &mut config, Some(8 << 20));
        all.resume(&sandbox, Some(HOUR)).await.unwrap();
        assert_eq!(log(&all, &sandbox, "00000002").await.unwrap(), "00000002");
        assert!((1..8 << 20).contains(&sandbox.charge.memory()), "{}", sandbox.charge.memory());
        limit(&all, &mut config, None);
        all.kill(&sandbox).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_loses_its_memory_at_its_end_also_where_no_server_was_there_to_pause_it() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let all = open(&config).await;
    let ending = || {
        let mut options = options(HOUR);
        (options.pause_at_end, options.settings.files_only) = (true, true);
        options
    };
    let (live, saved) = (make(&all, ending()).await, make(&all, ending()).await);
    for sandbox in [&live, &saved] {
        log(&all, sandbox, "00000001").await.unwrap();
    }
    save(&all, &saved).await;
    for sandbox in [&live, &saved] {
        sandbox.lifetime().ends = Instant::now();
        let is_paused = async || {
            all.sweep();
            sandbox.lifetime().paused
        };
        until("it is not paused at its end", is_paused).await;
        all.resume(sandbox, Some(HOUR)).await.unwrap();
        assert_eq!(log(&all, sandbox, "00000002").await.unwrap(), "00000002");
        save(&all, sandbox).await;
    }
    // A client is faster than the sweep.
    saved.lifetime().ends = Instant::now();
    assert!(saved.is_paused());
    all.resume(&saved, Some(HOUR)).await.unwrap();
    assert_eq!(log(&all, &saved, "00000003").await.unwrap(), "00000003");
    // A client that paused it with its memory has that, also after the time of the sandbox.
    all.pause(&saved, true).await.unwrap();
    saved.lifetime().ends = Instant::now();
    all.resume(&saved, Some(HOUR)).await.unwrap();
    assert_eq!(log(&all, &saved, "00000004").await.unwrap(), "0000000300000004");
}
