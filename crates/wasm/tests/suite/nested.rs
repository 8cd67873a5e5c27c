//! Every instance of a component starts with the state that its warm-up leaves.

use afresh_pager::Options;
use afresh_sys::planted::{self, Bug};
use afresh_wasm::{
    ComponentLease, Engine, EngineConfig, Frozen, Guest, GuestOptions, SnapshotOptions, Warm,
    WarmComponent, WarmError, WarmUp,
};
use wasmtime::component::Val;

fn engine() -> Engine {
    Engine::new(EngineConfig::default()).unwrap()
}

fn try_warm(text: &str, calls: &[&str]) -> Result<WarmComponent, WarmError> {
    let wasm = wat::parse_str(text).unwrap();
    let warm_up = calls.iter().fold(WarmUp::new(), |up, call| up.call_component(*call, &[]));
    Guest::new(&engine(), &wasm).unwrap().warm_component_with(&warm_up)
}

fn warm(text: &str, calls: &[&str]) -> WarmComponent {
    try_warm(text, calls).unwrap()
}

fn number(lease: &mut ComponentLease<'_>, name: &str) -> u64 {
    match lease.call(name, &[]).unwrap()[..] {
        [Val::U32(n)] => n.into(),
        [Val::U64(n)] => n,
        ref other => panic!("{name} gives {other:?}"),
    }
}

/// In several leases, one after the other and at the same time.
fn always(warm: &WarmComponent, name: &str, wanted: u64) {
    for _ in 0..2 {
        let mut leases: Vec<_> = (0..3).map(|_| warm.lease().unwrap()).collect();
        for lease in &mut leases {
            assert_eq!(lease.differences().unwrap(), 0);
            assert_eq!(number(lease, name), wanted, "{name}");
        }
    }
}

/// A component with a counter in memory and one in a global, which `step` advances and `sum` adds
/// up.
fn counter(name: &str, from: u32) -> String {
    format!(
        r#"(component ${name}
            (core module $m
                (memory (export "memory") 1)
                (data (i32.const 16) "\{from:02x}\00\00\00")
                (global $n (mut i32) (i32.const {from}))
                (func (export "step")
                    (global.set $n (i32.add (global.get $n) (i32.const 1)))
                    (i32.store (i32.const 16) (i32.add (i32.load (i32.const 16)) (i32.const 1))))
                (func (export "sum") (result i32)
                    (i32.add (global.get $n) (i32.load (i32.const 16)))))
            (core instance $i (instantiate $m))
            (func (export "step") (canon lift (core func $i "step")))
            (func (export "sum") (result u32) (canon lift (core func $i "sum"))))"#
    )
}

#[test]
fn memory_and_globals_of_nested_components_start_where_the_warm_up_left_them() {
    let component = format!(
        r#"(component
            {} {}
            (component $both
                (alias outer 1 $a (component $mine))
                (instance $x (instantiate $mine))
                (export "step" (func $x "step"))
                (export "sum" (func $x "sum")))
            (instance $b (instantiate $b))
            (instance $a (instantiate $a))
            (instance $o (instantiate $both))
            (func (export "step-a") (alias export $a "step"))
            (func (export "step-b") (alias export $b "step"))
            (func (export "sum-a") (alias export $a "sum"))
            (func (export "sum-b") (alias export $b "sum"))
            (func (export "sum-o") (alias export $o "sum")))"#,
        counter("a", 10),
        counter("b", 20)
    );
    // `$a` is instantiated twice; where its instances have come to differ in a global, that is
    // refused.
    let refused = try_warm(&component, &["step-a"]).unwrap_err().to_string();
    assert!(refused.contains("more than once"), "{refused}");
    let warm = warm(&component, &["step-b", "step-b"]);
    for _ in 0..3 {
        always(&warm, "sum-a", 20);
        always(&warm, "sum-b", 44);
        always(&warm, "sum-o", 20);
        let mut lease = warm.lease().unwrap();
        for _ in 0..5 {
            lease.call("step-b", &[]).unwrap();
            lease.call("step-a", &[]).unwrap();
        }
        assert_eq!(number(&mut lease, "sum-b"), 54);
        assert_eq!(number(&mut lease, "sum-a"), 30);
    }
    assert_eq!(warm.rerun_reason(), None);
}

