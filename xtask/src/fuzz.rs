//! `cargo xtask fuzz`: every fuzz target for a bounded time, on the stable toolchain, or with
//! AddressSanitizer if a nightly one is installed.
//!
//! libFuzzer comes with the crate `libfuzzer-sys`, built by the host's C++ compiler; its guidance
//! comes from an LLVM pass that stable compilers have too. The seeds are made of the golden
//! snapshots. A target that crashes, hangs, or takes too much memory fails, and the input that did
//! it is kept and named.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail};

use crate::command::{cargo, output, run, succeeds};
use crate::host;

const USAGE: &str = "usage: cargo xtask fuzz [--seconds N] [TARGET…]";

/// Default seconds for each target.
pub(crate) const SECONDS: u32 = 20;
/// Seconds for each target in `cargo xtask test`: enough for the seeds and inputs near them.
const IN_TESTS: u32 = 5;

/// Every target, which is a binary in `fuzz/fuzz_targets`.
const TARGETS: [&str; 18] = [
    "page_layer",
    "layout",
    "archive",
    "snapshot",
    "turn",
    "vmm_handshake",
    "program",
    "cbor",
    "objects",
    "json",
    "e2b",
    "agent",
    "dns",
    "egress",
    "oci",
    "tree",
    "http",
    "elf",
];

/// Instrumentation for the fuzzer: edges that ran, and operands of comparisons.
const FLAGS: &str = "--cfg fuzzing -Ccodegen-units=1 -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares";

/// The additional flags of AddressSanitizer: only nightly compilers have it.
const SANITIZER: &str = " -Zsanitizer=address";
/// The targets handle faults themselves, and end with the resources they began with.
const SANITIZER_OPTIONS: &str =
    "handle_segv=0:handle_sigbus=0:allow_user_segv_handler=1:detect_leaks=0";

/// Memory that a target may use, in MiB.
const MEMORY: u32 = 1024;
/// Seconds that one input may take.
const TIMEOUT: u32 = 10;

/// Choices that make an empty snapshot, and one of 600 pages with three of them stored, and a
/// working set.
const SNAPSHOTS: [&[u8]; 2] =
    [&[0; 32], &[1, 1, 6, 1, 3, 6, 1, 3, 2, 0, 1, 1, 6, 1, 3, 6, 1, 3, 2]];

/// Messages of a VMM.
const HANDSHAKES: [&str; 2] = [
    r#"[{"base_host_virt_addr":140000000000000,"size":8192,"offset":4096,"page_size":4096,"page_size_kib":4096}]"#,
    r#"[{"base_host_virt_addr":2097152,"size":2097152,"offset":0,"page_size":2097152},{"base_host_virt_addr":8388608,"size":2097152,"offset":2097152,"page_size_kib":2097152}]"#,
];

/// Answers of guests in CBOR: a value with its text, values of every kind, and an error.
const ANSWERS: [&[u8]; 4] = [
    b"\x83\x00\x82\x01\x02\x66[1, 2]",
    b"\x83\x00\xa2\x61a\x82\xf5\xf6\xda\x00\x01\x00\x30\x81\xfb\x3f\xf8\x00\x00\x00\x00\x00\x00\xc0\x61t\xf6",
    b"\x83\x00\x82\xd8\x4f\x48\xff\xff\xff\xff\xff\xff\xff\xff\xd9\x01\x02\x81\x20\xf6",
    b"\x85\x01\x61E\x61m\x68at there\xf6",
];

