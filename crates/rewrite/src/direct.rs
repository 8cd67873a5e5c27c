//! Calls that go through a component's shim, taken into the module that makes them.
//!
//! A function that a component imports and that needs the caller's memory cannot be there before
//! the caller is. So the tools that make components have a first module, the shim, whose functions
//! call through a table, and a last one that fills the table. Engines look up each shim function
//! for each new instance, which is a tenth of the cost of such an instance. Here the module that
//! imports such functions gets them as its own functions, over the shim's table.
//!
//! Promises: each call arrives where it did, and traps where it did; no index of the component
//! changes, and code of any other form stays as it is, byte for byte. The new functions of a
//! component have at most 64 KiB more than the component itself. May break it: a shim of another
//! form, which is left alone.

use std::collections::BTreeMap;
use std::convert::Infallible;

use wasm_encoder::reencode::{Error, Reencode, utils};
use wasm_encoder::{
    CodeSection, EntityType, ExportKind, Function, FunctionSection, ImportSection, InstanceSection,
    Module, ModuleArg, TableType,
};
use wasmparser::{
    BinaryReader, CanonicalFunction, ComponentAlias, ComponentAliasSectionReader,
    ComponentCanonicalSectionReader, ComponentExportSectionReader, ComponentExternalKind,
    ComponentImportSectionReader, ComponentInstance, ComponentInstanceSectionReader,
    ComponentOuterAliasKind, ComponentTypeRef, CompositeInnerType, CustomSectionReader,
    ExternalKind, Instance, InstanceSectionReader, KnownCustom, Operator, Parser, Payload, TypeRef,
};

use crate::component::{COMPONENT, CORE_MODULE, PrepareComponentError, each_section};
use crate::names::SHIM;

/// Section ids of the component format.
const CORE_INSTANCE: u8 = 2;
const COMPONENT_INSTANCE: u8 = 5;
const ALIAS: u8 = 6;
const CANON: u8 = 8;
const IMPORT: u8 = 10;
const EXPORT: u8 = 11;

/// Modules with more bytes than this stay as they are: to write them anew takes longer than is
/// gained, for their guests have more to do.
const MAX_MODULE_SIZE: usize = 1 << 20;

/// Maximum bytes of new functions beyond the size of the component. An import of five bytes becomes
/// a function that passes up to 1,000 parameters on, in 3,000 bytes. Modules beyond the maximum
/// stay as they are.
const SPARE_BYTES: usize = 64 << 10;

/// The component, with calls through shims made by the modules themselves, where that is possible.
#[must_use]
pub fn direct_calls(component: &[u8]) -> Vec<u8> {
    let mut room = component.len() + SPARE_BYTES;
    level(component, 0, &mut room).unwrap_or_else(|_| component.to_vec())
}

/// One component, `depth` deep, with `room` for the bytes of new functions.
fn level(wasm: &[u8], depth: u32, room: &mut usize) -> Result<Vec<u8>, PrepareComponentError> {
    let plan = Level::read(wasm, depth)?.plan(room);
    let (mut module, mut instance) = (0, 0);
    each_section(wasm, depth, &mut |id, contents| match id {
        CORE_MODULE => {
            module += 1;
            Ok(plan.modules.get(&(module - 1)).cloned())
        }
        CORE_INSTANCE => {
            let first = instance;
            let section = InstanceSectionReader::new(BinaryReader::new(contents, 0))?;
            instance += section.count() as usize;
            let touched = plan.arguments.range(first..instance).next().is_some();
            touched.then(|| instances(section, first, &plan)).transpose()
        }
        COMPONENT => level(contents, depth + 1, room).map(Some),
        _ => Ok(None),
    })
}

