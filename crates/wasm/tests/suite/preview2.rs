//! Components on file trees: a command that uses files in every way that Rust's library has.

use std::path::Path;

use afresh_wasm::afresh_files::{Budget, Time, Tree};
use afresh_wasm::{CallError, Engine, EngineConfig, Guest, GuestOptions, Output, Wasi};

#[test]
fn a_component_has_the_warm_files_in_every_call() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests/files.wasm");
    let Ok(wasm) = std::fs::read(&path) else {
        println!(
            "SKIPPED: {} is missing; `cargo xtask guests --only files` builds it",
            path.display()
        );
        return;
    };
    let mut tree = Tree::new(Budget::default());
    tree.write_path("/given", b"from outside", Time::now()).unwrap();
    let wasi = Wasi { files: Some(tree), output: Output::Capture(1 << 16), ..Wasi::default() };
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let options = GuestOptions { wasi, ..GuestOptions::default() };
    let warm = Guest::with_options(&engine, &wasm, options).unwrap().warm_component().unwrap();
    let run = warm.command().unwrap();
    for _ in 0..3 {
        let mut lease = warm.lease().unwrap();
        let ended = lease.call(&run, &[]);
        let said = String::from_utf8_lossy(&lease.host().stderr()).into_owned();
        assert!(matches!(ended, Ok(_) | Err(CallError::Exit(0))), "{ended:?}\n{said}");
        assert_eq!(lease.host().stdout(), b"files are as they should be\n");
        let files = lease.host().files().unwrap();
        assert_eq!(files.tree().read_path("/left/copy", 100).unwrap(), b"hello");
        assert_eq!(files.tree().read_path("/given", 100).unwrap(), b"from outside");
    }
}
