//! The second restore of a snapshot: a new slot over an image that is already in memory, and reads
//! of all of its pages.
//!
//! The pager fills an image page by page, and moves it to folios of 2 MiB later. A rival has the
//! same bytes in such folios from the start. Plain mappings show the difference without a slot
//! ([decision][folios]).
//!
//! [folios]: ../../../../docs/decisions/folios.md

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh_memory::{BorrowedFile, FileOwner, Image, Slot, SlotConfig, Strategy, TrackerKind};
use afresh_pager::{FileSource, LazyImage};
use afresh_sys::{Advice, HUGE_PAGES, Memfd, PAGE_SIZE, PageRange, Protection, Reservation};
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
/// Time for the move of the image to folios. Rows have the number of those that it has.
const FOLIO_TIMEOUT: Duration = Duration::from_secs(120);

/// Where the content is.
#[derive(Clone, Copy)]
enum Place {
    /// A memory file in folios of 2 MiB.
    Collapsed,
    /// A lazily filled image, or a memory file, in pages.
    Pages,
    /// A lazily filled image that has moved to folios.
    Moved,
}

/// How the content is read again.
#[derive(Clone, Copy)]
enum Reader {
    /// A private mapping.
    Mapping(Place),
    /// A new slot.
    Slot(Strategy, Place),
}

const MPROTECT: Strategy = Strategy::WriteSet(Some(TrackerKind::Mprotect));
/// Each reader, and the number of its rival.
const READERS: [(&str, Reader, usize); 8] = [
    ("mapping, collapsed", Reader::Mapping(Place::Collapsed), 0),
    ("mapping, pages", Reader::Mapping(Place::Pages), 0),
    ("slot, collapsed", Reader::Slot(Strategy::Auto, Place::Collapsed), 2),
    ("slot, pages", Reader::Slot(Strategy::Auto, Place::Pages), 2),
    ("slot, moved", Reader::Slot(Strategy::Auto, Place::Moved), 2),
    ("slot by mprotect, collapsed", Reader::Slot(MPROTECT, Place::Collapsed), 5),
    ("slot by mprotect, pages", Reader::Slot(MPROTECT, Place::Pages), 5),
    ("slot by mprotect, moved", Reader::Slot(MPROTECT, Place::Moved), 5),
];

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
    small: (Memfd, LazyImage),
    moved: LazyImage,
}

impl Contents {
    fn new(options: &Options) -> Result<Self> {
        let pages = (options.mib << 20) / PAGE_SIZE;
        let scratch = Scratch::new(&options.dir)?;
        let path = scratch.path().join("content");
        write_file(&path, pages, PART)?;
        let fill = |background| -> Result<LazyImage> {
            let source = Arc::new(FileSource::new(File::open(&path)?)?);
            let options = afresh_pager::Options { background, ..Default::default() };
            let image = LazyImage::start(source, &options)?;
            image.wait(FILL_TIMEOUT)?;
            Ok(image)
        };
        let (lazy, moved) = (fill(false)?, fill(true)?);
        let began = Instant::now();
        while moved.huge_folios() < pages / HUGE_PAGES && began.elapsed() < FOLIO_TIMEOUT {
            std::thread::sleep(Duration::from_millis(20));
        }
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
            small: (small, lazy),
            moved,
        })
    }

    /// Reads a word of each page at `memory`.
    fn read(&self, memory: *const u8) -> Result<()> {
        let holds = |page: &&u32| {
            // SAFETY: a slot or a mapping of all pages begins there, and no thread unmaps it.
            let found =
                unsafe { memory.add(**page as usize * PAGE_SIZE).cast::<u64>().read_volatile() };
            found == word(**page as usize)
        };
        if self.order.iter().filter(holds).count() == self.pages {
            return Ok(());
        }
        bail!("a second restore has wrong bytes")
    }

    fn once(&self, reader: Reader) -> Result<Sample> {
        let (start, cpu) = (Instant::now(), processor_time());
        match reader {
            Reader::Mapping(place) => {
                let file = match place {
                    Place::Collapsed => &*self.collapsed.0,
                    Place::Pages | Place::Moved => &self.small.0,
                };
                let view = Reservation::aligned(self.pages, 2 << 20)?;
                view.map_private(PageRange::new(0, self.pages), Protection::ReadWrite, file, 0)?;
                self.read(view.page_ptr(0))?;
            }
            Reader::Slot(strategy, place) => {
                let image = match place {
                    Place::Collapsed => &self.collapsed.1,
                    Place::Pages => self.small.1.image(),
                    Place::Moved => self.moved.image(),
                };
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
    // No source document has this case: a quick run takes half of the memory.
    let mib = if options.quick { options.mib / 2 } else { options.mib };
    let options = &Options { mib, ..options.clone() };
    let contents = Contents::new(options)?;
    let mut samples: [Vec<Sample>; READERS.len()] = Default::default();
    // One round more, unmeasured.
    for round in 0..=options.rounds {
        for turn in 0..READERS.len() {
            let number = (turn + round) % READERS.len();
            let sample = contents.once(READERS[number].1)?;
            if round > 0 {
                samples[number].push(sample);
            }
        }
    }
    // Refused by kernels without such folios for memory files.
    let collapse = collapse_time(contents.pages).ok();
    for (number, (strategy, _, rival)) in READERS.iter().enumerate() {
        let rival = &samples[*rival];
        let folios = contents.moved.huge_folios();
        let mut extra = vec![("mib", json!(options.mib)), ("moved_folios", json!(folios))];
        extra.extend(collapse.map(|time| ("collapse_cpu_ms", json!(time.round()))));
        let table = "restore";
        let samples = &samples[number];
        sink(&Line { table, case: CASE, strategy, samples, rival, delays: None, extra }.row());
    }
    Ok(())
}
