//! `bench vm`: micro-VM calls, resets, creation and snapshots.
//!
//! Promises: every strategy of a case runs in the same process, in turns, so that a slow moment of
//! the host hits all of them; after the timed loop every sandbox is compared with its image, and a
//! difference is an error instead of a figure. May break it: other work on the machine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh_frames::ZeroPool;
use afresh_vm::{ResetMethod, Sandbox, SandboxBuilder};
use anyhow::Context;

use crate::row::{Options, Row, Sink, summarise};

/// Memory sizes in MiB and numbers of dirty pages.
const MEMORY: [u64; 5] = [1, 16, 64, 256, 950];
const DIRTY: [u64; 4] = [1, 16, 256, 4096];
/// Parameter sizes in MiB, as input and as output of the same call.
const PARAMETERS: [u64; 4] = [1, 4, 16, 64];
/// The sizes of a quick run: a small memory and the largest.
const QUICK_MEMORY: [u64; 2] = [16, 950];
const QUICK_PARAMETERS: [u64; 1] = [4];
/// The longest that a zero pool is waited for.
const WAIT: Duration = Duration::from_secs(2);
/// Pages of a guest that are not free heap: program, stack, input, the part the allocator uses.
const OVERHEAD: u64 = 80;

/// Runs everything. `guest` is the `dirty` sample.
///
/// # Errors
/// The first of any contestant; a sandbox that is not pristine after its timed loop is one.
pub fn all(guest: &[u8], options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    let mut bench = Bench { guest, options, sink };
    let (memory_sizes, parameter_sizes): (&[u64], &[u64]) = match options.quick {
        true => (&QUICK_MEMORY, &QUICK_PARAMETERS),
        false => (&MEMORY, &PARAMETERS),
    };
    for &memory in memory_sizes {
        for dirty in DIRTY {
            let pages = (memory << 20) / afresh_vm::PAGE - OVERHEAD;
            if dirty <= pages {
                bench.dirty(memory, dirty, pages / dirty)?;
            }
        }
    }
    for &size in parameter_sizes {
        bench.parameters(size)?;
    }
    for &memory in memory_sizes {
        bench.creation(memory)?;
    }
    bench.first_touch()?;
    bench.warm_creation()?;
    bench.snapshot()?;
    bench.sharing()
}

struct Bench<'a, 's> {
    guest: &'a [u8],
    options: &'a Options,
    sink: &'a mut Sink<'s>,
}

/// One strategy of a case, with its samples in nanoseconds.
struct Entrant {
    name: String,
    sandbox: Sandbox,
    resets: bool,
    samples: Vec<u64>,
    spent: Duration,
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

impl Bench<'_, '_> {
    fn wanted(&self, case: &str) -> bool {
        self.options.filter.as_ref().is_none_or(|filter| case.contains(filter.as_str()))
    }

    /// Calls that write `dirty` pages, evenly spread.
    fn dirty(&mut self, memory: u64, dirty: u64, stride: u64) -> anyhow::Result<()> {
        let case = format!("{memory}/{dirty}");
        if !self.wanted(&case) {
            return Ok(());
        }
        let builder = || Sandbox::builder().memory(memory << 20).stack(32 << 10).input(16 << 10);
        let input = words(&[1, 0, dirty, stride, 7]);
        self.race("vm", &case, &input, builder)
    }

    /// Calls that take and return `size` MiB.
    fn parameters(&mut self, size: u64) -> anyhow::Result<()> {
        let case = format!("echo-{size}MiB");
        if !self.wanted(&case) {
            return Ok(());
        }
        let bytes = size << 20;
        // The allocator rounds a block up to a power of two.
        let builder = || Sandbox::builder().memory(4 * bytes + (4 << 20)).input(bytes + 4096);
        let mut input = words(&[0]);
        input.resize(bytes as usize, 0x5a);
        self.race("vm-parameters", &case, &input, builder)
    }

    fn race(
        &mut self,
        table: &'static str,
        case: &str,
        input: &[u8],
        builder: impl Fn() -> SandboxBuilder,
    ) -> anyhow::Result<()> {
        let mut entrants =
            vec![self.entrant("none".to_owned(), ResetMethod::default(), false, &builder)?];
        for method in ResetMethod::ALL {
            entrants.push(self.entrant(method.to_string(), method, true, &builder)?);
        }
        let mut output = Vec::new();
        for entrant in &mut entrants {
            for _ in 0..2 {
                entrant.turn(input, &mut output, Duration::ZERO)?;
            }
            entrant.samples.clear();
            entrant.spent = Duration::ZERO;
        }
        let budget = self.options.batch * u32::try_from(self.options.rounds)?;
        let slice = budget / 5;
        while entrants.iter().any(|e| e.spent < budget) {
            for entrant in entrants.iter_mut().filter(|e| e.spent < budget) {
                entrant.turn(input, &mut output, slice)?;
            }
        }
        for entrant in &mut entrants {
            if !entrant.resets {
                entrant.sandbox.reset()?;
            }
            let strategy = &entrant.name;
            entrant.sandbox.verify().with_context(|| format!("{case}, {strategy}"))?;
        }
        for entrant in entrants {
            self.report(table, case, &entrant.name, entrant.samples)?;
        }
        Ok(())
    }

