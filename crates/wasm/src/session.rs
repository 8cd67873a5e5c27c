//! Sessions: a live instance that goes from state to state of a tree.
//!
//! Promises: in each state memories, globals, tables, dropped segments and sizes equal those at the
//! freeze, bit for bit. A checkpoint stores the pages written since the last; moving to another
//! state copies those that differ. Globals and writable tables are read whole at each, a few
//! nanoseconds an entry. If a change cannot be undone in place (a table that grew, a large heap of
//! collected objects), the instance is replaced. Every switch to a state gets its own generation
//! and fresh entropy, as a lease does.
//!
//! A guest's file tree and its open files are part of the state. May break it: state that host
//! functions keep. WASI streams belong to the live session: they are not part of a state, and each
//! switch makes new ones. So do host directories; a guest with open files in them cannot be frozen.

pub(crate) mod states;

use std::collections::HashMap;
use std::sync::Arc;

use afresh_files::{FileDifference, Refused, Tree};
use afresh_memory::{Features, ImageError, SlotError, Strategy};
use afresh_pool::{Budget, MappingCharge};
use afresh_rewrite::{VisibleState, WarmState, WarmValue, names};
use afresh_snapshot::{Frozen, Guest};
use wasmtime::{AsContext, AsContextMut, Global, Instance, RootScope, Table, Val, ValType};

use crate::call::scope::forget_exception;
use crate::engine::linear::{GuestMemory, MemoryPolicy};
use crate::host::files::Files;
use crate::host::{Host, descriptors};
use crate::lease::Lease;
use crate::lease::acquire::at_once;
use crate::lease::leased_instance::LeasedInstance;
use crate::warm::Inner;
use crate::warm::ownership::{Ownership, SessionInstance};
use crate::warm::pools::Pools;
use crate::warm::reset::{KEPT_HEAP, ResetInstance, ResetState};
use crate::warm::state::{functions, missing, val, warm_value};
use crate::{Warm, WarmError};

/// A session could not be made, frozen or moved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The guest runs in fresh mode, in which its globals cannot be read.
    #[error("a guest in fresh mode has no sessions, because its globals cannot be read: {0}")]
    Fresh(String),
    /// The present state cannot be kept.
    #[error("the session cannot be frozen: {0}")]
    State(String),
    /// The state is another guest's.
    #[error("the state belongs to another guest")]
    Foreign,
    /// An instance could not be made or read.
    #[error(transparent)]
    Warm(#[from] WarmError),
    /// A memory could not be moved.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// A memory could not be stored.
    #[error(transparent)]
    Image(#[from] ImageError),
}

/// The state of a session except memory: globals, tables, dropped segments, sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionState(pub(crate) Arc<Values>);

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Values {
    /// The guest it belongs to.
    pub(crate) guest: u64,
    /// The size of each memory.
    pub(crate) bytes: Vec<usize>,
    pub(crate) globals: Vec<WarmValue>,
    pub(crate) tables: Vec<Vec<WarmValue>>,
    /// Flags of the segments that can be dropped: data, then elements.
    pub(crate) dropped: Vec<bool>,
    /// The file tree, and its open files, if the guest has one.
    pub(crate) files: Option<Files>,
}

impl SessionState {
    /// The file tree of the state, if the guest has one.
    #[must_use]
    pub fn files(&self) -> Option<&Tree> {
        self.0.files.as_ref().map(|files| &files.tree)
    }

    /// The changes of the files between this state and `other`.
    ///
    /// # Errors
    /// [`Refused::Layer`] when a layer of the tree cannot be read.
    pub fn diff_files(&self, other: &Self) -> Result<FileDifference, Refused> {
        match (self.files(), other.files()) {
            (Some(one), Some(two)) => one.diff(two),
            _ => Ok(FileDifference::default()),
        }
    }
}

/// The positions of all state of an instance except memory, looked up once.
struct InstanceLayout {
    globals: Vec<(Global, ValType)>,
    tables: Vec<(Table, ValType)>,
    dropped: Vec<Global>,
    /// The module's functions by the address of their reference.
    functions: HashMap<usize, u32>,
}

/// A live instance that moves from state to state. It is a [`Guest`] of the trees of
/// `afresh_snapshot`, and is called through [`Session::lease`].
pub struct Session {
    warm: Warm,
    instance: ResetInstance,
    places: InstanceLayout,
    /// The share of the process budget that it holds.
    _mappings: MappingCharge,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("warm", &self.warm).finish_non_exhaustive()
    }
}

