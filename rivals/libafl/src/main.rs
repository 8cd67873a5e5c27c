//! Fuzzes targets in turns: by LibAFL's fork server, by an executor over a warm Linux program, and
//! by AFL++ with its fork server and in its persistent mode.
//!
//! Usage: `[--seconds N] [--rounds N] [--state MIB]… [--json]`. The state is built by the target
//! before its first input. `--json` prints a row of the table `fuzz` of `afresh-bench` per line.
//!
//! `build-png LIBPNG ZLIB` builds the target libpng of these sources beside this program; without
//! it the target is left out.

mod aflpp;
mod executor;
mod target;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use afresh_linux::Program;
use libafl::corpus::{Corpus, InMemoryCorpus};
use libafl::events::SimpleEventManager;
use libafl::executors::{ForkserverExecutor, StdChildArgs};
use libafl::feedbacks::{CrashFeedback, MaxMapFeedback};
use libafl::fuzzer::{Evaluator, Fuzzer, StdFuzzer};
use libafl::inputs::BytesInput;
use libafl::monitors::NopMonitor;
use libafl::mutators::{HavocScheduledMutator, havoc_mutations};
use libafl::observers::{HitcountsMapObserver, OwnedMapObserver, StdMapObserver};
use libafl::schedulers::QueueScheduler;
use libafl::stages::StdMutationalStage;
use libafl::state::{HasCorpus, HasExecutions, HasSolutions, StdState};
use libafl_bolts::StdTargetArgs;
use libafl_bolts::rands::StdRand;
use libafl_bolts::shmem::{ShMem, ShMemProvider, UnixShMemProvider};
use libafl_bolts::tuples::tuple_list;

use crate::executor::{Edges, WarmExecutor};

/// Bytes of the map, as the target's runtime has them.
const MAP: usize = 8192;
const TIMEOUT: Duration = Duration::from_secs(2);
/// Seeds of the target that reads JSON.
const JSON_SEEDS: [&str; 3] =
    [r#"{"key1": [1, 2.5e3, true], "b": null}"#, r#"[[{"bag": "\u0041"}], -1]"#, "{}"];
/// A seed of the target libpng: 16 by 16 pixels in colour.
#[rustfmt::skip]
const PNG_SEED: &[u8] = &[
    0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a, 0x00, 0x00, 0x00, 0x0d, 0x49, 0x48, 0x44, 0x52,
    0x00, 0x00, 0x00, 0x10, 0x00, 0x00, 0x00, 0x10, 0x08, 0x02, 0x00, 0x00, 0x00, 0x90, 0x91, 0x68,
    0x36, 0x00, 0x00, 0x00, 0x04, 0x67, 0x41, 0x4d, 0x41, 0x00, 0x00, 0xb1, 0x8f, 0x0b, 0xfc, 0x61,
    0x05, 0x00, 0x00, 0x00, 0x43, 0x49, 0x44, 0x41, 0x54, 0x78, 0x9c, 0x63, 0x60, 0x50, 0xf5, 0xca,
    0x9f, 0xb2, 0xf3, 0x1e, 0xb3, 0x86, 0x6f, 0xd1, 0xf4, 0x3d, 0x0f, 0xd9, 0xb4, 0x03, 0x4a, 0x67,
    0xed, 0x7f, 0xc2, 0xa9, 0x17, 0x5c, 0x31, 0xf7, 0xd0, 0x73, 0x1e, 0xc3, 0xb0, 0xea, 0x05, 0x47,
    0x5f, 0xf1, 0x9b, 0x44, 0xd6, 0x2d, 0x3e, 0xf1, 0x56, 0xc8, 0x3c, 0xa6, 0x71, 0xd9, 0x69, 0x86,
    0x51, 0x0d, 0xa3, 0x1a, 0x86, 0xaf, 0x06, 0x00, 0xd7, 0xc7, 0x60, 0x90, 0xca, 0xd0, 0x5f, 0x2f,
    0x00, 0x00, 0x00, 0x00, 0x49, 0x45, 0x4e, 0x44, 0xae, 0x42, 0x60, 0x82,
];

type Failure = Box<dyn std::error::Error>;

/// The settings of a run.
struct Settings {
    seconds: u64,
    rounds: u64,
    states: Vec<u64>,
    is_json: bool,
}

fn main() -> Result<(), Failure> {
    let mut settings = Settings { seconds: 5, rounds: 5, states: Vec::new(), is_json: false };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{name} needs a value"));
        match name.as_str() {
            "build-png" => {
                let (libpng, zlib) = (PathBuf::from(value()?), PathBuf::from(value()?));
                return target::build_png(&programs()?, &libpng, &zlib);
            }
            "--json" => settings.is_json = true,
            "--seconds" => settings.seconds = value()?.parse()?,
            "--rounds" => settings.rounds = value()?.parse()?,
            "--state" => settings.states.push(value()?.parse()?),
            _ => return Err(format!("unknown: {name}").into()),
        }
    }
    if settings.states.is_empty() {
        settings.states = vec![0, 64];
    }
    if !settings.is_json {
        println!(
            "| target | by | executions a second: median | least | most | inputs kept | crashes |"
        );
        println!("|---|---|---|---|---|---|---|");
    }
    json(&settings)?;
    png(&settings)
}

