//! A core module, parsed as far as rewriting needs it, with the bytes of everything else kept
//! as they are.
//!
//! Only validated modules get here, so that rewriting never turns an invalid module into a valid
//! one. The proposals allowed are those that Wasmtime knows; shared-everything-threads,
//! custom descriptors and memory control are not among them, because their state is not covered
//! by [`crate::effects`]. Nor are compact imports, which Wasmtime refuses: a validator copies the
//! module name for each import, and here a million imports may share one of 100,000 bytes.

use std::collections::{BTreeMap, BTreeSet};

use wasmparser::{
    AbstractHeapType, BinaryReader, CompositeInnerType, ConstExpr, Data, DataKind, Element,
    ElementItems, ElementKind, ExternalKind, FunctionBody, GlobalType, HeapType, MemoryType,
    Operator, Parser, Payload, SubType, TableInit, TableType, TypeRef, ValType, Validator,
    WasmFeatures,
};

use crate::AnalyzeError;
use crate::effects::Effects;

/// A constant integer, as an active segment's offset needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConstInt {
    I32(i32),
    I64(i64),
}

/// The module and field names of an import.
pub(crate) type ImportName<'a> = (&'a str, &'a str);

pub(crate) struct Global<'a> {
    pub(crate) import: Option<ImportName<'a>>,
    pub(crate) ty: GlobalType,
    /// The encoded definition; empty for an import.
    pub(crate) raw: &'a [u8],
    /// The value, where it is constant for every instance.
    pub(crate) value: Option<ConstInt>,
}

pub(crate) struct Table<'a> {
    pub(crate) import: Option<ImportName<'a>>,
    pub(crate) ty: TableType,
    pub(crate) init: Option<ConstExpr<'a>>,
}

pub(crate) struct Memory<'a> {
    pub(crate) import: Option<ImportName<'a>>,
    pub(crate) ty: MemoryType,
}

/// A section: its items' count and their encoding.
#[derive(Clone, Copy)]
pub(crate) struct Items<'a> {
    pub(crate) count: u32,
    pub(crate) bytes: &'a [u8],
}

pub(crate) struct Export<'a> {
    pub(crate) name: &'a str,
    pub(crate) kind: ExternalKind,
    pub(crate) index: u32,
}

pub(crate) struct Body<'a> {
    pub(crate) code: FunctionBody<'a>,
    pub(crate) effects: Effects,
}

/// A parsed module.
#[derive(Default)]
pub(crate) struct Model<'a> {
    pub(crate) wasm: &'a [u8],
    /// Non-custom sections by id, each as its whole contents.
    pub(crate) sections: BTreeMap<u8, &'a [u8]>,
    pub(crate) customs: Vec<(&'a str, &'a [u8])>,
    pub(crate) types: u32,
    /// The number of parameters of each type, by index; 0 for a type that is not a function.
    pub(crate) params: Vec<u32>,
    /// The type of each function, by index.
    pub(crate) signatures: Vec<u32>,
    /// Whether a type, global, table or tag lets garbage-collected values occur.
    pub(crate) collected: bool,
    /// The types, by index.
    composites: Vec<CompositeInnerType>,
    /// Whether instantiation makes objects with mutable contents: constant expressions that
    /// allocate one.
    pub(crate) keeps_mutable_objects: bool,
    pub(crate) imported_functions: u32,
    pub(crate) functions: u32,
    pub(crate) globals: Vec<Global<'a>>,
    pub(crate) tables: Vec<Table<'a>>,
    pub(crate) memories: Vec<Memory<'a>>,
    pub(crate) exports: Vec<Export<'a>>,
    pub(crate) start: Option<u32>,
    pub(crate) elements: Vec<Element<'a>>,
    pub(crate) data: Vec<Data<'a>>,
    pub(crate) bodies: Vec<Body<'a>>,
    /// Functions that a reference may point to: `ref.func` anywhere, and element segments.
    pub(crate) address_taken: BTreeSet<u32>,
}

/// The proposals that the rewriter understands.
pub(crate) fn features() -> WasmFeatures {
    WasmFeatures::WASM3
        | WasmFeatures::THREADS
        | WasmFeatures::LEGACY_EXCEPTIONS
        | WasmFeatures::STACK_SWITCHING
        | WasmFeatures::CUSTOM_PAGE_SIZES
        | WasmFeatures::WIDE_ARITHMETIC
}

