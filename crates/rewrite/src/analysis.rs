//! Which parts of a module can change, and from where.
//!
//! Promises: every part of an instance that a call of a root can change is listed here as
//! changeable or is the subject of a [`Refusal`]. Memory bytes and memory sizes are left out, as
//! the engine restores every memory whole.
//!
//! The analysis follows direct calls from the roots. Once an indirect call or a call out of the
//! module is reachable, every function whose address is taken counts as reachable too, and every
//! exported table and mutable global as written: it does not know what the host does. For the same
//! reason a host function that can reach an object counts as changing it.

use std::collections::{BTreeSet, HashSet};

use wasmparser::{ExternalKind, ValType};

use crate::model::{ImportName, Model};
use crate::name_list::shorten;
use crate::names;
use crate::refusal::{MAX_REFUSALS, Refusal};

/// The functions that will be called once the state to come back to is saved.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Roots {
    /// Any exported function.
    #[default]
    AllExports,
    /// Only the exported functions of these names, and those that [the host
    /// calls](crate::names::is_hook). No other export may be called, not even by a host function
    /// that the guest calls: in a module prepared for restoring, one that a root cannot reach traps
    /// as soon as the state to come back to is saved.
    Named(Vec<String>),
}

impl Roots {
    /// Whether the export `name` is one.
    #[must_use]
    pub fn allow(&self, name: &str) -> bool {
        match self {
            Roots::AllExports => true,
            Roots::Named(names) => names.iter().any(|n| n == name) || names::is_hook(name),
        }
    }
}

/// Why a module could not be analysed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AnalyzeError {
    /// Not a valid core module.
    #[error("not a valid Wasm module: {0}")]
    Invalid(#[source] wasmparser::Error),
    /// A component where a core module is needed.
    #[error("this is a component, not a core module; components run in fresh mode")]
    Component,
    /// A root that is not exported.
    #[error("the module exports no function {name:?}; it exports {}", list(available))]
    NoSuchRoot {
        /// The missing name.
        name: String,
        /// The exported functions' names.
        available: Vec<String>,
    },
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "no function at all".into() } else { crate::name_list(names) }
}

/// A linear memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    /// Whether it is imported.
    pub imported: bool,
    /// The least size, in Wasm pages.
    pub minimum: u64,
    /// The largest size, in Wasm pages, if declared.
    pub maximum: Option<u64>,
    /// Base-2 logarithm of the Wasm page size in bytes: 16 unless custom.
    pub page_size_log2: u32,
    /// Whether addresses are 64-bit.
    pub memory64: bool,
    /// Whether it is shared between threads.
    pub shared: bool,
}

/// A global.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Global {
    /// Whether it is imported.
    pub imported: bool,
    /// Whether it is mutable.
    pub mutable: bool,
    /// Whether the host can reach it by an export.
    pub exported: bool,
    /// The functions that set it, reachable or not.
    pub set_by: Vec<u32>,
    /// Whether it may change after the save: set by a reachable function, or mutable and
    /// exported.
    pub changeable: bool,
}

/// A table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Whether it is imported.
    pub imported: bool,
    /// The least size, in elements.
    pub minimum: u64,
    /// The largest size, in elements, if declared.
    pub maximum: Option<u64>,
    /// Whether the host can reach it by an export.
    pub exported: bool,
    /// Whether any function writes its elements or grows it, reachable or not.
    pub written: bool,
    /// Whether a reachable function writes its elements or grows it, or the host may.
    pub changeable: bool,
    /// Whether the host may: it is exported, and a root can reach a host function.
    pub by_host: bool,
    /// Whether a reachable function grows it.
    pub growable: bool,
}

/// A data or element segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Whether it is passive: active and declared segments are dropped from the start.
    pub passive: bool,
    /// Whether any function reads it.
    pub used: bool,
    /// Whether any function drops it.
    pub dropped: bool,
    /// Whether dropping it after the save would be noticed.
    pub changeable: bool,
}

