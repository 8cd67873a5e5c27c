//! Preparing a core module: data segments move out into the image, and, on request, the module gets
//! code that saves and restores its own state and shows it to the host.
//!
//! Promises: every original index, import and export stays; every call of an original export has
//! the same results, effects and traps as before. Fuel consumption and the depth at which the stack
//! overflows may differ by a little, as some instructions become calls. A start function of a
//! module that can be restored or baked becomes [`names::START`], for the host to call.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use wasm_encoder::{
    CodeSection, ConstExpr, DataSection, ExportKind, Function, InstructionSink, RefType, SectionId,
    TableType, ValType,
};
use wasmparser::{DataKind, Operator};

use crate::analysis::{self, Analysis, AnalyzeError, Roots, Segment};
use crate::convert::{self, ConvertError};
use crate::emit::{Additions, Sections};
use crate::guard::{GuardedInstruction, Guards, Watch};
use crate::model::{Body, Model};
use crate::names;
use crate::refusal::Refusals;
use crate::seal::Seal;

/// The required abilities of a prepared module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareOptions {
    /// The functions that are called after the save.
    pub roots: Roots,
    /// Adds [`names::SAVE`] and [`names::RESTORE`]. A module that cannot be restored is refused.
    pub restorable: bool,
    /// Exports the state that [`crate::bake`] needs of a warm instance. A module that cannot be
    /// baked is refused.
    pub bakeable: bool,
}

impl Default for PrepareOptions {
    fn default() -> Self {
        Self { roots: Roots::AllExports, restorable: true, bakeable: false }
    }
}

/// Why a module could not be prepared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// The module could not be analysed.
    #[error(transparent)]
    Analyze(#[from] AnalyzeError),
    /// An instance could not be restored in place.
    #[error("the module cannot run in reset mode: {0}")]
    NotRestorable(Refusals),
    /// A warm instance could not be baked.
    #[error("a warm instance of the module cannot be kept as a new module: {0}")]
    NotBakeable(Refusals),
    /// With the additions of preparation, the module exceeds a limit of engines.
    #[error(
        "with the copies to restore it from, the module has {count} {what}, and engines take {limit}"
    )]
    TooMany {
        /// The kind of item.
        what: &'static str,
        /// Their number with the additions.
        count: u32,
        /// The maximum.
        limit: u32,
    },
    /// The module exports a name that is reserved for added exports.
    #[error(
        "the module exports {name:?}; names starting with \"afresh:\" are reserved (is this \
             module prepared already?)"
    )]
    ReservedExport {
        /// The export's name.
        name: String,
    },
    /// The module could not be encoded again.
    #[error(transparent)]
    Convert(#[from] ConvertError),
}

impl From<wasmparser::Error> for PrepareError {
    fn from(error: wasmparser::Error) -> Self {
        Self::Analyze(AnalyzeError::Invalid(error))
    }
}

/// Bytes that belong in a memory before the guest starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataSegment {
    /// The memory's index.
    pub memory: u32,
    /// Byte offset in it. The bytes are within the memory's minimum size.
    pub offset: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
    /// Where the bytes are in the module that was prepared: byte offset in it.
    pub place: usize,
}

/// The state that [`names::RESTORE`] restores.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RestorableState {
    /// Mutable globals, by index.
    pub globals: Vec<u32>,
    /// Tables, by index.
    pub tables: Vec<u32>,
    /// Data segments that a call may drop.
    pub data: Vec<u32>,
    /// Element segments that a call may drop.
    pub elements: Vec<u32>,
}

impl RestorableState {
    /// Whether a restore has nothing to do, so that the host need not call it at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.globals.is_empty()
            && self.tables.is_empty()
            && self.data.is_empty()
            && self.elements.is_empty()
    }
}

