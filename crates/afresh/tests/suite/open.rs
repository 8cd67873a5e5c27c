//! Every kind of reference is opened the same way; an unusable one is refused with the cause and
//! the way out.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use afresh::wasm::GuestOptions;
use afresh::{
    Access, Call, CallError, CloneRandomness, Guest, Kind, OpenError, Options, Reference,
    SaveError, SaveOptions, SealKey,
};

const COUNTER: &str = r#"(module
    (memory (export "memory") 20)
    (func (export "warm") (param i32) (i32.store (i32.const 70000) (local.get 0)))
    (func (export "next") (param i32) (result i32)
        (i32.store (i32.const 70000) (i32.add (i32.load (i32.const 70000)) (local.get 0)))
        (i32.load (i32.const 70000)))
    (func (export "trap") unreachable)
    (func (export "spin") (loop (br 0)))
    (func (export "afresh_buffer") (param i32) (result i32) (i32.const 1000))
    (func (export "echo") (param i32) (result i64)
        (i64.or (i64.shl (i64.const 1000) (i64.const 32)) (i64.extend_i32_u (local.get 0)))))"#;

const COMPONENT: &str = r#"(component
    (core module $m
        (memory (export "memory") 1)
        (func (export "next") (param i32) (result i32)
            (i32.store (i32.const 8) (i32.add (i32.load (i32.const 8)) (local.get 0)))
            (i32.load (i32.const 8))))
    (core instance $i (instantiate $m))
    (func (export "next") (param "by" u32) (result u32) (canon lift (core func $i "next"))))"#;

fn guest(wat: &str, options: &Options) -> Guest {
    Guest::from_bytes("the guest", &wat::parse_str(wat).unwrap(), options).unwrap()
}

fn warm() -> Options {
    Options::new().warm(Call::text("warm", ["40"]))
}

fn next(guest: &Guest) -> String {
    guest.invoke(&Call::text("next", ["2"])).unwrap().text()
}

/// Every message from the error down to its first cause.
fn chain(error: &dyn Error) -> Vec<String> {
    std::iter::successors(Some(error), |error| (*error).source()).map(ToString::to_string).collect()
}

#[test]
fn every_call_of_a_module_or_component_starts_from_the_warm_state() {
    for (wat, options, kind, answer) in
        [(COUNTER, warm(), Kind::Module, "42"), (COMPONENT, Options::new(), Kind::Component, "2")]
    {
        let guest = guest(wat, &options);
        assert_eq!(guest.kind(), kind);
        for _ in 0..3 {
            assert_eq!(next(&guest), answer);
        }
        let mut lease = guest.lease().unwrap();
        assert!(lease.differences().unwrap().is_empty());
        for step in 1..4 {
            let answer = lease.invoke(&Call::text("next", ["2"])).unwrap().text();
            let warm = if kind == Kind::Module { 40 } else { 0 };
            assert_eq!(answer, (warm + 2 * step).to_string());
        }
        assert!(lease.differences().unwrap().bytes > 0);
        drop(lease);
        let found = guest.verify(&Call::text("next", ["2"]), 5, &mut |_| {}).unwrap();
        assert!(found.is_pristine() && found.answers_differ == 0 && found.calls == 5, "{found:?}");
    }
}

/// Two generators in one component. `HOOK` stands for a hook that reseeds the first.
const GENERATORS: &str = r#"(component
    (core module $M (global $a (mut i64) (i64.const 1)) (global $b (mut i64) (i64.const 1))
        (func (export "warm") (global.set $a (i64.const 7)) (global.set $b (i64.const 9)))
        (func (export "reseed") (param i64 i64) (global.set $a (i64.xor (local.get 0) (local.get 1))))
        (func $next (param i64) (result i64)
            (i64.add (i64.mul (local.get 0) (i64.const 6364136223846793005)) (i64.const 1)))
        (memory (export "m") 1)
        (func (export "draw") (result i32)
            (global.set $a (call $next (global.get $a))) (global.set $b (call $next (global.get $b)))
            (i64.store (i32.const 8) (global.get $a)) (i64.store (i32.const 16) (global.get $b))
            (i64.store (i32.const 24) (i64.const 5))
            (i32.const 8))
        (func (export "same") (result i64) (i64.const 3)))
    (core instance $m (instantiate $M))
    HOOK
    (func (export "warm") (canon lift (core func $m "warm")))
    (func (export "same") (result u64) (canon lift (core func $m "same")))
    (func (export "draw") (result (tuple u64 u64 u64))
        (canon lift (core func $m "draw") (memory (core memory $m "m")))))"#;

