//! Components, in fresh mode: a new store and instance for every call, over memories that already hold
//! the component's data.
//!
//! The active data segments of every core module are moved into images. Each instantiation takes slots
//! for the component's memories in the order in which wasmtime creates them, which the component's own
//! text tells, or else one instantiation of the original shows; between calls the slots are reset, and
//! the pages that calls write stay resident.

use std::sync::Arc;

use afresh_memory::{ImageBuilder, PAGE_SIZE, page_align_up};
use afresh_pool::{Lease as PoolLease, Pool, PoolStats};
use afresh_rewrite::{DataSegment, NestedModule, prepare_component};
use wasmtime::Store;
use wasmtime::component::types::ComponentItem;
use wasmtime::component::{Component, Func, Instance, InstancePre, Linker, Type, Val};

use crate::fresh::FreshMemories;
use crate::guest::Guest;
use crate::host::Host;
use crate::linear::{GuestMemory, MemoryPolicy, Shape, record_memories, with_memories};
use crate::reset::WarmMemory;
use crate::stores::{CallLimits, Stores};
use crate::{CallError, LoadError, WarmError};

struct Inner {
    pre: InstancePre<Host>,
    memories: Vec<WarmMemory>,
    policy: MemoryPolicy,
    stores: Stores,
    limits: CallLimits,
    pool: Pool<FreshMemories>,
}

/// A component whose memories come warm; cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct WarmComponent {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for WarmComponent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WarmComponent").field("memories", &self.inner.memories.len()).finish()
    }
}

/// A memory that one of the component's modules defines.
#[derive(Clone, Copy)]
struct Declared<'a> {
    module: &'a NestedModule,
    index: u32,
}

impl<'a> Declared<'a> {
    fn all(module: &'a NestedModule) -> impl Iterator<Item = Self> + 'a {
        (0u32..)
            .zip(&module.memories)
            .filter(|(_, memory)| memory.import.is_none())
            .map(move |(index, _)| Self { module, index })
    }

    fn shape(&self) -> Shape {
        Shape::of(&self.module.memories[self.index as usize])
    }

    fn segments(&self) -> impl Iterator<Item = &'a DataSegment> + use<'a> {
        let index = self.index;
        self.module.segments.iter().filter(move |s| s.memory == index)
    }

    fn warm_memory(&self) -> Result<WarmMemory, WarmError> {
        let shape = self.shape();
        let mut image = ImageBuilder::new(page_align_up(shape.minimum) / PAGE_SIZE);
        for segment in self.segments() {
            image.segment(segment.offset as usize, &segment.bytes)?;
        }
        Ok(WarmMemory { shape, image: image.build()?, bytes: shape.minimum })
    }
}

/// The memories in the order in which the component's text instantiates its modules.
fn in_order<'a>(modules: &'a [NestedModule], order: &[usize]) -> Vec<Declared<'a>> {
    order.iter().filter_map(|at| modules.get(*at)).flat_map(Declared::all).collect()
}

/// The memories in the order in which wasmtime created them for the original component, told apart by
/// shape and, where that leaves several, by the data that is in them now.
fn by_content<'a>(
    modules: &'a [NestedModule],
    created: &[Arc<GuestMemory>],
) -> Result<Vec<Declared<'a>>, WarmError> {
    let mut order = Vec::new();
    for memory in created {
        let mut best: Option<(usize, Declared<'_>)> = None;
        let mut tie = false;
        for declared in modules.iter().flat_map(Declared::all) {
            if !memory.is_shaped(declared.shape()) {
                continue;
            }
            let mut matching = 0;
            for segment in declared.segments() {
                let mut live = vec![0; segment.bytes.len()];
                memory.slot().read(segment.offset as usize, &mut live)?;
                matching += live.iter().zip(&segment.bytes).filter(|(a, b)| a == b).count();
            }
            match &best {
                Some((most, _)) if matching < *most => {}
                Some((most, other)) if matching == *most => {
                    tie |= !declared.segments().eq(other.segments());
                }
                _ => (best, tie) = (Some((matching, declared)), false),
            }
        }
        if tie {
            return Err(WarmError::State(
                "two of the component's memories cannot be told apart".to_owned(),
            ));
        }
        // What fits no declaration is not the component's own: wasmtime's heap for GC objects.
        order.extend(best.map(|(_, declared)| declared));
    }
    Ok(order)
}

