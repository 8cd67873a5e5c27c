//! Processors for calls that compute, shared by the tenants in proportion to their weights.
//!
//! The kernel shares the processors among all threads alike, so a tenant with many computing calls
//! would have nearly all of them. Therefore only a few calls compute at a time.
//!
//! Promises: at most `2 n - 1` calls compute at a time on `n` processors, and one of each tenant
//! beyond them. A call of a tenant that computes nothing else begins at once. While one other
//! tenant floods, it is one of `2 n` threads, and has half a processor. A call that has computed
//! for [`QUANTUM`] while others wait gives its place to the tenant with the least CPU time, divided
//! by its weight (start-time fair queueing). A call that waits for anything else has no place, so
//! it delays none. While calls wait and processors are idle, more calls run. A tenant without calls
//! saves up nothing, and keeps its debt. May break it: work without a watch, such as local saves
//! and reads of files, keeps its place to its end, and a call that begins to compute after a wait
//! has none for one interval of its watch.

use std::collections::{HashMap, VecDeque};
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::cpu_time::call_cpu_time;
use crate::lock::lock;
use crate::sandbox::tenants::idle_processors::IdleProcessors;

/// Time between two decisions about a call.
const QUANTUM: Duration = Duration::from_millis(4);
/// A call that used less than this part of its quantum waits for something else.
const WAITING_FRACTION: u32 = 20;
/// Interval of checks whether a suspended call is to end.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Virtual time of a nanosecond of a tenant with weight 1.
const VIRTUAL_NANOSECOND: u128 = 1 << 10;
/// Tenants that are kept before those without calls whose debts are paid are dropped.
const MAX_IDLE_TENANTS: usize = 64;
/// Tenants that are kept before the least debts of those without calls are dropped.
const MAX_DEBTORS: usize = 1024;

/// Calls that compute at a time if the configuration names no number.
pub(crate) fn default_places() -> usize {
    2 * processors() - 1
}

/// Processors that this process may use.
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// The scheduler of one server.
pub(crate) struct CpuScheduler {
    /// Calls that compute at a time. A tenant without one has one more.
    places: usize,
    state: Mutex<SchedulerState>,
}

struct SchedulerState {
    running: usize,
    /// Further places, while processors are idle.
    extra: usize,
    idle: IdleProcessors,
    tenants: HashMap<Arc<str>, TenantState>,
    /// The virtual time: the least one of tenants with calls. It never falls.
    clock: u128,
}

#[derive(Default)]
struct TenantState {
    /// Its CPU time divided by its weight, in virtual time.
    used: u128,
    running: usize,
    waiting: VecDeque<Arc<Waiter>>,
}

/// A call that waits for a place.
struct Waiter {
    thread: Thread,
    has_place: AtomicBool,
}

impl SchedulerState {
    /// A tenant that gets a place or waits for one. An idle tenant has saved up nothing.
    fn tenant(&mut self, name: &Arc<str>) -> &mut TenantState {
        let clock = self.clock;
        if !self.tenants.contains_key(name) && self.tenants.len() >= MAX_IDLE_TENANTS {
            self.tenants.retain(|_, known| !known.is_idle() || known.used > clock);
            if self.tenants.len() >= MAX_DEBTORS {
                self.forget_least_debt();
            }
        }
        let tenant = self.tenants.entry(name.clone()).or_default();
        if tenant.is_idle() {
            tenant.used = tenant.used.max(clock);
        }
        tenant
    }

    fn forget_least_debt(&mut self) {
        let idle = self.tenants.iter().filter(|(_, known)| known.is_idle());
        let least = idle.min_by_key(|(_, known)| known.used).map(|(name, _)| name.clone());
        least.map(|name| self.tenants.remove(&name));
    }

    /// The virtual time follows the tenant with calls that has used least.
    fn advance(&mut self) {
        let active = self.tenants.values().filter(|tenant| !tenant.is_idle());
        if let Some(least) = active.map(|tenant| tenant.used).min() {
            self.clock = self.clock.max(least);
        }
    }

    /// The tenant whose waiting call gets a place now.
    fn next(&self, places: usize) -> Option<Arc<str>> {
        let has_free = self.running < places + self.extra;
        let waiting = self.tenants.iter().filter(|(_, tenant)| !tenant.waiting.is_empty());
        let allowed = waiting.filter(|(_, tenant)| has_free || tenant.running == 0);
        // Equal ones by name, so that the order does not depend on the map.
        let least = allowed.min_by(|one, two| (one.1.used, &**one.0).cmp(&(two.1.used, &**two.0)));
        least.map(|(name, _)| name.clone())
    }

