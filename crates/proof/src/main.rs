//! `afresh-proof soak`: the specification's suite once, then random modules until the time is up.
//!
//! Each thread keeps the seed that it works on in a file, so that a seed which ends the process is
//! known too. A seed that differs is kept with its module, and `--seed` runs it alone.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use afresh_proof::differential::{self, Bench, Coverage};
use afresh_proof::spec;
use anyhow::{Context, Result, bail};

const USAGE: &str = "\
usage: afresh-proof [--seconds N] [--first SEED] [--seed SEED] [--keep FOLDER] [--no-spec]
  --seconds N    how long, 60 unless said otherwise
  --first SEED   the first seed of the run; a different one for each run unless said otherwise
  --seed SEED    this seed alone
  --keep FOLDER  where failing seeds and their modules are kept
  --no-spec      without the specification's suite";

struct Options {
    seconds: u64,
    first: Option<u64>,
    seed: Option<u64>,
    keep: PathBuf,
    spec: bool,
}

fn options() -> Result<Options> {
    let keep = PathBuf::from("target/soak");
    let mut options = Options { seconds: 60, first: None, seed: None, keep, spec: true };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
        let number = |text: String| {
            text.parse::<u64>().with_context(|| format!("{text:?} is not a number\n{USAGE}"))
        };
        match argument.as_str() {
            "--seconds" => options.seconds = number(value()?)?,
            "--first" => options.first = Some(number(value()?)?),
            "--seed" => options.seed = Some(number(value()?)?),
            "--keep" => options.keep = value()?.into(),
            "--no-spec" => options.spec = false,
            _ => bail!("unknown argument {argument:?}\n{USAGE}"),
        }
    }
    Ok(options)
}

fn main() -> Result<()> {
    let options = options()?;
    if let Some(seed) = options.seed {
        println!("{}", differential::module(seed));
        let mut bench = Bench::new()?;
        bench.check(seed)?;
        println!("seed {seed}: no difference\n{:?}", bench.seen);
        return Ok(());
    }
    std::fs::create_dir_all(&options.keep)
        .with_context(|| format!("cannot make {}", options.keep.display()))?;
    if options.spec {
        let started = Instant::now();
        println!("the specification's suite:");
        print!("{}", spec::run(spec::Extent { thaw_every: 1, only: None })?);
        println!("  {:.0} s", started.elapsed().as_secs_f64());
    }
    soak(&options)
}

/// Random modules, on every processor.
fn soak(options: &Options) -> Result<()> {
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    // Runs of different days do not repeat one another.
    let first = options.first.unwrap_or_else(|| clock.map_or(0, |d| d.as_secs() << 24));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (next, stop) = (AtomicU64::new(first), AtomicBool::new(false));
    let (total, failures) = (Mutex::new(Coverage::default()), Mutex::new(Vec::new()));
    let end = Instant::now() + Duration::from_secs(options.seconds);
    println!("random modules for {} s from seed {first} on:", options.seconds);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (next, stop, total, failures) = (&next, &stop, &total, &failures);
            let file = options.keep.join(format!("running-{thread}"));
            scope.spawn(move || {
                let mut seen = Coverage::default();
                let failed = work(next, stop, end, &file, &mut seen);
                total.lock().unwrap_or_else(|e| e.into_inner()).add(&seen);
                if let Some((seed, error)) = failed {
                    stop.store(true, Ordering::Relaxed);
                    keep(&options.keep, seed, &error);
                    failures.lock().unwrap_or_else(|e| e.into_inner()).push(seed);
                }
                // Only the seed of a thread that died stays.
                let _ = std::fs::remove_file(&file);
            });
        }
    });
    println!("{:#?}", total.into_inner().unwrap_or_else(|e| e.into_inner()));
    let failures = failures.into_inner().unwrap_or_else(|e| e.into_inner());
    if !failures.is_empty() {
        bail!("seeds that differ: {failures:?}; `cargo xtask soak --seed N` runs one alone");
    }
    Ok(())
}

/// One thread's seeds; returns the first that fails.
fn work(
    next: &AtomicU64,
    stop: &AtomicBool,
    end: Instant,
    file: &Path,
    seen: &mut Coverage,
) -> Option<(u64, String)> {
    let mut bench = match Bench::new() {
        Ok(bench) => bench,
        Err(error) => return Some((0, format!("{error:#}"))),
    };
    while Instant::now() < end && !stop.load(Ordering::Relaxed) {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        // Without it a seed that ends the process would not be known; the run itself is as good.
        let _ = std::fs::write(file, seed.to_string());
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bench.check(seed)));
        match checked {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Some((seed, format!("{error:#}"))),
            Err(_) => return Some((seed, "it panicked; see above".to_owned())),
        }
        seen.clone_from(&bench.seen);
    }
    None
}

/// Keeps the files that reproduce a failure.
fn keep(folder: &Path, seed: u64, error: &str) {
    let file = folder.join(format!("{seed}.wat"));
    let text = format!(";; {}\n{}", error.replace('\n', "\n;; "), differential::module(seed));
    match std::fs::write(&file, text) {
        Ok(()) => println!("seed {seed} differs, kept in {}: {error}", file.display()),
        Err(write) => println!("seed {seed} differs ({write} when keeping it): {error}"),
    }
}
