//! A host of plug-ins on wasmtime alone: a new store and instance for each request, which the
//! plug-in first has to prepare. `after.rs` is the same host on afresh; `diff` shows the changes.

#![allow(missing_docs, reason = "code of `bindgen!` has none")]

use std::time::Instant;

use wasmtime::component::{Component, HasSelf, Linker};
use wasmtime::{Config, Engine, Result, Store};

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
    let engine = Engine::new(&Config::new())?;
    let component = Component::new(&engine, &wasm)?;
    let mut linker = Linker::<Request>::new(&engine);
    Plugin::add_to_linker::<_, HasSelf<Request>>(&mut linker, |request| request)?;
    let plugin = PluginPre::new(linker.instantiate_pre(&component)?)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let started = Instant::now();
        for n in 1..=100 {
            let mut store = Store::new(&engine, Request::default());
            let bindings = plugin.instantiate_async(&mut store).await?;
            let steps = bindings.call_handle(&mut store, n).await?;
            let audited = &store.data().audited;
            assert_eq!(audited, &[1], "request {n}, {steps} steps: another request is seen");
        }
        println!("{:?} a request", started.elapsed() / 100);
        Ok(())
    })
}
