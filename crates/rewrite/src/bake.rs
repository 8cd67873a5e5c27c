//! Baking: a new module whose fresh instances start in the state of a warm one.
//!
//! The warm state's globals become initial values, its written tables are rebuilt by element
//! segments, its dropped segments are empty, and there is no start function. The memories' bytes
//! are not in the module: the engine's image provides them, all of them, so the module has no
//! active data segment. The original's code, types, imports and exports stay as they are; the
//! exports [`crate::names::memory`] are added.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use wasm_encoder::{
    AbstractHeapType, ConstExpr, DataSection, ElementSection, Elements, ExportKind, GlobalSection,
    GlobalType, HeapType, Ieee32, Ieee64, Instruction, MemorySection, MemoryType, RefType,
    SectionId, TableSection, TableType, ValType,
};
use wasmparser::{DataKind, ElementItems, ElementKind, Validator};

use crate::AnalyzeError;
use crate::convert::{self, ConvertError};
use crate::emit::{Additions, Sections};
use crate::model::{self, Model};
use crate::names;
use crate::prepare::{PreparedModule, VisibleState};

/// The value of a global or of an element of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WarmValue {
    /// An `i32`.
    I32(i32),
    /// An `i64`.
    I64(i64),
    /// An `f32`, as its bits.
    F32(u32),
    /// An `f64`, as its bits.
    F64(u64),
    /// A `v128`, as its bits.
    V128(u128),
    /// A reference to the module's function of this index.
    Func(u32),
    /// A null reference.
    Null,
    /// A reference that no module can hold as a constant: to a host object, a GC object, an
    /// exception, or a function that is not the instance's own.
    Opaque,
    /// A reference to this small integer.
    I31(i32),
}

/// The state of a warm instance, as its host read it; see [`PreparedModule::visible`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarmState {
    /// The size of every memory, in its Wasm pages, by index.
    pub memories: Vec<u64>,
    /// The value of every visible global, by index.
    pub globals: BTreeMap<u32, WarmValue>,
    /// The elements of every visible table, by index.
    pub tables: BTreeMap<u32, Vec<WarmValue>>,
    /// The visible data segments that are dropped.
    pub dropped_data: BTreeSet<u32>,
    /// The visible element segments that are dropped.
    pub dropped_elements: BTreeSet<u32>,
}

impl WarmState {
    /// The first global or element that no new instance can start with, if any.
    #[must_use]
    pub fn opaque(&self) -> Option<BakeError> {
        let global = self.globals.iter().find(|(_, value)| **value == WarmValue::Opaque);
        if let Some((&global, _)) = global {
            return Some(BakeError::OpaqueGlobal { global });
        }
        self.tables.iter().find_map(|(&table, elements)| {
            let element = elements.iter().position(|value| *value == WarmValue::Opaque)?;
            Some(BakeError::OpaqueElement { table, element })
        })
    }
}