#[test]
fn start_functions_and_data_written_into_others_memories_run_once() {
    // As dynamic linking lays components out: a module that owns, one that fills, one that starts.
    let text = r#"(component
        (core module $env
            (memory (export "memory") 2)
            (global (export "stack") (mut i32) (i32.const 1000))
            (table (export "table") 4 funcref))
        (core module $lib
            (import "env" "memory" (memory 1))
            (import "env" "stack" (global $stack (mut i32)))
            (import "env" "table" (table 4 funcref))
            (data (i32.const 8) "\05\00\00\00")
            (type $f (func (result i32)))
            (func $f (result i32) (i32.load (i32.const 8)))
            (elem (i32.const 2) $f)
            (func (export "bump")
                (i32.store (i32.const 8) (i32.add (i32.load (i32.const 8)) (i32.const 100)))
                (global.set $stack (i32.sub (global.get $stack) (i32.const 16))))
            (func (export "read") (result i32)
                (i32.add (call_indirect (type $f) (i32.const 2)) (global.get $stack))))
        (core module $init
            (import "lib" "bump" (func $bump))
            (func $start (call $bump) (call $bump))
            (start $start))
        (core instance $env (instantiate $env))
        (core instance $lib (instantiate $lib (with "env" (instance $env))))
        (core instance (instantiate $init (with "lib" (instance $lib))))
        (func (export "bump") (canon lift (core func $lib "bump")))
        (func (export "read") (result u32) (canon lift (core func $lib "read"))))"#;
    always(&warm(text, &[]), "read", 5 + 200 + 1000 - 32);
    let warm = warm(text, &["bump"]);
    always(&warm, "read", 5 + 300 + 1000 - 48);
    let mut lease = warm.lease().unwrap();
    lease.call("bump", &[]).unwrap();
    assert_eq!(number(&mut lease, "read"), 5 + 400 + 1000 - 64);
    drop(lease);
    always(&warm, "read", 5 + 300 + 1000 - 48);
    assert_eq!(warm.rerun_reason(), None);
}

#[test]
fn numbers_of_every_kind_keep_every_bit_and_dropped_segments_stay_dropped() {
    let text = r#"(component
        (core module $m
            (memory 1)
            (data $kept "\07")
            (data $gone "\09")
            (global $i (mut i64) (i64.const 0))
            (global $f (mut f32) (f32.const 0))
            (global $d (mut f64) (f64.const 0))
            (global $v (mut v128) (v128.const i64x2 0 0))
            (global $r (mut funcref) (ref.func $warm))
            (global $fixed (mut funcref) (ref.func $warm))
            (elem $e funcref (ref.func $warm))
            (table $t 1 funcref)
            (func $warm (export "warm")
                (global.set $i (i64.const -2))
                (global.set $f (f32.reinterpret_i32 (i32.const 0x7fa00001)))
                (global.set $d (f64.reinterpret_i64 (i64.const 0x7ff4000000000003)))
                (global.set $v (v128.const i64x2 0x1122334455667788 0x99aabbccddeeff00))
                (global.set $r (ref.null func))
                (drop (memory.grow (i32.const 2)))
                (i32.store (i32.const 131072) (i32.const 77))
                (data.drop $gone)
                (elem.drop $e))
            (func (export "i") (result i64) (global.get $i))
            (func (export "f") (result i32) (i32.reinterpret_f32 (global.get $f)))
            (func (export "d") (result i64) (i64.reinterpret_f64 (global.get $d)))
            (func (export "low") (result i64) (i64x2.extract_lane 0 (global.get $v)))
            (func (export "high") (result i64) (i64x2.extract_lane 1 (global.get $v)))
            (func (export "nulls") (result i32)
                (i32.add (ref.is_null (global.get $r))
                    (i32.mul (i32.const 2) (ref.is_null (global.get $fixed)))))
            (func (export "size") (result i32) (i32.add (memory.size) (i32.load (i32.const 131072))))
            (func (export "kept") (result i32)
                (memory.init $kept (i32.const 0) (i32.const 0) (i32.const 1))
                (i32.load8_u (i32.const 0)))
            (func (export "gone")
                (memory.init $gone (i32.const 0) (i32.const 0) (i32.const 1)))
            (func (export "elem")
                (table.init $t $e (i32.const 0) (i32.const 0) (i32.const 1))))
        (core instance $i (instantiate $m))
        (func (export "warm") (canon lift (core func $i "warm")))
        (func (export "i") (result u64) (canon lift (core func $i "i")))
        (func (export "f") (result u32) (canon lift (core func $i "f")))
        (func (export "d") (result u64) (canon lift (core func $i "d")))
        (func (export "low") (result u64) (canon lift (core func $i "low")))
        (func (export "high") (result u64) (canon lift (core func $i "high")))
        (func (export "nulls") (result u32) (canon lift (core func $i "nulls")))
        (func (export "size") (result u32) (canon lift (core func $i "size")))
        (func (export "kept") (result u32) (canon lift (core func $i "kept")))
        (func (export "gone") (canon lift (core func $i "gone")))
        (func (export "elem") (canon lift (core func $i "elem"))))"#;
    let warm = warm(text, &["warm"]);
    always(&warm, "i", (-2_i64).cast_unsigned());
    always(&warm, "f", 0x7fa0_0001);
    always(&warm, "d", 0x7ff4_0000_0000_0003);
    always(&warm, "low", 0x1122_3344_5566_7788);
    always(&warm, "high", 0x99aa_bbcc_ddee_ff00);
    always(&warm, "nulls", 1);
    always(&warm, "size", 3 + 77);
    always(&warm, "kept", 7);
    assert!(warm.lease().unwrap().call("gone", &[]).is_err(), "it was dropped");
    assert!(warm.lease().unwrap().call("elem", &[]).is_err(), "it was dropped");
}