/// What [`analyze`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Analysis {
    /// The memories, by index.
    pub memories: Vec<Memory>,
    /// The globals, by index.
    pub globals: Vec<Global>,
    /// The tables, by index.
    pub tables: Vec<Table>,
    /// The data segments, by index.
    pub data: Vec<Segment>,
    /// The element segments, by index.
    pub elements: Vec<Segment>,
    /// The exported functions' names.
    pub exported_functions: Vec<String>,
    /// Whether instantiation runs a start function.
    pub has_start: bool,
    /// The number of functions, imports included.
    pub functions: u32,
    /// The number of functions that a root can reach.
    pub reachable: u32,
    /// Whether values that are garbage-collected can occur: references to structs, arrays,
    /// exceptions or objects of the host.
    pub collected: bool,
    /// The functions that a root can reach.
    pub(crate) reached: BTreeSet<u32>,
    reset: Vec<Refusal>,
    bake: Vec<Refusal>,
}

impl Analysis {
    /// Why an instance of the module cannot be restored in place; empty when it can. At most the
    /// first eight reasons, with one for each table, and names of at most 200 characters.
    #[must_use]
    pub fn refusals(&self) -> &[Refusal] {
        &self.reset
    }

    /// Why a warm instance's state cannot be written into a new module; empty when it can, unless
    /// a value turns up that has no constant form. The limits of [`Analysis::refusals`] hold.
    #[must_use]
    pub fn bake_refusals(&self) -> &[Refusal] {
        &self.bake
    }
}

/// Analyses a core module.
///
/// # Errors
/// See [`AnalyzeError`].
pub fn analyze(wasm: &[u8], roots: &Roots) -> Result<Analysis, AnalyzeError> {
    of_model(&Model::parse(wasm)?, roots)
}

/// Function indices of the roots.
fn roots_of(model: &Model<'_>, roots: &Roots) -> Result<Vec<u32>, AnalyzeError> {
    let functions = || {
        let is_function = |kind| matches!(kind, ExternalKind::Func | ExternalKind::FuncExact);
        model.exports.iter().filter(move |export| is_function(export.kind))
    };
    match roots {
        Roots::AllExports => Ok(functions().map(|export| export.index).collect()),
        Roots::Named(wanted) => {
            let there: HashSet<&str> = functions().map(|export| export.name).collect();
            let missing = wanted.iter().find(|name| !there.contains(name.as_str()));
            if let Some(name) = missing {
                return Err(AnalyzeError::NoSuchRoot {
                    name: name.clone(),
                    available: functions().map(|export| export.name.to_owned()).collect(),
                });
            }
            let wanted: HashSet<&str> = wanted.iter().map(String::as_str).collect();
            let is_root = |name: &str| wanted.contains(name) || names::is_hook(name);
            Ok(functions().filter(|e| is_root(e.name)).map(|e| e.index).collect())
        }
    }
}

/// Every function that the roots can reach.
fn reach(model: &Model<'_>, roots: Vec<u32>) -> BTreeSet<u32> {
    let mut reached = BTreeSet::new();
    let mut todo = roots;
    let mut any_reference = false;
    while let Some(function) = todo.pop() {
        if !reached.insert(function) {
            continue;
        }
        let leaves = match model.body(function) {
            Some(body) => {
                todo.extend(&body.effects.calls);
                body.effects.indirect
            }
            // The host may call any reference that it was given.
            None => true,
        };
        if leaves && !any_reference {
            any_reference = true;
            todo.extend(&model.address_taken);
        }
    }
    reached
}

