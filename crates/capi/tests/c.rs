//! The C interface from C, and its header.
#![cfg(not(miri))]

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use afresh_pager::PageSource;
use afresh_pager::vmm::{Cause, ControlServer, Snapshots, SocketAccess, VmmHost};
use afresh_store::{GuestBuild, MemoryPages, SaveRequest, Store};

fn here() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// `AFRESH_UPDATE_HEADER=1` writes the header anew.
#[test]
fn the_header_says_what_the_source_says() {
    let config = cbindgen::Config::from_file(here().join("cbindgen.toml")).unwrap();
    let mut text = Vec::new();
    cbindgen::Builder::new()
        .with_config(config)
        .with_src(here().join("src/lib.rs"))
        .generate()
        .unwrap()
        .write(&mut text);
    let path = here().join("include/afresh.h");
    if std::env::var_os("AFRESH_UPDATE_HEADER").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let found = std::fs::read(&path).unwrap();
    assert!(found == text, "include/afresh.h is stale: run with AFRESH_UPDATE_HEADER=1");
}

/// The library that cargo built next to this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    // Beside the test when only tests are built, one level up after `cargo build`.
    let deps = test.parent().unwrap();
    let beside = deps.join("libafresh.so");
    if beside.exists() { beside } else { deps.parent().unwrap().join("libafresh.so") }
}

/// Compiles an example to a program in `dir`.
fn compile(example: &str, dir: &std::path::Path) -> Option<PathBuf> {
    let library = library();
    if !library.exists() {
        println!("SKIPPED: {} was not built", library.display());
        return None;
    }
    let program = dir.join(example);
    let compiled = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .arg(&program)
        .arg(here().join("examples").join(example).with_extension("c"))
        .arg("-I")
        .arg(here().join("include"))
        .arg(&library)
        .output();
    let compiled = match compiled {
        Ok(output) => output,
        Err(error) => {
            println!("SKIPPED: no C compiler: {error}");
            return None;
        }
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    Some(program)
}

struct NoSnapshots;

impl Snapshots for NoSnapshots {
    fn open(&self, reference: &str) -> Result<Arc<dyn PageSource>, Cause> {
        Err(format!("{reference} is not here").into())
    }

    fn target(&self, reference: &str) -> Result<(Store, String), Cause> {
        Err(format!("{reference} is not here").into())
    }
}

#[test]
fn a_c_program_controls_a_pager() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = compile("control", dir.path()) else { return };
    let socket = dir.path().join("ctl");
    let run = |requests: &[&str]| {
        Command::new(&program)
            .env("LD_LIBRARY_PATH", library().parent().unwrap())
            .arg(&socket)
            .args(requests)
            .output()
            .unwrap()
    };
    let output = run(&["{}"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("No such file"), "{output:?}");
    let host = VmmHost::new(None, |_| {});
    let server = ControlServer::bind(&socket, SocketAccess::default(), host, NoSnapshots).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| server.serve(&over));
        let output = run(&[
            "{\"request\":\n\"list\",\"id\":7}",
            "list",
            "{\"request\":\"freeze\",\"vm\":\"a\"}",
            "{\"request\":\"stats\"}",
        ]);
        over.store(true, Ordering::Release);
        serving.join().unwrap();
        let answers = String::from_utf8(output.stdout).unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        let words = ["\"id\":7", "no VMM is called a", "\"vms\":[]"];
        assert_eq!(answers.lines().count(), 3, "{answers}{errors}");
        for (line, word) in answers.lines().zip(words) {
            assert!(line.contains(word), "{line}");
        }
        assert!(errors.contains("-1: a request is a JSON object"), "{errors}");
        assert!(errors.contains("-8: no VMM is called a"), "{errors}");
    });
}

#[test]
fn a_c_program_restores_a_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let memory = MemoryPages((0..4096 * 700).map(|n| (n / 5000) as u8).collect());
    let sum: u64 = memory.0.iter().map(|byte| u64::from(*byte)).sum();
    let save = SaveRequest::new(GuestBuild {
        kind: "arena".into(),
        module: "none".into(),
        engine: "none".into(),
        cpu: Vec::new(),
    });
    Store::create(dir.path().join("store")).unwrap().save("warm", &memory, &save).unwrap();

    let Some(program) = compile("restore", dir.path()) else { return };
    let library = library();
    let run = |arguments: &[&str]| {
        Command::new(&program)
            .current_dir(dir.path())
            .env("LD_LIBRARY_PATH", library.parent().unwrap())
            .args(arguments)
            .output()
            .unwrap()
    };
    for strategy in [&[][..], &["stream"], &["working-set"], &["read"]] {
        let output = run(&[&["store", "warm"], strategy].concat());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(text, format!("{} {sum} 1\n", 4096 * 700), "{output:?}");
    }
    let output = run(&["store", "cold"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("no snapshot named `cold`"));
    let output = run(&["store", "warm", "teleport"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("unknown restore strategy"));
}