/// The warm state of a guest that can have sessions.
pub(crate) fn resettable(inner: &Inner) -> Result<&Arc<ResetState>, SessionError> {
    match &inner.pools {
        Pools::Reset { state, .. } => Ok(state),
        Pools::Fresh { .. } => {
            let why = inner.report.why_fresh.clone();
            Err(SessionError::Fresh(why.unwrap_or_else(|| "it was asked for".to_owned())))
        }
    }
}

impl Warm {
    /// The warm state as a state of sessions, the root of a tree.
    ///
    /// # Errors
    /// [`SessionError::Fresh`].
    pub fn root(&self) -> Result<Frozen<SessionState>, SessionError> {
        let state = resettable(&self.inner)?;
        let memories = state.memories.iter().map(|memory| memory.image.clone()).collect();
        let bytes = state.memories.iter().map(|memory| memory.bytes).collect();
        let files = state.blueprint.stores.kept_files();
        let visible = &state.blueprint.visible;
        let values = Values::of(self.inner.id, bytes, &state.state, visible, files);
        Ok(Frozen { memories, state: SessionState(Arc::new(values)) })
    }
}

impl Values {
    pub(crate) fn of(
        guest: u64,
        bytes: Vec<usize>,
        state: &WarmState,
        visible: &VisibleState,
        files: Option<Files>,
    ) -> Self {
        let global = |index| state.globals.get(index).copied().unwrap_or(WarmValue::Null);
        let table = |index| state.tables.get(index).cloned().unwrap_or_default();
        let data = visible.data.iter().map(|index| state.dropped_data.contains(index));
        let elements = visible.elements.iter().map(|index| state.dropped_elements.contains(index));
        Self {
            guest,
            bytes,
            globals: visible.globals.iter().map(global).collect(),
            tables: visible.tables.iter().map(table).collect(),
            dropped: data.chain(elements).collect(),
            files,
        }
    }

    /// A value of it that no other instance can hold, if it has one.
    fn opaque(&self) -> Option<&'static str> {
        let opaque = |values: &[WarmValue]| values.contains(&WarmValue::Opaque);
        if opaque(&self.globals) {
            Some("a global holds")
        } else {
            self.tables.iter().any(|table| opaque(table)).then_some("a table holds")
        }
    }
}

impl InstanceLayout {
    fn find(
        store: &mut impl AsContextMut<Data = Host>,
        instance: Instance,
        visible: &VisibleState,
    ) -> Result<Self, WarmError> {
        let mut global =
            |name: String| instance.get_global(&mut *store, &name).ok_or_else(|| missing(&name));
        let globals: Vec<Global> =
            visible.globals.iter().map(|i| global(names::global(*i))).collect::<Result<_, _>>()?;
        let data = visible.data.iter().map(|i| names::data_dropped(*i));
        let elements = visible.elements.iter().map(|i| names::elem_dropped(*i));
        let dropped = data.chain(elements).map(&mut global).collect::<Result<_, _>>()?;
        let mut tables = Vec::new();
        for index in &visible.tables {
            let name = names::table(*index);
            let table = instance.get_table(&mut *store, &name).ok_or_else(|| missing(&name))?;
            let ty = ValType::Ref(table.ty(&*store).element().clone());
            tables.push((table, ty));
        }
        let globals =
            globals.into_iter().map(|global| (global, global.ty(&*store).content().clone()));
        Ok(Self {
            globals: globals.collect(),
            tables,
            dropped,
            functions: functions(store, instance, visible)?,
        })
    }

    /// Reads the present state.
    fn read(
        &self,
        store: &mut impl AsContextMut<Data = Host>,
        guest: u64,
        bytes: Vec<usize>,
    ) -> Values {
        let files = store.as_context().data().files();
        let mut globals = Vec::with_capacity(self.globals.len());
        for (global, _) in &self.globals {
            let value = global.get(&mut *store);
            globals.push(warm_value(store, &self.functions, &value));
        }
        let tables = self.tables.iter().map(|(table, _)| self.read_table(store, *table)).collect();
        let dropped =
            self.dropped.iter().map(|flag| flag.get(&mut *store).i32() != Some(0)).collect();
        Values { guest, bytes, globals, tables, dropped, files }
    }

