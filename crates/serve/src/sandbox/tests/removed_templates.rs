//! States whose template the configuration has no more.

use super::*;
use crate::sandbox::catalog::snapshots::SnapshotOptions;

#[tokio::test(flavor = "multi_thread")]
async fn a_state_of_a_removed_template_gets_no_grants_of_another_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&dir);
    let own = config.templates[0].clone();
    config.templates[0] = Template { name: "granted".to_owned(), ..own.clone() };
    config.templates[0].dirs = vec!["/srv/secret".into()];
    #[cfg(linux_guests)]
    config.templates[0].net.push("api.test:443".parse().unwrap());
    config.templates.push(own);
    let has_grants = |warm: &crate::sandbox::catalog::template::Warm| {
        #[cfg(linux_guests)]
        let has_net = !warm.config.net.is_empty();
        #[cfg(not(linux_guests))]
        let has_net = false;
        has_net || !warm.config.dirs.is_empty()
    };
    let all = open(&config).await;
    let sandbox = make(&all, options(HOUR)).await;
    log(&all, &sandbox, "00000001").await.unwrap();
    let kept = SnapshotOptions::of_sandbox(&sandbox, Vec::new());
    let snapshot = all.keep(&sandbox, kept).await.unwrap().id;
    let id = sandbox.id.clone();
    all.pause(&sandbox, true).await.unwrap();
    all.release();
    drop((all, sandbox));

    let removed = config.templates.pop().unwrap();
    let all = open(&config).await;
    let sandbox = all.of(TENANT, &id).unwrap();
    all.resume(&sandbox, Some(HOUR)).await.unwrap();
    assert_eq!(log(&all, &sandbox, "00000002").await.unwrap(), "0000000100000002");
    assert!(!has_grants(&all.template_of(&sandbox)));
    // It began in no present template.
    assert_eq!(all.pause(&sandbox, false).await.unwrap_err().status.as_u16(), 400);
    let of_snapshot = || CreateOptions { template: snapshot.clone(), ..options(HOUR) };
    let made = make(&all, of_snapshot()).await;
    assert_eq!(log(&all, &made, "00000002").await.unwrap(), "0000000100000002");
    assert!(!has_grants(&all.template_of(&made)));
    let granted = CreateOptions { template: "granted".to_owned(), ..options(HOUR) };
    let granted = make(&all, granted).await;
    assert!(has_grants(&all.template_of(&granted)));
    let kept = SnapshotOptions::of_sandbox(&made, Vec::new());
    let copy = all.keep(&made, kept).await.unwrap().id;
    let copied = make(&all, CreateOptions { template: copy, ..options(HOUR) }).await;
    assert!(!has_grants(&all.template_of(&copied)));
    let made_id = made.id.clone();
    for one in [&sandbox, &made] {
        all.pause(one, true).await.unwrap();
    }
    all.release();
    drop((all, sandbox, made, copied));

    // A sandbox of such a state has no grants after another start either.
    let all = open(&config).await;
    let made = all.of(TENANT, &made_id).unwrap();
    assert!(!has_grants(&all.template_of(&made)));
    all.resume(&made, Some(HOUR)).await.unwrap();
    assert!(!has_grants(&all.template_of(&made)));
    all.pause(&made, true).await.unwrap();
    all.release();
    drop((all, made));

    // The template is back.
    config.templates.push(removed);
    let all = open(&config).await;
    let sandbox = all.of(TENANT, &id).unwrap();
    all.resume(&sandbox, Some(HOUR)).await.unwrap();
    all.pause(&sandbox, false).await.unwrap();
    all.resume(&sandbox, Some(HOUR)).await.unwrap();
    assert_eq!(log(&all, &sandbox, "00000003").await.unwrap(), "00000003");
    assert_eq!(all.template_of(&sandbox).config.name, "logger");
}
