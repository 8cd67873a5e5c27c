//! Rows of results, and the contest that makes them.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Rounds of a row in JSON. Of more rounds, every nth is written.
const MAX_SAMPLES: usize = 256;

/// One result.
#[derive(Clone, Debug)]
pub struct Row {
    /// Which table it belongs to.
    pub table: &'static str,
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
    /// The unit of the three figures; lower is better.
    pub unit: &'static str,
    /// The figure of each round, in the order of the rounds; empty where a table has none.
    pub samples: Vec<f64>,
    /// Further columns of the table, by name.
    pub more: Vec<(&'static str, Value)>,
}

impl Row {
    /// One JSON object, on one line.
    #[must_use]
    pub fn json(&self) -> String {
        let round = |v: f64| (v * 10_000.0).round() / 10_000.0;
        let mut row = json!({
            "table": self.table, "case": self.case, "strategy": self.strategy,
            "threads": self.threads, "median": round(self.median), "min": round(self.min),
            "p99": round(self.p99), "unit": self.unit,
        });
        if !self.samples.is_empty() {
            let stride = self.samples.len().div_ceil(MAX_SAMPLES);
            row["samples"] = self.samples.iter().step_by(stride).copied().map(round).collect();
        }
        for (name, value) in &self.more {
            row[*name] = value.clone();
        }
        row.to_string()
    }
}

/// Takes rows as they come.
pub type Sink<'a> = dyn FnMut(&Row) + 'a;

/// The extent of the measurement.
#[derive(Clone, Debug)]
pub struct Options {
    /// Rounds per case.
    pub rounds: usize,
    /// Time per contestant and round.
    pub batch: Duration,
    /// Only contestants whose case, strategy, or both with a space between contain this.
    pub filter: Option<String>,
}

impl Options {
    /// Enough for figures to quote.
    #[must_use]
    pub fn full() -> Self {
        Self { rounds: 31, batch: Duration::from_millis(12), filter: None }
    }

    /// A rough look, within a minute for a whole table.
    #[must_use]
    pub fn quick() -> Self {
        Self { rounds: 7, batch: Duration::from_millis(4), filter: None }
    }

    /// Whether a contestant takes part.
    #[must_use]
    pub fn wants(&self, case: &str, strategy: &str) -> bool {
        let name = format!("{case} {strategy}");
        self.filter.as_ref().is_none_or(|f| name.contains(f.as_str()))
    }

    /// Whether any contestant takes part in any of these cases, so that the shared part must be
    /// made.
    #[must_use]
    pub fn wants_any(&self, cases: &[&str], strategies: &[&str]) -> bool {
        let mut all = cases.iter().flat_map(|case| strategies.iter().map(move |by| (case, by)));
        all.any(|(case, strategy)| self.wants(case, strategy))
    }
}

/// Something to time: runs the given number of iterations.
pub struct Contestant<'a> {
    /// Its name in the rows.
    pub strategy: String,
    run: Box<dyn FnMut(u64) -> anyhow::Result<Duration> + 'a>,
}

impl<'a> Contestant<'a> {
    /// A contestant whose iterations are timed from outside.
    pub fn new(
        strategy: impl Into<String>,
        mut once: impl FnMut() -> anyhow::Result<()> + 'a,
    ) -> Self {
        Self::timed(strategy, move |n| {
            let started = Instant::now();
            for _ in 0..n {
                once()?;
            }
            Ok(started.elapsed())
        })
    }

    /// A contestant that times itself, so that its preparation stays outside the clock.
    pub fn timed(
        strategy: impl Into<String>,
        run: impl FnMut(u64) -> anyhow::Result<Duration> + 'a,
    ) -> Self {
        Self { strategy: strategy.into(), run: Box::new(run) }
    }
}

/// Part of a batch that runs before its clock starts.
const WARMING: u64 = 8;

