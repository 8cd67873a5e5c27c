//! Every call starts with the state that a warm-up leaves, or the warm-up is refused with the
//! reason.

use std::fs;

use afresh_wasm::{
    CallError, Engine, EngineConfig, Frozen, Guest, GuestOptions, LoadError, Mode, Val, Warm,
    WarmError, WarmUp, Wasi,
};

fn engine() -> Engine {
    Engine::new(EngineConfig::default()).unwrap()
}

fn guest(text: &str, options: GuestOptions) -> Guest {
    Guest::with_options(&engine(), &wat::parse_str(text).unwrap(), options).unwrap()
}

fn number(lease: &mut afresh_wasm::Lease<'_>, name: &str) -> i32 {
    match lease.call(name, &[]).unwrap()[..] {
        [Val::I32(n)] => n,
        _ => panic!("{name} gives no number"),
    }
}

/// Leases that are out at the same time are different instances.
fn in_several(warm: &Warm, name: &str, wanted: i32) {
    for _ in 0..3 {
        let mut leases: Vec<_> = (0..3).map(|_| warm.lease().unwrap()).collect();
        for lease in &mut leases {
            assert_eq!(lease.differences().unwrap(), (0, 0));
            assert_eq!(number(lease, name), wanted);
        }
    }
}

#[test]
fn an_object_that_nothing_sets_is_in_every_instance() {
    // `grow` has the instance replaced.
    let warm = guest(
        r#"(module
            (type $box (struct (field i32)))
            (table 1 funcref)
            (global $kept (mut (ref $box)) (struct.new $box (i32.const 42)))
            (global $extern (mut externref) (ref.null extern))
            (func (export "grow") (result i32) (table.grow (ref.null func) (i32.const 1)))
            (func (export "read") (result i32) (struct.get $box 0 (global.get $kept))))"#,
        GuestOptions { mode: Mode::Reset, ..GuestOptions::default() },
    )
    .warm(WarmUp::new().call("read", &[]))
    .unwrap();
    in_several(&warm, "read", 42);
    for _ in 0..3 {
        assert_eq!(number(&mut warm.lease().unwrap(), "grow"), 1);
    }
    in_several(&warm, "read", 42);
    assert!(warm.growth_stats().0 > 0, "instances were replaced");
}

const INTEGER: &str = r#"(module
    (table $t (export "t") 2 i31ref)
    (global $kept (mut i31ref) (ref.i31 (i32.const 1)))
    (global $any (mut anyref) (ref.null any))
    (func (export "warm")
        (global.set $kept (ref.i31 (i32.const -7)))
        (global.set $any (ref.i31 (i32.const 50)))
        (table.set $t (i32.const 1) (ref.i31 (i32.const 100))))
    (func (export "spoil") (result i32)
        (global.set $kept (ref.null i31))
        (global.set $any (global.get $kept))
        (table.set $t (i32.const 1) (ref.null i31))
        (i32.const 0))
    (func (export "read") (result i32)
        (i32.add (i31.get_s (global.get $kept))
            (i32.add (i31.get_s (ref.cast i31ref (global.get $any)))
                (i31.get_s (table.get $t (i32.const 1)))))))"#;

#[test]
fn small_integers_in_references_are_kept() {
    for mode in [Mode::Reset, Mode::Fresh] {
        let options = GuestOptions { mode, ..GuestOptions::default() };
        let warm = guest(INTEGER, options.clone()).warm(WarmUp::new().call("warm", &[])).unwrap();
        for _ in 0..2 {
            in_several(&warm, "read", 143);
            number(&mut warm.lease().unwrap(), "spoil");
        }
        let frozen = warm.freeze().unwrap();
        let frozen = Frozen::from_parts(frozen.memory().clone(), &frozen.bytes().unwrap()).unwrap();
        in_several(&Warm::thaw(&engine(), &options, &frozen).unwrap(), "read", 143);
    }
}

const OBJECT: &str = r#"(module
    (type $box (struct (field i32)))
    (memory 1)
    (global $kept (mut (ref null $box)) (struct.new $box (i32.const 5)))
    (func (export "warm") (global.set $kept (struct.new $box (i32.const 6))))
    (func (export "clear") (global.set $kept (ref.null $box)))
    (func (export "read") (result i32)
        (if (result i32) (ref.is_null (global.get $kept))
            (then (i32.const -1))
            (else (struct.get $box 0 (global.get $kept))))))"#;

#[test]
fn an_object_that_a_warm_up_keeps_is_refused_by_name() {
    for mode in [Mode::Auto, Mode::Reset, Mode::Fresh] {
        let options = GuestOptions { mode, ..GuestOptions::default() };
        let guest = guest(OBJECT, options);
        let refused = guest.warm(WarmUp::new().call("warm", &[])).unwrap_err();
        assert!(matches!(refused, WarmError::State(_)), "{refused}");
        assert!(refused.to_string().contains("global 0"), "{refused}");
        let warm = guest.warm(WarmUp::new().call("warm", &[]).call("clear", &[])).unwrap();
        in_several(&warm, "read", -1);
    }
}

