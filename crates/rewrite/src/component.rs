//! The data segments of nested core modules.
//!
//! Each core module nested in the component, at any depth, loses its movable data segments; all
//! else stays byte for byte, and so does every index and every type.
//!
//! Which memory an engine makes when is not guessed from the text. A second component, the probe,
//! has the same modules, instances and types, but its code does nothing; each of its memories
//! begins with a unique mark. After instantiating the probe, a caller reads from each memory which
//! one it is ([`PreparedComponent::marked`]).

use wasm_encoder::{CodeSection, Component, ConstExpr, DataSection, Encode, Function, SectionId};
use wasmparser::{BinaryReader, DataKind, Parser};

use crate::analysis::{self, AnalyzeError, Memory, Roots};
use crate::bake::{BakeError, WarmState};
use crate::emit::Sections;
use crate::model::Model;
use crate::nesting::{InstancePath, Nesting};
use crate::prepare::{DataSegment, move_data};
use crate::reveal::{self, RevealedState};

/// Section ids of the component format.
pub(crate) const CORE_MODULE: u8 = 1;
pub(crate) const COMPONENT: u8 = 4;

/// The length of the magic number and version before the first section.
const HEADER: usize = 8;

/// How deep components may nest; a deeper one is refused rather than overflow the stack. Engines
/// stop at 100 as well.
pub(crate) const MAX_DEPTH: u32 = 100;

/// Why a component could not be prepared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareComponentError {
    /// The bytes are not a component.
    #[error("not a component; prepare a core module with `prepare`")]
    NotAComponent,
    /// The sections of the component cannot be parsed.
    #[error("not a valid component: {0}")]
    Invalid(#[from] wasmparser::Error),
    /// One of its core modules is not understood.
    #[error("core module {index} of the component: {source}")]
    Module {
        /// The module's place among the component's core modules, in the order of the binary.
        index: usize,
        /// The error.
        source: AnalyzeError,
    },
    /// Something is instantiated that the binary does not hold.
    #[error(
        "the component instantiates {what}, so that its state is not all the binary's own; compose it \
         into one binary"
    )]
    Unknown {
        /// What.
        what: &'static str,
    },
    /// An excessive number of core instances.
    #[error("the component makes more than 10000 instances")]
    TooManyInstances,
    /// A name reserved for added exports.
    #[error("the component exports {name:?}, which is reserved (is it prepared already?)")]
    Reserved {
        /// The name.
        name: String,
    },
    /// Components nested too deeply.
    #[error("components are nested more than {MAX_DEPTH} deep")]
    TooDeep,
}

/// One core module of a component.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NestedModule {
    /// Its memories, by index, imported ones included.
    pub memories: Vec<Memory>,
    /// Whether an instantiation does more than make the declared items: it runs a start function,
    /// or writes data that could not be moved.
    pub starts: bool,
    /// The data that left it, in the order it must be written.
    pub segments: Vec<DataSegment>,
}

/// A component without the data that the engine's images hold.
#[derive(Debug, Clone)]
pub struct PreparedComponent {
    /// The rewritten component.
    pub component: Vec<u8>,
    /// Its core modules in the order of the binary, a nested component's where it stands.
    pub modules: Vec<NestedModule>,
    /// The same component without code, data or start functions, every memory marked.
    pub probe: Vec<u8>,
}

impl PreparedComponent {
    /// Which memory of the probe begins with `mark`: the place of its module among the modules, and
    /// its index there. None for bytes that are not a mark.
    #[must_use]
    pub fn marked(&self, mark: [u8; MARK_BYTES]) -> Option<(usize, u32)> {
        let number = u64::from_le_bytes(mark);
        let (module, index) = ((number >> 32).checked_sub(1)? as usize, number as u32);
        let memory = self.modules.get(module)?.memories.get(index as usize)?;
        memory.has_mark().then_some((module, index))
    }
}

/// The length of the mark that a memory of the probe begins with.
pub const MARK_BYTES: usize = 8;

/// The mark of memory `index` of module number `module`.
fn mark(module: usize, index: u32) -> [u8; MARK_BYTES] {
    ((module as u64 + 1) << 32 | u64::from(index)).to_le_bytes()
}

