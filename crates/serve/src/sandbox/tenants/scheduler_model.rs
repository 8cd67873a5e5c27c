//! A model of processors in virtual time. It shows the delays that the decisions of the scheduler
//! add to calls of one tenant beside a flood of another.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::cpu_scheduler::QUANTUM;
use super::idle_processors::IdleProcessors;
use super::scheduler_state::{SchedulerState, Waiter};

const PROCESSORS: u32 = 2;
/// Resolution of idle times.
const TICK: Duration = Duration::from_millis(10);
/// Places of that many processors.
const PLACES: usize = 2;
const STEP: Duration = Duration::from_micros(100);
/// Calls of the flood at a time, and the CPU time of each.
const FLOOD: usize = 32;
const LONG_CALL: Duration = Duration::from_millis(50);
/// Times between two calls of a client, in turns.
const PAUSES: [u64; 7] = [600, 700, 500, 900, 6000, 1500, 600];
/// Measured calls.
const CALLS: usize = 200;

/// A client that makes one call after another.
struct Client {
    tenant: Arc<str>,
    work: Duration,
    call: Call,
    /// Calls that have ended.
    ended: usize,
}

/// The call of a client.
enum Call {
    /// It begins then.
    Next(Instant),
    Waits(Running),
    Computes(Running),
}

struct Running {
    waiter: Arc<Waiter>,
    begun: Instant,
    left: Duration,
    /// CPU time that is not charged yet.
    uncharged: Duration,
    /// When it got its place or was last charged.
    since: Instant,
}

impl Client {
    fn new(tenant: &str, work: Duration, begins: Instant) -> Self {
        Self { tenant: tenant.into(), work, call: Call::Next(begins), ended: 0 }
    }

    /// Begins the next call if it is time, and sees whether one that waits has a place.
    fn begin(&mut self, state: &mut SchedulerState, now: Instant) {
        self.call = match std::mem::replace(&mut self.call, Call::Next(now)) {
            Call::Next(at) if at > now => Call::Next(at),
            Call::Next(_) => {
                let waiter = Waiter::new();
                state.push(&self.tenant, waiter.clone(), now);
                state.dispatch(now);
                let (left, uncharged) = (self.work, Duration::ZERO);
                Call::Waits(Running { waiter, begun: now, left, uncharged, since: now })
            }
            Call::Waits(call) if call.waiter.has_place() => {
                Call::Computes(Running { since: now, ..call })
            }
            other => other,
        };
    }

    /// Computes for `share` until `now`. Returns the time of a call that ends.
    fn compute(
        &mut self,
        state: &mut SchedulerState,
        share: Duration,
        now: Instant,
    ) -> Option<Duration> {
        let Call::Computes(call) = &mut self.call else { return None };
        let used = share.min(call.left);
        call.left -= used;
        call.uncharged += used;
        let tenant = &self.tenant;
        let elapsed = now - call.since;
        if !call.left.is_zero() && elapsed < QUANTUM {
            return None;
        }
        state.charge(tenant, 1, std::mem::take(&mut call.uncharged), now);
        call.since = now;
        if call.left.is_zero() {
            let time = now - call.begun;
            state.hold(tenant, 1, self.work, now);
            state.leave(tenant);
            state.dispatch(now);
            self.ended += 1;
            let pause = Duration::from_micros(PAUSES[self.ended % PAUSES.len()]);
            self.call = Call::Next(now + pause);
            return Some(time);
        }
        if state.keeps_place() {
            return None;
        }
        call.waiter = Waiter::new();
        state.push(tenant, call.waiter.clone(), now);
        state.leave(tenant);
        state.dispatch(now);
        if let Call::Computes(call) = std::mem::replace(&mut self.call, Call::Next(now)) {
            self.call = Call::Waits(call);
        }
        None
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap()
}

/// Times of the calls of a quiet tenant with this CPU time each, in order of length.
fn delays(work: Duration, flood: usize) -> Vec<Duration> {
    let begun = Instant::now();
    let idle = Arc::new(AtomicU64::new(0));
    let host = idle.clone();
    let host = move || Some(TICK * u32::try_from(host.load(Relaxed) / nanos(TICK)).unwrap());
    let mut state = SchedulerState::new(PLACES, IdleProcessors::on(PROCESSORS as usize, host));
    // The calls of the flood begin at different times.
    let stagger = |number: usize| LONG_CALL * number as u32 / FLOOD as u32;
    let mut clients: Vec<_> =
        (0..flood).map(|number| Client::new("flood", LONG_CALL, begun + stagger(number))).collect();
    clients.push(Client::new("quiet", work, begun + 2 * LONG_CALL));
    let (mut now, mut delays) = (begun, Vec::new());
    while delays.len() < CALLS {
        clients.iter_mut().for_each(|client| client.begin(&mut state, now));
        // A place that one of them left may have become another's.
        clients.iter_mut().for_each(|client| client.begin(&mut state, now));
        let computing = clients.iter().filter(|one| matches!(one.call, Call::Computes(_))).count();
        let share = STEP.min(STEP * PROCESSORS / (computing as u32).max(1));
        now += STEP;
        idle.fetch_add(
            nanos(STEP) * u64::from(PROCESSORS) - nanos(share) * computing as u64,
            Relaxed,
        );
        for client in &mut clients {
            let ended = client.compute(&mut state, share, now);
            delays.extend(ended.filter(|_| &*client.tenant == "quiet"));
        }
        state.adjust(now);
        state.dispatch(now);
    }
    delays.sort();
    delays
}

#[test]
fn a_flood_hardly_delays_a_tenant_that_calls_steadily() {
    for milliseconds in [1, 3, 5, 9, 15, 40] {
        let work = Duration::from_millis(milliseconds);
        let (alone, beside) = (delays(work, 0), delays(work, FLOOD));
        assert_eq!(alone[CALLS - 1], work);
        let (median, late) = (beside[CALLS / 2], beside[CALLS * 99 / 100]);
        println!("{milliseconds} ms: median {median:?}, 99th percentile {late:?}");
        assert!(median <= work * 11 / 10, "{median:?} for {work:?}");
        // The place of a short call is held for less than some pauses.
        let most = work * 3 / 2 + Duration::from_millis(1);
        assert!(late <= most, "{late:?} for {work:?}");
    }
}
