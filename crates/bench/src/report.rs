//! One report of all tables: measured table by table, kept as JSON, shown as one page.

mod chart;
mod compare;
mod machine;
mod page;
mod published;
mod runner;
mod side;

use std::path::Path;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use compare::Comparison;
pub use machine::Machine;
pub use runner::{RunOptions, run};
pub use side::Side;

/// Version of `report.json`.
const FORMAT: u32 = 1;
/// Largest `report.json` that is read. A full run writes less than 1 MiB.
const MAX_REPORT: u64 = 64 << 20;

/// The results of one run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Version of the file.
    pub format: u32,
    /// Seconds since 1970 at the start.
    pub started: u64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Whether it was a rough run.
    pub quick: bool,
    /// Machine and versions.
    pub machine: Machine,
    /// Tables in the order in which they ran.
    pub tables: Vec<TableResult>,
}

/// The results of one table.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TableResult {
    /// Name of the table.
    pub name: String,
    /// Command that repeats it.
    pub command: String,
    /// Duration in seconds.
    pub seconds: f64,
    /// Rows in the order in which they were measured.
    pub rows: Vec<Measurement>,
    /// Messages of the benchmark, among them the reasons of rows that were left out.
    pub notes: Vec<String>,
    /// Reason why the table is incomplete.
    pub error: Option<String>,
}

/// A row as read from JSON. [`Row`](crate::Row) describes the fields.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measurement {
    /// Table of the row.
    pub table: String,
    /// What was done.
    pub case: String,
    /// By which means.
    pub strategy: String,
    /// By how many threads.
    pub threads: usize,
    /// Median over rounds.
    pub median: f64,
    /// Smallest of all rounds.
    pub min: f64,
    /// 99th percentile over rounds.
    pub p99: f64,
    /// Unit of the figures.
    pub unit: String,
    /// The figure of each round.
    #[serde(default)]
    pub samples: Vec<f64>,
    /// Further columns.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

impl Measurement {
    /// Table, case, strategy and, if there are several, threads.
    fn name(&self) -> String {
        let threads = match self.threads {
            0 | 1 => String::new(),
            threads => format!(", {threads} threads"),
        };
        format!("{} {} {}{threads}", self.table, self.case, self.strategy)
    }
}

impl Report {
    /// Reads the report in `directory`.
    ///
    /// # Errors
    /// When the file cannot be read, is larger than 64 MiB, or belongs to another version.
    pub fn read(directory: &Path) -> anyhow::Result<Self> {
        let path = directory.join("report.json");
        let context = || format!("cannot read {}", path.display());
        let len = std::fs::metadata(&path).with_context(context)?.len();
        anyhow::ensure!(len <= MAX_REPORT, "{} is larger than {MAX_REPORT} bytes", path.display());
        let text = std::fs::read_to_string(&path).with_context(context)?;
        let report: Self = serde_json::from_str(&text).with_context(context)?;
        anyhow::ensure!(
            report.format == FORMAT,
            "{} has format {}; this version reads format {FORMAT}",
            path.display(),
            report.format
        );
        Ok(report)
    }

    /// Writes `report.json` and `index.html` into `directory`.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write(&self, directory: &Path) -> anyhow::Result<()> {
        for (name, text) in
            [("report.json", serde_json::to_string_pretty(self)?), ("index.html", page::html(self))]
        {
            let path = directory.join(name);
            std::fs::write(&path, text)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    /// Names of the tables that are incomplete.
    pub fn failed(&self) -> impl Iterator<Item = &str> {
        self.tables.iter().filter(|table| table.error.is_some()).map(|table| table.name.as_str())
    }

    /// The rows of all tables.
    fn rows(&self) -> impl Iterator<Item = &Measurement> {
        self.tables.iter().flat_map(|table| &table.rows)
    }
}