/// The visible state of a warm instance, for [`crate::bake`]; each list in ascending order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VisibleState {
    /// Mutable globals, exported as [`names::global`]; not those that hold a reference which
    /// neither the module nor the host can set.
    pub globals: Vec<u32>,
    /// Tables that the module or the host can write, exported as [`names::table`].
    pub tables: Vec<u32>,
    /// Functions that a reference may point to, exported as [`names::func`]; empty when no
    /// visible global or table holds function references.
    pub functions: Vec<u32>,
    /// Data segments whose drop is visible as [`names::data_dropped`].
    pub data: Vec<u32>,
    /// Element segments whose drop is visible as [`names::elem_dropped`].
    pub elements: Vec<u32>,
}

/// A prepared module.
#[derive(Debug, Clone)]
pub struct PreparedModule {
    /// The rewritten module.
    pub module: Vec<u8>,
    /// Data that left the module, in the order it must be written: later segments may overlap
    /// earlier ones.
    pub segments: Vec<DataSegment>,
    /// The analysis of the module; its memories are the ones the engine must provide.
    pub analysis: Analysis,
    /// The state that a restore covers, if requested.
    pub restorable: Option<RestorableState>,
    /// The state that the host can read, if requested.
    pub visible: Option<VisibleState>,
    /// The module before the rewriting; empty unless it will be baked.
    pub(crate) original: Vec<u8>,
}

/// Prepares a core module.
///
/// # Errors
/// See [`PrepareError`].
pub fn prepare(wasm: &[u8], options: &PrepareOptions) -> Result<PreparedModule, PrepareError> {
    let model = Model::parse(wasm)?;
    let analysis = analysis::of_model(&model, &options.roots)?;
    if let Some(export) = model.exports.iter().find(|e| e.name.starts_with(names::PREFIX)) {
        return Err(PrepareError::ReservedExport { name: export.name.to_owned() });
    }
    if options.restorable && !analysis.refusals().is_empty() {
        return Err(PrepareError::NotRestorable(Refusals(analysis.refusals().to_vec())));
    }
    if options.bakeable && !analysis.bake_refusals().is_empty() {
        return Err(PrepareError::NotBakeable(Refusals(analysis.bake_refusals().to_vec())));
    }

    let mut sections = Sections::default();
    let mut add = Additions::new(&model);
    let segments = move_data(&model, &mut sections)?;
    for (index, _) in (0..).zip(&model.memories) {
        add.export(&names::memory(index), ExportKind::Memory, index);
    }
    let mut seal = Seal::default();
    if options.restorable {
        seal.exports(&model, &analysis, &mut add, &mut sections)?;
    }
    if let Some(start) = model.start.filter(|_| options.restorable || options.bakeable) {
        sections.remove(SectionId::Start);
        let start = match options.restorable {
            true => seal.over(start, &model, &analysis, &mut add),
            false => start,
        };
        add.export(names::START, ExportKind::Func, start);
    }
    let mut guards = guards(&model, &analysis, options, &mut add)?;
    let code = rewrite_code(&model, &mut guards, &mut add)?;
    if let Some(code) = code {
        sections.replace(SectionId::Code, &code)?;
    }
    let restorable = match options.restorable {
        true => Some(add_restore(&model, &analysis, &guards, &seal, &mut add)?),
        false => None,
    };
    let visible = options.bakeable.then(|| show(&model, &analysis, &guards, &mut add));
    if let Some((what, count, limit)) = add.exceeded(&model) {
        return Err(PrepareError::TooMany { what, count, limit });
    }
    add.apply(&model, &mut sections)?;
    let module = sections.finish(&model);
    let original = if options.bakeable { wasm.to_vec() } else { Vec::new() };
    Ok(PreparedModule { module, segments, analysis, restorable, visible, original })
}

