//! The decisions of the scheduler of processors: which waiting call gets a place next.
//!
//! Promises: a place goes to the tenant with the least CPU time, divided by its weight. A tenant
//! without calls saves up nothing, and keeps its debt. The same holds for a tenant whose calls have
//! places and are not charged, such as saves that wait for a disk: they do not hold back the
//! virtual time at which others begin.
//!
//! A tenant that calls steadily finds its place free. The place of its last call is held for the
//! CPU time of that call, at most [`MAX_HOLD`], if the tenant has used no more than those that
//! wait. A hold leaves at most half of one processor idle, and at least one place is never held.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use afresh_sys::planted::{Bug, is};

use crate::sandbox::tenants::idle_processors::IdleProcessors;

/// Virtual time of a nanosecond of a tenant with weight 1.
const VIRTUAL_NANOSECOND: u128 = 1 << 10;
/// Tenants that are kept before those without calls whose debts are paid are dropped.
const MAX_IDLE_TENANTS: usize = 64;
/// Tenants that are kept before the least debts of those without calls are dropped.
const MAX_DEBTORS: usize = 1024;
/// Time without a charge after which running calls do not hold back the virtual time: several
/// intervals of a watch.
const UNCHARGED_TIME: Duration = Duration::from_millis(100);
/// Maximum time for which the place of an ended call is held.
const MAX_HOLD: Duration = Duration::from_millis(10);
/// A tenant may be this much CPU time ahead of those that wait, and still hold a place. Running
/// calls of the others are charged with a delay, which is shorter.
const HOLD_LEAD: Duration = Duration::from_millis(20);

/// CPU time of a tenant of this weight as virtual time. It is as wide as times are, for the sum
/// grows while the server runs.
fn virtual_time(used: Duration, weight: u32) -> u128 {
    used.as_nanos() * VIRTUAL_NANOSECOND / u128::from(weight.max(1))
}

/// The places, the tenants that have them, and the calls that wait for one.
pub(super) struct SchedulerState {
    /// Calls that compute at a time. A tenant without one has one more.
    places: usize,
    running: usize,
    /// Further places, while processors are idle.
    extra: usize,
    idle: IdleProcessors,
    tenants: HashMap<Arc<str>, TenantState>,
    /// The virtual time: the least one of tenants with calls that wait or are charged. It never
    /// falls.
    clock: u128,
    /// Calls that have waited so far.
    arrivals: u64,
}

struct TenantState {
    /// Its CPU time divided by its weight, in virtual time.
    used: u128,
    running: usize,
    /// With the numbers of their arrivals.
    waiting: VecDeque<(u64, Arc<Waiter>)>,
    /// When one of its calls got a place or was charged last.
    charged: Instant,
    /// Until when the place of its last call is held for the next one, while it has no other.
    held_until: Option<Instant>,
}

/// A call that waits for a place.
pub(super) struct Waiter {
    thread: Thread,
    has_place: AtomicBool,
    /// Whether it is the one that looks again when the next hold ends.
    watches_holds: AtomicBool,
}

impl Waiter {
    /// A call on this thread.
    pub(super) fn new() -> Arc<Self> {
        let (has_place, watches_holds) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { thread: std::thread::current(), has_place, watches_holds })
    }

    pub(super) fn has_place(&self) -> bool {
        self.has_place.load(Ordering::Acquire)
    }

    /// Whether it was asked since the last time to look again when the next hold ends.
    pub(super) fn take_watch(&self) -> bool {
        self.watches_holds.swap(false, Ordering::Relaxed)
    }
}

impl TenantState {
    fn new(now: Instant) -> Self {
        Self { used: 0, running: 0, waiting: VecDeque::new(), charged: now, held_until: None }
    }

    fn is_idle(&self) -> bool {
        self.running == 0 && self.waiting.is_empty()
    }

    /// Whether a place is held for its next call.
    fn holds(&self, now: Instant) -> bool {
        self.running == 0 && self.held_until.is_some_and(|end| now < end)
    }

    /// Whether its calls wait for something else than a place, as far as their charges show.
    fn is_uncharged(&self, now: Instant) -> bool {
        self.waiting.is_empty() && now.saturating_duration_since(self.charged) >= UNCHARGED_TIME
    }
}

impl SchedulerState {
    pub(super) fn new(places: usize, idle: IdleProcessors) -> Self {
        let places = places.max(1);
        let tenants = HashMap::new();
        Self { places, running: 0, extra: 0, idle, tenants, clock: 0, arrivals: 0 }
    }