#[test]
fn handles_that_the_warm_up_leaves_alive_are_refused() {
    let text = r#"(component
        (type $r (resource (rep i32)))
        (core func $new (canon resource.new $r))
        (core func $drop (canon resource.drop $r))
        (core module $m
            (import "" "new" (func $new (param i32) (result i32)))
            (import "" "drop" (func $drop (param i32)))
            (global $h (mut i32) (i32.const 0))
            (func (export "keep") (global.set $h (call $new (i32.const 1))))
            (func (export "lose") (call $drop (global.get $h)))
            (func (export "handle") (result i32) (global.get $h)))
        (core instance $i (instantiate $m (with "" (instance
            (export "new" (func $new)) (export "drop" (func $drop))))))
        (func (export "keep") (canon lift (core func $i "keep")))
        (func (export "lose") (canon lift (core func $i "lose")))
        (func (export "handle") (result u32) (canon lift (core func $i "handle"))))"#;
    for calls in [&["keep"][..], &["keep", "keep", "lose"], &["keep", "lose", "keep"]] {
        let refused = try_warm(text, calls).unwrap_err().to_string();
        assert!(refused.contains("handles"), "{calls:?}: {refused}");
    }
    let warm = warm(text, &["keep", "lose"]);
    always(&warm, "handle", 1);
    warm.lease().unwrap().call("lose", &[]).unwrap_err();
}

#[test]
fn handles_of_the_hosts_resources_are_refused_until_they_are_dropped() {
    let text = r#"(component
        (import "wasi:io/error@0.2.0" (instance $error (export "error" (type (sub resource)))))
        (alias export $error "error" (type $error))
        (import "wasi:io/streams@0.2.0" (instance $streams
            (export "output-stream" (type (sub resource)))))
        (alias export $streams "output-stream" (type $stream))
        (import "wasi:cli/stdout@0.2.0" (instance $stdout
            (alias outer 1 $stream (type $s))
            (export "output-stream" (type $o (eq $s)))
            (export "get-stdout" (func (result (own $o))))))
        (core func $get (canon lower (func $stdout "get-stdout")))
        (core func $drop (canon resource.drop $stream))
        (core module $m
            (import "" "get" (func $get (result i32)))
            (import "" "drop" (func $drop (param i32)))
            (global $h (mut i32) (i32.const 0))
            (func (export "open") (global.set $h (call $get)))
            (func (export "close") (call $drop (global.get $h)))
            (func (export "count") (result i32) (i32.const 3)))
        (core instance $i (instantiate $m (with "" (instance
            (export "get" (func $get)) (export "drop" (func $drop))))))
        (func (export "open") (canon lift (core func $i "open")))
        (func (export "close") (canon lift (core func $i "close")))
        (func (export "count") (result u32) (canon lift (core func $i "count"))))"#;
    let refused = try_warm(text, &["open"]).unwrap_err().to_string();
    assert!(refused.contains("handles"), "{refused}");
    always(&warm(text, &["open", "close"]), "count", 3);
}

