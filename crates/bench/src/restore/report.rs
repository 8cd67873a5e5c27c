//! Medians, paired ratios, JSON lines.

use std::io::Write;

use serde_json::{Map, Value, json};

/// What one run measured, in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    /// To the last touch.
    pub(super) total: f64,
    /// To the thousandth touch.
    pub(super) first_1000: f64,
    /// Until the source was let go; the total for strategies that never let go.
    pub(super) release: f64,
    /// Processor time of the whole process up to the last touch.
    pub(super) cpu: f64,
    /// Faults that were answered in user space.
    pub(super) faults: usize,
}

/// Delays of single touches, in microseconds, from a run of their own.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Delays {
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

pub(super) fn quantile(values: &mut [f64], q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = ((values.len().saturating_sub(1)) as f64 * q).round() as usize;
    values.get(at).copied().unwrap_or(f64::NAN)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    quantile(&mut values.collect::<Vec<_>>(), 0.5)
}

fn round(value: f64) -> Value {
    json!((value * 1000.0).round() / 1000.0)
}

/// One line of results.
pub(super) struct Line<'a> {
    pub(super) table: &'a str,
    pub(super) case: &'a str,
    pub(super) strategy: &'a str,
    pub(super) samples: &'a [Sample],
    /// The rival's samples of the same rounds.
    pub(super) rival: &'a [Sample],
    pub(super) delays: Option<Delays>,
    /// More fields.
    pub(super) extra: &'a [(&'a str, Value)],
}

impl Line<'_> {
    /// Writes the line as JSON.
    pub(super) fn write(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let Line { samples, rival, .. } = *self;
        let mut totals: Vec<f64> = samples.iter().map(|s| s.total).collect();
        let ratio = |of: fn(&Sample) -> f64| {
            round(median(samples.iter().zip(rival).map(|(s, r)| of(s) / r.total)))
        };
        let mut fields = Map::new();
        let mut set = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        set("table", json!(self.table));
        set("case", json!(self.case));
        set("strategy", json!(self.strategy));
        set("threads", json!(1));
        set("median", round(quantile(&mut totals, 0.5)));
        set("min", round(quantile(&mut totals, 0.0)));
        set("p99", round(quantile(&mut totals, 0.99)));
        set("unit", json!("ms"));
        set("ratio", ratio(|s| s.total));
        set("first_1000", round(median(samples.iter().map(|s| s.first_1000))));
        set("release", round(median(samples.iter().map(|s| s.release))));
        set("release_ratio", ratio(|s| s.release));
        set("cpu", round(median(samples.iter().map(|s| s.cpu))));
        set("faults", json!(samples.iter().map(|s| s.faults).max().unwrap_or(0)));
        if let Some(delays) = self.delays {
            set("touch_us", json!({"p50": delays.p50, "p99": delays.p99, "max": delays.max}));
        }
        for (name, value) in self.extra {
            set(name, value.clone());
        }
        writeln!(out, "{}", Value::Object(fields))?;
        out.flush()
    }
}
