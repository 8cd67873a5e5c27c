//! Medians and ratios that are taken within a round.

use serde_json::{Value, json};

use crate::Row;
use crate::row::{quantile, spread};

/// The measurements of one run, in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    /// To the last touch.
    pub(super) total: f64,
    /// To the thousandth touch.
    pub(super) first_1000: f64,
    /// Until the source was released; the total for strategies that never release it.
    pub(super) release: f64,
    /// Processor time of the whole process up to the last touch.
    pub(super) cpu: f64,
    /// Faults that were answered in user space.
    pub(super) faults: usize,
}

/// Delays of single touches, in microseconds, from a separate run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Delays {
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    quantile(&mut values.collect::<Vec<_>>(), 0.5)
}

fn round(value: f64) -> Value {
    json!((value * 1000.0).round() / 1000.0)
}

/// One line of results.
pub(super) struct Line<'a> {
    pub(super) table: &'static str,
    pub(super) case: &'a str,
    pub(super) strategy: &'a str,
    pub(super) samples: &'a [Sample],
    /// The rival's samples of the same rounds.
    pub(super) rival: &'a [Sample],
    pub(super) delays: Option<Delays>,
    /// More fields.
    pub(super) extra: Vec<(&'static str, Value)>,
}

impl Line<'_> {
    pub(super) fn row(self) -> Row {
        let Line { samples, rival, .. } = self;
        let ratio = |of: fn(&Sample) -> f64| {
            round(median(samples.iter().zip(rival).map(|(s, r)| of(s) / r.total)))
        };
        let of = |part: fn(&Sample) -> f64| round(median(samples.iter().map(part)));
        let mut more = vec![
            ("ratio", ratio(|s| s.total)),
            ("first_1000", of(|s| s.first_1000)),
            ("release", of(|s| s.release)),
            ("release_ratio", ratio(|s| s.release)),
            ("cpu", of(|s| s.cpu)),
            ("faults", json!(samples.iter().map(|s| s.faults).max().unwrap_or(0))),
        ];
        if let Some(Delays { p50, p99, max }) = self.delays {
            more.push(("touch_us", json!({"p50": p50, "p99": p99, "max": max})));
        }
        more.extend(self.extra);
        let samples: Vec<f64> = samples.iter().map(|s| s.total).collect();
        let [median, min, p99] = spread(samples.clone());
        Row {
            table: self.table,
            case: self.case.to_owned(),
            strategy: self.strategy.to_owned(),
            threads: 1,
            median,
            min,
            p99,
            unit: "ms",
            samples,
            more,
        }
    }
}
