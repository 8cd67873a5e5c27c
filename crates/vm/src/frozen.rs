//! A guest's state as pages and bytes: the contents of a snapshot.
//!
//! The pages are those of guest memory and then those of the program file, so another machine needs
//! only the snapshot. The bytes hold all sizes and the entry of calls. Descriptors, entry code and
//! page tables are in neither: they are built anew, for the host that thaws.
//!
//! Promises: a sandbox thawed from it starts in the frozen state, bit for bit; data from elsewhere
//! is checked before it is used. May break it: memory shared with the host, which is not part of
//! any snapshot.

use std::convert::Infallible;

use afresh_memory::{Image, ImageError, PageRange};
use afresh_pager::{SnapshotContents, SnapshotMemory, SnapshotState};
use afresh_sys::{Protection, Reservation};
use serde::{Deserialize, Serialize};

use crate::PAGE;
use crate::cpu::{CpuTemplate, UnknownFeature};
use crate::error::{FreezeError, Incompatible, ThawError};
use crate::layout::{RegionKind, Sizes};
use crate::snapshot::Snapshot;

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

/// A frozen guest: its memory and then its program as pages, and all sizes as bytes.
pub type Frozen = SnapshotContents<MachineState>;

/// The state of a frozen guest apart from its pages.
#[derive(Clone, Debug)]
pub struct MachineState {
    pub(crate) header: Header,
    /// From guest address 0 to the system span.
    pub(crate) guest: Image,
    /// The program's file, the last page padded with zeros.
    pub(crate) program: Image,
}

impl SnapshotState for MachineState {
    const KIND: &'static str = "vm";
    /// The form of the bytes below, and the guest's interface.
    const ENGINE: &'static str = "afresh-vm state 2";

    type FreezeCause = Infallible;
    type ThawCause = Incompatible;

    fn program_digest(&self) -> [u8; 32] {
        self.header.program
    }

    fn cpu_features(&self) -> Vec<String> {
        self.header.cpu.clone()
    }

    /// The features of this host that templates know. Without KVM nothing can be thawed either,
    /// which is then the error.
    fn host_cpu_features() -> Vec<String> {
        match CpuTemplate::host() {
            Ok(host) => host.features().map(str::to_owned).collect(),
            Err(_) => CpuTemplate::known_features().map(str::to_owned).collect(),
        }
    }

    fn encode(&self) -> Result<Vec<u8>, FreezeError> {
        postcard::to_allocvec(&self.header).map_err(|e| FreezeError::State(e.to_string()))
    }

    fn decode(memory: &SnapshotMemory, bytes: &[u8]) -> Result<Self, ThawError> {
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
        })
    }
}

impl MachineState {
    /// The name of the CPU template that the guest was built with.
    #[must_use]
    pub fn cpu_template(&self) -> &str {
        &self.header.cpu_template
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
    /// At most the length of the memory, as decoding has checked.
    len: usize,
}

impl ReadProgram {
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is at least that long, readable and alive while this value is, and
        // nothing writes it.
        unsafe { std::slice::from_raw_parts(self.memory.page_ptr(0), self.len) }
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
        Ok(Frozen::new(memory, MachineState { header, guest, program }))
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