/// Takes the leading active data segments whose place is certain out of the module. Each leaves
/// an empty passive segment behind, which behaves as the dropped one that an active segment
/// becomes.
pub(crate) fn move_data(
    model: &Model<'_>,
    sections: &mut Sections,
) -> Result<Vec<DataSegment>, wasmparser::Error> {
    let mut moved = Vec::new();
    let mut section = DataSection::new();
    let mut moving = true;
    for data in &model.data {
        let active = matches!(data.kind, DataKind::Active { .. });
        match model.placement(data) {
            Some((memory, offset)) if moving => {
                section.passive([]);
                let place = data.range.end - data.data.len();
                moved.push(DataSegment { memory, offset, bytes: data.data.to_vec(), place });
            }
            _ => {
                moving &= !active;
                section.raw(model.wasm.get(data.range.clone()).unwrap_or_default());
            }
        }
    }
    if !moved.is_empty() {
        sections.replace(SectionId::Data, &section)?;
    }
    Ok(moved)
}

/// Chooses the state to record, and adds the globals and tables for it.
fn guards(
    model: &Model<'_>,
    analysis: &Analysis,
    options: &PrepareOptions,
    add: &mut Additions,
) -> Result<Guards, PrepareError> {
    let tables = model.tables.iter().map(|table| convert::table_type(table.ty));
    let index_type = |memory64| if memory64 { ValType::I64 } else { ValType::I32 };
    let mut guards = Guards {
        tables: tables.collect::<Result<_, _>>()?,
        memories: model.memories.iter().map(|m| index_type(m.ty.memory64)).collect(),
        ..Guards::default()
    };
    // A drop that nothing can notice, or that only the warm-up does, stays a real one, unless
    // the host has to know of it.
    let flagged = |segment: &Segment| {
        (options.restorable && segment.changeable)
            || (options.bakeable && segment.passive && segment.used && segment.dropped)
    };
    if options.restorable || options.bakeable {
        for (index, segment) in (0..).zip(&analysis.data) {
            if flagged(segment) {
                guards.data_flags.insert(index, add.default_global(ValType::I32));
            }
        }
        for (index, segment) in (0..).zip(&analysis.elements) {
            if flagged(segment) {
                guards.elem_flags.insert(index, add.default_global(ValType::I32));
            }
        }
    }
    if options.restorable {
        for (index, table) in (0..).zip(&analysis.tables).filter(|(_, table)| table.changeable) {
            let Some(&ty) = guards.tables.get(index as usize) else { continue };
            let (shadow, low, high) = match ty.index_type() {
                ValType::I64 => (ConstExpr::i64_const(-1), ValType::I64, ValType::I64),
                _ => (ConstExpr::i32_const(-1), ValType::I32, ValType::I32),
            };
            let watch = Watch {
                low: add.global(low, &shadow),
                high: add.default_global(high),
                by_host: table.by_host,
                shadow: add.table(TableType {
                    element_type: RefType { nullable: true, ..ty.element_type },
                    minimum: table.minimum,
                    maximum: None,
                    ..ty
                }),
            };
            guards.watched.insert(index, watch);
        }
        let grows = |body: &Body<'_>| {
            body.effects.table_grows.iter().any(|table| guards.watched.contains_key(table))
        };
        if model.bodies.iter().any(grows) {
            guards.grown = Some(add.default_global(ValType::I32));
        }
    }
    Ok(guards)
}

/// The code section with every recorded instruction replaced; none if it stays as it is.
fn rewrite_code(
    model: &Model<'_>,
    guards: &mut Guards,
    add: &mut Additions,
) -> Result<Option<CodeSection>, wasmparser::Error> {
    if guards.watched.is_empty() && guards.data_flags.is_empty() && guards.elem_flags.is_empty() {
        return Ok(None);
    }
    let mut section = CodeSection::new();
    for body in &model.bodies {
        if body.effects.may_need_rewriting() {
            section.raw(&rewrite_body(model, body, guards, add)?);
        } else {
            section.raw(body.code.as_bytes());
        }
    }
    Ok(Some(section))
}

