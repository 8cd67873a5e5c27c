//! The comparison of two reports: which changes are real.
//!
//! The median of a row has a confidence interval from order statistics, which assume nothing about
//! the distribution: with n rounds, the k-th smallest and the k-th largest sample enclose the
//! median with a probability that the binomial distribution gives. Two intervals of 97.5 % give one
//! of at least 95 % for the ratio of two medians. A row changed when this interval excludes 1 by
//! itself and also after division by the drift of the rivals in the same table: the rivals' code is
//! the same in both runs, so their change is the host's.

use std::collections::BTreeMap;
use std::fmt;

use super::{Measurement, Report, Side};

/// Probability that a median is within its interval.
const CONFIDENCE: f64 = 0.975;
/// Rival rows that a table needs before their drift is used.
const MIN_RIVALS: usize = 3;

/// The rows of two reports side by side.
#[derive(Clone, Debug)]
pub struct Comparison {
    changes: Vec<Change>,
    drifts: BTreeMap<String, f64>,
    unmatched: usize,
}

/// One row in both reports.
#[derive(Clone, Debug)]
struct Change {
    name: String,
    unit: String,
    before: f64,
    after: f64,
    /// Bounds of `after / before`, if both rows have enough rounds.
    bounds: Option<(f64, f64)>,
    verdict: Verdict,
}

/// The result for one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Faster,
    Slower,
    Unchanged,
    /// Too few rounds for an interval.
    Undecided,
}

impl Comparison {
    /// Compares rows with the same table, case, strategy and number of threads.
    #[must_use]
    pub fn new(before: &Report, after: &Report) -> Self {
        let key = |row: &Measurement| {
            (row.table.clone(), row.case.clone(), row.strategy.clone(), row.threads)
        };
        let old: BTreeMap<_, _> = before.rows().map(|row| (key(row), row)).collect();
        let mut pairs = Vec::new();
        let mut unmatched = 0;
        for row in after.rows() {
            match old.get(&key(row)) {
                Some(old) if old.unit == row.unit => pairs.push((*old, row)),
                _ => unmatched += 1,
            }
        }
        let mut ratios: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for (old, new) in &pairs {
            if new.side() == Side::Rival && old.median > 0.0 {
                ratios.entry(new.table.clone()).or_default().push(new.median / old.median);
            }
        }
        ratios.retain(|_, ratios| ratios.len() >= MIN_RIVALS);
        let drifts: BTreeMap<String, f64> = ratios
            .into_iter()
            .map(|(table, mut ratios)| (table, crate::row::quantile(&mut ratios, 0.5)))
            .collect();
        let changes = pairs
            .into_iter()
            .filter(|(_, new)| new.side() == Side::Afresh)
            .map(|(old, new)| Change::new(old, new, drifts.get(&new.table).copied()))
            .collect();
        Self { changes, drifts, unmatched }
    }

    /// Whether a row of the later report is slower.
    #[must_use]
    pub fn has_slower(&self) -> bool {
        self.changes.iter().any(|change| change.verdict == Verdict::Slower)
    }
}

impl Change {
    fn new(before: &Measurement, after: &Measurement, drift: Option<f64>) -> Self {
        let bounds = match (interval(&before.samples), interval(&after.samples)) {
            (Some((old_low, old_high)), Some((low, high))) if old_low > 0.0 => {
                Some((low / old_high, high / old_low))
            }
            _ => None,
        };
        let drift = drift.unwrap_or(1.0);
        let verdict = match bounds {
            None => Verdict::Undecided,
            Some((low, _)) if low > drift.max(1.0) => Verdict::Slower,
            Some((_, high)) if high < drift.min(1.0) => Verdict::Faster,
            Some(_) => Verdict::Unchanged,
        };
        Self {
            name: after.name(),
            unit: after.unit.clone(),
            before: before.median,
            after: after.median,
            bounds,
            verdict,
        }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (table, drift) in &self.drifts {
            writeln!(f, "{table}: the rivals of the later report take {drift:.3} times as long")?;
        }
        for (verdict, heading) in [(Verdict::Slower, "slower"), (Verdict::Faster, "faster")] {
            let changes: Vec<&Change> =
                self.changes.iter().filter(|change| change.verdict == verdict).collect();
            if changes.is_empty() {
                continue;
            }
            writeln!(f, "\n{heading}:")?;
            for Change { name, unit, before, after, bounds, .. } in changes {
                let (low, high) = bounds.unwrap_or((f64::NAN, f64::NAN));
                writeln!(
                    f,
                    "  {name:<56} {before:>11.3} to {after:>11.3} {unit}, {:.2}x, 95 % within {low:.2} to {high:.2}",
                    after / before
                )?;
            }
        }
        let count = |verdict| self.changes.iter().filter(|c| c.verdict == verdict).count();
        write!(
            f,
            "\n{} slower, {} faster, {} without a change, {} with too few rounds to decide, {} in the later report \
             alone",
            count(Verdict::Slower),
            count(Verdict::Faster),
            count(Verdict::Unchanged),
            count(Verdict::Undecided),
            self.unmatched
        )
    }
}

