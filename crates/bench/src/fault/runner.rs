//! Runs the strategies interleaved and collects the rows.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use afresh_sys::Instructions;
use anyhow::{Result, anyhow};

use serde_json::json;

use super::strategies::{Pace, Spec};
use super::{Case, Sample, Strategy};
use crate::row::spread;
use crate::{Row, Sink};

/// The baseline of every case.
const PLAIN: &str = "plain";
/// Cycles of a burst; those of its first half are not measured.
const BURST: usize = 8;

/// What to run.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Only rows whose case or strategy contains this; `plain` runs in every case that is left.
    pub filter: Option<String>,
    /// Numbers of threads.
    pub threads: Vec<usize>,
    /// Rounds measured, after one that is not.
    pub rounds: usize,
    /// Think time after every cycle of 16 MiB; larger cases think longer in proportion, up to eight
    /// times, so that one strategy's background work does not fall into the next one's cycle.
    pub think: Duration,
    /// Time limit of a case with one number of threads; later rounds are left out then.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            filter: None,
            threads: vec![1, 2],
            rounds: 31,
            think: Duration::from_millis(5),
            timeout: Duration::from_secs(15),
        }
    }
}

impl Options {
    /// Everything within a minute.
    #[must_use]
    pub fn quick() -> Self {
        Self { rounds: 9, timeout: Duration::from_secs(2), ..Self::default() }
    }
}

/// One strategy in the run of a case.
struct Runner {
    spec: &'static Spec,
    instances: Vec<Box<dyn Strategy>>,
    samples: Vec<Sample>,
    /// Background work before the first measured cycle.
    background: f64,
    /// Cycles since, measured or not.
    cycles: usize,
}

/// Runs the benchmark. `skipped` receives the name of every strategy that this host cannot set up
/// or run, with the reason. The other strategies of its case continue.
pub fn fault(
    options: &Options,
    sink: &mut Sink<'_>,
    skipped: &mut dyn FnMut(&str, &anyhow::Error),
) {
    let wanted = |case: &str, strategy: &str| {
        let met = |part: &String| case.contains(part.as_str()) || strategy.contains(part.as_str());
        options.filter.as_ref().is_none_or(met)
    };
    for case in Case::all() {
        for threads in options.threads.iter().copied().filter(|threads| *threads > 0) {
            let mut runners = Vec::new();
            for spec in Spec::of(&case, threads) {
                if spec.name != PLAIN && !wanted(case.name, spec.name) {
                    continue;
                }
                match spec.build(&case, threads) {
                    Ok(instances) => runners.push(Runner::new(spec, instances)),
                    Err(error) => skipped(spec.name, &error),
                }
            }
            if runners.iter().all(|runner| !wanted(case.name, runner.spec.name)) {
                continue;
            }
            for row in run(options, &case, threads, runners, skipped) {
                sink(&row);
            }
        }
    }
}

fn run(
    options: &Options,
    case: &Case,
    threads: usize,
    mut runners: Vec<Runner>,
    skipped: &mut dyn FnMut(&str, &anyhow::Error),
) -> Vec<Row> {
    let began = Instant::now();
    let think = options.think * (case.pages / 4096).clamp(1, 8) as u32;
    for round in 0..=options.rounds {
        // Two rounds are the least that give a figure: the first is not measured.
        if round > 1 && began.elapsed() > options.timeout {
            break;
        }
        runners.retain_mut(|runner| {
            if runner.spec.slow && round > 1 && !round.is_multiple_of(4) {
                return true;
            }
            let result = runner.round(case, think, round > 0);
            result.inspect_err(|error| skipped(runner.spec.name, error)).is_ok()
        });
    }
    runners.into_iter().map(|runner| runner.row(case, threads)).collect()
}

impl Runner {
    fn new(spec: &'static Spec, instances: Vec<Box<dyn Strategy>>) -> Self {
        Self { spec, instances, samples: Vec::new(), background: 0.0, cycles: 0 }
    }

    fn background(&self) -> f64 {
        self.instances.first().map_or(0.0, |instance| instance.background())
    }

    fn round(&mut self, case: &Case, think: Duration, measured: bool) -> Result<()> {
        if self.spec.pace == Pace::Think {
            let samples = cycle(&mut self.instances, case)?;
            std::thread::sleep(think);
            self.count(samples, measured);
        } else {
            let _hogs = (self.spec.pace == Pace::Starved).then(Hogs::start);
            for at in 0..BURST {
                let samples = cycle(&mut self.instances, case)?;
                self.count(samples, measured && at >= BURST / 2);
            }
        }
        if !measured {
            self.background = self.background();
            self.cycles = 0;
        }
        Ok(())
    }

