//! A host of plug-ins on afresh: each request starts where one preparation left the plug-in.
//! `before.rs` is the same host on wasmtime alone; `diff` shows the changes.

#![allow(missing_docs, reason = "code of `bindgen!` has none")]

use std::time::Instant;

use afresh_wasm::{
    Engine, EngineConfig, Guest, GuestOptions, Host, Imports, LeaseOptions, State, WarmUp,
};
use wasmtime::Result;
use wasmtime::component::HasSelf;

wasmtime::component::bindgen!({
    inline: "package test:plugin;
        world plugin {
            import audit: func(n: u32);
            export prepare: func();
            export handle: func(n: u32) -> u32;
        }",
    exports: { default: async },
});

/// Data that the host has for a request.
#[derive(Default)]
struct Request {
    audited: Vec<u32>,
}

impl PluginImports for Request {
    fn audit(&mut self, n: u32) {
        self.audited.push(n);
    }
}

fn main() -> Result<()> {
    let wasm = wat::parse_str(include_str!("plugin.wat")).expect("the plug-in is Wasm");
    let engine = Engine::new(EngineConfig::default())?;
    let imports = Imports::default().component(|linker| {
        Plugin::add_to_linker::<Host, HasSelf<Request>>(linker, |host| host.state())
    });
    let state = State::new(Request::default);
    let options = GuestOptions { imports, state, asynchronous: true, ..GuestOptions::default() };
    let guest = Guest::with_options(&engine, &wasm, options)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let warm_up = WarmUp::new().call_component("prepare", &[]);
        let plugin = guest.warm_component_async(&warm_up).await?;
        let started = Instant::now();
        for n in 1..=100 {
            let mut lease = plugin.lease_async(&LeaseOptions::new()).await?;
            let (mut store, instance) = lease.bindings()?;
            let bindings = Plugin::new(&mut store, &instance)?;
            let steps = bindings.call_handle(&mut store, n).await?;
            let audited = &lease.host_mut().state::<Request>().audited;
            assert_eq!(audited, &[1], "request {n}, {steps} steps: another request is seen");
        }
        println!("{:?} a request", started.elapsed() / 100);
        Ok(())
    })
}
