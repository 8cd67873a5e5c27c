//! Processors for calls that compute, shared by the tenants in proportion to their weights.
//!
//! The kernel shares the processors among all threads alike, so a tenant with many computing calls
//! would have nearly all of them. Therefore only a few calls compute at a time.
//!
//! Promises: at most `3 n / 2 - 1` calls compute at a time on `n` processors, and one of each
//! tenant beyond them. A call of a tenant that computes nothing else begins at once. While one
//! other tenant floods, it is one of `3 n / 2` threads, and has two thirds of a processor. On one
//! processor it has half. If the tenant calls steadily, its place is held between its calls: it is
//! one of `3 n / 2 - 1` threads then, and has a processor on two. A call that has computed for
//! [`QUANTUM`] while others wait gives its place to the tenant with the least CPU time, divided by
//! its weight (start-time fair queueing). A call that waits for anything else has no place, so it
//! delays none. While calls wait and processors are idle, more calls run. A tenant without calls
//! saves up nothing, and keeps its debt. May break it: work without a watch, such as local saves
//! and reads of files, keeps its place to its end, and a call that begins to compute after a wait
//! has none for one interval of its watch.

use std::num::NonZero;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use prometheus_client::metrics::histogram::Histogram;

use crate::cpu_time::call_cpu_time;
use crate::lock::lock;
use crate::sandbox::tenants::idle_processors::IdleProcessors;
use crate::sandbox::tenants::scheduler_state::{SchedulerState, Waiter};

/// Time between two decisions about a call.
pub(super) const QUANTUM: Duration = Duration::from_millis(4);
/// A call that used less than this part of its quantum waits for something else.
const WAITING_FRACTION: u32 = 20;
/// Interval of checks whether a suspended call is to end.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Calls that compute at a time if the configuration names no number.
pub(crate) fn default_places() -> usize {
    (3 * processors() / 2).saturating_sub(1).max(1)
}

/// Processors that this process may use.
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// The scheduler of one server.
pub(crate) struct CpuScheduler {
    state: Mutex<SchedulerState>,
}

impl CpuScheduler {
    /// For this many calls at a time.
    pub(crate) fn new(places: usize) -> Arc<Self> {
        Self::with_places(places, IdleProcessors::new(processors()))
    }

    fn with_places(places: usize, idle: IdleProcessors) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(SchedulerState::new(places, idle)) })
    }

    fn state(&self) -> MutexGuard<'_, SchedulerState> {
        lock(&self.state)
    }

    /// A place for work of this thread. It waits for one until `proceeds` is false.
    pub(crate) fn enter(
        self: &Arc<Self>,
        tenant: &Arc<str>,
        weight: u32,
        proceeds: impl FnMut() -> bool,
    ) -> Option<CpuTurn> {
        let mut turn = CpuTurn {
            scheduler: self.clone(),
            tenant: tenant.clone(),
            weight: weight.max(1),
            has_place: false,
            began: call_cpu_time(),
            counted: call_cpu_time(),
            since: Instant::now(),
            waited: Duration::ZERO,
            waits: None,
        };
        turn.take_place(proceeds).then_some(turn)
    }

    /// Tenants with calls that compute or wait for a place, and the numbers of both.
    pub(crate) fn counts(&self) -> Vec<(Arc<str>, (usize, usize))> {
        self.state().counts().map(|(name, counts)| (name.clone(), counts)).collect()
    }

    /// For this many calls at a time, on a host without idle processors.
    #[cfg(test)]
    pub(crate) fn busy(places: usize) -> Arc<Self> {
        Self::with_places(places, IdleProcessors::busy())
    }

    /// Calls that compute, and that wait for a place.
    #[cfg(test)]
    pub(crate) fn count(&self) -> (usize, usize) {
        let sum = |(running, waiting), (_, (more, late))| (running + more, waiting + late);
        self.state().counts().fold((0, 0), sum)
    }
}

/// One call, on its thread.
pub(crate) struct CpuTurn {
    scheduler: Arc<CpuScheduler>,
    tenant: Arc<str>,
    weight: u32,
    has_place: bool,
    /// The CPU time of the thread when the call began.
    began: Duration,
    /// The CPU time of the call that was charged.
    counted: Duration,
    /// The time of the last decision.
    since: Instant,
    /// The time that the call has waited for places.
    waited: Duration,
    /// Where that time is reported at the end.
    waits: Option<Histogram>,
}