/// Lets the contestants take turns and reports each one's time per iteration, in microseconds.
///
/// # Errors
/// The first error of a contestant, with its name.
pub fn contest(
    table: &'static str,
    case: &str,
    options: &Options,
    contestants: Vec<Contestant<'_>>,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let mut field: Vec<(Contestant<'_>, u64, Vec<f64>)> = Vec::new();
    for mut contestant in contestants {
        if !options.wants(case, &contestant.strategy) {
            continue;
        }
        // Warm up, and find how many iterations fill a batch.
        let mut iterations = 1u64;
        loop {
            let took = (contestant.run)(iterations)
                .map_err(|e| e.context(format!("{case} by {}", contestant.strategy)))?;
            if took >= options.batch / 2 || iterations >= 1 << 22 {
                let target = options.batch.as_secs_f64() / took.as_secs_f64().max(1e-9);
                iterations = ((iterations as f64 * target) as u64).max(1);
                break;
            }
            iterations *= 4;
        }
        field.push((contestant, iterations, Vec::with_capacity(options.rounds)));
    }
    let contestants = field.len();
    for round in 0..options.rounds {
        // Each round begins with another one, so that no contestant always runs after the same
        // neighbour and its traces in caches and kernel; a part of a batch runs before the clock
        // starts.
        for turn in 0..contestants {
            let (contestant, iterations, times) = &mut field[(round + turn) % contestants];
            let mut run = |n| {
                (contestant.run)(n)
                    .map_err(|e| e.context(format!("{case} by {}", contestant.strategy)))
            };
            run((*iterations / WARMING).max(1))?;
            let took = run(*iterations)?;
            times.push(took.as_secs_f64() * 1e6 / *iterations as f64);
        }
    }
    for (contestant, _, times) in field {
        sink(&summarise(table, case, contestant.strategy, 1, times));
    }
    Ok(())
}

/// A row from times in microseconds.
#[must_use]
pub fn summarise(
    table: &'static str,
    case: &str,
    strategy: String,
    threads: usize,
    times: Vec<f64>,
) -> Row {
    let [median, min, p99] = spread(times.clone());
    let (case, samples) = (case.to_owned(), times);
    Row { table, case, strategy, threads, median, min, p99, unit: "us", samples, more: Vec::new() }
}

/// Median, minimum and 99th percentile; zeros without values.
pub(crate) fn spread(mut values: Vec<f64>) -> [f64; 3] {
    [0.5, 0.0, 0.99].map(|q| quantile(&mut values, q))
}

/// The value that a share `q` of the values does not exceed; sorts them.
pub(crate) fn quantile(values: &mut [f64], q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len().saturating_sub(1) as f64 * q).round() as usize;
    values.get(at).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spread_of_a_hundred_and_one_values_is_exact() {
        assert_eq!(spread((0..=100).rev().map(f64::from).collect()), [50.0, 0.0, 99.0]);
        assert!(spread(Vec::new())[0].is_nan());
    }

    #[test]
    fn a_filter_chooses_a_case_by_any_part_of_its_whole_name() {
        let cases = ["sandbox/create", "sandbox/fork100"];
        for (filter, wanted) in [
            (None, true),
            (Some("sandbox"), true),
            (Some("sandbox/fork100"), true),
            (Some("fork100"), true),
            (Some("afresh"), true),
            (Some("sandbox/fork1000"), false),
            (Some("hello"), false),
        ] {
            let options = Options { filter: filter.map(str::to_owned), ..Options::quick() };
            assert_eq!(options.wants_any(&cases, &["afresh"]), wanted, "{filter:?}");
        }
    }

    #[test]
    fn a_contest_reports_every_contestant_once_with_its_own_time() {
        let options =
            Options { rounds: 3, batch: Duration::from_micros(100), filter: Some("a".to_owned()) };
        let mut rows = Vec::new();
        let sleepy = |us| move |n: u64| Ok(Duration::from_micros(us * n));
        let field = vec![
            Contestant::timed("a", sleepy(5)),
            Contestant::timed("ab", sleepy(7)),
            Contestant::timed("x", sleepy(9)),
        ];
        contest("t", "c", &options, field, &mut |row| rows.push(row.clone())).unwrap();
        let found: Vec<_> = rows.iter().map(|r| (r.strategy.as_str(), r.median.round())).collect();
        assert_eq!(found, [("a", 5.0), ("ab", 7.0)]);
        assert!(
            rows[0].json().starts_with(r#"{"table":"t","case":"c","strategy":"a","threads":1"#)
        );
    }

    #[test]
    fn a_filter_names_a_case_or_a_strategy_or_one_of_each() {
        let wants = |filter: &str, case: &str, strategy: &str| {
            let options = Options { filter: Some(filter.to_owned()), ..Options::quick() };
            options.wants(case, strategy)
        };
        assert!(wants("python", "python/pass", "reset"));
        assert!(wants("reset", "python/pass", "reset"));
        assert!(wants("python/pass reset", "python/pass", "reset"));
        assert!(!wants("python/pass reset", "python/pass", "fresh"));
        assert!(!wants("python/pass reset", "js/request", "reset"));
        assert!(Options::quick().wants("any", "any"));
    }
}
