//! Sandboxes as agents have them, by the Python package: from a new one to its first command, ten
//! commands, forks that have all answered, a figure, the turn of a coding agent and a call by MCP;
//! with `pydantic-monty` and `sandlock` where the Python has them.
//!
//! A program in Python measures, because the package is what its users call.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::row::{Options, Row, Sink};

const PROGRAM: &str = include_str!("sandbox.py");
/// Further measures of a row: processor time, memory (PSS), and the pages that were written.
const MEASURES: [&str; 4] = ["cpu_us", "pss_kib", "written_kib", "pss_by_written"];

/// Runs the cases with a Python that has the package, and a command of afresh for `afresh mcp`.
///
/// # Errors
/// A Python without the package, a wrong answer, or a rival that fails.
pub fn all(
    python: &Path,
    afresh: &Path,
    options: &Options,
    is_quick: bool,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let (rounds, forks) = if is_quick { (20, 100) } else { (100, 1000) };
    let mut command = Command::new(python);
    command.args(["-c", PROGRAM, "--rounds", &rounds.to_string(), "--forks", &forks.to_string()]);
    command.arg("--afresh").arg(std::path::absolute(afresh)?);
    command.args(["--filter", options.filter.as_deref().unwrap_or_default()]);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", python.display()))?;
    let lines = child.stdout.take().context("its output")?;
    for line in BufReader::new(lines).lines() {
        sink(&row(&line?)?);
    }
    let status = child.wait()?;
    ensure!(status.success(), "the program of the benchmark failed: {status}");
    Ok(())
}

fn row(line: &str) -> anyhow::Result<Row> {
    let row: Value = serde_json::from_str(line).with_context(|| format!("no row: {line}"))?;
    let number = |name: &str| row[name].as_f64().with_context(|| format!("no {name}: {line}"));
    let text = |name: &str| row[name].as_str().map(str::to_owned);
    let samples = row["samples"].as_array().into_iter().flatten();
    Ok(Row {
        table: "sandbox",
        case: text("case").context("a row without a case")?,
        strategy: text("strategy").context("a row without a strategy")?,
        threads: row["threads"].as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(1),
        median: number("median")?,
        min: number("min")?,
        p99: number("p99")?,
        unit: "us",
        samples: samples.filter_map(Value::as_f64).collect(),
        more: MEASURES.iter().filter_map(|name| Some((*name, row.get(name)?.clone()))).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_the_program_is_a_row() {
        let line = r#"{"case": "figure", "strategy": "afresh", "threads": 1, "median": 2.0, "min": 1.0, "p99": 3.5,
            "samples": [1.0, 2.0, 3.5], "pss_kib": 7, "other": 1}"#;
        let read = row(line).unwrap();
        assert_eq!(read.more, [("pss_kib", Value::from(7))]);
        assert_eq!((read.table, read.case.as_str(), read.samples.len()), ("sandbox", "figure", 3));
        assert!(row("{}").is_err() && row("text").is_err());
    }
}
