//! A warm program as pages and bytes: what a snapshot holds of it.
//!
//! The pages are those of its memory, and then those of the files that it wrote. The bytes are all the rest: where that memory
//! lies, registers, descriptors, signals. Files of the host's that it was granted are in neither: they are granted again by whoever opens
//! the snapshot, and those that the program has open must not have changed.
//!
//! Promises: what was frozen is what every instance starts with, bit for bit; nothing in the bytes reaches the host but through
//! checks, and no host path is opened that the caller did not grant.

use std::sync::Arc;
use std::time::Duration;

use afresh_memory::{Image, ImageBuilder, ImageError, PAGE_SIZE, PageRange};
use afresh_pager::{Options, RestoreError, SnapshotMemory, SnapshotOptions};
use afresh_store::{GuestBuild, Sha256, Snapshot, Store, host_cpu_features};
use serde::{Deserialize, Serialize};

use crate::error::{FreezeError, Misfit, ThawError};
use crate::instance::Instance;
use crate::personality::{Packed, State, damaged};
use crate::platform::{Registers, Seen, Segment, Segments};
use crate::program::Program;
use crate::session::ProgramState;
use crate::standing::{Rest, Standing, Wait};
use crate::warm::Warm;

/// Kind of guest, in snapshots.
const KIND: &str = "linux";
/// What gives the state its meaning: the form of the bytes below, and the stub's. Goes up when either changes in a way that
/// older states do not survive.
const ENGINE: &str = "afresh-linux state 3";

/// How long what nobody has asked for yet stays in its file: a first answer needs little of it, and the processor itself.
const HEAD_START: Duration = Duration::from_millis(10);

/// The bytes of a frozen program.
#[derive(Serialize, Deserialize)]
struct Header {
    segments: Vec<Segment>,
    registers: Registers,
    wait: Wait,
    state: Packed,
    /// What of kernel and processor it has seen, beside the features that the build lists.
    seen: Seen,
    /// Bytes of the files that it has written, in pages of their own behind those of its memory.
    files: u64,
}

/// A frozen program. Cheap to clone; it shares the memory of the guest it came from.
#[derive(Clone, Debug)]
pub struct Frozen {
    memory: SnapshotMemory,
    bytes: Arc<[u8]>,
}

fn frozen(standing: &Standing) -> Result<Frozen, FreezeError> {
    let rest = &standing.rest;
    let (state, files) = rest.state.pack()?;
    let mut pages = ImageBuilder::new(files.len().div_ceil(PAGE_SIZE));
    let stored = |error: ImageError| FreezeError::State(error.to_string());
    let pages = pages.segment(0, &files).map(drop).and_then(|()| pages.build()).map_err(stored)?;
    let header = Header {
        segments: rest.segments.iter().copied().collect(),
        registers: rest.registers.clone(),
        wait: rest.wait,
        state,
        seen: Seen::here(),
        files: files.len() as u64,
    };
    let bytes = postcard::to_allocvec(&header).map_err(|e| FreezeError::State(e.to_string()))?;
    let memory = Image::join(&[standing.image.clone(), pages]).into();
    Ok(Frozen { memory, bytes: bytes.into() })
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

    /// A warm program in the state of `frozen`. `program` says what may be read of the host and which limits calls have; its
    /// own file and arguments mean nothing.
    ///
    /// # Errors
    /// [`ThawError`].
    pub fn thaw(frozen: &Frozen, program: &Program) -> Result<Self, ThawError> {
        let (header, left): (Header, _) = postcard::take_from_bytes(&frozen.bytes)
            .map_err(|e| ThawError::State(e.to_string()))?;
        if !left.is_empty() {
            return Err(damaged("there are bytes after its end"));
        }
        header.seen.check().map_err(|what| Misfit::Host { what })?;
        let all = frozen.memory.pages();
        let behind = usize::try_from(header.files.div_ceil(PAGE_SIZE as u64));
        let own = behind.ok().and_then(|behind| all.pages().checked_sub(behind));
        let own = own.ok_or_else(|| damaged("its files are longer than its pages"))?;
        let image = all.slice(PageRange::new(0, own));
        let written = all.slice(PageRange::new(own, all.pages() - own));
        let there = written.resolve(PageRange::new(0, written.pages()));
        there.map_err(ThawError::Image)?;
        let mut files = vec![0; header.files as usize];
        written.read(0, &mut files);
        let segments = Segments::checked(header.segments, image.pages()).map_err(damaged)?;
        header.registers.check().map_err(damaged)?;
        let state = State::unpack(header.state, &files, &program.all_granted())?;
        let mapped = state.layout.mappings();
        if !same_mappings(mapped, segments.iter().map(|s| (s.start, s.len, s.protection))) {
            return Err(damaged("its memory is not what it has mapped"));
        }
        state.check_contexts(&header.registers).map_err(damaged)?;
        let (state, registers, wait) = (Arc::new(state), header.registers, header.wait);
        let rest = Arc::new(Rest { segments, state, registers, wait });
        let standing = Standing { image, rest };
        Ok(Self::new(standing, program.limits(), std::collections::BTreeMap::new()))
    }
}

