//! Thawing: a sandbox out of a frozen guest, without running its initialisation.
//!
//! Promises: the sandbox starts in the frozen state, and returns to it at every reset; the system
//! pages of a guest are built here and never read from a snapshot.

use std::sync::Arc;

use afresh_memory::{Image, ImageBuilder};

use crate::PAGE;
use crate::builder::SandboxBuilder;
use crate::elf::Program;
use crate::error::{BuildError, Incompatible, KvmError, ThawError};
use crate::frozen::Frozen;
use crate::layout::{Layout, RegionKind, Span};
use crate::probe::thaw_processor;
use crate::sandbox::Sandbox;
use crate::system::System;
use crate::template::{Content, ProgramFile, Template};

impl SandboxBuilder {
    /// A sandbox in the state of `frozen`, which it returns to at every reset. No initialisation
    /// runs.
    ///
    /// The builder brings host functions, limits, log and how it is reset. Sizes and the processor
    /// come from the frozen state. So do the regions, if the builder adds none; a guest with shared
    /// memory needs all of its regions added as when it was built, for the shared memory is not in
    /// the snapshot.
    ///
    /// # Errors
    /// [`ThawError`]; [`Incompatible::Regions`] names the first region that differs.
    pub fn thaw(self, frozen: &Frozen) -> Result<Sandbox, ThawError> {
        let file = frozen.read_program()?;
        let program = Program::parse(file.bytes())?;
        let header = &frozen.header;
        let layout = Layout::new(&program, &header.sizes())?;
        let limits = frozen.memory().limits();
        limits.check_memory(layout.system.saturating_add(System::max_len(&layout)))?;
        if layout.system / PAGE != frozen.guest.pages() as u64 {
            return Err(ThawError::State("its memory has another size than stated".to_owned()));
        }
        let contents = contents(self.regions, &layout, &frozen.guest)?;
        let processor = thaw_processor(frozen.header.cpu()?).map_err(|error| match error {
            KvmError::Processor { template, missing } => Incompatible::Cpu { template, missing },
            other => Incompatible::Build(other.into()),
        })?;
        let system = System::build(&layout, &program, processor.extended);
        let mut tables = ImageBuilder::new((system.span.len / PAGE) as usize);
        tables.segment(0, &system.bytes).map_err(BuildError::from)?;
        let tables = tables.build().map_err(BuildError::from)?;
        let image = Image::join(&[frozen.guest.clone(), tables]);
        let known =
            ProgramFile::from_snapshot(file.bytes().len(), header.program, frozen.program.clone());
        let functions = self.functions;
        let template =
            Template::new(&program, known, layout, system, processor, functions, contents);
        Ok(Sandbox::start(Arc::new(template), &image, self.config, header.entry)?)
    }
}

/// The contents of the regions: the builder's must equal the frozen ones.
fn contents(
    brought: Vec<(u64, RegionKind, Content)>,
    layout: &Layout,
    guest: &Image,
) -> Result<Vec<Content>, ThawError> {
    let placed = &layout.regions;
    if brought.is_empty() && placed.iter().all(|region| region.kind != RegionKind::Shared) {
        return Ok(placed.iter().map(|_| Content::Zeros).collect());
    }
    if brought.len() != placed.len() {
        let (here, there) = (brought.len(), placed.len());
        return Err(regions(format!(
            "the builder adds {here} regions, the guest was frozen with {there}"
        )));
    }
    let mut contents = Vec::with_capacity(placed.len());
    for (index, ((len, kind, content), region)) in brought.into_iter().zip(placed).enumerate() {
        if (len, kind) != (region.span.len, region.kind) {
            return Err(regions(format!(
                "region {index} is {len} bytes {kind:?} here and {} bytes {:?} in the frozen guest",
                region.span.len, region.kind
            )));
        }
        if let Content::Bytes(bytes) = &content
            && !equals(guest, region.span, bytes)?
        {
            return Err(regions(format!(
                "region {index} holds other bytes than in the frozen guest"
            )));
        }
        contents.push(content);
    }
    Ok(contents)
}

/// Whether `span` holds `bytes`, which are as long.
fn regions(why: String) -> ThawError {
    Incompatible::Regions(why).into()
}

fn equals(guest: &Image, span: Span, bytes: &[u8]) -> Result<bool, ThawError> {
    let mut page = [0; PAGE as usize];
    for (index, expected) in bytes.chunks_exact(PAGE as usize).enumerate() {
        let at = span.start as usize + index * PAGE as usize;
        let run = afresh_memory::PageRange::covering(at, PAGE as usize);
        guest.resolve(run).map_err(ThawError::Image)?;
        guest.read(at, &mut page);
        if page != *expected {
            return Ok(false);
        }
    }
    Ok(true)
}
