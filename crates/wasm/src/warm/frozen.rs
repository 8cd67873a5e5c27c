//! A warm guest as pages and bytes: the contents of a snapshot.
//!
//! The pages are those of its module, so that a snapshot is all another machine needs, and then
//! those of its memories, one after the other, and those of its files. The bytes hold the length of
//! each, globals, tables, dropped segments, and everything of the file tree except the pages.
//!
//! Promises: a guest made from it starts in the frozen state, bit for bit. Data from elsewhere is
//! checked before it is used: sizes against the pages that are present, the module against its
//! digest, the state against the module.

use std::sync::{Arc, OnceLock};

use afresh_budget::{DecodeError, Decoder, MAX_DECODED, MAX_UNCHECKED};
use afresh_memory::{Image, ImageBuilder, PAGE_SIZE, PageRange, page_align_up};
use afresh_pager::{SnapshotContents, SnapshotMemory, SnapshotState};
use afresh_rewrite::WarmState;
use afresh_snapshot::SavedLayers;
use serde::{Deserialize, Serialize};

use crate::engine::MOST_STACK;
use crate::engine::linear::Shape;
use crate::host::files::{Files, SavedFiles};
use crate::host::table_bytes;
use crate::warm::instance_state::WarmMemory;
use crate::{Engine, FreezeError, ThawError, WarmError};

/// Maximum nanoseconds of a guest clock, so that additions to a reading fit: a century.
const MAX_CLOCK: u64 = 100 * 366 * 24 * 3600 * 1_000_000_000;

/// Comes before the files.
const FILES: &str = "files";

/// Prefix of the layers below the files.
const LAYERS: &str = "layers";

/// Prefix of the state of nested modules.
const NESTED: &str = "component";

/// Comes before the size of the native stack.
const STACK: &str = "stack";

/// A guest's own binary.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) digest: [u8; 32],
    bytes: usize,
    source: Source,
    /// Bytes of native stack that its engine allowed it, where that was more than usual.
    stack: Option<u64>,
    /// Its pages, made on first use and then shared, so that frequent saves do not make them again.
    pages: Arc<OnceLock<Image>>,
}

#[derive(Clone, Debug)]
enum Source {
    Bytes(Arc<[u8]>),
    Pages(Image),
}

impl Program {
    pub(crate) fn new(engine: &Engine, wasm: Arc<[u8]>) -> Self {
        Self {
            digest: *blake3::hash(&wasm).as_bytes(),
            bytes: wasm.len(),
            source: Source::Bytes(wasm),
            stack: engine.deep().then_some(engine.inner.config.stack as u64),
            pages: Arc::default(),
        }
    }

    /// The binary, checked against its digest.
    pub(crate) fn read(&self) -> Result<Vec<u8>, ThawError> {
        match &self.source {
            Source::Bytes(bytes) => Ok(bytes.to_vec()),
            Source::Pages(image) => {
                // Only these pages: the memories can wait.
                image.resolve(PageRange::new(0, image.pages())).map_err(ThawError::Image)?;
                let mut wasm = vec![0; self.bytes];
                image.read(0, &mut wasm);
                if blake3::hash(&wasm) != blake3::Hash::from(self.digest) {
                    return Err(ThawError::Program);
                }
                Ok(wasm)
            }
        }
    }

    fn image(&self) -> Result<Image, FreezeError> {
        match &self.source {
            Source::Pages(image) => Ok(image.clone()),
            Source::Bytes(bytes) => {
                if let Some(image) = self.pages.get() {
                    return Ok(image.clone());
                }
                let mut image = ImageBuilder::new(page_align_up(bytes.len()) / PAGE_SIZE);
                image.segment(0, bytes)?;
                let image = image.build()?;
                Ok(self.pages.get_or_init(|| image).clone())
            }
        }
    }
}

/// The bytes of a frozen guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Header {
    module: [u8; 32],
    module_bytes: u64,
    memories: Vec<(Shape, u64)>,
    state: WarmState,
}

/// All parts of the bytes of a frozen guest.
struct State {
    header: Header,
    read: u64,
    nested: Option<Vec<Option<WarmState>>>,
    layers: Option<SavedLayers>,
    files: Option<SavedFiles>,
    stack: Option<u64>,
}

