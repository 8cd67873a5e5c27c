//! A small engine around the rewriter: runs prepared modules on wasmtime and plays the host's
//! part (memory images, reading a warm state).

pub(crate) mod random;
pub(crate) mod stateful;

use afresh_rewrite::{
    DataSegment, PrepareOptions, PreparedModule, WarmState, WarmValue, names, prepare,
};
use wasmtime::{
    Config, Engine, Extern, Func, Global, Instance, Memory, Module, Ref, Store, StoreLimits,
    StoreLimitsBuilder, Table, Trap, Val, ValType,
};

/// The proposals that the tests use.
pub(crate) fn engine() -> Engine {
    let mut config = Config::new();
    config
        .wasm_gc(true)
        .wasm_function_references(true)
        .wasm_memory64(true)
        .wasm_multi_memory(true)
        .wasm_exceptions(true)
        .wasm_tail_call(true)
        .wasm_custom_page_sizes(true)
        .wasm_wide_arithmetic(true)
        .wasm_extended_const(true)
        .wasm_component_model(true)
        .wasm_backtrace_max_frames(None)
        .cranelift_nan_canonicalization(true)
        .cranelift_opt_level(wasmtime::OptLevel::None)
        .memory_reservation(1 << 24)
        .memory_guard_size(1 << 16)
        .concurrency_support(false)
        .max_wasm_stack(256 << 10);
    Engine::new(&config).expect("the configuration is valid")
}

pub(crate) fn wat(text: &str) -> Vec<u8> {
    wat::parse_str(text).expect("the test's module is valid text")
}

pub(crate) type Host = Store<StoreLimits>;

/// An instance in a separate store.
pub(crate) struct RunningInstance {
    pub(crate) store: Host,
    pub(crate) instance: Instance,
}

/// Writes moved data into the memories, as the engine's image would hold it.
fn place(running: &mut RunningInstance, segments: &[DataSegment]) {
    for segment in segments {
        let memory = running.memory(segment.memory);
        memory
            .write(&mut running.store, segment.offset as usize, &segment.bytes)
            .expect("moved segments are in bounds");
    }
}

/// Instantiates a module; imported functions return 77.
pub(crate) fn start(engine: &Engine, wasm: &[u8]) -> wasmtime::Result<RunningInstance> {
    let module = Module::new(engine, wasm)?;
    let limits = StoreLimitsBuilder::new().memory_size(32 << 20).table_elements(20_000).build();
    let mut store = Store::new(engine, limits);
    store.limiter(|limits| limits);
    let mut imports = Vec::new();
    for import in module.imports() {
        let ty = import.ty().func().expect("only functions are imported").clone();
        let func = Func::new(&mut store, ty, |_, _, results| {
            results.fill(Val::I32(77));
            Ok(())
        });
        imports.push(Extern::Func(func));
    }
    let instance = Instance::new(&mut store, &module, &imports)?;
    Ok(RunningInstance { store, instance })
}

/// Instantiates a prepared module as an engine does: its data in place, then its start function.
pub(crate) fn start_from(
    engine: &Engine,
    prepared: &PreparedModule,
) -> wasmtime::Result<RunningInstance> {
    let mut running = start(engine, &prepared.module)?;
    place(&mut running, &prepared.segments);
    if let Some(start) = running.instance.get_func(&mut running.store, names::START) {
        start.call(&mut running.store, &[], &mut [])?;
    }
    Ok(running)
}

/// Prepares a module's text and instantiates it.
pub(crate) fn start_prepared(
    engine: &Engine,
    text: &str,
    options: &PrepareOptions,
) -> (PreparedModule, RunningInstance) {
    let prepared = prepare(&wat(text), options).expect("the module can be prepared");
    let running = start_from(engine, &prepared).expect("the prepared module runs");
    (prepared, running)
}

impl RunningInstance {
    pub(crate) fn func(&mut self, name: &str) -> Func {
        self.instance.get_func(&mut self.store, name).unwrap_or_else(|| panic!("no func {name}"))
    }

    pub(crate) fn global(&mut self, name: &str) -> Global {
        self.instance
            .get_global(&mut self.store, name)
            .unwrap_or_else(|| panic!("no global {name}"))
    }

    pub(crate) fn table(&mut self, name: &str) -> Table {
        self.instance.get_table(&mut self.store, name).unwrap_or_else(|| panic!("no table {name}"))
    }

    pub(crate) fn memory(&mut self, index: u32) -> Memory {
        let name = names::memory(index);
        self.instance
            .get_memory(&mut self.store, &name)
            .unwrap_or_else(|| panic!("no memory {name}"))
    }