/// Values of guests in CBOR: of every kind without parts, a map with a set and a list as keys, and
/// pairs of a map with equal keys.
const VALUES: [&[u8]; 3] = [
    b"\x8e\xf7\xf6\xf5\x20\xfa\x3f\x80\x00\x00\x62\xc3\xa9\x41x\xc1\xfa\x3f\x80\x00\x00\xc0\x61t\xd9\x03\xec\x61d\xda\x00\x01\x00\x31\x631.0\xc2\x42\x01\x00\xd8\x27\x82\x61f\x61g\xd9\xa7\xf8\x82\xfa\x3f\x80\x00\x00\xfa\x40\x00\x00\x00",
    b"\xa2\xd9\x01\x02\x81\x01\xd8\x4f\x48\x01\x00\x00\x00\x00\x00\x00\x00\x82\x01\xda\x00\x01\x00\x30\x80\xd8\x25\x500123456789abcdef",
    b"\xa2\x01\xa1\x61a\x01\x01\xd8\x56\x48\x00\x00\x00\x00\x00\x00\xf8\x3f",
];

/// Bodies of requests, each after the letter of its type.
const REQUESTS: [&[u8]; 11] = [
    br#"c{"templateID":"base","autoPause":true,"metadata":{"a":"b"},"envVars":{"A":"b"},"network":{"allowOut":["a"]},"mcp":{"a":{}}}"#,
    br#"u{"allowOut":["a","10.0.0.0/8"],"denyOut":["0.0.0.0/0"],"rules":{"a":[{"transform":{"headers":{"X":"1"}}},{}]},"allow_internet_access":false}"#,
    br#"n{"language":"python","cwd":"/tmp"}"#,
    br#"w{"path":"a","recursive":true,"includeEntry":true,"watcherId":"b"}"#,
    br#"t{"timeout":1,"duration":2,"count":3,"name":"n"}"#,
    br#"e{"code":"1+1","language":"python","context_id":"default","env_vars":{"A":"b"}}"#,
    br#"f{"path":"a","depth":2,"source":"b","destination":"c"}"#,
    br#"p{"process":{"pid":1,"tag":"t"},"signal":"SIGNAL_SIGKILL","pty":{"size":{"rows":2,"cols":3}},"input":{"stdin":"eA=="}}"#,
    b"s\0\0\0\0\x37{\"process\":{\"cmd\":\"sh\",\"args\":[\"-c\"],\"envs\":{\"A\":\"b\"}}}",
    b"mmultipart/form-data; boundary=b\n--b\r\nContent-Disposition: form-data; filename=\"/a\"\r\n\r\ntext\r\n--b--",
    b"x\0\0\0\0\x1f{\"start\":{\"process\":{\"pid\":1}}}\0\0\0\0\x1e{\"data\":{\"input\":{\"pty\":\"x\"}}}\0\0\0\0\x10{\"keepalive\":{}}",
];

/// A stream of frames from an agent, after the length of its pieces.
const FRAMES: &[u8] = b"\x03\x04\0\0\0\x01one\x04\0\0\0\x02two\x03\0\0\0\x03\x80\x80\x09\0\0\0\x05\x07\0\0\0\xf7\xff\xff\xff\x07\0\0\0\x07\x07\0\0\0ab\x04\0\0\0\x00end";

/// Requests of guests to proxied servers.
const REQUEST_HEADS: [&[u8]; 2] = [
    b"GET /v1/%61/../b?q=1 HTTP/1.1\r\nHost: a.test\r\nConnection: keep-alive, X\r\nX: 1\r\n\r\n",
    b"POST /v1 HTTP/1.1\r\nHost: a.test:1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
];

/// A question for the address of a name.
const QUESTION: &[u8] = b"\x07\x09\x01\0\0\x01\0\0\0\0\0\0\x03Api\x07example\x03ORG\0\0\x01\0\x01";