#[test]
fn state_that_no_new_instance_can_start_with_is_refused_by_name() {
    let with = |body: &str| {
        format!(
            r#"(component
                (core module (memory 1))
                (core module $m
                    (type $box (struct (field (mut i32))))
                    (table $t 2 funcref)
                    (global $f (mut funcref) (ref.null func))
                    (elem declare func $warm)
                    (func $warm (export "warm") {body})
                    (func (export "never")
                        (table.set $t (i32.const 0) (ref.func $warm))
                        (global.set $f (ref.func $warm)))
                    (func (export "read") (result i32) (ref.is_null (table.get $t (i32.const 0)))))
                (core instance $i (instantiate $m))
                (func (export "warm") (canon lift (core func $i "warm")))
                (func (export "never") (canon lift (core func $i "never")))
                (func (export "read") (result u32) (canon lift (core func $i "read"))))"#
        )
    };
    for (body, named) in [
        ("(table.set $t (i32.const 0) (ref.func $warm))", "table"),
        ("(drop (table.grow $t (ref.null func) (i32.const 1)))", "table"),
        ("(global.set $f (ref.func $warm))", "global 0"),
        ("(struct.set $box 0 (struct.new $box (i32.const 1)) (i32.const 2))", "GC object"),
    ] {
        let refused = try_warm(&with(body), &["warm"]).unwrap_err().to_string();
        assert!(refused.contains("core module 1"), "{refused}");
        assert!(refused.contains(named), "{refused}");
    }
    // Changes by calls do not matter: each call has its own instance.
    let warm = warm(&with("nop"), &["warm"]);
    for _ in 0..3 {
        always(&warm, "read", 1);
        let mut lease = warm.lease().unwrap();
        lease.call("never", &[]).unwrap();
        assert_eq!(number(&mut lease, "read"), 0);
    }
}

#[test]
fn a_failed_warm_up_call_says_which_and_why() {
    let text = r#"(component
        (core module $m (func (export "fail") unreachable))
        (core instance $i (instantiate $m))
        (func (export "fail") (canon lift (core func $i "fail"))))"#;
    let failed = try_warm(text, &["fail"]).unwrap_err();
    assert!(matches!(failed, WarmError::Call { .. }), "{failed}");
    let failed = try_warm(text, &["nothing"]).unwrap_err().to_string();
    assert!(failed.contains("it exports fail"), "{failed}");
}

/// A generator of small numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) % limit
    }
}

/// A component of nested state machines: memories that grow, globals of several types, segments
/// that are dropped, and functions that mix them; every machine has `step` and `look`.
fn machines(random: &mut Random, count: u64) -> String {
    let mut text = String::from("(component ");
    let mut order: Vec<u64> = (0..count).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at as u64 + 1) as usize);
    }
    for n in 0..count {
        let (pages, limit) = (random.below(3), 3 + random.below(4));
        let (byte, by) = (random.below(256), 1 + random.below(1000));
        let data = match pages {
            0 => String::new(),
            _ => format!(r#"(data (i32.const {}) "\{byte:02x}\aa\bb")"#, random.below(65_000)),
        };
        let start = match random.below(2) {
            0 => "(start $step)",
            _ => "",
        };
        let machine = format!(
            r#"(core module $m
                (memory {pages} {limit})
                {data}
                (data $passive "\{byte:02x}\01\02\03")
                (global $a (mut i32) (i32.const {by}))
                (global $b (mut i64) (i64.const {byte}))
                (global $c (mut f64) (f64.const 0.5))
                (func $step
                    (global.set $a (i32.add (i32.mul (global.get $a) (i32.const 31)) (i32.const {by})))
                    (global.set $b (i64.xor (global.get $b) (i64.extend_i32_u (global.get $a))))
                    (global.set $c (f64.add (f64.mul (global.get $c) (f64.const 3)) (f64.const 1)))
                    (if (i32.eqz (i32.and (global.get $a) (i32.const 3)))
                        (then (drop (memory.grow (i32.const 1)))))
                    (if (i32.eqz (i32.and (global.get $a) (i32.const 12)))
                        (then (data.drop $passive)))
                    (if (memory.size) (then
                        (i32.store
                            (i32.rem_u (global.get $a)
                                (i32.sub (i32.mul (memory.size) (i32.const 65536)) (i32.const 4)))
                            (i32.wrap_i64 (global.get $b))))))
                {start}
                (func (export "step") (call $step))
                (func (export "look") (result i64)
                    (local $at i32) (local $hash i64)
                    (local.set $hash (i64.add (global.get $b) (i64.reinterpret_f64 (global.get $c))))
                    (local.set $hash (i64.xor (local.get $hash)
                        (i64.extend_i32_u (i32.add (global.get $a) (memory.size)))))
                    (block $done (loop $next
                        (br_if $done (i32.ge_u (local.get $at)
                            (i32.mul (memory.size) (i32.const 65536))))
                        (local.set $hash (i64.add (i64.mul (local.get $hash) (i64.const 1099511628211))
                            (i64.load (local.get $at))))
                        (local.set $at (i32.add (local.get $at) (i32.const 8)))
                        (br $next)))
                    (local.get $hash))
                (func (export "init")
                    (memory.init $passive (i32.const 0) (i32.const 0) (i32.const 4))))
            (core instance $i (instantiate $m))
            (func (export "step") (canon lift (core func $i "step")))
            (func (export "init") (canon lift (core func $i "init")))
            (func (export "look") (result u64) (canon lift (core func $i "look")))"#
        );
        if random.below(3) == 0 {
            text += &format!(
                r#"(component $c{n}
                    (component $inner {machine})
                    (instance $x (instantiate $inner))
                    (func (export "step") (alias export $x "step"))
                    (func (export "init") (alias export $x "init"))
                    (func (export "look") (alias export $x "look")))"#
            );
        } else {
            text += &format!("(component $c{n} {machine})");
        }
    }
    for n in order {
        text += &format!("(instance $i{n} (instantiate $c{n}))");
    }
    for n in 0..count {
        for name in ["step", "init", "look"] {
            text += &format!("(func (export \"{name}{n}\") (alias export $i{n} \"{name}\"))");
        }
    }
    text.push(')');
    text
}