#[test]
fn verify_finds_equal_draws_of_a_components_clones() {
    let hook = r#"(func (export "afresh-reseed") (param "lo" u64) (param "hi" u64)
        (canon lift (core func $m "reseed")))"#;
    let options = Options::new().warm(Call::text("warm", [""; 0]));
    let found = |hook: &str, call: &str| {
        let guest = guest(&GENERATORS.replace("HOOK", hook), &options);
        guest.verify(&Call::text(call, [""; 0]), 2, &mut |_| {}).unwrap()
    };
    let without = found("", "draw");
    assert_eq!(without.clones, Some(CloneRandomness::Alike), "{without:?}");
    assert_eq!(without.repeating.len(), 2, "{without:?}");
    let with = found(hook, "draw");
    assert_eq!(with.clones, Some(CloneRandomness::Partly), "{with:?}");
    assert_eq!(with.repeating, ["value 2"], "{with:?}");
    let same = found(hook, "same");
    assert_eq!((same.clones, same.repeating), (Some(CloneRandomness::Constant), Vec::new()));
}

#[test]
fn a_handler_is_called_by_name_and_by_what_was_looked_up() {
    let guest = guest(COUNTER, &Options::new());
    let echo = guest.function("echo").unwrap();
    assert_eq!(guest.call("echo", b"one").unwrap(), b"one");
    assert_eq!(guest.call(&echo, b"two").unwrap(), b"two");
    let mut lease = guest.lease().unwrap();
    assert_eq!(lease.call(&echo, b"three").unwrap(), b"three");
    let error = guest.function("nothing").unwrap_err();
    assert!(matches!(error, CallError::Request { .. }), "{error}");
}

#[test]
fn an_answer_after_a_failed_call_is_that_of_the_warm_state() {
    let options = warm().timeout(Duration::from_millis(500));
    let guest = guest(COUNTER, &options);
    let none: [&str; 0] = [];
    let error = guest.invoke(&Call::text("trap", none)).unwrap_err();
    assert!(matches!(error, CallError::Guest { .. }), "{error}");
    assert!(error.backtrace().unwrap().contains("wasm function"), "{:?}", error.backtrace());
    assert!(chain(&error).iter().all(|line| !line.contains('\n')), "{:?}", chain(&error));
    let error = guest.invoke(&Call::text("spin", none)).unwrap_err();
    assert!(matches!(error, CallError::Timeout { .. }), "{error}");
    let error = guest.invoke(&Call::text("next", ["two"])).unwrap_err();
    assert!(matches!(error, CallError::Request { .. }), "{error}");
    assert!(
        chain(&error)[1].contains("argument 1: `two` is not of type i32"),
        "{:?}",
        chain(&error)
    );
    assert_eq!(next(&guest), "42");
}

#[test]
fn a_guest_saved_anywhere_opens_by_its_reference() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    std::fs::create_dir(dir.path().join("remote")).unwrap();
    let guest = guest(COUNTER, &warm());
    for to in [
        path("store"),
        format!("{}@v1", path("store")),
        path("one.afresh"),
        format!("file://{}@v2", path("remote")),
    ] {
        let reference: Reference = to.parse().unwrap();
        guest.save(&reference, &SaveOptions::new()).unwrap();
        let opened = afresh::open(&to, &Options::new()).unwrap();
        assert_eq!(next(&opened), "42", "{to}");
        assert_eq!(opened.origin().unwrap().reference, reference);
        let mut lease = opened.lease().unwrap();
        lease.invoke(&Call::text("next", ["2"])).unwrap();
        let fork: Reference = format!("{}@fork", path("store")).parse().unwrap();
        let saved = lease.save(&fork, &SaveOptions::new()).unwrap();
        // Only changes, where the snapshot came out of the same directory.
        let delta = to.starts_with(&path("store"));
        assert_eq!(saved.snapshot.layers().len(), if delta { 2 } else { 1 }, "{to}");
        assert_eq!(next(&afresh::open(fork.to_string(), &Options::new()).unwrap()), "44");
    }
}

