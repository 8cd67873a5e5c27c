//! An owned lease moves freely and outlives every handle to its guest; options of one lease do not
//! reach another.

use std::time::Duration;

use afresh_wasm::{
    CallError, CallOptions, ComponentLease, Engine, EngineConfig, Guest, GuestOptions, Lease,
    LeaseOptions, LoadError, Mode, Output, OwnedComponentLease, OwnedLease, Val, Warm, WarmError,
    WarmUp, Wasi,
};

fn engine() -> Engine {
    Engine::new(EngineConfig { fuel: true, ..EngineConfig::default() }).unwrap()
}

fn guest(text: &str, options: GuestOptions) -> Guest {
    Guest::with_options(&engine(), &wat::parse_str(text).unwrap(), options).unwrap()
}

fn in_mode(mode: Mode) -> GuestOptions {
    GuestOptions { mode, ..GuestOptions::default() }
}

const COUNTER: &str = r#"(module
    (memory 1)
    (global $n (mut i32) (i32.const 0))
    (func (export "step") (result i32)
        (global.set $n (i32.add (global.get $n) (i32.const 1)))
        (i32.store (i32.const 8) (i32.add (i32.load (i32.const 8)) (i32.const 1)))
        (i32.add (global.get $n) (i32.load (i32.const 8))))
    (func (export "spin") (loop (br 0))))"#;

fn number(lease: &mut Lease<'_>, name: &str) -> i32 {
    match lease.call(name, &[]).unwrap()[..] {
        [Val::I32(n)] => n,
        _ => panic!("{name} gives no number"),
    }
}

#[test]
fn leases_can_be_sent() {
    fn assert_send<T: Send + 'static>() {}
    assert_send::<OwnedLease>();
    assert_send::<OwnedComponentLease>();
}

#[test]
fn an_owned_lease_outlives_its_guest_and_moves_between_threads() {
    for mode in [Mode::Reset, Mode::Fresh] {
        let warm = guest(COUNTER, in_mode(mode)).warm(WarmUp::new()).unwrap();
        let mut lease = warm.lease_owned(&LeaseOptions::new()).unwrap();
        drop(warm);
        assert_eq!(number(&mut lease, "step"), 2);
        let mut lease = std::thread::spawn(move || {
            assert_eq!(number(&mut lease, "step"), 4);
            lease
        })
        .join()
        .unwrap();
        assert_eq!(number(&mut lease, "step"), 6, "{mode:?}");
        // The last reference to the guest.
        std::thread::spawn(move || drop(lease)).join().unwrap();
    }
}

#[test]
fn owned_leases_come_back_pristine_wherever_they_end() {
    for mode in [Mode::Reset, Mode::Fresh] {
        let warm = guest(COUNTER, in_mode(mode)).warm(WarmUp::new()).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel::<OwnedLease>();
        let ender = std::thread::spawn(move || {
            for (at, mut lease) in receiver.into_iter().enumerate() {
                assert!(number(&mut lease, "step") >= 4);
                match at % 2 {
                    0 => drop(lease),
                    _ => lease.discard(),
                }
            }
        });
        for _ in 0..100 {
            let mut lease = warm.lease_owned(&LeaseOptions::new()).unwrap();
            assert_eq!(number(&mut lease, "step"), 2);
            sender.send(lease).unwrap();
        }
        drop(sender);
        ender.join().unwrap();
        assert!(warm.compare().unwrap().is_clean(), "{mode:?}");
        assert_eq!(warm.pool_stats().quarantined, 0);
    }
}

#[test]
fn two_guests_leases_can_be_swapped() {
    let one = guest(COUNTER, in_mode(Mode::Reset)).warm(WarmUp::new()).unwrap();
    let other = guest(COUNTER, in_mode(Mode::Fresh)).warm(WarmUp::new()).unwrap();
    let mut first = one.lease_owned(&LeaseOptions::new()).unwrap();
    let mut second = other.lease_owned(&LeaseOptions::new()).unwrap();
    drop((one, other));
    assert_eq!(number(&mut first, "step"), 2);
    std::mem::swap(&mut first, &mut second);
    assert_eq!(number(&mut first, "step"), 2);
    drop(first);
    assert_eq!(number(&mut second, "step"), 4);
}