/// An instance on wasmtime's own memories.
struct PlainInstance {
    store: wasmtime::Store<()>,
    instance: wasmtime::component::Instance,
}

impl PlainInstance {
    fn new(wasm: &[u8]) -> Self {
        let engine = wasmtime::Engine::default();
        let component = wasmtime::component::Component::new(&engine, wasm).unwrap();
        let mut store = wasmtime::Store::new(&engine, ());
        let linker = wasmtime::component::Linker::new(&engine);
        let instance = linker.instantiate(&mut store, &component).unwrap();
        Self { store, instance }
    }

    fn call(&mut self, name: &str) -> Option<Vec<Val>> {
        let function = self.instance.get_func(&mut self.store, name).unwrap();
        let count = function.ty(&self.store).results().len();
        let mut results = vec![Val::Bool(false); count];
        function.call(&mut self.store, &[], &mut results).ok()?;
        Some(results)
    }
}

#[test]
fn random_components_continue_from_their_warm_up_as_one_instance_would() {
    let engine = engine();
    for seed in 1..12_u64 {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let count = 1 + random.below(4);
        let wasm = wat::parse_str(machines(&mut random, count)).unwrap();
        let guest = Guest::new(&engine, &wasm).unwrap();
        let mut draw = |many: u64| -> Vec<String> {
            (0..random.below(many)).map(|_| format!("step{}", random.below(count))).collect()
        };
        let (before, after) = (draw(30), draw(10));
        let warm_up =
            before.iter().fold(WarmUp::new(), |up, call| up.call_component(call.clone(), &[]));
        let warm = guest.warm_component_with(&warm_up).unwrap();
        for round in 0..3 {
            let (mut one, mut other) = (PlainInstance::new(&wasm), warm.lease().unwrap());
            for call in before.iter().chain(&after) {
                one.call(call).unwrap();
            }
            for call in &after {
                other.call(call, &[]).unwrap();
            }
            for n in 0..count {
                let name = format!("look{n}");
                assert_eq!(
                    one.call(&name).unwrap(),
                    other.call(&name, &[]).unwrap(),
                    "seed {seed}, round {round}, {name}"
                );
            }
            let init = format!("init{}", round % count);
            assert_eq!(
                one.call(&init).is_some(),
                other.call(&init, &[]).is_ok(),
                "seed {seed}: the segment of machine {round}"
            );
        }
    }
}

