//! A core module that shows its state by one exported function, so that a component can pass it on.
//!
//! Hosts cannot reach into a component: a global or a table of a core instance is accessible only
//! inside it. So each module gets a function [`READ`] that returns the value of any of its mutable
//! globals, and flags for dropped passive segments, and for a written table or GC object, which no
//! new instance could start with.
//!
//! Promises: indices, imports, exports, results, effects and traps stay; all state that a call can
//! change, except memory, is shown, or its change is flagged. An imported item is shown by the
//! module that defines it. Fuel consumption may differ.

use std::collections::{BTreeMap, BTreeSet};

use wasm_encoder::{
    BlockType, CodeSection, ExportKind, Function, InstructionSink, SectionId, ValType,
};
use wasmparser::Operator;

use crate::analysis::{self, Analysis, AnalyzeError, Roots};
use crate::bake::{self, WarmState, WarmValue};
use crate::convert;
use crate::emit::{Additions, Sections};
use crate::model::{Body, Model};
use crate::names;
use crate::prepare::{DataSegment, VisibleState, move_data};

/// The export that shows a module's state: `(func (param i32) (result i64))`.
pub(crate) const READ: &str = "afresh:read";

/// The meaning of one number of [`READ`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RevealedValue {
    /// A global, as its bits; of a `v128` the low half.
    Global { index: u32, ty: ValType },
    /// The high half of a `v128`.
    High { index: u32 },
    /// Whether a data segment was dropped, by the flag in this global.
    Data { index: u32, flag: u32 },
    /// Whether an element segment was dropped.
    Element { index: u32, flag: u32 },
    /// Whether an instruction ran that writes a table.
    Tables { flag: u32 },
    /// Whether an instruction ran that changes a GC object in place.
    Objects { flag: u32 },
}

/// The state that a module shows, in the order of the numbers that [`READ`] takes.
#[derive(Debug, Clone, Default)]
pub(crate) struct RevealedState {
    shown: Vec<RevealedValue>,
}

/// Flags of one module: globals that instructions set.
#[derive(Default)]
struct Flags {
    data: BTreeMap<u32, u32>,
    elements: BTreeMap<u32, u32>,
    tables: Option<u32>,
    objects: Option<u32>,
}

impl Flags {
    /// The flag that `op` sets.
    fn of(&self, op: &Operator<'_>) -> Option<u32> {
        match op {
            Operator::DataDrop { data_index } => self.data.get(data_index).copied(),
            Operator::ElemDrop { elem_index } => self.elements.get(elem_index).copied(),
            Operator::TableSet { .. }
            | Operator::TableFill { .. }
            | Operator::TableCopy { .. }
            | Operator::TableInit { .. }
            | Operator::TableGrow { .. } => self.tables,
            Operator::StructSet { .. }
            | Operator::ArraySet { .. }
            | Operator::ArrayFill { .. }
            | Operator::ArrayCopy { .. }
            | Operator::ArrayInitData { .. }
            | Operator::ArrayInitElem { .. } => self.objects,
            _ => None,
        }
    }
}

/// Whether a body has an instruction that a flag stands for.
fn is_flagged(body: &Body<'_>) -> bool {
    let effects = &body.effects;
    !(effects.table_writes.is_empty()
        && effects.data_drops.is_empty()
        && effects.elem_drops.is_empty()
        && effects.gc_write.is_none())
}

/// The module that shows its state, the data that left it, and what it shows.
pub(crate) fn reveal(
    model: &Model<'_>,
) -> Result<(Vec<u8>, Vec<DataSegment>, RevealedState), AnalyzeError> {
    let analysis = analysis::of_model(model, &Roots::AllExports)?;
    rewrite(model, &analysis).map_err(AnalyzeError::Invalid)
}