#[test]
fn without_a_warm_up_an_object_has_every_instance_start_from_the_module() {
    let warm = guest(OBJECT, GuestOptions::default()).warm(WarmUp::new()).unwrap();
    assert_eq!(warm.report().mode, Mode::Fresh);
    assert!(warm.report().why_fresh.as_ref().unwrap().contains("global 0"));
    in_several(&warm, "read", 5);
    warm.lease().unwrap().call("warm", &[]).unwrap();
    in_several(&warm, "read", 5);
    let options = GuestOptions { mode: Mode::Reset, ..GuestOptions::default() };
    let refused = guest(OBJECT, options).warm(WarmUp::new()).unwrap_err();
    assert!(refused.to_string().contains("global 0"), "{refused}");
}

#[test]
fn a_fork_that_holds_an_object_is_refused_and_the_object_is_a_difference() {
    let warm = guest(OBJECT, GuestOptions { mode: Mode::Reset, ..GuestOptions::default() })
        .warm(WarmUp::new().call("clear", &[]))
        .unwrap();
    let mut lease = warm.lease().unwrap();
    lease.freeze().unwrap();
    lease.call("warm", &[]).unwrap();
    assert_eq!(lease.differences().unwrap(), (0, 1));
    let refused = lease.freeze().unwrap_err().to_string();
    assert!(refused.contains("global 0"), "{refused}");
}

#[test]
fn shared_memory_is_refused_before_anything_runs() {
    for mode in [Mode::Auto, Mode::Fresh, Mode::Reset] {
        let options = GuestOptions { mode, ..GuestOptions::default() };
        let refused = guest("(module (memory 1) (memory 1 2 shared))", options)
            .warm(WarmUp::new())
            .unwrap_err();
        assert!(matches!(refused, WarmError::Refused { .. }), "{refused}");
        assert!(refused.to_string().contains("memory 1"), "{refused}");
    }
}