    /// Calls an export; a trap comes back as its text.
    pub(crate) fn call(&mut self, name: &str, params: &[Val]) -> Result<Vec<Val>, String> {
        let func = self.func(name);
        let mut results = vec![Val::I32(0); func.ty(&self.store).results().len()];
        match func.call(&mut self.store, params, &mut results) {
            Ok(()) => Ok(results),
            Err(error) => Err(match error.downcast_ref::<Trap>() {
                Some(trap) => trap.to_string(),
                None => format!("{error:?}"),
            }),
        }
    }

    /// Calls a function without parameters and with one `i32` result.
    pub(crate) fn int(&mut self, name: &str) -> Result<i32, String> {
        self.int_of(name, &[])
    }

    pub(crate) fn int_of(&mut self, name: &str, params: &[i32]) -> Result<i32, String> {
        let params: Vec<Val> = params.iter().map(|&value| Val::I32(value)).collect();
        let results = self.call(name, &params)?;
        Ok(results.first().and_then(Val::i32).unwrap_or_default())
    }

    pub(crate) fn save(&mut self) {
        assert_eq!(self.int(names::SAVE), Ok(0), "save succeeds");
    }

    pub(crate) fn restore(&mut self) -> i32 {
        self.int(names::RESTORE).expect("restore does not trap")
    }

    fn reference(&mut self, reference: &Ref, functions: &[u32]) -> WarmValue {
        match reference {
            Ref::Func(None) | Ref::Extern(None) | Ref::Any(None) | Ref::Exn(None) => {
                WarmValue::Null
            }
            Ref::Func(Some(func)) => {
                let raw = func.to_raw(&mut self.store);
                for &index in functions {
                    if self.func(&names::func(index)).to_raw(&mut self.store) == raw {
                        return WarmValue::Func(index);
                    }
                }
                WarmValue::Opaque
            }
            _ => WarmValue::Opaque,
        }
    }

    fn value(&mut self, value: Val, functions: &[u32]) -> WarmValue {
        match value {
            Val::I32(value) => WarmValue::I32(value),
            Val::I64(value) => WarmValue::I64(value),
            Val::F32(bits) => WarmValue::F32(bits),
            Val::F64(bits) => WarmValue::F64(bits),
            Val::V128(bits) => WarmValue::V128(bits.as_u128()),
            other => {
                let reference = other.ref_().expect("only references are left");
                self.reference(&reference, functions)
            }
        }
    }

    /// Reads everything that a prepared module shows.
    pub(crate) fn warm_state(&mut self, prepared: &PreparedModule) -> WarmState {
        let visible = prepared.visible.as_ref().expect("prepared as bakeable");
        let mut warm = WarmState::default();
        for (index, _) in (0..).zip(&prepared.analysis.memories) {
            let memory = self.memory(index);
            warm.memories.push(memory.size(&self.store));
        }
        for &index in &visible.globals {
            let value = self.global(&names::global(index)).get(&mut self.store);
            warm.globals.insert(index, self.value(value, &visible.functions));
        }
        for &index in &visible.tables {
            let table = self.table(&names::table(index));
            let mut elements = Vec::new();
            for at in 0..table.size(&self.store) {
                let element = table.get(&mut self.store, at).expect("in bounds");
                elements.push(self.reference(&element, &visible.functions));
            }
            warm.tables.insert(index, elements);
        }
        let dropped = |running: &mut Self, name: String| {
            running.global(&name).get(&mut running.store).i32() != Some(0)
        };
        for &index in &visible.data {
            if dropped(self, names::data_dropped(index)) {
                warm.dropped_data.insert(index);
            }
        }
        for &index in &visible.elements {
            if dropped(self, names::elem_dropped(index)) {
                warm.dropped_elements.insert(index);
            }
        }
        warm
    }

    /// All memories' bytes.
    pub(crate) fn memories(&mut self, count: usize) -> Vec<Vec<u8>> {
        (0..count as u32)
            .map(|index| {
                let memory = self.memory(index);
                memory.data(&self.store).to_vec()
            })
            .collect()
    }

    /// Writes all memories' bytes; false if a size differs, which only the engine can undo.
    pub(crate) fn set_memories(&mut self, contents: &[Vec<u8>]) -> bool {
        for (index, bytes) in (0..).zip(contents) {
            let memory = self.memory(index);
            if memory.data_size(&self.store) != bytes.len() {
                return false;
            }
            memory.data_mut(&mut self.store).copy_from_slice(bytes);
        }
        true
    }

    /// The original's exported functions, by name, with their parameter types.
    pub(crate) fn functions(&mut self) -> Vec<(String, Vec<ValType>)> {
        let exports: Vec<(String, Extern)> = self
            .instance
            .exports(&mut self.store)
            .map(|export| (export.name().to_owned(), export.into_extern()))
            .collect();
        exports
            .into_iter()
            .filter_map(|(name, item)| {
                let func = item.into_func()?;
                let params = func.ty(&self.store).params().collect();
                (!name.starts_with(names::PREFIX)).then_some((name, params))
            })
            .collect()
    }
}