impl WarmComponent {
    pub(crate) fn new(guest: &Guest) -> Result<Self, WarmError> {
        let engine = &guest.engine;
        let options = &guest.options;
        if options.timeout.is_some() {
            engine.start_ticker()?;
        }
        let compile =
            |bytes: &[u8]| Component::new(engine.wasmtime(), bytes).map_err(LoadError::Compile);
        let prepared = prepare_component(&guest.wasm).map_err(LoadError::from)?;
        let mut linker: Linker<Host> = Linker::new(engine.wasmtime());
        wasmtime_wasi::p2::add_to_linker_sync(&mut linker).map_err(LoadError::Link)?;
        let stores = Stores::new(engine, options);
        let order = match &prepared.instantiations {
            Some(order) => in_order(&prepared.modules, order),
            None => {
                let original =
                    linker.instantiate_pre(&compile(&guest.wasm)?).map_err(LoadError::Link)?;
                let mut store = stores.make();
                let (_, created) = record_memories(|| original.instantiate(&mut store))
                    .map_err(WarmError::Instantiate)?;
                by_content(&prepared.modules, &created)?
            }
        };
        let memories = order
            .into_iter()
            .map(|declared| declared.warm_memory())
            .collect::<Result<Vec<_>, WarmError>>()?;
        let pre =
            linker.instantiate_pre(&compile(&prepared.component)?).map_err(LoadError::Link)?;
        let inner = Inner {
            pre,
            memories,
            policy: options.policy(engine),
            stores,
            limits: CallLimits::of(options),
            pool: Pool::new(options.limits),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// A new instance for one call or several that belong together.
    ///
    /// # Errors
    /// [`WarmError`] when the pool is exhausted or the instance cannot be made.
    pub fn lease(&self) -> Result<ComponentLease<'_>, WarmError> {
        let inner = &*self.inner;
        let memories = inner.pool.get(0, |_| FreshMemories::new(&inner.memories, &inner.policy))?;
        let mut store = inner.stores.make();
        let instance = with_memories(&memories.memories, || inner.pre.instantiate(&mut store))
            .map_err(WarmError::Instantiate)?;
        Ok(ComponentLease { store, instance, memories, warm: inner })
    }

    /// The books of its pool.
    #[must_use]
    pub fn pool_stats(&self) -> PoolStats {
        self.inner.pool.stats()
    }
}

/// A fresh instance of a component.
pub struct ComponentLease<'a> {
    /// Dropped before the memories come back to their pool.
    store: Store<Host>,
    instance: Instance,
    memories: PoolLease<'a, FreshMemories>,
    warm: &'a Inner,
}

impl std::fmt::Debug for ComponentLease<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ComponentLease").field("host", self.store.data()).finish()
    }
}

