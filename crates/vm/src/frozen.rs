//! A guest's state as pages and bytes: the contents of a snapshot.
//!
//! The pages are those of guest memory and then those of the program file, so another machine needs
//! only the snapshot. The bytes hold all sizes and the entry of calls. Descriptors, entry code and
//! page tables are in neither: they are built anew, for the host that thaws.
//!
//! Promises: a sandbox thawed from it starts in the frozen state, bit for bit; data from elsewhere
//! is checked before it is used. May break it: memory shared with the host, which is not part of
//! any snapshot.

use afresh_memory::{Image, ImageError, PageRange};
use afresh_pager::{Options, RestoreError, SnapshotMemory, SnapshotOptions};
use afresh_store::{GuestBuild, Sha256, Snapshot as Saved, Store};
use afresh_sys::{Protection, Reservation};
use serde::{Deserialize, Serialize};

use crate::PAGE;
use crate::cpu::{CpuTemplate, UnknownFeature};
use crate::error::{FreezeError, Incompatible, ThawError};
use crate::layout::{RegionKind, Sizes};
use crate::snapshot::Snapshot;

/// Kind of guest, in snapshots.
const KIND: &str = "vm";
/// The version of the state: the form of the bytes below, and the guest's interface. Goes up when
/// either changes in a way that older states do not survive.
const ENGINE: &str = "afresh-vm state 2";

/// Maximum length of the bytes: a list of names takes many times as much once it is decoded.
const MAX_STATE: usize = 64 << 10;

/// An extra region's kind, as the bytes number it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Kind {
    ReadWrite,
    ReadOnly,
    Shared,
    Gap,
}

/// The bytes of a frozen guest. Sizes are in bytes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Header {
    /// blake3 of the program file.
    pub(crate) program: [u8; 32],
    pub(crate) program_bytes: u64,
    memory: u64,
    stack: u64,
    input: u64,
    regions: Vec<(u64, Kind)>,
    /// Where calls start.
    pub(crate) entry: u64,
    /// The processor that the guest saw: the template's name, and its features.
    cpu_template: String,
    cpu: Vec<String>,
}

impl Header {
    /// The processor that the guest saw.
    pub(crate) fn cpu(&self) -> Result<CpuTemplate, ThawError> {
        let unknown = |error: UnknownFeature| self.lacking(vec![error.0]);
        CpuTemplate::recorded(self.cpu_template.clone(), &self.cpu).map_err(unknown)
    }

    fn lacking(&self, missing: Vec<String>) -> ThawError {
        Incompatible::Cpu { template: self.cpu_template.clone(), missing }.into()
    }

    pub(crate) fn sizes(&self) -> Sizes {
        let kind = |kind: &Kind| match kind {
            Kind::ReadWrite => RegionKind::ReadWrite,
            Kind::ReadOnly => RegionKind::ReadOnly,
            Kind::Shared => RegionKind::Shared,
            Kind::Gap => RegionKind::Gap,
        };
        Sizes {
            memory: self.memory,
            stack: self.stack,
            input: self.input,
            regions: self.regions.iter().map(|(len, it)| (*len, kind(it))).collect(),
        }
    }
}

/// A frozen guest. Cheap to clone; it shares the memory of the guest it came from.
#[derive(Clone, Debug)]
pub struct Frozen {
    pub(crate) header: Header,
    /// From guest address 0 to the system span.
    pub(crate) guest: Image,
    /// The program's file, the last page padded with zeros.
    pub(crate) program: Image,
    memory: SnapshotMemory,
}

impl Frozen {
    /// The pages: the guest's memory, then its program.
    #[must_use]
    pub fn memory(&self) -> &SnapshotMemory {
        &self.memory
    }

    /// Everything else, in a form of this crate's own.
    ///
    /// # Errors
    /// [`FreezeError::State`] when it cannot be encoded.
    pub fn bytes(&self) -> Result<Vec<u8>, FreezeError> {
        postcard::to_allocvec(&self.header).map_err(|e| FreezeError::State(e.to_string()))
    }