/// Writes a byte to `/a/out` or `/b/out`, whose directories are descriptors 3 and 4; opens and
/// reads.
const FILES: &str = r#"(module
    (import "wasi_snapshot_preview1" "path_open"
        (func $path_open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_read"
        (func $fd_read (param i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_write"
        (func $fd_write (param i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_close" (func $fd_close (param i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_renumber" (func $fd_renumber (param i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "clock_time_get"
        (func $clock_time_get (param i32 i64 i32) (result i32)))
    (memory (export "memory") 1)
    (data (i32.const 0) "a.txt")
    (data (i32.const 16) "b.txt")
    (data (i32.const 32) "out")
    ;; An iovec of one byte at 72.
    (data (i32.const 64) "\48\00\00\00\01\00\00\00")
    (global $open (mut i32) (i32.const -1))
    (func $path (param $dir i32) (param $name i32) (param $len i32) (param $flags i32) (result i32)
        (if (call $path_open (local.get $dir) (i32.const 0) (local.get $name) (local.get $len)
                (local.get $flags)
                (select (i64.const 64) (i64.const 2) (local.get $flags)) (i64.const 0)
                (i32.const 0) (i32.const 80))
            (then (return (i32.const -1))))
        (i32.load (i32.const 80)))
    (func (export "open_a") (global.set $open (call $path (i32.const 3) (i32.const 0) (i32.const 5) (i32.const 0))))
    (func (export "open_b") (global.set $open (call $path (i32.const 3) (i32.const 16) (i32.const 5) (i32.const 0))))
    (func (export "read") (result i32)
        (if (call $fd_read (global.get $open) (i32.const 64) (i32.const 1) (i32.const 76))
            (then (return (i32.const -1))))
        (i32.load8_u (i32.const 72)))
    (func (export "close") (drop (call $fd_close (global.get $open))))
    (func (export "close_directory") (drop (call $fd_close (i32.const 3))))
    (func (export "close_input") (drop (call $fd_close (i32.const 0))))
    (func (export "swap") (drop (call $fd_renumber (i32.const 4) (i32.const 3))))
    (func (export "write_to") (param $dir i32) (result i32)
        (local $fd i32)
        (local.set $fd (call $path (local.get $dir) (i32.const 32) (i32.const 3) (i32.const 1)))
        (if (i32.lt_s (local.get $fd) (i32.const 0)) (then (return (i32.const -1))))
        (i32.store8 (i32.const 72) (i32.const 33))
        (call $fd_write (local.get $fd) (i32.const 64) (i32.const 1) (i32.const 76)))
    (func (export "now") (result i64)
        (drop (call $clock_time_get (i32.const 1) (i64.const 0) (i32.const 88)))
        (i64.load (i32.const 88)))
    (global $seen (mut i64) (i64.const 0))
    (func (export "remember")
        (drop (call $clock_time_get (i32.const 1) (i64.const 0) (i32.const 88)))
        (global.set $seen (i64.load (i32.const 88))))
    (func (export "passed") (result i64)
        (drop (call $clock_time_get (i32.const 1) (i64.const 0) (i32.const 88)))
        (i64.sub (i64.load (i32.const 88)) (global.get $seen))))"#;

/// Directories for `/a` and `/b`, and the guest's options with them.
fn directories() -> (tempfile::TempDir, GuestOptions) {
    let dir = tempfile::tempdir().unwrap();
    let mut dirs = Vec::new();
    for name in ["a", "b"] {
        let path = dir.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("a.txt"), "A").unwrap();
        fs::write(path.join("b.txt"), "B").unwrap();
        dirs.push((path, format!("/{name}"), true));
    }
    let wasi = Wasi { dirs, ..Wasi::default() };
    (dir, GuestOptions { wasi, ..GuestOptions::default() })
}

#[test]
fn descriptors_that_a_warm_up_leaves_otherwise_than_it_found_them_are_refused_by_number() {
    let (_dir, options) = directories();
    for mode in [Mode::Reset, Mode::Fresh] {
        let guest = guest(FILES, GuestOptions { mode, ..options.clone() });
        for (calls, number) in [
            (&["open_a"][..], 5),
            (&["open_a", "open_b"], 5),
            (&["close_directory"], 3),
            (&["close_input"], 0),
            (&["swap"], 3),
            (&["open_b", "close", "open_a", "open_b", "close"], 5),
        ] {
            let warm_up = calls.iter().fold(WarmUp::new(), |up, call| up.call(*call, &[]));
            let refused = guest.warm(warm_up).unwrap_err();
            assert!(matches!(refused, WarmError::Descriptors(_)), "{calls:?}: {refused}");
            let named = format!("descriptor {number}");
            assert!(refused.to_string().contains(&named), "{calls:?}: {refused}");
        }
        let warm_up = WarmUp::new().call("open_a", &[]).call("read", &[]).call("close", &[]);
        let warm = guest.warm(warm_up).unwrap();
        for _ in 0..3 {
            let mut lease = warm.lease().unwrap();
            assert_eq!(number(&mut lease, "read"), -1, "it is closed");
            lease.call("open_b", &[]).unwrap();
            assert_eq!(number(&mut lease, "read"), i32::from(b'B'));
        }
    }
}

#[test]
fn a_fork_with_an_open_file_is_refused_and_its_lease_continues() {
    let (_dir, options) = directories();
    let options = GuestOptions { mode: Mode::Reset, ..options };
    let warm = guest(FILES, options).warm(WarmUp::new()).unwrap();
    let mut lease = warm.lease().unwrap();
    lease.call("open_a", &[]).unwrap();
    let refused = lease.freeze().unwrap_err().to_string();
    assert!(refused.contains("descriptor 5"), "{refused}");
    assert_eq!(number(&mut lease, "read"), i32::from(b'A'));
    lease.call("close", &[]).unwrap();
    lease.freeze().unwrap();
    lease.call("open_b", &[]).unwrap();
    assert_eq!(number(&mut lease, "read"), i32::from(b'B'));
}

#[test]
fn a_directory_that_is_missing_never_shifts_another_into_its_place() {
    let (dir, options) = directories();
    let write =
        |warm: &Warm, number: i32| warm.lease().unwrap().call("write_to", &[Val::I32(number)]);
    for mode in [Mode::Reset, Mode::Fresh] {
        let guest = guest(FILES, GuestOptions { mode, ..options.clone() });
        let warm = guest.warm(WarmUp::new()).unwrap();
        assert!(matches!(write(&warm, 3).unwrap()[..], [Val::I32(0)]));
        let (a, away) = (dir.path().join("a"), dir.path().join("away"));
        fs::rename(&a, &away).unwrap();
        let refused = write(&warm, 3).unwrap_err();
        assert!(matches!(refused, CallError::Wasi(_)), "{refused}");
        assert!(refused.to_string().contains("\"/a\""), "{refused}");
        assert!(!dir.path().join("b/out").exists(), "nothing is written elsewhere");
        let refused = guest.warm(WarmUp::new()).unwrap_err();
        assert!(matches!(refused, WarmError::Load(LoadError::Wasi(_))), "{refused}");
        fs::rename(&away, &a).unwrap();
        assert!(matches!(write(&warm, 3).unwrap()[..], [Val::I32(0)]), "and it is well again");
    }
}

#[test]
fn the_clock_never_goes_back_behind_what_the_warm_up_saw() {
    let long =
        |lease: &mut afresh_wasm::Lease<'_>, name: &str| match lease.call(name, &[]).unwrap()[..] {
            [Val::I64(n)] => n,
            _ => panic!("{name} gives no number"),
        };
    for mode in [Mode::Reset, Mode::Fresh] {
        let options = GuestOptions { mode, ..GuestOptions::default() };
        let guest = guest(FILES, options.clone());
        let nap = || std::thread::sleep(std::time::Duration::from_millis(30));
        nap();
        let warm = guest.warm(WarmUp::new().call("now", &[]).call("remember", &[])).unwrap();
        let mut last = 0;
        for _ in 0..3 {
            let mut lease = warm.lease().unwrap();
            let passed = long(&mut lease, "passed");
            assert!(passed >= last, "{mode:?}: {passed} after {last}");
            last = passed;
        }
        // As another process would see it, in which no time has passed yet.
        nap();
        let frozen = warm.freeze().unwrap();
        let frozen = Frozen::from_parts(frozen.memory().clone(), &frozen.bytes().unwrap()).unwrap();
        let thawed = Warm::thaw(&engine(), &options, &frozen).unwrap();
        assert!(long(&mut thawed.lease().unwrap(), "passed") >= 0);
        if mode == Mode::Reset {
            let mut lease = thawed.lease().unwrap();
            nap();
            lease.call("remember", &[]).unwrap();
            let fork = Warm::thaw(&engine(), &options, &lease.freeze().unwrap()).unwrap();
            assert!(long(&mut fork.lease().unwrap(), "passed") >= 0);
        }
    }
}

/// Keeps the bytes that its handler is given, and answers with them.
const HANDLER: &str = r#"(module
    (memory (export "memory") 2)
    (global $length (mut i32) (i32.const 0))
    (func (export "afresh_buffer") (param i32) (result i32) (i32.const 1024))
    (func (export "learn") (param i32) (result i64)
        (global.set $length (local.get 0))
        (memory.copy (i32.const 65536) (i32.const 1024) (local.get 0))
        (i64.const 0))
    (func (export "recall") (param i32) (result i64)
        (i64.or (i64.extend_i32_u (global.get $length)) (i64.const 0x1000000000000))))"#;

#[test]
fn a_warm_up_hands_bytes_to_a_handler() {
    for mode in [Mode::Reset, Mode::Fresh] {
        let options = GuestOptions { mode, ..GuestOptions::default() };
        let warm_up = WarmUp::new().call_bytes("learn", *b"what was learnt");
        let warm = guest(HANDLER, options.clone()).warm(warm_up).unwrap();
        let (learn, recall) =
            (warm.bytes_entry("learn").unwrap(), warm.bytes_entry("recall").unwrap());
        for _ in 0..3 {
            let mut lease = warm.lease().unwrap();
            assert_eq!(lease.call_bytes(&recall, b"").unwrap(), b"what was learnt");
            lease.call_bytes(&learn, b"something else").unwrap();
            assert_eq!(lease.call_bytes(&recall, b"").unwrap(), b"something else");
        }
        let much = vec![0; 200_000];
        let warm_up = WarmUp::new().call_bytes("learn", much);
        let error = guest(HANDLER, options).warm(warm_up).unwrap_err();
        assert!(error.to_string().contains("outside the guest's memory"), "{error}");
    }
}

#[test]
fn compiled_components_are_kept_between_runs() {
    let dir = tempfile::tempdir().unwrap();
    let wasm = wat::parse_str(
        r#"(component
            (core module $m (func (export "answer") (result i32) (i32.const 42)))
            (core instance $i (instantiate $m))
            (func (export "answer") (result u32) (canon lift (core func $i "answer"))))"#,
    )
    .unwrap();
    let start = || {
        let cache = Some(dir.path().to_owned());
        let engine = Engine::new(EngineConfig { cache, ..EngineConfig::default() }).unwrap();
        let warm = Guest::new(&engine, &wasm).unwrap().warm_component().unwrap();
        let answer = warm.lease().unwrap().call("answer", &[]).unwrap();
        assert!(matches!(answer[..], [afresh_wasm::wasmtime::component::Val::U32(42)]));
    };
    let kept = || {
        let files = fs::read_dir(dir.path()).unwrap().map(|file| {
            let file = file.unwrap();
            (file.file_name(), file.metadata().unwrap().modified().unwrap())
        });
        files.collect::<std::collections::BTreeMap<_, _>>()
    };
    start();
    let first = kept();
    assert!(!first.is_empty(), "nothing was kept");
    start();
    assert_eq!(kept(), first, "it was compiled again");
}