    /// Gives free places to waiting calls.
    fn dispatch(&mut self, places: usize) {
        while let Some(name) = self.next(places) {
            let Some(tenant) = self.tenants.get_mut(&name) else { return };
            let Some(waiter) = tenant.waiting.pop_front() else { return };
            tenant.running += 1;
            self.running += 1;
            waiter.has_place.store(true, Ordering::Release);
            waiter.thread.unpark();
        }
        self.advance();
    }

    fn has_waiting(&self) -> bool {
        self.tenants.values().any(|tenant| !tenant.waiting.is_empty())
    }

    fn leave(&mut self, name: &Arc<str>) {
        self.running -= 1;
        if self.running == 0 && !self.has_waiting() {
            // They were idle then; the next flood may find them busy.
            self.extra = 0;
        }
        if let Some(tenant) = self.tenants.get_mut(name) {
            tenant.running -= 1;
            if tenant.is_idle() && tenant.used <= self.clock {
                self.tenants.remove(name);
            }
        }
    }

    /// Follows the load of the processors while calls wait.
    fn adjust(&mut self) {
        if self.extra == 0 && !self.has_waiting() {
            return;
        }
        match self.idle.sample(Instant::now()) {
            Some(true) if self.has_waiting() => self.extra += 1,
            Some(_) => self.extra /= 2,
            None => {}
        }
    }
}

impl TenantState {
    fn is_idle(&self) -> bool {
        self.running == 0 && self.waiting.is_empty()
    }
}

impl CpuScheduler {
    /// For this many calls at a time.
    pub(crate) fn new(places: usize) -> Arc<Self> {
        Self::with_places(places, IdleProcessors::new(processors()))
    }

    fn with_places(places: usize, idle: IdleProcessors) -> Arc<Self> {
        let state =
            SchedulerState { running: 0, extra: 0, idle, tenants: HashMap::new(), clock: 0 };
        Arc::new(Self { places: places.max(1), state: Mutex::new(state) })
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
        };
        turn.take_place(proceeds).then_some(turn)
    }

    /// For this many calls at a time, on a host without idle processors.
    #[cfg(test)]
    pub(crate) fn busy(places: usize) -> Arc<Self> {
        Self::with_places(places, IdleProcessors::busy())
    }

    /// Calls that compute, and that wait for a place.
    #[cfg(test)]
    pub(crate) fn count(&self) -> (usize, usize) {
        let state = self.state();
        (state.running, state.tenants.values().map(|tenant| tenant.waiting.len()).sum())
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
            state.adjust();
            let is_beyond = state.running > self.scheduler.places + state.extra;
            if self.has_place && !is_beyond && !state.has_waiting() {
                return true;
            }
        }
        self.take_place(proceeds)
    }

    /// Charges the CPU time since the last charge to the tenant, and returns it.
    fn charge(&mut self, cpu: Duration) -> Duration {
        let used = cpu.saturating_sub(self.counted);
        self.counted = cpu;
        // As wide as times are, for the sum grows while the server runs.
        let step = used.as_nanos() * VIRTUAL_NANOSECOND / u128::from(self.weight);
        let mut state = self.scheduler.state();
        state.idle.add_used(used);
        let tenant = state.tenant(&self.tenant);
        tenant.used += step;
        state.advance();
        used
    }

    /// The CPU time of the call so far, on its thread.
    pub(crate) fn cpu_time(&self) -> Duration {
        call_cpu_time().saturating_sub(self.began)
    }

    /// Gives its place to others, since the call waits for something else.
    pub(crate) fn rest(&mut self) {
        if std::mem::take(&mut self.has_place) {
            let mut state = self.scheduler.state();
            state.leave(&self.tenant);
            state.dispatch(self.scheduler.places);
        }
    }

    /// Takes a place again after [`CpuTurn::rest`]. False if `proceeds` was first.
    pub(crate) fn resume(&mut self, proceeds: impl FnMut() -> bool) -> bool {
        // The wait was no time in which it could compute.
        self.since = Instant::now();
        self.has_place || self.take_place(proceeds)
    }

    /// Takes a place, behind all that wait, in turn with the other tenants.
    fn take_place(&mut self, mut proceeds: impl FnMut() -> bool) -> bool {
        let waiter =
            Arc::new(Waiter { thread: std::thread::current(), has_place: AtomicBool::new(false) });
        {
            let mut state = self.scheduler.state();
            let state = &mut *state;
            state.tenant(&self.tenant).waiting.push_back(waiter.clone());
            if std::mem::take(&mut self.has_place) {
                state.leave(&self.tenant);
            }
            state.dispatch(self.scheduler.places);
        }
        while !waiter.has_place.load(Ordering::Acquire) {
            std::thread::park_timeout(STOP_CHECK_INTERVAL);
            {
                // Calls with places may make no decisions, since they wait in the host.
                let mut state = self.scheduler.state();
                state.adjust();
                state.dispatch(self.scheduler.places);
            }
            if !waiter.has_place.load(Ordering::Acquire) && !proceeds() {
                let mut state = self.scheduler.state();
                let waiting = &mut state.tenant(&self.tenant).waiting;
                waiting.retain(|other| !Arc::ptr_eq(other, &waiter));
                // It may have got one meanwhile, which its drop returns.
                self.has_place = waiter.has_place.load(Ordering::Acquire);
                return false;
            }
        }
        self.has_place = true;
        self.since = Instant::now();
        true
    }
}