#[test]
fn the_only_snapshot_is_meant_where_no_name_is_given_and_none_is_the_latest() {
    let dir = tempfile::tempdir().unwrap();
    let guest = guest(COUNTER, &warm());
    let at = |place: &str, name: &str| -> Reference { format!("{place}@{name}").parse().unwrap() };
    std::fs::create_dir(dir.path().join("remote")).unwrap();
    let store = dir.path().join("store").display().to_string();
    let remote = format!("file://{}", dir.path().join("remote").display());
    for place in [&store, &remote] {
        guest.save(&at(place, "one"), &SaveOptions::new()).unwrap();
        let opened = afresh::open(place, &Options::new()).unwrap();
        let named = afresh::open(at(place, "one").to_string(), &Options::new()).unwrap();
        assert_eq!(next(&opened), next(&named));
        // A second name of the same snapshot leaves no doubt.
        guest.save(&at(place, "two"), &SaveOptions::new()).unwrap();
        assert_eq!(next(&afresh::open(place, &Options::new()).unwrap()), next(&named));
        guest.save(&at(place, "latest"), &SaveOptions::new()).unwrap();
        let opened = afresh::open(place, &Options::new()).unwrap();
        assert_eq!(opened.origin().unwrap().reference.name(), "latest");
    }
}

#[test]
fn a_sealed_snapshot_opens_with_its_key_alone() {
    let dir = tempfile::tempdir().unwrap();
    let to: Reference = dir.path().join("sealed.afresh").display().to_string().parse().unwrap();
    let key = SealKey::generate().unwrap();
    let guest = guest(COUNTER, &warm());
    guest.save(&to, &SaveOptions::new().seal(key.clone())).unwrap();
    let with = |key: SealKey| Options::new().access(Access::new().with_key(key));
    assert_eq!(next(&afresh::open(to.to_string(), &with(key)).unwrap()), "42");
    for options in [Options::new(), with(SealKey::generate().unwrap())] {
        let error = afresh::open(to.to_string(), &options).unwrap_err();
        assert!(matches!(error, OpenError::Seal { .. }), "{error}");
        assert!(chain(&error)[1].contains("sealed with"), "{:?}", chain(&error));
    }
}

#[test]
fn a_guest_that_cannot_be_opened_is_refused_with_cause_and_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text");
    std::fs::write(&text, "(module)").unwrap();
    let path = |path: &Path| path.display().to_string();
    let error = afresh::open(path(&text), &Options::new()).unwrap_err();
    assert!(matches!(error, OpenError::Unknown { .. }), "{error}");
    let error = afresh::open("/nonexistent.wasm", &Options::new()).unwrap_err();
    assert!(matches!(error, OpenError::Read { .. }), "{error}");
    assert!(chain(&error)[1].contains("No such file"), "{:?}", chain(&error));
    let error = afresh::open("store@", &Options::new()).unwrap_err();
    assert!(matches!(error, OpenError::Reference { .. }), "{error}");

    let store = path(&dir.path().join("store"));
    guest(COUNTER, &warm()).save(&store.parse().unwrap(), &SaveOptions::new()).unwrap();
    let error = afresh::open(&store, &warm()).unwrap_err();
    assert!(error.to_string().contains("snapshot of a warm guest"), "{error}");
    let error = afresh::open(format!("{store}@other"), &Options::new()).unwrap_err();
    assert!(chain(&error)[1].contains("latest"), "{:?}", chain(&error));

    let component = guest(COMPONENT, &Options::new());
    let mut lease = component.lease().unwrap();
    let error = lease.save(&store.parse().unwrap(), &SaveOptions::new()).unwrap_err();
    assert!(matches!(error, SaveError::Guest(_)), "{error}");
    let digest: Reference = format!("{store}@sha256:00").parse().unwrap();
    assert!(matches!(Guest::check_target(&digest), Err(SaveError::Reference(_))));
}

