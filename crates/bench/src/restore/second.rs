//! The second restore of a snapshot: a new slot over an image that is already in memory, and reads
//! of all of its pages.
//!
//! The pager fills an image page by page. A rival has the same bytes in folios of 2 MiB, and plain
//! mappings show the difference without a slot ([decision](folios)).
//!
//! [folios]: ../../../../docs/decisions/folios.md

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh_memory::{BorrowedFile, FileOwner, Image, Slot, SlotConfig, Strategy, TrackerKind};
use afresh_pager::{FileSource, LazyImage};
use afresh_sys::{Advice, Memfd, PAGE_SIZE, PageRange, Protection, Reservation};
use anyhow::{Result, bail};
use serde_json::json;

use super::Options;
use super::corpus::{Scratch, huge_memfd, pages_into, shuffled, word, write_file};
use super::report::{Line, Sample};
use super::run::processor_time;
use crate::Sink;

/// The name of the case.
pub(super) const CASE: &str = "second/read";
/// Pages written at a time.
const PART: usize = 512;
const FILL_TIMEOUT: Duration = Duration::from_secs(120);

/// A way to get the content again.
#[derive(Clone, Copy)]
enum Way {
    /// A private mapping.
    Mapping { collapsed: bool },
    /// A new slot.
    Slot { strategy: Strategy, collapsed: bool },
}

/// Each way with folios of 2 MiB is before the same with pages.
const WAYS: [(&str, Way); 6] = [
    ("mapping, collapsed", Way::Mapping { collapsed: true }),
    ("mapping", Way::Mapping { collapsed: false }),
    ("slot, collapsed", Way::Slot { strategy: Strategy::Auto, collapsed: true }),
    ("slot", Way::Slot { strategy: Strategy::Auto, collapsed: false }),
    ("slot by mprotect, collapsed", Way::Slot { strategy: MPROTECT, collapsed: true }),
    ("slot by mprotect", Way::Slot { strategy: MPROTECT, collapsed: false }),
];
const MPROTECT: Strategy = Strategy::WriteSet(Some(TrackerKind::Mprotect));

#[derive(Debug)]
struct CollapsedFile {
    file: Arc<Memfd>,
    pages: usize,
    lent: BorrowedFile,
}

impl FileOwner for CollapsedFile {
    fn file(&self) -> &Memfd {
        &self.file
    }

    fn part(&self) -> PageRange {
        PageRange::new(0, self.pages)
    }
}

/// The same content in folios of 2 MiB and in pages.
struct Contents {
    pages: usize,
    order: Vec<u32>,
    collapsed: (Arc<Memfd>, Image),
    small: (Memfd, Image),
}

impl Contents {
    fn new(options: &Options) -> Result<Self> {
        let pages = (options.mib << 20) / PAGE_SIZE;
        let scratch = Scratch::new(&options.dir)?;
        let path = scratch.path().join("content");
        write_file(&path, pages, PART)?;
        let source = Arc::new(FileSource::new(File::open(&path)?)?);
        let lazy = LazyImage::start(source, &afresh_pager::Options::default())?;
        lazy.wait(FILL_TIMEOUT)?;
        let file = huge_memfd(pages)?;
        let owner =
            Arc::new(CollapsedFile { file: file.clone(), pages, lent: BorrowedFile::default() });
        let lender: Arc<dyn FileOwner> = owner.clone();
        // SAFETY: the file is sealed.
        let image = unsafe { owner.lent.image(&lender, PageRange::new(0, pages)) }?;
        let small = Memfd::new(c"afresh-bench")?;
        let mut buffer = vec![0; PART * PAGE_SIZE];
        for first in (0..pages).step_by(PART) {
            let part = &mut buffer[..PART.min(pages - first) * PAGE_SIZE];
            pages_into(first, part);
            small.write_at(part, first * PAGE_SIZE)?;
        }
        Ok(Self {
            pages,
            order: shuffled(pages),
            collapsed: (file, image),
            small: (small, lazy.image().clone()),
        })
    }

    /// Reads a word of each page at `memory`.
    fn read(&self, memory: *const u8) -> Result<()> {
        let holds = |page: &&u32| {
            // SAFETY: the caller has mapped all pages there.
            let found =
                unsafe { memory.add(**page as usize * PAGE_SIZE).cast::<u64>().read_volatile() };
            found == word(**page as usize)
        };
        if self.order.iter().filter(holds).count() == self.pages {
            return Ok(());
        }
        bail!("a second restore has wrong bytes")
    }

    fn once(&self, way: Way) -> Result<Sample> {
        let (start, cpu) = (Instant::now(), processor_time());
        match way {
            Way::Mapping { collapsed } => {
                let file = if collapsed { &*self.collapsed.0 } else { &self.small.0 };
                let view = Reservation::aligned(self.pages, 2 << 20)?;
                view.map_private(PageRange::new(0, self.pages), Protection::ReadWrite, file, 0)?;
                self.read(view.page_ptr(0))?;
            }
            Way::Slot { strategy, collapsed } => {
                let image = if collapsed { &self.collapsed.1 } else { &self.small.1 };
                let slot = Slot::new(image, SlotConfig { strategy, ..SlotConfig::default() })?;
                self.read(slot.base())?;
            }
        }
        let total = start.elapsed().as_secs_f64() * 1e3;
        let cpu = processor_time() - cpu;
        Ok(Sample { total, first_1000: total, release: total, cpu, ..Sample::default() })
    }
}

/// Milliseconds of processor time that folios of 2 MiB for all of `pages` take.
fn collapse_time(pages: usize) -> Result<f64> {
    let file = Memfd::new(c"afresh-bench")?;
    let bytes = vec![1; PART * PAGE_SIZE];
    for first in (0..pages).step_by(PART) {
        file.write_at(&bytes[..PART.min(pages - first) * PAGE_SIZE], first * PAGE_SIZE)?;
    }
    let view = Reservation::aligned(pages, 2 << 20)?;
    let all = PageRange::new(0, pages);
    view.map_shared(all, Protection::Read, &file, 0)?;
    let cpu = processor_time();
    view.advise(all, Advice::Collapse)?;
    Ok(processor_time() - cpu)
}

pub(super) fn run(options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let contents = Contents::new(options)?;
    let mut samples: [Vec<Sample>; WAYS.len()] = Default::default();
    // One round more, unmeasured.
    for round in 0..=options.rounds {
        for turn in 0..WAYS.len() {
            let number = (turn + round) % WAYS.len();
            let sample = contents.once(WAYS[number].1)?;
            if round > 0 {
                samples[number].push(sample);
            }
        }
    }
    // Refused by kernels without such folios for memory files.
    let collapse = collapse_time(contents.pages).ok();
    for (number, (strategy, _)) in WAYS.iter().enumerate() {
        let rival = &samples[number / 2 * 2];
        let mut extra = vec![("mib", json!(options.mib))];
        extra.extend(collapse.map(|time| ("collapse_cpu_ms", json!(time.round()))));
        let table = "restore";
        let samples = &samples[number];
        sink(&Line { table, case: CASE, strategy, samples, rival, delays: None, extra }.row());
    }
    Ok(())
}