impl Drop for CpuTurn {
    fn drop(&mut self) {
        self.rest();
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
        assert!(scheduler.state().tenants.is_empty());
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
    fn places_go_to_the_tenant_that_has_used_least_by_its_weight() {
        let scheduler = scheduler(4);
        let waiter = || {
            let (thread, has_place) = (std::thread::current(), AtomicBool::new(false));
            Arc::new(Waiter { thread, has_place })
        };
        let mut calls = Vec::new();
        for (tenant, weight) in [("heavy", 3), ("light", 1)] {
            for _ in 0..2 {
                calls.push(scheduler.enter(&name(tenant), weight, || true).unwrap());
            }
        }
        for call in &mut calls {
            let cpu = call.counted + WORK;
            assert_eq!(call.charge(cpu), WORK);
        }
        let mut state = scheduler.state();
        for _ in 0..8 {
            for tenant in ["heavy", "light"] {
                state.tenant(&name(tenant)).waiting.push_back(waiter());
            }
        }
        let mut order = Vec::new();
        for _ in 0..8 {
            let next = state.next(100).unwrap();
            let weight: u32 = if &*next == "heavy" { 3 } else { 1 };
            let tenant = state.tenants.get_mut(&next).unwrap();
            tenant.waiting.pop_front();
            tenant.used += 1_000_000 * VIRTUAL_NANOSECOND * 30 / u128::from(weight);
            order.push(weight);
        }
        state.tenants.values_mut().for_each(|tenant| tenant.waiting.clear());
        drop(state);
        assert_eq!(order, [3, 3, 1, 3, 3, 3, 1, 3]);
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

    #[test]
    fn a_tenant_is_not_punished_for_processors_that_were_idle() {
        let scheduler = scheduler(2);
        let mut alone = enter(&scheduler, "alone");
        (0..1000).for_each(|_| assert!(compute(&mut alone, WORK)));
        let newcomer = enter(&scheduler, "newcomer");
        let used = |tenant: &str| scheduler.state().tenants[tenant].used;
        assert_eq!(used("newcomer"), used("alone"), "both begin at the same virtual time");
        drop((alone, newcomer));
    }

    #[test]
    fn a_debt_of_one_tenant_delays_no_third_one() {
        let scheduler = scheduler(3);
        let mut debtor = enter(&scheduler, "debtor");
        let active = enter(&scheduler, "active");
        debtor.charge(debtor.counted + 1000 * WORK);
        drop(debtor);
        let debtor = enter(&scheduler, "debtor");
        let third = enter(&scheduler, "third");
        let used = |tenant: &str| scheduler.state().tenants[tenant].used;
        assert_eq!(used("third"), used("active"));
        assert!(used("debtor") > used("third"));
        drop((debtor, active, third));
    }

    #[test]
    fn debts_of_tenants_without_calls_are_bounded_and_the_greatest_stay() {
        let scheduler = scheduler(1);
        let other = enter(&scheduler, "other");
        for number in 0..MAX_DEBTORS + 64 {
            let mut turn = enter(&scheduler, &number.to_string());
            turn.charge(turn.counted + WORK * (number + 1) as u32);
        }
        let last = (MAX_DEBTORS + 63).to_string();
        let state = scheduler.state();
        assert!(state.tenants.len() <= MAX_DEBTORS + 1, "{}", state.tenants.len());
        assert!(state.tenants.contains_key(last.as_str()));
        drop(state);
        drop(other);
    }

    #[test]
    fn further_places_end_with_the_last_call() {
        let scheduler = scheduler(1);
        let one = enter(&scheduler, "one");
        scheduler.state().extra = 30;
        drop(one);
        assert_eq!(scheduler.state().extra, 0);
    }

    #[test]
    fn a_tenant_keeps_its_debt_while_it_has_no_calls() {
        let scheduler = scheduler(2);
        // Beside it another tenant has calls, which have used less.
        let active = enter(&scheduler, "active");
        let mut one = enter(&scheduler, "one");
        one.charge(WORK);
        drop(one);
        assert!(scheduler.state().tenants.contains_key("one"));
        let used = |tenant: &str| scheduler.state().tenants[tenant].used;
        let (one, two) = (enter(&scheduler, "one"), enter(&scheduler, "two"));
        assert!(used("one") > used("two"));
        drop((active, one, two));
    }
}
