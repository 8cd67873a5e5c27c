//! One random module after the other, on every kind of instance that a warm guest can have, against
//! a new instance of plain wasmtime with the same history.
//!
//! A history is: instantiation, the warm-up's calls, and one list of calls that ends with `look`.
//! On the other side the same list runs on instances that were spoilt before in all manners, and
//! reset.

use afresh_memory::{Features as HostFeatures, HostAccess, Strategy};
use afresh_wasm::wasmtime::{Engine as Plainly, Val};
use afresh_wasm::{
    Engine, EngineConfig, FreezeError, Frozen, Guest, GuestOptions, Lease, Mode, Warm, WarmError,
    WarmUp,
};
use anyhow::{Context, Result, bail, ensure};

use crate::meddling;
use crate::outcome;
use crate::random::Random;
use crate::reference::{self, Reference};
use crate::stateful::{self, FUNCTIONS, Features};

/// Counts of exercised features, so that a run cannot pass on nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Coverage {
    /// Modules that ran.
    pub modules: u64,
    /// Those in reset mode.
    pub reset: u64,
    /// Those in fresh mode.
    pub fresh: u64,
    /// Modules that could not be warmed, with a reason.
    pub refused: u64,
    /// Modules whose start failed in plain wasmtime, and here too.
    pub unstarted: u64,
    /// Calls compared.
    pub calls: u64,
    /// Calls that trapped.
    pub traps: u64,
    /// Uncaught exceptions.
    pub thrown: u64,
    /// Leases that ended after calls which changed something.
    pub spoilt: u64,
    /// Those whose store a host function spoilt.
    pub meddled: u64,
    /// Leases in which a comparison with the warm state found nothing, and `look` neither.
    pub clean: u64,
    /// Leases in which the comparison found a difference.
    pub seen_to_differ: u64,
    /// Modules whose constant objects a host function changes.
    pub kept: u64,
    /// Instances replaced because a table grew.
    pub replaced: u64,
    /// Resets after which a memory was shrunk.
    pub shrunk: u64,
    /// Guests thawed, from the warm state or from a lease.
    pub thawed: u64,
}

impl Coverage {
    /// Adds the findings of another thread.
    pub fn add(&mut self, other: &Coverage) {
        self.modules += other.modules;
        self.reset += other.reset;
        self.fresh += other.fresh;
        self.refused += other.refused;
        self.unstarted += other.unstarted;
        self.calls += other.calls;
        self.traps += other.traps;
        self.thrown += other.thrown;
        self.spoilt += other.spoilt;
        self.meddled += other.meddled;
        self.clean += other.clean;
        self.seen_to_differ += other.seen_to_differ;
        self.kept += other.kept;
        self.replaced += other.replaced;
        self.shrunk += other.shrunk;
        self.thawed += other.thawed;
    }
}

/// The engines of one thread.
#[derive(Debug)]
pub struct Bench {
    plainly: Plainly,
    engine: Engine,
    /// Counts fuel.
    metered: Engine,
    strategies: Vec<Strategy>,
    /// The counts so far.
    pub seen: Coverage,
}

type Call = (String, Vec<Val>);

fn calls(random: &mut Random, most: usize) -> Vec<Call> {
    (0..=random.below(most))
        .map(|_| {
            let name = match random.below(FUNCTIONS + 3) {
                at if at < FUNCTIONS => format!("f{at}"),
                _ => "machine".to_owned(),
            };
            (name, vec![Val::I32(random.int() as i32), Val::I32(random.int() as i32)])
        })
        .collect()
}

/// A seed's module, which a failure is reproduced with.
#[must_use]
pub fn module(seed: u64) -> String {
    stateful::module(&mut Random::new(seed), features(seed))
}

fn features(seed: u64) -> Features {
    Features { gc_writes: seed % 7 == 3, objects: seed.is_multiple_of(2), kept: seed % 11 == 4 }
}

/// A history's outcomes in plain wasmtime.
fn expect(reference: &Reference, before: &[&[Call]], probe: &[Call]) -> Result<Vec<String>> {
    let mut plain = reference.start().map_err(|error| anyhow::anyhow!("{error:#}"))?;
    for (name, arguments) in before.iter().copied().flatten() {
        plain.call(name, arguments);
    }
    let mut outcomes: Vec<String> =
        probe.iter().map(|(name, arguments)| plain.call(name, arguments)).collect();
    outcomes.push(plain.call("look", &[]));
    Ok(outcomes)
}

