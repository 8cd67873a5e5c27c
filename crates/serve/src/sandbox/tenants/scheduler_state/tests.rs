//! Decisions of the scheduler one at a time, and in a simulation of turns.

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
fn held_places_are_no_idle_processors() {
    let (mut state, now) = hold_after(WORK);
    let used = |state: &SchedulerState| state.idle.used();
    let before = used(&state);
    state.count_holds(now + WORK / 4);
    assert_eq!(used(&state), before + WORK / 4);
    // The next call takes the place.
    state.push(&name("quiet"), Waiter::new(), now + WORK / 2);
    state.dispatch(now + WORK / 2);
    assert_eq!(used(&state), before + WORK / 2);
    // A hold that ends counts until its end.
    let (mut state, now) = hold_after(WORK);
    state.count_holds(now + 2 * WORK);
    assert_eq!(used(&state), before + WORK);
    assert!(state.tenants["quiet"].hold.is_none());
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
