//! Pages of a lazily opened snapshot that will never come: the call that touches one fails with the
//! page and the cause, nothing leaves the guest, and the process continues.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use afresh_memory::{Feature, Features};
use afresh_pager::Options;
use afresh_snapshot::Guest as _;
use afresh_store::{Encoding, Store};
use afresh_sys::run_isolated;
use afresh_wasm::{
    CallError, Engine, EngineConfig, Frozen, Guest, GuestOptions, Host, Imports, Mode, Output,
    Session, SnapshotOptions, Warm, WarmComponent, WarmUp, Wasi,
};
use tempfile::TempDir;
use wasmtime::component;

/// Page 300 begins with the marker, and is lost. Page 10 is not.
const GUEST: &str = r#"(module
    (import "wasi_snapshot_preview1" "fd_write"
        (func $write (param i32 i32 i32 i32) (result i32)))
    (import "env" "peek" (func $peek (param i32) (result i32)))
    (import "env" "tell" (func $tell (param i32)))
    (memory (export "memory") 40)
    (data (i32.const 0x12c000) "LOST-PAGE-MARKER")
    (data $passive "passive")
    (func (export "warm") (local $i i32)
        (loop $next
            (i32.store (i32.add (i32.mul (local.get $i) (i32.const 4096)) (i32.const 32))
                (i32.add (local.get $i) (i32.const 1)))
            (local.set $i (i32.add (local.get $i) (i32.const 1)))
            (br_if $next (i32.lt_u (local.get $i) (i32.const 600)))))
    (func (export "sound") (result i32) (i32.load (i32.const 0xa020)))
    (func (export "load") (result i32) (i32.load (i32.const 0x12c000)))
    (func $copy (memory.copy (i32.const 0xa000) (i32.const 0x12c000) (i32.const 4096)))
    (func (export "copy") (result i32) (call $copy) (i32.load (i32.const 0xa000)))
    (func (export "copy_few") (result i32)
        (memory.copy (i32.const 0xa000) (i32.const 0x12c000) (i32.const 16))
        (i32.load (i32.const 0xa000)))
    (func (export "copy_all") (result i32)
        (memory.copy (i32.const 0) (i32.const 0x8000) (i32.const 0x250000))
        (i32.const 7))
    (func (export "fill") (result i32)
        (memory.fill (i32.const 0x12b800) (i32.const 1) (i32.const 4096))
        (i32.const 7))
    (func (export "init") (result i32)
        (memory.init $passive (i32.const 0x12c800) (i32.const 0) (i32.const 7))
        (i32.const 7))
    (func $print (param $at i32) (result i32)
        (i32.store (i32.const 0x1000) (local.get $at))
        (i32.store (i32.const 0x1004) (i32.const 16))
        (call $write (i32.const 1) (i32.const 0x1000) (i32.const 1) (i32.const 0x1008)))
    (func (export "print") (result i32) (call $print (i32.const 0x12c000)))
    (func (export "copy_and_print") (result i32) (call $copy) (call $print (i32.const 0xa000)))
    (func (export "peek") (result i32) (call $peek (i32.const 0x12c000)))
    (func (export "copy_and_tell") (result i32)
        (call $copy) (call $tell (i32.const 1)) (i32.const 7)))"#;

/// Actions of host functions of the embedder.
static TOLD: AtomicUsize = AtomicUsize::new(0);

/// Functions that check memory before they act.
fn imports() -> Imports {
    Imports::new(|linker| {
        linker.func_wrap(
            "env",
            "peek",
            |mut caller: wasmtime::Caller<'_, Host>, at: i32| -> wasmtime::Result<i32> {
                let memory = caller.get_export("memory").and_then(wasmtime::Extern::into_memory);
                let seen = memory.unwrap().data(&caller)[at as usize];
                caller.data().check_memory()?;
                TOLD.fetch_add(1, Ordering::Relaxed);
                Ok(i32::from(seen))
            },
        )?;
        linker.func_wrap(
            "env",
            "tell",
            |caller: wasmtime::Caller<'_, Host>, _: i32| -> wasmtime::Result<()> {
                caller.data().check_memory()?;
                TOLD.fetch_add(1, Ordering::Relaxed);
                Ok(())
            },
        )?;
        Ok(())
    })
    .check_memory()
}

