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
    /// Leave out the less important cases.
    pub quick: bool,
}

impl Options {
    /// Enough for figures to quote.
    #[must_use]
    pub fn full() -> Self {
        Self { rounds: 31, batch: Duration::from_millis(12), filter: None, quick: false }
    }

    /// A rough look, within a minute for a whole table.
    #[must_use]
    pub fn quick() -> Self {
        Self { rounds: 7, batch: Duration::from_millis(4), filter: None, quick: true }
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
    is_optional: bool,
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
        Self { strategy: strategy.into(), is_optional: false, run: Box::new(run) }
    }

    /// Lets an error of this contestant leave out its row. It does not end the contest.
    #[must_use]
    pub fn optional(mut self) -> Self {
        self.is_optional = true;
        self
    }
}

/// A contestant of a contest with its figures.
struct Entry<'a> {
    contestant: Contestant<'a>,
    iterations: u64,
    /// Whether one iteration takes longer than a batch may, so that no other warms it up.
    is_long: bool,
    times: Vec<f64>,
    has_failed: bool,
}

impl Entry<'_> {
    /// Runs iterations. The result is `None` if this failed, or fails now, and is optional.
    fn run(&mut self, case: &str, iterations: u64) -> anyhow::Result<Option<Duration>> {
        if self.has_failed {
            return Ok(None);
        }
        let strategy = &self.contestant.strategy;
        match (self.contestant.run)(iterations) {
            Ok(took) => Ok(Some(took)),
            Err(error) if self.contestant.is_optional => {
                eprintln!("{case} {strategy}: left out: {error:#}");
                self.has_failed = true;
                Ok(None)
            }
            Err(error) => Err(error.context(format!("{case} by {strategy}"))),
        }
    }

    /// Warms up, and finds how many iterations fill a batch.
    fn warm_up(&mut self, case: &str, batch: Duration) -> anyhow::Result<()> {
        let longest = batch * MAX_PREPARATION;
        let mut iterations = 1u64;
        loop {
            let started = Instant::now();
            let Some(took) = self.run(case, iterations)? else { return Ok(()) };
            let with_preparation = started.elapsed();
            let is_long = took >= batch / 2 || with_preparation >= longest / 2;
            if is_long || iterations >= 1 << 22 {
                let fits = |limit: Duration, took: Duration| {
                    limit.as_secs_f64() / took.as_secs_f64().max(1e-9)
                };
                let factor = fits(batch, took).min(fits(longest, with_preparation));
                self.iterations = ((iterations as f64 * factor) as u64).max(1);
                self.is_long = iterations == 1 && with_preparation > longest;
                return Ok(());
            }
            iterations *= 4;
        }
    }
}

/// Part of a batch that runs before its clock starts.
const WARMING: u64 = 8;
/// Maximum time of a batch with the preparation that its contestant does not count, in batches.
const MAX_PREPARATION: u32 = 16;

/// Lets the contestants take turns and reports each one's time per iteration, in microseconds.
///
/// # Errors
/// The first error of a contestant that is not [optional](Contestant::optional), with its name.
pub fn contest(
    table: &'static str,
    case: &str,
    options: &Options,
    contestants: Vec<Contestant<'_>>,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let mut field = Vec::new();
    for contestant in contestants {
        if !options.wants(case, &contestant.strategy) {
            continue;
        }
        let times = Vec::with_capacity(options.rounds);
        let mut entry =
            Entry { contestant, iterations: 1, is_long: false, times, has_failed: false };
        entry.warm_up(case, options.batch)?;
        field.push(entry);
    }
    let contestants = field.len();
    for round in 0..options.rounds {
        // Each round begins with another one, so that no contestant always runs after the same
        // neighbour and its traces in caches and kernel; a part of a batch runs before the clock
        // starts.
        for turn in 0..contestants {
            let entry = &mut field[(round + turn) % contestants];
            let iterations = entry.iterations;
            if !entry.is_long {
                entry.run(case, (iterations / WARMING).max(1))?;
            }
            if let Some(took) = entry.run(case, iterations)? {
                entry.times.push(took.as_secs_f64() * 1e6 / iterations as f64);
            }
        }
    }
    for entry in field.into_iter().filter(|entry| !entry.has_failed) {
        sink(&summarise(table, case, entry.contestant.strategy, 1, entry.times));
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
        let options = Options {
            rounds: 3,
            batch: Duration::from_micros(100),
            filter: Some("a".to_owned()),
            quick: true,
        };
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
    fn an_optional_contestant_that_fails_loses_its_row_and_ends_no_contest() {
        let options =
            Options { rounds: 3, batch: Duration::from_micros(100), filter: None, quick: true };
        let steady = |name| Contestant::timed(name, |n| Ok(Duration::from_micros(50 * n)));
        for good_runs in [0, 2, 5] {
            let mut runs = 0;
            let mut fails = |n: u64| {
                runs += 1;
                anyhow::ensure!(runs <= good_runs, "it ended");
                Ok(Duration::from_micros(50 * n))
            };
            let mut rows = Vec::new();
            let field = vec![Contestant::timed("rival", &mut fails).optional(), steady("afresh")];
            let mut sink = |row: &Row| rows.push((row.strategy.clone(), row.samples.len()));
            contest("t", "c", &options, field, &mut sink).unwrap();
            assert_eq!(rows, [("afresh".to_owned(), 3)]);
            assert_eq!(runs, good_runs + 1, "it does not run after its error");
        }
        let field = vec![steady("afresh"), Contestant::timed("native", |_| anyhow::bail!("no"))];
        let error = contest("t", "c", &options, field, &mut |_| {}).unwrap_err();
        assert_eq!(format!("{error:#}"), "c by native: no");
    }

    #[test]
    fn preparation_that_is_not_counted_limits_the_iterations_of_a_batch() {
        let options =
            Options { rounds: 1, batch: Duration::from_micros(500), filter: None, quick: true };
        let mut most = 0;
        let field = vec![Contestant::timed("a", |n| {
            most = n.max(most);
            std::thread::sleep(Duration::from_millis(2 * n));
            Ok(Duration::from_nanos(n))
        })];
        contest("t", "c", &options, field, &mut |_| {}).unwrap();
        // A batch of 500,000 ns would have 500,000 iterations by the counted time alone.
        assert!(most <= 8, "{most} iterations of 2 ms in a batch of 0.5 ms");
    }

    #[test]
    fn an_iteration_longer_than_batches_runs_once_a_round() {
        let options =
            Options { rounds: 3, batch: Duration::from_micros(50), filter: None, quick: true };
        let mut runs = 0;
        let field = vec![Contestant::new("a", || {
            runs += 1;
            std::thread::sleep(Duration::from_millis(2));
            Ok(())
        })];
        contest("t", "c", &options, field, &mut |_| {}).unwrap();
        assert_eq!(runs, 1 + options.rounds);
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
