//! Assembly of a module from the sections of an old one and additions to them.
//!
//! Additions always come last in their index space, so no index of the original changes and
//! every section that is not touched is copied byte for byte.

use std::collections::{BTreeMap, HashMap};

use wasm_encoder::{
    ConstExpr, Encode, ExportKind, ExportSection, Function, FunctionSection, GlobalSection,
    GlobalType, Module, RawSection, RefType, SectionId, TableSection, TableType, TypeSection,
    ValType,
};

use crate::model::{self, Model};

/// Non-custom sections in the order that the format demands.
const ORDER: [SectionId; 13] = [
    SectionId::Type,
    SectionId::Import,
    SectionId::Function,
    SectionId::Table,
    SectionId::Memory,
    SectionId::Tag,
    SectionId::Global,
    SectionId::Export,
    SectionId::Start,
    SectionId::Element,
    SectionId::DataCount,
    SectionId::Code,
    SectionId::Data,
];

/// The contents of a freshly encoded section, without its size.
pub(crate) fn contents(section: &impl Encode) -> wasmparser::Result<Vec<u8>> {
    let mut encoded = Vec::new();
    section.encode(&mut encoded);
    Ok(model::items(&encoded)?.bytes.to_vec())
}

/// The sections that differ from the original's; an empty one is left out.
#[derive(Default)]
pub(crate) struct Sections(BTreeMap<u8, Vec<u8>>);

impl Sections {
    /// Replaces the original section `id` by `section`.
    pub(crate) fn replace(
        &mut self,
        id: SectionId,
        section: &impl Encode,
    ) -> wasmparser::Result<()> {
        self.0.insert(id.into(), contents(section)?);
        Ok(())
    }

    /// Leaves section `id` out.
    pub(crate) fn remove(&mut self, id: SectionId) {
        self.0.insert(id.into(), Vec::new());
    }

    /// Appends the items of `section` to those of the original section `id`, or of its replacement.
    pub(crate) fn append(
        &mut self,
        model: &Model<'_>,
        id: SectionId,
        section: &impl Encode,
    ) -> wasmparser::Result<()> {
        let added = contents(section)?;
        let added = model::items(&added)?;
        if added.count == 0 {
            return Ok(());
        }
        let old = match self.0.get(&id.into()) {
            Some(contents) => model::items(contents)?,
            None => model.items(id)?,
        };
        let mut merged = Vec::new();
        (old.count + added.count).encode(&mut merged);
        merged.extend_from_slice(old.bytes);
        merged.extend_from_slice(added.bytes);
        self.0.insert(id.into(), merged);
        Ok(())
    }

    /// The finished module.
    pub(crate) fn finish(self, model: &Model<'_>) -> Vec<u8> {
        let mut module = Module::new();
        for id in ORDER {
            let data = match self.0.get(&id.into()) {
                Some(contents) => contents.as_slice(),
                None => model.sections.get(&id.into()).copied().unwrap_or_default(),
            };
            if !data.is_empty() {
                module.section(&RawSection { id: id.into(), data });
            }
        }
        for &(name, data) in &model.customs {
            if model::survives_rewriting(name) {
                module
                    .section(&wasm_encoder::CustomSection { name: name.into(), data: data.into() });
            }
        }
        module.finish()
    }
}

/// Parameters and results.
type Signature = (Vec<ValType>, Vec<ValType>);

/// Limits of engines, as wasmparser has them.
const MAX_TABLES: u32 = 100;
const MAX_ITEMS: u32 = 1_000_000;

/// Types, functions, globals, tables and exports added behind the original's.
pub(crate) struct Additions {
    types: Vec<Signature>,
    /// The index of each of them.
    known: HashMap<Signature, u32>,
    first_type: u32,
    functions: Vec<(u32, Function)>,
    first_function: u32,
    globals: GlobalSection,
    first_global: u32,
    tables: TableSection,
    first_table: u32,
    exports: ExportSection,
}