fn options(mode: Mode, imports: Imports) -> GuestOptions {
    let wasi = Wasi { output: Output::Capture(1 << 20), ..Wasi::default() };
    GuestOptions { mode, imports, wasi, ..GuestOptions::default() }
}

fn lazy() -> bool {
    let lazy = Features::host().has(Feature::UffdSigbus);
    if !lazy {
        println!("SKIPPED: userfaultfd in SIGBUS mode is unavailable here: nothing is lazy");
    }
    lazy
}

/// Flips a bit of the last page that begins with the marker: that of the memory, which comes after
/// the module.
fn damage(dir: &Path) {
    let blobs = std::fs::read_dir(dir.join("blobs/sha256")).unwrap();
    let layer =
        blobs.map(|e| e.unwrap().path()).max_by_key(|p| p.metadata().unwrap().len()).unwrap();
    std::fs::set_permissions(&layer, std::fs::Permissions::from_mode(0o600)).unwrap();
    let bytes = std::fs::read(&layer).unwrap();
    let marker = b"LOST-PAGE-MARKER";
    let at = bytes.windows(marker.len()).rposition(|window| window == marker).unwrap();
    let file = std::fs::File::options().write(true).open(&layer).unwrap();
    file.write_all_at(&[bytes[at] ^ 1], at as u64).unwrap();
}

/// A damaged snapshot of `frozen`, opened lazily.
fn damaged(frozen: &Frozen) -> (TempDir, Frozen) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path()).unwrap();
    let with = SnapshotOptions { encoding: Encoding::Raw, ..SnapshotOptions::default() };
    frozen.save(&store, "a", &with).unwrap();
    damage(dir.path());
    let options = Options { background: false, ..Options::default() };
    (dir, Frozen::load(store.load("a").unwrap(), &options).unwrap())
}

/// The guest out of its damaged snapshot.
struct DamagedGuest {
    warm: Warm,
    _dir: TempDir,
}

impl DamagedGuest {
    fn new(mode: Mode) -> Self {
        let engine = Engine::new(EngineConfig::default()).unwrap();
        let options = options(mode, imports());
        let wasm = wat::parse_str(GUEST).unwrap();
        let guest = Guest::with_options(&engine, &wasm, options.clone()).unwrap();
        let warm = guest.warm(WarmUp::new().call("warm", &[])).unwrap();
        let (dir, frozen) = damaged(&warm.freeze().unwrap());
        Self { warm: Warm::thaw(&engine, &options, &frozen).unwrap(), _dir: dir }
    }
}

fn is_lost(error: &CallError) -> bool {
    matches!(error, CallError::Memory(cause) if cause.contains("digest") && cause.contains("lost"))
}

/// Calls `name` and checks everything that must not happen after the loss.
fn lose(mode: Mode, name: &str) {
    let damaged = DamagedGuest::new(mode);
    let mut neighbour = damaged.warm.lease().unwrap();
    assert_eq!(neighbour.call("sound", &[]).unwrap()[0].i32(), Some(11));
    let mut lease = damaged.warm.lease().unwrap();
    assert_eq!(lease.call("sound", &[]).unwrap()[0].i32(), Some(11));
    let error = lease.call(name, &[]).unwrap_err();
    assert!(is_lost(&error), "{name}: {error:?}");
    assert_eq!(lease.host().stdout(), b"", "{name}");
    assert_eq!(TOLD.load(Ordering::Relaxed), 0, "{name}");
    assert!(lease.is_cut_short());
    let again = lease.call("sound", &[]).unwrap_err();
    assert!(is_lost(&again), "{name}, then another call: {again:?}");
    assert!(is_lost(&lease.read_memory(0xa000, &mut [0; 8]).unwrap_err()), "{name}");
    assert!(lease.write_memory(0xa000, &[0; 8]).is_err(), "{name}");
    assert!(lease.freeze().is_err(), "{name}: frozen after the loss");
    assert!(lease.differences().is_err(), "{name}: compared after the loss");
    drop(lease);
    let refused = damaged.warm.lease().map(drop).unwrap_err().to_string();
    assert!(refused.contains("digest"), "{name}: {refused}");
    // It lost nothing.
    assert_eq!(neighbour.call("sound", &[]).unwrap()[0].i32(), Some(11), "{name}");
    assert!(!neighbour.is_cut_short());
    let mut word = [0; 4];
    neighbour.read_memory(0xa020, &mut word).unwrap();
    assert_eq!(word, [11, 0, 0, 0]);
    let error = neighbour.call(name, &[]).unwrap_err();
    assert!(is_lost(&error), "{name} in the neighbour: {error:?}");
}