/// The reachable host function that may change objects in place which a reset keeps: it is given
/// some, or can fetch some by an export. The API of wasmtime lets every host function do so
/// (`StructRef::set_field`, `ArrayRef::set`).
///
/// A reset keeps the objects that instantiation made. Those of calls are dropped with the globals
/// and elements that held them, and a warm state that holds some is refused.
fn host_writer(model: &Model<'_>, reached: &BTreeSet<u32>) -> Option<u32> {
    if !model.keeps_mutable_objects {
        return None;
    }
    let exported = model.exports.iter().any(|export| {
        let index = export.index as usize;
        match export.kind {
            ExternalKind::Func | ExternalKind::FuncExact => model.passes_objects(export.index),
            ExternalKind::Global => {
                model.globals.get(index).is_some_and(|g| model.may_be_object(g.ty.content_type))
            }
            ExternalKind::Table => model
                .tables
                .get(index)
                .is_some_and(|t| model.may_be_object(ValType::Ref(t.ty.element_type))),
            _ => false,
        }
    });
    reached
        .range(..model.imported_functions)
        .copied()
        .find(|function| exported || model.passes_objects(*function))
}

/// Adds the refusal that `make` makes, unless the list is full or holds one like it.
///
/// A stranger's module may hold a million functions with a reason each, and the names of an import
/// may take 200,000 bytes.
fn note(
    refusals: &mut Vec<Refusal>,
    is_like_it: impl Fn(&Refusal) -> bool,
    make: impl FnOnce() -> Refusal,
) {
    if refusals.len() < MAX_REFUSALS && !refusals.iter().any(is_like_it) {
        refusals.push(make());
    }
}

/// The two names of an import, for a refusal.
fn shorten_names((module, name): ImportName<'_>) -> (String, String) {
    (shorten(module), shorten(name))
}

pub(crate) fn of_model(model: &Model<'_>, roots: &Roots) -> Result<Analysis, AnalyzeError> {
    let reached = reach(model, roots_of(model, roots)?);
    let exports = |kind: ExternalKind| -> BTreeSet<usize> {
        let of_kind = model.exports.iter().filter(|export| export.kind == kind);
        of_kind.map(|export| export.index as usize).collect()
    };
    let exported_globals = exports(ExternalKind::Global);
    let exported_tables = exports(ExternalKind::Table);
    let memories = model.memories.iter().map(|memory| Memory {
        imported: memory.import.is_some(),
        minimum: memory.ty.initial,
        maximum: memory.ty.maximum,
        page_size_log2: memory.ty.page_size_log2.unwrap_or(16),
        memory64: memory.ty.memory64,
        shared: memory.ty.shared,
    });
    let globals = model.globals.iter().enumerate().map(|(index, global)| Global {
        imported: global.import.is_some(),
        mutable: global.ty.mutable,
        exported: exported_globals.contains(&index),
        set_by: Vec::new(),
        changeable: global.ty.mutable && exported_globals.contains(&index),
    });
    let tables = model.tables.iter().enumerate().map(|(index, table)| Table {
        imported: table.import.is_some(),
        minimum: table.ty.initial,
        maximum: table.ty.maximum,
        exported: exported_tables.contains(&index),
        written: false,
        changeable: false,
        by_host: false,
        growable: false,
    });
    let segment = |passive| Segment { passive, used: false, dropped: false, changeable: false };
    let mut analysis = Analysis {
        memories: memories.collect(),
        globals: globals.collect(),
        tables: tables.collect(),
        data: (0..).take(model.data.len()).map(|i| segment(model.data_is_passive(i))).collect(),
        elements: (0..)
            .take(model.elements.len())
            .map(|i| segment(model.element_is_passive(i)))
            .collect(),
        exported_functions: model
            .exports
            .iter()
            .filter(|e| matches!(e.kind, ExternalKind::Func | ExternalKind::FuncExact))
            .map(|export| export.name.to_owned())
            .collect(),
        has_start: model.start.is_some(),
        functions: model.functions,
        reachable: reached.len() as u32,
        collected: model.collected,
        reached,
        reset: Vec::new(),
        bake: Vec::new(),
    };
    analysis.static_refusals(model);
    if let Some(function) = host_writer(model, &analysis.reached) {
        analysis.refuse(true, |_| false, || Refusal::GcHost { function });
    }
    if analysis.reached.range(..model.imported_functions).next().is_some() {
        for table in analysis.tables.iter_mut().filter(|t| t.exported && !t.imported) {
            (table.by_host, table.changeable) = (true, true);
        }
    }
    for (function, body) in (model.imported_functions..).zip(&model.bodies) {
        let reached = analysis.reached.contains(&function);
        analysis.add(model, function, &body.effects, reached);
    }
    for segment in analysis.data.iter_mut().chain(&mut analysis.elements) {
        segment.changeable &= segment.passive && segment.used;
    }
    Ok(analysis)
}