#[test]
fn each_lease_has_its_own_limits() {
    for mode in [Mode::Reset, Mode::Fresh] {
        let warm = guest(COUNTER, in_mode(mode)).warm(WarmUp::new()).unwrap();
        let short = LeaseOptions::new().timeout(Duration::from_millis(20));
        let poor = LeaseOptions::new().fuel(1000);
        for _ in 0..2 {
            let error = warm.lease_with(&short).unwrap().call("spin", &[]).unwrap_err();
            assert!(matches!(error, CallError::Timeout(_)), "{mode:?}: {error}");
            let error = warm.lease_with(&poor).unwrap().call("spin", &[]).unwrap_err();
            assert!(matches!(error, CallError::OutOfFuel(1000)), "{mode:?}: {error}");
            // More than either has, which is not an error.
            let mut lease = warm.lease().unwrap();
            (1..2000).for_each(|n| assert_eq!(number(&mut lease, "step"), 2 * n));
        }
    }
}

#[test]
fn the_limits_of_a_call_do_not_reach_the_next_call_of_its_lease() {
    let timeout = Duration::from_millis(20);
    for mode in [Mode::Reset, Mode::Fresh] {
        let warm = guest(COUNTER, in_mode(mode)).warm(WarmUp::new()).unwrap();
        let mut lease = warm.lease().unwrap();
        let limits = lease.set_limits(&CallOptions::new().fuel(1000)).unwrap();
        assert_eq!(number(&mut lease, "step"), 2);
        lease.restore_limits(limits);
        (2..2000).for_each(|n| assert_eq!(number(&mut lease, "step"), 2 * n));

        let limits = lease.set_limits(&CallOptions::new().timeout(timeout)).unwrap();
        assert_eq!(number(&mut lease, "step"), 4000);
        lease.restore_limits(limits);
        std::thread::sleep(3 * timeout);
        assert_eq!(number(&mut lease, "step"), 4002, "{mode:?}");
    }
}

#[test]
fn a_limit_that_the_engine_does_not_keep_is_refused() {
    let engine = Engine::new(EngineConfig { timeouts: false, ..EngineConfig::default() }).unwrap();
    let warm = Guest::new(&engine, &wat::parse_str(COUNTER).unwrap()).unwrap();
    let warm = warm.warm(WarmUp::new()).unwrap();
    for options in
        [LeaseOptions::new().timeout(Duration::from_secs(1)), LeaseOptions::new().fuel(1)]
    {
        let error = warm.lease_with(&options).unwrap_err();
        assert!(matches!(error, WarmError::Load(LoadError::Limit { .. })), "{error}");
    }
}

