//! Plug-ins of Extism, over Extism's own kernel: called as Extism calls them, and pristine for
//! every call.

use std::path::Path;
use std::sync::{Arc, Mutex};

use afresh_snapshot::Guest as _;
use afresh_wasm::afresh_files::{Budget, Time, Tree};
use afresh_wasm::wasmtime::{Caller, Linker};
use afresh_wasm::{
    CallError, Engine, EngineConfig, Extism, Guest, GuestOptions, Host, Imports, LeaseOptions,
    LoadError, LogLevel, Mode, Roots, Session, Warm, WarmUp, Wasi, extism_bytes, extism_handle,
};

fn file(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests").join(name);
    std::fs::read(&path).unwrap_or_else(|e| {
        panic!("{}: {e}; run `cargo xtask guests --only extism`", path.display())
    })
}

fn kernel() -> Vec<u8> {
    file("extism-kernel.wasm")
}

fn guest(engine: &Engine, extism: Extism, options: GuestOptions) -> Guest {
    let plugin = file("extism.wasm");
    Guest::extism(engine, &kernel(), &[("main", &plugin)], extism, options).unwrap()
}

fn warm_with(engine: &Engine, extism: Extism, options: GuestOptions) -> Warm {
    guest(engine, extism, options).warm(WarmUp::new().call_bytes("warm", "500")).unwrap()
}

fn ask(warm: &Warm, name: &str, input: &str) -> Result<String, CallError> {
    let entry = warm.bytes_entry(name).unwrap();
    let answer = warm.lease().unwrap().call_bytes(&entry, input.as_bytes())?;
    Ok(String::from_utf8(answer).unwrap())
}

#[test]
fn a_plug_in_starts_every_call_from_its_warm_dictionary_and_variables() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    for mode in [Mode::Reset, Mode::Fresh] {
        let options = GuestOptions { mode, verify_every: Some(1), ..GuestOptions::default() };
        let warm = warm_with(&engine, Extism::new(), options);
        assert_eq!(warm.report().mode, mode);
        let [plant, probe, handle] =
            ["plant", "probe", "handle"].map(|n| warm.bytes_entry(n).unwrap());
        for round in 0..12 {
            assert_eq!(ask(&warm, "handle", "word-7 word-499 word-500").unwrap(), "506 1 yes");
            let mut lease = warm.lease().unwrap();
            // Calls of one lease share their state.
            lease.call_bytes(&handle, b"").unwrap();
            assert_eq!(lease.call_bytes(&handle, b"word-1").unwrap(), b"1 2 yes");
            let secret = "canary-".repeat(1 + 400 * (round % 3));
            assert_eq!(lease.call_bytes(&plant, secret.as_bytes()).unwrap(), secret.as_bytes());
            let traces = lease.call_bytes(&probe, secret.as_bytes()).unwrap();
            assert_eq!(traces, b"static dictionary variable removed");
            drop(lease);
            assert!(warm.compare().unwrap().is_clean(), "{mode:?}");
            assert_eq!(ask(&warm, "probe", &secret).unwrap(), "", "{mode:?}");
        }
    }
}

#[test]
fn inputs_and_answers_of_any_size_come_whole() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let warm = warm_with(&engine, Extism::new(), GuestOptions::default());
    let echo = warm.bytes_entry("echo").unwrap();
    for size in [0, 1, 7, 8, 4096, 65_537, 3 << 20, 5, 0] {
        let input: Vec<u8> = (0..size).map(|n: usize| (n % 251) as u8).collect();
        assert!(warm.lease().unwrap().call_bytes(&echo, &input).unwrap() == input, "{size}");
    }
    // One lease, whose kernel is reset by each call: no input is left for the next.
    let mut lease = warm.lease().unwrap();
    assert_eq!(lease.call_bytes(&echo, b"long input").unwrap(), b"long input");
    assert_eq!(lease.call_bytes(&echo, b"").unwrap(), b"");
    for _ in 0..200 {
        lease.call_bytes(&echo, &[1; 60_000]).unwrap();
    }
}

#[test]
fn a_failure_carries_the_error_of_the_plug_in() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let warm = warm_with(&engine, Extism::new(), GuestOptions::default());
    for _ in 0..3 {
        match ask(&warm, "fail", "no such colour") {
            Err(CallError::Failed { status: 7, message }) => assert_eq!(message, "no such colour"),
            other => panic!("{other:?}"),
        }
        assert!(matches!(ask(&warm, "panic", "x"), Err(CallError::Trap { .. })));
        let refused = ask(&warm, "fetch", "").unwrap_err().to_string();
        assert!(refused.contains("http_request") && refused.contains("imports"), "{refused}");
        assert_eq!(ask(&warm, "handle", "word-3").unwrap(), "3 1 yes");
    }
    let failed = guest(&engine, Extism::new(), GuestOptions::default())
        .warm(WarmUp::new().call_bytes("fail", "at once"))
        .unwrap_err();
    assert!(failed.to_string().contains("at once"), "{failed}");
}

