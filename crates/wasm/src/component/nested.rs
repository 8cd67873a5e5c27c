//! Warming a component: its warm-up runs once, and the resulting state becomes a new component.
//!
//! The state of a component is that of its core instances. Memories become images in the order in
//! which wasmtime makes them, which is the same for every instance; globals and dropped segments
//! are read by functions that rewriting adds to every module, and baked into the modules as the
//! initial state of new instances. Start functions have run, and are removed.
//!
//! State that cannot be kept is refused with its name: handles of resources, which live in
//! wasmtime's tables and belong to the host or to other components; references without a constant;
//! tables that code has written; modules that are instantiated more than once and have come to
//! differ.

use afresh_rewrite::{OpenComponent, Roots, WarmState, bake_component, open_component};
use afresh_sys::planted::{Bug, is};
use wasmtime::Store;
use wasmtime::component::{Component, Instance, Linker};

use crate::call::dynamic::start_error;
use crate::call::stores::Stores;
use crate::component::compiled::compile;
use crate::component::lease::Caller;
use crate::engine::call_path::{CallPath, now};
use crate::engine::linear::{GuestMemory, MemoryOwner, with_memories};
use crate::guest::{Arguments, Guest, WarmUp};
use crate::host::Host;
use crate::warm::instance_state::WarmMemory;
use crate::{CallError, Engine, LoadError, WarmError};

/// A component's warm state.
pub(crate) struct WarmNested {
    /// In the order in which wasmtime makes them.
    pub(crate) memories: Vec<WarmMemory>,
    /// By the place of the module in the binary; none for one that is not instantiated or has no
    /// state.
    pub(crate) modules: Vec<Option<WarmState>>,
}

/// Runs the warm-up in one instance and reads the resulting state.
pub(crate) async fn warm(
    guest: &Guest,
    linker: &Linker<Host>,
    stores: &Stores,
    cold: &[WarmMemory],
    warm_up: &WarmUp,
) -> Result<WarmNested, WarmError> {
    let way = stores.way;
    let policy = guest.options.policy(&guest.engine, true);
    let opened = open_component(&guest.wasm).map_err(LoadError::from)?;
    let pre = linker
        .instantiate_pre(&compile(&guest.engine, &opened.component)?)
        .map_err(LoadError::Link)?;
    let memories = cold
        .iter()
        .map(|m| GuestMemory::new(m.shape, &m.image, m.bytes, &policy))
        .collect::<Result<Vec<_>, _>>()?;
    let mut store = stores.make()?;
    store.data_mut().set_memories(&memories);
    // Its start functions are the guest's.
    let limits = stores.limits.of_warm_up();
    limits.apply(&mut store);
    let instantiate = way.instantiate_component(&pre, &mut store);
    let instance = with_memories(&memories, MemoryOwner::Component, instantiate)
        .await
        .map_err(|error| start_error(error, limits))?;
    store.data_mut().end_instantiation();
    for (name, arguments) in &warm_up.calls {
        let failed = |error| WarmError::Call { name: name.clone(), error };
        let mut cut_short = false;
        let mut caller = Caller {
            pre: &pre,
            store: &mut store,
            instance,
            limits,
            way,
            roots: &Roots::AllExports,
            cut_short: &mut cut_short,
        };
        match arguments {
            Arguments::Component(values) => {
                caller.call(name, values).await.map(drop).map_err(failed)?;
            }
            Arguments::Texts(texts) => {
                caller.call_text(name, texts).await.map(drop).map_err(failed)?;
            }
            Arguments::Bytes(input) => {
                let text = String::from_utf8(input.clone()).map_err(|_| {
                    failed(CallError::Interface(
                        "a component's function takes text, and the input is not text".to_owned(),
                    ))
                })?;
                caller.call_text(name, &[text]).await.map(drop).map_err(failed)?;
            }
            Arguments::Values(values) if values.is_empty() => {
                caller.call(name, &[]).await.map(drop).map_err(failed)?;
            }
            Arguments::Values(_) => {
                return Err(WarmError::State(format!(
                    "the warm-up call {name:?} has values of a core module; give a component \
                     `WarmUp::call_component`, or text"
                )));
            }
        }
    }
    stores.keep_files(store.data_mut());
    stores.unlimit(&mut store);
    let modules = read(way, &opened, &mut store, instance)?;
    no_handles(&guest.engine, stores, &mut store)?;
    let mut warm = Vec::with_capacity(memories.len());
    for (memory, cold) in memories.iter().zip(cold) {
        let image = match is(Bug::NestedMemory) {
            true => cold.image.clone(),
            false => memory.slot().freeze_apart()?,
        };
        warm.push(WarmMemory { shape: cold.shape, image, bytes: memory.bytes() });
    }
    Ok(WarmNested { memories: warm, modules })
}

/// The component that starts in the warm state.
pub(crate) fn baked(wasm: &[u8], modules: &[Option<WarmState>]) -> Result<Vec<u8>, WarmError> {
    bake_component(wasm, modules).map_err(|e| WarmError::State(e.to_string()))
}