    /// Whether both are states of one guest, which begins its calls where it does.
    pub(crate) fn is_sibling(&self, other: &Self) -> bool {
        let same = |frozen: &Self| {
            let header = Header { entry: 0, ..frozen.header.clone() };
            postcard::to_allocvec(&header).ok()
        };
        self.guest.pages() == other.guest.pages()
            && self.header.entry == other.header.entry
            && same(self) == same(other)
    }

    /// The guest build that a snapshot of it belongs to. The CPU features are those that it was
    /// shown, for it may have detected them and acted upon it.
    #[must_use]
    pub fn build(&self) -> GuestBuild {
        GuestBuild {
            kind: KIND.to_owned(),
            module: format!("blake3:{}", blake3::Hash::from(self.header.program).to_hex()),
            engine: ENGINE.to_owned(),
            cpu: self.header.cpu.clone(),
        }
    }

    /// The name of the CPU template that the guest was built with.
    #[must_use]
    pub fn cpu_template(&self) -> &str {
        &self.header.cpu_template
    }

    /// Saves it under `name`.
    ///
    /// # Errors
    /// [`FreezeError`]; the name keeps its meaning then.
    pub fn save(
        &self,
        store: &Store,
        name: &str,
        with: &SnapshotOptions,
    ) -> Result<Sha256, FreezeError> {
        Ok(self.memory.save(store, name, self.build(), self.bytes()?, with)?)
    }

    /// Takes a guest out of pages and bytes that [`Frozen::memory`] and [`Frozen::bytes`] gave.
    ///
    /// # Errors
    /// [`ThawError::State`] when they do not fit together.
    pub fn from_parts(memory: SnapshotMemory, bytes: &[u8]) -> Result<Self, ThawError> {
        if bytes.len() > MAX_STATE {
            let why = format!("it is {} bytes long, and at most {MAX_STATE} are read", bytes.len());
            return Err(ThawError::State(why));
        }
        let (header, rest): (Header, _) =
            postcard::take_from_bytes(bytes).map_err(|e| ThawError::State(e.to_string()))?;
        if !rest.is_empty() {
            return Err(ThawError::State("there are bytes after its end".to_owned()));
        }
        memory.limits().check_program(header.program_bytes)?;
        let all = memory.pages();
        let program = usize::try_from(header.program_bytes.div_ceil(PAGE))
            .ok()
            .filter(|pages| *pages <= all.pages())
            .ok_or_else(|| ThawError::State("the program is outside its pages".to_owned()))?;
        let own = all.pages() - program;
        Ok(Self {
            guest: all.slice(PageRange::new(0, own)),
            program: all.slice(PageRange::new(own, program)),
            header,
            memory,
        })
    }

    /// Opens a snapshot, lazily: see [`SnapshotMemory::load`].
    ///
    /// # Errors
    /// [`ThawError`]: a snapshot of another kind of guest or for a CPU with more features, a
    /// damaged one, or no memory for it.
    pub fn load(snapshot: Saved, options: &Options) -> Result<Self, ThawError> {
        Self::open(snapshot, |snapshot| SnapshotMemory::load(snapshot, options))
    }

    /// Opens a snapshot to learn which pages its guest touches: [`SnapshotMemory::touched`] lists
    /// them.
    ///
    /// # Errors
    /// As [`Frozen::load`].
    pub fn record(snapshot: Saved) -> Result<Self, ThawError> {
        Self::open(snapshot, SnapshotMemory::record)
    }

    fn open(
        snapshot: Saved,
        load: impl FnOnce(Saved) -> Result<SnapshotMemory, RestoreError>,
    ) -> Result<Self, ThawError> {
        let guest = snapshot.guest().clone();
        let here = GuestBuild {
            kind: KIND.to_owned(),
            module: guest.module.clone(),
            engine: ENGINE.to_owned(),
            cpu: offered(),
        };
        snapshot.check_guest(&here)?;
        let state = snapshot.state().to_vec();
        let this = Self::from_parts(load(snapshot)?, &state)?;
        if this.build().module != guest.module {
            return Err(ThawError::Program);
        }
        Ok(this)
    }