fn rewrite(
    model: &Model<'_>,
    analysis: &Analysis,
) -> wasmparser::Result<(Vec<u8>, Vec<DataSegment>, RevealedState)> {
    let mut sections = Sections::default();
    let mut add = Additions::new(model);
    let segments = move_data(model, &mut sections)?;
    let mut flags = Flags::default();
    let all = |of: for<'b> fn(&'b Body<'b>) -> &'b BTreeSet<u32>| -> BTreeSet<u32> {
        model.bodies.iter().flat_map(|body| of(body).iter().copied()).collect()
    };
    for index in all(|body| &body.effects.data_drops) {
        flags.data.insert(index, add.default_global(ValType::I32));
    }
    for index in all(|body| &body.effects.elem_drops) {
        flags.elements.insert(index, add.default_global(ValType::I32));
    }
    if !all(|body| &body.effects.table_writes).is_empty() {
        flags.tables = Some(add.default_global(ValType::I32));
    }
    if model.bodies.iter().any(|body| body.effects.gc_write.is_some()) {
        flags.objects = Some(add.default_global(ValType::I32));
    }
    let revealed = RevealedState { shown: revealed_values(model, analysis, &flags) };
    if revealed.shown.is_empty() {
        let module = if segments.is_empty() { model.wasm.to_vec() } else { sections.finish(model) };
        return Ok((module, segments, revealed));
    }
    if model.bodies.iter().any(is_flagged) {
        let mut code = CodeSection::new();
        for body in &model.bodies {
            if is_flagged(body) {
                code.raw(&set_flags(model, body, &flags)?);
            } else {
                code.raw(body.code.as_bytes());
            }
        }
        sections.replace(SectionId::Code, &code)?;
    }
    let mut body = Function::new([]);
    let mut sink = body.instructions();
    read(&revealed.shown, 0, &mut sink);
    sink.end();
    let read = add.function(&[ValType::I32], &[ValType::I64], body);
    add.export(READ, ExportKind::Func, read);
    add.apply(model, &mut sections)?;
    Ok((sections.finish(model), segments, revealed))
}

/// Everything that a call can change in an instance of the module, and that it defines itself.
fn revealed_values(model: &Model<'_>, analysis: &Analysis, flags: &Flags) -> Vec<RevealedValue> {
    let mut shown = Vec::new();
    for (index, global) in (0..).zip(&model.globals) {
        let settable = analysis
            .globals
            .get(index as usize)
            .is_some_and(|of| !of.set_by.is_empty() || of.exported);
        if global.import.is_some() || !global.ty.mutable || !settable {
            continue;
        }
        let Ok(ty) = convert::val_type(global.ty.content_type) else { continue };
        shown.push(RevealedValue::Global { index, ty });
        if ty == ValType::V128 {
            shown.push(RevealedValue::High { index });
        }
    }
    shown.extend(flags.data.iter().map(|(&index, &flag)| RevealedValue::Data { index, flag }));
    shown.extend(
        flags.elements.iter().map(|(&index, &flag)| RevealedValue::Element { index, flag }),
    );
    shown.extend(flags.tables.map(|flag| RevealedValue::Tables { flag }));
    shown.extend(flags.objects.map(|flag| RevealedValue::Objects { flag }));
    shown
}

/// A body in which every instruction that a flag stands for sets it first.
fn set_flags(model: &Model<'_>, body: &Body<'_>, flags: &Flags) -> wasmparser::Result<Vec<u8>> {
    let copy = |range| model.wasm.get(range).unwrap_or_default();
    let mut code = Vec::new();
    let mut copied = body.code.range().start;
    let mut reader = body.code.get_operators_reader()?;
    while !reader.eof() {
        let start = reader.original_position();
        let op = reader.read()?;
        if let Some(flag) = flags.of(&op) {
            code.extend_from_slice(copy(copied..start));
            InstructionSink::new(&mut code).i32_const(-1).global_set(flag);
            copied = start;
        }
    }
    code.extend_from_slice(copy(copied..body.code.range().end));
    Ok(code)
}

