//! State that all sandboxes of one program and configuration share, and the image that the first of
//! them starts from.
//!
//! Promises: a template defines the access rights of every guest address, and never changes. May
//! break it: contents that do not belong to the regions of the layout.

use std::sync::Arc;

use afresh_memory::{Image, ImageBuilder, ImageError, PageRange};
use afresh_sys::InheritedCell;

use crate::PAGE;
use crate::elf::Program;
use crate::generation::next_generation;
use crate::host::HostFunctions;
use crate::layout::{BASE, Layout, RegionKind, Span};
use crate::memory::Map;
use crate::processor::Processor;
use crate::shared::SharedMemory;
use crate::system::System;

/// State that all sandboxes of one program and configuration share.
#[derive(Debug)]
pub(crate) struct Template {
    /// Distinguishes the templates of a process.
    pub(crate) id: u64,
    pub(crate) file: ProgramFile,
    pub(crate) layout: Layout,
    pub(crate) system: System,
    pub(crate) processor: Processor,
    pub(crate) functions: HostFunctions,
    pub(crate) map: Arc<Map>,
    /// Regions of the slot: everything but gaps and shared memory.
    pub(crate) accessible: Vec<PageRange>,
    /// Those that the guest may write.
    pub(crate) writable: Vec<PageRange>,
    pub(crate) shared: Vec<(Span, Arc<SharedMemory>)>,
    pub(crate) read_only: Vec<Span>,
}

/// The initial content of an extra region.
pub(crate) enum Content {
    Zeros,
    Bytes(Vec<u8>),
    Shared(Arc<SharedMemory>),
}

/// The program's file, kept for snapshots.
#[derive(Debug)]
pub(crate) struct ProgramFile {
    len: usize,
    /// Empty where the pages are known from the beginning.
    bytes: Arc<[u8]>,
    digest: InheritedCell<[u8; 32]>,
    pages: InheritedCell<Image>,
}

impl ProgramFile {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        let (digest, pages) = (InheritedCell::new(), InheritedCell::new());
        Self { len: bytes.len(), bytes: bytes.into(), digest, pages }
    }

    /// A file that came out of a snapshot, in these pages and with this digest.
    pub(crate) fn from_snapshot(len: usize, digest: [u8; 32], pages: Image) -> Self {
        Self { len, bytes: Arc::from([]), digest: digest.into(), pages: pages.into() }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Its blake3 digest.
    pub(crate) fn digest(&self) -> [u8; 32] {
        *self.digest.get_or_make(|| *blake3::hash(&self.bytes).as_bytes())
    }

    /// Its pages. They are the same image every time, so that snapshots share them.
    pub(crate) fn pages(&self) -> Result<Image, ImageError> {
        if let Some(pages) = self.pages.get() {
            return Ok(pages.clone());
        }
        let mut builder = ImageBuilder::new(self.bytes.len().div_ceil(PAGE as usize));
        builder.segment(0, &self.bytes)?;
        let pages = builder.build()?;
        Ok(self.pages.get_or_make(|| pages).clone())
    }
}

/// The pages of a span.
pub(crate) fn pages_of(span: Span) -> PageRange {
    PageRange::covering(span.start as usize, span.len as usize)
}

impl Template {
    /// `contents` belong to the layout's regions, in order.
    pub(crate) fn new(
        program: &Program<'_>,
        file: ProgramFile,
        layout: Layout,
        system: System,
        processor: Processor,
        functions: HostFunctions,
        contents: Vec<Content>,
    ) -> Self {
        let mut accessible = vec![pages_of(layout.main)];
        let mut writable = vec![pages_of(layout.main)];
        let (mut shared, mut read_only) = (Vec::new(), Vec::new());
        let mut map = Map::default();
        for (span, writable, _) in layout.mapped(program) {
            if span.start < layout.main.end() {
                map.add(span, writable, None);
            }
        }
        for (placed, content) in layout.regions.iter().zip(contents) {
            match (placed.kind, content) {
                (RegionKind::Shared, Content::Shared(memory)) => {
                    map.add(placed.span, true, Some(Arc::clone(&memory)));
                    shared.push((placed.span, memory));
                    continue;
                }
                (RegionKind::Gap, _) => continue,
                (RegionKind::ReadOnly, _) => {
                    read_only.push(placed.span);
                    map.add(placed.span, false, None);
                }
                _ => {
                    writable.push(pages_of(placed.span));
                    map.add(placed.span, true, None);
                }
            }
            accessible.push(pages_of(placed.span));
        }
        accessible.push(pages_of(system.span));
        // The guest may also pass pointers into the pages with its boot information.
        map.add(Span { start: system.boot(), len: PAGE }, false, None);
        Self {
            id: next_generation(),
            file,
            layout,
            system,
            processor,
            functions,
            map: Arc::new(map),
            accessible,
            writable,
            shared,
            read_only,
        }
    }
}

/// The memory before the program's initialisation.
pub(crate) fn first_image(
    program: &Program<'_>,
    layout: &Layout,
    system: &System,
    contents: &[Content],
) -> Result<Image, ImageError> {
    let loaded = program.image(BASE);
    let mut image = ImageBuilder::new((system.span.end() / PAGE) as usize);
    image.segment(BASE as usize, &loaded)?;
    for (placed, content) in layout.regions.iter().zip(contents) {
        if let (RegionKind::ReadOnly, Content::Bytes(bytes)) = (placed.kind, content) {
            image.segment(placed.span.start as usize, bytes)?;
        }
    }
    image.segment(system.span.start as usize, &system.bytes)?;
    image.build()
}