#[test]
fn a_frozen_component_thaws_in_its_warm_state() {
    let component = format!(
        r#"(component
            {} {}
            (instance $b (instantiate $b))
            (instance $a (instantiate $a))
            (func (export "step-a") (alias export $a "step"))
            (func (export "step-b") (alias export $b "step"))
            (func (export "sum-a") (alias export $a "sum"))
            (func (export "sum-b") (alias export $b "sum")))"#,
        counter("a", 10),
        counter("b", 20)
    );
    let warm = warm(&component, &["step-a", "step-b", "step-b"]);
    let frozen = warm.freeze().unwrap();
    assert!(frozen.is_component());
    let directory = tempfile::tempdir().unwrap();
    let store = afresh_store::Store::create(directory.path()).unwrap();
    frozen.save(&store, "warm", &SnapshotOptions::default()).unwrap();
    let loaded = Frozen::load(store.load("warm").unwrap(), &Options::default()).unwrap();
    let options = GuestOptions::default();
    for frozen in [&frozen, &loaded] {
        let thawed = WarmComponent::thaw(&engine(), &options, frozen).unwrap();
        always(&thawed, "sum-a", 22);
        always(&thawed, "sum-b", 44);
        thawed.lease().unwrap().call("step-a", &[]).unwrap();
        always(&thawed, "sum-a", 22);
        let again = WarmComponent::thaw(&engine(), &options, &thawed.freeze().unwrap()).unwrap();
        always(&again, "sum-b", 44);
    }
    let refused = Warm::thaw(&engine(), &options, &frozen).unwrap_err().to_string();
    assert!(refused.contains("WarmComponent::thaw"), "{refused}");
    // Half of its bytes is not a valid state.
    let bytes = frozen.bytes().unwrap();
    for length in [0, bytes.len() / 2, bytes.len() - 1] {
        assert!(Frozen::from_parts(frozen.memory().clone(), &bytes[..length]).is_err());
    }
}

#[test]
fn a_cold_component_without_start_functions_freezes_and_one_that_cannot_be_kept_does_not() {
    let plain = warm(&counter("plain", 3).replace("$plain", ""), &[]);
    let thawed =
        WarmComponent::thaw(&engine(), &GuestOptions::default(), &plain.freeze().unwrap()).unwrap();
    always(&thawed, "sum", 6);
    // Its start function keeps a reference to a function, which no constant stands for.
    let text = r#"(component
        (core module $m
            (global $f (mut funcref) (ref.null func))
            (elem declare func $start)
            (func $start (global.set $f (ref.func $start)))
            (start $start)
            (func (export "null") (result i32) (ref.is_null (global.get $f))))
        (core instance $i (instantiate $m))
        (func (export "null") (result u32) (canon lift (core func $i "null"))))"#;
    let cold = warm(text, &[]);
    assert!(cold.rerun_reason().unwrap().contains("global 0"), "{:?}", cold.rerun_reason());
    always(&cold, "null", 0);
    let refused = cold.freeze().unwrap_err().to_string();
    assert!(refused.contains("global 0"), "{refused}");
}

#[test]
fn a_real_component_keeps_its_ledger() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/guests/component.wasm");
    let Ok(wasm) = std::fs::read(path) else {
        println!("SKIPPED: {path} is not built; `cargo xtask guests` does");
        return;
    };
    let engine = engine();
    let guest = Guest::new(&engine, &wasm).unwrap();
    let text = |lease: &mut ComponentLease<'_>, name: &str, arguments: &[&str]| {
        let arguments: Vec<String> = arguments.iter().map(|&a| a.to_owned()).collect();
        lease.call_text(name, &arguments).unwrap()
    };
    let cold = guest.warm_component().unwrap();
    let mut by_hand = cold.lease().unwrap();
    assert_eq!(text(&mut by_hand, "deposit", &["7"]), "Option(None)");
    text(&mut by_hand, "warm", &[]);
    let wanted = text(&mut by_hand, "digest", &[]);
    let warm = guest.warm_component_with(&WarmUp::new().call_text("warm", &[])).unwrap();
    let thawed =
        WarmComponent::thaw(&engine, &GuestOptions::default(), &warm.freeze().unwrap()).unwrap();
    for warm in [&warm, &thawed] {
        for _ in 0..3 {
            let mut lease = warm.lease().unwrap();
            assert_eq!(text(&mut lease, "digest", &[]), wanted);
            let balance = text(&mut lease, "deposit", &["7"]);
            assert!(balance.starts_with("Option(Some("), "{balance}");
            text(&mut lease, "fill", &["500", "9"]);
            assert!(lease.call("fail", &[]).is_err());
        }
        assert_eq!(warm.pool_stats().created, 1);
    }
}

#[test]
fn planted_bugs_are_caught() {
    let warm = [
        "nested::memory_and_globals_of_nested_components_start_where_the_warm_up_left_them",
        "nested::random_components_continue_from_their_warm_up_as_one_instance_would",
    ];
    for test in warm {
        planted::must_be_caught(&[Bug::Nested, Bug::NestedMemory, Bug::Order], &[test]);
    }
    let handles = ["nested::handles_that_the_warm_up_leaves_alive_are_refused"];
    planted::must_be_caught(&[Bug::Handle], &handles);
}
