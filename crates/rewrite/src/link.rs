//! Linking: several modules become one module. Later ones import exports of earlier ones.
//!
//! Promises: an instance of the linked module behaves as instances of the parts made in order, each
//! with the exports of those before it, as wasmtime's `Linker::module` makes them: reactors among
//! them are initialised as soon as they are made. All state then belongs to one module, and can be
//! kept and restored as any module's.
//!
//! May break it: a host function that looks for an export of the instance that calls it finds those
//! of the last module, and memories and allocators of the others. Where two have one name, and it
//! could find the wrong one, they are refused.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};

use wasm_encoder::reencode::Reencode;
use wasm_encoder::{
    CodeSection, DataCountSection, DataSection, ElementSection, Encode, ExportKind, ExportSection,
    Function, FunctionSection, GlobalSection, ImportSection, InstructionSink, MemorySection,
    Module, NameMap, NameSection, StartSection, TableSection, TagSection, TypeSection,
};
use wasmparser::{
    ConstExpr, DataKind, ElementItems, ElementKind, ExternalKind, KnownCustom, Name, Parser,
    Payload, TypeRef, Validator,
};

use crate::model::features;
use crate::names;
use crate::place::{IndexSpaces, KINDS, fits, kind, kind_of};

/// Why modules cannot be linked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// There is nothing to link, or two modules have one name.
    #[error("{0}; give each module a unique name, which later ones use to import from it")]
    Names(String),
    /// A module is not valid, or the linked whole is not.
    #[error("{what} is not valid: {error}")]
    Invalid {
        /// Which it is.
        what: String,
        /// Why.
        error: wasmparser::Error,
    },
    /// An import is of a module among these, which has nothing that fits.
    #[error(
        "the module {module:?} imports {from:?} {name:?}: {reason}; a module comes after those that it imports from"
    )]
    Import {
        /// Who imports.
        module: String,
        /// The module that it imports from.
        from: String,
        /// The export.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// Host functions could find another module's memory or allocator than that of the module that
    /// calls them.
    #[error(
        "the export {name:?} of the module {module:?} differs from a later module's {name:?}, \
         which host functions would find instead; have one of them export it under another name, or import the other's"
    )]
    Shadowed {
        /// The exporter of the hidden one.
        module: String,
        /// The export.
        name: String,
    },
    /// A command among those that others import from: each use of one would be a new instance.
    #[error("the module {0:?} is a command, and only the last may be one; make it a reactor")]
    Command(String),
    /// A module cannot be encoded again.
    #[error("the module {module:?} cannot be encoded again: {reason}")]
    Encode {
        /// Which it is.
        module: String,
        /// Why.
        reason: String,
    },
}

const INITIALIZE: &str = "_initialize";
const COMMAND: &str = "_start";

/// An export, by its module's own index.
struct Export<'a> {
    name: &'a str,
    kind: usize,
    index: u32,
}

struct Import<'a> {
    from: &'a str,
    name: &'a str,
    ty: TypeRef,
    /// Whether it is for the host to provide.
    of_host: bool,
}

/// One of the modules, and where it is in the whole.
struct Part<'a> {
    name: &'a str,
    wasm: &'a [u8],
    /// Whether the host completes it, and finds all of its exports under its name.
    library: bool,
    imports: Vec<Import<'a>>,
    /// By kind, imports included; types of functions and tags are not looked at.
    types: [Vec<TypeRef>; KINDS],
    exports: Vec<Export<'a>>,
    /// The index of each export, by its name.
    by_name: HashMap<&'a str, usize>,
    start: Option<u32>,
    counts: Counts,
    place: IndexSpaces,
}

/// Counts of items that are never imported.
#[derive(Default)]
struct Counts {
    types: u32,
    elements: u32,
    data: u32,
}

