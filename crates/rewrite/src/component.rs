//! The data segments of a component's modules.
//!
//! Each core module nested in the component, at any depth, loses its movable data segments; all
//! else stays byte for byte, and so does every index and every type.

use wasm_encoder::{Component, Encode};
use wasmparser::{BinaryReader, Parser};

use crate::analysis::{self, AnalyzeError, Memory, Roots};
use crate::emit::Sections;
use crate::model::Model;
use crate::order;
use crate::prepare::{DataSegment, move_data};

/// Section ids of the component format.
const CORE_MODULE: u8 = 1;
const COMPONENT: u8 = 4;

/// The length of the magic number and version before the first section.
const HEADER: usize = 8;

/// How deep components may nest; a deeper one is refused rather than overflow the stack. Engines
/// stop at 100 as well.
const MAX_DEPTH: u32 = 100;

/// Why a component could not be prepared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareComponentError {
    /// The bytes are not a component.
    #[error("not a component; prepare a core module with `prepare`")]
    NotAComponent,
    /// The component's sections cannot be told apart.
    #[error("not a valid component: {0}")]
    Invalid(#[from] wasmparser::Error),
    /// One of its core modules is not understood.
    #[error("core module {index} of the component: {source}")]
    Module {
        /// The module's place among the component's core modules, in the order of the binary.
        index: usize,
        /// What is wrong with it.
        source: AnalyzeError,
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
    /// Which of `modules` an instantiation instantiates, in order; none where that hangs on
    /// imports or on nested components.
    pub instantiations: Option<Vec<usize>>,
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
    let component = rewrite(wasm, &mut modules, 0)?;
    let instantiations = order::instantiations(wasm)?;
    Ok(PreparedComponent { component, modules, instantiations })
}

fn rewrite(
    wasm: &[u8],
    modules: &mut Vec<NestedModule>,
    depth: u32,
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
        match id {
            CORE_MODULE => {
                let index = modules.len();
                let (module, nested) = rewrite_module(contents)
                    .map_err(|source| PrepareComponentError::Module { index, source })?;
                modules.push(nested);
                module.as_slice().encode(&mut rewritten);
            }
            COMPONENT => {
                rewrite(contents, modules, depth + 1)?.as_slice().encode(&mut rewritten);
            }
            _ => contents.encode(&mut rewritten),
        }
    }
    Ok(rewritten)
}

fn rewrite_module(wasm: &[u8]) -> Result<(Vec<u8>, NestedModule), AnalyzeError> {
    let model = Model::parse(wasm)?;
    let memories = analysis::of_model(&model, &Roots::AllExports)?.memories;
    let mut sections = Sections::default();
    let segments = move_data(&model, &mut sections).map_err(AnalyzeError::Invalid)?;
    let module = if segments.is_empty() { wasm.to_vec() } else { sections.finish(&model) };
    Ok((module, NestedModule { memories, segments }))
}