impl Bench {
    /// Sets the engines up.
    ///
    /// # Errors
    /// When wasmtime does not support this machine.
    pub fn new() -> Result<Self> {
        let strategies = Strategy::FORCED.into_iter().chain([Strategy::Auto, Strategy::Auto]);
        let usable = |s: &Strategy| s.choose(HostFeatures::host(), HostAccess::Threads).is_ok();
        Ok(Self {
            plainly: reference::engine()?,
            engine: Engine::new(EngineConfig::default())?,
            metered: Engine::new(EngineConfig { fuel: true, ..EngineConfig::default() })?,
            strategies: strategies.filter(usable).collect(),
            seen: Coverage::default(),
        })
    }

    /// Checks the module of one seed.
    ///
    /// # Errors
    /// The first difference, with the calls before it.
    pub fn check(&mut self, seed: u64) -> Result<()> {
        let wasm = wat::parse_str(module(seed)).context("the generated module is not valid")?;
        let mut random = Random::new(!seed);
        let reference = Reference::new(&self.plainly, &wasm)
            .map_err(|error| anyhow::anyhow!("plain wasmtime refuses it: {error:#}"))?;
        // A warm-up must not fail: the calls that plain wasmtime makes without a trap.
        let mut warm_up = Vec::new();
        let mut cleared = false;
        let features = features(seed);
        // Without a warm-up, a module whose constant objects the host changes can run in fresh
        // mode.
        let warms = !features.kept || random.one_in(2);
        if let Some(mut plain) = reference.start().ok().filter(|_| warms) {
            for (name, arguments) in calls(&mut random, 5) {
                if random.one_in(3) || plain.invoke(&name, &arguments).is_err() {
                    break;
                }
                warm_up.push((name, arguments));
            }
            // Otherwise it may leave state that no other instance can hold, and only then may that
            // be refused.
            if !random.one_in(8) {
                cleared = true;
                warm_up.push(("clear".to_owned(), Vec::new()));
            }
        }
        let started = reference.start().is_ok();
        let strategy = *random.pick(&self.strategies).1;
        let mode = if random.one_in(3) { Mode::Fresh } else { Mode::Auto };
        let options = GuestOptions {
            mode,
            strategy,
            imports: reference::imports(),
            state: meddling::state(),
            limiter: if random.one_in(2) { meddling::limiter() } else { Default::default() },
            verify_every: random.one_in(4).then_some(1),
            ..GuestOptions::default()
        };
        let engine = if random.one_in(8) { &self.metered } else { &self.engine }.clone();
        let guest = Guest::with_options(&engine, &wasm, options.clone())
            .context("the guest cannot be loaded")?;
        let mut up = WarmUp::new();
        for (name, arguments) in &warm_up {
            up = up.call(name, arguments);
        }
        let warm = match guest.warm(up) {
            Ok(warm) if started => warm,
            Ok(_) => bail!("it starts here, but not in plain wasmtime"),
            Err(_) if !started => {
                self.seen.unstarted += 1;
                return Ok(());
            }
            // The warm-up left state that no other instance can hold, and the error says that.
            Err(WarmError::State(_)) if !cleared => {
                self.seen.refused += 1;
                return Ok(());
            }
            // It changes objects in place, or its host functions do, which a warm-up may have done.
            Err(WarmError::Refused { .. })
                if (features.gc_writes || features.kept) && !warm_up.is_empty() =>
            {
                self.seen.refused += 1;
                return Ok(());
            }
            Err(error) => bail!("it cannot be warmed: {error}"),
        };
        let mode = warm.report().mode;
        self.seen.modules += 1;
        match mode {
            Mode::Fresh => self.seen.fresh += 1,
            _ => self.seen.reset += 1,
        }
        self.seen.kept += u64::from(features.kept);
        let history = Scene { reference: &reference, warm_up: &warm_up, options: &options, engine };
        self.play(&history, &warm, &mut random)
            .with_context(|| format!("{} mode, strategy {strategy}", mode.name()))
    }

    /// Plays with a warm guest, and with those that are thawed from it.
    fn play(&mut self, scene: &Scene<'_>, warm: &Warm, random: &mut Random) -> Result<()> {
        let probe = calls(random, 6);
        let expected = expect(scene.reference, &[scene.warm_up], &probe)?;
        let pristine = expect(scene.reference, &[scene.warm_up], &[])?;
        self.look_at_differences(warm, &pristine[0], random)?;
        self.rounds(warm, &probe, &expected, random).context("warmed here")?;
        if warm.report().mode == Mode::Fresh {
            return Ok(());
        }
        let frozen = warm.freeze().context("freezing")?;
        let thawed = thaw(&scene.engine, scene.options, &frozen).context("thawing")?;
        self.seen.thawed += 1;
        self.rounds(&thawed, &probe, &expected, random).context("thawed")?;

        // A fork: the state that calls have left, thawed.
        let mut spoil = calls(random, 5);
        let mut lease = warm.lease().context("a lease to fork")?;
        self.run(&mut lease, &spoil);
        let frozen = match lease.freeze_live() {
            // Its present state may be one that no other instance can hold; it is not after
            // clearing.
            Err(FreezeError::State(_)) => {
                self.seen.refused += 1;
                spoil.push(("clear".to_owned(), Vec::new()));
                self.run(&mut lease, &spoil[spoil.len() - 1..]);
                lease.freeze_live()
            }
            frozen => frozen,
        };
        let frozen = frozen.context("freezing a fork")?;
        let expected_of_fork = expect(scene.reference, &[scene.warm_up, &spoil], &probe)?;
        let forked = thaw(&scene.engine, scene.options, &frozen).context("thawing a fork")?;
        self.seen.thawed += 1;
        self.rounds(&forked, &probe, &expected_of_fork, random).context("forked")?;
        drop(lease);
        self.rounds(warm, &probe, &expected, random).context("after the fork")
    }