    fn read_table(
        &self,
        store: &mut impl AsContextMut<Data = Host>,
        table: Table,
    ) -> Vec<WarmValue> {
        let size = table.size(&*store);
        let element = |at| match table.get(&mut *store, at) {
            Some(element) => warm_value(store, &self.functions, &Val::from(element)),
            None => WarmValue::Opaque,
        };
        (0..size).map(element).collect()
    }

    /// Writes the differences from `to`.
    fn write(
        &self,
        store: &mut impl AsContextMut<Data = Host>,
        instance: Instance,
        to: &Values,
    ) -> Result<(), WarmError> {
        let failed = |error: wasmtime::Error| {
            WarmError::State(format!("a state cannot be put into an instance: {error:#}"))
        };
        let foreign = || WarmError::State("a state holds a reference of another instance".into());
        for ((global, ty), value) in self.globals.iter().zip(&to.globals) {
            let value = val(store, instance, ty, *value).ok_or_else(foreign)?;
            global.set(&mut *store, value).map_err(failed)?;
        }
        for ((table, ty), elements) in self.tables.iter().zip(&to.tables) {
            let now = self.read_table(store, *table);
            for (at, element) in elements.iter().enumerate() {
                if now.get(at) == Some(element) {
                    continue;
                }
                let value =
                    val(store, instance, ty, *element).and_then(Val::ref_).ok_or_else(foreign)?;
                if at as u64 >= table.size(&*store) {
                    let more = (elements.len() - at) as u64;
                    table.grow(&mut *store, more, value).map_err(failed)?;
                } else {
                    table.set(&mut *store, at as u64, value).map_err(failed)?;
                }
            }
        }
        for (flag, dropped) in self.dropped.iter().zip(&to.dropped) {
            // Every bit, as the instruction that drops the segment sets them: the guards rely on
            // it.
            flag.set(&mut *store, Val::I32(-i32::from(*dropped))).map_err(failed)?;
        }
        Ok(())
    }
}

/// The memory policy of a session: noticing writes pays, even at a one-time cost.
fn policy(state: &ResetState) -> MemoryPolicy {
    let mut policy = state.blueprint.policy.clone();
    let learning = Strategy::WriteSet(None);
    if policy.strategy == Strategy::Auto
        && learning.choose(Features::host(), policy.host_access).is_ok()
    {
        policy.strategy = learning;
    }
    // Pages of a growth become part of the next state one by one.
    policy.zero_source = None;
    policy
}

impl Session {
    /// An instance in a state of this guest.
    fn new(warm: &Warm, from: &Frozen<SessionState>) -> Result<Self, SessionError> {
        let inner = &*warm.inner;
        let state = resettable(inner)?;
        let values = &*from.state.0;
        if values.guest != inner.id || from.memories.len() != state.memories.len() {
            return Err(SessionError::Foreign);
        }
        let policy = policy(state);
        let sized = from.memories.iter().zip(&values.bytes);
        let memories = state
            .memories
            .iter()
            .zip(sized)
            .map(|(warm, (image, bytes))| GuestMemory::new(warm.shape, image, *bytes, &policy))
            .collect::<Result<Vec<_>, _>>()?;
        let mut instance = state.make_over(memories)?;
        // As in `go`.
        instance.store.data_mut().set_memory_limit(usize::MAX);
        instance.store.data_mut().set_files(values.files.clone());
        let mut scope = RootScope::new(&mut instance.store);
        let places = InstanceLayout::find(&mut scope, instance.instance, &state.blueprint.visible)?;
        places.write(&mut scope, instance.instance, values)?;
        drop(scope);
        let held = Budget::process().hold(instance.all_mappings());
        let mut this = Self { warm: warm.clone(), instance, places, _mappings: held };
        this.begin()?;
        Ok(this)
    }

    /// Whether a call was left in its middle: its remains in the store are not read.
    fn is_broken(&self) -> bool {
        let lost = || self.instance.store.as_context().data().has_lost();
        self.instance.unwound || self.instance.unfinished || lost()
    }

    /// Leaves the instance to [`Guest::switch`], which replaces it, if `result` has left a memory
    /// of unknown content: calls do not look at slots.
    fn abandon_on<T>(&mut self, result: Result<T, SessionError>) -> Result<T, SessionError> {
        if result.is_err() {
            let mut memories = self.instance.memories.iter();
            self.instance.unfinished |=
                memories.any(|(memory, _)| memory.slot().quarantined().is_some());
        }
        result
    }

