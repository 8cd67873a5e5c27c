//! The list of strategies, and how an instance of each is made.

use std::sync::Arc;

use afresh_arena::ArenaOptions;
use afresh_frames::{Order, PageKind, Pool, PoolOptions, ZeroPool};
use anyhow::Result;

use super::around::{Answer, FaultAround, Fill};
use super::folios::Folios;
use super::kernel::{FreshMapping, Kernel, MovedMemory, ResidentMemory};
use super::pooled::{ByPage, DirectFrame, MappedFrames, Source};
use super::{Case, Strategy};

/// The construction of a strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Make {
    Resident,
    Kernel(FreshMapping),
    /// Folios of this many KiB.
    Folios(usize),
    Moved,
    Around(Fill, usize, Answer),
    /// An arena on a pool; the last part is whether free memory is zeroed off the clock.
    Mapped(Zeroing, PageKind, Touch),
    Direct(Zeroing),
    /// A reservation filled with leased frames.
    Leased,
    /// A reservation filled by a zero pool.
    ZeroPool,
    /// Page by page: zeroing, pages at once, through the thread's cache.
    ByPage(Zeroing, usize, bool),
}

/// Where zeroing happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Zeroing {
    Background,
    Inline,
    OffTheClock,
}

/// When an arena takes memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Touch {
    Committed,
    Late,
    Adaptive,
}

/// How a strategy's cycles follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    /// One cycle, then think time.
    Think,
    /// Cycles without think time between them.
    Burst,
    /// The same, with every other processor kept busy.
    Starved,
}

/// A named strategy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spec {
    pub(super) name: &'static str,
    make: Make,
    pub(super) pace: Pace,
    /// Run for every case, or for `16MiB/seq` only.
    everywhere: bool,
    /// So slow that one round in four is enough.
    pub(super) slow: bool,
}

const fn spec(name: &'static str, make: Make, everywhere: bool) -> Spec {
    Spec { name, make, pace: Pace::Think, everywhere, slow: false }
}

const fn around(name: &'static str, fill: Fill, window: usize, answer: Answer) -> Spec {
    let slow = window == 1;
    Spec { slow, ..spec(name, Make::Around(fill, window, answer), false) }
}

const fn paced(spec: Spec, pace: Pace) -> Spec {
    Spec { pace, ..spec }
}

use Answer::{Signal, Thread};
use Zeroing::{Background, Inline, OffTheClock};

/// Every strategy, in the order of the report.
const ALL: &[Spec] = &[
    spec("resident", Make::Resident, true),
    spec("plain", Make::Kernel(FreshMapping::Plain), true),
    spec("populate", Make::Kernel(FreshMapping::Populate), true),
    spec("thp", Make::Kernel(FreshMapping::Huge), true),
    spec("mthp-16k", Make::Folios(16), false),
    spec("mthp-64k", Make::Folios(64), false),
    spec("mthp-256k", Make::Folios(256), false),
    spec("mthp-1m", Make::Folios(1024), false),
    spec("memfd", Make::Kernel(FreshMapping::File), false),
    spec("mremap-thp", Make::Moved, false),
    around("sigbus-continue-1", Fill::Continue, 1, Signal),
    around("sigbus-continue-16", Fill::Continue, 16, Signal),
    around("sigbus-continue-64", Fill::Continue, 64, Signal),
    around("sigbus-continue-512", Fill::Continue, 512, Signal),
    around("sigbus-copy-1", Fill::Copy, 1, Signal),
    around("sigbus-copy-16", Fill::Copy, 16, Signal),
    around("sigbus-copy-64", Fill::Copy, 64, Signal),
    around("sigbus-copy-512", Fill::Copy, 512, Signal),
    around("sigbus-zeropage-1", Fill::Zeropage, 1, Signal),
    around("sigbus-zeropage-16", Fill::Zeropage, 16, Signal),
    around("sigbus-zeropage-64", Fill::Zeropage, 64, Signal),
    around("sigbus-zeropage-512", Fill::Zeropage, 512, Signal),
    around("sigbus-move-1", Fill::Move, 1, Signal),
    around("sigbus-move-16", Fill::Move, 16, Signal),
    around("sigbus-move-64", Fill::Move, 64, Signal),
    around("sigbus-move-512", Fill::Move, 512, Signal),
    around("thread-continue-1", Fill::Continue, 1, Thread),
    around("thread-continue-16", Fill::Continue, 16, Thread),
    around("thread-continue-64", Fill::Continue, 64, Thread),
    around("thread-continue-512", Fill::Continue, 512, Thread),
    around("thread-copy-1", Fill::Copy, 1, Thread),
    around("thread-copy-16", Fill::Copy, 16, Thread),
    around("thread-copy-64", Fill::Copy, 64, Thread),
    around("thread-copy-512", Fill::Copy, 512, Thread),
    around("thread-zeropage-1", Fill::Zeropage, 1, Thread),
    around("thread-zeropage-16", Fill::Zeropage, 16, Thread),
    around("thread-zeropage-64", Fill::Zeropage, 64, Thread),
    around("thread-zeropage-512", Fill::Zeropage, 512, Thread),
    around("thread-move-1", Fill::Move, 1, Thread),
    around("thread-move-16", Fill::Move, 16, Thread),
    around("thread-move-64", Fill::Move, 64, Thread),
    around("thread-move-512", Fill::Move, 512, Thread),
    spec("buddy", Make::ByPage(OffTheClock, 1, false), false),
    spec("thread-cache", Make::ByPage(OffTheClock, 1, true), false),
    spec("alloc+zero", Make::ByPage(Inline, 1, false), false),
    spec("alloc+zero-cached", Make::ByPage(Inline, 1, true), false),
    spec("hoist-16", Make::ByPage(Inline, 16, false), false),
    spec("hoist-512", Make::ByPage(Inline, 512, false), false),
    spec("small-pages", Make::Mapped(OffTheClock, PageKind::Small, Touch::Committed), false),
    spec("huge-frames", Make::Mapped(OffTheClock, PageKind::Folios, Touch::Committed), false),
    spec("pool-background", Make::Mapped(Background, PageKind::Folios, Touch::Committed), true),
    spec("pool-inline", Make::Mapped(Inline, PageKind::Folios, Touch::Committed), true),
    paced(
        spec("pool-burst", Make::Mapped(Background, PageKind::Folios, Touch::Committed), false),
        Pace::Burst,
    ),
    paced(
        spec("pool-starved", Make::Mapped(Background, PageKind::Folios, Touch::Committed), false),
        Pace::Starved,
    ),
    spec("pool-direct", Make::Direct(Background), true),
    spec("pool-direct-inline", Make::Direct(Inline), true),
    spec("lease-pool", Make::Leased, true),
    spec("lease-zero-pool", Make::ZeroPool, true),
    spec("arena-on-touch", Make::Mapped(Background, PageKind::Folios, Touch::Late), true),
    spec("arena-adaptive", Make::Mapped(Background, PageKind::Folios, Touch::Adaptive), true),
];