/// An interval that holds the median with at least [`CONFIDENCE`]; `None` with too few samples.
fn interval(samples: &[f64]) -> Option<(f64, f64)> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    // The probability that fewer than `k` of `n` samples are below the median, for k = 0, 1, …
    let mut term = 0.5f64.powi(i32::try_from(n).ok()?);
    let mut below = 0.0;
    let mut bounds = None;
    for k in 0..n / 2 {
        below += term;
        if 1.0 - 2.0 * below < CONFIDENCE {
            break;
        }
        bounds = Some((sorted[k], sorted[n - 1 - k]));
        term *= (n - k) as f64 / (k + 1) as f64;
    }
    bounds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::TableResult;

    fn row(strategy: &str, samples: &[f64]) -> Measurement {
        let mut sorted = samples.to_vec();
        let median = crate::row::quantile(&mut sorted, 0.5);
        Measurement {
            table: "wasm".to_owned(),
            case: "small/empty".to_owned(),
            strategy: strategy.to_owned(),
            threads: 1,
            median,
            min: sorted[0],
            p99: sorted[sorted.len() - 1],
            unit: "us".to_owned(),
            samples: samples.to_vec(),
            more: serde_json::Map::new(),
        }
    }

    fn report(rows: Vec<Measurement>) -> Report {
        let table = TableResult { name: "wasm".to_owned(), rows, ..TableResult::default() };
        Report { tables: vec![table], ..Report::default() }
    }

    fn around(centre: f64) -> Vec<f64> {
        (-10..=10).map(|n| centre * (1.0 + 0.002 * f64::from(n))).collect()
    }

    #[test]
    fn the_interval_of_a_median_is_that_of_the_binomial_distribution() {
        let samples: Vec<f64> = (1..=20).map(f64::from).collect();
        // P(5 <= B(20, 1/2) <= 15) = 0.988, P(6 <= B <= 14) = 0.959.
        assert_eq!(interval(&samples), Some((5.0, 16.0)));
        assert_eq!(interval(&samples[..7]), Some((1.0, 7.0)));
        assert_eq!(interval(&samples[..5]), None);
        assert_eq!(interval(&[]), None);
    }

    #[test]
    fn a_row_that_moved_with_its_rivals_did_not_change() {
        let rivals = ["wasmtime/a", "wasmtime/b", "wasmtime/c"];
        let run = |ours: f64, theirs: f64| {
            let rows = rivals.iter().map(|rival| row(rival, &around(theirs)));
            report(rows.chain([row("reset", &around(ours))]).collect())
        };
        let before = run(1.0, 20.0);
        for (after, verdict) in [
            (run(1.0, 20.0), Verdict::Unchanged),
            (run(1.3, 20.0), Verdict::Slower),
            (run(1.3, 26.0), Verdict::Unchanged),
            (run(0.7, 20.0), Verdict::Faster),
            (run(0.7, 14.0), Verdict::Unchanged),
        ] {
            let comparison = Comparison::new(&before, &after);
            assert_eq!(comparison.changes.len(), 1);
            assert_eq!(comparison.changes[0].verdict, verdict, "{comparison}");
            assert_eq!(comparison.has_slower(), verdict == Verdict::Slower);
        }
    }

    #[test]
    fn rows_with_few_rounds_are_not_decided() {
        let before = report(vec![row("reset", &[1.0, 1.0, 1.0])]);
        let after = report(vec![row("reset", &[9.0, 9.0, 9.0])]);
        let comparison = Comparison::new(&before, &after);
        assert_eq!(comparison.changes[0].verdict, Verdict::Undecided);
        assert!(!comparison.has_slower());
    }
}
