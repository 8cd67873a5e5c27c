//! Programs of OCI images: the image's configuration applies, its contents are visible, and those
//! of the host are not.

use afresh_linux::{Frozen, Instance, Program, Warm, WarmError};
use afresh_memory::Image;
use afresh_pager::{Options, SnapshotOptions};
use afresh_store::Store;

use crate::common::here;
use crate::common::layout::{Layout, layer, programs};

const SCRIPT: &str = r#"
n=0
while read -r line; do
    n=$((n+1))
    echo "$line $n" >> log
    echo "$GREETING $1 $(cat word) $line $(pwd) $(cat log | tr '\n' ',')"
done
"#;

/// A shell and a script, in two layers.
fn layout(config: &str) -> Option<Layout> {
    let app = tempfile::tempdir().unwrap();
    std::fs::create_dir(app.path().join("app")).unwrap();
    std::fs::write(app.path().join("app/run.sh"), SCRIPT).unwrap();
    std::fs::write(app.path().join("app/word"), "dear").unwrap();
    Some(Layout::new(&[programs(&["sh", "cat", "tr", "ls"])?, layer(app.path())], config))
}

const CONFIG: &str = r#"{"architecture":"amd64","os":"linux","config":{"Entrypoint":["sh","run.sh"],
    "Cmd":["world"],"Env":["PATH=/nowhere:/bin","GREETING=hello"],"WorkingDir":"/app"}}"#;

fn ask(instance: &mut Instance, line: &str) -> String {
    let answer = instance.call(format!("{line}\n").as_bytes()).unwrap();
    String::from_utf8(answer).unwrap().trim_end().to_owned()
}

#[test]
fn a_program_is_started_as_its_image_says_and_is_pristine_after_each_call() {
    let Some(layout) = layout(CONFIG) else { return };
    let program = Program::of_image(&layout.open()).unwrap();
    let Some(warm) = here(program.warm()) else { return };
    let mut instance = warm.instance();
    assert_eq!(ask(&mut instance, "a"), "hello world dear a /app a 1,");
    assert_eq!(ask(&mut instance, "b"), "hello world dear b /app a 1,b 2,");
    for _ in 0..3 {
        instance.reset();
        assert_eq!(ask(&mut instance, "c"), "hello world dear c /app c 1,");
    }
    instance.verify().unwrap();
    // Arguments replace the image's command, and variables replace its variables.
    let other = program.arg("you").env("GREETING", "bye");
    assert_eq!(ask(&mut other.warm().unwrap().instance(), "d"), "bye you dear d /app d 1,");
}

#[test]
fn a_guest_of_an_image_sees_the_image_and_what_is_granted_and_nothing_else_of_the_host() {
    let (Some(layout), Some(other)) =
        (layout(r#"{"config":{"Env":["PATH=/bin"]}}"#), layout(CONFIG))
    else {
        return;
    };
    let granted = tempfile::tempdir().unwrap();
    std::fs::write(granted.path().join("given"), "given").unwrap();
    let image = layout.open();
    let shell = |script: &str| {
        let program = Program::of_image(&image).unwrap().grant(granted.path());
        program.arg("sh").arg("-c").arg(script).run(b"")
    };
    let Some(run) = here(shell("ls / /usr /etc 2>&1; echo; ls -l /proc/self/exe")) else { return };
    let seen = String::from_utf8(run.output).unwrap();
    let (names, exe) = seen.split_once("\n\n").unwrap();
    assert!(names.contains("cannot access '/usr'") || !names.contains("share"), "{names}");
    assert!(names.contains("app") && names.contains("bin") && !names.contains("passwd"), "{names}");
    assert!(exe.trim_end().ends_with("-> /bin/sh") || exe.contains("/bin/ls"), "{exe}");
    let run = shell(&format!("cat {}/given", granted.path().display())).unwrap();
    assert_eq!(run.output, b"given");

    // The command of the image may be replaced.
    let cat = Program::of_image(&other.open()).unwrap().entry_point(["cat", "word"]);
    assert_eq!(cat.clone().run(b"").unwrap().output, b"dear");
    assert_eq!(cat.arg("-").run(b"also").unwrap().output, b"dearalso");

    // An image without a program is an error, and so is one whose program is missing.
    let none = Program::of_image(&image).unwrap().warm();
    assert!(matches!(none, Err(WarmError::NoProgram)));
    let error = Program::of_image(&image).unwrap().arg("python3").warm().unwrap_err().to_string();
    assert!(error.contains("python3") && error.contains("in its image"), "{error}");
}

#[test]
fn a_snapshot_holds_its_image_once_and_opens_without_it() {
    let Some(layout) = layout(CONFIG) else { return };
    let program = Program::of_image(&layout.open()).unwrap();
    let Some(warm) = here(program.warm()) else { return };
    drop(layout);
    let mut instance = warm.instance();
    ask(&mut instance, "before");
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    let frozen = instance.freeze().unwrap();
    frozen.save(&store, "first", &SnapshotOptions::default()).unwrap();

    let load = |name: &str| {
        let frozen = Frozen::load(store.load(name).unwrap(), &Options::default()).unwrap();
        Warm::thaw(&frozen, &Program::new("/")).unwrap()
    };
    let mut thawed = load("first").instance();
    assert_eq!(ask(&mut thawed, "after"), "hello world dear after /app before 1,after 2,");
    // A thawed guest is frozen with the pages of its image, however often.
    let (again, before) = (thawed.freeze().unwrap(), frozen.image().clone());
    ask(&mut thawed, "apart");
    let changed = |one: &Image, other: &Image| -> usize {
        one.differing(other).iter().map(|range| range.len).sum()
    };
    let apart = changed(thawed.freeze().unwrap().image(), again.image());
    assert!(changed(&before, again.image()) > 500 && apart < 300, "{apart} pages");
    again.save(&store, "second", &SnapshotOptions::default()).unwrap();
    let answer = "hello world dear more /app before 1,after 2,more 3,";
    assert_eq!(ask(&mut load("second").instance(), "more"), answer);
    thawed.verify().unwrap();
}