impl Memory {
    /// Whether its memory in the probe is marked: an imported memory is not, nor is one that is too
    /// small.
    #[must_use]
    pub fn has_mark(&self) -> bool {
        let bytes = u128::from(self.minimum) << self.page_size_log2.min(64);
        !self.imported && !self.shared && bytes >= MARK_BYTES as u128
    }
}

/// Moves the data segments of every core module in a component out of it.
///
/// The component as a whole is left for the engine to validate.
///
/// # Errors
/// See [`PrepareComponentError`].
pub fn prepare_component(wasm: &[u8]) -> Result<PreparedComponent, PrepareComponentError> {
    if !Parser::is_component(wasm) {
        return Err(PrepareComponentError::NotAComponent);
    }
    let mut modules = Vec::new();
    let mut probes = Vec::new();
    let component = each_module(wasm, 0, &mut |contents| {
        let index = modules.len();
        let failed = |source| PrepareComponentError::Module { index, source };
        let model = Model::parse(contents).map_err(failed)?;
        let (module, nested) = rewrite_module(&model).map_err(failed)?;
        probes.push(
            probe_module(&model, index, &nested).map_err(|e| failed(AnalyzeError::Invalid(e)))?,
        );
        modules.push(nested);
        Ok(module)
    })?;
    let mut probes = probes.into_iter();
    let probe = each_module(wasm, 0, &mut |_| Ok(probes.next().unwrap_or_default()))?;
    Ok(PreparedComponent { component, modules, probe })
}

/// A component that shows the state of all its core instances.
#[derive(Debug, Clone)]
pub struct OpenComponent {
    /// The rewritten component; its modules lack the same data as those of [`PreparedComponent`].
    pub component: Vec<u8>,
    /// To every core instance with state that an instance of it has.
    pub ways: Vec<InstancePath>,
    revealed: Vec<RevealedState>,
}

impl OpenComponent {
    /// The number of core modules in the component.
    #[must_use]
    pub fn modules(&self) -> usize {
        self.revealed.len()
    }

    /// The state of an instance of core module `module`; `ask` calls the function that the way to
    /// it leads to. The inner error is the reason why no new instance could start with the state.
    ///
    /// # Errors
    /// Those of `ask`.
    pub fn state<E>(
        &self,
        module: usize,
        ask: impl FnMut(u32) -> Result<u64, E>,
    ) -> Result<Result<WarmState, String>, E> {
        match self.revealed.get(module) {
            Some(revealed) => revealed.state(ask),
            None => Ok(Err("there is no such module".to_owned())),
        }
    }
}

/// Makes a component show the state of its core instances, and moves their data out as
/// [`prepare_component`] does.
///
/// # Errors
/// See [`PrepareComponentError`].
pub fn open_component(wasm: &[u8]) -> Result<OpenComponent, PrepareComponentError> {
    if !Parser::is_component(wasm) {
        return Err(PrepareComponentError::NotAComponent);
    }
    let mut revealed = Vec::new();
    let (component, ways) = Nesting::open(wasm, &mut |contents| {
        let index = revealed.len();
        let failed = |source| PrepareComponentError::Module { index, source };
        let model = Model::parse(contents).map_err(failed)?;
        if let Some(name) = reveal::reserved(&model) {
            return Err(PrepareComponentError::Reserved { name: name.to_owned() });
        }
        let (module, _, shows) = reveal::reveal(&model).map_err(failed)?;
        let has_state = !shows.is_empty();
        revealed.push(shows);
        Ok((module, has_state))
    })?;
    Ok(OpenComponent { component, ways, revealed })
}

