//! A warm program as pages and bytes, as a snapshot holds it.
//!
//! The pages are those of the image that it stands on, if it does, those of its memory, and those
//! of the files that it wrote. The bytes are the rest: the layout of that memory, registers,
//! descriptors, signals. Granted host files are in neither: the reader of the snapshot grants them
//! again, and those that the program has open must not have changed.
//!
//! Promises: every instance starts in the frozen state, bit for bit; nothing in the bytes reaches
//! the host but through checks, and no host path is opened that the caller did not grant.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use afresh_budget::{DecodeError, Decoder, Encoder, MAX_DECODED};
use afresh_files::Node;
use afresh_memory::{Image, ImageBuilder, ImageError, PAGE_SIZE, PageRange};
use afresh_pager::{Options, SnapshotContents, SnapshotMemory, SnapshotState};
use afresh_snapshot::{LayerImage, SavedLayers};
use afresh_store::{Snapshot, host_cpu_features};
use serde::{Deserialize, Serialize};

use crate::base::Base;
use crate::error::{CallError, FreezeError, Incompatible, ThawError};
use crate::frozen_state::{FrozenMemory, FrozenState, IdleWait, MemoryPart, unstored_shares};
use crate::instance::Instance;
use crate::platform::{HostTraits, MappedMemory, Registers, Segment, Segments};
use crate::program::Program;
use crate::sentry::{
    Kernel, Layout, PROCESSES, PackedAdditions, PackedKernel, StoppedClock, damaged,
};
use crate::session::ProgramState;
use crate::warm::Warm;

/// The version of the state: the form of the bytes below, and that of the stub. Goes up when either
/// changes in a way that older states do not survive.
const ENGINE: &str = "afresh-linux state 19";
/// The versions before. States of 11 have no [`PackedAdditions`] behind their header, and those of
/// 12 no numbers of processes behind these. Text of 13 has no jumps to the code inside. In states
/// of 14 the inode numbers of host files follow from their paths, and files have none behind them.
/// Those of 15 have no users behind the numbers of processes: the guest is user 1000. In those of
/// 16 reserved addresses have pages, and no root directories are behind the users. Those of 17 have
/// no files of waiting calls behind the root directories, and those of 18 no [`PackedExtensions`]
/// behind these.
const ENGINES_BEFORE: [&str; 8] = [
    "afresh-linux state 11",
    "afresh-linux state 12",
    "afresh-linux state 13",
    "afresh-linux state 14",
    "afresh-linux state 15",
    "afresh-linux state 16",
    "afresh-linux state 17",
    "afresh-linux state 18",
];

/// Delay before untouched pages are loaded: a first answer needs few of them, and the CPU itself.
const HEAD_START: Duration = Duration::from_millis(10);

/// The bytes of a frozen program.
#[derive(Serialize, Deserialize)]
struct Header {
    /// The image below it, whose pages come first: their places never change while it is saved turn
    /// by turn.
    layers: Option<SavedLayers>,
    /// Its memories, whose pages follow each other.
    parts: Vec<PackedPart>,
    wait: IdleWait,
    /// Its clocks, in whose time all moments of the state are.
    clock: StoppedClock,
    state: PackedKernel,
    /// Properties of kernel and processor that it depends on, in addition to the features of the
    /// build.
    seen: HostTraits,
    /// Bytes of the files that it has written, in pages after those of its memory.
    files: u64,
}

/// A [`MemoryPart`] that is written down.
#[derive(Serialize, Deserialize)]
struct PackedPart {
    memory: u32,
    holds: u32,
    segments: Vec<Segment>,
    /// Pages of its image.
    pages: u64,
    registers: Registers,
    /// Parts of shared files in which older versions had other bytes in memory. The tree has the
    /// right ones.
    behind: BTreeMap<Node, Vec<Range<u64>>>,
}

impl PackedPart {
    fn new(part: &MemoryPart) -> Self {
        Self {
            memory: part.memory,
            holds: part.holds,
            segments: part.segments.iter().copied().collect(),
            pages: part.segments.pages() as u64,
            registers: part.registers.clone(),
            behind: BTreeMap::new(),
        }
    }