impl CpuTurn {
    /// Decides whether the call continues to compute, waits for its turn, or waits for something
    /// else. False once `proceeds` is, while it waits.
    pub(crate) fn tick(&mut self, proceeds: impl FnMut() -> bool) -> bool {
        self.tick_after(self.since.elapsed(), call_cpu_time(), proceeds)
    }

    /// Charges its CPU time until now. Earlier time of the thread belongs to other calls if the
    /// call only `begins`.
    pub(crate) fn settle(&mut self, begins: bool) {
        match begins {
            true => (self.began, self.counted) = (call_cpu_time(), call_cpu_time()),
            false => drop(self.charge(call_cpu_time())),
        }
    }

    fn tick_after(
        &mut self,
        elapsed: Duration,
        cpu: Duration,
        proceeds: impl FnMut() -> bool,
    ) -> bool {
        if elapsed < QUANTUM {
            return true;
        }
        let used = self.charge(cpu);
        self.since = Instant::now();
        if used * WAITING_FRACTION < elapsed {
            self.rest();
            return true;
        }
        {
            let mut state = self.scheduler.state();
            state.adjust(self.since);
            if self.has_place && state.keeps_place() {
                return true;
            }
        }
        self.take_place(proceeds)
    }

    /// Charges the CPU time since the last charge to the tenant, and returns it.
    fn charge(&mut self, cpu: Duration) -> Duration {
        let used = cpu.saturating_sub(self.counted);
        self.counted = cpu;
        self.scheduler.state().charge(&self.tenant, self.weight, used, Instant::now());
        used
    }

    /// The CPU time of the call so far, on its thread.
    pub(crate) fn cpu_time(&self) -> Duration {
        call_cpu_time().saturating_sub(self.began)
    }

    /// Gives its place to others, since the call ends. It is held for the next call of a tenant
    /// that has used no more than its share.
    fn end(&mut self) {
        if std::mem::take(&mut self.has_place) {
            let (mut state, now) = (self.scheduler.state(), Instant::now());
            let computed = self.counted.saturating_sub(self.began);
            state.hold(&self.tenant, self.weight, computed, now);
            state.leave(&self.tenant);
            state.dispatch(now);
            state.wake_at_end_of_hold(now);
        }
    }

    /// Gives its place to others, since the call waits for something else.
    pub(crate) fn rest(&mut self) {
        if std::mem::take(&mut self.has_place) {
            let mut state = self.scheduler.state();
            state.leave(&self.tenant);
            state.dispatch(Instant::now());
        }
    }

    /// Reports the time that the call waits for places to `waits`, at its end.
    pub(crate) fn report_wait(&mut self, waits: Histogram) {
        self.waits = Some(waits);
    }

    /// Takes a place again after [`CpuTurn::rest`]. False if `proceeds` was first.
    pub(crate) fn resume(&mut self, proceeds: impl FnMut() -> bool) -> bool {
        // The wait was no time in which it could compute.
        self.since = Instant::now();
        self.has_place || self.take_place(proceeds)
    }

    /// Takes a place, behind all that wait, in turn with the other tenants.
    fn take_place(&mut self, proceeds: impl FnMut() -> bool) -> bool {
        let (waiter, began) = (Waiter::new(), Instant::now());
        {
            let mut state = self.scheduler.state();
            state.push(&self.tenant, waiter.clone(), began);
            if std::mem::take(&mut self.has_place) {
                state.leave(&self.tenant);
            }
            state.dispatch(began);
        }
        self.has_place = self.wait(&waiter, proceeds);
        self.since = Instant::now();
        self.waited += self.since.saturating_duration_since(began);
        self.has_place
    }

    /// Waits for a place. False if `proceeds` was first, and no place came meanwhile.
    fn wait(&self, waiter: &Arc<Waiter>, mut proceeds: impl FnMut() -> bool) -> bool {
        let mut interval = STOP_CHECK_INTERVAL;
        while !waiter.has_place() {
            std::thread::park_timeout(interval);
            {
                // Calls with places may make no decisions, since they wait in the host.
                let (mut state, now) = (self.scheduler.state(), Instant::now());
                state.adjust(now);
                state.dispatch(now);
                let hold = state.end_of_hold(now).filter(|_| waiter.take_watch());
                let left = hold.map(|end| end.saturating_duration_since(now));
                interval = left.map_or(STOP_CHECK_INTERVAL, |left| left.min(STOP_CHECK_INTERVAL));
            }
            if !waiter.has_place() && !proceeds() {
                let mut state = self.scheduler.state();
                state.withdraw(&self.tenant, waiter);
                return waiter.has_place();
            }
        }
        true
    }
}