impl Analysis {
    /// Refusals that hang on declarations alone.
    fn static_refusals(&mut self, model: &Model<'_>) {
        let memories = (0..).zip(&model.memories).filter_map(|(memory, of)| match of.import {
            Some(import) => {
                let (module, name) = shorten_names(import);
                Some(Refusal::ImportedMemory { memory, module, name })
            }
            None => of.ty.shared.then_some(Refusal::SharedMemory { memory }),
        });
        let mutable = (0..).zip(&model.globals).filter(|(_, global)| global.ty.mutable);
        let globals = mutable.filter_map(|(global, of)| {
            let (module, name) = shorten_names(of.import?);
            Some(Refusal::ImportedMutableGlobal { global, module, name })
        });
        self.reset = memories.chain(globals).take(MAX_REFUSALS).collect();
        self.bake = self.reset.clone();
    }

    fn add(
        &mut self,
        model: &Model<'_>,
        function: u32,
        effects: &crate::effects::Effects,
        reached: bool,
    ) {
        for &global in &effects.global_sets {
            if let Some(global) = self.globals.get_mut(global as usize) {
                global.set_by.push(function);
                global.changeable |= reached;
            }
        }
        for &index in &effects.table_writes {
            let Some(table) = self.tables.get_mut(index as usize) else { continue };
            table.written = true;
            table.changeable |= reached;
            table.growable |= reached && effects.table_grows.contains(&index);
            if let Some(import) = model.tables.get(index as usize).and_then(|table| table.import) {
                let is_of_table = |refusal: &Refusal| match refusal {
                    Refusal::ImportedTableWritten { table, .. } => *table == index,
                    _ => false,
                };
                self.refuse(reached, is_of_table, || {
                    let (module, name) = shorten_names(import);
                    Refusal::ImportedTableWritten { table: index, module, name, function }
                });
            }
        }
        let segments = [
            (&mut self.data, &effects.data_uses, &effects.data_drops),
            (&mut self.elements, &effects.elem_uses, &effects.elem_drops),
        ];
        for (segments, uses, drops) in segments {
            for &index in uses {
                if let Some(segment) = segments.get_mut(index as usize) {
                    segment.used = true;
                }
            }
            for &index in drops {
                if let Some(segment) = segments.get_mut(index as usize) {
                    segment.dropped = true;
                    segment.changeable |= reached;
                }
            }
        }
        if let Some(instruction) = effects.gc_write {
            self.refuse(
                reached,
                |refusal| matches!(refusal, Refusal::GcWrite { .. }),
                || Refusal::GcWrite { function, instruction },
            );
        }
        if let (Some(instruction), true) = (effects.stack_switch, reached) {
            note(
                &mut self.reset,
                |refusal| matches!(refusal, Refusal::StackSwitching { .. }),
                || Refusal::StackSwitching { function, instruction },
            );
        }
    }

    /// Notes a refusal to bake, and to restore where a root reaches its cause.
    fn refuse(
        &mut self,
        reached: bool,
        is_like_it: impl Fn(&Refusal) -> bool,
        make: impl Fn() -> Refusal,
    ) {
        note(&mut self.bake, &is_like_it, &make);
        if reached {
            note(&mut self.reset, is_like_it, make);
        }
    }
}
