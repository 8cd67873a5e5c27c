//! Cases, rounds and the clock.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{Ordering, compiler_fence};
use std::time::Instant;

use afresh_pager::{FileSource, FillStrategy, MemfdSource, PageSource};
use afresh_sys::{Memfd, PAGE_SIZE, PageRange, Reservation, folios};
use anyhow::{Result, bail};
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;

use super::corpus::{Scratch, evict, huge_memfd, shuffled, word, write_file, write_set};
use super::report::{Delays, Line, Sample};
use super::rivals::Rival;
use super::{Options, second};
use crate::Sink;
use crate::row::quantile;

/// The touched pages, and the kind of access.
struct Case {
    name: &'static str,
    order: Order,
    write: bool,
    /// The file is cached in large folios.
    large: bool,
    /// The file is put out of the cache before every run.
    cold: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Random,
    Sequential,
    Set,
}

const fn case(name: &'static str, order: Order, write: bool) -> Case {
    Case { name, order, write, large: false, cold: false }
}

const CASES: [Case; 7] = [
    case("random/read", Order::Random, false),
    case("random/write", Order::Random, true),
    case("seq/read", Order::Sequential, false),
    case("seq/write", Order::Sequential, true),
    case("ws5/read", Order::Set, false),
    Case { cold: true, ..case("ws5-cold/read", Order::Set, false) },
    Case { large: true, ..case("random/read/large-folios", Order::Random, false) },
];

impl Case {
    /// Whether a quick run leaves it out: the other case of its kind has the difference of the
    /// ways.
    fn is_left_out(&self, quick: bool) -> bool {
        quick && (self.large || (self.order == Order::Sequential && self.write))
    }
}

/// Whether a way takes part in a case: a full read first does not measure a working set from a cold
/// cache, and a copy in memory has no cold cache and no folio size.
fn takes_part(way: Rival, case: &Case) -> bool {
    match way {
        Rival::Pager(FillStrategy::WorkingSet) => case.order == Order::Set,
        Rival::Pager(FillStrategy::Read) | Rival::ReadSmall | Rival::MmapPopulate => !case.cold,
        _ => !(way.holds() && (case.cold || case.large)),
    }
}

/// Everything that runs are made from.
struct Corpus {
    pages: usize,
    random: Vec<u32>,
    sequential: Vec<u32>,
    set_order: Vec<u32>,
    set: Vec<PageRange>,
    held: Arc<Memfd>,
    scratch: Scratch,
}

impl Corpus {
    fn new(options: &Options) -> Result<Self> {
        let pages = options.mib * (1 << 20) / PAGE_SIZE;
        let scratch = Scratch::new(&options.dir)?;
        let random = shuffled(pages);
        let set_order = random[..pages / 20].to_vec();
        let mut sorted = set_order.clone();
        sorted.sort_unstable();
        let mut set: Vec<PageRange> = Vec::new();
        for page in sorted {
            match set.last_mut() {
                Some(last) if last.end() == page as usize => last.len += 1,
                _ => set.push(PageRange::new(page as usize, 1)),
            }
        }
        write_file(&scratch.path().join("small"), pages, 1)?;
        if CASES.iter().any(|case| case.large && !case.is_left_out(options.quick)) {
            write_file(&scratch.path().join("large"), pages, 4096)?;
        }
        write_set(&scratch.path().join("set"), &set)?;
        Ok(Self {
            pages,
            sequential: (0..pages as u32).collect(),
            random,
            set_order,
            set,
            held: huge_memfd(pages)?,
            scratch,
        })
    }

    fn order(&self, case: &Case) -> &[u32] {
        match case.order {
            Order::Random => &self.random,
            Order::Sequential => &self.sequential,
            Order::Set => &self.set_order,
        }
    }

    fn file(&self, case: &Case) -> Result<File> {
        Ok(File::open(self.scratch.path().join(if case.large { "large" } else { "small" }))?)
    }

    fn source(&self, way: Rival, case: &Case) -> Result<Arc<dyn PageSource>> {
        if way.holds() {
            return Ok(Arc::new(MemfdSource::new(self.held.clone(), self.pages)));
        }
        let source = FileSource::new(self.file(case)?)?;
        if way == Rival::Pager(FillStrategy::WorkingSet) {
            let file = File::open(self.scratch.path().join("set"))?;
            return Ok(Arc::new(source.with_working_set(self.set.clone(), file)));
        }
        Ok(Arc::new(source))
    }
}