impl<'a> Part<'a> {
    fn parse(name: &'a str, wasm: &'a [u8]) -> Result<Self, LinkError> {
        let mut part = Self {
            name,
            wasm,
            library: false,
            imports: Vec::new(),
            types: Default::default(),
            exports: Vec::new(),
            by_name: HashMap::new(),
            start: None,
            counts: Counts::default(),
            place: IndexSpaces::default(),
        };
        Validator::new_with_features(features())
            .validate_all(wasm)
            .and_then(|_| part.sections())
            .map_err(|error| LinkError::Invalid { what: format!("the module {name:?}"), error })?;
        Ok(part)
    }

    fn sections(&mut self) -> wasmparser::Result<()> {
        for payload in Parser::new(0).parse_all(self.wasm) {
            match payload? {
                Payload::TypeSection(section) => {
                    for group in section {
                        self.counts.types += group?.types().len() as u32;
                    }
                }
                Payload::ImportSection(section) => {
                    for import in section.into_imports() {
                        let import = import?;
                        self.types[kind_of(&import.ty)].push(import.ty);
                        let (from, name, ty) = (import.module, import.name, import.ty);
                        self.imports.push(Import { from, name, ty, of_host: false });
                    }
                }
                Payload::FunctionSection(section) => {
                    for ty in section {
                        self.types[0].push(TypeRef::Func(ty?));
                    }
                }
                Payload::TableSection(section) => {
                    for table in section {
                        self.types[1].push(TypeRef::Table(table?.ty));
                    }
                }
                Payload::MemorySection(section) => {
                    for memory in section {
                        self.types[2].push(TypeRef::Memory(memory?));
                    }
                }
                Payload::GlobalSection(section) => {
                    for global in section {
                        self.types[3].push(TypeRef::Global(global?.ty));
                    }
                }
                Payload::TagSection(section) => {
                    for tag in section {
                        self.types[4].push(TypeRef::Tag(tag?));
                    }
                }
                Payload::ExportSection(section) => {
                    for export in section {
                        let export = export?;
                        let (name, kind) = (export.name, kind(export.kind));
                        self.by_name.insert(name, self.exports.len());
                        self.exports.push(Export { name, kind, index: export.index });
                    }
                }
                Payload::StartSection { func, .. } => self.start = Some(func),
                Payload::ElementSection(section) => self.counts.elements = section.count(),
                Payload::DataSection(section) => self.counts.data = section.count(),
                _ => {}
            }
        }
        Ok(())
    }

    fn export(&self, name: &str) -> Option<&Export<'a>> {
        self.exports.get(*self.by_name.get(name)?)
    }

    /// The kind and index of an export in the whole.
    fn linked_index(&self, export: &Export<'_>) -> (usize, u32) {
        (export.kind, self.place.items[export.kind][export.index as usize])
    }

    /// Its code that runs as soon as it is made, in addition to its start function: the initialiser
    /// of a module that others follow.
    fn initializer(&self, last: bool) -> Option<u32> {
        let export = self.export(INITIALIZE).filter(|export| !last && export.kind == 0)?;
        Some(self.linked_index(export).1)
    }
}

/// The place of each module by its name. No two have one name.
fn by_name<'a>(parts: &[Part<'a>]) -> HashMap<&'a str, usize> {
    parts.iter().enumerate().map(|(at, part)| (part.name, at)).collect()
}