/// Reads the state of every core instance.
fn read(
    way: CallPath,
    opened: &OpenComponent,
    store: &mut Store<Host>,
    instance: Instance,
) -> Result<Vec<Option<WarmState>>, WarmError> {
    let mut modules: Vec<Option<WarmState>> = Vec::new();
    modules.resize_with(opened.modules(), || None);
    for path in &opened.ways {
        let missing = || WarmError::State(format!("the component does not show {:?}", path.path));
        let mut export = None;
        for name in &path.path {
            let next = instance.get_export_index(&mut *store, export.as_ref(), name);
            export = Some(next.ok_or_else(missing)?);
        }
        let function = instance
            .get_typed_func::<(u32,), (u64,)>(&mut *store, export.as_ref().ok_or_else(missing)?)
            .map_err(WarmError::Instantiate)?;
        let state = opened
            .state(path.module, |item| {
                way.call_component_now(&function, store, (item,)).map(|(bits,)| bits)
            })
            .map_err(WarmError::Instantiate)?
            .map_err(|why| {
                WarmError::State(format!(
                    "core module {} of the component: {why}, which no new instance can start with",
                    path.module
                ))
            })?;
        let slot = modules.get_mut(path.module).ok_or_else(missing)?;
        match slot {
            Some(other) if *other != state => {
                return Err(WarmError::State(format!(
                    "core module {} of the component is instantiated more than once, and its instances \
                     have come to differ in more than their memories",
                    path.module
                )));
            }
            _ if is(Bug::Nested) => {}
            slot => *slot = Some(state),
        }
    }
    Ok(modules)
}

/// A component that takes one more handle and gives it back.
const TAKER: &str = "taker";

/// Refuses a store with a live handle in any component's table. wasmtime counts all of them
/// together: if one more handle exceeds a limit of one, another exists.
///
/// Each task counts as one handle as well: that of the call itself, and any unfinished task of the
/// warm-up.
fn no_handles(engine: &Engine, stores: &Stores, store: &mut Store<Host>) -> Result<(), WarmError> {
    let most_taken = if engine.inner.config.has_p3() { 2 } else { 1 };
    stores.unlimit(&mut *store);
    store.data_mut().set_memory_limit(usize::MAX);
    let taker = Component::new(store.engine(), taker()).map_err(WarmError::Instantiate)?;
    let linker: Linker<Host> = Linker::new(store.engine());
    let taker = linker
        .instantiate_pre(&taker)
        .and_then(|pre| now(stores.way.instantiate_component(&pre, store)))
        .map_err(WarmError::Instantiate)?;
    let take =
        taker.get_typed_func::<(), ()>(&mut *store, TAKER).map_err(WarmError::Instantiate)?;
    let most = store.max_component_handles();
    store.set_max_component_handles(most_taken);
    let taken = stores.way.call_component_now(&take, store, ());
    store.set_max_component_handles(most);
    if is(Bug::Handle) {
        return Ok(());
    }
    taken.map_err(|_| {
        WarmError::State(
            "the warm-up left handles of resources alive (streams, descriptors or objects of other \
             components) or tasks, which no new instance has; let it drop or end them"
                .to_owned(),
        )
    })
}

fn taker() -> Vec<u8> {
    use wasm_encoder::{
        CodeSection, ComponentBuilder, ComponentExportKind, EntityType, ExportKind, ExportSection,
        Function, FunctionSection, ImportSection, Module, ModuleArg, TypeSection, ValType,
    };
    let mut types = TypeSection::new();
    types.ty().function([ValType::I32], [ValType::I32]);
    types.ty().function([ValType::I32], []);
    types.ty().function([], []);
    let mut imports = ImportSection::new();
    imports.import("handles", "new", EntityType::Function(0));
    imports.import("handles", "drop", EntityType::Function(1));
    let mut functions = FunctionSection::new();
    functions.function(2);
    let mut exports = ExportSection::new();
    exports.export("take", ExportKind::Func, 2);
    let mut body = Function::new([]);
    body.instructions().i32_const(0).call(0).call(1).end();
    let mut code = CodeSection::new();
    code.function(&body);
    let mut module = Module::new();
    module.section(&types).section(&imports).section(&functions).section(&exports).section(&code);

    let mut component = ComponentBuilder::default();
    let resource = component.type_resource(None, ValType::I32, None);
    let new = component.resource_new(resource);
    let drop = component.resource_drop(resource);
    let module = component.core_module(None, &module);
    let handles = component.core_instantiate_exports(
        None,
        [("new", ExportKind::Func, new), ("drop", ExportKind::Func, drop)],
    );
    let instance =
        component.core_instantiate(None, module, [("handles", ModuleArg::Instance(handles))]);
    let take = component.core_alias_export(None, instance, "take", ExportKind::Func);
    let (ty, mut function) = component.type_function(None);
    function.params::<_, wasm_encoder::ComponentValType>([]).result(None);
    let function = component.lift_func(None, take, ty, []);
    component.export(TAKER, ComponentExportKind::Func, function, None);
    component.finish()
}
