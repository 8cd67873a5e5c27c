//! Fuzzes one target in two ways, in turns, and prints executions a second: by LibAFL's fork
//! server, and by an executor over a warm Linux program.
//!
//! Usage: `[--seconds N] [--rounds N] [--state MIB]…`. The state is built by the target before its
//! first input.

mod executor;

use std::path::{Path, PathBuf};
use std::process::Command;
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
const SEEDS: [&str; 3] =
    [r#"{"key1": [1, 2.5e3, true], "b": null}"#, r#"[[{"bag": "\u0041"}], -1]"#, "{}"];

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let (mut seconds, mut rounds, mut states) = (5, 5, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{name} needs a number"))?.parse()?;
        match name.as_str() {
            "--seconds" => seconds = value,
            "--rounds" => rounds = value,
            "--state" => states.push(value),
            _ => return Err(format!("unknown: {name}").into()),
        }
    }
    if states.is_empty() {
        states = vec![0, 64];
    }
    let target = compile()?;
    println!(
        "| MiB of state | by | executions a second: median | least | most | inputs kept | crashes |"
    );
    println!("|---|---|---|---|---|---|---|");
    for state in states {
        let (mut warm, mut forks) = (Vec::new(), Vec::new());
        for seed in 0..rounds {
            let length = Duration::from_secs(seconds);
            forks.push(by_forks(&target, state, seed, length)?);
            warm.push(by_warm(&target, state, seed, length)?);
        }
        let fork = row(state, "fork server", forks);
        let ours = row(state, "afresh", warm);
        println!("{state} MiB of state: {:.1} times the fork server's", ours / fork);
    }
    Ok(())
}

/// The result of a round.
#[derive(Clone, Copy)]
struct Score {
    speed: f64,
    kept: usize,
    crashes: usize,
}

/// Prints a row; its median.
fn row(state: u64, name: &str, mut scores: Vec<Score>) -> f64 {
    scores.sort_by(|a, b| a.speed.total_cmp(&b.speed));
    let (least, most) = (scores[0].speed, scores[scores.len() - 1].speed);
    let Score { speed, .. } = scores[scores.len() / 2];
    let kept = scores.iter().map(|score| score.kept).max().unwrap_or(0);
    let crashes: usize = scores.iter().map(|score| score.crashes).sum();
    println!("| {state} | {name} | {speed:.0} | {least:.0} | {most:.0} | {kept} | {crashes} |");
    speed
}

/// The target, compiled with instrumentation for its edges.
fn compile() -> Result<PathBuf, Failure> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzzed");
    let out = std::env::temp_dir().join(format!("afresh-fuzzed-{}", std::process::id()));
    std::fs::create_dir_all(&out)?;
    let cc = |arguments: &[&str], files: &[PathBuf], made: &Path| -> Result<(), Failure> {
        let mut command = Command::new("cc");
        let status = command.arg("-O2").args(arguments).args(files).arg("-o").arg(made).status()?;
        if status.success() { Ok(()) } else { Err(format!("{command:?}: {status}").into()) }
    };
    let object = out.join("target.o");
    cc(&["-c", "-fsanitize-coverage=trace-pc"], &[sources.join("target.c")], &object)?;
    let program = out.join("target");
    cc(&["-static"], &[sources.join("runtime.c"), object], &program)?;
    Ok(program)
}

/// Fuzzes for a time with the executor that is made of `$edges`: one type for each, so no function.
macro_rules! fuzz {
    ($edges:ident, $seed:expr, $length:expr, $executor:expr) => {{
        let (mut feedback, mut objective) = (MaxMapFeedback::new(&$edges), CrashFeedback::new());
        let (corpus, crashes) = (InMemoryCorpus::<BytesInput>::new(), InMemoryCorpus::new());
        let rand = StdRand::with_seed($seed);
        let mut state = StdState::new(rand, corpus, crashes, &mut feedback, &mut objective)?;
        let mut manager = SimpleEventManager::new(NopMonitor::new());
        let mut fuzzer = StdFuzzer::new(QueueScheduler::new(), feedback, objective);
        let mut executor = $executor;
        let mutator = HavocScheduledMutator::new(havoc_mutations());
        let mut stages = tuple_list!(StdMutationalStage::new(mutator));
        for seed in SEEDS {
            let seed = BytesInput::new(seed.as_bytes().to_vec());
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

fn by_warm(target: &Path, mib: u64, seed: u64, length: Duration) -> Result<Score, Failure> {
    let program = Program::new(target).arg(mib.to_string()).time_limit(TIMEOUT);
    let warm = program.warm()?;
    let edges: Edges = HitcountsMapObserver::new(OwnedMapObserver::new("edges", vec![0; MAP]));
    Ok(fuzz!(edges, seed, length, WarmExecutor::new(&warm, edges, ())?))
}

fn by_forks(target: &Path, mib: u64, seed: u64, length: Duration) -> Result<Score, Failure> {
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
    Ok(fuzz!(edges, seed, length, executor.build(tuple_list!(edges))?))
}
