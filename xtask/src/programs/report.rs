//! The results of a run: a table, JSON, and the page of the documentation.

use std::fmt::Write;
use std::fs;

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::case::ProgramCase;
use crate::host;

/// The page, and the line in it below which the table is written.
const PAGE: &str = "docs/linux-programs.md";
const MARK: &str = "<!-- written by cargo xtask programs -->";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Passed,
    Failed,
    Skipped,
}

/// The result of a case.
pub(super) struct Row {
    pub(super) case: &'static ProgramCase,
    pub(super) verdict: Verdict,
    /// Why it failed or was skipped.
    pub(super) reason: String,
    /// Seconds of each run.
    pub(super) native: Vec<f64>,
    pub(super) guest: Vec<f64>,
}

fn median(seconds: &[f64]) -> Option<f64> {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

fn least(seconds: &[f64]) -> Option<f64> {
    seconds.iter().copied().min_by(f64::total_cmp)
}

/// A duration as `1.23 s`, or a dash.
fn time(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| "–".to_owned(), |seconds| format!("{seconds:.2} s"))
}

impl Row {
    pub(super) fn new(case: &'static ProgramCase, verdict: Verdict) -> Self {
        Self { case, verdict, reason: String::new(), native: Vec::new(), guest: Vec::new() }
    }

    /// Whether the result is that of the list: a program with a known reason fails, and any other
    /// passes or is skipped.
    pub(super) fn is_expected(&self) -> bool {
        match self.verdict {
            Verdict::Skipped => true,
            verdict => (verdict == Verdict::Failed) == self.case.fails.is_some(),
        }
    }

    fn ratio(&self, of: fn(&[f64]) -> Option<f64>) -> Option<f64> {
        Some(of(&self.guest)? / of(&self.native)?)
    }

    /// The result in words.
    fn result(&self) -> String {
        match (self.verdict, self.case.fails) {
            (Verdict::Passed, None) => "same output".to_owned(),
            (Verdict::Passed, Some(why)) => format!("same output, though the list says: {why}"),
            (Verdict::Failed, Some(why)) => format!("fails: {why}"),
            (Verdict::Failed, None) => format!("FAILED: {}", self.reason),
            (Verdict::Skipped, _) => format!("SKIPPED: {}", self.reason),
        }
    }

    /// The line that is printed when the case has ended.
    pub(super) fn line(&self) -> String {
        let ratio =
            self.ratio(median).map_or_else(String::new, |ratio| format!(", {ratio:.1} times"));
        let (native, guest) = (time(median(&self.native)), time(median(&self.guest)));
        format!("{}: {} (native {native}, guest {guest}{ratio})", self.case.name, self.result())
    }
}

/// The table, in Markdown.
pub(super) fn table(rows: &[Row]) -> String {
    let mut text = "| program | use | native | guest | ratio | least | result |\n|---|---|---|---|---|---|---|\n".to_owned();
    for row in rows {
        let ratio =
            |of| row.ratio(of).map_or_else(|| "–".to_owned(), |ratio: f64| format!("{ratio:.1}"));
        let (native, guest) = (time(median(&row.native)), time(median(&row.guest)));
        let result = row.result().replace('|', "\\|");
        let _ = writeln!(
            text,
            "| {} | {} | {native} | {guest} | {} | {} | {result} |",
            row.case.name,
            row.case.about,
            ratio(median),
            ratio(least),
        );
    }
    text
}

/// The last line of a run.
pub(super) fn summary(rows: &[Row]) -> String {
    let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
    let [passed, failed, skipped] = [Verdict::Passed, Verdict::Failed, Verdict::Skipped].map(count);
    let unexpected: Vec<_> =
        rows.iter().filter(|row| !row.is_expected()).map(|row| row.case.name).collect();
    let tail = if unexpected.is_empty() {
        String::new()
    } else {
        format!("; not as listed: {}", unexpected.join("; "))
    };
    format!("{passed} programs passed, {failed} failed, {skipped} skipped{tail}")
}

pub(super) fn write_json(rows: &[Row]) -> Result<()> {
    let row = |row: &Row| {
        json!({
            "program": row.case.name, "use": row.case.about, "result": format!("{:?}", row.verdict).to_lowercase(),
            "expected": row.is_expected(), "reason": row.case.fails.unwrap_or(&row.reason),
            "native_seconds": {"median": median(&row.native), "least": least(&row.native)},
            "guest_seconds": {"median": median(&row.guest), "least": least(&row.guest)},
            "ratio": {"median": row.ratio(median), "least": row.ratio(least)},
        })
    };
    let path = host::target_folder().join("programs/results.json");
    let rows: Vec<_> = rows.iter().map(row).collect();
    let text = serde_json::to_string_pretty(&json!({ "programs": rows }))?;
    fs::write(&path, text).with_context(|| path.display().to_string())?;
    println!("\nwritten to {}", path.display());
    Ok(())
}

/// Writes the table into the documentation, below the text there.
pub(super) fn write_page(rows: &[Row]) -> Result<()> {
    let path = host::repository().join(PAGE);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let Some((before, _)) = text.split_once(MARK) else {
        bail!("{} has no line {MARK:?}", path.display());
    };
    let text = format!("{before}{MARK}\n\n{}\n\n{}", summary(rows), table(rows));
    fs::write(&path, text).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    static CASE: ProgramCase = ProgramCase { name: "p", ..ProgramCase::EMPTY };
    static FAILING: ProgramCase =
        ProgramCase { name: "q", fails: Some("no call"), ..ProgramCase::EMPTY };

    #[test]
    fn a_failure_is_expected_where_the_list_has_its_reason() {
        let expected = |case, verdict| Row::new(case, verdict).is_expected();
        assert!(expected(&CASE, Verdict::Passed) && !expected(&CASE, Verdict::Failed));
        assert!(expected(&FAILING, Verdict::Failed) && !expected(&FAILING, Verdict::Passed));
        assert!(expected(&CASE, Verdict::Skipped));
    }

    #[test]
    fn a_row_has_medians_and_the_least_ratio() {
        let row = Row {
            native: vec![1.0, 3.0, 2.0],
            guest: vec![4.0, 9.0, 6.0],
            ..Row::new(&CASE, Verdict::Passed)
        };
        let table = table(&[row]);
        assert!(
            table.ends_with("| p |  | 2.00 s | 6.00 s | 3.0 | 4.0 | same output |\n"),
            "{table}"
        );
    }
}