impl State {
    fn decode(bytes: &[u8]) -> Result<Self, ThawError> {
        let broken = |e: DecodeError| ThawError::State(e.to_string());
        let mut decoder = Decoder::new(bytes, MAX_DECODED);
        let (header, read): (Header, u64) = decoder.decode().map_err(broken)?;
        // Components and guests with files have further parts.
        let (mut nested, mut files, mut stack) = (None, None::<SavedFiles>, None);
        let mut layers = None::<SavedLayers>;
        while !decoder.rest().is_empty() {
            let what: String = decoder.decode().map_err(broken)?;
            match what.as_str() {
                NESTED if nested.is_none() && files.is_none() => {
                    nested = Some(decoder.decode().map_err(broken)?);
                }
                LAYERS if layers.is_none() && files.is_none() => {
                    layers = Some(decoder.decode().map_err(broken)?);
                }
                FILES if files.is_none() => {
                    let saved: SavedFiles = decoder.decode().map_err(broken)?;
                    saved.check_descriptors(&mut decoder).map_err(broken)?;
                    files = Some(saved);
                }
                STACK if stack.is_none() => stack = Some(decoder.decode().map_err(broken)?),
                _ => {
                    return Err(ThawError::State("there are bytes after its end".to_owned()));
                }
            }
        }
        Ok(Self { header, read, nested, layers, files, stack })
    }
}

/// A frozen warm guest: its module, its memories and its files as pages, and the rest as bytes.
pub type Frozen = SnapshotContents<FrozenState>;

/// The state of a frozen guest apart from its pages.
#[derive(Clone, Debug)]
pub struct FrozenState {
    pub(crate) program: Program,
    pub(crate) memories: Vec<WarmMemory>,
    pub(crate) state: WarmState,
    /// An upper bound of the guest clock's readings.
    pub(crate) read: u64,
    /// The state of nested core modules, by their position in the binary, `None` for a module.
    pub(crate) nested: Option<Vec<Option<WarmState>>>,
    /// Its file tree and its open files, if it has one.
    pub(crate) files: Option<SavedFiles>,
}

impl SnapshotState for FrozenState {
    const KIND: &'static str = "wasm";
    /// The form of the bytes below. A golden of each version opens for ever.
    const ENGINE: &'static str = "afresh-wasm state 1";

    type FreezeCause = WarmError;
    type ThawCause = WarmError;

    fn program_digest(&self) -> [u8; 32] {
        self.program.digest
    }

    fn cpu_features(&self) -> Vec<String> {
        Vec::new()
    }

    fn host_cpu_features() -> Vec<String> {
        Vec::new()
    }

    fn encode(&self) -> Result<Vec<u8>, FreezeError> {
        let header = Header {
            module: self.program.digest,
            module_bytes: self.program.bytes as u64,
            memories: self.memories.iter().map(|m| (m.shape, m.bytes as u64)).collect(),
            state: self.state.clone(),
        };
        let failed = |e: postcard::Error| FreezeError::State(e.to_string());
        let mut encoded = postcard::to_allocvec(&(header, self.read)).map_err(failed)?;
        if let Some(nested) = &self.nested {
            encoded.extend(postcard::to_allocvec(&(NESTED, nested)).map_err(failed)?);
        }
        if let Some(layers) = self.files.as_ref().and_then(|files| files.layers.as_ref()) {
            encoded.extend(postcard::to_allocvec(&(LAYERS, layers.saved())).map_err(failed)?);
        }
        if let Some(files) = &self.files {
            encoded.extend(postcard::to_allocvec(&(FILES, files)).map_err(failed)?);
        }
        if let Some(stack) = &self.program.stack {
            encoded.extend(postcard::to_allocvec(&(STACK, stack)).map_err(failed)?);
        }
        // A reader would refuse it.
        if encoded.len() > MAX_UNCHECKED {
            State::decode(&encoded).map_err(|e| FreezeError::State(e.to_string()))?;
        }
        Ok(encoded)
    }