    /// The part and its image, whose pages are the first of `left`, which then has the others.
    fn open(self, left: &mut Image) -> Result<FrozenMemory, ThawError> {
        let pages = usize::try_from(self.pages).ok().filter(|pages| *pages <= left.pages());
        let pages = pages.ok_or_else(|| damaged("it has fewer pages than its memories"))?;
        let image = left.slice(PageRange::new(0, pages));
        *left = left.slice(PageRange::new(pages, left.pages() - pages));
        let segments = Segments::checked(self.segments, pages).map_err(damaged)?;
        let Self { memory, holds, registers, .. } = self;
        let part = MemoryPart { memory, holds, segments, registers };
        Ok(FrozenMemory { image, part: Arc::new(part) })
    }
}

/// Maximum bytes that describe files, without their content.
const DESCRIPTIONS: u64 = 64 << 20;

/// The parts of a frozen program's bytes, which share a limit of memory; those of older versions
/// end with an earlier part.
fn read_parts(decoder: &mut Decoder<'_>) -> Result<(Header, PackedAdditions), DecodeError> {
    let (header, mut additions) = (decoder.decode()?, PackedAdditions::default());
    if !decoder.rest().is_empty() {
        additions = decoder.decode()?;
    }
    if !decoder.rest().is_empty() {
        additions.tunables = decoder.decode()?;
    }
    if !decoder.rest().is_empty() {
        additions.users = decoder.decode()?;
    }
    if !decoder.rest().is_empty() {
        additions.roots = decoder.decode()?;
    }
    if !decoder.rest().is_empty() {
        additions.held = decoder.decode()?;
    }
    if !decoder.rest().is_empty() {
        additions.extensions = decoder.decode()?;
    }
    match decoder.rest() {
        [] => Ok((header, additions)),
        _ => Err(DecodeError::Malformed("there are bytes after its end".to_owned())),
    }
}

fn read_header(bytes: &[u8]) -> Result<(Header, PackedAdditions), ThawError> {
    let parts = read_parts(&mut Decoder::new(bytes, MAX_DECODED));
    parts.map_err(|error| ThawError::State(error.to_string()))
}

/// A frozen program: its memory and the files that it wrote as pages, and the rest as bytes.
pub type Frozen = SnapshotContents<PackedProgram>;

/// The state of a frozen program apart from its pages. Thawing decodes and checks it.
#[derive(Clone, Debug)]
pub struct PackedProgram {
    bytes: Arc<[u8]>,
}

fn frozen(standing: &FrozenState) -> Result<Frozen, FreezeError> {
    let rest = &standing.rest;
    // A reader would refuse others.
    let parts: Vec<_> = rest.parts.iter().map(|part| &**part).collect();
    let placed = |part: &&MemoryPart| {
        let segments = &part.segments;
        Segments::checked(segments.iter().copied().collect(), segments.pages()).map(drop)
    };
    rest.clock
        .check()
        .and_then(|()| parts.iter().try_for_each(placed))
        .and_then(|()| check_memories(&parts, &rest.state, &rest.live))
        .map_err(|what| FreezeError::State(what.to_owned()))?;
    let (state, additions, files) = rest.state.pack()?;
    let described = (files.len() as u64).saturating_sub(rest.state.tree.budget().bytes);
    if described > DESCRIPTIONS {
        return Err(FreezeError::State(format!(
            "its files take {described} bytes more than its storage limit, and their names and \
             attributes may take {DESCRIPTIONS}: remove files"
        )));
    }
    let mut pages = ImageBuilder::new(files.len().div_ceil(PAGE_SIZE));
    let stored = |error: ImageError| FreezeError::State(error.to_string());
    let pages = pages.segment(0, &files).map(drop).and_then(|()| pages.build()).map_err(stored)?;
    let kept = |base: &Arc<Base>| base.layer_image().map_err(|e| FreezeError::State(e.to_string()));
    let layers = rest.state.base.as_ref().map(kept).transpose()?;
    let header = Header {
        layers: layers.as_ref().map(LayerImage::saved),
        parts: rest.parts.iter().map(|part| PackedPart::new(part)).collect(),
        wait: rest.wait,
        clock: rest.clock,
        state,
        seen: HostTraits::here(),
        files: files.len() as u64,
    };
    // A reader would refuse others.
    let unwritten = |error: DecodeError| FreezeError::State(error.to_string());
    let mut encoder = Encoder::default();
    encoder.encode(&header).map_err(unwritten)?;
    encoder.encode(&additions).map_err(unwritten)?;
    encoder.encode(&additions.tunables).map_err(unwritten)?;
    encoder.encode(&additions.users).map_err(unwritten)?;
    encoder.encode(&additions.roots).map_err(unwritten)?;
    encoder.encode(&additions.held).map_err(unwritten)?;
    encoder.encode(&additions.extensions).map_err(unwritten)?;
    let bytes = encoder.finish(|decoder| read_parts(decoder).map(drop)).map_err(unwritten)?;
    let below = layers.iter().map(LayerImage::image);
    let images: Vec<_> = below.chain(standing.images.iter()).chain([&pages]).cloned().collect();
    let memory = Image::join(&images).into();
    Ok(Frozen::new(memory, PackedProgram { bytes: bytes.into() }))
}