    fn count(&mut self, samples: Vec<Sample>, measured: bool) {
        self.cycles += samples.len();
        if measured {
            self.samples.extend(samples);
        }
    }

    fn row(self, case: &Case, threads: usize) -> Row {
        let pages = case.touched();
        let samples: Vec<f64> =
            self.samples.iter().map(|sample| sample.whole() / pages as f64).collect();
        let of = |part: fn(&Sample) -> f64| {
            spread(self.samples.iter().map(|sample| part(sample) / pages as f64).collect())
        };
        let worked = self.background() - self.background;
        let cycles = self.cycles.max(1) * pages;
        let [median, min, p99] = of(|s| s.whole());
        let figure = |value: f64| json!((value * 100.0).round() / 100.0);
        Row {
            table: "fault",
            case: case.name.to_owned(),
            strategy: self.spec.name.to_owned(),
            threads,
            median,
            min,
            p99,
            unit: "ns/page",
            samples,
            more: vec![
                ("cycles", json!(self.samples.len())),
                ("take", figure(of(|s| s.take)[0])),
                ("touch", figure(of(|s| s.touch)[0])),
                ("give_back", figure(of(|s| s.give)[0])),
                // Processor time of a background thread, a page touched.
                ("background", figure(worked / cycles as f64)),
                // Counts of the measured thread, in user mode and in the kernel; zero where they
                // are not counted.
                ("instructions", figure(of(|s| s.instructions)[0])),
            ],
        }
    }
}

/// One cycle of every instance, in separate threads when there are several, begun together.
fn cycle(instances: &mut [Box<dyn Strategy>], case: &Case) -> Result<Vec<Sample>> {
    for instance in instances.iter_mut() {
        instance.prepare()?;
    }
    if let [only] = instances {
        return Ok(vec![counted(&mut **only, case)?]);
    }
    let barrier = Barrier::new(instances.len());
    std::thread::scope(|scope| {
        let threads: Vec<_> = instances
            .iter_mut()
            .map(|instance| {
                scope.spawn(|| {
                    barrier.wait();
                    counted(&mut **instance, case)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a measuring thread failed"))?)
            .collect()
    })
}

/// One cycle, with its instructions where the host counts them.
fn counted(instance: &mut dyn Strategy, case: &Case) -> Result<Sample> {
    let Ok(counter) = Instructions::start() else { return instance.cycle(case) };
    let before = counter.count()?;
    let mut sample = instance.cycle(case)?;
    sample.instructions = (counter.count()? - before) as f64;
    Ok(sample)
}

/// Threads that keep every processor but one busy until they are dropped.
struct Hogs {
    stop: std::sync::Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Hogs {
    fn start() -> Self {
        let stop = std::sync::Arc::new(AtomicBool::new(false));
        let processors = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let threads = (1..processors.max(2))
            .map(|_| {
                let stop = stop.clone();
                std::thread::spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                })
            })
            .collect();
        Self { stop, threads }
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails after a number of cycles.
    struct FailingStrategy(u32);

    impl Strategy for FailingStrategy {
        fn cycle(&mut self, _: &Case) -> Result<Sample> {
            self.0 = self.0.checked_sub(1).ok_or_else(|| anyhow!("no memory in one piece"))?;
            Ok(Sample::default())
        }
    }

    #[test]
    fn a_strategy_that_fails_between_rounds_is_left_out_and_the_others_have_rows() {
        let case = Case::all().remove(0);
        let specs = Spec::of(&case, 1).filter(|spec| spec.pace == Pace::Think && !spec.slow);
        let cycles = [u32::MAX, 2, u32::MAX];
        let runners: Vec<Runner> = specs
            .zip(cycles)
            .map(|(spec, cycles)| Runner::new(spec, vec![Box::new(FailingStrategy(cycles))]))
            .collect();
        let names: Vec<&str> = runners.iter().map(|runner| runner.spec.name).collect();
        let options = Options { rounds: 3, think: Duration::ZERO, ..Options::quick() };
        let mut skips = Vec::new();
        let mut skipped = |name: &str, why: &anyhow::Error| skips.push(format!("{name}: {why}"));
        let rows = run(&options, &case, 1, runners, &mut skipped);
        assert_eq!(skips, [format!("{}: no memory in one piece", names[1])]);
        let found: Vec<_> = rows.iter().map(|row| (&*row.strategy, row.samples.len())).collect();
        assert_eq!(found, [(names[0], 3), (names[2], 3)]);
    }
}
