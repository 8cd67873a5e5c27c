//! The verbs on snapshots as a user meets them: the real command on temporary directories.

use std::fs;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use afresh::pager::vmm::ControlClient;
use afresh_store::{GuestBuild, MemoryPages, SaveOptions, Store};
use afresh_sys::{Interest, PAGE_SIZE, PageRange, Protection, Reservation, Uffd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

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
fn inspect_tells_what_a_snapshot_holds() {
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
    assert!(message.contains("leave @v1 out"), "{message}");
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
fn what_is_wrong_with_a_place_or_name_is_said_with_the_way_out() {
    let (bench, ..) = two_snapshots();
    let url = bench.url("remote");
    bench.ok(&["push", "store", &url]);
    let cases: Vec<(i32, Vec<&str>, &str)> = vec![
        (
            1,
            vec!["inspect", "store@new"],
            r#"no snapshot named `new`; the store holds ["latest", "old"]"#,
        ),
        (1, vec!["untag", "store@new"], r#"the store holds ["latest", "old"]"#),
        (
            1,
            vec!["import", "new.mem", "store", "--parent", "no"],
            r#"the store holds ["latest", "old"]"#,
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
    assert!(
        message.contains(r#"no snapshot named `old`; the store holds ["latest"]"#),
        "{message}"
    );
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
fn compact_keeps_every_page_and_drops_the_working_set_only_when_told() {
    let bench = Bench::new();
    let store = Store::create(bench.path("store")).unwrap();
    let guest = GuestBuild {
        kind: "wasm".to_owned(),
        module: "m".to_owned(),
        engine: "e".to_owned(),
        cpu: Vec::new(),
    };
    let mut options = SaveOptions::new(guest);
    options.working_set = vec![PageRange::new(4, 2)];
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
fn a_reader_that_goes_away_is_no_crash() {
    let (bench, ..) = two_snapshots();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = bench.command(&["inspect", "store", "--pages"]);
    let child = command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((err(&output).as_str(), output.status.code()), ("", Some(1)));
}

/// A running pager, ended by the tests' end.
struct Pager {
    child: Option<Child>,
    errors: PathBuf,
}

impl Pager {
    fn start(bench: &Bench, arguments: &[&str]) -> Self {
        let mut all = vec!["pager", "--socket", "socket"];
        all.extend(arguments);
        let mut command = bench.command(&all);
        let errors = bench.path("pager-errors");
        command.stdout(Stdio::piped()).stderr(fs::File::create(&errors).unwrap());
        Self { child: Some(command.spawn().unwrap()), errors }
    }

    fn connect(&self, socket: &Path) -> UnixStream {
        let start = Instant::now();
        loop {
            match UnixStream::connect(socket) {
                Ok(stream) => return stream,
                Err(error) => assert!(start.elapsed() < TEST_TIMEOUT, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until its errors name this.
    fn wait_for_error(&self, word: &str) {
        let start = Instant::now();
        while !fs::read_to_string(&self.errors).unwrap().contains(word) {
            assert!(start.elapsed() < TEST_TIMEOUT, "{word} is not in {}", self.errors.display());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn terminate(&self) {
        let pid = Pid::from_child(self.child.as_ref().unwrap());
        kill_process(pid, Signal::TERM).unwrap();
    }

    fn wait(mut self) -> Output {
        let output = self.child.take().unwrap().wait_with_output().unwrap();
        Output { stderr: fs::read(&self.errors).unwrap(), ..output }
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The state of a VMM: guest memory without pages, registered with a userfaultfd.
struct Vmm {
    memory: Reservation,
    uffd: Uffd,
}

impl Vmm {
    fn new(pages: usize) -> Option<Self> {
        let uffd = match Uffd::open_for_pager() {
            Ok(uffd) => uffd,
            Err(error) => {
                println!("SKIPPED: {error}");
                return None;
            }
        };
        let memory = Reservation::new(pages).unwrap();
        let all = PageRange::new(0, pages);
        memory.map_anonymous(all, Protection::ReadWrite).unwrap();
        uffd.register(memory.page_ptr(0), all.byte_len(), Interest::MISSING).unwrap();
        Some(Self { memory, uffd })
    }

    /// Sends mappings and userfaultfd, as Firecracker does.
    fn hand_over(&self, stream: &UnixStream) {
        let text = format!(
            r#"[{{"base_host_virt_addr":{},"size":{},"offset":0,"page_size":4096}}]"#,
            self.memory.page_ptr(0) as usize,
            self.memory.pages() * PAGE_SIZE,
        );
        let fds = [self.uffd.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let parts = [IoSlice::new(text.as_bytes())];
        sendmsg(stream, &parts, &mut control, SendFlags::empty()).unwrap();
    }

    /// Reads every page, the last first, which no streaming has reached yet.
    fn read(&self) -> Vec<u8> {
        let mut out = vec![0; self.memory.pages() * PAGE_SIZE];
        for page in (0..self.memory.pages()).rev() {
            let to = out[page * PAGE_SIZE..][..PAGE_SIZE].as_mut_ptr();
            // SAFETY: the page is in the reservation, which is readable; the buffer has room for
            // it.
            unsafe { to.copy_from_nonoverlapping(self.memory.page_ptr(page), PAGE_SIZE) };
        }
        out
    }
}

#[test]
fn the_pager_serves_every_page_to_one_vmm_after_another() {
    let bench = Bench::new();
    let numbers: Vec<u32> = (0..700).map(|n| if n % 5 == 0 { 0 } else { n }).collect();
    let expected = memory(&numbers);
    fs::write(bench.path("mem"), &expected).unwrap();
    bench.ok(&["import", "mem", "store", "--encoding", "zstd"]);
    let socket = bench.path("socket");
    for how in [&[][..], &["--on-demand"]] {
        let pager = Pager::start(&bench, &[&["store", "--window", "4"], how].concat());
        for _ in 0..2 {
            let Some(vmm) = Vmm::new(numbers.len()) else { return };
            let stream = pager.connect(&socket);
            assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
            vmm.hand_over(&stream);
            assert!(vmm.read() == expected, "{how:?}");
        }
        // A hostile one between them harms no other.
        drop(pager.connect(&socket));
        let message = bench.fails(1, &["pager", "store", "--socket", "socket"]);
        assert!(message.contains("another process listens"), "{message}");
        pager.wait_for_error("VMM vm.3: the VMM's handshake is refused");
        pager.terminate();
        let output = pager.wait();
        assert_eq!(output.status.code(), Some(0), "{}", err(&output));
        assert!(!socket.exists(), "the socket was left behind");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(text.matches("700 pages filled").count(), 2, "{text}{}", err(&output));
        assert!(
            err(&output).contains("VMM vm.3: the VMM's handshake is refused"),
            "{}",
            err(&output)
        );
    }
}

#[test]
fn the_control_socket_saves_a_vmm_that_the_pager_did_not_start() {
    let bench = Bench::new();
    let numbers: Vec<u32> = (0..100).collect();
    fs::write(bench.path("mem"), memory(&numbers)).unwrap();
    bench.ok(&["import", "mem", "store"]);
    let pager = Pager::start(
        &bench,
        &["store", "--control", "ctl", "--name", "web", "--socket-mode", "0660", "--budget", "8"],
    );
    let Some(vmm) = Vmm::new(numbers.len()) else { return };
    let stream = pager.connect(&bench.path("socket"));
    vmm.hand_over(&stream);
    let mode = fs::metadata(bench.path("socket")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    assert_eq!(fs::metadata(bench.path("ctl")).unwrap().permissions().mode() & 0o777, 0o600);
    // SAFETY: the page is in the reservation, which is mapped writable.
    unsafe { vmm.memory.page_ptr(7).write_bytes(200, 10) };
    let mut control = ControlClient::connect(&bench.path("ctl")).unwrap();
    let snapshot = json!({ "request": "snapshot", "vm": "web.1", "to": "store@next" });
    match control.request(&snapshot) {
        Ok(_) => {}
        Err(error) if error.to_string().contains("CAP_SYS_PTRACE") => {
            return println!("SKIPPED: {error}");
        }
        Err(error) => panic!("{error}"),
    }
    control.request(&json!({ "request": "detach", "vm": "web" })).unwrap();
    pager.terminate();
    assert_eq!(pager.wait().status.code(), Some(0));
    let mut expected = memory(&numbers);
    expected[7 * PAGE_SIZE..][..10].fill(200);
    assert!(vmm.read() == expected);
    bench.ok(&["export", "store@next", "out"]);
    assert!(fs::read(bench.path("out")).unwrap() == expected);
    assert!(!bench.path("ctl").exists() && !bench.path("socket").exists());
}

/// Set in the process that plays the VMM of a pager that is killed: the number of the attempt.
const ORPHAN: &str = "AFRESH_TEST_ORPHAN";

/// The memory of a pager that is killed.
fn numbers_of_orphan() -> Vec<u32> {
    (1..=3000).collect()
}

/// A VMM that reads its memory while its pager is killed. It exits with 0 when it found all content.
fn play_orphan(attempt: usize) -> ! {
    let expected = memory(&numbers_of_orphan());
    let Some(vmm) = Vmm::new(expected.len() / PAGE_SIZE) else { std::process::exit(9) };
    let stream = UnixStream::connect("socket").unwrap();
    vmm.hand_over(&stream);
    let found = |page: usize| {
        // SAFETY: the page is in the reservation, which is mapped readable.
        let bytes = unsafe { std::slice::from_raw_parts(vmm.memory.page_ptr(page), PAGE_SIZE) };
        if bytes != &expected[page * PAGE_SIZE..][..PAGE_SIZE] {
            println!("page {page} begins with {:?}", &bytes[..8]);
            std::process::exit(3);
        }
    };
    found(2999);
    println!("FIRST");
    let uffd = vmm.uffd;
    if attempt % 2 == 1 {
        // The last copy but those of the pager and its keeper.
        drop(uffd);
    } else {
        std::mem::forget(uffd);
    }
    (0..3000).for_each(found);
    std::process::exit(0);
}

#[test]
fn a_pager_that_is_killed_leaves_no_page_of_zeros_and_no_vmm_that_waits() {
    use std::io::{BufRead, BufReader};
    use std::os::unix::process::ExitStatusExt;
    const NAME: &str = "a_pager_that_is_killed_leaves_no_page_of_zeros_and_no_vmm_that_waits";
    if let Ok(attempt) = std::env::var(ORPHAN) {
        play_orphan(attempt.parse().unwrap());
    }
    let bench = Bench::new();
    fs::write(bench.path("mem"), memory(&numbers_of_orphan())).unwrap();
    bench.ok(&["import", "mem", "store", "--encoding", "zstd"]);
    for attempt in 0..2 {
        let pager = Pager::start(&bench, &["store", "--on-demand", "--window", "1"]);
        drop(pager.connect(&bench.path("socket")));
        let mut vmm = Command::new(std::env::current_exe().unwrap())
            .args([NAME, "--exact", "--nocapture"])
            .env(ORPHAN, attempt.to_string())
            .current_dir(bench.0.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(vmm.stdout.take().unwrap()).lines();
        let first = output.by_ref().map(Result::unwrap).find(|line| line.contains("FIRST"));
        if first.is_none() {
            assert_eq!(vmm.wait().unwrap().code(), Some(9));
            return println!("SKIPPED: no userfaultfd");
        }
        // Somewhere in the three thousand faults.
        std::thread::sleep(Duration::from_micros((attempt * 7919 % 23_000) as u64));
        // Killed, and waited for.
        drop(pager);
        let started = Instant::now();
        let status = loop {
            if let Some(status) = vmm.try_wait().unwrap() {
                break status;
            }
            if started.elapsed() > TEST_TIMEOUT {
                vmm.kill().unwrap();
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let rest: Vec<String> = output.map(Result::unwrap).collect();
        match (status.code(), status.signal()) {
            (Some(0), _) => {}
            (_, Some(signal)) if signal == Signal::BUS.as_raw() => {}
            _ => panic!("attempt {attempt}: {status}: {rest:?}"),
        }
    }
}

#[test]
fn the_pager_removes_nothing_but_a_dead_socket() {
    let (bench, ..) = two_snapshots();
    fs::write(bench.path("socket"), "precious").unwrap();
    let message = bench.fails(1, &["pager", "store", "--socket", "socket"]);
    assert!(message.contains("is not a socket"), "{message}");
    assert_eq!(fs::read_to_string(bench.path("socket")).unwrap(), "precious");
    fs::remove_file(bench.path("socket")).unwrap();
    drop(std::os::unix::net::UnixListener::bind(bench.path("socket")).unwrap());
    let pager = Pager::start(&bench, &["store", "--once"]);
    let stream = pager.connect(&bench.path("socket"));
    rustix::io::write(&stream, b"not a handshake").unwrap();
    let output = pager.wait();
    assert_eq!(output.status.code(), Some(1), "{}", err(&output));
    assert!(err(&output).contains("handshake is refused"), "{}", err(&output));
    assert!(!bench.path("socket").exists());
}