/// The folder of the programs of the target libpng.
fn programs() -> Result<PathBuf, Failure> {
    Ok(std::env::current_exe()?.with_file_name("fuzzed"))
}

/// Fuzzes the JSON reader.
fn json(settings: &Settings) -> Result<(), Failure> {
    let seeds = JSON_SEEDS.map(|seed| seed.as_bytes().to_vec());
    let length = Duration::from_secs(settings.seconds);
    let program = target::json(&programs()?)?;
    for state in &settings.states {
        let case = format!("json/{state}MiB");
        let (mut warm, mut forks) = (Vec::new(), Rival::new("libafl/fork-server"));
        for seed in 0..settings.rounds {
            forks.round(&case, || by_forks(&program, *state, &seeds, seed, length));
            warm.push(by_warm(&program, *state, &seeds, seed, length)?);
        }
        forks.row(settings, &case);
        row(settings, &case, "afresh", warm);
    }
    Ok(())
}

/// Fuzzes libpng.
fn png(settings: &Settings) -> Result<(), Failure> {
    let Some(png) = target::Png::find(&programs()?) else {
        eprintln!("png left out: its target is not built; `cargo xtask rivals --only fuzz`");
        return Ok(());
    };
    const CASE: &str = "png";
    let aflpp = [("afl++/fork-server", png.forking), ("afl++/persistent", png.persistent)];
    let mut aflpp: Vec<_> = aflpp
        .into_iter()
        .filter_map(|(name, program)| Some((Rival::new(name), program?)))
        .collect();
    if aflpp.is_empty() {
        eprintln!("afl++ left out: its target is not built; `cargo xtask rivals --only fuzz`");
    }
    let seeds = [PNG_SEED.to_vec()];
    let length = Duration::from_secs(settings.seconds);
    let (mut warm, mut forks) = (Vec::new(), Rival::new("libafl/fork-server"));
    for seed in 0..settings.rounds {
        forks.round(CASE, || by_forks(&png.program, 0, &seeds, seed, length));
        warm.push(by_warm(&png.program, 0, &seeds, seed, length)?);
        for (rival, program) in &mut aflpp {
            rival.round(CASE, || aflpp::run(program, &seeds, seed, settings.seconds));
        }
    }
    forks.row(settings, CASE);
    row(settings, CASE, "afresh", warm);
    for (rival, _) in aflpp {
        rival.row(settings, CASE);
    }
    Ok(())
}

/// A rival with its results. One that fails is left out, and the others keep their rows.
struct Rival {
    name: &'static str,
    /// `None` after a failure.
    scores: Option<Vec<Score>>,
}

impl Rival {
    fn new(name: &'static str) -> Self {
        Self { name, scores: Some(Vec::new()) }
    }

    fn round(&mut self, case: &str, run: impl FnOnce() -> Result<Score, Failure>) {
        let Some(scores) = &mut self.scores else { return };
        match run() {
            Ok(score) => scores.push(score),
            Err(error) => {
                eprintln!("{case} {}: left out: {error}", self.name);
                self.scores = None;
            }
        }
    }

    fn row(self, settings: &Settings, case: &str) {
        if let Some(scores) = self.scores {
            row(settings, case, self.name, scores);
        }
    }
}

/// The result of a round.
#[derive(Clone, Copy)]
struct Score {
    speed: f64,
    kept: usize,
    crashes: usize,
}