/// Writes the state of core modules, by their place in the binary, into the component. The modules
/// have no start functions any more and write no data: their memories' images hold all of it.
///
/// # Errors
/// [`BakeError`] when a state does not fit its module. The engine validates the result.
pub fn bake_component(wasm: &[u8], states: &[Option<WarmState>]) -> Result<Vec<u8>, BakeError> {
    let mut states = states.iter();
    let none = WarmState::default();
    let mut failed = None;
    let baked = each_module(wasm, 0, &mut |contents| {
        let state = states.next().and_then(Option::as_ref).unwrap_or(&none);
        let baked = Model::parse(contents)
            .map_err(BakeError::from)
            .and_then(|model| reveal::bake_nested(&model, state));
        baked.map_err(|error| {
            failed = Some(error);
            PrepareComponentError::NotAComponent
        })
    });
    baked.map_err(|error| match failed {
        Some(error) => error,
        None => BakeError::Mismatch(error.to_string()),
    })
}

/// Turns a core module into what takes its place.
type Replace<'a> = dyn FnMut(&[u8]) -> Result<Vec<u8>, PrepareComponentError> + 'a;

/// The component with `replace` applied to every core module.
fn each_module(
    wasm: &[u8],
    depth: u32,
    replace: &mut Replace<'_>,
) -> Result<Vec<u8>, PrepareComponentError> {
    each_section(wasm, depth, &mut |id, contents| match id {
        CORE_MODULE => replace(contents).map(Some),
        COMPONENT => each_module(contents, depth + 1, replace).map(Some),
        _ => Ok(None),
    })
}

/// Returns new contents of a section, from its id and its contents; `None` leaves it as it is.
type ReplaceSection<'a> =
    dyn FnMut(u8, &[u8]) -> Result<Option<Vec<u8>>, PrepareComponentError> + 'a;

/// One level of a component, `depth` components deep, with each section replaced.
pub(crate) fn each_section(
    wasm: &[u8],
    depth: u32,
    replace: &mut ReplaceSection<'_>,
) -> Result<Vec<u8>, PrepareComponentError> {
    if depth > MAX_DEPTH {
        return Err(PrepareComponentError::TooDeep);
    }
    let mut rewritten = Component::HEADER.to_vec();
    let mut reader = BinaryReader::new(wasm, 0);
    if reader.read_bytes(HEADER)? != Component::HEADER {
        return Err(PrepareComponentError::NotAComponent);
    }
    while !reader.eof() {
        let id = reader.read_u8()?;
        let size = reader.read_var_u32()?;
        let contents = reader.read_bytes(size as usize)?;
        rewritten.push(id);
        match replace(id, contents)? {
            Some(other) => other.as_slice().encode(&mut rewritten),
            None => contents.encode(&mut rewritten),
        }
    }
    Ok(rewritten)
}

fn rewrite_module(model: &Model<'_>) -> Result<(Vec<u8>, NestedModule), AnalyzeError> {
    let memories = analysis::of_model(model, &Roots::AllExports)?.memories;
    let mut sections = Sections::default();
    let segments = move_data(model, &mut sections).map_err(AnalyzeError::Invalid)?;
    let active = |data: &&wasmparser::Data<'_>| matches!(data.kind, DataKind::Active { .. });
    let starts = model.start.is_some() || model.data.iter().filter(active).count() > segments.len();
    let module = if segments.is_empty() { model.wasm.to_vec() } else { sections.finish(model) };
    Ok((module, NestedModule { memories, starts, segments }))
}

/// The module with the same imports, exports and types, in which nothing runs and nothing but marks
/// is written to memory.
fn probe_module(
    model: &Model<'_>,
    module: usize,
    nested: &NestedModule,
) -> wasmparser::Result<Vec<u8>> {
    let mut sections = Sections::default();
    sections.remove(SectionId::Start);
    sections.remove(SectionId::DataCount);
    let mut code = CodeSection::new();
    for _ in &model.bodies {
        let mut body = Function::new([]);
        body.instructions().unreachable().end();
        code.function(&body);
    }
    if !code.is_empty() {
        sections.replace(SectionId::Code, &code)?;
    }
    let mut data = DataSection::new();
    for (index, memory) in (0..).zip(&nested.memories).filter(|(_, memory)| memory.has_mark()) {
        let start = if memory.memory64 { ConstExpr::i64_const(0) } else { ConstExpr::i32_const(0) };
        data.active(index, &start, mark(module, index));
    }
    sections.replace(SectionId::Data, &data)?;
    Ok(sections.finish(model))
}
