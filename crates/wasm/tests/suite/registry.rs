//! Modules from compilers of other languages, with their own heaps, collectors and threads (`cargo
//! xtask registry-guests`).

use std::path::Path;

use afresh_wasm::{CallError, Engine, EngineConfig, Guest, GuestOptions, Mode, WarmUp};

fn built(name: &str) -> Option<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests").join(name);
    let wasm = std::fs::read(&path).ok();
    if wasm.is_none() {
        println!("SKIPPED: {} is not built: cargo xtask registry-guests", path.display());
    }
    wasm
}

#[test]
fn assembly_script_starts_every_call_from_its_warm_heap() {
    let Some(wasm) = built("warehouse.wasm") else { return };
    for mode in [Mode::Reset, Mode::Fresh] {
        let engine = Engine::new(EngineConfig::default()).unwrap();
        // Its import is the function that reports why it gives up.
        let options = GuestOptions { mode, stub_imports: true, ..GuestOptions::default() };
        let guest = Guest::with_options(&engine, &wasm, options).unwrap();
        let warm = guest.warm(WarmUp::new().call("warm", &[])).unwrap();
        let handle = warm.entry::<i32, i64>("handle").unwrap();
        for _ in 0..20 {
            let mut lease = warm.lease().unwrap();
            assert_eq!(lease.invoke(&handle, 7).unwrap(), 1_200_010);
            assert_eq!(lease.invoke(&handle, 7).unwrap(), 2_200_021);
        }
    }
}

#[test]
fn go_starts_every_call_from_its_warm_heap_with_its_goroutine_where_it_was() {
    let Some(wasm) = built("ledger.wasm") else { return };
    keeps_its_books(&wasm);
}

#[test]
fn tinygo_starts_every_call_from_its_warm_heap_with_its_goroutine_where_it_was() {
    let Some(wasm) = built("tiny-ledger.wasm") else { return };
    keeps_its_books(&wasm);
}

fn keeps_its_books(wasm: &[u8]) {
    for mode in [Mode::Reset, Mode::Fresh] {
        let engine = Engine::new(EngineConfig::default()).unwrap();
        let options = GuestOptions { mode, ..GuestOptions::default() };
        let guest = Guest::with_options(&engine, wasm, options).unwrap();
        let warm = guest.warm(WarmUp::new().call("warm", &[])).unwrap();
        let handle = warm.bytes_entry("handle").unwrap();
        let mut drawn = Vec::new();
        for request in ["sum", "grow 20", "collect", "panic", "sum"] {
            let mut lease = warm.lease().unwrap();
            let mut ask = |request: &str| {
                let answer = lease.call_bytes(&handle, request.as_bytes())?;
                Ok::<_, CallError>(String::from_utf8(answer).unwrap())
            };
            drawn.push(ask("random").unwrap());
            assert_eq!(ask("pay 7").unwrap(), "2 200990000", "{mode:?} {request}");
            match request {
                "panic" => assert!(matches!(ask(request), Err(CallError::Trap { .. }))),
                _ => assert_eq!(ask(request).unwrap(), "3 200990000", "{mode:?} {request}"),
            }
            drop(lease);
            assert!(warm.compare().unwrap().is_clean(), "{mode:?} {request}");
        }
        drawn.sort();
        drawn.dedup();
        assert_eq!(drawn.len(), 5, "each clone draws its own");
    }
}