#[test]
fn every_missing_import_is_named_and_can_be_stubbed() {
    let wasm = wat::parse_str(
        r#"(module
            (import "env" "first" (func (param i32)))
            (import "env" "second" (func $second (result i64)))
            (import "wasi_snapshot_preview1" "sched_yield" (func (result i32)))
            (func (export "fine") (result i32) (i32.const 7))
            (func (export "missing") (drop (call $second))))"#,
    )
    .unwrap();
    let error = Guest::from_bytes("the guest", &wasm, &Options::new()).unwrap_err();
    let causes = chain(&error).join("\n");
    assert!(causes.contains("env.first") && causes.contains("env.second"), "{causes}");
    assert!(!causes.contains("sched_yield"), "{causes}");
    let options =
        Options::new().wasm(GuestOptions { stub_imports: true, ..GuestOptions::default() });
    let guest = Guest::from_bytes("the guest", &wasm, &options).unwrap();
    let none: [&str; 0] = [];
    assert_eq!(guest.invoke(&Call::text("fine", none)).unwrap().text(), "7");
    let error = guest.invoke(&Call::text("missing", none)).unwrap_err();
    assert!(chain(&error).join("\n").contains("second"), "{:?}", chain(&error));
}

#[test]
fn a_component_compiled_once_comes_from_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options::new().cache(dir.path());
    assert_eq!(next(&guest(COMPONENT, &options)), "2");
    let files = || -> Vec<_> {
        let mut files: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| (entry.file_name(), entry.metadata().unwrap().modified().unwrap()))
            .collect();
        files.sort();
        files
    };
    let kept = files();
    assert!(!kept.is_empty());
    assert_eq!(next(&guest(COMPONENT, &options)), "2");
    // Neither was anything compiled again, nor under another name.
    assert_eq!(files(), kept);
}

#[test]
fn a_save_point_is_saved_while_its_guest_runs() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let at = |name: &str| format!("{}@{name}", store.display()).parse::<Reference>().unwrap();
    guest(COUNTER, &warm()).save(&at("warm"), &SaveOptions::new()).unwrap();
    let opened = afresh::open(format!("{}@warm", store.display()), &Options::new()).unwrap();
    for fresh in [guest(COUNTER, &warm()), opened] {
        let mut session = fresh.session().unwrap();
        let count = |session: &mut afresh::Session| {
            session.invoke(&Call::text("next", ["1"])).unwrap().text().parse::<u32>().unwrap()
        };
        let mut points = Vec::new();
        for _ in 0..3 {
            let preparation = session.prepare_save_point().unwrap();
            let (now, work) = std::thread::scope(|scope| {
                let work = scope.spawn(|| preparation.run());
                (count(&mut session), work.join())
            });
            work.unwrap();
            points.push((now, session.save_point().unwrap()));
        }
        // Each point is saved by another thread, in any order, while the session continues.
        std::thread::scope(|scope| {
            let at = &at;
            let saving: Vec<_> = points
                .drain(..)
                .rev()
                .map(|(now, point)| {
                    scope.spawn(move || {
                        let name = format!("at{now}");
                        point.save(&at(&name), &SaveOptions::new()).unwrap();
                        (now, name)
                    })
                })
                .collect();
            for _ in 0..50 {
                count(&mut session);
            }
            for (now, name) in saving.into_iter().map(|thread| thread.join().unwrap()) {
                let reference = format!("{}@{name}", store.display());
                let mut later =
                    afresh::open(reference, &Options::new()).unwrap().session().unwrap();
                assert_eq!(count(&mut later), now + 1);
            }
        });
        assert_eq!(count(&mut session), 40 + 3 + 50 + 1);
    }
}