/// Tests that each run one export in a separate process, in both modes.
macro_rules! losses {
    ($($test:ident: $name:literal;)*) => {
        $(#[test]
        fn $test() {
            if lazy() {
                run_isolated(concat!("lost_pages::", stringify!($test)), || {
                    lose(Mode::Reset, $name);
                    lose(Mode::Fresh, $name);
                });
            }
        })*
    };
}

losses! {
    a_load_of_a_lost_page_ends_the_call: "load";
    a_copy_from_a_lost_page_ends_the_call: "copy";
    a_copy_of_few_bytes_of_a_lost_page_ends_the_call: "copy_few";
    a_copy_of_a_memory_with_a_lost_page_ends_the_call: "copy_all";
    a_fill_over_a_lost_page_ends_the_call: "fill";
    an_init_of_a_lost_page_ends_the_call: "init";
    wasi_does_not_print_a_copy_of_a_lost_page: "copy_and_print";
    a_host_function_that_reads_a_lost_page_is_stopped_by_its_check: "peek";
    a_host_function_after_a_loss_is_stopped_by_its_check: "copy_and_tell";
}

#[test]
fn wasi_does_not_print_a_lost_page() {
    if !lazy() {
        return;
    }
    run_isolated("lost_pages::wasi_does_not_print_a_lost_page", || {
        for mode in [Mode::Reset, Mode::Fresh] {
            let damaged = DamagedGuest::new(mode);
            let mut lease = damaged.warm.lease().unwrap();
            // It waits for the page before it touches it, so nothing is lost.
            let error = lease.call("print", &[]).unwrap_err();
            assert!(
                matches!(&error, CallError::Memory(why) if why.contains("digest")),
                "{error:?}"
            );
            assert_eq!(lease.host().stdout(), b"");
            assert_eq!(lease.call("sound", &[]).unwrap()[0].i32(), Some(11));
        }
    });
}

#[test]
fn a_session_with_a_lost_page_has_no_checkpoint_and_rolls_back() {
    if !lazy() {
        return;
    }
    run_isolated("lost_pages::a_session_with_a_lost_page_has_no_checkpoint_and_rolls_back", || {
        let damaged = DamagedGuest::new(Mode::Reset);
        let root = damaged.warm.root().unwrap();
        let mut session = Session::make(&damaged.warm, &root).unwrap();
        let error = session.lease().call("copy", &[]).unwrap_err();
        assert!(is_lost(&error), "{error:?}");
        let error = session.lease().call("sound", &[]).unwrap_err();
        assert!(is_lost(&error), "{error:?}");
        let refused = session.checkpoint().map(drop).unwrap_err().to_string();
        assert!(refused.contains("digest"), "{refused}");
        // Nor is there another instance of the snapshot: its image has failed.
        let refused = session.switch(&root).unwrap_err().to_string();
        assert!(refused.contains("digest"), "{refused}");
    });
}