#[test]
fn configuration_and_log_are_the_hosts() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let log = told.clone();
    let extism = Extism::new()
        .config("words", "12")
        .log(LogLevel::Info, move |level, text| log.lock().unwrap().push((level, text.to_owned())));
    let warm = guest(&engine, extism, GuestOptions::default())
        .warm(WarmUp::new().call_bytes("warm", ""))
        .unwrap();
    assert_eq!(ask(&warm, "handle", "word-11 word-12").unwrap(), "11 1 yes");
    ask(&warm, "plant", "s").unwrap();
    assert_eq!(*told.lock().unwrap(), [(LogLevel::Info, "planted s".to_owned())]);
}

#[test]
fn variables_keep_to_the_budget_of_the_guests_tree() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let warm = warm_with(&engine, Extism::new(), GuestOptions::default());
    let refused = ask(&warm, "plant", &"x".repeat(2 << 20)).unwrap_err().to_string();
    assert!(refused.contains("variable") && refused.contains("budget"), "{refused}");
    let files = Some(Tree::new(Budget { bytes: 16 << 20, files: 100 }));
    let wasi = Wasi { files, ..Wasi::default() };
    let warm = warm_with(&engine, Extism::new(), GuestOptions { wasi, ..GuestOptions::default() });
    ask(&warm, "plant", &"x".repeat(2 << 20)).unwrap();
    let wasi = Wasi { dirs: vec![(".".into(), "/host".to_owned(), false)], ..Wasi::default() };
    let options = GuestOptions { wasi, ..GuestOptions::default() };
    let none = guest(&engine, Extism::new(), options).warm(WarmUp::new().call_bytes("warm", ""));
    let refused = none.unwrap_err().to_string();
    assert!(refused.contains("Wasi::files"), "{refused}");
}

#[test]
fn a_variable_longer_than_a_plug_in_may_read_is_refused() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let path = format!("/extism-vars/{}", blake3::hash(b"secret").to_hex());
    for (size, limit) in [(1 << 40, usize::MAX), (9 << 20, 8 << 20)] {
        // The budget does not count holes.
        let mut files = Tree::new(Budget { bytes: 1 << 20, files: 100 });
        let node = files.write_path(&path, b"", Time::from_nanos(0)).unwrap();
        files.set_size(node, size, Time::from_nanos(0)).unwrap();
        let wasi = Wasi { files: Some(files), ..Wasi::default() };
        let options = GuestOptions { wasi, memory_limit: limit, ..GuestOptions::default() };
        let warm = warm_with(&engine, Extism::new(), options);
        let refused = ask(&warm, "probe", "none").unwrap_err().to_string();
        assert!(refused.contains("a variable has more than"), "{refused}");
    }
}

#[test]
fn sessions_roll_variables_back_and_snapshots_hold_them() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let guest = guest(&engine, Extism::new(), GuestOptions::default());
    let warm = guest.warm(WarmUp::new().call_bytes("warm", "500")).unwrap();
    let options = Extism::new().options(GuestOptions::default());
    let frozen = warm.freeze().unwrap();
    let thawed = Warm::thaw(&engine, &options, &frozen).unwrap();
    assert_eq!(ask(&thawed, "handle", "word-9").unwrap(), "9 1 yes");
    ask(&thawed, "plant", "s").unwrap();
    assert_eq!(ask(&thawed, "probe", "s").unwrap(), "");

    let [plant, probe] = ["plant", "probe"].map(|name| warm.bytes_entry(name).unwrap());
    let root = warm.root().unwrap();
    let mut session = Session::make(&warm, &root).unwrap();
    session.lease().call_bytes(&plant, b"kept").unwrap();
    let planted = session.checkpoint().unwrap();
    for (state, traces) in [(&root, ""), (&planted, "static dictionary variable removed")] {
        session.switch(state).unwrap();
        assert_eq!(session.lease().call_bytes(&probe, b"kept").unwrap(), traces.as_bytes());
    }

    let mut lease = warm.lease().unwrap();
    lease.call_bytes(&plant, b"kept").unwrap();
    let thawed = Warm::thaw(&engine, &options, &lease.freeze().unwrap()).unwrap();
    assert_eq!(ask(&thawed, "probe", "kept").unwrap(), "static dictionary variable removed");
}

