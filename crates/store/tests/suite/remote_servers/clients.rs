//! Other people's tools carry our snapshots: skopeo, crane, oras and umoci, through a real registry
//! and between folders. Each byte arrives on any path, and objects of others stay.

use std::path::Path;
use std::process::Command;

use afresh_store::Store;

use super::servers::{Kind, Server};
use crate::support::{bytes, memory, options, store};

/// The program that `variable` names, or else one of that name in the path; prints a note where it
/// is missing.
fn client(name: &str, variable: &str) -> Option<std::ffi::OsString> {
    let program = std::env::var_os(variable).unwrap_or_else(|| name.into());
    match Command::new(&program).arg("--help").output() {
        Ok(_) => Some(program),
        Err(error) => {
            println!(
                "SKIPPED: {name} cannot be run ({error}); `cargo xtask test` installs it where it can"
            );
            None
        }
    }
}

fn skopeo() -> Option<std::ffi::OsString> {
    client("skopeo", "AFRESH_TEST_SKOPEO")
}

fn run(program: &std::ffi::OsStr, home: &Path, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        // Neither the credentials nor the settings of the user who runs the tests.
        .env("HOME", home)
        .env("DOCKER_CONFIG", home)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{program:?} {arguments:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// A store with a delta over a base, named `warm`; and what its memory is.
fn local(dir: &Path) -> Vec<u8> {
    let store = store(dir);
    store.save("base", &memory(&[1, 0, 2, 3, 0, 4]), &options()).unwrap();
    let mut delta = options();
    delta.options.parent = Some(store.load("base").unwrap());
    store.save("warm", &memory(&[1, 9, 2, 8, 0, 4]), &delta).unwrap();
    bytes(&store.load("warm").unwrap())
}

/// The snapshot that came to `dir` is whole.
fn arrived(dir: &Path, name: &str, wanted: &[u8]) {
    let snapshot = Store::open(dir).unwrap().load(name).unwrap();
    snapshot.verify().unwrap();
    assert_eq!(snapshot.state(), b"registers");
    assert_eq!(bytes(&snapshot), wanted);
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn skopeo_carries_a_snapshot_to_a_registry_and_back() {
    let (Some(skopeo), Some(server)) = (skopeo(), Server::start(Kind::Registry)) else { return };
    let dir = tempfile::tempdir().unwrap();
    let (from, back) = (dir.path().join("from"), dir.path().join("back"));
    let wanted = local(&from);
    let there = format!("docker://{}/team/guest:warm", server.address);
    let from = format!("oci:{}:warm", text(&from));
    let plain = ["--insecure-policy", "copy"];
    run(&skopeo, dir.path(), &[&plain[..], &["--dest-tls-verify=false", &from, &there]].concat());

    // Our own client finds what another put there.
    let remote = server.remote(server.address, super::servers::retry());
    assert_eq!(bytes(&remote.load("warm").unwrap()), wanted);

    let to = format!("oci:{}:mine", text(&back));
    run(&skopeo, dir.path(), &[&plain[..], &["--src-tls-verify=false", &there, &to]].concat());
    arrived(&back, "mine", &wanted);
}

#[test]
fn crane_carries_what_we_pushed_between_repositories_and_into_a_folder() {
    let Some(crane) = client("crane", "AFRESH_TEST_CRANE") else { return };
    let Some(server) = Server::start(Kind::Registry) else { return };
    let dir = tempfile::tempdir().unwrap();
    let wanted = local(&dir.path().join("from"));
    let from = Store::open(dir.path().join("from")).unwrap();
    let remote = server.remote(server.address, super::servers::retry());
    let warm = from.load("warm").unwrap();
    remote.push(&from, &warm, "warm", afresh_store::Encoding::Zstd, &mut |_| {}).unwrap();

    let (at, copy) = (
        format!("{}/team/guest:warm", server.address),
        format!("{}/team/copy:warm", server.address),
    );
    run(&crane, dir.path(), &["copy", "--insecure", &at, &copy]);
    let digest = run(&crane, dir.path(), &["digest", "--insecure", &copy]);
    assert_eq!(
        digest,
        run(&crane, dir.path(), &["digest", "--insecure", &at]),
        "nothing was changed"
    );
    let back = dir.path().join("back");
    run(&crane, dir.path(), &["pull", "--insecure", "--format=oci", &copy, text(&back)]);
    // It comes without a name, and is the only one there.
    arrived(&back, "latest", &wanted);
}

#[test]
fn oras_carries_a_snapshot_and_what_it_attaches_is_let_be() {
    let Some(oras) = client("oras", "AFRESH_TEST_ORAS") else { return };
    let Some(server) = Server::start(Kind::Registry) else { return };
    let dir = tempfile::tempdir().unwrap();
    let (from, back) = (dir.path().join("from"), dir.path().join("back"));
    let wanted = local(&from);
    let there = format!("{}/team/guest:warm", server.address);
    let local = format!("{}:warm", text(&from));
    run(&oras, dir.path(), &["cp", "--from-oci-layout", &local, "--to-plain-http", &there]);
    let mine = format!("{}:mine", text(&back));
    run(&oras, dir.path(), &["cp", "--from-plain-http", &there, "--to-oci-layout", &mine]);
    arrived(&back, "mine", &wanted);

    // A foreign artifact in the same repository is neither listed as a snapshot nor collected with
    // one.
    std::fs::write(dir.path().join("notes.txt"), "of the operator's").unwrap();
    let attach = Command::new(&oras)
        .current_dir(dir.path())
        .env("HOME", dir.path())
        .args(["attach", "--oci-layout", &mine, "--artifact-type", "text/notes", "notes.txt"])
        .output()
        .unwrap();
    assert!(attach.status.success(), "{}", String::from_utf8_lossy(&attach.stderr));
    let store = Store::open(&back).unwrap();
    assert_eq!(store.list().unwrap().iter().filter(|listed| listed.extent.is_ok()).count(), 1);
    store.gc().unwrap();
    arrived(&back, "mine", &wanted);
    let attached = run(&oras, dir.path(), &["discover", "--oci-layout", "--format", "json", &mine]);
    assert!(attached.contains("text/notes"), "{attached}");
}

#[test]
fn umoci_and_afresh_name_and_collect_in_the_same_layouts() {
    let Some(umoci) = client("umoci", "AFRESH_TEST_UMOCI") else { return };
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("store");
    let wanted = local(&at);
    let warm = format!("{}:warm", text(&at));
    run(&umoci, dir.path(), &["tag", "--image", &warm, "theirs"]);
    run(&umoci, dir.path(), &["gc", "--layout", text(&at)]);
    for name in ["warm", "theirs"] {
        arrived(&at, name, &wanted);
    }
    // A foreign container image in the same folder stays.
    run(&umoci, dir.path(), &["new", "--image", &format!("{}:image", text(&at))]);
    let store = Store::open(&at).unwrap();
    store.gc().unwrap();
    arrived(&at, "theirs", &wanted);
    let names = run(&umoci, dir.path(), &["ls", "--layout", text(&at)]);
    assert!(names.lines().any(|name| name == "image"), "{names}");
}