/// Splits a section's contents into the count and the items after it.
pub(crate) fn items(contents: &[u8]) -> wasmparser::Result<Items<'_>> {
    let mut reader = BinaryReader::new(contents, 0);
    let count = reader.read_var_u32()?;
    Ok(Items { count, bytes: contents.get(reader.current_position()..).unwrap_or_default() })
}

impl<'a> Model<'a> {
    /// Validates and parses a core module.
    pub(crate) fn parse(wasm: &'a [u8]) -> Result<Self, AnalyzeError> {
        if Parser::is_component(wasm) {
            return Err(AnalyzeError::Component);
        }
        Validator::new_with_features(features())
            .validate_all(wasm)
            .map_err(AnalyzeError::Invalid)?;
        let mut model = Self { wasm, ..Self::default() };
        for payload in Parser::new(0).parse_all(wasm) {
            let payload = payload.map_err(AnalyzeError::Invalid)?;
            model.section(payload).map_err(AnalyzeError::Invalid)?;
        }
        for body in &model.bodies {
            model.address_taken.extend(&body.effects.refs);
        }
        Ok(model)
    }

    /// The items of section `id`; none when the module lacks it.
    pub(crate) fn items(&self, id: wasm_encoder::SectionId) -> wasmparser::Result<Items<'a>> {
        match self.sections.get(&u8::from(id)) {
            Some(contents) => items(contents),
            None => Ok(Items { count: 0, bytes: &[] }),
        }
    }

    /// The body of function `index`; none for an import.
    pub(crate) fn body(&self, index: u32) -> Option<&Body<'a>> {
        let defined = index.checked_sub(self.imported_functions)?;
        self.bodies.get(defined as usize)
    }

    /// Whether objects of type `index` can be changed in place.
    fn is_mutable(&self, index: u32) -> bool {
        match self.composites.get(index as usize) {
            Some(CompositeInnerType::Struct(ty)) => ty.fields.iter().any(|field| field.mutable),
            Some(CompositeInnerType::Array(ty)) => ty.0.mutable,
            _ => false,
        }
    }

    /// Whether a value of this type may be an object, or lead to one.
    pub(crate) fn may_be_object(&self, ty: ValType) -> bool {
        let ValType::Ref(reference) = ty else { return false };
        match reference.heap_type() {
            HeapType::Abstract { .. } => is_collected(ty),
            HeapType::Concrete(index) | HeapType::Exact(index) => {
                let composite =
                    index.as_module_index().and_then(|i| self.composites.get(i as usize));
                !matches!(
                    composite,
                    Some(CompositeInnerType::Func(_) | CompositeInnerType::Cont(_))
                )
            }
        }
    }

    /// Whether function `index` is given objects, or returns some.
    pub(crate) fn passes_objects(&self, index: u32) -> bool {
        let ty =
            self.signatures.get(index as usize).and_then(|ty| self.composites.get(*ty as usize));
        match ty {
            Some(CompositeInnerType::Func(ty)) => {
                ty.params().iter().chain(ty.results()).any(|ty| self.may_be_object(*ty))
            }
            _ => true,
        }
    }

    fn bytes(&self, range: std::ops::Range<usize>) -> &'a [u8] {
        self.wasm.get(range).unwrap_or_default()
    }

    fn section(&mut self, payload: Payload<'a>) -> wasmparser::Result<()> {
        if let Some((id, range)) = payload.as_section()
            && id != 0
        {
            self.sections.insert(id, self.bytes(range));
        }
        match payload {
            Payload::TypeSection(reader) => {
                for group in reader {
                    for ty in group?.types() {
                        self.types += 1;
                        self.params.push(match &ty.composite_type.inner {
                            CompositeInnerType::Func(ty) => ty.params().len() as u32,
                            _ => 0,
                        });
                        self.collected |= type_is_collected(ty);
                        self.composites.push(ty.composite_type.inner.clone());
                    }
                }
            }
            Payload::ImportSection(reader) => {
                for import in reader.into_imports() {
                    self.import(import?);
                }
            }
            Payload::FunctionSection(reader) => {
                self.functions += reader.count();
                for ty in reader {
                    self.signatures.push(ty?);
                }
            }
            Payload::TableSection(reader) => {
                for table in reader {
                    let table = table?;
                    self.collected |= is_collected(ValType::Ref(table.ty.element_type));
                    let init = match table.init {
                        TableInit::RefNull => None,
                        TableInit::Expr(expr) => {
                            self.constant(&expr)?;
                            Some(expr)
                        }
                    };
                    self.tables.push(Table { import: None, ty: table.ty, init });
                }
            }
            Payload::MemorySection(reader) => {
                for ty in reader {
                    self.memories.push(Memory { import: None, ty: ty? });
                }
            }
            Payload::GlobalSection(reader) => self.globals(reader)?,
            Payload::TagSection(reader) => self.collected |= reader.count() > 0,
            Payload::ExportSection(reader) => {
                for export in reader {
                    let export = export?;
                    self.exports.push(Export {
                        name: export.name,
                        kind: export.kind,
                        index: export.index,
                    });
                }
            }
            Payload::StartSection { func, .. } => self.start = Some(func),
            Payload::ElementSection(reader) => {
                for element in reader {
                    let element = element?;
                    match element.items.clone() {
                        ElementItems::Functions(functions) => {
                            for function in functions {
                                self.address_taken.insert(function?);
                            }
                        }
                        ElementItems::Expressions(_, expressions) => {
                            for expression in expressions {
                                self.constant(&expression?)?;
                            }
                        }
                    }
                    self.elements.push(element);
                }
            }
            Payload::DataSection(reader) => {
                self.data = reader.into_iter().collect::<wasmparser::Result<_>>()?;
            }
            Payload::CodeSectionEntry(code) => {
                let effects = Effects::of(&code)?;
                self.bodies.push(Body { code, effects });
            }
            Payload::CustomSection(section) => {
                self.customs.push((section.name(), section.data()));
            }
            _ => {}
        }
        Ok(())
    }

    fn import(&mut self, import: wasmparser::Import<'a>) {
        let name = Some((import.module, import.name));
        match import.ty {
            TypeRef::Func(ty) | TypeRef::FuncExact(ty) => {
                self.signatures.push(ty);
                self.imported_functions += 1;
                self.functions += 1;
            }
            TypeRef::Table(ty) => {
                self.collected |= is_collected(ValType::Ref(ty.element_type));
                self.tables.push(Table { import: name, ty, init: None });
            }
            TypeRef::Memory(ty) => self.memories.push(Memory { import: name, ty }),
            TypeRef::Global(ty) => {
                self.collected |= is_collected(ty.content_type);
                self.globals.push(Global { import: name, ty, raw: &[], value: None });
            }
            TypeRef::Tag(_) => self.collected = true,
        }
    }

    fn globals(&mut self, reader: wasmparser::GlobalSectionReader<'a>) -> wasmparser::Result<()> {
        let end = reader.range().end;
        let mut offsets = Vec::new();
        for item in reader.into_iter_with_offsets() {
            let (offset, global) = item?;
            self.constant(&global.init_expr)?;
            self.collected |= is_collected(global.ty.content_type);
            let value = if global.ty.mutable { None } else { self.const_int(&global.init_expr) };
            offsets.push((offset, self.globals.len()));
            self.globals.push(Global { import: None, ty: global.ty, raw: &[], value });
        }
        for (at, &(offset, index)) in offsets.iter().enumerate() {
            let until = offsets.get(at + 1).map_or(end, |next| next.0);
            let raw = self.bytes(offset..until);
            if let Some(global) = self.globals.get_mut(index) {
                global.raw = raw;
            }
        }
        Ok(())
    }

    /// Notes the references and allocations of a constant expression.
    fn constant(&mut self, expr: &ConstExpr<'a>) -> wasmparser::Result<()> {
        for op in expr.get_operators_reader() {
            match op? {
                Operator::RefFunc { function_index } => {
                    self.address_taken.insert(function_index);
                }
                Operator::StructNew { struct_type_index: index }
                | Operator::StructNewDefault { struct_type_index: index }
                | Operator::ArrayNew { array_type_index: index }
                | Operator::ArrayNewDefault { array_type_index: index }
                | Operator::ArrayNewFixed { array_type_index: index, .. } => {
                    self.keeps_mutable_objects |= self.is_mutable(index);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Evaluates a constant expression over integers; none when it depends on an import or is
    /// not an integer.
    pub(crate) fn const_int(&self, expr: &ConstExpr<'a>) -> Option<ConstInt> {
        use ConstInt::{I32, I64};
        let mut stack = Vec::new();
        for op in expr.get_operators_reader() {
            let value = match op.ok()? {
                Operator::End => continue,
                Operator::I32Const { value } => I32(value),
                Operator::I64Const { value } => I64(value),
                Operator::GlobalGet { global_index } => {
                    self.globals.get(global_index as usize)?.value?
                }
                op => match (op, stack.pop()?, stack.pop()?) {
                    (Operator::I32Add, I32(b), I32(a)) => I32(a.wrapping_add(b)),
                    (Operator::I32Sub, I32(b), I32(a)) => I32(a.wrapping_sub(b)),
                    (Operator::I32Mul, I32(b), I32(a)) => I32(a.wrapping_mul(b)),
                    (Operator::I64Add, I64(b), I64(a)) => I64(a.wrapping_add(b)),
                    (Operator::I64Sub, I64(b), I64(a)) => I64(a.wrapping_sub(b)),
                    (Operator::I64Mul, I64(b), I64(a)) => I64(a.wrapping_mul(b)),
                    _ => return None,
                },
            };
            stack.push(value);
        }
        stack.pop()
    }

    /// Where an active data segment goes, if that is certain for every instance: memory and byte
    /// offset, the memory being the module's own and the bytes within its minimum size.
    pub(crate) fn placement(&self, data: &Data<'a>) -> Option<(u32, u64)> {
        let DataKind::Active { memory_index, offset_expr } = &data.kind else { return None };
        let memory = self.memories.get(*memory_index as usize)?;
        if memory.import.is_some() || memory.ty.shared {
            return None;
        }
        let offset = match self.const_int(offset_expr)? {
            ConstInt::I32(value) => u64::from(value.cast_unsigned()),
            ConstInt::I64(value) => value.cast_unsigned(),
        };
        let size = u128::from(memory.ty.initial) << memory.ty.page_size_log2.unwrap_or(16);
        let end = u128::from(offset) + data.data.len() as u128;
        (end <= size).then_some((*memory_index, offset))
    }

    /// Whether element segment `index` is passive.
    pub(crate) fn element_is_passive(&self, index: u32) -> bool {
        let element = self.elements.get(index as usize);
        element.is_some_and(|element| matches!(element.kind, ElementKind::Passive))
    }

    /// Whether data segment `index` is passive.
    pub(crate) fn data_is_passive(&self, index: u32) -> bool {
        let data = self.data.get(index as usize);
        data.is_some_and(|data| matches!(data.kind, DataKind::Passive))
    }
}

/// Whether a value of this type may be garbage-collected. A reference to a defined type does not
/// decide it here: the type itself does.
fn is_collected(ty: ValType) -> bool {
    match ty {
        ValType::Ref(ty) => match ty.heap_type() {
            HeapType::Abstract { ty, .. } => !matches!(
                ty,
                AbstractHeapType::Func
                    | AbstractHeapType::NoFunc
                    | AbstractHeapType::Cont
                    | AbstractHeapType::NoCont
            ),
            HeapType::Concrete(_) | HeapType::Exact(_) => false,
        },
        _ => false,
    }
}

fn type_is_collected(ty: &SubType) -> bool {
    match &ty.composite_type.inner {
        CompositeInnerType::Struct(_) | CompositeInnerType::Array(_) => true,
        CompositeInnerType::Func(ty) => {
            ty.params().iter().chain(ty.results()).any(|ty| is_collected(*ty))
        }
        CompositeInnerType::Cont(_) => false,
    }
}

/// Whether a custom section stays true when code moves. Sections that point at code by offset
/// do not, and are left out of a rewritten module.
pub(crate) fn survives_rewriting(name: &str) -> bool {
    !(name.starts_with(".debug_")
        || name.starts_with("reloc.")
        || name.starts_with("metadata.code.")
        || matches!(name, "linking" | "sourceMappingURL" | "external_debug_info"))
}