#[test]
fn only_named_functions_may_be_called_and_the_kernel_still_serves_the_host() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let roots = Roots::Named(vec!["handle".to_owned(), "fail".to_owned()]);
    let warm = warm_with(&engine, Extism::new(), GuestOptions { roots, ..GuestOptions::default() });
    assert_eq!(ask(&warm, "handle", "word-2").unwrap(), "2 1 yes");
    assert!(matches!(ask(&warm, "fail", "so"), Err(CallError::Failed { status: 7, .. })));
    assert!(matches!(warm.bytes_entry("plant"), Err(CallError::NotARoot { .. })));
}

#[tokio::test]
async fn a_plug_in_is_called_in_a_task() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let options = GuestOptions { asynchronous: true, ..GuestOptions::default() };
    let warm_up = WarmUp::new().call_bytes("warm", "500");
    let warm = guest(&engine, Extism::new(), options).warm_async(warm_up).await.unwrap();
    let [handle, plant] = ["handle", "plant"].map(|name| warm.bytes_entry(name).unwrap());
    for _ in 0..3 {
        let mut lease = warm.lease_async(&LeaseOptions::default()).await.unwrap();
        assert_eq!(lease.call_bytes_async(&handle, b"word-4").await.unwrap(), b"4 1 yes");
        lease.call_bytes_async(&plant, b"s").await.unwrap();
    }
}

/// A plug-in without a kit, which calls a host function of the embedder.
const USER: &str = r#"(module
    (import "extism:host/env" "input_length" (func $length (result i64)))
    (import "extism:host/env" "input_load_u8" (func $load (param i64) (result i32)))
    (import "extism:host/env" "alloc" (func $alloc (param i64) (result i64)))
    (import "extism:host/env" "store_u8" (func $store (param i64 i32)))
    (import "extism:host/env" "length" (func $of (param i64) (result i64)))
    (import "extism:host/env" "output_set" (func $output (param i64 i64)))
    (import "extism:host/user" "twice" (func $twice (param i64) (result i64)))
    (memory (export "memory") 1)
    (global $initialized (mut i32) (i32.const 0))
    (func (export "__wasm_call_ctors") (global.set $initialized (i32.const 1)))
    (func (export "bare"))
    (func (export "status") (result i32) (i32.const 9))
    (func (export "twice") (result i32) (local $at i64)
        (if (i32.eqz (global.get $initialized)) (then (unreachable)))
        (local.set $at (call $alloc (i64.const 1)))
        (call $store (local.get $at) (call $load (i64.const 0)))
        (local.set $at (call $twice (local.get $at)))
        (call $output (local.get $at) (call $of (local.get $at)))
        (i32.const 0)))"#;

fn user(kernel: &[u8]) -> Result<Guest, LoadError> {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let imports = Imports::new(|linker: &mut Linker<Host>| {
        linker.func_wrap(
            "extism:host/user",
            "twice",
            |mut caller: Caller<'_, Host>, at: i64| {
                let bytes = extism_bytes(&mut caller, at as u64)?;
                extism_handle(&mut caller, &bytes.repeat(2)).map(|at| at as i64)
            },
        )?;
        Ok(())
    });
    let options = GuestOptions { imports, ..GuestOptions::default() };
    let plugin = wat::parse_str(USER).unwrap();
    Guest::extism(&engine, kernel, &[("main", &plugin)], Extism::new(), options)
}

#[test]
fn functions_of_the_embedders_take_and_give_handles() {
    let warm = user(&kernel()).unwrap().warm(WarmUp::new()).unwrap();
    for _ in 0..3 {
        assert_eq!(ask(&warm, "twice", "ab").unwrap(), "aa");
        assert_eq!(ask(&warm, "bare", "ab").unwrap(), "");
        let failed = ask(&warm, "status", "ab");
        assert!(matches!(failed, Err(CallError::Failed { status: 9, .. })), "{failed:?}");
    }
}

#[test]
fn a_module_that_is_no_kernel_is_refused_with_its_missing_exports() {
    let other = wat::parse_str(r#"(module (func (export "reset")) (memory (export "memory") 1))"#);
    let error = user(&other.unwrap()).unwrap_err().to_string();
    assert!(error.contains("alloc") && error.contains("kernel"), "{error}");
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let error = Guest::extism(&engine, &kernel(), &[], Extism::new(), GuestOptions::default());
    assert!(error.unwrap_err().to_string().contains("plug-in"));
}