    fn entrant(
        &self,
        name: String,
        method: ResetMethod,
        resets: bool,
        builder: &impl Fn() -> SandboxBuilder,
    ) -> anyhow::Result<Entrant> {
        Ok(Entrant {
            name,
            sandbox: builder().reset_method(method).build(self.guest)?,
            resets,
            samples: Vec::new(),
            spent: Duration::ZERO,
        })
    }

    /// Sandboxes from the program, and from a snapshot of one that was initialised; both until
    /// their first call has returned.
    fn creation(&mut self, memory: u64) -> anyhow::Result<()> {
        let case = format!("create-{memory}MiB");
        if !self.wanted(&case) {
            return Ok(());
        }
        let builder = || Sandbox::builder().memory(memory << 20).stack(32 << 10).input(16 << 10);
        let input = words(&[0]);
        let guest = self.guest;
        let warm = builder().build(guest)?.pristine();
        let (mut cold_times, mut warm_times) = (Vec::new(), Vec::new());
        for _ in 0..12 {
            cold_times.push(timed(|| {
                let mut sandbox = builder().build(guest)?;
                sandbox.call(&input)?;
                Ok(sandbox)
            })?);
            warm_times.push(timed(|| {
                let mut sandbox = warm.fork()?;
                sandbox.call(&input)?;
                Ok(sandbox)
            })?);
        }
        self.report("vm-create", &case, "cold", cold_times)?;
        self.report("vm-create", &case, "snapshot", warm_times)
    }

    /// New sandboxes whose first call writes 64 MiB: over memory from the kernel, by faults, and
    /// over memory that a zero pool had ready. `spawn+call` is everything, `call` the first call
    /// alone, and `cycle` both with the reset.
    fn first_touch(&mut self) -> anyhow::Result<()> {
        let case = "first-64MiB";
        if !self.wanted(case) {
            return Ok(());
        }
        const PAGES: u64 = 16 << 10;
        // The heap does not begin where a block of the zero pool does.
        const POOLED: u64 = (PAGES << 12) + (4 << 20);
        let zero_pool = Arc::new(ZeroPool::new((POOLED / afresh_vm::PAGE) as usize)?);
        let builder = || Sandbox::builder().memory(80 << 20).stack(32 << 10).input(16 << 10);
        let plain = builder().build(self.guest)?.pristine();
        let pooled = builder().zero_memory(zero_pool.clone(), POOLED).build(self.guest)?.pristine();
        let input = words(&[1, 0, PAGES, 1, 7]);
        for (name, snapshot) in [("kernel", plain), ("zero pool", pooled)] {
            let (mut wholes, mut calls, mut cycles) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..12 {
                let waiting = Instant::now();
                while zero_pool.ready() < zero_pool.capacity() && waiting.elapsed() < WAIT {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let start = Instant::now();
                let mut sandbox = snapshot.fork()?;
                let spawned = start.elapsed();
                sandbox.call(&input)?;
                let called = start.elapsed();
                sandbox.reset()?;
                cycles.push(start.elapsed().as_nanos() as u64);
                wholes.push(called.as_nanos() as u64);
                calls.push((called - spawned).as_nanos() as u64);
                sandbox.verify().with_context(|| format!("{case}, {name}"))?;
            }
            self.report("vm-first", case, &format!("{name} spawn+call"), wholes)?;
            self.report("vm-first", case, &format!("{name} call"), calls)?;
            self.report("vm-first", case, &format!("{name} cycle"), cycles)?;
        }
        Ok(())
    }

    /// A 256 MiB guest whose warm-up writes half of its memory.
    fn warm_creation(&mut self) -> anyhow::Result<()> {
        let case = "warm-256MiB";
        if !self.wanted(case) {
            return Ok(());
        }
        let guest = self.guest;
        let builder = || Sandbox::builder().memory(256 << 20);
        let (warm_up, input) = (words(&[1, 0, 32 << 10, 1, 9]), words(&[0]));
        let mut first = builder().build(guest)?;
        first.call(&warm_up)?;
        let snapshot = first.snapshot()?;
        drop(first);
        let (mut cold_times, mut warm_times) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            cold_times.push(timed(|| {
                let mut sandbox = builder().build(guest)?;
                sandbox.call(&warm_up)?;
                sandbox.call(&input)?;
                Ok(sandbox)
            })?);
            for _ in 0..4 {
                warm_times.push(timed(|| {
                    let mut sandbox = snapshot.fork()?;
                    sandbox.call(&input)?;
                    Ok(sandbox)
                })?);
            }
        }
        self.report("vm-create", case, "cold", cold_times)?;
        self.report("vm-create", case, "snapshot", warm_times)
    }