    /// The program's file, checked against its digest. Zeros in it take no memory, so a snapshot of
    /// a few pages that claims a large program costs no more than its pages.
    pub(crate) fn read_program(&self) -> Result<ReadProgram, ThawError> {
        let all = PageRange::new(0, self.program.pages());
        self.program.resolve(all).map_err(ThawError::Image)?;
        let failed = |error| ThawError::Image(ImageError::System(error));
        let memory = Reservation::new(all.len).map_err(failed)?;
        memory.map_anonymous(all, Protection::ReadWrite).map_err(failed)?;
        for page in self.program.stored().flat_map(|run| run.start..run.end()) {
            let Some(content) = self.program.page(page) else { continue };
            // SAFETY: inside the memory just mapped, which nothing else uses; no image is part of
            // it.
            unsafe {
                memory.page_ptr(page).copy_from_nonoverlapping(content.as_ptr(), content.len())
            };
        }
        let program = ReadProgram { memory, len: self.header.program_bytes as usize };
        if blake3::hash(program.bytes()) != blake3::Hash::from(self.header.program) {
            return Err(ThawError::Program);
        }
        Ok(program)
    }
}

/// The file of a frozen program.
pub(crate) struct ReadProgram {
    memory: Reservation,
    /// At most the length of the memory, as [`Frozen::from_parts`] has checked.
    len: usize,
}

impl ReadProgram {
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is at least that long, readable and alive while this value is, and
        // nothing writes it.
        unsafe { std::slice::from_raw_parts(self.memory.page_ptr(0), self.len) }
    }
}

/// The features of this host that templates know. Without KVM nothing can be thawed either, which
/// is then the error.
fn offered() -> Vec<String> {
    match CpuTemplate::host() {
        Ok(host) => host.features().map(str::to_owned).collect(),
        Err(_) => CpuTemplate::known_features().map(str::to_owned).collect(),
    }
}

impl Snapshot {
    /// The state, to be saved or thawed elsewhere, together with the program. Shares the memory.
    ///
    /// # Errors
    /// [`FreezeError::Image`] when memory or descriptors ran out.
    pub fn freeze(&self) -> Result<Frozen, FreezeError> {
        let template = &*self.template;
        let layout = &template.layout;
        let kind = |kind| match kind {
            RegionKind::ReadWrite => Kind::ReadWrite,
            RegionKind::ReadOnly => Kind::ReadOnly,
            RegionKind::Shared => Kind::Shared,
            RegionKind::Gap => Kind::Gap,
        };
        let cpu = &template.processor.template;
        let header = Header {
            program: template.file.digest(),
            program_bytes: template.file.len() as u64,
            memory: layout.main.len,
            stack: layout.stack.len,
            input: layout.input.len,
            regions: layout.regions.iter().map(|it| (it.span.len, kind(it.kind))).collect(),
            entry: self.entry,
            cpu_template: cpu.name().to_owned(),
            cpu: cpu.features().map(str::to_owned).collect(),
        };
        let own = PageRange::new(0, (layout.system / PAGE) as usize);
        let guest = self.image().slice(own);
        let program = template.file.pages()?;
        let memory = Image::join(&[guest.clone(), program.clone()]).into();
        Ok(Frozen { header, guest, program, memory })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_of_terabytes_of_zeros_is_refused_before_it_is_read() {
        let header = Header {
            program: [0; 32],
            program_bytes: 8 << 40,
            memory: 1 << 20,
            stack: 1 << 16,
            input: 4096,
            regions: Vec::new(),
            entry: 0,
            cpu_template: String::new(),
            cpu: Vec::new(),
        };
        let bytes = postcard::to_allocvec(&header).unwrap();
        let memory = SnapshotMemory::from(Image::zero(1 << 32));
        let error = Frozen::from_parts(memory, &bytes).unwrap_err().to_string();
        assert!(error.contains("--limit program=SIZE"), "{error}");
    }
}
