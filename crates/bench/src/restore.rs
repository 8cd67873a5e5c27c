//! The restore benchmark: every strategy of the pager, its rivals, and a plain mmap with the same
//! touches.
//!
//! One word of every page is touched, in random or in sequential order, by reads or by writes; or
//! of a known twentieth of the pages. The clock runs from the call that starts the restore to the
//! last touch. Strategies take turns within a round, so that other load on the machine affects all
//! of them; ratios are taken within a round. `afresh-bench restore` is this module.

mod corpus;
mod delta;
mod guest_delta;
mod report;
mod rivals;
mod run;
mod running;
mod save;
mod second;
mod writer;

use std::path::PathBuf;

use afresh_pager::FillStrategy;
use anyhow::Result;

use crate::Sink;

pub use rivals::Rival;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Memory to restore, in MiB.
    pub mib: usize,
    /// Rounds; each runs every strategy once.
    pub rounds: usize,
    /// Where the files are made; they are removed at the end.
    pub dir: PathBuf,
    /// Only rows whose case or strategy contains this; `mmap` runs in every case that is left. For
    /// `save`, only cases whose name contains this.
    pub filter: Option<String>,
    /// Only these and `mmap`; all when empty.
    pub ways: Vec<Rival>,
    /// Leave out the less important cases.
    pub quick: bool,
    /// Path of the `dirty` sample guest, for `save`.
    pub vm_guest: PathBuf,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            mib: 512,
            rounds: 9,
            dir: std::env::temp_dir(),
            filter: None,
            ways: Vec::new(),
            quick: false,
            vm_guest: PathBuf::from("target/guests/vm/dirty"),
        }
    }
}

impl Options {
    /// Whether a case of `save` takes part.
    fn wants(&self, case: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| case.contains(filter.as_str()))
    }

    /// A run that ends within a minute: half of the memory, fewer rounds, the strategies that a
    /// choice is made among.
    #[must_use]
    pub fn quick() -> Self {
        Self {
            mib: 256,
            rounds: 2,
            quick: true,
            ways: vec![
                Rival::UffdCopy,
                Rival::UffdContinue,
                Rival::Pager(FillStrategy::MapDetach),
                Rival::Pager(FillStrategy::Stream),
                Rival::Pager(FillStrategy::WorkingSet),
                Rival::Pager(FillStrategy::Held),
            ],
            ..Self::default()
        }
    }
}

/// Runs the restore benchmark: a row for every case and strategy.
///
/// # Errors
/// The first that any strategy meets, or a page that holds something else than the file; the
/// benchmark's own files are removed all the same.
pub fn restore(options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    run::run(options, sink)
}

/// Measures how fast a snapshot is written, compared with a plain write and fsync of the same size.
///
/// # Errors
/// As [`restore`].
pub fn save(options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    save::run(options, sink)
}
