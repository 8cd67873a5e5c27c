//! Imports that no host provides, as functions that fail when they are called.

use afresh_wasm::{Engine, EngineConfig, Guest, GuestOptions, LoadError, WarmComponent, WarmError};

fn load(text: &str, stub_imports: bool) -> Result<WarmComponent, WarmError> {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let options = GuestOptions { stub_imports, ..GuestOptions::default() };
    Guest::with_options(&engine, &wat::parse_str(text).unwrap(), options).unwrap().warm_component()
}

/// An unknown function, and two interfaces of WASI that share a resource.
const UNKNOWN: &str = r#"(component
    (import "wasi:io/error@VERSION" (instance $e (export "error" (type (sub resource)))))
    (alias export $e "error" (type $error))
    (import "wasi:io/streams@VERSION" (instance $s
        (alias outer 1 $error (type $er)) (export "error" (type (eq $er)))))
    (import "wasi:random/random@VERSION" (instance $r
        (export "get-random-u64" (func (result u64)))
        NEW))
    (import "my:own/thing" (instance $t (export "f" (func))))
    (core func $random (canon lower (func $r "get-random-u64")))
    (core func $f (canon lower (func $t "f")))
    (core module $M
        (import "h" "random" (func $random (result i64))) (import "h" "f" (func $f))
        (func (export "random") (result i64) (call $random))
        (func (export "f") (call $f)))
    (core instance $i (instantiate $M (with "h" (instance
        (export "random" (func $random)) (export "f" (func $f))))))
    (func (export "random") (result u64) (canon lift (core func $i "random")))
    (func (export "f") (canon lift (core func $i "f"))))"#;

#[test]
fn stubs_replace_nothing_that_wasi_has() {
    for version in ["0.2.12", "0.2.6", "0.2.0"] {
        for new in ["", r#"(export "not-yet" (func))"#] {
            let text = UNKNOWN.replace("VERSION", version).replace("NEW", new);
            let error = load(&text, false).unwrap_err();
            let WarmError::Load(LoadError::Imports { missing }) = &error else { panic!("{error}") };
            assert_eq!(missing[0], "my:own/thing.f (function)", "{error}");
            assert!(!new.is_empty() || missing.len() == 1, "{error}");

            let warm = load(&text, true).unwrap_or_else(|e| panic!("{version} {new}: {e}"));
            let mut lease = warm.lease().unwrap();
            let one = lease.call("random", &[]).unwrap();
            assert_ne!(one, lease.call("random", &[]).unwrap(), "{version}");
            let error = lease.call("f", &[]).unwrap_err();
            let chain = format!("{:?}", causes(&error));
            assert!(chain.contains("my:own/thing#f"), "{chain}");
        }
    }
}

/// An error with all its causes.
fn causes(error: &dyn std::error::Error) -> Vec<String> {
    std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string).collect()
}
