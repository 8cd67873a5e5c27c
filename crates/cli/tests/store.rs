//! The verbs on snapshots as a user meets them: the real command on temporary directories.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use afresh_store::{GuestBuild, MemoryPages, SaveRequest, Store};
use afresh_sys::{PAGE_SIZE, PageRange};
use serde_json::Value;

#[path = "store/pager.rs"]
mod pager;

/// Far longer than anything takes on a busy host.
const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// A temporary directory and the command run in it.
struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
        command.args(arguments).current_dir(self.0.path());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Standard output of a command that must succeed.
    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", err(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The JSON lines of a command that must succeed.
    fn json(&self, arguments: &[&str]) -> Vec<Value> {
        let mut all = vec!["-o", "json"];
        all.extend(arguments);
        self.ok(&all).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Standard error of a command that must fail with `code`.
    fn fails(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", err(&output));
        err(&output)
    }

    fn url(&self, name: &str) -> String {
        format!("file://{}", self.path(name).display())
    }

    fn blobs(&self, store: &str) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(self.path(store).join("blobs/sha256"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A page that follows from its number and no other page equals; zero for zero.
fn page(number: u32) -> Vec<u8> {
    let mut page = vec![number as u8; PAGE_SIZE];
    page[..4].copy_from_slice(&number.to_le_bytes());
    page
}

fn memory(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| page(*number)).collect()
}

const NUMBERS: [u32; 8] = [1, 2, 0, 0, 1, 5, 6, 7];

/// A directory `store` with `old` and, on top of it, `latest`, in which two pages differ.
fn two_snapshots() -> (Bench, Vec<u8>, Vec<u8>) {
    let bench = Bench::new();
    let old = memory(&NUMBERS);
    let mut new = old.clone();
    new[3 * PAGE_SIZE..4 * PAGE_SIZE].copy_from_slice(&page(9));
    new[4 * PAGE_SIZE..5 * PAGE_SIZE].fill(0);
    fs::write(bench.path("old.mem"), &old).unwrap();
    fs::write(bench.path("new.mem"), &new).unwrap();
    fs::write(bench.path("registers"), b"rip=7").unwrap();
    let guest = ["--kind", "vm", "--module", "kernel-6.1", "--engine", "firecracker 1.13"];
    bench.ok(&[&["import", "old.mem", "store@old"], &guest[..]].concat());
    bench.ok(&["import", "new.mem", "store", "--parent", "old", "--state", "registers"]);
    (bench, old, new)
}

#[test]
fn an_imported_memory_is_exported_unchanged_and_a_delta_holds_what_changed() {
    let (bench, old, new) = two_snapshots();
    bench.ok(&["export", "store@old", "old.out"]);
    bench.ok(&["export", "store", "new.out", "--state", "state.out"]);
    assert!(fs::read(bench.path("old.out")).unwrap() == old);
    assert!(fs::read(bench.path("new.out")).unwrap() == new);
    assert_eq!(fs::read(bench.path("state.out")).unwrap(), b"rip=7");
    let message = bench.fails(1, &["export", "store", "new.out"]);
    assert!(message.contains("exists already"), "{message}");
    let found = &bench.json(&["inspect", "store"])[0];
    assert_eq!(found["layers"][1]["role"], "delta");
    // A page of data and one that became zero, which is stored nowhere.
    assert_eq!(found["layers"][1]["stored_pages"], 1);
    assert_eq!(found["guest"]["module"], "kernel-6.1");
}

#[test]
fn a_file_with_holes_and_a_partial_page_comes_back_padded() {
    let bench = Bench::new();
    let file = fs::File::create(bench.path("sparse")).unwrap();
    file.set_len(100 * PAGE_SIZE as u64).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"end", 100 * PAGE_SIZE as u64).unwrap();
    bench.ok(&["import", "sparse", "store"]);
    bench.ok(&["export", "store", "out"]);
    let out = fs::read(bench.path("out")).unwrap();
    assert_eq!(out.len(), 101 * PAGE_SIZE);
    assert!(&out[100 * PAGE_SIZE..][..3] == b"end" && out.iter().filter(|b| **b != 0).count() == 3);
}

#[test]
fn holes_of_a_diff_are_as_in_its_parent() {
    use std::os::unix::fs::FileExt;
    let (bench, _, mut expected) = two_snapshots();
    let file = fs::File::create(bench.path("diff")).unwrap();
    file.set_len(NUMBERS.len() as u64 * PAGE_SIZE as u64).unwrap();
    // A page that became zero, and a new one.
    for (at, number) in [(1, 0), (6, 33)] {
        file.write_all_at(&page(number), at * PAGE_SIZE as u64).unwrap();
        expected[at as usize * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(&page(number));
    }
    let import = ["import", "diff", "store@next", "--diff"];
    let message = bench.fails(2, &import);
    assert!(message.contains("--parent"), "{message}");
    let done = bench.json(&[&import[..], &["--parent", "latest"]].concat());
    assert!(done[0]["written_bytes"].as_u64().unwrap() < 3 * PAGE_SIZE as u64, "{done:?}");
    bench.ok(&["export", "store@next", "next.out"]);
    assert!(fs::read(bench.path("next.out")).unwrap() == expected);
    let message = bench.fails(1, &["import", "new.mem", "store@x", "--diff", "--parent", "old"]);
    assert!(message.contains("without --diff"), "{message}");
    file.set_len(PAGE_SIZE as u64).unwrap();
    let message = bench.fails(1, &[&import[..], &["--parent", "old"]].concat());
    assert!(message.contains("as long as the memory of its parent"), "{message}");
}

#[test]
fn inspect_lists_the_contents_of_a_snapshot() {
    let (bench, ..) = two_snapshots();
    let found = &bench.json(&["inspect", "store@old", "--pages", "--verify"])[0];
    assert_eq!(found["pages"], 8);
    assert_eq!(found["zero_pages"], 2);
    assert_eq!(found["shared_pages"], 2);
    assert_eq!(found["verified"], true);
    assert_eq!(found["layers"][0]["encoding"], "raw");
    let runs = found["page_runs"].as_array().unwrap();
    assert_eq!(runs.iter().map(|run| run["pages"].as_u64().unwrap()).sum::<u64>(), 8);
    let text = bench.ok(&["inspect", "store@old", "--pages", "--verify"]);
    assert!(text.is_ascii(), "a pipe gets plain characters: {text}");
    for part in [
        "\n=+..=+++\n",
        "vm, module kernel-6.1, engine firecracker 1.13",
        "every byte of 1 layers has its digest",
        "2..4          2  zero",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn diff_answers_by_its_exit_code_and_names_the_pages() {
    let (bench, ..) = two_snapshots();
    assert!(bench.ok(&["diff", "store", "store@latest"]).starts_with("equal"));
    let output = bench.run(&["-o", "json", "diff", "store@old", "store"]);
    assert_eq!(output.status.code(), Some(3), "{}", err(&output));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["ranges"], serde_json::json!([[3, 2]]));
    assert_eq!(found["bytes"], 2 * PAGE_SIZE);
    assert_eq!((&found["equal"], &found["state_differs"]), (&false.into(), &true.into()));
    let text = String::from_utf8(bench.run(&["diff", "store@old", "store"]).stdout).unwrap();
    assert!(text.contains("3..5  2 pages") && text.contains("0 and 5 bytes"), "{text}");
}

#[test]
fn a_snapshot_survives_the_way_to_a_remote_and_back() {
    let (bench, _, new) = two_snapshots();
    let url = bench.url("remote");
    let pushed = &bench.json(&["push", "store", &url])[0];
    assert!(pushed["mib_per_s"].as_f64().unwrap() > 0.0 && pushed["name"] == "latest");
    bench.ok(&["push", "store@old", &url]);
    let list = bench.json(&["list", &url]);
    let names: Vec<_> = list.iter().map(|entry| entry["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["latest", "old"]);
    // Compressed there, so under another digest; the same pages.
    assert_eq!(list[0]["id"], pushed["id"]);
    bench.ok(&["diff", "store@latest", &url]);
    let pulled = &bench.json(&["pull", &url, "copy@mine"])[0];
    bench.ok(&["diff", "store", "copy@mine"]);
    // Raw again, so the same snapshot byte for byte.
    assert_eq!(pulled["id"], bench.json(&["list", "store"])[0]["id"]);
    bench.ok(&["export", &url, "out"]);
    assert!(fs::read(bench.path("out")).unwrap() == new);
    // By digest, under a separate name.
    let by_digest = format!("{url}@{}", pushed["id"].as_str().unwrap());
    assert_eq!(bench.json(&["pull", &by_digest, "copy"])[0]["name"], "latest");
    let text = bench.ok(&["push", "store", &format!("{url}@again")]);
    assert!(text.contains("@again: ") && text.contains("MiB/s"), "{text}");
}

#[test]
fn a_single_file_is_a_place_like_others() {
    let (bench, _, new) = two_snapshots();
    bench.ok(&["push", "store", "warm.afresh"]);
    assert_eq!(bench.json(&["inspect", "warm.afresh", "--verify"])[0]["verified"], true);
    bench.ok(&["diff", "store", "warm.afresh"]);
    bench.ok(&["export", "warm.afresh", "out"]);
    assert!(fs::read(bench.path("out")).unwrap() == new);
    let pulled = &bench.json(&["pull", "warm.afresh", "copy@mine"])[0];
    assert_eq!(pulled["id"], bench.json(&["list", "store"])[0]["id"]);
    bench.ok(&["diff", "store", "copy@mine"]);
    let message = bench.fails(1, &["inspect", "warm.afresh@v1"]);
    assert!(message.contains("omit @v1"), "{message}");
    let message = bench.fails(1, &["gc", "warm.afresh"]);
    assert!(message.contains("is a single file"), "{message}");
}

#[test]
fn a_damaged_layer_is_named_and_used_by_no_verb() {
    let (bench, ..) = two_snapshots();
    let found = &bench.json(&["inspect", "store@old"])[0];
    let digest = found["layers"][0]["digest"].as_str().unwrap().to_owned();
    let path = bench.path("store/blobs/sha256").join(digest.strip_prefix("sha256:").unwrap());
    let mut bytes = fs::read(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    bytes[2 * PAGE_SIZE + 5] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let url = bench.url("remote");
    for arguments in [
        &["inspect", "store@old", "--verify"][..],
        &["inspect", "store", "--verify"],
        &["export", "store@old", "out"],
        &["compact", "store@old", "--to", "small"],
        &["push", "store@old", &url],
    ] {
        let message = bench.fails(1, arguments);
        assert!(message.contains(&digest) && message.contains("damaged"), "{message}");
    }
    assert!(!bench.path("out").exists());
    let names = bench.json(&["list", "store"]);
    assert!(names.iter().all(|entry| entry["name"] != "small"));
    assert!(bench.ok(&["list", &url]).is_empty());
    // Bytes outside the digest of a page group are covered by the digest of the blob.
    let (bench, ..) = two_snapshots();
    bench.ok(&["compact", "store", "--encoding", "zstd"]);
    let digest = bench.json(&["inspect", "store"])[0]["layers"][0]["digest"].clone();
    let digest = digest.as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned();
    let path = bench.path("store/blobs/sha256").join(&digest);
    let mut bytes = fs::read(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    // The skippable frame's header, right behind the data.
    let at = bytes.windows(4).rposition(|w| w == [0x5e, 0x2a, 0x4d, 0x18]).unwrap();
    bytes[at] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let message = bench.fails(1, &["inspect", "store", "--verify"]);
    assert!(message.contains(&digest) && message.contains("damaged"), "{message}");
}

#[test]
fn errors_of_places_and_names_report_the_way_out() {
    let (bench, ..) = two_snapshots();
    let url = bench.url("remote");
    bench.ok(&["push", "store", &url]);
    let cases: Vec<(i32, Vec<&str>, &str)> = vec![
        (
            1,
            vec!["inspect", "store@new"],
            r#"no snapshot named `new`; the store holds `latest`, `old`"#,
        ),
        (1, vec!["untag", "store@new"], r#"the store holds `latest`, `old`"#),
        (
            1,
            vec!["import", "new.mem", "store", "--parent", "no"],
            r#"the store holds `latest`, `old`"#,
        ),
        (1, vec!["untag", "store"], "no name is given; write store@NAME"),
        (1, vec!["inspect", "nowhere"], "nowhere is not an OCI image layout"),
        (1, vec!["inspect", "new.mem"], "new.mem: no tar header at byte 0: is this an archive"),
        (1, vec!["pull", "store", "copy"], "this needs a remote, which is a URL"),
        (1, vec!["gc", &url, "--grace", "1"], "is too short"),
        (1, vec!["tag", "store", "bad name"], "cannot name a snapshot"),
        (1, vec!["import", "store", "other"], "not a regular file"),
        (1, vec!["import", "missing", "other"], "missing: No such file"),
        (1, vec!["inspect", "ftp://x/y"], "is not a remote"),
        (2, vec!["inspect", "store@"], "PLACE or PLACE@NAME"),
        (2, vec!["pager", "store", "--socket", "s", "--window", "0"], "1..=512"),
        (2, vec!["pager", "store", "--socket", "s", "--socket-owner", "root"], "in numbers"),
        (2, vec!["pager", "store", "--socket", "s", "--socket-mode", "0444"], "cannot connect"),
        (2, vec!["pager", "store", "--socket", "s", "--record"], "--control"),
    ];
    for (code, arguments, part) in cases {
        let message = bench.fails(code, &arguments);
        assert!(message.contains(part), "{arguments:?}: {message}");
    }
    let message = bench.fails(1, &["pull", &format!("{url}@old"), "copy"]);
    assert!(message.contains(r#"no snapshot named `old`; the store holds `latest`"#), "{message}");
    // Nothing was made on the way to an error.
    assert!(!bench.path("nowhere").exists() && !bench.path("other").exists());
}

#[test]
fn gc_removes_only_what_no_name_reaches() {
    let (bench, ..) = two_snapshots();
    let before = bench.blobs("store");
    assert_eq!(bench.json(&["gc", "store"])[0]["removed"], 0);
    bench.ok(&["tag", "store@old", "base"]);
    bench.ok(&["untag", "store@old"]);
    assert_eq!(bench.json(&["gc", "store"])[0]["removed"], 0);
    assert_eq!(bench.blobs("store"), before);
    bench.ok(&["untag", "store@base"]);
    // The base layer stays, for the delta needs it; manifest and configuration go.
    let collected = &bench.json(&["gc", "store"])[0];
    assert_eq!((&collected["removed"], &collected["kept"]), (&2.into(), &4.into()));
    bench.ok(&["inspect", "store", "--verify"]);
    bench.ok(&["compact", "store"]);
    assert_eq!(bench.json(&["gc", "store"])[0]["removed"], 4);
    bench.ok(&["inspect", "store", "--verify"]);
    assert_eq!(bench.blobs("store").len(), 3);
}

#[test]
fn compact_keeps_every_page_and_drops_the_working_set_only_on_request() {
    let bench = Bench::new();
    let store = Store::create(bench.path("store")).unwrap();
    let guest = GuestBuild {
        kind: "wasm".to_owned(),
        module: "m".to_owned(),
        engine: "e".to_owned(),
        cpu: Vec::new(),
    };
    let mut options = SaveRequest::new(guest);
    options.options.working_set = vec![PageRange::new(4, 2)];
    store.save("latest", &MemoryPages(memory(&NUMBERS)), &options).unwrap();
    assert!(bench.ok(&["inspect", "store"]).contains("\n=+..##++\n"));
    bench.ok(&["compact", "store", "--to", "kept", "--encoding", "zstd"]);
    bench.ok(&["compact", "store", "--to", "dropped", "--drop-working-set"]);
    for (name, hot, encoding) in [("store@kept", 2, "zstd"), ("store@dropped", 0, "raw")] {
        bench.ok(&["diff", "store", name]);
        let found = &bench.json(&["inspect", name, "--verify"])[0];
        assert_eq!(found["working_set_pages"], hot);
        assert_eq!(found["layers"][0]["encoding"], encoding);
    }
}

#[test]
fn a_closed_output_pipe_is_no_crash() {
    let (bench, ..) = two_snapshots();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = bench.command(&["inspect", "store", "--pages"]);
    let child = command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((err(&output).as_str(), output.status.code()), ("", Some(1)));
}