/// A section of core instances, with their shims as arguments.
fn instances(
    section: InstanceSectionReader<'_>,
    first: usize,
    plan: &Plan,
) -> Result<Vec<u8>, PrepareComponentError> {
    let mut written = InstanceSection::new();
    for (index, instance) in (first..).zip(section) {
        match instance? {
            Instance::Instantiate { module_index, args } => {
                let more = plan.arguments.get(&index).map(|shim| (SHIM, *shim));
                let args = args.iter().map(|arg| (arg.name, arg.index)).chain(more);
                let args: Vec<_> =
                    args.map(|(name, index)| (name, ModuleArg::Instance(index))).collect();
                written.instantiate(module_index, args);
            }
            Instance::FromExports(exports) => {
                let exports: Vec<_> = exports
                    .iter()
                    .map(|export| (export.name, ExportKind::from(export.kind), export.index))
                    .collect();
                written.export_items(exports);
            }
        }
    }
    // Without the length that an encoder puts before a section's contents.
    let mut bytes = Vec::new();
    wasm_encoder::Encode::encode(&written, &mut bytes);
    let mut reader = BinaryReader::new(&bytes, 0);
    let size = reader.read_var_u32()?;
    Ok(reader.read_bytes(size as usize)?.to_vec())
}

/// Changes to the modules and instances of one component.
#[derive(Default)]
struct Plan {
    modules: BTreeMap<usize, Vec<u8>>,
    /// By core instance, the shim that it is given.
    arguments: BTreeMap<usize, u32>,
}

