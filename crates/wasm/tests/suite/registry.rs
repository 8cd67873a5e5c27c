//! A module that another language's compiler has made, with a heap and a collector of its own (`cargo xtask registry-guests`).

use afresh_wasm::{Engine, EngineConfig, Guest, GuestOptions, Mode, WarmUp};

#[test]
fn assembly_script_starts_every_call_from_its_warm_heap() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/guests/warehouse.wasm");
    let Ok(wasm) = std::fs::read(path) else {
        println!("SKIPPED: {path} is not built: cargo xtask registry-guests");
        return;
    };
    for mode in [Mode::Reset, Mode::Fresh] {
        let engine = Engine::new(EngineConfig::default()).unwrap();
        // It imports what it says why it gives up with.
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