fn rewrite_body(
    model: &Model<'_>,
    body: &Body<'_>,
    guards: &mut Guards,
    add: &mut Additions,
) -> Result<Vec<u8>, wasmparser::Error> {
    let copy = |range| model.wasm.get(range).unwrap_or_default();
    let mut code = Vec::new();
    let mut copied = body.code.range().start;
    let mut reader = body.code.get_operators_reader()?;
    while !reader.eof() {
        let start = reader.original_position();
        let op = reader.read()?;
        let mut replacement = Vec::new();
        if replace(&op, guards, add, &mut InstructionSink::new(&mut replacement)) {
            code.extend_from_slice(copy(copied..start));
            code.extend_from_slice(&replacement);
            copied = reader.original_position();
        }
    }
    code.extend_from_slice(copy(copied..body.code.range().end));
    Ok(code)
}

/// Encodes the replacement of `op`; false if it stays.
fn replace(
    op: &Operator<'_>,
    guards: &mut Guards,
    add: &mut Additions,
    sink: &mut InstructionSink<'_>,
) -> bool {
    let flag = match *op {
        Operator::DataDrop { data_index } => guards.data_flags.get(&data_index),
        Operator::ElemDrop { elem_index } => guards.elem_flags.get(&elem_index),
        _ => None,
    };
    if let Some(&flag) = flag {
        sink.i32_const(-1).global_set(flag);
        return true;
    }
    let guarded = match *op {
        Operator::TableSet { table } => GuardedInstruction::TableSet { table },
        Operator::TableFill { table } => GuardedInstruction::TableFill { table },
        Operator::TableGrow { table } => GuardedInstruction::TableGrow { table },
        Operator::TableCopy { dst_table, src_table } => {
            GuardedInstruction::TableCopy { to: dst_table, from: src_table }
        }
        Operator::TableInit { elem_index, table } => {
            GuardedInstruction::TableInit { table, segment: elem_index }
        }
        Operator::MemoryInit { data_index, mem } => {
            GuardedInstruction::MemoryInit { memory: mem, segment: data_index }
        }
        Operator::ArrayNewData { array_type_index, array_data_index } => {
            GuardedInstruction::ArrayNewData { ty: array_type_index, segment: array_data_index }
        }
        Operator::ArrayNewElem { array_type_index, array_elem_index } => {
            GuardedInstruction::ArrayNewElem { ty: array_type_index, segment: array_elem_index }
        }
        Operator::ArrayInitData { array_type_index, array_data_index } => {
            GuardedInstruction::ArrayInitData { ty: array_type_index, segment: array_data_index }
        }
        Operator::ArrayInitElem { array_type_index, array_elem_index } => {
            GuardedInstruction::ArrayInitElem { ty: array_type_index, segment: array_elem_index }
        }
        _ => return false,
    };
    match guards.function(guarded, add) {
        Some(function) => {
            sink.call(function);
            true
        }
        None => false,
    }
}

