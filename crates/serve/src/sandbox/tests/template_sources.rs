//! Templates whose reference means something else later, or cannot be looked up.

use afresh::SaveOptions;

use super::*;
use crate::sandbox::catalog::template_identity::TemplateIdentity;
use crate::sandbox::catalog::template_source::{LastSource, TemplateSource};

/// Saves a guest under the name that the template has.
fn save(dir: &TempDir, reference: &str, text: &str) {
    let module = dir.path().join("module.wasm");
    std::fs::write(&module, wat::parse_str(text).unwrap()).unwrap();
    let guest = afresh::open(&module, &Options::new()).unwrap();
    guest.save(&reference.parse().unwrap(), &SaveOptions::new()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_is_replaced_under_its_name_is_another_template() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&dir);
    let reference = format!("{}@v1", dir.path().join("shared").display());
    save(&dir, &reference, LOGGER);
    config.templates[0].reference.clone_from(&reference);
    let all = open(&config).await;
    let sandbox = make(&all, options(HOUR)).await;
    log(&all, &sandbox, "00000001").await.unwrap();
    all.pause(&sandbox, true).await.unwrap();
    let (id, before) = (sandbox.id.clone(), all.template("logger").identity.clone());
    all.release();
    drop((sandbox, all));

    // The same snapshot is the same template.
    let all = open(&config).await;
    assert_eq!(all.template("logger").identity, before);
    all.release();
    drop(all);

    save(&dir, &reference, &LOGGER.replace("(i32.const 60000)", "(i32.const 50000)"));
    let all = open(&config).await;
    assert_ne!(all.template("logger").identity, before);
    // Its files belong to programs of the template before.
    let sandbox = all.of(TENANT, &id).unwrap();
    all.resume(&sandbox, Some(HOUR)).await.unwrap();
    let refused = all.pause(&sandbox, false).await.unwrap_err();
    assert!(refused.message.contains("has changed since"), "{}", refused.message);
    assert_eq!(log(&all, &sandbox, "00000002").await.unwrap(), "0000000100000002");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_whose_registry_does_not_answer_starts_with_its_last_state() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&dir);
    drop(open(&config).await);
    // As after a start with an image: its digest, and the state that was made of it.
    let template = &mut config.templates[0];
    template.reference = "oci://127.0.0.1:1/app:v1".to_owned();
    let identity = |contents: &[u8]| TemplateIdentity::new(template, contents.to_vec(), None);
    let key = identity(template.reference.as_bytes()).shared_digest(env!("CARGO_PKG_VERSION"));
    let digest = afresh::Sha256::of(b"image").to_string();
    let source =
        TemplateSource { contents: digest.clone().into(), reference: template.reference.clone() };
    let store = afresh::store::Store::open(dir.path().join("server/snapshots")).unwrap();
    let state = store.resolve("template-logger").unwrap();
    LastSource::new(key, &source, &state).remember(&config.dir, template).unwrap();
    let identity = identity(digest.as_bytes()).digest();

    let all = open(&config).await;
    assert_eq!(all.template("logger").identity, identity);
    log(&all, &make(&all, options(HOUR)).await, "00000001").await.unwrap();
    all.release();
    drop(all);

    // Another table has no state.
    config.templates[0].generation = Some("2".to_owned());
    let refused = Sandboxes::open(&config, None, None).await.map(drop).unwrap_err();
    let why = afresh::describe_error(&refused);
    assert!(why.contains("127.0.0.1:1"), "{why}");
}
