//! Templates that a reload changes.

use super::*;

/// The names of states of templates in the store.
fn template_states(dir: &Path) -> Vec<String> {
    let store = afresh::store::Store::open(dir.join("server/snapshots")).unwrap();
    let names = store.tags().unwrap().into_iter().map(|tag| tag.name);
    let mut names: Vec<_> = names.filter(|name| name.contains("template-")).collect();
    names.sort();
    names
}

async fn reload(all: &Arc<Sandboxes>, config: &SandboxConfig) {
    let templates = all.reopen_templates(config).await.unwrap();
    all.replace_templates(templates);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_template_is_for_new_sandboxes_and_present_ones_keep_theirs() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&dir);
    let all = open(&config).await;
    let sandbox = make(&all, options(HOUR)).await;
    log(&all, &sandbox, "00000001").await.unwrap();
    // Nothing has changed.
    let before = all.template("logger");
    reload(&all, &config).await;
    assert!(Arc::ptr_eq(&before, &all.template("logger")));
    drop(before);

    // The same guest, with other options, and one more template.
    config.templates[0].memory = 128 << 20;
    let second = Template { name: "second".to_owned(), ..config.templates[0].clone() };
    config.templates.push(second);
    reload(&all, &config).await;
    assert_eq!(all.template_of(&sandbox).config.memory, 512 << 20);
    let fork = all.fork(&sandbox, 1, HOUR).await.unwrap().remove(0);
    assert_eq!(all.template_of(&fork).config.memory, 512 << 20);
    let new = make(&all, options(HOUR)).await;
    assert_eq!(all.template_of(&new).config.memory, 128 << 20);
    let second = CreateOptions { template: "second".to_owned(), ..options(HOUR) };
    log(&all, &make(&all, second).await, "00000001").await.unwrap();
    for ended in [&fork, &new] {
        all.kill(ended).await.unwrap();
    }
    drop((fork, new));

    // The sandbox is saved and restarted with its own template. The store keeps the state of it.
    let states = ["reloaded-2-template-logger", "reloaded-2-template-second", "template-logger"];
    assert_eq!(template_states(dir.path()), states);
    all.pause(&sandbox, true).await.unwrap();
    all.resume(&sandbox, Some(HOUR)).await.unwrap();
    assert_eq!(log(&all, &sandbox, "00000002").await.unwrap(), "0000000100000002");
    all.pause(&sandbox, false).await.unwrap();
    all.resume(&sandbox, Some(HOUR)).await.unwrap();
    assert_eq!(log(&all, &sandbox, "00000003").await.unwrap(), "00000003");

    // Without its sandbox it has none any more.
    all.kill(&sandbox).await.unwrap();
    drop(sandbox);
    let is_collected = async || {
        reload(&all, &config).await;
        template_states(dir.path()) == states[..2]
    };
    until("the state of a replaced template is kept", is_collected).await;

    // The next server has its own.
    all.release();
    drop(all);
    drop(open(&config).await);
    assert_eq!(template_states(dir.path()), ["template-logger", "template-second"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_module_is_a_changed_template_and_a_faulty_one_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let all = open(&config).await;
    let before = all.template("logger").identity.clone();
    let other = LOGGER.replace("(i32.const 60000)", "(i32.const 50000)");
    std::fs::write(&config.templates[0].reference, wat::parse_str(other).unwrap()).unwrap();
    reload(&all, &config).await;
    let changed = all.template("logger").identity.clone();
    assert_ne!(changed, before);
    std::fs::write(&config.templates[0].reference, "no module").unwrap();
    assert!(all.reopen_templates(&config).await.is_err());
    assert_eq!(all.template("logger").identity, changed);
    log(&all, &make(&all, options(HOUR)).await, "00000001").await.unwrap();
}
