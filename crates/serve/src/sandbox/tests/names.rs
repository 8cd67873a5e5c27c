//! Names that requests give for the origin of a sandbox.

use hyper::StatusCode;

use super::{HOUR, TENANT, config, log, make, open, options};
use crate::sandbox::catalog::snapshots::SnapshotOptions;
use crate::sandbox::lifecycle::creation::CreateOptions;
use crate::sandbox::records::record::BuiltTemplate;

#[tokio::test(flavor = "multi_thread")]
async fn a_creation_of_templates_alone_gets_no_memory_of_a_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let all = open(&config(&dir)).await;
    let sandbox = make(&all, options(HOUR)).await;
    log(&all, &sandbox, "00000001").await.unwrap();
    let of = |template: &str, template_only| CreateOptions {
        template: template.to_owned(),
        template_only,
        ..options(HOUR)
    };
    // E2B has these names for the first template.
    let before = make(&all, of("base", true)).await;
    assert_eq!(log(&all, &before, "00000002").await.unwrap(), "00000002");
    let names = ["base", "web:one"].map(str::to_owned).into();
    let keep = SnapshotOptions::of_sandbox(&sandbox, names);
    let snapshot = all.keep(&sandbox, keep).await.unwrap();
    let built = BuiltTemplate {
        id: "b".to_owned(),
        template: "web".to_owned(),
        made: 0,
        unknown: Default::default(),
    };
    let keep = SnapshotOptions::of_sandbox(&sandbox, vec!["web:two".to_owned()]);
    all.keep(&sandbox, SnapshotOptions { built: Some(built), ..keep }).await.unwrap();
    for name in ["base", "web:one", &snapshot.id] {
        let made = make(&all, of(name, false)).await;
        assert_eq!(log(&all, &made, "00000002").await.unwrap(), "0000000100000002");
        let refused = all.create(&TENANT.into(), of(name, true)).await.err().expect(name);
        assert_eq!(refused.status, StatusCode::NOT_FOUND, "{}", refused.message);
        assert!(refused.message.contains(name), "{}", refused.message);
    }
    // `web` has builds, and none with the default tag.
    for name in ["web", "web:three"] {
        assert!(all.create(&TENANT.into(), of(name, false)).await.is_err());
        assert!(all.create(&TENANT.into(), of(name, true)).await.is_err());
    }
    for (name, log_of_one) in [
        ("logger", "00000002"),
        ("code-interpreter-v1", "00000002"),
        ("web:two", "0000000100000002"),
    ] {
        let made = make(&all, of(name, true)).await;
        assert_eq!(log(&all, &made, "00000002").await.unwrap(), log_of_one);
    }
}