/// Prints a row.
fn row(settings: &Settings, case: &str, name: &str, mut scores: Vec<Score>) {
    let micros: Vec<f64> = scores.iter().map(|score| 1e6 / score.speed).collect();
    scores.sort_by(|a, b| a.speed.total_cmp(&b.speed));
    let Some((least, most)) = scores.first().zip(scores.last()) else { return };
    let middle = [(scores.len() - 1) / 2, scores.len() / 2].map(|at| scores[at].speed);
    let median = (middle[0] + middle[1]) / 2.0;
    if settings.is_json {
        println!(
            r#"{{"case": "{case}", "strategy": "{name}", "median": {}, "min": {}, "p99": {}, "samples": {micros:?}}}"#,
            1e6 / median,
            1e6 / most.speed,
            1e6 / least.speed,
        );
        return;
    }
    let kept = scores.iter().map(|score| score.kept).max().unwrap_or(0);
    let crashes: usize = scores.iter().map(|score| score.crashes).sum();
    println!(
        "| {case} | {name} | {median:.0} | {:.0} | {:.0} | {kept} | {crashes} |",
        least.speed, most.speed
    );
}

/// Fuzzes for a time with the executor that is made of `$edges`: one type for each, so no function.
macro_rules! fuzz {
    ($edges:ident, $seeds:expr, $seed:expr, $length:expr, $executor:expr) => {{
        let (mut feedback, mut objective) = (MaxMapFeedback::new(&$edges), CrashFeedback::new());
        let (corpus, crashes) = (InMemoryCorpus::<BytesInput>::new(), InMemoryCorpus::new());
        let rand = StdRand::with_seed($seed);
        let mut state = StdState::new(rand, corpus, crashes, &mut feedback, &mut objective)?;
        let mut manager = SimpleEventManager::new(NopMonitor::new());
        let mut fuzzer = StdFuzzer::new(QueueScheduler::new(), feedback, objective);
        let mut executor = $executor;
        let mutator = HavocScheduledMutator::new(havoc_mutations());
        let mut stages = tuple_list!(StdMutationalStage::new(mutator));
        for seed in $seeds {
            let seed = BytesInput::new(seed.clone());
            fuzzer.add_input(&mut state, &mut executor, &mut manager, seed)?;
        }
        let (begun, before) = (Instant::now(), *state.executions());
        while begun.elapsed() < $length {
            fuzzer.fuzz_one(&mut stages, &mut executor, &mut state, &mut manager)?;
        }
        let speed = (*state.executions() - before) as f64 / begun.elapsed().as_secs_f64();
        Score { speed, kept: state.corpus().count(), crashes: state.solutions().count() }
    }};
}

fn by_warm(
    target: &Path,
    mib: u64,
    seeds: &[Vec<u8>],
    seed: u64,
    length: Duration,
) -> Result<Score, Failure> {
    let program = Program::new(target).arg(mib.to_string()).time_limit(TIMEOUT);
    let warm = program.warm()?;
    let edges: Edges = HitcountsMapObserver::new(OwnedMapObserver::new("edges", vec![0; MAP]));
    Ok(fuzz!(edges, seeds, seed, length, WarmExecutor::new(&warm, edges, ())?))
}

fn by_forks(
    target: &Path,
    mib: u64,
    seeds: &[Vec<u8>],
    seed: u64,
    length: Duration,
) -> Result<Score, Failure> {
    let mut memory = UnixShMemProvider::new()?;
    let mut map = memory.new_shmem(MAP)?;
    // SAFETY: nothing else runs in this process that could read its environment at the same time.
    unsafe { map.write_to_env("__AFL_SHM_ID")? };
    // SAFETY: the map outlives the observer; the target writes to it only while its run is waited
    // for.
    let observer = unsafe { StdMapObserver::new("edges", &mut map[..]) };
    let edges = HitcountsMapObserver::new(observer);
    let executor = ForkserverExecutor::builder()
        .program(target)
        .arg(mib.to_string())
        .shmem_provider(&mut memory)
        .coverage_map_size(MAP)
        .is_deferred_frksrv(true)
        .timeout(TIMEOUT);
    Ok(fuzz!(edges, seeds, seed, length, executor.build(tuple_list!(edges))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rival_that_fails_is_not_run_again_and_has_no_row() {
        let mut rival = Rival::new("afl++/persistent");
        let score = Score { speed: 1.0, kept: 1, crashes: 0 };
        rival.round("png", || Ok(score));
        assert_eq!(rival.scores.as_ref().map(Vec::len), Some(1));
        rival.round("png", || Err("it ended".into()));
        rival.round("png", || panic!("it runs after its failure"));
        assert!(rival.scores.is_none());
    }
}
