//! The restore benchmark: every strategy beside a plain mmap that does the same touches.
//!
//! One word of every page is touched, in random or in sequential order, by reads or by writes; or of a
//! known twentieth of the pages. The clock runs from the call that starts the restore to the last touch.
//! Strategies take turns within a round, so that whatever else the machine does falls on all of them;
//! ratios are taken within a round. `afresh bench restore` is this module.

mod corpus;
mod report;
mod run;
mod save;

use std::path::PathBuf;

use crate::{RestoreError, Strategy};

/// What to measure.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Memory to restore, in MiB.
    pub mib: usize,
    /// Rounds, each of which runs every strategy once.
    pub rounds: usize,
    /// Where the files are made; they are removed at the end.
    pub dir: PathBuf,
    /// Only cases whose name contains this.
    pub case: Option<String>,
    /// Only these strategies, beside `mmap`; all when empty.
    pub strategies: Vec<Strategy>,
    /// Leave the less telling cases out.
    pub quick: bool,
}

impl Default for BenchOptions {
    fn default() -> Self {
        Self {
            mib: 512,
            rounds: 9,
            dir: std::env::temp_dir(),
            case: None,
            strategies: Vec::new(),
            quick: false,
        }
    }
}

impl BenchOptions {
    /// A run that ends within a minute: fewer rounds, the strategies that a choice is made among.
    #[must_use]
    pub fn quick() -> Self {
        Self {
            rounds: 2,
            quick: true,
            strategies: vec![
                Strategy::MapDetach,
                Strategy::CopyHybrid,
                Strategy::UffdCopy,
                Strategy::UffdContinue,
                Strategy::WorkingSet,
                Strategy::Held,
            ],
            ..Self::default()
        }
    }
}

/// A benchmark could not be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// A file could not be made or read, or the results not be written.
    #[error("benchmark files: {0}")]
    Io(#[from] std::io::Error),
    /// A restore failed.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// A system call failed.
    #[error(transparent)]
    Sys(#[from] afresh_sys::SysError),
    /// A restored page held something else than the file.
    #[error("strategy {strategy} restored wrong bytes in case {case}")]
    Wrong {
        /// The strategy.
        strategy: &'static str,
        /// The case.
        case: &'static str,
    },
    /// A snapshot could not be written.
    #[error(transparent)]
    Save(#[from] afresh_store::SaveError),
}

/// Runs the restore benchmark and writes a JSON line for every case and strategy to `out`.
///
/// # Errors
/// [`BenchError`]; files are removed all the same.
pub fn restore(options: &BenchOptions, out: &mut dyn std::io::Write) -> Result<(), BenchError> {
    run::run(options, out)
}

/// Measures how fast a snapshot is written, beside a plain write and fsync of as many bytes.
///
/// # Errors
/// [`BenchError`]; files are removed all the same.
pub fn save(options: &BenchOptions, out: &mut dyn std::io::Write) -> Result<(), BenchError> {
    save::run(options, out)
}
