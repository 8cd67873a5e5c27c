//! Rows that another program measures and prints, one JSON object a line.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::row::{Options, Row, Sink};

/// Runs `command` to its end and hands on its rows as rows of `table`, with these further measures
/// where a row has them. Its standard error is ours.
///
/// # Errors
/// When the program does not run, prints something else, or fails.
pub(crate) fn run(
    mut command: Command,
    table: &'static str,
    measures: &[&'static str],
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {name}"))?;
    let output = child.stdout.take().context("no standard output")?;
    let rows = BufReader::new(output).lines().try_for_each(|line| {
        let row = parse(&line?, table, measures)?;
        if options.wants(&row.case, &row.strategy) {
            sink(&row);
        }
        anyhow::Ok(())
    });
    if rows.is_err() {
        // The kill fails only if the program has ended.
        let _ = child.kill();
    }
    let status = child.wait()?;
    rows.with_context(|| format!("the rows of {name}"))?;
    ensure!(status.success(), "{name} failed: {status}");
    Ok(())
}

/// One row.
fn parse(line: &str, table: &'static str, measures: &[&'static str]) -> anyhow::Result<Row> {
    let row: Value = serde_json::from_str(line).with_context(|| format!("no row: {line}"))?;
    let number = |name: &str| row[name].as_f64().with_context(|| format!("no {name}: {line}"));
    let text = |name: &str| {
        row[name].as_str().map(str::to_owned).with_context(|| format!("no {name}: {line}"))
    };
    let samples = row["samples"].as_array().into_iter().flatten();
    Ok(Row {
        table,
        case: text("case")?,
        strategy: text("strategy")?,
        threads: row["threads"].as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(1),
        median: number("median")?,
        min: number("min")?,
        p99: number("p99")?,
        unit: "us",
        samples: samples.filter_map(Value::as_f64).collect(),
        more: measures.iter().filter_map(|name| Some((*name, row.get(name)?.clone()))).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"case": "png", "strategy": "afl++/persistent", "median": 20.0,
        "min": 18.5, "p99": 31.0, "samples": [18.5, 20.0, 31.0], "pss_kib": 7, "other": 1}"#;

    fn rows(script: &str, filter: Option<&str>) -> anyhow::Result<Vec<Row>> {
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh", &LINE.replace('\n', "")]);
        let options = Options { filter: filter.map(str::to_owned), ..Options::quick() };
        let mut rows = Vec::new();
        run(command, "fuzz", &["pss_kib"], &options, &mut |row| rows.push(row.clone()))?;
        Ok(rows)
    }

    #[test]
    fn rows_of_a_program_are_rows_of_the_table() {
        let row = &rows("echo \"$1\"", None).unwrap()[0];
        let seen = (row.table, row.case.as_str(), row.strategy.as_str(), row.threads, row.median);
        assert_eq!(seen, ("fuzz", "png", "afl++/persistent", 1, 20.0));
        assert_eq!(row.samples, [18.5, 20.0, 31.0]);
        assert_eq!(row.more, [("pss_kib", Value::from(7))]);
        assert!(rows("echo \"$1\"", Some("afresh")).unwrap().is_empty());
    }

    #[test]
    fn a_program_that_fails_or_prints_something_else_is_an_error() {
        let failed = |script| format!("{:#}", rows(script, None).unwrap_err());
        assert!(failed("echo \"$1\"; exit 3").contains("exit status: 3"));
        assert!(failed("echo hello; sleep 60").contains("no row: hello"));
        assert!(failed("echo '{}'").contains("no case"));
    }
}