    fn decode(memory: &SnapshotMemory, bytes: &[u8]) -> Result<Self, ThawError> {
        let pages = memory.pages();
        let bad = |why: &str| ThawError::State(why.to_owned());
        let State { header, read, nested, layers, mut files, stack } = State::decode(bytes)?;
        if read > MAX_CLOCK {
            return Err(bad("its clock has run for longer than any machine"));
        }
        memory.limits().check_program(header.module_bytes)?;
        let mut from = 0;
        let mut part = |bytes: u64| {
            let len = usize::try_from(bytes)
                .ok()
                .filter(|len| *len <= pages.pages().saturating_mul(PAGE_SIZE))
                .map(|len| page_align_up(len) / PAGE_SIZE)
                .filter(|len| *len <= pages.pages() - from)?;
            from += len;
            Some(pages.slice(PageRange::new(from - len, len)))
        };
        let module =
            part(header.module_bytes).ok_or_else(|| bad("the module is outside its pages"))?;
        let program = Program {
            digest: header.module,
            bytes: header.module_bytes as usize,
            source: Source::Pages(module),
            stack,
            pages: Arc::default(),
        };
        let mut memories = Vec::new();
        for (shape, bytes) in &header.memories {
            let image = part(*bytes).ok_or_else(|| bad("a memory is outside its pages"))?;
            memories.push(WarmMemory { shape: *shape, image, bytes: *bytes as usize });
        }
        if header.state.memories.len() != memories.len() {
            return Err(bad("it has another number of memories than sizes"));
        }
        if let Some(layers) = layers {
            let files = files.as_mut().ok_or_else(|| bad("it has layers, and no files"))?;
            let image =
                part(layers.page_bytes()).ok_or_else(|| bad("a layer is outside its pages"))?;
            files.layers = Some(layers.take(image));
        }
        if let Some(files) = &mut files {
            let image =
                part(files.page_bytes()).ok_or_else(|| bad("a file is outside its pages"))?;
            files.take(&image).map_err(ThawError::Image)?;
        }
        Ok(Self { program, memories, state: header.state, read, nested, files })
    }
}

impl FrozenState {
    /// Joins the parts of a guest.
    pub(crate) fn join(
        program: Program,
        memories: Vec<WarmMemory>,
        state: WarmState,
        read: u64,
        nested: Option<Vec<Option<WarmState>>>,
        files: Option<&Files>,
    ) -> Result<Frozen, FreezeError> {
        let mut parts = vec![program.image()?];
        parts.extend(memories.iter().map(|m| m.image.clone()));
        let files = files.map(Files::save).transpose().map_err(FreezeError::State)?;
        if let Some(files) = &files {
            // Before the files' own pages, so that they stay where they are.
            parts.extend(files.layers.as_ref().map(|layers| layers.image().clone()));
            parts.push(files.image()?);
        }
        let memory = Image::join(&parts).into();
        let state = Self { program, memories, state, read, nested, files };
        Ok(Frozen::new(memory, state))
    }

    /// Whether it is a component, which [`crate::WarmComponent::thaw`] thaws; a module is for
    /// [`Warm::thaw`](crate::Warm::thaw).
    #[must_use]
    pub fn is_component(&self) -> bool {
        self.nested.is_some()
    }

    /// The native stack that its calls may take, if that is more than usual. Its engine needs the
    /// same value ([`crate::EngineConfig::stack`]), to find the compiled code and to run the same
    /// calls. In a stranger's snapshot the limit is that of a guest file.
    #[must_use]
    pub fn stack(&self) -> Option<usize> {
        Some(self.program.stack?.min(MOST_STACK) as usize)
    }

    /// The pages that hold the module. They are not needed if a cache has the module compiled.
    #[must_use]
    pub fn module_pages(&self) -> PageRange {
        PageRange::new(0, page_align_up(self.program.bytes) / PAGE_SIZE)
    }

    /// As [`Frozen::bytes`], without the time that its clock has come to: equal states have equal
    /// bytes, whenever they are frozen.
    ///
    /// # Errors
    /// As [`Frozen::bytes`].
    pub fn timeless_bytes(&self) -> Result<Vec<u8>, FreezeError> {
        Self { read: 0, ..self.clone() }.encode()
    }