impl Instance {
    /// The present state, to be saved or thawed elsewhere, what calls have left included. The instance stays as it is.
    ///
    /// # Errors
    /// [`FreezeError`].
    pub fn freeze(&mut self) -> Result<Frozen, FreezeError> {
        let standing = self.freeze_standing().map_err(FreezeError::Guest)?;
        frozen(&standing)
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

impl Frozen {
    /// The pages.
    #[must_use]
    pub fn memory(&self) -> &SnapshotMemory {
        &self.memory
    }

    /// The pages as an image: its memory, and then the files that it wrote.
    #[must_use]
    pub fn image(&self) -> &Image {
        self.memory.pages()
    }

    /// The guest build that a snapshot of it belongs to. The processor's features are this host's, for the program may have
    /// detected them and acted upon it.
    #[must_use]
    pub fn build(&self) -> GuestBuild {
        GuestBuild {
            kind: KIND.to_owned(),
            module: format!("blake3:{}", blake3::hash(&self.bytes).to_hex()),
            engine: ENGINE.to_owned(),
            cpu: host_cpu_features(),
        }
    }

    /// Everything but the pages, in a form of this crate's own.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The same guest with other pages and bytes, which are checked when it is thawed.
    #[must_use]
    pub fn from_parts(memory: SnapshotMemory, bytes: &[u8]) -> Self {
        Self { memory, bytes: bytes.into() }
    }

    /// Saves it under `name`.
    ///
    /// # Errors
    /// [`FreezeError`]; the name means then what it meant before.
    pub fn save(
        &self,
        store: &Store,
        name: &str,
        with: &SnapshotOptions,
    ) -> Result<Sha256, FreezeError> {
        Ok(self.memory.save(store, name, self.build(), self.bytes.to_vec(), with)?)
    }

    /// Opens a snapshot, lazily: see [`SnapshotMemory::load`].
    ///
    /// # Errors
    /// [`ThawError`]: a snapshot of another kind of guest or for a processor with more features, a damaged one, or no memory for
    /// it.
    pub fn load(snapshot: Snapshot, options: &Options) -> Result<Self, ThawError> {
        // What is far away cannot be begun too early.
        let delay =
            if snapshot.is_distant() { options.delay } else { options.delay.max(HEAD_START) };
        let options = Options { delay, ..options.clone() };
        Self::open(snapshot, |snapshot| SnapshotMemory::load(snapshot, &options))
    }

    /// Opens a snapshot to learn which pages its guest touches: [`SnapshotMemory::touched`] lists them.
    ///
    /// # Errors
    /// As [`Frozen::load`].
    pub fn record(snapshot: Snapshot) -> Result<Self, ThawError> {
        Self::open(snapshot, SnapshotMemory::record)
    }

    fn open(
        snapshot: Snapshot,
        load: impl FnOnce(Snapshot) -> Result<SnapshotMemory, RestoreError>,
    ) -> Result<Self, ThawError> {
        let here = GuestBuild {
            kind: KIND.to_owned(),
            module: snapshot.guest().module.clone(),
            engine: ENGINE.to_owned(),
            cpu: host_cpu_features(),
        };
        snapshot.check_guest(&here)?;
        let bytes: Arc<[u8]> = snapshot.state().into();
        Ok(Self { memory: load(snapshot)?, bytes })
    }
}