impl Warm {
    /// The warm state, to be saved or thawed elsewhere. Shares the memory.
    ///
    /// # Errors
    /// [`FreezeError::State`] when it cannot be written down.
    pub fn freeze(&self) -> Result<Frozen, FreezeError> {
        frozen(&self.standing)
    }

    /// A state of sessions of this program, to be saved. Shares the memory.
    ///
    /// # Errors
    /// [`FreezeError::State`] when it cannot be written down.
    pub fn freeze_state(
        state: &afresh_snapshot::Frozen<ProgramState>,
    ) -> Result<Frozen, FreezeError> {
        let standing = crate::session::standing(state);
        frozen(&standing.map_err(|e| FreezeError::State(e.to_string()))?)
    }

    /// A state of sessions out of `frozen`; `program` as for [`Warm::thaw`].
    ///
    /// # Errors
    /// [`ThawError`].
    pub fn thaw_state(
        frozen: &Frozen,
        program: &Program,
    ) -> Result<afresh_snapshot::Frozen<ProgramState>, ThawError> {
        Ok(Self::thaw(frozen, program)?.state())
    }

    /// A warm program in the state of `frozen`. `program` defines the readable host files, and the
    /// limits of memory, storage and calls; its own file and arguments are ignored.
    ///
    /// # Errors
    /// [`ThawError`].
    pub fn thaw(frozen: &Frozen, program: &Program) -> Result<Self, ThawError> {
        let (header, additions) = read_header(&frozen.bytes)?;
        header.seen.check().map_err(|what| Incompatible::Host { what })?;
        let all = frozen.memory().pages();
        let behind = usize::try_from(header.files.div_ceil(PAGE_SIZE as u64));
        let own = behind.ok().and_then(|behind| all.pages().checked_sub(behind));
        let own = own.ok_or_else(|| damaged("its files are longer than its pages"))?;
        let below = header.layers.map_or(0, |saved| saved.page_bytes()) / PAGE_SIZE as u64;
        let below = usize::try_from(below).ok().filter(|below| *below <= own);
        let below = below.ok_or_else(|| damaged("its layers are longer than its pages"))?;
        let base = header.layers.map(|saved| {
            Base::thawed(saved.take(all.slice(PageRange::new(0, below)))).map(Arc::new)
        });
        let base = base.transpose().map_err(|e| damaged(&e.to_string()))?;
        let mut left = all.slice(PageRange::new(below, own - below));
        let written = all.slice(PageRange::new(own, all.pages() - own));
        // Pages that a snapshot does not store would cost memory all the same.
        let opener = program.opener();
        if header.files > opener.storage.bytes.saturating_add(DESCRIPTIONS) {
            let limit = opener.storage.bytes;
            let (what, way_out) = ("storage", "storage_limit");
            return Err(Incompatible::Limit { what, needed: header.files, limit, way_out }.into());
        }
        let there = written.resolve(PageRange::new(0, written.pages()));
        there.map_err(ThawError::Image)?;
        let mut files = vec![0; header.files as usize];
        written.read(0, &mut files);
        if header.parts.len() > PROCESSES {
            return Err(damaged("it has more memories than processes may be"));
        }
        header.clock.check().map_err(damaged)?;
        let mut state = Kernel::unpack(header.state, additions, &files, base, &opener)?;
        let mut live = state.writable_shares();
        live.extend(header.parts.iter().flat_map(|part| part.behind.keys().copied()));
        let parts = header.parts.into_iter().map(|part| part.open(&mut left));
        let mut grounds = parts.collect::<Result<Vec<_>, _>>()?;
        if grounds.len() != state.memories().len() {
            return Err(damaged("its memories are not its processes'"));
        }
        let unstored = grounds.iter().zip(state.memories());
        live.extend(
            unstored
                .flat_map(|(ground, (_, layout))| unstored_shares(&ground.part.segments, layout)),
        );
        let (needed, limit) = (state.count_thawed(&live), opener.memory);
        if needed > limit {
            let (what, way_out) = ("memory", "memory_limit");
            return Err(Incompatible::Limit { what, needed, limit, way_out }.into());
        }
        // Older versions stored shared memory with each process.
        grounds = grounds
            .into_iter()
            .zip(state.memories())
            .map(|(ground, (_, layout))| ground.without_shares(layout, &live))
            .collect();
        let parts: Vec<_> = grounds.iter().map(|ground| &*ground.part).collect();
        if left.pages() > 0 {
            return Err(damaged("it has more pages than its memories"));
        }
        check_memories(&parts, &state, &live).map_err(damaged)?;
        program.renew_trust(&mut state.tree)?;
        let standing = FrozenState::new(grounds, Arc::new(state), header.wait, header.clock);
        Ok(Self::new(standing, program.limits(), std::collections::BTreeMap::new()))
    }
}