    /// Snapshots of a 950 MiB guest with 256 dirty pages, and going back from them.
    fn snapshot(&mut self) -> anyhow::Result<()> {
        let case = "snapshot-950/256";
        if !self.wanted(case) {
            return Ok(());
        }
        let mut sandbox = Sandbox::builder().memory(950 << 20).build(self.guest)?;
        let base = sandbox.pristine();
        let stride = (950 << 8) / 256 - 1;
        let (mut taken, mut restored) = (Vec::new(), Vec::new());
        for round in 0..24 {
            sandbox.call(&words(&[1, 0, 256, stride, round + 1]))?;
            let start = Instant::now();
            let snapshot = sandbox.snapshot()?;
            taken.push(start.elapsed().as_nanos() as u64);
            sandbox.reset()?;
            let start = Instant::now();
            sandbox.restore(&snapshot)?;
            restored.push(start.elapsed().as_nanos() as u64);
            sandbox.restore(&base)?;
        }
        sandbox.verify().with_context(|| format!("{case}, auto"))?;
        self.report("vm-snapshot", case, "snapshot", taken)?;
        self.report("vm-snapshot", case, "restore", restored)
    }

    /// Memory that one more fork of a guest with 64 warm MiB costs, once it has read them all.
    fn sharing(&mut self) -> anyhow::Result<()> {
        let case = "fork-64MiB";
        if !self.wanted(case) {
            return Ok(());
        }
        const PAGES: u64 = 16 << 10;
        let mut first = Sandbox::builder().memory(80 << 20).build(self.guest)?;
        first.call(&words(&[1, 0, PAGES, 1, 7]))?;
        let snapshot = first.snapshot()?;
        drop(first);
        let mut forks = Vec::new();
        let mut costs = Vec::new();
        for _ in 0..6 {
            let before = proportional_kib()?;
            let mut fork = snapshot.fork()?;
            fork.run(&words(&[2, 0, PAGES, 1]))?;
            let mut page = [0; 4096];
            let heap = fork.heap();
            for at in (heap.start..heap.end()).step_by(page.len()) {
                fork.read_memory(at, &mut page).map_err(std::io::Error::other)?;
            }
            forks.push(fork);
            costs.push(proportional_kib()?.saturating_sub(before));
        }
        // The first two bring the image's pages in.
        costs.drain(..2);
        costs.sort_unstable();
        let (median, min) = (costs[costs.len() / 2], costs[0]);
        let p99 = costs[costs.len() - 1];
        (self.sink)(&Row {
            table: "vm-fork",
            case: case.to_owned(),
            strategy: "snapshot".to_owned(),
            threads: 1,
            median: median as f64,
            min: min as f64,
            p99: p99 as f64,
            unit: "KiB",
            samples: costs.iter().map(|cost| *cost as f64).collect(),
            more: Vec::new(),
        });
        Ok(())
    }

    fn report(
        &mut self,
        table: &'static str,
        case: &str,
        strategy: &str,
        samples: Vec<u64>,
    ) -> anyhow::Result<()> {
        let times = samples.into_iter().map(|nanoseconds| nanoseconds as f64 / 1e3).collect();
        (self.sink)(&summarise(table, case, strategy.to_owned(), 1, times));
        Ok(())
    }
}

impl Entrant {
    /// Runs for a while, at least once.
    fn turn(&mut self, input: &[u8], output: &mut Vec<u8>, slice: Duration) -> anyhow::Result<()> {
        let begin = Instant::now();
        loop {
            let start = Instant::now();
            *output = self.sandbox.call(input)?;
            if self.resets {
                self.sandbox.reset()?;
            }
            self.samples.push(start.elapsed().as_nanos() as u64);
            if begin.elapsed() >= slice {
                break;
            }
        }
        self.spent += begin.elapsed().max(Duration::from_nanos(1));
        Ok(())
    }
}

/// Nanoseconds that `make` takes; its result is dropped outside the clock.
fn timed(make: impl FnOnce() -> anyhow::Result<Sandbox>) -> anyhow::Result<u64> {
    let start = Instant::now();
    let sandbox = make()?;
    let time = start.elapsed().as_nanos() as u64;
    drop(sandbox);
    Ok(time)
}

/// This process's proportional share of memory (PSS) in KiB.
fn proportional_kib() -> std::io::Result<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let value = text.lines().find_map(|line| line.strip_prefix("Pss:")?.split_whitespace().next());
    value
        .and_then(|value| value.parse().ok())
        .ok_or_else(|| std::io::Error::other("/proc/self/smaps_rollup has no Pss line"))
}