    /// Refuses a frozen guest that is larger than calls may make it: `memory_limit` of the
    /// options is also the limit of a snapshot.
    ///
    /// # Errors
    /// [`ThawError::State`] with the sizes.
    pub(crate) fn check_limit(&self, memory_limit: usize) -> Result<(), ThawError> {
        let memories = self.memories.iter().map(|memory| memory.bytes);
        let states = self.nested.iter().flatten().flatten().chain([&self.state]);
        let tables =
            states.flat_map(|state| state.tables.values()).map(|table| table_bytes(table.len()));
        let bytes = memories.chain(tables).fold(0, usize::saturating_add);
        if bytes > memory_limit {
            return Err(ThawError::State(format!(
                "memories and tables of the snapshot take {bytes} bytes, and `memory_limit` allows {memory_limit}: raise \
                 the limit, or take a smaller snapshot"
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use afresh_budget::meter::{Meter, peak};
    use afresh_rewrite::WarmValue;

    use super::*;

    #[global_allocator]
    static METER: Meter = Meter;

    fn state_of(state: WarmState) -> Vec<u8> {
        let header = Header { module: [0; 32], module_bytes: 0, memories: Vec::new(), state };
        postcard::to_allocvec(&(header, 0_u64)).unwrap()
    }

    /// States whose bytes are worth the most memory: nested modules without a state, a table of
    /// null, empty tables, and modules with one entry in each map.
    fn hostile_states(items: u32) -> [Vec<u8>; 4] {
        let empty = (0..items).map(|table| (table, Vec::new())).collect();
        let full = BTreeMap::from([(0, vec![WarmValue::Null; items as usize])]);
        let with = |tables| state_of(WarmState { tables, ..WarmState::default() });
        let nested = |states: &[Option<WarmState>]| {
            let parts = postcard::to_allocvec(&(NESTED, states)).unwrap();
            [state_of(WarmState::default()), parts].concat()
        };
        let none = nested(&vec![None; items as usize]);
        let one = WarmState {
            memories: vec![0],
            globals: BTreeMap::from([(0, WarmValue::Null)]),
            tables: BTreeMap::from([(0, vec![WarmValue::Null])]),
            dropped_data: [0].into(),
            dropped_elements: [0].into(),
        };
        [none, with(full), with(empty), nested(&vec![Some(one); items as usize / 16])]
    }

    #[test]
    fn a_hostile_state_is_refused_before_it_takes_the_memory() {
        for (kind, bytes) in hostile_states(MAX_UNCHECKED as u32 / 32).iter().enumerate() {
            assert!(bytes.len() <= MAX_UNCHECKED);
            let (state, taken) = peak(|| State::decode(bytes));
            let (times, len) = (taken / bytes.len(), bytes.len());
            println!("{kind}: {len} bytes become {taken}, {times} times as many");
            assert!(state.is_ok() && taken <= len * (MAX_DECODED / MAX_UNCHECKED));
        }
        let [bytes, ..] = hostile_states(3 << 20);
        let (state, taken) = peak(|| State::decode(&bytes).map(drop));
        println!("{} bytes: {state:?}, {taken} taken", bytes.len());
        assert!(taken <= MAX_DECODED);
        let error = state.unwrap_err().to_string();
        assert!(error.contains("takes more than"), "{error}");
    }

    #[test]
    fn the_parts_of_a_state_share_a_limit() {
        let [nested, ..] = hostile_states(800_000);
        let [_, table, ..] = hostile_states(3_000_000);
        assert!(State::decode(&nested).is_ok() && State::decode(&table).is_ok());
        // The state of the first is empty.
        let rest = &nested[state_of(WarmState::default()).len()..];
        let both = [&table, rest].concat();
        let (state, taken) = peak(|| State::decode(&both).map(drop));
        let error = state.unwrap_err().to_string();
        assert!(error.contains("takes more than") && taken <= MAX_DECODED, "{error}: {taken}");
    }

    #[test]
    fn a_program_of_terabytes_of_zeros_is_refused_before_it_is_read() {
        let header = Header {
            module: [0; 32],
            module_bytes: 8 << 40,
            memories: Vec::new(),
            state: WarmState::default(),
        };
        let bytes = postcard::to_allocvec(&(header, 0_u64)).unwrap();
        let memory = SnapshotMemory::from(Image::zero(1 << 32));
        let error = Frozen::from_parts(memory, &bytes).unwrap_err().to_string();
        assert!(error.contains("--limit program=SIZE"), "{error}");
    }
}