/// Adds the save and restore functions.
fn add_restore(
    model: &Model<'_>,
    analysis: &Analysis,
    guards: &Guards,
    seal: &Seal,
    add: &mut Additions,
) -> Result<RestorableState, PrepareError> {
    let indices = |changeable: Vec<bool>| -> Vec<u32> {
        (0..).zip(changeable).filter_map(|(index, yes)| yes.then_some(index)).collect()
    };
    let restorable = RestorableState {
        globals: indices(analysis.globals.iter().map(|global| global.changeable).collect()),
        tables: guards.watched.keys().copied().collect(),
        data: indices(analysis.data.iter().map(|segment| segment.changeable).collect()),
        elements: indices(analysis.elements.iter().map(|segment| segment.changeable).collect()),
    };
    let mut globals = Vec::new();
    for &index in &restorable.globals {
        let ty = model.globals.get(index as usize).map(|global| global.ty.content_type);
        globals.push((index, convert::val_type(ty.unwrap_or(wasmparser::ValType::I32))?));
    }
    let data = restorable.data.iter().filter_map(|segment| guards.data_flags.get(segment));
    let elements = restorable.elements.iter().filter_map(|segment| guards.elem_flags.get(segment));
    globals.extend(data.chain(elements).map(|&flag| (flag, ValType::I32)));

    let mut save = Function::new([]);
    let mut restore = Function::new([]);
    let (mut saves, mut restores) = (save.instructions(), restore.instructions());
    for &table in guards.watched.keys() {
        guards.save_table(table, &mut saves);
    }
    if let Some(grown) = guards.grown {
        saves.i32_const(0).global_set(grown);
        restores.global_get(grown).if_(wasm_encoder::BlockType::Empty);
        restores.i32_const(1).return_().end();
    }
    for &table in guards.watched.keys() {
        guards.check_size(table, &mut restores);
    }
    for &(global, ty) in &globals {
        let (kept, cast) = match ty {
            ValType::Ref(ty) => (ValType::Ref(RefType { nullable: true, ..ty }), !ty.nullable),
            ty => (ty, false),
        };
        let shadow = add.default_global(kept);
        saves.global_get(global).global_set(shadow);
        restores.global_get(shadow);
        if cast {
            restores.ref_as_non_null();
        }
        restores.global_set(global);
    }
    for &table in guards.watched.keys() {
        guards.restore_table(table, &mut restores);
    }
    if let Some(flag) = seal.flag {
        saves.i32_const(1).global_set(flag);
    }
    saves.i32_const(0).end();
    restores.i32_const(0).end();
    let save = add.function(&[], &[ValType::I32], save);
    let restore = add.function(&[], &[ValType::I32], restore);
    add.export(names::SAVE, ExportKind::Func, save);
    add.export(names::RESTORE, ExportKind::Func, restore);
    Ok(restorable)
}

/// Exports the state that the host has to read from a warm instance.
fn show(
    model: &Model<'_>,
    analysis: &Analysis,
    guards: &Guards,
    add: &mut Additions,
) -> VisibleState {
    let mut visible = VisibleState::default();
    let mut functions = false;
    for (index, global) in (0..).zip(&model.globals) {
        // A reference that is never set equals its initial value in every instance.
        let of = analysis.globals.get(index as usize);
        let fixed = matches!(global.ty.content_type, wasmparser::ValType::Ref(_))
            && of.is_some_and(|of| of.set_by.is_empty() && !of.exported);
        if global.ty.mutable && !fixed {
            add.export(&names::global(index), ExportKind::Global, index);
            visible.globals.push(index);
            functions |= may_hold_function(global.ty.content_type);
        }
    }
    for (index, table) in (0..).zip(&model.tables) {
        let of = analysis.tables.get(index as usize);
        // The host may have written an exported table, so its elements have to be looked at.
        if of.is_some_and(|of| !of.imported && (of.written || of.exported)) {
            add.export(&names::table(index), ExportKind::Table, index);
            visible.tables.push(index);
            functions |= may_hold_function(wasmparser::ValType::Ref(table.ty.element_type));
        }
    }
    if functions {
        visible.functions = model.address_taken.iter().copied().collect();
        for &index in &visible.functions {
            add.export(&names::func(index), ExportKind::Func, index);
        }
    }
    let mut flags = |flags: &BTreeMap<u32, u32>, name: fn(u32) -> String| {
        for (&segment, &flag) in flags {
            add.export(&name(segment), ExportKind::Global, flag);
        }
        flags.keys().copied().collect()
    };
    visible.data = flags(&guards.data_flags, names::data_dropped);
    visible.elements = flags(&guards.elem_flags, names::elem_dropped);
    visible
}

fn may_hold_function(ty: wasmparser::ValType) -> bool {
    matches!(ty, wasmparser::ValType::Ref(ty) if !ty.is_extern_ref())
}