impl Additions {
    pub(crate) fn new(model: &Model<'_>) -> Self {
        Self {
            types: Vec::new(),
            known: HashMap::new(),
            first_type: model.types,
            functions: Vec::new(),
            first_function: model.functions,
            globals: GlobalSection::new(),
            first_global: model.globals.len() as u32,
            tables: TableSection::new(),
            first_table: model.tables.len() as u32,
            exports: ExportSection::new(),
        }
    }

    pub(crate) fn function(
        &mut self,
        params: &[ValType],
        results: &[ValType],
        body: Function,
    ) -> u32 {
        let signature = (params.to_vec(), results.to_vec());
        let next = self.types.len() as u32;
        let ty = *self.known.entry(signature).or_insert_with_key(|signature| {
            self.types.push(signature.clone());
            next
        });
        self.function_of(self.first_type + ty, body)
    }

    /// A function of a type that the module has already.
    pub(crate) fn function_of(&mut self, ty: u32, body: Function) -> u32 {
        self.functions.push((ty, body));
        self.first_function + self.functions.len() as u32 - 1
    }

    /// A mutable global.
    pub(crate) fn global(&mut self, val_type: ValType, init: &ConstExpr) -> u32 {
        self.globals.global(GlobalType { val_type, mutable: true, shared: false }, init);
        self.first_global + self.globals.len() - 1
    }

    /// A mutable global with the default value of its type.
    pub(crate) fn default_global(&mut self, val_type: ValType) -> u32 {
        let init = match val_type {
            ValType::I32 => ConstExpr::i32_const(0),
            ValType::I64 => ConstExpr::i64_const(0),
            ValType::F32 => ConstExpr::f32_const(0f32.into()),
            ValType::F64 => ConstExpr::f64_const(0f64.into()),
            ValType::V128 => ConstExpr::v128_const(0),
            ValType::Ref(RefType { heap_type, .. }) => ConstExpr::ref_null(heap_type),
        };
        self.global(val_type, &init)
    }

    pub(crate) fn table(&mut self, ty: TableType) -> u32 {
        self.tables.table(ty);
        self.first_table + self.tables.len() - 1
    }

    pub(crate) fn export(&mut self, name: &str, kind: ExportKind, index: u32) {
        self.exports.export(name, kind, index);
    }

    /// The first kind of item that exceeds a limit of engines: its name, the count and the limit.
    pub(crate) fn exceeded(&self, model: &Model<'_>) -> Option<(&'static str, u32, u32)> {
        let functions = self.first_function.saturating_add(self.functions.len() as u32);
        let globals = self.first_global.saturating_add(self.globals.len());
        let exports = (model.exports.len() as u32).saturating_add(self.exports.len());
        [
            ("tables", self.first_table.saturating_add(self.tables.len()), MAX_TABLES),
            ("functions", functions, MAX_ITEMS),
            ("globals", globals, MAX_ITEMS),
            ("exports", exports, MAX_ITEMS),
        ]
        .into_iter()
        .find(|(_, count, limit)| count > limit)
    }

    /// Appends everything to `sections`.
    pub(crate) fn apply(
        self,
        model: &Model<'_>,
        sections: &mut Sections,
    ) -> wasmparser::Result<()> {
        let mut types = TypeSection::new();
        for (params, results) in self.types {
            types.ty().function(params, results);
        }
        let mut functions = FunctionSection::new();
        let mut code = wasm_encoder::CodeSection::new();
        for (ty, body) in &self.functions {
            functions.function(*ty);
            code.function(body);
        }
        sections.append(model, SectionId::Type, &types)?;
        sections.append(model, SectionId::Function, &functions)?;
        sections.append(model, SectionId::Table, &self.tables)?;
        sections.append(model, SectionId::Global, &self.globals)?;
        sections.append(model, SectionId::Export, &self.exports)?;
        sections.append(model, SectionId::Code, &code)
    }
}