/// Saved file trees as the target takes them, without the page of zeros that follows the first: one
/// with every kind of file, and the layers of one over a directory.
const TREES: [&[u8]; 2] = [
    b"t\x87\0\0\0\0\0\0\0\x01\x80\x80@@\x07\0\0\x06\x01\xed\x03\0\0\x02\x02\x02\x02\x01\x01\x01\x02\x01a\x01\x02\x01\x01\x01h\x01\x03\0\x01\x02\xed\x03\x02\x02\x02\x02\x02\x02\x01\x01\x01\x03\x01b\x01\x03\0\x01\x01d\x01\x05\x03\x01\x01l\x01\x04\x02\x01\x03\xa4\x03\x02\x02\x02\x02\x02\x02\x01\0\x90N\x02\0\x07\x02\xa9\x06\0\x04\xff\x03\x02\x02\x02\x02\x02\x02\x01\x02\x06../a/b\x05\xb6\x03\x02\x02\x02\x02\x02\x02\x01\x03\x83\x02\x06\x80\x03\x02\x02\x02\x02\x02\x02\x01\0\0\0\0\0\x01\x06\x01\x02\x07\0\0\0content)\x03\0\0",
    b"l\x03\x01\x02\x01)gathered:416144fc364fb804463a374a5a87099a\x02\x88'\x01\x05\x01\xed\x03\0\0\0\0\0\0\0\x01\x01\x03\x01d\x01\x98\xd8\xfa\x99\xb7\x88\xbc\x80@\x01\0\x01g\x01\xcd\x95\xa4\xad\x98\xec\x91\x80@\0\0\x01s\x01\x84\xf4\xc4\xbb\xc8\xae\xb1\x80@\x02\0\xdd\xe3\xa0\xb1\xd5\xd1\x89\x80@\xa4\x03\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\0\0\x88'\0\x01\x01\0\0\x88'\xcd\x95\xa4\xad\x98\xec\x91\x80@\xa4\x03\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\0\0\x01\0\x01\x01\0\x01\x01\x84\xf4\xc4\xbb\xc8\xae\xb1\x80@\xff\x03\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\0\x02\x03d/f\x98\xd8\xfa\x99\xb7\x88\xbc\x80@\xed\x03\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\xea\xf3\xc9\xb0\x0d\xcf\xaa\xec\xef\x02\0\x01\x01\x01\x01f\x01\xdd\xe3\xa0\xb1\xd5\xd1\x89\x80@\0\0",
];

/// Requests and whole answers in HTTP.
const EXCHANGES: [&[u8]; 4] = [
    b"GET /a\0HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX: y\r\n\r\nhello",
    b"GET / HTTP/1.1\r\n\r\n\0HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n5;x=y\r\nhello\r\nA\r\n0123456789\r\n0\r\nA: b\r\n\r\n",
    b"HEAD / HTTP/1.1\r\n\r\n\0HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
    b"POST / HTTP/1.1\r\n\r\n\0HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\n\r\n",
];

/// `cargo xtask fuzz`
pub(crate) fn main(arguments: &[String]) -> Result<ExitCode> {
    let mut seconds = SECONDS;
    let mut targets = Vec::new();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        if argument == "--seconds" {
            let number = arguments.next().and_then(|n| n.parse().ok()).filter(|n| *n > 0);
            seconds = number.with_context(|| format!("--seconds needs a number; {USAGE}"))?;
        } else if let Some(target) = TARGETS.iter().find(|target| *target == argument) {
            targets.push(*target);
        } else {
            bail!("unknown target {argument:?}; known are {}; {USAGE}", TARGETS.join(", "));
        }
    }
    if targets.is_empty() {
        targets.extend(TARGETS);
    }
    host::cxx_compiler()?;
    let nightly = Toolchain::Nightly;
    let toolchain = if nightly.is_there() { nightly } else { Toolchain::Stable };
    match toolchain {
        Toolchain::Nightly => println!("fuzz: with AddressSanitizer, by the nightly toolchain"),
        Toolchain::Stable => {
            println!("fuzz: without AddressSanitizer; `rustup install nightly` has it")
        }
    }
    fuzz(&targets, seconds, toolchain).map(|()| ExitCode::SUCCESS)
}

/// Every target, for [`IN_TESTS`], with the toolchain of everything else. The compiler is there.
pub(crate) fn all() -> Result<()> {
    fuzz(&TARGETS, IN_TESTS, Toolchain::Stable)
}