impl Spec {
    /// The strategies of a case; those with a handler thread, and those that set the host up, run
    /// single-threaded.
    pub(super) fn of(case: &Case, threads: usize) -> impl Iterator<Item = &'static Spec> {
        let detailed = case.name == "16MiB/seq";
        ALL.iter().filter(move |spec| {
            let alone = matches!(spec.make, Make::Around(_, _, Thread) | Make::Folios(_))
                || spec.pace != Pace::Think;
            (detailed || spec.everywhere) && (threads == 1 || !alone)
        })
    }

    /// One instance a thread; those of a pool share it.
    pub(super) fn build(&self, case: &Case, threads: usize) -> Result<Vec<Box<dyn Strategy>>> {
        let pages = case.pages;
        let each = |make: &dyn Fn() -> Result<Box<dyn Strategy>>| {
            (0..threads).map(|_| make()).collect::<Result<Vec<_>, _>>()
        };
        match self.make {
            Make::Resident => each(&|| Ok(Box::new(ResidentMemory::new(pages)?))),
            Make::Kernel(fresh) => each(&|| Ok(Box::new(Kernel::new(pages, fresh)?))),
            Make::Folios(kib) => each(&|| Ok(Box::new(Folios::new(pages, kib)?))),
            Make::Moved => each(&|| Ok(Box::new(MovedMemory::new(pages)?))),
            Make::Around(fill, window, answer) => {
                each(&|| Ok(Box::new(FaultAround::new(pages, fill, window, answer)?)))
            }
            Make::Mapped(zeroing, kind, touch) => {
                let pool = pool(zeroing, kind, pages, threads)?;
                let options = match touch {
                    Touch::Committed => ArenaOptions::committed(pages),
                    Touch::Late => ArenaOptions { adapt: false, ..ArenaOptions::on_touch(pages) },
                    Touch::Adaptive => ArenaOptions::on_touch(pages),
                };
                let off = zeroing == OffTheClock;
                each(&|| Ok(Box::new(MappedFrames::new(pool.clone(), options, off)?)))
            }
            Make::Direct(zeroing) => {
                let pool = pool(zeroing, PageKind::Folios, pages, threads)?;
                each(&|| Ok(Box::new(DirectFrame { pool: pool.clone() })))
            }
            Make::Leased => {
                let pool = pool(Background, PageKind::Folios, pages, threads)?;
                each(&|| Ok(Box::new(Source::pool(pages, pool.clone())?)))
            }
            Make::ZeroPool => {
                let zero_pool = Arc::new(ZeroPool::new(pages * threads)?);
                each(&|| Ok(Box::new(Source::zero_pool(pages, zero_pool.clone())?)))
            }
            Make::ByPage(zeroing, window, cached) => {
                let pool = pool(zeroing, PageKind::Folios, pages, threads)?;
                let off = zeroing == OffTheClock;
                each(&|| Ok(Box::new(ByPage::new(pool.clone(), window, cached, off))))
            }
        }
    }
}

/// A pool for `threads` threads, with all its memory resident and clean.
fn pool(zeroing: Zeroing, kind: PageKind, pages: usize, threads: usize) -> Result<Arc<Pool>> {
    // One cycle's memory for each thread, and as much again for the caches of pages.
    let pages = pages.next_multiple_of(Order::HUGE.pages()) * threads;
    let mut options = match zeroing {
        Background => PoolOptions::new(pages),
        Inline | OffTheClock => PoolOptions::inline(pages),
    };
    options.page_kind = kind;
    options.check_zero = false;
    let pool = Pool::new(options)?;
    pool.prefill(pages)?;
    Ok(pool)
}