/// Why a warm state could not be baked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BakeError {
    /// The module was prepared without [`crate::PrepareOptions::bakeable`].
    #[error("the module was not prepared for baking; prepare it with `bakeable`")]
    NotBakeable,
    /// The warm state lacks an item, or describes one wrongly.
    #[error("the warm state does not fit the module: {0}")]
    Mismatch(String),
    /// A global holds a reference that has no constant form.
    #[error(
        "global {global} holds a reference to a host or GC object or to a foreign function, \
         which no new instance can start with; clear it at the end of the warm-up"
    )]
    OpaqueGlobal {
        /// The global's index.
        global: u32,
    },
    /// A table's element is a reference that has no constant form.
    #[error(
        "element {element} of table {table} is a reference to a host or GC object or to a \
         foreign function, which no new instance can start with; clear it at the end of the warm-up"
    )]
    OpaqueElement {
        /// The table's index.
        table: u32,
        /// The element's index.
        element: usize,
    },
    /// The module could not be read or encoded again.
    #[error(transparent)]
    Analyze(#[from] AnalyzeError),
    /// A type of the module could not be encoded again.
    #[error(transparent)]
    Convert(#[from] ConvertError),
}

impl From<wasmparser::Error> for BakeError {
    fn from(error: wasmparser::Error) -> Self {
        Self::Analyze(AnalyzeError::Invalid(error))
    }
}

/// Why a value has no constant expression.
enum NoConstant {
    Opaque,
    Mismatch,
}

fn holds_i31(heap_type: HeapType) -> bool {
    use AbstractHeapType::{Any, Eq, I31};
    matches!(heap_type, HeapType::Abstract { shared: false, ty: Any | Eq | I31 })
}

fn constant(value: WarmValue, ty: ValType, functions: &[u32]) -> Result<ConstExpr, NoConstant> {
    Ok(match (value, ty) {
        (WarmValue::I32(value), ValType::I32) => ConstExpr::i32_const(value),
        (WarmValue::I64(value), ValType::I64) => ConstExpr::i64_const(value),
        (WarmValue::F32(bits), ValType::F32) => ConstExpr::f32_const(Ieee32::new(bits)),
        (WarmValue::F64(bits), ValType::F64) => ConstExpr::f64_const(Ieee64::new(bits)),
        (WarmValue::V128(bits), ValType::V128) => ConstExpr::v128_const(bits.cast_signed()),
        (WarmValue::Func(function), ValType::Ref(_))
            if functions.binary_search(&function).is_ok() =>
        {
            ConstExpr::ref_func(function)
        }
        (WarmValue::Null, ValType::Ref(ty)) if ty.nullable => ConstExpr::ref_null(ty.heap_type),
        (WarmValue::I31(value), ValType::Ref(ty)) if holds_i31(ty.heap_type) => {
            ConstExpr::extended([Instruction::I32Const(value), Instruction::RefI31])
        }
        (WarmValue::Opaque, ValType::Ref(_)) => return Err(NoConstant::Opaque),
        _ => return Err(NoConstant::Mismatch),
    })
}

/// Writes `warm` into a new module.
///
/// # Errors
/// See [`BakeError`]. The result is validated, so a state that does not fit is an error.
pub fn bake(prepared: &PreparedModule, warm: &WarmState) -> Result<Vec<u8>, BakeError> {
    let Some(visible) = &prepared.visible else { return Err(BakeError::NotBakeable) };
    let model = Model::parse(&prepared.original)?;
    let mut sections = Sections::default();
    let mut add = Additions::new(&model);
    for (index, _) in (0..).zip(&model.memories) {
        add.export(&names::memory(index), ExportKind::Memory, index);
    }
    sections.remove(SectionId::Start);
    memories(&model, warm, &mut sections)?;
    data(&model, warm, &mut sections)?;
    globals(&model, visible, warm, &mut sections)?;
    tables(&model, visible, warm, &mut sections)?;
    elements(&model, visible, warm, &mut sections)?;
    add.apply(&model, &mut sections)?;
    let baked = sections.finish(&model);
    Validator::new_with_features(model::features())
        .validate_all(&baked)
        .map_err(|error| BakeError::Mismatch(error.to_string()))?;
    Ok(baked)
}

fn memories(model: &Model<'_>, warm: &WarmState, sections: &mut Sections) -> Result<(), BakeError> {
    let mut section = MemorySection::new();
    for (index, memory) in model.memories.iter().enumerate() {
        let size = warm.memories.get(index).copied();
        let ty = memory.ty;
        let Some(minimum) = size.filter(|&size| size >= ty.initial) else {
            let why = format!("memory {index} has no size, or less than its minimum");
            return Err(BakeError::Mismatch(why));
        };
        section.memory(MemoryType {
            minimum,
            maximum: ty.maximum,
            memory64: ty.memory64,
            shared: ty.shared,
            page_size_log2: ty.page_size_log2,
        });
    }
    if !section.is_empty() {
        sections.replace(SectionId::Memory, &section)?;
    }
    Ok(())
}

/// Every active segment is part of the image, and becomes a dropped segment.
pub(crate) fn data(
    model: &Model<'_>,
    warm: &WarmState,
    sections: &mut Sections,
) -> Result<(), BakeError> {
    let mut section = DataSection::new();
    for (index, data) in (0..).zip(&model.data) {
        let active = matches!(data.kind, DataKind::Active { .. });
        if active || warm.dropped_data.contains(&index) {
            section.passive([]);
        } else {
            section.raw(model.wasm.get(data.range.clone()).unwrap_or_default());
        }
    }
    if !section.is_empty() {
        sections.replace(SectionId::Data, &section)?;
    }
    Ok(())
}

pub(crate) fn globals(
    model: &Model<'_>,
    visible: &VisibleState,
    warm: &WarmState,
    sections: &mut Sections,
) -> Result<(), BakeError> {
    let mut section = GlobalSection::new();
    for (index, global) in (0..).zip(&model.globals).filter(|(_, g)| g.import.is_none()) {
        if visible.globals.binary_search(&index).is_err() {
            section.raw(global.raw);
            continue;
        }
        let Some(&value) = warm.globals.get(&index) else {
            return Err(BakeError::Mismatch(format!("global {index} has no value")));
        };
        let val_type = convert::val_type(global.ty.content_type)?;
        let init = constant(value, val_type, &visible.functions).map_err(|why| match why {
            NoConstant::Opaque => BakeError::OpaqueGlobal { global: index },
            NoConstant::Mismatch => {
                BakeError::Mismatch(format!("global {index} cannot be {value:?}"))
            }
        })?;
        section.global(GlobalType { val_type, mutable: true, shared: global.ty.shared }, &init);
    }
    if !section.is_empty() {
        sections.replace(SectionId::Global, &section)?;
    }
    Ok(())
}

fn tables(
    model: &Model<'_>,
    visible: &VisibleState,
    warm: &WarmState,
    sections: &mut Sections,
) -> Result<(), BakeError> {
    let mut section = TableSection::new();
    for (index, table) in (0..).zip(&model.tables).filter(|(_, t)| t.import.is_none()) {
        let mut ty = convert::table_type(table.ty)?;
        if visible.tables.binary_search(&index).is_ok() {
            let Some(elements) = warm.tables.get(&index) else {
                return Err(BakeError::Mismatch(format!("table {index} has no elements")));
            };
            ty.minimum = elements.len() as u64;
        }
        match &table.init {
            Some(init) => section.table_with_init(ty, &convert::const_expr(init.clone())?),
            None => section.table(ty),
        };
    }
    if !section.is_empty() {
        sections.replace(SectionId::Table, &section)?;
    }
    Ok(())
}

pub(crate) fn elements(
    model: &Model<'_>,
    visible: &VisibleState,
    warm: &WarmState,
    sections: &mut Sections,
) -> Result<(), BakeError> {
    let mut section = ElementSection::new();
    for (index, element) in (0..).zip(&model.elements) {
        let emptied = match &element.kind {
            ElementKind::Passive => warm.dropped_elements.contains(&index),
            ElementKind::Active { table_index, .. } => {
                visible.tables.binary_search(&table_index.unwrap_or(0)).is_ok()
            }
            ElementKind::Declared => false,
        };
        if !emptied {
            section.raw(model.wasm.get(element.range.clone()).unwrap_or_default());
            continue;
        }
        match &element.items {
            ElementItems::Functions(_) => section.passive(Elements::Functions((&[]).into())),
            ElementItems::Expressions(ty, _) => {
                section.passive(Elements::Expressions(convert::ref_type(*ty)?, (&[]).into()))
            }
        };
    }
    for &index in &visible.tables {
        let (Some(table), Some(elements)) =
            (model.tables.get(index as usize), warm.tables.get(&index))
        else {
            continue;
        };
        let ty = convert::table_type(table.ty)?;
        if table.init.is_none() && ty.element_type == RefType::FUNCREF && runs(elements) <= MAX_RUNS
        {
            function_runs(index, ty, elements, &visible.functions, &mut section)?;
        } else {
            expressions(index, ty, elements, &visible.functions, &mut section)?;
        }
    }
    if !model.address_taken.is_empty() {
        // `ref.func` in code needs its function declared outside of code. The declaration may have
        // been in a segment or a global that was removed.
        let functions: Vec<u32> = model.address_taken.iter().copied().collect();
        section.declared(Elements::Functions(functions.into()));
    }
    if !section.is_empty() {
        sections.replace(SectionId::Element, &section)?;
    }
    Ok(())
}

/// Maximum segments for one table. One with more holes takes a single segment: engines limit
/// segments to 100,000.
const MAX_RUNS: usize = 1000;

/// The number of runs of functions in a table.
fn runs(elements: &[WarmValue]) -> usize {
    let is_null = |value: &WarmValue| *value == WarmValue::Null;
    elements.chunk_by(|a, b| is_null(a) == is_null(b)).filter(|run| !is_null(&run[0])).count()
}

fn offset(ty: TableType, element: usize) -> ConstExpr {
    if ty.table64 {
        ConstExpr::i64_const(element as i64)
    } else {
        ConstExpr::i32_const((element as u32).cast_signed())
    }
}

/// One segment for each run of functions: the form that engines initialise lazily.
fn function_runs(
    table: u32,
    ty: TableType,
    elements: &[WarmValue],
    functions: &[u32],
    section: &mut ElementSection,
) -> Result<(), BakeError> {
    let mut run: Vec<u32> = Vec::new();
    for (element, value) in elements.iter().enumerate() {
        match *value {
            WarmValue::Func(function) if functions.binary_search(&function).is_ok() => {
                run.push(function);
            }
            WarmValue::Null => {
                flush(table, ty, element, &mut run, section);
            }
            WarmValue::Opaque => return Err(BakeError::OpaqueElement { table, element }),
            value => return Err(mismatched(table, element, value)),
        }
    }
    flush(table, ty, elements.len(), &mut run, section);
    Ok(())
}

/// Writes the run that ends before element `end`.
fn flush(table: u32, ty: TableType, end: usize, run: &mut Vec<u32>, section: &mut ElementSection) {
    if !run.is_empty() {
        let start = offset(ty, end - run.len());
        section.active(Some(table), &start, Elements::Functions(std::mem::take(run).into()));
    }
}

fn expressions(
    table: u32,
    ty: TableType,
    elements: &[WarmValue],
    functions: &[u32],
    section: &mut ElementSection,
) -> Result<(), BakeError> {
    if elements.is_empty() {
        return Ok(());
    }
    let mut exprs = Vec::with_capacity(elements.len());
    for (element, &value) in elements.iter().enumerate() {
        let expr = constant(value, ValType::Ref(ty.element_type), functions);
        exprs.push(expr.map_err(|why| match why {
            NoConstant::Opaque => BakeError::OpaqueElement { table, element },
            NoConstant::Mismatch => mismatched(table, element, value),
        })?);
    }
    let exprs = Elements::Expressions(ty.element_type, exprs.into());
    section.active(Some(table), &offset(ty, 0), exprs);
    Ok(())
}

fn mismatched(table: u32, element: usize, value: WarmValue) -> BakeError {
    BakeError::Mismatch(format!("element {element} of table {table} cannot be {value:?}"))
}