    /// Takes leases that a comparison finds equal to the warm state, and checks that `look` agrees.
    fn look_at_differences(
        &mut self,
        warm: &Warm,
        pristine: &str,
        random: &mut Random,
    ) -> Result<()> {
        for _ in 0..3 {
            let spoil = calls(random, 1);
            let mut lease = warm.lease().context("a lease to compare")?;
            self.run(&mut lease, &spoil);
            let found = lease.compare().context("comparing a lease")?;
            if !found.is_clean() {
                self.seen.seen_to_differ += 1;
            } else if found.unseen.is_empty() {
                self.seen.clean += 1;
                let look = outcome::lease(&lease.call("look", &[]));
                ensure!(
                    look == pristine,
                    "no difference was found, but `look` gives {look} instead of {pristine} after {spoil:?}"
                );
            }
        }
        Ok(())
    }

    /// First, recycled and new instances of one guest.
    fn rounds(
        &mut self,
        warm: &Warm,
        probe: &[Call],
        expected: &[String],
        random: &mut Random,
    ) -> Result<()> {
        let mut lease = warm.lease().context("the first lease")?;
        self.compare(&mut lease, probe, expected).context("first instance")?;
        drop(lease);
        for round in 0..2 + random.below(3) {
            // Now and then enough for the write set to be sampled and to evict.
            let times = if random.one_in(25) { 130 } else { 1 };
            let spoil = calls(random, 7);
            for _ in 0..times {
                let mut lease = warm.lease().context("a lease to spoil")?;
                self.run(&mut lease, &spoil);
                if random.one_in(4) {
                    self.run(&mut lease, &[("spoil".to_owned(), Vec::new())]);
                    self.seen.meddled += 1;
                }
            }
            let mut lease =
                warm.lease().with_context(|| format!("recycled instance, round {round}"))?;
            self.compare(&mut lease, probe, expected)
                .with_context(|| format!("recycled instance, round {round}, after {spoil:?}"))?;
        }
        let mut lease = warm.lease_new().context("a new instance")?;
        self.compare(&mut lease, probe, expected).context("new instance")?;
        drop(lease);
        let differences = warm.differences().context("comparing")?;
        ensure!(differences == (0, 0), "{differences:?} bytes and items differ after a reset");
        let (replaced, shrunk) = warm.growth_stats();
        self.seen.replaced += replaced;
        self.seen.shrunk += shrunk;
        Ok(())
    }

    fn run(&mut self, lease: &mut Lease<'_>, calls: &[Call]) {
        for (name, arguments) in calls {
            let found = outcome::lease(&lease.call(name, arguments));
            self.count(&found);
        }
        self.seen.spoilt += 1;
    }

    fn count(&mut self, outcome: &str) {
        self.seen.calls += 1;
        self.seen.traps += u64::from(outcome.starts_with("trap"));
        self.seen.thrown += u64::from(outcome == "thrown");
    }

    fn compare(
        &mut self,
        lease: &mut Lease<'_>,
        probe: &[Call],
        expected: &[String],
    ) -> Result<()> {
        let look = [("look".to_owned(), Vec::new())];
        for ((name, arguments), expected) in probe.iter().chain(&look).zip(expected) {
            let found = outcome::lease(&lease.call(name, arguments));
            self.count(&found);
            ensure!(
                found == *expected,
                "{name}{arguments:?}: {found}, but plain wasmtime: {expected}; in {probe:?}"
            );
        }
        Ok(())
    }
}

/// The common part of all histories of a guest.
struct Scene<'a> {
    reference: &'a Reference,
    warm_up: &'a [Call],
    options: &'a GuestOptions,
    engine: Engine,
}

/// Through the pages and bytes that a snapshot would hold.
fn thaw(engine: &Engine, options: &GuestOptions, frozen: &Frozen) -> Result<Warm> {
    let frozen = Frozen::from_parts(frozen.memory().clone(), &frozen.bytes()?)?;
    Ok(Warm::thaw(engine, options, &frozen)?)
}