/// Leaves the value of the item that local 0 numbers on the stack; `shown` are those from `from`
/// on.
fn read(shown: &[RevealedValue], from: u32, sink: &mut InstructionSink<'_>) {
    match shown {
        [] => {
            sink.unreachable();
        }
        [one] => match *one {
            RevealedValue::Global { index, ty } => {
                sink.global_get(index);
                match ty {
                    ValType::I32 => sink.i64_extend_i32_u(),
                    ValType::I64 => sink,
                    ValType::F32 => sink.i32_reinterpret_f32().i64_extend_i32_u(),
                    ValType::F64 => sink.i64_reinterpret_f64(),
                    ValType::V128 => sink.i64x2_extract_lane(0),
                    ValType::Ref(_) => sink.ref_is_null().i64_extend_i32_u(),
                };
            }
            RevealedValue::High { index } => {
                sink.global_get(index).i64x2_extract_lane(1);
            }
            RevealedValue::Data { flag, .. }
            | RevealedValue::Element { flag, .. }
            | RevealedValue::Tables { flag }
            | RevealedValue::Objects { flag } => {
                sink.global_get(flag).i64_extend_i32_u();
            }
        },
        many => {
            let (low, high) = many.split_at(many.len() / 2);
            let middle = from + low.len() as u32;
            sink.local_get(0).i32_const(middle.cast_signed()).i32_lt_u();
            sink.if_(BlockType::Result(ValType::I64));
            read(low, from, sink);
            sink.else_();
            read(high, middle, sink);
            sink.end();
        }
    }
}

impl RevealedState {
    /// Whether the module has nothing to show, and so no [`READ`].
    pub(crate) fn is_empty(&self) -> bool {
        self.shown.is_empty()
    }

    /// The state that an instance shows; or why no new instance could start with it.
    pub(crate) fn state<E>(
        &self,
        mut ask: impl FnMut(u32) -> Result<u64, E>,
    ) -> Result<Result<WarmState, String>, E> {
        let mut state = WarmState::default();
        for (number, shown) in (0..).zip(&self.shown) {
            let bits = ask(number)?;
            match *shown {
                RevealedValue::Global { index, ty } => {
                    let value = match ty {
                        ValType::I32 => WarmValue::I32((bits as u32).cast_signed()),
                        ValType::I64 => WarmValue::I64(bits.cast_signed()),
                        ValType::F32 => WarmValue::F32(bits as u32),
                        ValType::F64 => WarmValue::F64(bits),
                        ValType::V128 => WarmValue::V128(u128::from(bits)),
                        ValType::Ref(_) if bits != 0 => WarmValue::Null,
                        ValType::Ref(_) => {
                            return Ok(Err(format!("its global {index} holds a reference")));
                        }
                    };
                    state.globals.insert(index, value);
                }
                RevealedValue::High { index } => {
                    if let Some(WarmValue::V128(value)) = state.globals.get_mut(&index) {
                        *value |= u128::from(bits) << 64;
                    }
                }
                RevealedValue::Data { index, .. } if bits != 0 => {
                    state.dropped_data.insert(index);
                }
                RevealedValue::Element { index, .. } if bits != 0 => {
                    state.dropped_elements.insert(index);
                }
                RevealedValue::Tables { .. } if bits != 0 => {
                    return Ok(Err("its code wrote a table".to_owned()));
                }
                RevealedValue::Objects { .. } if bits != 0 => {
                    return Ok(Err("its code changed a GC object in place".to_owned()));
                }
                RevealedValue::Data { .. }
                | RevealedValue::Element { .. }
                | RevealedValue::Tables { .. }
                | RevealedValue::Objects { .. } => {}
            }
        }
        Ok(Ok(state))
    }
}

/// The original module with `warm` as the initial state of new instances: without a start function,
/// and without data, which the engine's images hold.
pub(crate) fn bake_nested(model: &Model<'_>, warm: &WarmState) -> Result<Vec<u8>, bake::BakeError> {
    let settable = |index: &u32| {
        let global = model.globals.get(*index as usize);
        global.is_some_and(|global| global.import.is_none() && global.ty.mutable)
    };
    if let Some(index) = warm.globals.keys().find(|index| !settable(index)) {
        let why = format!("global {index} is not a mutable global of the module");
        return Err(bake::BakeError::Mismatch(why));
    }
    let visible =
        VisibleState { globals: warm.globals.keys().copied().collect(), ..VisibleState::default() };
    let mut sections = Sections::default();
    sections.remove(SectionId::Start);
    bake::data(model, warm, &mut sections)?;
    bake::globals(model, &visible, warm, &mut sections)?;
    bake::elements(model, &visible, warm, &mut sections)?;
    Ok(sections.finish(model))
}

/// The first reserved name that the module exports, if it exports one.
pub(crate) fn reserved<'a>(model: &Model<'a>) -> Option<&'a str> {
    model.exports.iter().map(|e| e.name).find(|name| name.starts_with(names::PREFIX))
}
