//! WASI's own test suite on file trees: every program of preview 1 that it has must end well.
//!
//! The programs are none of ours. Whoever has a copy of the suite's built branch names its directory `tests` in
//! `AFRESH_WASI_TESTSUITE`; without it this test says that it was skipped.

use std::path::{Path, PathBuf};

use afresh_wasm::afresh_files::{Budget, Layer, LayerLimits, Tree};
use afresh_wasm::{
    CallError, Engine, EngineConfig, Guest, GuestOptions, Mode, Output, WarmUp, Wasi,
};

/// Preview 1 programs below a directory.
fn programs(root: &Path) -> Vec<PathBuf> {
    let (mut ahead, mut found) = (vec![root.to_owned()], Vec::new());
    while let Some(directory) = ahead.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                ahead.push(path);
            } else if path.extension().is_some_and(|extension| extension == "wasm")
                && path.to_string_lossy().contains("wasm32-wasip1")
            {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// What a program's description says under a key, as plain text.
fn described(program: &Path, key: &str) -> Option<serde_json::Value> {
    let text = std::fs::read_to_string(program.with_extension("json")).ok()?;
    serde_json::from_str::<serde_json::Value>(&text).unwrap().get(key).cloned()
}

fn run(engine: &Engine, program: &Path) -> Result<(), String> {
    let (mut files, mut env) = (None, Vec::new());
    if let Some(root) = described(program, "root") {
        let root = program.parent().unwrap().join(root.as_str().unwrap());
        let layer = Layer::open(root, &LayerLimits::default()).map_err(|e| e.to_string())?;
        let tree = Tree::new(Budget::default()).over("/", &layer).map_err(|e| e.to_string())?;
        files = Some(tree);
        env.push(("ERRNO_MODE_UNIX".to_owned(), "1".to_owned()));
    }
    let texts = |value: serde_json::Value| -> Vec<String> {
        value.as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_owned()).collect()
    };
    if let Some(more) = described(program, "env") {
        let pairs = more.as_object().unwrap().iter();
        env = pairs.map(|(k, v)| (k.clone(), v.as_str().unwrap().to_owned())).collect();
    }
    let mut args = vec!["program".to_owned()];
    args.extend(described(program, "args").map(texts).unwrap_or_default());
    let output = Output::Capture(1 << 20);
    let wasi = Wasi { files, env, args, output, ..Wasi::default() };
    let options = GuestOptions { wasi, mode: Mode::Fresh, ..GuestOptions::default() };
    let wasm = std::fs::read(program).unwrap();
    let warm = Guest::with_options(engine, &wasm, options)
        .map_err(|e| e.to_string())?
        .warm(WarmUp::new())
        .map_err(|e| e.to_string())?;
    let mut lease = warm.lease().map_err(|e| e.to_string())?;
    let ended = lease.call("_start", &[]);
    let said = String::from_utf8_lossy(&lease.host().stderr()).into_owned();
    let code = match ended {
        Ok(_) => 0,
        Err(CallError::Exit(code)) => code,
        Err(error) => return Err(format!("{error}\n{said}")),
    };
    let expected = described(program, "exit_code").map_or(0, |code| code.as_i64().unwrap() as i32);
    let printed = described(program, "stdout").map(|text| text.as_str().unwrap().to_owned());
    if code != expected {
        return Err(format!("it ended with {code}\n{said}"));
    }
    match printed {
        Some(text) if lease.host().stdout() != text.as_bytes() => {
            Err("it printed something else".into())
        }
        _ => Ok(()),
    }
}

#[test]
fn every_program_of_the_public_suite_ends_well() {
    let Some(root) = std::env::var_os("AFRESH_WASI_TESTSUITE") else {
        println!(
            "SKIPPED: WASI's test suite is not here; AFRESH_WASI_TESTSUITE names its directory of tests"
        );
        return;
    };
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let programs = programs(Path::new(&root));
    assert!(!programs.is_empty(), "there are no programs in {}", root.display());
    let mut failed = Vec::new();
    for program in &programs {
        if let Err(why) = run(&engine, program) {
            failed.push(format!("{}: {why}", program.file_stem().unwrap().to_string_lossy()));
        }
    }
    println!("{} of {} programs ended well", programs.len() - failed.len(), programs.len());
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}