    /// A tenant that gets a place or waits for one. An idle tenant has saved up nothing.
    fn tenant(&mut self, name: &Arc<str>, now: Instant) -> &mut TenantState {
        let clock = self.clock;
        if !self.tenants.contains_key(name) && self.tenants.len() >= MAX_IDLE_TENANTS {
            self.tenants
                .retain(|_, known| !known.is_idle() || known.used > clock || known.holds(now));
            if self.tenants.len() >= MAX_DEBTORS {
                self.forget_least_debt();
            }
        }
        let tenant = self.tenants.entry(name.clone()).or_insert_with(|| TenantState::new(now));
        if tenant.is_idle() || tenant.is_uncharged(now) {
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
    fn advance(&mut self, now: Instant) {
        let counts = |tenant: &&TenantState| !tenant.is_idle() && !tenant.is_uncharged(now);
        let least = self.tenants.values().filter(counts).map(|tenant| tenant.used).min();
        self.clock = self.clock.max(least.unwrap_or(0));
    }

    /// Places that are held for the next calls of tenants. One place is left for all others.
    fn held_places(&self, now: Instant) -> usize {
        let held = self.tenants.values().filter(|tenant| tenant.holds(now)).count();
        held.min(self.places - 1)
    }

    /// The tenant whose waiting call gets a place now.
    fn next(&self, now: Instant) -> Option<Arc<str>> {
        let has_free = self.running + self.held_places(now) < self.places + self.extra;
        let waiting = self.tenants.iter().filter(|(_, tenant)| !tenant.waiting.is_empty());
        let allowed = waiting.filter(|(_, tenant)| has_free || tenant.running == 0);
        let order = |tenant: &TenantState| match is(Bug::TenantOrder) {
            true => tenant.waiting.front().map_or(0, |(arrival, _)| u128::from(*arrival)),
            false => tenant.used,
        };
        // Equal ones by name, so that the order does not depend on the map.
        let least = allowed.min_by(|one, two| (order(one.1), one.0).cmp(&(order(two.1), two.0)));
        least.map(|(name, _)| name.clone())
    }

    /// Adds a call of a tenant to those that wait.
    pub(super) fn push(&mut self, name: &Arc<str>, waiter: Arc<Waiter>, now: Instant) {
        self.arrivals += 1;
        let arrival = self.arrivals;
        self.tenant(name, now).waiting.push_back((arrival, waiter));
    }

    /// Removes a call that does not wait any more. It may have got a place meanwhile.
    pub(super) fn withdraw(&mut self, name: &Arc<str>, waiter: &Arc<Waiter>) {
        if let Some(tenant) = self.tenants.get_mut(name) {
            tenant.waiting.retain(|(_, other)| !Arc::ptr_eq(other, waiter));
            if tenant.is_idle() && tenant.used <= self.clock {
                self.tenants.remove(name);
            }
        }
    }

    /// Gives free places to waiting calls.
    pub(super) fn dispatch(&mut self, now: Instant) {
        while let Some(name) = self.next(now) {
            let Some(tenant) = self.tenants.get_mut(&name) else { return };
            let Some((_, waiter)) = tenant.waiting.pop_front() else { return };
            tenant.running += 1;
            tenant.charged = now;
            tenant.held_until = None;
            self.running += 1;
            waiter.has_place.store(true, Ordering::Release);
            waiter.thread.unpark();
        }
        self.advance(now);
    }

    pub(super) fn has_waiting(&self) -> bool {
        self.tenants.values().any(|tenant| !tenant.waiting.is_empty())
    }

    /// Whether more calls compute than there are places.
    pub(super) fn is_beyond(&self) -> bool {
        self.running > self.places + self.extra
    }

    /// Holds the place of a call that ends now after this CPU time, if others wait.
    pub(super) fn hold(&mut self, name: &Arc<str>, weight: u32, computed: Duration, now: Instant) {
        let others = self.tenants.iter().filter(|(other, _)| *other != name);
        let waiting = others.filter(|(_, tenant)| !tenant.waiting.is_empty());
        let Some(least) = waiting.map(|(_, tenant)| tenant.used).min() else { return };
        let lead = virtual_time(HOLD_LEAD, weight);
        if let Some(tenant) = self.tenants.get_mut(name)
            && tenant.waiting.is_empty()
            && tenant.used <= least + lead
        {
            tenant.held_until = Some(now + computed.min(MAX_HOLD));
        }
    }

    /// When the next hold ends, if there is one.
    pub(super) fn end_of_hold(&self, now: Instant) -> Option<Instant> {
        let holding = self.tenants.values().filter(|tenant| tenant.holds(now));
        holding.filter_map(|tenant| tenant.held_until).min()
    }

    /// Wakes a waiting call if a place is held, so that it looks again when the hold ends.
    pub(super) fn wake_at_end_of_hold(&self, now: Instant) {
        if self.end_of_hold(now).is_none() {
            return;
        }
        let waiting = self.tenants.values().filter_map(|tenant| tenant.waiting.front());
        if let Some((_, waiter)) = waiting.min_by_key(|(arrival, _)| *arrival) {
            waiter.watches_holds.store(true, Ordering::Relaxed);
            waiter.thread.unpark();
        }
    }

    /// A call of a tenant has no place any more.
    pub(super) fn leave(&mut self, name: &Arc<str>) {
        self.running -= 1;
        if self.running == 0 && !self.has_waiting() {
            // They were idle then; the next flood may find them busy.
            self.extra = 0;
        }
        if let Some(tenant) = self.tenants.get_mut(name) {
            tenant.running -= 1;
            if tenant.is_idle() && tenant.held_until.is_none() && tenant.used <= self.clock {
                self.tenants.remove(name);
            }
        }
    }

    /// Charges CPU time to a tenant of this weight.
    pub(super) fn charge(&mut self, name: &Arc<str>, weight: u32, used: Duration, now: Instant) {
        let step = virtual_time(used, weight);
        self.idle.add_used(used);
        let tenant = self.tenant(name, now);
        tenant.used += step;
        tenant.charged = now;
        self.advance(now);
    }

    /// Follows the load of the processors while calls wait.
    pub(super) fn adjust(&mut self, now: Instant) {
        if self.extra == 0 && !self.has_waiting() {
            return;
        }
        match self.idle.sample(now) {
            Some(true) if self.has_waiting() => self.extra += 1,
            Some(_) => self.extra /= 2,
            None => {}
        }
    }

    /// Calls of each tenant that compute, and that wait for a place.
    pub(super) fn counts(&self) -> impl Iterator<Item = (&Arc<str>, (usize, usize))> {
        let active = self.tenants.iter().filter(|(_, tenant)| !tenant.is_idle());
        active.map(|(name, tenant)| (name, (tenant.running, tenant.waiting.len())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: Duration = Duration::from_millis(10);
    /// Places of the tests.
    const PLACES: usize = 3;

    fn name(tenant: &str) -> Arc<str> {
        tenant.into()
    }

    fn state(places: usize) -> SchedulerState {
        SchedulerState::new(places, IdleProcessors::busy())
    }

    /// A call of a simulation, which computes for a number of turns.
    struct Call {
        tenant: Arc<str>,
        turns: usize,
        waiter: Arc<Waiter>,
    }

    /// A simulation of calls that compute for a turn at a time.
    struct Simulation {
        state: SchedulerState,
        now: Instant,
        calls: Vec<Call>,
        /// The tenants in the order of their places.
        grants: Vec<Arc<str>>,
    }

    impl Simulation {
        fn new() -> Self {
            let (state, now) = (state(PLACES), Instant::now());
            Self { state, now, calls: Vec::new(), grants: Vec::new() }
        }

        /// Gives free places away, and notes who got them.
        fn dispatch(&mut self) {
            let before: Vec<bool> = self.calls.iter().map(|call| call.waiter.has_place()).collect();
            self.state.dispatch(self.now);
            for (call, had) in self.calls.iter().zip(before) {
                if !had && call.waiter.has_place() {
                    self.grants.push(call.tenant.clone());
                }
            }
        }

        fn begin(&mut self, tenant: &str, turns: usize) {
            let (tenant, waiter) = (name(tenant), Waiter::new());
            self.state.push(&tenant, waiter.clone(), self.now);
            self.calls.push(Call { tenant, turns, waiter });
            self.dispatch();
        }

        /// Each running call computes for a turn, one after another, and ends or waits again.
        fn step(&mut self) {
            self.now += WORK;
            let running = self.calls.iter().map(|call| &call.waiter).filter(|one| one.has_place());
            for waiter in running.cloned().collect::<Vec<_>>() {
                let find = |call: &Call| Arc::ptr_eq(&call.waiter, &waiter);
                let mut call = self.calls.swap_remove(self.calls.iter().position(find).unwrap());
                self.state.charge(&call.tenant, 1, WORK, self.now);
                call.turns -= 1;
                if call.turns > 0 {
                    call.waiter = Waiter::new();
                    self.state.push(&call.tenant, call.waiter.clone(), self.now);
                }
                self.state.leave(&call.tenant);
                if call.turns > 0 {
                    self.calls.push(call);
                }
                self.dispatch();
            }
        }

        fn calls_of(&self, tenant: &str) -> usize {
            self.calls.iter().filter(|call| &*call.tenant == tenant).count()
        }
    }

    /// Two places, and three calls of a flood. One of them waits when a call of the quiet tenant
    /// ends, after this CPU time.
    fn hold_after(computed: Duration) -> (SchedulerState, Instant) {
        let (mut state, now) = (state(2), Instant::now());
        for tenant in ["flood", "flood", "quiet", "flood"] {
            state.push(&name(tenant), Waiter::new(), now);
            state.dispatch(now);
        }
        state.charge(&name("quiet"), 1, computed, now);
        state.hold(&name("quiet"), 1, computed, now);
        state.leave(&name("quiet"));
        // A call of the flood makes room.
        state.leave(&name("flood"));
        (state, now)
    }

    #[test]
    fn the_place_of_an_ended_call_is_held_for_its_cpu_time() {
        let (mut state, now) = hold_after(WORK / 2);
        let end = now + WORK / 2;
        assert_eq!(state.end_of_hold(now), Some(end));
        state.dispatch(end - Duration::from_nanos(1));
        assert_eq!((state.running, state.has_waiting()), (1, true), "the flood has one processor");
        state.dispatch(end);
        assert_eq!((state.running, state.has_waiting()), (2, false), "then it has both");
        let (state, now) = hold_after(2 * MAX_HOLD);
        assert_eq!(state.end_of_hold(now), Some(now + MAX_HOLD));
    }

    #[test]
    fn a_held_place_is_taken_by_the_next_call_of_its_tenant() {
        let (mut state, now) = hold_after(WORK);
        state.push(&name("quiet"), Waiter::new(), now);
        state.dispatch(now);
        assert_eq!((state.running, state.end_of_hold(now)), (2, None));
    }

    #[test]
    fn a_tenant_that_has_used_more_than_its_share_holds_no_place() {
        let (state, now) = hold_after(2 * HOLD_LEAD);
        assert_eq!(state.end_of_hold(now), None);
    }

    #[test]
    fn held_places_leave_one_to_all_others() {
        let (mut state, now) = (state(2), Instant::now());
        state.push(&name("flood"), Waiter::new(), now);
        for tenant in ["one", "two", "three"] {
            state.push(&name(tenant), Waiter::new(), now);
            state.dispatch(now);
            state.push(&name("flood"), Waiter::new(), now);
            state.charge(&name(tenant), 1, WORK, now);
            state.hold(&name(tenant), 1, WORK, now);
            state.leave(&name(tenant));
        }
        assert_eq!(state.held_places(now), 1);
        state.leave(&name("flood"));
        state.dispatch(now);
        assert_eq!(state.running, 1, "the flood has a place");
    }

    const FAIR: &str = "a_flood_gets_few_places_between_two_of_a_quiet_tenant";

    /// The greatest number of places that the flood gets between two of the quiet tenant, while a
    /// call of the latter waits.
    fn places_between() -> usize {
        let mut simulation = Simulation::new();
        let mut most = 0;
        for _ in 0..32 {
            simulation.begin("flood", usize::MAX);
        }
        for round in 0..50 {
            (0..round % 7).for_each(|_| simulation.step());
            // Both at the same time, so that one of them has to wait.
            simulation.begin("quiet", 3);
            simulation.begin("quiet", 3);
            let mut seen = simulation.grants.len();
            while simulation.calls_of("quiet") > 1 {
                simulation.step();
                let new = &simulation.grants[seen..];
                if let Some(at) = new.iter().rposition(|tenant| &**tenant == "quiet") {
                    most = most.max(new.iter().position(|one| &**one == "quiet").unwrap_or(0));
                    seen += at + 1;
                }
            }
            most = most.max(simulation.grants.len() - seen);
            while simulation.calls_of("quiet") > 0 {
                simulation.step();
            }
        }
        most
    }

    #[test]
    fn a_flood_gets_few_places_between_two_of_a_quiet_tenant() {
        let between = places_between();
        assert!(between <= PLACES, "{between}");
    }

    #[test]
    fn an_order_without_tenants_is_caught() {
        let test = format!("sandbox::tenants::scheduler_state::tests::{FAIR}");
        afresh_sys::planted::must_be_caught(&[Bug::TenantOrder], &[&test]);
    }

    #[test]
    fn places_go_to_the_tenant_that_has_used_least_by_its_weight() {
        let (mut state, now) = (state(4), Instant::now());
        let weighted = [("heavy", 3), ("light", 1)];
        for (tenant, weight) in weighted.iter().chain(&weighted) {
            state.push(&name(tenant), Waiter::new(), now);
            state.dispatch(now);
            state.charge(&name(tenant), *weight, WORK, now);
        }
        for _ in 0..8 {
            weighted.iter().for_each(|(tenant, _)| state.push(&name(tenant), Waiter::new(), now));
        }
        let mut order = Vec::new();
        for _ in 0..8 {
            // One place becomes free at a time.
            state.places += 1;
            let next = state.next(Instant::now()).unwrap();
            let weight: u32 = if &*next == "heavy" { 3 } else { 1 };
            state.dispatch(now);
            state.charge(&next, weight, 3 * WORK, now);
            order.push(weight);
        }
        assert_eq!(order, [3, 3, 1, 3, 3, 3, 1, 3]);
    }

    #[test]
    fn calls_that_are_not_charged_do_not_hold_back_the_virtual_time() {
        let (mut state, mut now) = (state(4), Instant::now());
        for tenant in ["saver", "flood"] {
            state.push(&name(tenant), Waiter::new(), now);
        }
        state.dispatch(now);
        for _ in 0..100 {
            now += WORK;
            state.charge(&name("flood"), 1, WORK, now);
        }
        // A third tenant does not begin at the time when the save began.
        state.push(&name("third"), Waiter::new(), now);
        state.dispatch(now);
        let used = |state: &SchedulerState, tenant: &str| state.tenants[tenant].used;
        assert_eq!(used(&state, "third"), used(&state, "flood"));
        // The save was no time that its tenant saved up.
        state.charge(&name("saver"), 1, WORK, now);
        assert!(used(&state, "saver") > used(&state, "third"));
    }

    #[test]
    fn further_places_end_with_the_last_call() {
        let (mut state, now) = (state(1), Instant::now());
        state.push(&name("one"), Waiter::new(), now);
        state.dispatch(now);
        state.extra = 30;
        state.leave(&name("one"));
        assert_eq!(state.extra, 0);
    }

    /// A tenant begins a call, which gets a place.
    fn enter(state: &mut SchedulerState, tenant: &str, now: Instant) {
        state.push(&name(tenant), Waiter::new(), now);
        state.dispatch(now);
    }

    #[test]
    fn a_tenant_is_not_punished_for_processors_that_were_idle() {
        let (mut state, now) = (state(2), Instant::now());
        enter(&mut state, "alone", now);
        (0..1000).for_each(|_| state.charge(&name("alone"), 1, WORK, now));
        enter(&mut state, "newcomer", now);
        let used = |tenant: &str| state.tenants[tenant].used;
        assert_eq!(used("newcomer"), used("alone"), "both begin at the same virtual time");
    }

    #[test]
    fn a_debt_of_one_tenant_delays_no_third_one() {
        let (mut state, now) = (state(3), Instant::now());
        enter(&mut state, "debtor", now);
        enter(&mut state, "active", now);
        state.charge(&name("debtor"), 1, 1000 * WORK, now);
        state.leave(&name("debtor"));
        enter(&mut state, "debtor", now);
        enter(&mut state, "third", now);
        let used = |tenant: &str| state.tenants[tenant].used;
        assert_eq!(used("third"), used("active"));
        assert!(used("debtor") > used("third"));
    }

    #[test]
    fn a_tenant_keeps_its_debt_while_it_has_no_calls() {
        let (mut state, now) = (state(2), Instant::now());
        // Beside it another tenant has calls, which have used less.
        enter(&mut state, "active", now);
        enter(&mut state, "one", now);
        state.charge(&name("one"), 1, WORK, now);
        state.leave(&name("one"));
        assert!(state.tenants.contains_key("one"));
        enter(&mut state, "one", now);
        enter(&mut state, "two", now);
        let used = |tenant: &str| state.tenants[tenant].used;
        assert!(used("one") > used("two"));
    }

    #[test]
    fn debts_of_tenants_without_calls_are_bounded_and_the_greatest_stay() {
        let (mut state, now) = (state(1), Instant::now());
        enter(&mut state, "other", now);
        for number in 0..MAX_DEBTORS + 64 {
            let tenant = number.to_string();
            enter(&mut state, &tenant, now);
            state.charge(&name(&tenant), 1, WORK * (number + 1) as u32, now);
            state.leave(&name(&tenant));
        }
        let last = (MAX_DEBTORS + 63).to_string();
        assert!(state.tenants.len() <= MAX_DEBTORS + 1, "{}", state.tenants.len());
        assert!(state.tenants.contains_key(last.as_str()));
    }
}