    /// Gives the instance a generation and entropy that no other has.
    fn begin(&mut self) -> Result<(), WarmError> {
        let inner = &*self.warm.inner;
        let live =
            LeasedInstance::Reset(Ownership::SessionInstance(SessionInstance(&mut self.instance)));
        let mut lease = Lease::begin(inner, live, inner.limits);
        at_once(lease.prepare())
    }

    /// The instance in its present state, for calls. Their changes stay when the lease ends.
    /// References into the store's collected heap can be used until the next lease.
    pub fn lease(&mut self) -> Lease<'_> {
        let blueprint = &self.instance.reset_state.blueprint;
        if blueprint.collects {
            self.instance.store.renew(|_| ());
        }
        blueprint.stores.unlimit(&mut self.instance.store);
        if self.instance.store.data_mut().lost_callback() {
            // No limit would hold any more.
            self.instance.unfinished = true;
        }
        Lease::resume(
            &self.warm.inner,
            LeasedInstance::Reset(Ownership::SessionInstance(SessionInstance(&mut self.instance))),
        )
    }

    /// The present file tree, if the guest has one.
    #[must_use]
    pub fn files(&self) -> Option<Tree> {
        self.instance.store.as_context().data().files().map(|files| files.tree)
    }

    /// Changes the file tree from outside; `None` in a guest that has none.
    pub fn change_files<T>(&mut self, change: impl FnOnce(&mut Tree) -> T) -> Option<T> {
        self.instance.store.data_mut().change_files(change)
    }

    /// The guest of this session.
    #[must_use]
    pub fn warm(&self) -> &Warm {
        &self.warm
    }

    /// Everything but the content of the memories.
    fn read(&mut self) -> Values {
        let bytes = self.instance.memories.iter().map(|(memory, _)| memory.bytes()).collect();
        let mut scope = RootScope::new(&mut self.instance.store);
        self.places.read(&mut scope, self.warm.inner.id, bytes)
    }

    /// Goes to another state in place; `false` when that takes a new instance.
    fn move_to(&mut self, to: &Frozen<SessionState>) -> Result<bool, SessionError> {
        let values = &*to.state.0;
        let instance = &mut self.instance;
        instance.store.data_mut().clear();
        // A call with its own limit may have made a state that others could not.
        instance.store.data_mut().set_memory_limit(usize::MAX);
        instance.store.data_mut().set_files(values.files.clone());
        forget_exception(&mut instance.store);
        let mut tables = self.places.tables.iter().zip(&values.tables);
        if tables.any(|((table, _), elements)| table.size(&instance.store) > elements.len() as u64)
        {
            return Ok(false);
        }
        let sized = to.memories.iter().zip(&values.bytes);
        for ((memory, handle), (image, bytes)) in instance.memories.iter().zip(sized) {
            if memory.switch(image, *bytes)? {
                handle.grow(&mut instance.store, 0).map_err(WarmError::Instantiate)?;
            }
        }
        let mut scope = RootScope::new(&mut instance.store);
        self.places.write(&mut scope, instance.instance, values)?;
        drop(scope);
        if instance.reset_state.blueprint.collects {
            let collected = instance.store.renew(|store| match store.gc_heap_capacity() {
                0 => Ok(0),
                _ => store.gc(None).map(|()| store.gc_heap_capacity()),
            });
            return Ok(collected.map_err(WarmError::Instantiate)? <= KEPT_HEAP);
        }
        Ok(true)
    }
}

impl Guest for Session {
    type Template = Warm;
    type State = SessionState;
    type Error = SessionError;

    fn template(&self) -> Warm {
        self.warm.clone()
    }

    fn make(home: &Warm, from: &Frozen<SessionState>) -> Result<Self, SessionError> {
        Self::new(home, from)
    }

    fn checkpoint(&mut self) -> Result<Frozen<SessionState>, SessionError> {
        if let Some(cause) = self.instance.store.as_context().data().loss() {
            return Err(ImageError::Filler(cause).into());
        }
        if self.is_broken() {
            let why = "a call of it was cut off, or ended by a panic; roll it back first";
            return Err(SessionError::State(why.to_owned()));
        }
        descriptors::check(self.instance.store.data_mut())?;
        let values = self.read();
        if let Some(what) = values.opaque() {
            return Err(SessionError::State(format!(
                "{what} a reference to a host or GC object, which no state can hold; clear it before"
            )));
        }
        let memories = self.instance.memories.iter().map(|(memory, _)| memory.checkpoint());
        let memories: Result<Vec<_>, _> = memories.collect();
        let memories = self.abandon_on(memories.map_err(SessionError::from))?;
        Ok(Frozen { memories: memories.into(), state: SessionState(Arc::new(values)) })
    }