#[test]
fn a_guest_whose_host_functions_do_not_check_waits_for_all_of_its_memory() {
    if !lazy() {
        return;
    }
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let unchecked = || {
        Imports::new(|linker| {
            linker.func_wrap("env", "peek", |_: i32| -> i32 { 0 })?;
            linker.func_wrap("env", "tell", |_: i32| ())?;
            Ok(())
        })
    };
    let options = options(Mode::Reset, unchecked());
    let guest = Guest::with_options(&engine, &wat::parse_str(GUEST).unwrap(), options.clone());
    let warm = guest.unwrap().warm(WarmUp::new().call("warm", &[])).unwrap();
    let (_dir, frozen) = damaged(&warm.freeze().unwrap());
    let refused = Warm::thaw(&engine, &options, &frozen).map(drop).unwrap_err().to_string();
    assert!(refused.contains("digest"), "{refused}");
    // And a whole snapshot is read before its first call.
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path()).unwrap();
    warm.freeze().unwrap().save(&store, "a", &SnapshotOptions::default()).unwrap();
    let lazily = Options { background: false, ..Options::default() };
    let frozen = Frozen::load(store.load("a").unwrap(), &lazily).unwrap();
    let thawed = Warm::thaw(&engine, &options, &frozen).unwrap();
    assert!(frozen.memory().pages().is_complete());
    assert_eq!(thawed.lease().unwrap().call("sound", &[]).unwrap()[0].i32(), Some(11));
}

/// `text` is a string in page 300, which is lost.
const COMPONENT: &str = r#"(component
    (core module $m
        (memory (export "memory") 40)
        (data (i32.const 0x12c000) "LOST-PAGE-MARKER")
        (func (export "warm") (local $i i32)
            (loop $next
                (i32.store (i32.add (i32.mul (local.get $i) (i32.const 4096)) (i32.const 32))
                    (i32.add (local.get $i) (i32.const 1)))
                (local.set $i (i32.add (local.get $i) (i32.const 1)))
                (br_if $next (i32.lt_u (local.get $i) (i32.const 600)))))
        (func (export "sound") (result i32) (i32.load (i32.const 0xa020)))
        (func (export "text") (result i32)
            (i32.store (i32.const 0x1000) (i32.const 0x12c000))
            (i32.store (i32.const 0x1004) (i32.const 16))
            (i32.const 0x1000)))
    (core instance $i (instantiate $m))
    (alias core export $i "memory" (core memory $memory))
    (func (export "warm") (canon lift (core func $i "warm")))
    (func (export "sound") (result u32) (canon lift (core func $i "sound")))
    (func (export "text") (result string)
        (canon lift (core func $i "text") (memory $memory))))"#;

#[test]
fn a_component_that_returns_a_lost_page_fails_and_is_not_called_again() {
    if !lazy() {
        return;
    }
    run_isolated(
        "lost_pages::a_component_that_returns_a_lost_page_fails_and_is_not_called_again",
        || {
            let engine = Engine::new(EngineConfig::default()).unwrap();
            let wasm = wat::parse_str(COMPONENT).unwrap();
            let guest = Guest::new(&engine, &wasm).unwrap();
            let warm =
                guest.warm_component_with(&WarmUp::new().call_component("warm", &[])).unwrap();
            let whole = warm.lease().unwrap().call("text", &[]).unwrap();
            assert_eq!(whole, [component::Val::String("LOST-PAGE-MARKER".into())]);
            let (_dir, frozen) = damaged(&warm.freeze().unwrap());
            let thawed = WarmComponent::thaw(&engine, &GuestOptions::default(), &frozen).unwrap();
            let (mut lease, mut other) = (thawed.lease().unwrap(), thawed.lease().unwrap());
            assert_eq!(lease.call("sound", &[]).unwrap(), [component::Val::U32(11)]);
            assert!(!frozen.memory().pages().is_complete());
            let error = lease.call("text", &[]).unwrap_err();
            assert!(is_lost(&error), "{error:?}");
            assert!(is_lost(&lease.call("sound", &[]).unwrap_err()) && lease.is_cut_short());
            assert!(is_lost(&lease.check_memory().unwrap_err()));
            assert!(lease.differences().is_err());
            assert!(matches!(lease.bindings(), Err(CallError::Memory(_))));
            drop(lease);
            assert_eq!(other.call("sound", &[]).unwrap(), [component::Val::U32(11)]);
            // Code of the embedder that lifts results itself waits for all of the memory.
            assert!(matches!(other.bindings(), Err(CallError::Memory(_))));
        },
    );
}