/// Says which imports are the host's.
fn of_host(parts: &mut [Part<'_>]) {
    let by_name = by_name(parts);
    for at in 0..parts.len() {
        let mut imports = std::mem::take(&mut parts[at].imports);
        for import in &mut imports {
            let from = by_name.get(import.from).map(|from| &parts[*from]);
            import.of_host =
                from.is_none_or(|from| from.library && from.export(import.name).is_none());
        }
        parts[at].imports = imports;
    }
}

/// Assigns indices in the whole: host imports first, then each module's own.
fn place(parts: &mut [Part<'_>]) -> Result<(), LinkError> {
    let mut next = [0; KINDS];
    for import in parts.iter().flat_map(|part| &part.imports).filter(|import| import.of_host) {
        next[kind_of(&import.ty)] += 1;
    }
    let by_name = by_name(parts);
    let (mut host, mut counts) = ([0; KINDS], Counts::default());
    for at in 0..parts.len() {
        let (before, rest) = parts.split_at_mut(at);
        let Some(part) = rest.first_mut() else { break };
        (part.place.types, part.place.elements, part.place.data) =
            (counts.types, counts.elements, counts.data);
        counts.types += part.counts.types;
        counts.elements += part.counts.elements;
        counts.data += part.counts.data;
        for Import { from, name, ty, of_host } in &part.imports {
            let kind = kind_of(ty);
            let index = if !of_host {
                let refused = |reason: &str| LinkError::Import {
                    module: part.name.to_owned(),
                    from: (*from).to_owned(),
                    name: (*name).to_owned(),
                    reason: reason.to_owned(),
                };
                let of = by_name.get(from).and_then(|of| before.get(*of));
                let of = of.ok_or_else(|| refused("that module does not come before it"))?;
                let export = of.export(name).ok_or_else(|| refused("there is no such export"))?;
                fits(&of.types[export.kind][export.index as usize], ty).map_err(|e| refused(&e))?;
                of.linked_index(export).1
            } else {
                host[kind] += 1;
                host[kind] - 1
            };
            part.place.items[kind].push(index);
        }
        for ((items, types), next) in part.place.items.iter_mut().zip(&part.types).zip(&mut next) {
            let own = (types.len() - items.len()) as u32;
            items.extend(*next..*next + own);
            *next += own;
        }
    }
    Ok(())
}

/// The sections of the whole.
#[derive(Default)]
struct LinkedSections {
    types: TypeSection,
    imports: ImportSection,
    functions: FunctionSection,
    tables: TableSection,
    memories: MemorySection,
    tags: TagSection,
    globals: GlobalSection,
    exports: ExportSection,
    elements: ElementSection,
    code: CodeSection,
    data: DataSection,
    names: BTreeMap<u32, String>,
    /// The instructions of instantiation, once a module other than the last runs anything.
    start: Vec<u8>,
}

type ReencodeResult = Result<(), wasm_encoder::reencode::Error>;

impl LinkedSections {
    /// Appends a module.
    fn add(&mut self, part: &mut Part<'_>) -> ReencodeResult {
        // If code has run already, data that must be present before any code is copied now.
        let late = !self.start.is_empty();
        let (mut elements, mut data) = (Vec::new(), Vec::new());
        let place = &mut part.place;
        for import in part.imports.iter().filter(|import| import.of_host) {
            self.imports.import(import.from, import.name, place.entity_type(import.ty)?);
        }
        for payload in Parser::new(0).parse_all(part.wasm) {
            match payload? {
                Payload::TypeSection(section) => {
                    place.parse_type_section(&mut self.types, section)?;
                }
                Payload::FunctionSection(section) => {
                    place.parse_function_section(&mut self.functions, section)?;
                }
                Payload::TableSection(section) => {
                    place.parse_table_section(&mut self.tables, section)?;
                }
                Payload::MemorySection(section) => {
                    place.parse_memory_section(&mut self.memories, section)?;
                }
                Payload::TagSection(section) => place.parse_tag_section(&mut self.tags, section)?,
                Payload::GlobalSection(section) => {
                    place.parse_global_section(&mut self.globals, section)?;
                }
                Payload::ElementSection(section) => {
                    for (index, element) in (0..).zip(section) {
                        let mut element = element?;
                        if late && let ElementKind::Active { .. } = element.kind {
                            let kind = std::mem::replace(&mut element.kind, ElementKind::Passive);
                            put_elements(place, index, kind, &element.items, &mut elements)?;
                        }
                        place.parse_element(&mut self.elements, element)?;
                    }
                }
                Payload::DataSection(section) => {
                    for (index, bytes) in (0..).zip(section) {
                        let mut bytes = bytes?;
                        if late && let DataKind::Active { .. } = bytes.kind {
                            let kind = std::mem::replace(&mut bytes.kind, DataKind::Passive);
                            put_data(place, index, kind, bytes.data.len(), &mut data)?;
                        }
                        place.parse_data(&mut self.data, bytes)?;
                    }
                }
                Payload::CodeSectionEntry(body) => {
                    place.parse_function_body(&mut self.code, body)?
                }
                Payload::CustomSection(section) => {
                    if let KnownCustom::Name(section) = section.as_known() {
                        // Unreadable names are left out.
                        for name in section.into_iter().flatten() {
                            let Name::Function(names) = name else { continue };
                            for name in names.into_iter().flatten() {
                                if let Some(index) = place.items[0].get(name.index as usize) {
                                    self.names.insert(*index, name.name.to_owned());
                                }
                            }
                        }
                    }
                }
                _ => {}
            }
        }
        self.start.extend(elements);
        self.start.extend(data);
        Ok(())
    }

    /// Has instantiation call a function.
    fn call(&mut self, function: u32) {
        InstructionSink::new(&mut self.start).call(function);
    }

    fn finish(mut self, functions: u32, start: Option<u32>) -> Vec<u8> {
        let start = match self.start.is_empty() {
            true => start,
            false => {
                let ty = self.types.len();
                self.types.ty().function([], []);
                self.functions.function(ty);
                let mut body = Function::new([]);
                body.raw(self.start.iter().copied());
                body.instructions().end();
                self.code.function(&body);
                Some(functions)
            }
        };
        let mut module = Module::new();
        module.section(&self.types).section(&self.imports).section(&self.functions);
        module.section(&self.tables).section(&self.memories);
        if !self.tags.is_empty() {
            module.section(&self.tags);
        }
        module.section(&self.globals).section(&self.exports);
        if let Some(function_index) = start {
            module.section(&StartSection { function_index });
        }
        module.section(&self.elements);
        if !self.data.is_empty() {
            module.section(&DataCountSection { count: self.data.len() });
        }
        module.section(&self.code).section(&self.data);
        let mut functions = NameMap::new();
        for (index, name) in &self.names {
            functions.append(*index, name);
        }
        let mut names = NameSection::new();
        names.functions(&functions);
        module.section(&names);
        module.finish()
    }
}

/// Instructions for the offset of a segment.
fn offset(place: &mut IndexSpaces, offset: ConstExpr<'_>, to: &mut Vec<u8>) -> ReencodeResult {
    let mut reader = offset.get_operators_reader();
    while !reader.is_end_then_eof() {
        place.parse_instruction(&mut reader)?.encode(to);
    }
    Ok(())
}

/// Instructions with the effect of an active element segment.
fn put_elements(
    place: &mut IndexSpaces,
    index: u32,
    kind: ElementKind<'_>,
    items: &ElementItems<'_>,
    to: &mut Vec<u8>,
) -> ReencodeResult {
    let ElementKind::Active { table_index, offset_expr } = kind else { return Ok(()) };
    let count = match items {
        ElementItems::Functions(items) => items.count(),
        ElementItems::Expressions(_, items) => items.count(),
    };
    offset(place, offset_expr, to)?;
    let table = place.table_index(table_index.unwrap_or(0))?;
    let segment = place.element_index(index)?;
    let mut sink = InstructionSink::new(to);
    sink.i32_const(0).i32_const(count.cast_signed()).table_init(table, segment).elem_drop(segment);
    Ok(())
}

/// Instructions with the effect of an active data segment.
fn put_data(
    place: &mut IndexSpaces,
    index: u32,
    kind: DataKind<'_>,
    len: usize,
    to: &mut Vec<u8>,
) -> ReencodeResult {
    let DataKind::Active { memory_index, offset_expr } = kind else { return Ok(()) };
    offset(place, offset_expr, to)?;
    let memory = place.memory_index(memory_index)?;
    let segment = place.data_index(index)?;
    let mut sink = InstructionSink::new(to);
    sink.i32_const(0).i32_const(len as i32).memory_init(memory, segment).data_drop(segment);
    Ok(())
}

/// The exports of the whole: all of the last module's, and those of the others that host functions
/// look for.
fn exports(parts: &[Part<'_>]) -> Result<ExportSection, LinkError> {
    let mut all: BTreeMap<Cow<'_, str>, (usize, u32)> = BTreeMap::new();
    let mut section = ExportSection::new();
    let asks_host = parts
        .iter()
        .flat_map(|part| &part.imports)
        .any(|import| import.of_host && kind_of(&import.ty) == 0);
    for (back, part) in parts.iter().rev().enumerate() {
        for export in &part.exports {
            let sought = export.kind == kind(ExternalKind::Memory)
                || names::ALLOCATORS.contains(&export.name)
                || export.name == names::BUFFER;
            if back > 0 && !(part.library || asks_host && sought) {
                continue;
            }
            let (kind, index) = part.linked_index(export);
            let name = match part.library {
                true => Cow::Owned(names::of_library(part.name, export.name)),
                false => Cow::Borrowed(export.name),
            };
            match all.insert(name.clone(), (kind, index)) {
                None => {
                    let kinds = [
                        ExportKind::Func,
                        ExportKind::Table,
                        ExportKind::Memory,
                        ExportKind::Global,
                        ExportKind::Tag,
                    ];
                    section.export(&name, kinds[kind], index);
                }
                Some(other) if other == (kind, index) => {}
                Some(_) => {
                    let (module, name) = (part.name.to_owned(), name.into_owned());
                    return Err(LinkError::Shadowed { module, name });
                }
            }
        }
    }
    Ok(section)
}

/// Makes one module of several, each with a name that later ones use to import from it. Imports of
/// other names stay.
///
/// # Errors
/// [`LinkError`], which names the module and its fault.
pub fn link(modules: &[(&str, &[u8])]) -> Result<Vec<u8>, LinkError> {
    link_all(modules, false)
}

/// As [`link`], over a library that host functions know and complete: imports by its name that it
/// does not export go to the host functions, which find all of its exports, its memories too, under
/// the names of [`names::of_library`].
///
/// # Errors
/// As [`link`].
pub fn link_over(library: (&str, &[u8]), modules: &[(&str, &[u8])]) -> Result<Vec<u8>, LinkError> {
    let all: Vec<_> = std::iter::once(library).chain(modules.iter().copied()).collect();
    link_all(&all, true)
}

fn link_all(modules: &[(&str, &[u8])], over_library: bool) -> Result<Vec<u8>, LinkError> {
    let linked: Vec<&str> = modules.iter().map(|(name, _)| *name).collect();
    let Some(last) = linked.last() else {
        return Err(LinkError::Names("there is no module to link".to_owned()));
    };
    let mut names = HashSet::with_capacity(linked.len());
    if let Some(name) = linked.iter().find(|name| !names.insert(**name)) {
        return Err(LinkError::Names(format!("two modules are called {name:?}")));
    }
    let mut parts = Vec::with_capacity(modules.len());
    for (name, wasm) in modules {
        let part = Part::parse(name, wasm)?;
        if name != last && part.export(COMMAND).is_some_and(|export| export.kind == 0) {
            return Err(LinkError::Command((*name).to_owned()));
        }
        parts.push(part);
    }
    if let Some(first) = parts.first_mut() {
        first.library = over_library;
    }
    of_host(&mut parts);
    place(&mut parts)?;
    let mut whole = LinkedSections { exports: exports(&parts)?, ..LinkedSections::default() };
    let count = parts.len();
    let mut start = None;
    for (at, part) in parts.iter_mut().enumerate() {
        whole.add(part).map_err(|error| LinkError::Encode {
            module: part.name.to_owned(),
            reason: error.to_string(),
        })?;
        let is_last = at + 1 == count;
        start = part.start.map(|function| part.place.items[0][function as usize]);
        if let Some(function) = start
            && (!is_last || !whole.start.is_empty())
        {
            whole.call(function);
        }
        if let Some(function) = part.initializer(is_last) {
            whole.call(function);
        }
    }
    let functions = parts.iter().flat_map(|part| part.place.items[0].iter().max()).max();
    let wasm = whole.finish(functions.map_or(0, |most| most + 1), start);
    Validator::new_with_features(features()).validate_all(&wasm).map_err(|error| {
        LinkError::Invalid { what: "what the modules make together".to_owned(), error }
    })?;
    Ok(wasm)
}