/// Processor time of this process so far, in milliseconds.
pub(super) fn processor_time() -> f64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    now.tv_sec as f64 * 1e3 + now.tv_nsec as f64 / 1e6
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Touches a page; returns whether its content was as expected.
#[inline]
fn touch(memory: *mut u8, page: u32, write: bool) -> bool {
    // SAFETY: the caller restores as many pages as the order names, and no other thread touches
    // them.
    unsafe {
        let at = memory.add(page as usize * PAGE_SIZE).cast::<u64>();
        if write {
            // Another word than the first, which identifies the page.
            at.add(1).write_volatile(1);
        }
        at.read_volatile() == word(page as usize)
    }
}

/// One restore and its touches.
fn once(
    corpus: &Corpus,
    case: &Case,
    way: Rival,
    mut each: impl FnMut(usize, Instant),
) -> Result<Sample> {
    if case.cold {
        evict(&corpus.file(case)?)?;
        evict(&File::open(corpus.scratch.path().join("set"))?)?;
    }
    let source = corpus.source(way, case)?;
    let target = Arc::new(Reservation::aligned(corpus.pages, 2 << 20)?);
    let memory = target.base().as_ptr();
    let order = corpus.order(case);
    let mut sample = Sample::default();
    let mut right = 0;
    let cpu_before = processor_time();
    let start = Instant::now();
    let restoring = way.start(&target, source)?;
    compiler_fence(Ordering::SeqCst);
    let (head, tail) = order.split_at(order.len().min(1000));
    for (n, page) in head.iter().enumerate() {
        right += usize::from(touch(memory, *page, case.write));
        each(n, start);
    }
    sample.first_1000 = ms(start);
    for (n, page) in tail.iter().enumerate() {
        right += usize::from(touch(memory, *page, case.write));
        each(head.len() + n, start);
    }
    sample.total = ms(start);
    sample.cpu = processor_time() - cpu_before;
    sample.faults = restoring.faults();
    restoring.wait()?;
    sample.release = ms(start);
    if right != order.len() {
        bail!("{} restored wrong bytes in case {}", way.name(), case.name);
    }
    Ok(sample)
}

/// The delay of every touch, in a separate run since the clock costs time.
fn delays(corpus: &Corpus, case: &Case, way: Rival) -> Result<Delays> {
    let mut times = vec![0.0; corpus.order(case).len()];
    let mut last = 0.0;
    once(corpus, case, way, |n, start| {
        let now = start.elapsed().as_secs_f64() * 1e6;
        times[n] = now - last;
        last = now;
    })?;
    // The first holds the start of the restore, not a touch.
    let times = &mut times[1..];
    let mut at = |q| (quantile(times, q) * 100.0).round() / 100.0;
    Ok(Delays { p50: at(0.5), p99: at(0.99), max: at(1.0) })
}

pub(super) fn run(options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let corpus = Corpus::new(options)?;
    let wanted = |case: &Case, way: Rival| {
        let met =
            |part: &String| case.name.contains(part.as_str()) || way.name().contains(part.as_str());
        options.filter.as_ref().is_none_or(met)
            && way != Rival::Mmap
            && (options.ways.is_empty() || options.ways.contains(&way))
    };
    let mut is_warm = false;
    for case in &CASES {
        if case.is_left_out(options.quick) {
            continue;
        }
        let mut ways = vec![Rival::Mmap];
        let all = Rival::all().into_iter();
        ways.extend(all.filter(|way| wanted(case, *way) && takes_part(*way, case)));
        if ways.len() == 1 {
            continue;
        }
        let mut samples = vec![Vec::new(); ways.len()];
        // One round more, unmeasured: the first meets cold code and an unpopulated heap. A quick
        // run has it in its first case only.
        let first = usize::from(options.quick && is_warm);
        is_warm = true;
        for round in first..=options.rounds {
            for (way, samples) in ways.iter().zip(&mut samples) {
                let sample = once(&corpus, case, *way, |_, _| {})?;
                if round > 0 {
                    samples.push(sample);
                }
            }
        }
        let cached = if case.cold {
            None
        } else {
            folios::of(corpus.file(case)?, PageRange::new(0, corpus.pages))
        };
        for (way, these) in ways.iter().zip(&samples) {
            let mut extra = vec![("mib", json!(options.mib))];
            if let Some(cached) = &cached {
                extra.push(("folios_kib", json!(cached)));
            }
            // They take a run more of each way, which a quick run saves.
            let has_delays = !case.cold && !options.quick;
            let delays = has_delays.then(|| delays(&corpus, case, *way)).transpose()?;
            let line = Line {
                table: "restore",
                case: case.name,
                strategy: way.name(),
                samples: these,
                rival: &samples[0],
                delays,
                extra,
            };
            sink(&line.row());
        }
    }
    if options.filter.as_ref().is_none_or(|part| second::CASE.contains(part.as_str())) {
        second::run(options, sink)?;
    }
    Ok(())
}