impl Drop for CpuTurn {
    fn drop(&mut self) {
        self.end();
        if let Some(waits) = &self.waits {
            waits.observe(self.waited.as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: Duration = Duration::from_millis(10);

    fn name(tenant: &str) -> Arc<str> {
        tenant.into()
    }

    fn scheduler(places: usize) -> Arc<CpuScheduler> {
        CpuScheduler::busy(places)
    }

    fn enter(scheduler: &Arc<CpuScheduler>, tenant: &str) -> CpuTurn {
        scheduler.enter(&name(tenant), 1, || true).expect("it gets a place")
    }

    /// Whether a tenant gets a place without a wait.
    fn tries(scheduler: &Arc<CpuScheduler>, tenant: &str) -> Option<CpuTurn> {
        scheduler.enter(&name(tenant), 1, || false)
    }

    /// Work of a call whose CPU time is made up.
    fn compute(turn: &mut CpuTurn, work: Duration) -> bool {
        let cpu = turn.counted + work;
        turn.tick_after(work.max(QUANTUM), cpu, || true)
    }

    fn wait_for(scheduler: &CpuScheduler, waiting: usize) {
        while scheduler.count().1 != waiting {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_flood_of_one_tenant_leaves_another_a_place_at_once() {
        let scheduler = scheduler(3);
        let flood: Vec<_> = (0..3).map(|_| enter(&scheduler, "flood")).collect();
        assert!(tries(&scheduler, "flood").is_none(), "its calls have all places");
        let other = tries(&scheduler, "other").expect("a tenant without a call begins at once");
        assert!(tries(&scheduler, "other").is_none(), "a second call waits for a free place");
        assert_eq!(scheduler.count(), (4, 0));
        drop((flood, other));
        assert_eq!(scheduler.count(), (0, 0));
        assert!(scheduler.counts().is_empty());
    }

    #[test]
    fn a_call_beyond_the_places_suspends_one_of_the_flood() {
        let scheduler = scheduler(2);
        let mut flood: Vec<_> = (0..2).map(|_| enter(&scheduler, "flood")).collect();
        let other = enter(&scheduler, "other");
        let mut suspended = flood.remove(0);
        let waits = std::thread::spawn(move || {
            assert!(compute(&mut suspended, WORK));
            suspended
        });
        wait_for(&scheduler, 1);
        assert_eq!(scheduler.count(), (2, 1), "one of the flood and the other compute");
        drop(other);
        drop(waits.join().unwrap());
        assert_eq!(scheduler.count(), (1, 0));
    }

    #[test]
    fn a_call_that_waits_has_no_place() {
        let scheduler = scheduler(1);
        let mut sleeper = enter(&scheduler, "one");
        assert!(tries(&scheduler, "one").is_none());
        // It has used next to nothing of its quantum.
        assert!(sleeper.tick_after(WORK, Duration::from_micros(20), || true));
        assert_eq!(scheduler.count(), (0, 0));
        let busy = tries(&scheduler, "one").expect("the place is free");
        // It computes again, and waits for its turn.
        let wakes = std::thread::spawn(move || compute(&mut sleeper, WORK));
        wait_for(&scheduler, 1);
        drop(busy);
        assert!(wakes.join().unwrap());
        assert_eq!(scheduler.count(), (0, 0));
    }

    #[test]
    fn a_suspended_call_ends_when_it_is_stopped() {
        let scheduler = scheduler(2);
        let mut call = enter(&scheduler, "one");
        let others = (enter(&scheduler, "one"), enter(&scheduler, "two"));
        // It is beyond the places, and is stopped while it waits for its turn.
        let cpu = call.counted + WORK;
        assert!(!call.tick_after(WORK, cpu, || false));
        assert_eq!(scheduler.count(), (2, 0));
        drop(call);
        assert_eq!(scheduler.count(), (2, 0));
        drop(others);
        assert_eq!(scheduler.count(), (0, 0));
    }
}