impl ComponentLease<'_> {
    /// Calls an exported function of the component's world by name, or of an exported interface by
    /// `interface#function`.
    ///
    /// # Errors
    /// [`CallError`]; the lease is spent after a trap.
    pub fn call(&mut self, name: &str, arguments: &[Val]) -> Result<Vec<Val>, CallError> {
        let func = self.function(name)?;
        self.call_function(name, func, arguments)
    }

    /// Like [`ComponentLease::call`], with arguments as text (numbers, `true`, `false`, characters and
    /// strings) and the results as text.
    ///
    /// # Errors
    /// As [`ComponentLease::call`]; parameters of other types cannot be given as text.
    pub fn call_text(&mut self, name: &str, texts: &[String]) -> Result<String, CallError> {
        let func = self.function(name)?;
        let ty = func.ty(&self.store);
        let wanted: Vec<Type> = ty.params().map(|(_, ty)| ty).collect();
        let wrong = |reason: String| CallError::Arguments {
            name: name.to_owned(),
            expected: format!("{} parameters", wanted.len()),
            reason,
        };
        if wanted.len() != texts.len() {
            return Err(wrong(format!("{} given", texts.len())));
        }
        let arguments = wanted
            .iter()
            .zip(texts)
            .map(|(ty, text)| {
                read_value(ty, text)
                    .ok_or_else(|| wrong(format!("`{text}` cannot be read as {ty:?}")))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let results = self.call_function(name, func, &arguments)?;
        Ok(results.iter().map(show_component_value).collect::<Vec<_>>().join(" "))
    }

    fn function(&mut self, name: &str) -> Result<Func, CallError> {
        let pre = &self.warm.pre;
        let missing =
            || CallError::NoSuchExport { name: name.to_owned(), available: available(pre) };
        let function = match name.split_once('#') {
            None => name,
            Some((_, function)) => function,
        };
        let parent = match name.split_once('#') {
            None => None,
            Some((interface, _)) => Some(
                self.instance
                    .get_export_index(&mut self.store, None, interface)
                    .ok_or_else(missing)?,
            ),
        };
        let export = self
            .instance
            .get_export_index(&mut self.store, parent.as_ref(), function)
            .ok_or_else(missing)?;
        self.instance.get_func(&mut self.store, export).ok_or_else(missing)
    }

    fn call_function(
        &mut self,
        name: &str,
        func: Func,
        arguments: &[Val],
    ) -> Result<Vec<Val>, CallError> {
        let ty = func.ty(&self.store);
        if ty.params().len() != arguments.len() {
            return Err(CallError::Arguments {
                name: name.to_owned(),
                expected: format!("{} parameters", ty.params().len()),
                reason: format!("{} given", arguments.len()),
            });
        }
        let mut results = vec![Val::Bool(false); ty.results().len()];
        self.warm.limits.apply(&mut self.store);
        func.call(&mut self.store, arguments, &mut results)
            .map_err(|e| crate::lease::call_error(e, self.warm.limits))?;
        Ok(results)
    }

    /// The call's host state.
    #[must_use]
    pub fn host(&self) -> &Host {
        self.store.data()
    }

    /// Bytes of the component's memories that differ from what it starts with.
    ///
    /// # Errors
    /// [`WarmError`] when the memory cannot be read.
    pub fn differences(&mut self) -> Result<usize, WarmError> {
        self.memories.differences().map_err(|e| WarmError::State(e.to_string()))
    }
}

/// The functions that a component exports, as [`ComponentLease::call`] names them.
fn available(pre: &InstancePre<Host>) -> String {
    let ty = pre.component().component_type();
    let mut names = Vec::new();
    for (name, item) in ty.exports(pre.engine()) {
        match item.ty {
            ComponentItem::ComponentFunc(_) => names.push(name.to_owned()),
            ComponentItem::ComponentInstance(interface) => {
                let functions = interface
                    .exports(pre.engine())
                    .filter(|(_, item)| matches!(item.ty, ComponentItem::ComponentFunc(_)))
                    .map(|(function, _)| format!("{name}#{function}"));
                names.extend(functions);
            }
            _ => {}
        }
    }
    if names.is_empty() { "no function at all".to_owned() } else { names.join(", ") }
}

fn read_value(ty: &Type, text: &str) -> Option<Val> {
    Some(match ty {
        Type::Bool => Val::Bool(text.parse().ok()?),
        Type::U8 => Val::U8(text.parse().ok()?),
        Type::S8 => Val::S8(text.parse().ok()?),
        Type::U16 => Val::U16(text.parse().ok()?),
        Type::S16 => Val::S16(text.parse().ok()?),
        Type::U32 => Val::U32(text.parse().ok()?),
        Type::S32 => Val::S32(text.parse().ok()?),
        Type::U64 => Val::U64(text.parse().ok()?),
        Type::S64 => Val::S64(text.parse().ok()?),
        Type::Float32 => Val::Float32(text.parse().ok()?),
        Type::Float64 => Val::Float64(text.parse().ok()?),
        Type::Char => Val::Char(text.parse().ok()?),
        Type::String => Val::String(text.to_owned()),
        _ => return None,
    })
}

fn show_component_value(value: &Val) -> String {
    match value {
        Val::Bool(v) => v.to_string(),
        Val::U8(v) => v.to_string(),
        Val::S8(v) => v.to_string(),
        Val::U16(v) => v.to_string(),
        Val::S16(v) => v.to_string(),
        Val::U32(v) => v.to_string(),
        Val::S32(v) => v.to_string(),
        Val::U64(v) => v.to_string(),
        Val::S64(v) => v.to_string(),
        Val::Float32(v) => v.to_string(),
        Val::Float64(v) => v.to_string(),
        Val::Char(v) => v.to_string(),
        Val::String(v) => v.clone(),
        other => format!("{other:?}"),
    }
}