/// Copies standard input, then the first argument and the first variable, to standard output;
/// `file` reads the first byte of `name` in the directory of descriptor 3.
const WASI: &str = r#"(module
    (import "wasi_snapshot_preview1" "fd_read" (func $read (param i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "args_get" (func $args (param i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "environ_get" (func $env (param i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "path_open"
        (func $open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
    (memory (export "memory") 1)
    (data (i32.const 4096) "name")
    (func $put (param $at i32) (param $len i32)
        (i32.store (i32.const 0) (local.get $at))
        (i32.store (i32.const 4) (local.get $len))
        (if (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)) (then unreachable)))
    (func $get (param $fd i32) (param $at i32) (result i32)
        (i32.store (i32.const 0) (local.get $at))
        (i32.store (i32.const 4) (i32.const 64))
        (if (call $read (local.get $fd) (i32.const 0) (i32.const 1) (i32.const 8)) (then unreachable))
        (i32.load (i32.const 8)))
    (func $length (param $at i32) (result i32) (local $end i32)
        (local.set $end (local.get $at))
        (loop (if (i32.load8_u (local.get $end))
            (then (local.set $end (i32.add (local.get $end) (i32.const 1))) (br 1))))
        (i32.sub (local.get $end) (local.get $at)))
    (func (export "copy")
        (call $put (i32.const 512) (call $get (i32.const 0) (i32.const 512)))
        (if (call $args (i32.const 16) (i32.const 1024)) (then unreachable))
        (call $put (i32.const 1024) (call $length (i32.const 1024)))
        (if (call $env (i32.const 16) (i32.const 2048)) (then unreachable))
        (call $put (i32.const 2048) (call $length (i32.const 2048))))
    (func (export "file") (result i32)
        (if (call $open (i32.const 3) (i32.const 0) (i32.const 4096) (i32.const 4) (i32.const 0)
            (i64.const 2) (i64.const 0) (i32.const 0) (i32.const 16)) (then unreachable))
        (drop (call $get (i32.load (i32.const 16)) (i32.const 512)))
        (i32.load8_u (i32.const 512))))"#;

fn named(name: &str) -> Wasi {
    Wasi {
        args: vec![format!("{name}-program")],
        env: vec![("WHO".to_owned(), name.to_owned())],
        stdin: format!("{name}-input ").into_bytes(),
        output: Output::Capture(1 << 16),
        ..Wasi::default()
    }
}

fn copied(lease: &mut Lease<'_>) -> String {
    lease.call("copy", &[]).unwrap();
    String::from_utf8(lease.host().stdout()).unwrap()
}

#[test]
fn each_lease_has_its_own_wasi() {
    for mode in [Mode::Reset, Mode::Fresh] {
        let options = GuestOptions { wasi: named("guest"), ..in_mode(mode) };
        let warm = guest(WASI, options).warm(WarmUp::new()).unwrap();
        for round in 0..3 {
            let name = format!("lease{round}");
            let own = LeaseOptions::new().wasi(named(&name));
            let mut lease = warm.lease_owned(&own).unwrap();
            assert_eq!(copied(&mut lease), format!("{name}-input {name}-programWHO={name}"));
            drop(lease);
            let mut lease = warm.lease().unwrap();
            assert_eq!(copied(&mut lease), "guest-input guest-programWHO=guest");
            drop(lease);
            // An unused lease is dropped as well.
            drop(warm.lease_with(&own).unwrap());
            assert_eq!(copied(&mut warm.lease().unwrap()), "guest-input guest-programWHO=guest");
            assert!(warm.compare().unwrap().is_clean());
        }
    }
}

#[test]
fn a_lease_may_have_its_own_directories_under_the_names_of_the_guest() {
    let dir = |content: &str| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("name"), content).unwrap();
        dir
    };
    let (ours, theirs) = (dir("o"), dir("t"));
    let given =
        |dir: &tempfile::TempDir, name: &str| (dir.path().to_owned(), name.to_owned(), false);
    let wasi = |dirs: &[(std::path::PathBuf, String, bool)]| Wasi {
        dirs: dirs.to_vec(),
        ..Wasi::default()
    };
    for mode in [Mode::Reset, Mode::Fresh] {
        let options = GuestOptions { wasi: wasi(&[given(&ours, "/data")]), ..in_mode(mode) };
        // The descriptor that the warm-up has read: 3 is `/data`.
        let warm = guest(WASI, options).warm(WarmUp::new()).unwrap();
        let read = |lease: &mut Lease<'_>| number(lease, "file") as u8 as char;
        assert_eq!(read(&mut warm.lease().unwrap()), 'o');
        let own = wasi(&[given(&theirs, "/data"), given(&ours, "/more")]);
        let own = LeaseOptions::new().wasi(own);
        assert_eq!(read(&mut warm.lease_with(&own).unwrap()), 't');
        assert_eq!(read(&mut warm.lease().unwrap()), 'o');
        for wrong in [wasi(&[]), wasi(&[given(&ours, "/more"), given(&theirs, "/data")])] {
            let error = warm.lease_with(&LeaseOptions::new().wasi(wrong)).unwrap_err();
            assert!(matches!(error, WarmError::Load(LoadError::Wasi(_))), "{error}");
            assert!(error.to_string().contains("\"/data\""), "{error}");
        }
        let gone = wasi(&[("/nowhere/at/all".into(), "/data".to_owned(), false)]);
        let error = warm.lease_with(&LeaseOptions::new().wasi(gone)).unwrap().call("file", &[]);
        assert!(matches!(error, Err(CallError::Wasi(_))), "{error:?}");
        assert_eq!(read(&mut warm.lease().unwrap()), 'o');
    }
}

/// Counts in memory and a global, and returns the number of environment variables.
const COMPONENT: &str = r#"(component
    (import "wasi:cli/environment@0.2.0" (instance $env
        (export "get-environment" (func (result (list (tuple string string)))))))
    (core module $libc
        (memory (export "memory") 1)
        (global $free (mut i32) (i32.const 4096))
        (func (export "realloc") (param i32 i32 i32 i32) (result i32)
            (global.get $free)
            (global.set $free (i32.and (i32.const -8) (i32.add (i32.const 7)
                (i32.add (global.get $free) (local.get 3)))))))
    (core instance $libc (instantiate $libc))
    (core func $environment (canon lower (func $env "get-environment")
        (memory (core memory $libc "memory")) (realloc (core func $libc "realloc"))))
    (core module $main
        (import "libc" "memory" (memory 1))
        (import "host" "environment" (func $environment (param i32)))
        (global $n (mut i32) (i32.const 0))
        (func (export "step") (result i32)
            (global.set $n (i32.add (global.get $n) (i32.const 1)))
            (i32.store (i32.const 8) (i32.add (i32.load (i32.const 8)) (i32.const 1)))
            (i32.add (global.get $n) (i32.load (i32.const 8))))
        (func (export "variables") (result i32)
            (call $environment (i32.const 16))
            (i32.load (i32.const 20)))
        (func (export "spin") (loop (br 0))))
    (core instance $main (instantiate $main
        (with "libc" (instance $libc))
        (with "host" (instance (export "environment" (func $environment))))))
    (func (export "step") (result u32) (canon lift (core func $main "step")))
    (func (export "variables") (result u32) (canon lift (core func $main "variables")))
    (func (export "spin") (canon lift (core func $main "spin"))))"#;

fn call_u32(lease: &mut ComponentLease<'_>, name: &str) -> u32 {
    use afresh_wasm::wasmtime::component::Val;
    match lease.call(name, &[]).unwrap()[..] {
        [Val::U32(n)] => n,
        ref other => panic!("{name} gives {other:?}"),
    }
}

#[test]
fn an_owned_lease_of_a_component_moves_and_has_its_own_wasi_and_limits() {
    let guest = guest(COMPONENT, GuestOptions::default());
    let warm = guest.warm_component_with(&WarmUp::new().call_component("step", &[])).unwrap();
    let own = LeaseOptions::new().wasi(named("lease")).timeout(Duration::from_millis(500));
    for _ in 0..3 {
        let mut lease = warm.lease_owned(&own).unwrap();
        assert_eq!(call_u32(&mut lease, "step"), 4);
        let mut lease = std::thread::spawn(move || {
            assert_eq!(call_u32(&mut lease, "variables"), 1);
            lease
        })
        .join()
        .unwrap();
        let error = lease.call("spin", &[]).unwrap_err();
        assert!(matches!(error, CallError::Timeout(_)), "{error}");
        drop(lease);
        let mut lease = warm.lease().unwrap();
        assert_eq!(lease.differences().unwrap(), 0);
        assert_eq!((call_u32(&mut lease, "variables"), call_u32(&mut lease, "step")), (0, 4));
    }
    let mut lease = warm.lease_owned(&LeaseOptions::new()).unwrap();
    drop(warm);
    assert_eq!(call_u32(&mut lease, "step"), 4);
}

#[test]
fn an_owned_lease_can_continue_from_a_snapshot() {
    let warm = guest(COUNTER, in_mode(Mode::Reset)).warm(WarmUp::new()).unwrap();
    let mut lease = warm.lease_owned(&LeaseOptions::new()).unwrap();
    assert_eq!(number(&mut lease, "step"), 2);
    let frozen = lease.freeze().unwrap();
    drop((lease, warm));
    let thawed = Warm::thaw(&engine(), &in_mode(Mode::Reset), &frozen).unwrap();
    assert_eq!(number(&mut thawed.lease_owned(&LeaseOptions::new()).unwrap(), "step"), 4);
}