/// The toolchain for the targets.
#[derive(Clone, Copy, PartialEq)]
enum Toolchain {
    /// The workspace's own.
    Stable,
    /// Nightly, for AddressSanitizer.
    Nightly,
}

impl Toolchain {
    fn is_there(self) -> bool {
        self == Self::Stable
            || succeeds(Command::new("rustup").args(["run", "nightly", "rustc", "-V"]))
    }
}

/// Builds the targets and runs as many of them at a time as there are processors.
fn fuzz(targets: &[&str], seconds: u32, toolchain: Toolchain) -> Result<()> {
    let programs = build(toolchain)?;
    let scratch = Scratch::new()?;
    let seeds = seeds(&host::repository().join("crates/store/tests/golden"))?;
    let next = AtomicUsize::new(0);
    let failures = Mutex::new(Vec::new());
    let at_a_time = std::thread::available_parallelism().map_or(1, usize::from).min(targets.len());
    std::thread::scope(|scope| {
        for _ in 0..at_a_time {
            scope.spawn(|| {
                while let Some(target) = targets.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let seeds = seeds.get(target).map_or(&[][..], Vec::as_slice);
                    match one(target, &programs.join(target), &scratch.0, seeds, seconds) {
                        Ok(line) => println!("fuzz {target}: {line}"),
                        Err(error) => {
                            println!("fuzz {target}: FAILED: {error:#}");
                            let mut failures = failures.lock().unwrap_or_else(|e| e.into_inner());
                            failures.push(format!("{target}: {error:#}"));
                        }
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap_or_else(|e| e.into_inner());
    if failures.is_empty() { Ok(()) } else { bail!("fuzzing found: {}", failures.join("; ")) }
}

/// Builds every target; returns the folder with the programs.
fn build(toolchain: Toolchain) -> Result<PathBuf> {
    // With a target named, the flags reach no build script.
    let version = output(Command::new("rustc").arg("-vV"))?;
    let triple = version.lines().find_map(|line| line.strip_prefix("host: "));
    let triple = triple.context("rustc does not report its host")?;
    let mut command = cargo();
    let (mut folder, mut flags) = (host::target_folder().join("fuzz"), FLAGS.to_owned());
    if toolchain == Toolchain::Nightly {
        folder = folder.join("address");
        flags += SANITIZER;
        command = Command::new("rustup");
        command.args(["run", "nightly", "cargo"]);
        // The variables of this program's own start are for another toolchain.
        for name in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN"] {
            command.env_remove(name);
        }
    }
    command
        .current_dir(host::repository().join("fuzz"))
        .args(["build", "--release", "--locked", "--bins", "--target", triple])
        .env("CARGO_TARGET_DIR", &folder)
        .env("RUSTFLAGS", flags)
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    run(&mut command).context("cannot build the fuzz targets")?;
    Ok(folder.join(triple).join("release"))
}

/// A folder for files of targets, in memory if the host has such a place: they write small files by
/// the thousand, and make each durable.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self> {
        let name = format!("afresh-fuzz-{}", std::process::id());
        for parent in [PathBuf::from("/dev/shm"), std::env::temp_dir()] {
            let folder = parent.join(&name);
            if fs::create_dir(&folder).is_ok() {
                return Ok(Self(folder));
            }
        }
        bail!("cannot make a folder in {}", std::env::temp_dir().display())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The remains are only untidy.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs one target; returns what it reached.
fn one(
    target: &str,
    program: &Path,
    scratch: &Path,
    seeds: &[Vec<u8>],
    seconds: u32,
) -> Result<String> {
    let corpus = scratch.join(target).join("corpus");
    let temporary = scratch.join(target).join("tmp");
    let kept = host::target_folder().join("fuzz/artifacts").join(target);
    for folder in [&corpus, &temporary, &kept] {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let mut files = Vec::new();
    for (number, seed) in seeds.iter().enumerate() {
        let file = corpus.join(format!("seed-{number}"));
        fs::write(&file, seed).context("cannot write a seed")?;
        files.push(file);
    }
    let log = kept.join("log");
    let ask = |what: &dyn Fn(&mut Command)| -> Result<String> {
        let file = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = Command::new(program);
        command
            .arg(format!("-rss_limit_mb={MEMORY}"))
            .arg(format!("-timeout={TIMEOUT}"))
            .arg(format!("-artifact_prefix={}/", kept.display()))
            .env("TMPDIR", &temporary)
            .env("ASAN_OPTIONS", SANITIZER_OPTIONS)
            .stdin(Stdio::null())
            .stdout(file.try_clone().context("cannot share the log")?)
            .stderr(file);
        what(&mut command);
        let status =
            command.status().with_context(|| format!("cannot run {}", program.display()))?;
        let said = fs::read(&log).with_context(|| format!("cannot read {}", log.display()))?;
        let said = String::from_utf8_lossy(&said).into_owned();
        if !status.success() {
            let input = said.lines().find_map(|line| line.split_once("Test unit written to "));
            let input =
                input.map_or(String::new(), |(_, path)| format!("; the input is in {path}"));
            bail!("{status}{input}; what was said is in {}", log.display());
        }
        Ok(said)
    };
    // A target that refuses its seeds never gets beyond the first check of its code.
    ask(&|command| {
        command.args(&files).env("AFRESH_FUZZ_SEEDS", "1");
    })
    .context("with nothing but the seeds")?;
    let said = ask(&|command| {
        command.arg(format!("-max_total_time={seconds}")).arg(&corpus);
    })?;
    reached(&said)
        .with_context(|| format!("the fuzzer did not report its coverage: {}", log.display()))
}

/// Edges reached by the seeds and at the end, and how many inputs that took.
fn reached(said: &str) -> Option<String> {
    let cov = |word: &str| {
        let line = said.lines().rfind(|line| line.split_whitespace().nth(1) == Some(word))?;
        let cov = line.split_once("cov: ")?.1.split_whitespace().next()?;
        Some((line.split_whitespace().next()?.trim_start_matches('#'), cov))
    };
    let ((_, first), (runs, last)) = (cov("INITED")?, cov("DONE")?);
    Some(format!("{runs} inputs, {first} edges reached by the seeds, {last} at the end"))
}

/// The seeds of every target, from the golden snapshots in `folder`.
fn seeds(folder: &Path) -> Result<BTreeMap<&'static str, Vec<Vec<u8>>>> {
    let read =
        |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let mut blobs = BTreeMap::new();
    let list = folder.join("v1/blobs/sha256");
    for entry in fs::read_dir(&list).with_context(|| format!("cannot list {}", list.display()))? {
        let path = entry.context("cannot list the golden blobs")?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        blobs.insert(name, read(&path)?);
    }
    let layers = blobs.values().filter(|bytes| !bytes.starts_with(b"{"));
    let index = read(&folder.join("v1/index.json"))?;
    let mut all = BTreeMap::new();
    all.insert("page_layer", layers.map(|bytes| layer_seed(bytes)).collect());
    all.insert("layout", layout_seeds(&blobs, &String::from_utf8_lossy(&index)));
    all.insert("archive", vec![archive_seed(&read(&folder.join("v1.afresh"))?)]);
    all.insert("snapshot", SNAPSHOTS.map(<[u8]>::to_vec).to_vec());
    all.insert("turn", vec![turn_seed()]);
    all.insert("vmm_handshake", HANDSHAKES.map(|text| text.as_bytes().to_vec()).to_vec());
    all.insert("program", vec![program_seed()]);
    all.insert("cbor", ANSWERS.map(<[u8]>::to_vec).to_vec());
    all.insert("objects", VALUES.map(<[u8]>::to_vec).to_vec());
    all.insert("json", json_seeds(&blobs, &index));
    all.insert("e2b", REQUESTS.map(<[u8]>::to_vec).to_vec());
    all.insert("agent", vec![FRAMES.to_vec()]);
    all.insert("dns", vec![QUESTION.to_vec()]);
    all.insert("egress", REQUEST_HEADS.map(<[u8]>::to_vec).to_vec());
    all.insert("oci", vec![oci_seed()]);
    all.insert("tree", tree_seeds());
    all.insert("elf", vec![linux_program_seed()]);
    all.insert("http", EXCHANGES.map(<[u8]>::to_vec).to_vec());
    Ok(all)
}

/// Every JSON document of the golden store, each after the letter of its type.
fn json_seeds(blobs: &BTreeMap<String, Vec<u8>>, index: &[u8]) -> Vec<Vec<u8>> {
    let documents = blobs.values().filter(|bytes| bytes.starts_with(b"{"));
    let letter = |bytes: &[u8]| {
        if bytes.starts_with(br#"{"schemaVersion""#) { *b"m" } else { *b"c" }
    };
    let mut seeds: Vec<_> = documents.map(|bytes| [&letter(bytes)[..], bytes].concat()).collect();
    seeds.push([b"i", index].concat());
    seeds
}

/// The trees, with the end of the first one's page.
fn tree_seeds() -> Vec<Vec<u8>> {
    /// Bytes of the page, whose last is not zero.
    const PAGE: usize = 0x329;
    let [tree, layers] = TREES;
    let mut tree = tree.to_vec();
    tree.resize(tree.len() + PAGE - 1, 0);
    tree.push(b'x');
    vec![tree, layers.to_vec()]
}

/// An OCI image as the target takes it: its documents with marks in place of digests, and a layer.
fn oci_seed() -> Vec<u8> {
    const MEDIA: &str = "application/vnd.oci.image.layer.v1.tar";
    let index = r#"{"schemaVersion":2,"manifests":[{"digest":"$M","size":1,"platform":{"architecture":"amd64","os":"linux"},"annotations":{"org.opencontainers.image.ref.name":"a"}}]}"#;
    let manifest = format!(
        r#"{{"config":{{"digest":"$C"}},"layers":[{{"mediaType":"{MEDIA}","digest":"$L"}},{{"mediaType":"{MEDIA}","digest":"$L"}}]}}"#
    );
    let config = r#"{"config":{"Entrypoint":["/a"],"Cmd":["b"],"Env":["C=d"],"WorkingDir":"/e"}}"#;
    let mut layer = Vec::new();
    let entries: [(&str, u8, &str, &[u8]); 9] = [
        ("d/", b'5', "", b""),
        ("d/file", b'0', "", b"content"),
        ("d/deep/er/x", b'0', "", b"1"),
        ("link", b'2', "d", b""),
        ("link/hard", b'1', "d/file", b""),
        ("d/.wh.file", b'0', "", b""),
        ("d/deep/.wh..wh..opq", b'0', "", b""),
        ("PaxHeaders/x", b'x', "", b"16 path=long/er\n"),
        ("short", b'0', "", b"2"),
    ];
    for (name, kind, target, content) in entries {
        let mut header = vec![0; 512];
        let mut put =
            |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
        put(0, name);
        put(100, "0000644");
        put(124, &format!("{:011o}", content.len()));
        put(136, "00000000001");
        put(157, target);
        put(257, "ustar\x0000");
        header[156] = kind;
        layer.extend_from_slice(&header);
        layer.extend_from_slice(content);
        layer.resize(layer.len().next_multiple_of(512), 0);
    }
    [index.as_bytes(), b"\0", manifest.as_bytes(), b"\0", config.as_bytes(), b"\0", &layer].concat()
}

/// A guest program: a segment of code, one of data, and relocations of both kinds.
fn program_seed() -> Vec<u8> {
    const DATA: u64 = 4096;
    let (dynamic, rela, relr, len) = (232_u64, 344_u64, 368_u64, 384_u64);
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    let mut put = |value: u64, size: usize| file.extend_from_slice(&value.to_le_bytes()[..size]);
    // The rest of the identification, and the header.
    put(0, 8);
    put(0, 1);
    let sizes = [2, 2, 4, 8, 8, 8, 4, 2, 2, 2, 2, 2, 2];
    let header = [3, 62, 1, 64, 64, 0, 0, 64, 56, 3, 0, 0, 0];
    header.into_iter().zip(sizes).for_each(|(value, size)| put(value, size));
    // Type, flags, offset, address, length in the file and in memory.
    let segments = [
        [1, 5, 0, 0, len, len],
        [1, 6, 0, DATA, 0, 8192],
        [2, 4, dynamic, dynamic, rela - dynamic, rela - dynamic],
    ];
    for [kind, flags, offset, address, stored, size] in segments {
        put(kind, 4);
        put(flags, 4);
        [offset, address, address, stored, size, 4096].into_iter().for_each(|value| put(value, 8));
    }
    let entries =
        [(7, rela), (8, relr - rela), (9, 24), (36, relr), (35, len - relr), (37, 8), (0, 0)];
    entries.into_iter().flat_map(|(tag, value)| [tag, value]).for_each(|value| put(value, 8));
    // A word that becomes the base and 5; a word, and the third and fifth behind it.
    [DATA, 8, 5, DATA + 64, 0b10_1001].into_iter().for_each(|value| put(value, 8));
    file
}

/// A program of a Linux guest: a segment of code with the headers, one of data, and a loader.
fn linux_program_seed() -> Vec<u8> {
    const LOADER: &[u8] = b"/lib64/ld-linux-x86-64.so.2\0";
    let headers = 64 + 3 * 56;
    let len = headers + LOADER.len() as u64;
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    let mut put = |value: u64, size: usize| file.extend_from_slice(&value.to_le_bytes()[..size]);
    put(0, 8);
    put(0, 1);
    let sizes = [2, 2, 4, 8, 8, 8, 4, 2, 2, 2, 2, 2, 2];
    let header = [3, 62, 1, 64, 64, 0, 0, 64, 56, 3, 0, 0, 0];
    header.into_iter().zip(sizes).for_each(|(value, size)| put(value, size));
    // Type, flags, offset, address, length in the file and in memory.
    let segments = [
        [3, 4, headers, headers, LOADER.len() as u64, LOADER.len() as u64],
        [1, 5, 0, 0, len, len],
        [1, 6, 0, 4096, 16, 8192],
    ];
    for [kind, flags, offset, address, stored, size] in segments {
        put(kind, 4);
        put(flags, 4);
        [offset, address, address, stored, size, 4096].into_iter().for_each(|value| put(value, 8));
    }
    file.extend_from_slice(LOADER);
    file
}

/// A turn of three pages and five bytes of state, with a step of every kind.
fn turn_seed() -> Vec<u8> {
    let mut program = vec![1 << 2, 2, 1 << 2 | 1, 2 << 2 | 2, 0, 3, 1, 9, 0, 2, 8, 7, 1 << 2 | 3];
    program.extend_from_slice(&[5; 4096]);
    program.extend_from_slice(&[3 << 1, 1, 2 << 1 | 1, 6, 6]);
    let mut seed = b"AFRESHTN".to_vec();
    seed.extend_from_slice(&1_u32.to_le_bytes());
    seed.extend_from_slice(&0_u32.to_le_bytes());
    let len = program.len() as u64;
    for length in [3, 4, 4, 5, len, len] {
        seed.extend_from_slice(&length.to_le_bytes());
    }
    seed.extend_from_slice(&[0; 64]);
    seed.extend_from_slice(&program);
    seed
}

/// A page layer as the target takes it: the number of its pages, and what follows them.
fn layer_seed(bytes: &[u8]) -> Vec<u8> {
    const PAGE: usize = 4096;
    // Compressed layers begin with a frame of zstd, and are short.
    let pages = if bytes.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) { 0 } else { bytes.len() / PAGE };
    let mut seed = vec![pages as u8];
    seed.extend_from_slice(&bytes[pages * PAGE..]);
    seed
}

/// Configuration, manifest and index of each snapshot, with marks in place of digests and lengths.
fn layout_seeds(blobs: &BTreeMap<String, Vec<u8>>, index: &str) -> Vec<Vec<u8>> {
    let mark = |text: &str, name: &str, mark: char| {
        let size = blobs[name].len();
        let marked = format!("\"${mark}\",\"size\":${}", mark.to_ascii_lowercase());
        text.replace(&format!("\"sha256:{name}\",\"size\":{size}"), &marked)
    };
    let mut seeds = Vec::new();
    for (id, manifest) in blobs {
        let manifest = String::from_utf8_lossy(manifest);
        let named = manifest.split_once("config.v1+json\",\"digest\":\"sha256:");
        let Some(config) = named.and_then(|(_, rest)| rest.get(..64)) else { continue };
        let parts = [
            String::from_utf8_lossy(&blobs[config]).into_owned(),
            mark(&manifest, config, 'C'),
            mark(index, id, 'M').replace("\"base\"", "\"a\""),
        ];
        seeds.push(parts.join("\0").into_bytes());
    }
    seeds
}

/// An archive as the target takes it: pages become zeros, and blocks of zeros are counted.
fn archive_seed(bytes: &[u8]) -> Vec<u8> {
    const BLOCK: usize = 512;
    let mut seed = Vec::new();
    let mut zeros = 0u8;
    for page in bytes.chunks(8 * BLOCK) {
        let says = |word: &[u8]| page.windows(word.len()).any(|part| part == word);
        let dull = ![b"ustar".as_slice(), b"AFRESHPG", b"{\""].iter().any(|word| says(word));
        for block in page.chunks(BLOCK) {
            if (dull || block.iter().all(|byte| *byte == 0)) && zeros < u8::MAX {
                zeros += 1;
                continue;
            }
            if zeros > 0 {
                seed.extend([0xfe, zeros]);
                zeros = 0;
            }
            seed.extend_from_slice(block);
        }
    }
    seed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_a_source_an_entry_and_seeds_that_are_short() -> Result<()> {
        let folder = host::repository().join("fuzz");
        let manifest = fs::read_to_string(folder.join("Cargo.toml"))?;
        let seeds = seeds(&host::repository().join("crates/store/tests/golden"))?;
        for target in TARGETS {
            assert!(folder.join("fuzz_targets").join(target).with_extension("rs").is_file());
            assert!(manifest.contains(&format!("name = \"{target}\"")), "{target}");
            assert!(!seeds[target].is_empty(), "{target}");
            assert!(seeds[target].iter().all(|seed| seed.len() < 16 << 10), "{target}");
        }
        assert_eq!(fs::read_dir(folder.join("fuzz_targets"))?.count(), TARGETS.len());
        assert_eq!(seeds["layout"].len(), 3);
        let layout = String::from_utf8_lossy(&seeds["layout"][0]);
        assert!(["$C", "$c", "$M", "$m"].iter().all(|mark| layout.contains(mark)), "{layout}");
        Ok(())
    }

    #[test]
    fn coverage_is_read_from_the_output_of_the_fuzzer() {
        let said =
            "INFO: x\n#3\tINITED cov: 37 ft: 37 corp: 1/1b\n#9\tDONE   cov: 52 ft: 60\nDone 9";
        let line = reached(said).expect("both lines are there");
        assert_eq!(line, "9 inputs, 37 edges reached by the seeds, 52 at the end");
        assert_eq!(reached("#3\tINITED cov: 37"), None);
    }
}
