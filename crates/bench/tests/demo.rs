//! The demonstration, on the JavaScript engine that `cargo xtask guests` builds.

use std::path::Path;
use std::process::Command;

#[test]
fn the_warm_javascript_engine_forgets_a_planted_secret_and_a_polluted_prototype() {
    let js = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests/js.wasm");
    if !js.is_file() {
        eprintln!("SKIPPED: no target/guests/js.wasm; `cargo xtask guests` builds it");
        return;
    }
    let program = env!("CARGO_BIN_EXE_afresh-bench");
    let output = Command::new(program).args(["demo", "-o", "json", "--js"]).arg(&js).output();
    let output = output.unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{error}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains(r#""pristine":true,"bytes_differ":0,"items_differ":0"#), "{text}");
}