impl Instance {
    /// The present state, including effects of calls, to be saved or thawed elsewhere. The instance
    /// is unchanged.
    ///
    /// # Errors
    /// [`FreezeError`].
    pub fn freeze(&mut self) -> Result<Frozen, FreezeError> {
        let standing = self.freeze_standing().map_err(FreezeError::Guest)?;
        frozen(&standing)
    }
}

/// The first error of memories that a kernel state does not fit, if any; segments have no shared
/// mappings of the files `live`.
fn check_memories(
    parts: &[&MemoryPart],
    state: &Kernel,
    live: &BTreeSet<Node>,
) -> Result<(), &'static str> {
    parts.iter().try_for_each(|part| part.registers.check())?;
    state.check_contexts(parts)?;
    let mapped = |(part, (_, layout)): (&&MemoryPart, (u32, &Layout))| {
        let segments = part.segments.iter().map(|s| (s.start, s.len, s.protection));
        let own = || layout.own_mappings(live);
        // Reserved addresses had pages in older versions.
        let mut stored = own().filter(|mapping| !mapping.reserved);
        let parts = |mapping: MappedMemory| part.segments.within(mapping.range());
        stored.all(|mapping| parts(mapping).all(|part| part.has_pages()))
            && same_mappings(own().map(|m| (m.start, m.len, m.protection)), segments)
    };
    if parts.iter().zip(state.memories()).all(mapped) {
        Ok(())
    } else {
        Err("its memory is not what it has mapped")
    }
}

/// Whether both lists cover the same addresses with the same protection, however they are cut.
fn same_mappings(
    one: impl Iterator<Item = (u64, u64, u64)>,
    other: impl Iterator<Item = (u64, u64, u64)>,
) -> bool {
    let ends = |list: &mut dyn Iterator<Item = (u64, u64, u64)>| {
        let mut joined: Vec<(u64, u64, u64)> = Vec::new();
        for (start, len, protection) in list {
            match joined.last_mut() {
                Some(last) if last.1 == start && last.2 == protection => last.1 += len,
                _ => joined.push((start, start + len, protection)),
            }
        }
        joined
    };
    ends(&mut { one }) == ends(&mut { other })
}

impl SnapshotState for PackedProgram {
    const KIND: &'static str = "linux";
    const ENGINE: &'static str = ENGINE;
    const OLDER_ENGINES: &'static [&'static str] = &ENGINES_BEFORE;
    /// The program is in guest memory, and the digest is that of the first state.
    const INCLUDES_PROGRAM: bool = false;

    type FreezeCause = CallError;
    type ThawCause = Incompatible;

    fn program_digest(&self) -> [u8; 32] {
        *blake3::hash(&self.bytes).as_bytes()
    }

    /// This host's, for the program may have detected them and acted upon it.
    fn cpu_features(&self) -> Vec<String> {
        host_cpu_features()
    }

    fn host_cpu_features() -> Vec<String> {
        host_cpu_features()
    }

    fn encode(&self) -> Result<Vec<u8>, FreezeError> {
        Ok(self.bytes.to_vec())
    }

    fn decode(_: &SnapshotMemory, bytes: &[u8]) -> Result<Self, ThawError> {
        Ok(Self { bytes: bytes.into() })
    }

    /// Requests remote pages early, and leaves the CPU to the first answer otherwise.
    fn load_options(snapshot: &Snapshot, options: &Options) -> Options {
        let delay =
            if snapshot.is_distant() { options.delay } else { options.delay.max(HEAD_START) };
        Options { delay, ..options.clone() }
    }
}

#[cfg(test)]
mod golden;
#[cfg(test)]
mod hostile;