    fn switch(&mut self, to: &Frozen<SessionState>) -> Result<(), SessionError> {
        if to.state.0.guest != self.warm.inner.id {
            return Err(SessionError::Foreign);
        }
        if !self.is_broken() && self.move_to(to)? {
            Ok(self.begin()?)
        } else {
            *self = Self::new(&self.warm, to)?;
            Ok(())
        }
    }

    fn relocate(&mut self, to: &Frozen<SessionState>) -> Result<(), SessionError> {
        // The sizes stay, so wasmtime need not look again.
        let sized = to.memories.iter().zip(&to.state.0.bytes);
        let mut memories = self.instance.memories.iter().zip(sized);
        let moved = memories
            .try_for_each(|((memory, _), (image, bytes))| memory.switch(image, *bytes).map(drop));
        self.abandon_on(moved.map_err(SessionError::from))
    }
}

#[cfg(test)]
mod tests {
    use afresh_snapshot::Guest as _;
    use afresh_sys::{Call, errno, inject};

    use super::*;
    use crate::{Engine, EngineConfig, Guest, GuestOptions, Mode, WarmUp};

    #[test]
    fn a_session_with_memory_of_unknown_content_answers_no_call_and_is_replaced() {
        const FILL: &str = r#"(module (memory 128)
            (func (export "fill") (memory.fill (i32.const 0) (i32.const 7) (i32.const 8388608)))
            (func (export "get") (result i32) (i32.load8_u (i32.const 4096))))"#;
        let engine = Engine::new(EngineConfig::default()).unwrap();
        let options = GuestOptions { mode: Mode::Reset, ..GuestOptions::default() };
        let guest = Guest::with_options(&engine, &wat::parse_str(FILL).unwrap(), options);
        let warm = guest.unwrap().warm(WarmUp::new()).unwrap();
        let mut failed = 0;
        for after in 0..6 {
            let mut session = Session::new(&warm, &warm.root().unwrap()).unwrap();
            session.lease().call("fill", &[]).unwrap();
            let frozen = session.checkpoint().unwrap();
            // All pages differ by where they are stored, so the image is mapped anew.
            let memories = frozen.memories.iter().map(|memory| memory.compact().unwrap());
            let other = Frozen { memories: memories.collect(), state: frozen.state.clone() };
            let plan =
                inject::Plan { call: Some(Call::Map), after, times: 1, errno: errno::ENOMEM };
            let (moved, _) = inject::with(plan, || session.relocate(&other));
            failed += usize::from(moved.is_err());
            let get = |session: &mut Session| session.lease().call("get", &[]);
            match get(&mut session) {
                Ok(values) => assert!(matches!(values[..], [Val::I32(7)]), "call {after}"),
                Err(error) => assert!(moved.is_err(), "call {after}: {error}"),
            }
            session.switch(&frozen).unwrap();
            assert!(matches!(get(&mut session).unwrap()[..], [Val::I32(7)]), "call {after}");
        }
        assert!(failed > 0);
    }

    #[test]
    fn the_stack_of_a_session_keeps_little_between_calls_and_is_charged() {
        const DOWN: &str = r#"(module (func $down (export "down") (param $n i32) (result i32)
            (if (result i32) (i32.eqz (local.get $n))
                (then (i32.const 0))
                (else (i32.add (i32.const 1) (call $down (i32.sub (local.get $n) (i32.const 1))))))))"#;
        let config = EngineConfig { stack: 8 << 20, ..EngineConfig::default() };
        let engine = Engine::new(config).unwrap();
        let options = GuestOptions { mode: Mode::Reset, ..GuestOptions::default() };
        let guest = Guest::with_options(&engine, &wat::parse_str(DOWN).unwrap(), options);
        let warm = guest.unwrap().warm(WarmUp::new()).unwrap();
        let mut session = Session::new(&warm, &warm.root().unwrap()).unwrap();
        // Each has more than a MiB of frames. Without a limit the stack is looked at now and then.
        for _ in 0..64 {
            session.lease().call("down", &[Val::I32(70_000)]).unwrap();
        }
        let kept = session.instance.stack_bytes();
        assert!(kept.0 <= 128 << 10, "{kept:?}");
        assert_eq!(kept.0, kept.1);
    }
}
