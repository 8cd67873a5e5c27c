//! Templates that a reload changes.

use super::*;
use crate::sandbox::catalog::builds::ImageGuest;
use crate::sandbox::catalog::snapshots::SnapshotOptions;
use crate::sandbox::catalog::template::Warm;

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

/// A change of a template.
type Change<'a> = dyn Fn(&mut Template) + 'a;

#[tokio::test(flavor = "multi_thread")]
async fn each_changed_key_of_a_template_opens_it_again() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let all = open(&config).await;
    let opens = async |change: &Change<'_>| {
        let (mut changed, present) = (config.clone(), all.template("logger"));
        change(&mut changed.templates[0]);
        let opened = all.reopen_templates(&changed).await.unwrap().remove(0);
        !Arc::ptr_eq(&present, &opened)
    };
    assert!(!opens(&|_| {}).await);
    let changes: [(&str, &Change<'_>); 10] = [
        ("name", &|template| template.name.push('2')),
        ("dirs", &|template| template.dirs.push("/usr".into())),
        ("open", &|template| template.open = Options::new().cache(dir.path())),
        ("images", &|template| template.images.push("debian".to_owned())),
        ("warm", &|template| template.warm.push(afresh::Call::text("warm", [""; 0]))),
        ("memory", &|template| template.memory -= 1 << 20),
        ("files", &|template| template.files -= 1 << 20),
        ("cpu_limit", &|template| template.cpu_limit = Some(HOUR)),
        ("generation", &|template| template.generation = Some("2".to_owned())),
        ("language", &|template| template.language = "python".to_owned()),
    ];
    for (key, change) in changes {
        let mut template = config.templates[0].clone();
        change(&mut template);
        assert!(!template.is_equivalent(&config.templates[0]), "{key}");
        // This guest evaluates one language.
        assert!(key == "language" || opens(change).await, "{key}");
    }
    let rest: [(&str, &Change<'_>); 4] = [
        ("reference", &|template| template.reference.push('2')),
        ("linux", &|template| template.linux = true),
        ("setup", &|template| template.setup = Some("1".to_owned())),
        ("library", &|template| template.library = Some("/lib.bin".into())),
    ];
    for (key, change) in rest {
        let mut template = config.templates[0].clone();
        change(&mut template);
        assert!(!template.is_equivalent(&config.templates[0]), "{key}");
    }
}

#[cfg(linux_guests)]
#[tokio::test(flavor = "multi_thread")]
async fn a_changed_rule_opens_a_template_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&dir);
    let with = |methods: &str| {
        let rule = format!(r#"{{"to": "a.test:443", "methods": ["{methods}"]}}"#);
        vec![rule.parse::<afresh::linux::NetGrant>().unwrap()]
    };
    config.templates[0].net = with("GET");
    let all = open(&config).await;
    let before = all.template("logger");
    config.templates[0].net = with("GET");
    reload(&all, &config).await;
    assert!(Arc::ptr_eq(&before, &all.template("logger")));
    config.templates[0].net = with("POST");
    reload(&all, &config).await;
    assert!(!Arc::ptr_eq(&before, &all.template("logger")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_reload_leaves_no_states_in_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&dir);
    let all = open(&config).await;
    let broken = dir.path().join("broken.wasm");
    // It is warm, and does not evaluate the code of the probe.
    let text = LOGGER.replace("\"evaluate\"", "\"other\"");
    std::fs::write(&broken, wat::parse_str(text).unwrap()).unwrap();
    let second = Template { name: "second".to_owned(), ..config.templates[0].clone() };
    let third = Template {
        name: "third".to_owned(),
        reference: broken.to_str().unwrap().to_owned(),
        ..config.templates[0].clone()
    };
    config.templates.extend([second, third]);
    assert!(all.reopen_templates(&config).await.is_err());
    assert_eq!(template_states(dir.path()), ["template-logger"]);
    // One that ends before its templates are there.
    config.templates.truncate(2);
    let reload = all.reopen_templates(&config);
    assert!(is_dropped(reload).await);
    let is_discarded =
        async || Arc::strong_count(&all) == 1 && template_states(dir.path()) == ["template-logger"];
    until("templates that nobody waits for are kept", is_discarded).await;
}

/// Begins this work and drops it.
async fn is_dropped(work: impl Future) -> bool {
    tokio::select! {
        biased;
        _ = work => false,
        () = std::future::ready(()) => true,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_removes_the_state_of_a_template_after_its_last_sandbox() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&dir);
    let all = open(&config).await;
    let sandbox = make(&all, options(HOUR)).await;
    config.templates[0].memory = 128 << 20;
    reload(&all, &config).await;
    all.kill(&sandbox).await.unwrap();
    drop(sandbox);
    let is_removed = async || {
        all.sweep();
        template_states(dir.path()) == ["reloaded-1-template-logger"]
    };
    until("the state of a replaced template is kept", is_removed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_kept_open_only_for_the_template_of_its_options() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let all = open(&config).await;
    let opened = async |tag: &'static str| {
        let config = config.clone();
        let open = move || Warm::open_as(&config, &config.templates[0], None, tag.to_owned());
        let mut warm = tokio::task::spawn_blocking(open).await.unwrap().unwrap();
        // Images have the options of a template of a Linux program.
        warm.config.linux = true;
        Arc::new(warm)
    };
    let kept = || lock(&all.builds.images).keys().cloned().collect::<Vec<_>>();
    let first = opened("reloaded-0-template-first").await;
    all.replace_templates(vec![first.clone()]);
    let reference = String::new();
    let warm = opened("template-image-0").await;
    let image = ImageGuest { warm, template: first.clone(), reference: reference.clone() };
    all.keep_image("early".to_owned(), image);
    assert_eq!(kept(), ["early"]);
    // A reload during a pull.
    let late = ImageGuest { warm: opened("template-image-1").await, template: first, reference };
    all.replace_templates(vec![opened("reloaded-1-template-second").await]);
    assert!(kept().is_empty());
    all.keep_image("late".to_owned(), late);
    assert!(kept().is_empty());
    let is_removed = async || {
        all.sweep();
        template_states(dir.path()) == ["reloaded-1-template-second"]
    };
    until("states of closed images are kept", is_removed).await;
}

/// The guest of the snapshot has the memory limit of the template that it was opened with.
#[tokio::test(flavor = "multi_thread")]
async fn new_sandboxes_of_an_open_snapshot_have_the_options_of_a_reload() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&dir);
    let all = open(&config).await;
    let first = make(&all, options(HOUR)).await;
    log(&all, &first, "00000001").await.unwrap();
    let kept = SnapshotOptions::of_sandbox(&first, Vec::new());
    let snapshot = all.keep(&first, kept).await.unwrap().id;
    let of_snapshot = || CreateOptions { template: snapshot.clone(), ..options(HOUR) };
    let before = make(&all, of_snapshot()).await;
    assert_eq!(lock(&all.opened).len(), 1);
    // A sandbox that was resolved before the reload opens the snapshot after it.
    let (old, known) = all.resolve(TENANT, &snapshot).await.unwrap();
    config.templates[0].memory = 8 << 20;
    reload(&all, &config).await;
    all.snapshot_guest(&old, &known.unwrap()).unwrap();

    let new = make(&all, of_snapshot()).await;
    assert_eq!(all.template_of(&new).config.memory, 8 << 20);
    let failed = all.with(&new, {
        let (own, mut router) = (new.clone(), all.output_router(&new));
        let language = all.template_of(&new).language;
        move |session| {
            let mut mark = lock(&own.mark);
            router.begin(Vec::new());
            run(session, language, (RUN, "!0000001"), &mut mark, &mut router)
        }
    });
    let failed = failed.await.unwrap();
    assert!(matches!(failed, Answer::Threw(_)), "it has 16 MiB: {failed:?}");
    // Present sandboxes keep their options.
    log(&all, &before, "!0000001").await.unwrap();
}
