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
//! The time of holds counts as used, so that no call gets a further place for it. A tenant whose
//! only call takes its turn again loses no place to others, since it would have one beyond the
//! places.

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
    /// The place of its last call is held for the next one, while it has no other.
    hold: Option<Hold>,
}

/// A place that no call has.
struct Hold {
    until: Instant,
    /// Until when it is counted as used.
    counted: Instant,
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

impl Hold {
    /// Its time until now that is not counted as used yet.
    fn uncounted(&self, now: Instant) -> Duration {
        now.min(self.until).saturating_duration_since(self.counted)
    }
}

impl TenantState {
    fn new(now: Instant) -> Self {
        Self { used: 0, running: 0, waiting: VecDeque::new(), charged: now, hold: None }
    }

    fn is_idle(&self) -> bool {
        self.running == 0 && self.waiting.is_empty()
    }

    /// Whether a place is held for its next call.
    fn holds(&self, now: Instant) -> bool {
        self.running == 0 && self.hold.as_ref().is_some_and(|hold| now < hold.until)
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

    /// Places of tenants with waiting calls and no other, which get one in any case.
    fn reserved_places(&self) -> usize {
        let has_none = |tenant: &&TenantState| tenant.running == 0 && !tenant.waiting.is_empty();
        self.tenants.values().filter(has_none).count()
    }

    /// The tenant whose waiting call gets a place now.
    fn next(&self, now: Instant) -> Option<Arc<str>> {
        let taken = self.running + self.held_places(now) + self.reserved_places();
        let has_free = taken < self.places + self.extra;
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
            if let Some(hold) = tenant.hold.take() {
                self.idle.add_used(hold.uncounted(now));
            }
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
    fn is_beyond(&self) -> bool {
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
            tenant.hold = Some(Hold { until: now + computed.min(MAX_HOLD), counted: now });
        }
    }

    /// When the next hold ends, if there is one.
    pub(super) fn end_of_hold(&self, now: Instant) -> Option<Instant> {
        let holding = self.tenants.values().filter(|tenant| tenant.holds(now));
        holding.filter_map(|tenant| Some(tenant.hold.as_ref()?.until)).min()
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
            if tenant.is_idle() && tenant.hold.is_none() && tenant.used <= self.clock {
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
        self.count_holds(now);
        match self.idle.sample(now) {
            Some(true) if self.has_waiting() => self.extra += 1,
            Some(_) => self.extra /= 2,
            None => {}
        }
    }

    /// Counts the time of holds until now as used, and drops those that have ended.
    fn count_holds(&mut self, now: Instant) {
        for tenant in self.tenants.values_mut() {
            if let Some(hold) = &mut tenant.hold {
                self.idle.add_used(hold.uncounted(now));
                hold.counted = now;
            }
            tenant.hold.take_if(|hold| hold.until <= now);
        }
    }

    /// Whether a call that computes may continue without a turn of others.
    pub(super) fn keeps_place(&self) -> bool {
        !self.is_beyond() && !self.has_waiting()
    }

    /// Calls of each tenant that compute, and that wait for a place.
    pub(super) fn counts(&self) -> impl Iterator<Item = (&Arc<str>, (usize, usize))> {
        let active = self.tenants.iter().filter(|(_, tenant)| !tenant.is_idle());
        active.map(|(name, tenant)| (name, (tenant.running, tenant.waiting.len())))
    }
}

#[cfg(test)]
mod tests;