/// A core instance: of a module with arguments, or a bag of functions by name.
enum CoreInstance<'a> {
    Of(u32, Vec<(&'a str, u32)>),
    Bag(BTreeMap<&'a str, u32>),
}

/// The index spaces of one component.
#[derive(Default)]
struct Level<'a> {
    /// None for those from elsewhere.
    modules: Vec<Option<&'a [u8]>>,
    instances: Vec<CoreInstance<'a>>,
    /// The instance and the export that it is, if it is one.
    functions: Vec<Option<(u32, &'a str)>>,
    /// Whether others can instantiate a module of this component: it is an export, an argument of a
    /// component, or aliased by an inner component. They would lack the shim.
    shared: bool,
}

impl<'a> Level<'a> {
    fn read(wasm: &'a [u8], depth: u32) -> Result<Self, PrepareComponentError> {
        let mut this = Self::default();
        let mut sections = Vec::new();
        each_section(wasm, depth, &mut |id, contents| {
            let start = contents.as_ptr() as usize - wasm.as_ptr() as usize;
            sections.push((id, start..start + contents.len()));
            Ok(None)
        })?;
        for (id, range) in sections {
            if id == COMPONENT {
                this.shared |= aliases_modules(&wasm[range])?;
                continue;
            }
            this.section(id, &wasm[range])?;
        }
        Ok(this)
    }

    fn section(&mut self, id: u8, contents: &'a [u8]) -> wasmparser::Result<()> {
        let reader = BinaryReader::new(contents, 0);
        match id {
            CORE_MODULE => self.modules.push(Some(contents)),
            CORE_INSTANCE => {
                for instance in InstanceSectionReader::new(reader)? {
                    self.instances.push(match instance? {
                        Instance::Instantiate { module_index, args } => CoreInstance::Of(
                            module_index,
                            args.iter().map(|arg| (arg.name, arg.index)).collect(),
                        ),
                        Instance::FromExports(exports) => {
                            let functions =
                                exports.iter().filter(|export| export.kind == ExternalKind::Func);
                            CoreInstance::Bag(functions.map(|one| (one.name, one.index)).collect())
                        }
                    });
                }
            }
            ALIAS => {
                for alias in ComponentAliasSectionReader::new(reader)? {
                    match alias? {
                        ComponentAlias::CoreInstanceExport {
                            kind: ExternalKind::Func,
                            instance_index,
                            name,
                        } => self.functions.push(Some((instance_index, name))),
                        ComponentAlias::Outer {
                            kind: ComponentOuterAliasKind::CoreModule, ..
                        } => self.modules.push(None),
                        ComponentAlias::InstanceExport {
                            kind: ComponentExternalKind::Module,
                            ..
                        } => self.modules.push(None),
                        _ => {}
                    }
                }
            }
            CANON => {
                for function in ComponentCanonicalSectionReader::new(reader)? {
                    if !matches!(function?, CanonicalFunction::Lift { .. }) {
                        self.functions.push(None);
                    }
                }
            }
            COMPONENT_INSTANCE => {
                for instance in ComponentInstanceSectionReader::new(reader)? {
                    let is_module = |kind| kind == ComponentExternalKind::Module;
                    self.shared |= match instance? {
                        ComponentInstance::Instantiate { args, .. } => {
                            args.iter().any(|arg| is_module(arg.kind))
                        }
                        ComponentInstance::FromExports(exports) => {
                            exports.iter().any(|export| is_module(export.kind))
                        }
                    };
                }
            }
            EXPORT => {
                for export in ComponentExportSectionReader::new(reader)? {
                    self.shared |= export?.kind == ComponentExternalKind::Module;
                }
            }
            IMPORT => {
                for import in ComponentImportSectionReader::new(reader)? {
                    if let ComponentTypeRef::Module(_) = import?.ty {
                        self.modules.push(None);
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn plan(&self, room: &mut usize) -> Plan {
        let mut plan = Plan::default();
        // A component that takes modules from others or gives them some stays as it is, and so does
        // a module that is there more than once.
        let modules: Vec<_> = self.modules.iter().copied().flatten().collect();
        if self.shared || modules.len() < self.modules.len() {
            return plan;
        }
        // Its one instance, and the arguments of that; none once there is another.
        let mut once = BTreeMap::<u32, Option<(usize, &Vec<(&str, u32)>)>>::new();
        for (instance, made) in self.instances.iter().enumerate() {
            if let CoreInstance::Of(module, args) = made {
                let first = Some((instance, args));
                once.entry(*module).and_modify(|one| *one = None).or_insert(first);
            }
        }
        let shims: Vec<_> = modules.iter().map(|module| Shim::read(module)).collect();
        for (module, contents) in modules.iter().enumerate() {
            let Some(Some((instance, args))) = once.get(&(module as u32)) else { continue };
            let args: BTreeMap<_, _> = args.iter().copied().collect();
            if contents.len() > MAX_MODULE_SIZE || args.contains_key(SHIM) {
                continue;
            }
            if let Some((rewritten, shim)) = self.absorbed(contents, &args, &shims, room) {
                plan.modules.insert(module, rewritten);
                plan.arguments.insert(*instance, shim);
            }
        }
        plan
    }

    /// The module with a shim's functions for its own, and that shim's instance; none where it
    /// calls none, or there is no room for them.
    fn absorbed(
        &self,
        wasm: &[u8],
        args: &BTreeMap<&str, u32>,
        shims: &[Option<Shim<'a>>],
        room: &mut usize,
    ) -> Option<(Vec<u8>, u32)> {
        // The target of an import, if it is a function of a shim.
        let source = |module: &str, name: &str| {
            let CoreInstance::Bag(functions) = self.instances.get(*args.get(module)? as usize)?
            else {
                return None;
            };
            let (instance, name) = (*self.functions.get(*functions.get(name)? as usize)?)?;
            let CoreInstance::Of(of, _) = self.instances.get(instance as usize)? else {
                return None;
            };
            let shim = shims.get(*of as usize)?.as_ref()?;
            Some((instance, shim, *shim.functions.get(name)?))
        };
        let (mut functions, mut imported, mut defined) = (Vec::new(), 0, 0);
        let mut shim: Option<(u32, &Shim<'_>)> = None;
        let mut left = *room;
        for payload in Parser::new(0).parse_all(wasm) {
            match payload.ok()? {
                Payload::ImportSection(section) => {
                    for import in section.into_imports() {
                        let import = import.ok()?;
                        let TypeRef::Func(ty) = import.ty else {
                            imported += u32::from(matches!(import.ty, TypeRef::Table(_)));
                            continue;
                        };
                        let found = source(import.module, import.name);
                        let taken = found.filter(|(instance, of, _)| {
                            *instance == shim.get_or_insert((*instance, *of)).0
                        });
                        if let Some((_, _, slot)) = taken {
                            left = left.checked_sub(slot.bytes())?;
                        }
                        functions.push(taken.map(|(_, _, slot)| DirectImport { ty, slot }));
                    }
                }
                Payload::FunctionSection(section) => defined = section.count(),
                _ => {}
            }
        }
        let (instance, shim) = shim?;
        if defined == 0 {
            return None;
        }
        let imports = Imports::new(functions, imported, defined);
        let mut module = Module::new();
        let mut absorbing = AbsorbedModule { imports, shim };
        absorbing.parse_core_module(&mut module, Parser::new(0), wasm).ok()?;
        *room = left;
        Some((module.finish(), instance))
    }
}

/// Whether a component, or one inside it, aliases a module of a component around it.
fn aliases_modules(wasm: &[u8]) -> wasmparser::Result<bool> {
    for payload in Parser::new(0).parse_all(wasm) {
        let Payload::ComponentAliasSection(section) = payload? else { continue };
        for alias in section {
            let kind = ComponentOuterAliasKind::CoreModule;
            if matches!(alias?, ComponentAlias::Outer { kind: of, .. } if of == kind) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// A function of a shim.
#[derive(Clone, Copy)]
struct Slot {
    params: u32,
    /// Its place in the table.
    at: i32,
}

impl Slot {
    /// Maximum bytes of a function that calls it.
    fn bytes(self) -> usize {
        24 + 3 * self.params as usize
    }
}

/// A module whose exported functions do nothing but call through its one table, which it exports.
struct Shim<'a> {
    table: &'a str,
    ty: wasmparser::TableType,
    functions: BTreeMap<&'a str, Slot>,
}

impl<'a> Shim<'a> {
    /// None of a module of any other form.
    fn read(wasm: &'a [u8]) -> Option<Self> {
        let (mut params, mut types, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        let (mut table, mut exports) = (None, Vec::new());
        for payload in Parser::new(0).parse_all(wasm) {
            match payload.ok()? {
                Payload::Version { .. } | Payload::CustomSection(_) | Payload::End(_) => {}
                Payload::CodeSectionStart { .. } => {}
                Payload::TypeSection(section) => {
                    for group in section {
                        for ty in group.ok()?.into_types() {
                            let CompositeInnerType::Func(ty) = ty.composite_type.inner else {
                                return None;
                            };
                            params.push(ty.params().len() as u32);
                        }
                    }
                }
                Payload::FunctionSection(section) => {
                    for ty in section {
                        types.push(ty.ok()?);
                    }
                }
                Payload::TableSection(section) => {
                    let mut tables = section.into_iter();
                    table = Some(tables.next()?.ok()?.ty).filter(|_| tables.next().is_none());
                }
                Payload::ExportSection(section) => {
                    for export in section {
                        exports.push(export.ok()?);
                    }
                }
                Payload::CodeSectionEntry(body) => {
                    let ty = *types.get(slots.len())?;
                    let params = *params.get(ty as usize)?;
                    if body.get_locals_reader().ok()?.get_count() > 0 {
                        return None;
                    }
                    let mut code = body.get_operators_reader().ok()?;
                    for local in 0..params {
                        let Operator::LocalGet { local_index } = code.read().ok()? else {
                            return None;
                        };
                        (local_index == local).then_some(())?;
                    }
                    let Operator::I32Const { value: at } = code.read().ok()? else { return None };
                    let called = code.read().ok()?;
                    let ended = matches!(code.read().ok()?, Operator::End) && code.eof();
                    let through = matches!(
                        called,
                        Operator::CallIndirect { type_index, table_index: 0 } if type_index == ty
                    );
                    (ended && through).then(|| slots.push(Slot { params, at }))?;
                }
                _ => return None,
            }
        }
        let of = |kind| exports.iter().filter(move |export| export.kind == kind);
        let functions = of(ExternalKind::Func)
            .filter_map(|export| Some((export.name, *slots.get(export.index as usize)?)));
        let functions = functions.collect();
        Some(Self { table: of(ExternalKind::Table).next()?.name, ty: table?, functions })
    }
}

/// An import that becomes a function.
#[derive(Clone, Copy)]
struct DirectImport {
    ty: u32,
    slot: Slot,
}

/// The imports of a module.
struct Imports {
    /// By function.
    functions: Vec<Option<DirectImport>>,
    /// The new index of each.
    places: Vec<u32>,
    /// The number of imports that are functions now.
    taken: u32,
    tables: u32,
}

impl Imports {
    fn new(functions: Vec<Option<DirectImport>>, tables: u32, defined: u32) -> Self {
        let taken = functions.iter().flatten().count() as u32;
        // The new own functions come behind all others, in their order.
        let (mut import, mut own) = (0, functions.len() as u32 - taken + defined);
        let places = functions.iter().map(|function| {
            let next = if function.is_some() { &mut own } else { &mut import };
            *next += 1;
            *next - 1
        });
        let places = places.collect();
        Self { functions, places, taken, tables }
    }

    /// The new index of a function.
    fn place(&self, function: u32) -> u32 {
        self.places.get(function as usize).copied().unwrap_or(function.wrapping_sub(self.taken))
    }
}

/// Writes a module anew.
struct AbsorbedModule<'a> {
    imports: Imports,
    shim: &'a Shim<'a>,
}

impl Reencode for AbsorbedModule<'_> {
    type Error = Infallible;

    fn function_index(&mut self, function: u32) -> Result<u32, Error> {
        Ok(self.imports.place(function))
    }

    fn table_index(&mut self, table: u32) -> Result<u32, Error> {
        // The shim's comes after those that were imported before.
        Ok(table + u32::from(table >= self.imports.tables))
    }

    fn parse_import_section(
        &mut self,
        imports: &mut ImportSection,
        section: wasmparser::ImportSectionReader<'_>,
    ) -> Result<(), Error> {
        let mut function = 0;
        for import in section.into_imports() {
            let import = import?;
            if matches!(import.ty, TypeRef::Func(_)) {
                function += 1;
                if self.imports.functions[function - 1].is_some() {
                    continue;
                }
            }
            utils::parse_import(self, imports, import)?;
        }
        let table: TableType = self.table_type(self.shim.ty)?;
        imports.import(SHIM, self.shim.table, EntityType::Table(table));
        Ok(())
    }

    fn parse_function_section(
        &mut self,
        functions: &mut FunctionSection,
        section: wasmparser::FunctionSectionReader<'_>,
    ) -> Result<(), Error> {
        utils::parse_function_section(self, functions, section)?;
        for taken in self.imports.functions.iter().flatten() {
            functions.function(taken.ty);
        }
        Ok(())
    }

    fn parse_code_section(
        &mut self,
        code: &mut CodeSection,
        section: wasmparser::CodeSectionReader<'_>,
    ) -> Result<(), Error> {
        utils::parse_code_section(self, code, section)?;
        for taken in self.imports.functions.iter().flatten() {
            let mut body = Function::new([]);
            let mut instructions = body.instructions();
            for local in 0..taken.slot.params {
                instructions.local_get(local);
            }
            instructions
                .i32_const(taken.slot.at)
                .call_indirect(self.imports.tables, taken.ty)
                .end();
            code.function(&body);
        }
        Ok(())
    }

    /// Claims of other sections about the code no longer hold.
    fn parse_custom_section(
        &mut self,
        module: &mut Module,
        section: CustomSectionReader<'_>,
    ) -> Result<(), Error> {
        match section.as_known() {
            KnownCustom::Name(_) => utils::parse_custom_section(self, module, section),
            _ => Ok(()),
        }
    }
}
