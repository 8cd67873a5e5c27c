//! Admission: a bound on concurrent requests, shared fairly by guests or by tenants.
//!
//! Promises: no more permits are out than there are places, and no queue exceeds its own limit.
//! Free places go to the waiting lines in proportion to their weights (start-time fair queueing),
//! so a guest with a thousand requests in its line delays a request of another guest with the same
//! weight by one place, not by a thousand. A line is bounded: a request that does not fit is
//! refused at once. A request that stops waiting does not delay those behind it. A call that waits
//! for its client can park: its place is free for others, and it precedes its line when it resumes.
//! At most as many park as there are places. A limiter that keeps a reserve gives a line a further
//! place only while it leaves at least a third as many free as the line has then, in proportion to
//! its weight: lines with long requests cannot take all places together, and one that has none gets
//! one at once. This is the rule of dynamic thresholds that switches with shared memory use
//! (Choudhury and Hahne, 1998).

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::oneshot;
use tracing::Instrument;

use crate::lock::lock;

/// Concurrent requests of one guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// Requests that run.
    pub(crate) running: usize,
    /// Requests that wait.
    pub(crate) waiting: usize,
    /// Places that it gets for each place of a line of weight 1, while both wait.
    pub(crate) weight: u32,
}

impl Share {
    /// Virtual time between two places of its line.
    fn step(self) -> u64 {
        VIRTUAL_SECOND / u64::from(self.weight.max(1))
    }
}

/// Virtual time between two places of a line of weight 1. Weights up to this differ.
const VIRTUAL_SECOND: u64 = 1 << 20;

/// Places of a line for each one that it leaves free, of a limiter that keeps a reserve.
const RESERVE_FACTOR: u64 = 3;

/// The reason of a rejection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RejectionReason {
    /// The guest's own line is full.
    LineFull,
    /// No place became free in time.
    TooLate,
}

/// The gate. Lines are numbered in the order of their shares.
pub(crate) struct ConcurrencyLimiter {
    places: usize,
    state: Mutex<LimiterState>,
}

struct LimiterState {
    free: usize,
    /// Requests that run, by the weights of their lines, if a reserve is kept.
    running: Option<BTreeMap<u32, usize>>,
    parked: usize,
    queues: Vec<Queue>,
    /// The virtual time: that of the last place that was given.
    clock: u64,
    /// The first line to get the next free place, of those with the same time.
    next: usize,
}

struct Queue {
    share: Share,
    running: usize,
    parked: usize,
    waiting: VecDeque<oneshot::Sender<Permit>>,
    /// The virtual time of its next place.
    due: u64,
}

impl Queue {
    fn new(share: Share) -> Self {
        Self { share, running: 0, parked: 0, waiting: VecDeque::new(), due: 0 }
    }

    /// Charges one place at the virtual time `clock`, which becomes that of the place.
    fn charge(&mut self, clock: &mut u64) {
        // A line that was idle has saved up nothing.
        *clock = self.due.max(*clock);
        self.due = clock.saturating_add(self.share.step());
    }
}

/// The right to run one request, released when dropped.
pub(crate) struct Permit {
    gate: Arc<ConcurrencyLimiter>,
    line: usize,
    /// Whether it was handed to a request. One that was not gives nothing back.
    used: bool,
}

/// A call that gave up its place for a while.
pub(crate) struct ParkedPermit {
    gate: Arc<ConcurrencyLimiter>,
    line: usize,
}

impl Drop for ParkedPermit {
    fn drop(&mut self) {
        let mut state = self.gate.state();
        state.parked -= 1;
        state.queues[self.line].parked -= 1;
    }
}

impl ParkedPermit {
    /// A place again, before all others of the line, waiting at most `patience` for one. The call
    /// counts as parked until then.
    pub(crate) async fn enter(self, patience: Duration) -> Result<Permit, RejectionReason> {
        self.gate.wait(self.line, patience, true).await
    }
}

impl Permit {
    /// Gives the place to others for a while. Where as many calls are parked as may be, it is kept.
    pub(crate) fn park(self) -> Result<ParkedPermit, Self> {
        let mut state = self.gate.state();
        if state.parked >= self.gate.places {
            drop(state);
            return Err(self);
        }
        state.parked += 1;
        state.queues[self.line].parked += 1;
        drop(state);
        Ok(ParkedPermit { gate: self.gate.clone(), line: self.line })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.used {
            self.gate.leave(self.line);
        }
    }
}

impl LimiterState {
    /// Whether the next request of a line gets a place.
    fn may_run(&self, number: usize) -> bool {
        let Queue { share, running, .. } = &self.queues[number];
        if self.free == 0 || *running >= share.running {
            return false;
        }
        if self.running.is_none() || *running == 0 {
            return true;
        }
        let weight = share.weight.max(1);
        // The lightest line gets three places for each free one, and heavier ones more.
        let least = self.least_weight().map_or(weight, |least| weight.min(least));
        let [weight, least] = [weight, least].map(u64::from);
        let [taken, left] = [*running + 1, self.free - 1].map(|count| count as u64);
        taken.saturating_mul(least) <= left.saturating_mul(weight).saturating_mul(RESERVE_FACTOR)
    }

    /// The least weight of a line that has a place, if a reserve is kept.
    fn least_weight(&self) -> Option<u32> {
        self.running.as_ref()?.first_key_value().map(|(weight, _)| *weight)
    }

    /// Takes a place for a line.
    fn take(&mut self, number: usize) {
        let line = &mut self.queues[number];
        line.running += 1;
        line.charge(&mut self.clock);
        self.free -= 1;
        self.count_weight(number, 1);
    }

    /// Returns a place of a line.
    fn put_back(&mut self, number: usize) {
        self.queues[number].running -= 1;
        self.free += 1;
        self.count_weight(number, -1);
    }

    /// Counts requests of a line that run under its weight.
    fn count_weight(&mut self, number: usize, change: isize) {
        let Some(weights) = self.running.as_mut() else { return };
        let weight = self.queues[number].share.weight.max(1);
        let running = weights.get(&weight).copied().unwrap_or(0);
        match running.saturating_add_signed(change) {
            0 => drop(weights.remove(&weight)),
            running => drop(weights.insert(weight, running)),
        }
    }

    /// Takes a place for the queue with the earliest virtual time whose next request may run.
    fn call_next(&mut self) -> Option<(usize, oneshot::Sender<Permit>)> {
        if self.free == 0 {
            return None;
        }
        let count = self.queues.len();
        let ready = (0..count)
            .map(|step| (self.next + step) % count)
            .filter(|number| !self.queues[*number].waiting.is_empty() && self.may_run(*number));
        let number = ready.min_by_key(|number| self.queues[*number].due.max(self.clock))?;
        let sender = self.queues[number].waiting.pop_front()?;
        self.take(number);
        self.next = (number + 1) % count;
        Some((number, sender))
    }
}

impl ConcurrencyLimiter {
    /// A gate with `places` places.
    pub(crate) fn new(places: usize, shares: impl IntoIterator<Item = Share>) -> Arc<Self> {
        Self::open(places, shares.into_iter().map(Queue::new).collect(), None)
    }

    /// A gate that keeps a reserve for lines without a place.
    pub(crate) fn with_reserve(places: usize) -> Arc<Self> {
        Self::open(places, Vec::new(), Some(BTreeMap::new()))
    }

    fn open(places: usize, queues: Vec<Queue>, running: Option<BTreeMap<u32, usize>>) -> Arc<Self> {
        let places = places.max(1);
        let state = LimiterState { free: places, running, parked: 0, queues, clock: 0, next: 0 };
        Arc::new(Self { places, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, LimiterState> {
        // Nothing in here unwinds half-way.
        lock(&self.state)
    }

    /// Adds a line, and gives its number.
    pub(crate) fn add_line(&self, share: Share) -> usize {
        let mut state = self.state();
        state.queues.push(Queue::new(share));
        state.queues.len() - 1
    }

    /// Gives a line without requests to another owner, with this share. False if it has requests,
    /// or more places than its share by more than one.
    pub(crate) fn reuse_line(&self, line: usize, share: Share) -> bool {
        let mut state = self.state();
        let clock = state.clock;
        let queue = &mut state.queues[line];
        let is_idle = queue.running == 0
            && queue.parked == 0
            && queue.waiting.iter().all(oneshot::Sender::is_closed)
            && queue.due <= clock.saturating_add(VIRTUAL_SECOND);
        if is_idle {
            *queue = Queue::new(share);
        }
        is_idle
    }

    /// Replaces the share of a line. Running requests stay, and waiting ones get places that it has
    /// more.
    pub(crate) fn set_share(self: &Arc<Self>, line: usize, share: Share) {
        {
            let mut state = self.state();
            let running = state.queues[line].running.cast_signed();
            state.count_weight(line, -running);
            state.queues[line].share = share;
            state.count_weight(line, running);
        }
        self.call_waiting();
    }

    /// A place for a request of `line`, waiting at most `patience` for one.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        line: usize,
        patience: Duration,
    ) -> Result<Permit, RejectionReason> {
        self.wait(line, patience, false).await
    }

    async fn wait(
        self: &Arc<Self>,
        line: usize,
        patience: Duration,
        first: bool,
    ) -> Result<Permit, RejectionReason> {
        let receiver = 'queued: {
            let mut state = self.state();
            let state = &mut *state;
            let is_next = first || state.queues[line].waiting.is_empty();
            if is_next && state.may_run(line) {
                let before = state.least_weight();
                state.take(line);
                let lowered = before.zip(state.least_weight()).is_some_and(|(old, new)| new < old);
                break 'queued Err(lowered);
            }
            let own = &mut state.queues[line];
            if own.waiting.len() >= own.share.waiting && !first {
                // Some clients may have left.
                own.waiting.retain(|sender| !sender.is_closed());
                if own.waiting.len() >= own.share.waiting {
                    return Err(RejectionReason::LineFull);
                }
            }
            let (sender, receiver) = oneshot::channel();
            match first {
                true => own.waiting.push_front(sender),
                false => own.waiting.push_back(sender),
            }
            Ok(receiver)
        };
        let receiver = match receiver {
            Ok(receiver) => receiver,
            Err(lowered) => {
                // Heavier lines may have more places now.
                if lowered {
                    self.call_waiting();
                }
                return Ok(Permit { gate: self.clone(), line, used: true });
            }
        };
        let waiting = tokio::time::timeout(patience, receiver);
        match waiting.instrument(tracing::debug_span!("wait for a place")).await {
            Ok(Ok(pass)) => Ok(pass),
            _ => Err(RejectionReason::TooLate),
        }
    }

    /// Gives the place of `line` to the next request.
    fn leave(self: &Arc<Self>, line: usize) {
        self.state().put_back(line);
        self.call_waiting();
    }

    /// Gives free places to waiting requests. One that stopped waiting is passed over in this loop:
    /// a pass that called the next by its own drop would recurse once for each of them.
    fn call_waiting(self: &Arc<Self>) {
        loop {
            let called = self.state().call_next();
            let Some((number, sender)) = called else { return };
            if let Err(mut pass) =
                sender.send(Permit { gate: self.clone(), line: number, used: true })
            {
                pass.used = false;
                // The line had no use of the place.
                let mut state = self.state();
                state.put_back(number);
                let queue = &mut state.queues[number];
                queue.due = queue.due.saturating_sub(queue.share.step());
            }
        }
    }

    /// Requests that run or wait, and the limit of running ones.
    #[cfg(feature = "fleet")]
    pub(crate) fn busy(&self) -> (usize, usize) {
        let state = self.state();
        let waiting: usize = state.queues.iter().map(|line| line.waiting.len()).sum();
        (self.places - state.free.min(self.places) + waiting, self.places)
    }

    #[cfg(test)]
    pub(crate) fn lines(&self) -> usize {
        self.state().queues.len()
    }

    /// Requests of `line` that run, and that wait.
    pub(crate) fn count(&self, line: usize) -> (usize, usize) {
        let state = self.state();
        let line = &state.queues[line];
        (line.running, line.waiting.iter().filter(|sender| !sender.is_closed()).count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(600);

    fn share(running: usize, waiting: usize) -> Share {
        Share { running, waiting, weight: 1 }
    }

    /// Lets every task that can run do so.
    async fn settle() {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_flood_of_one_guest_delays_another_by_one_place() {
        let gate = ConcurrencyLimiter::new(1, [share(1, 1000), share(1, 10)]);
        let order = Arc::new(Mutex::new(Vec::new()));
        let held = gate.enter(0, TEST_TIMEOUT).await.unwrap();
        let mut tasks = Vec::new();
        for (line, count) in [(0, 500), (1, 1)] {
            for _ in 0..count {
                let (gate, order) = (gate.clone(), order.clone());
                tasks.push(tokio::spawn(async move {
                    let pass = gate.enter(line, TEST_TIMEOUT).await.unwrap();
                    order.lock().unwrap().push(line);
                    drop(pass);
                }));
            }
            settle().await;
        }
        drop(held);
        for task in tasks {
            task.await.unwrap();
        }
        let order = order.lock().unwrap();
        assert_eq!(order.len(), 501);
        assert!(order.iter().position(|line| *line == 1).unwrap() <= 1);
    }

    #[tokio::test]
    async fn a_lighter_line_that_takes_a_place_lets_a_waiting_one_run() {
        let gate = ConcurrencyLimiter::with_reserve(64);
        let [heavy, waiting] =
            [10, 10].map(|weight| gate.add_line(Share { running: 64, waiting: 64, weight }));
        let light = gate.add_line(share(64, 64));
        let mut held = Vec::new();
        for line in [heavy, waiting] {
            while let Ok(permit) = gate.enter(line, Duration::from_millis(1)).await {
                held.push(permit);
            }
        }
        let entering = gate.clone();
        let waits =
            tokio::spawn(async move { entering.enter(waiting, TEST_TIMEOUT).await.is_ok() });
        settle().await;
        assert!(!waits.is_finished());
        let lighter = gate.enter(light, TEST_TIMEOUT).await.unwrap();
        settle().await;
        assert!(waits.is_finished(), "nothing called the request that may run now");
        drop((held, lighter));
    }

    #[tokio::test]
    async fn lines_share_places_by_weight_and_an_idle_line_saves_nothing_up() {
        let heavy = Share { weight: 3, ..share(1, 1000) };
        let gate = ConcurrencyLimiter::new(1, [heavy, share(1, 1000)]);
        // The second line is idle during these.
        for _ in 0..100 {
            drop(gate.enter(0, TEST_TIMEOUT).await.unwrap());
        }
        let held = gate.enter(0, TEST_TIMEOUT).await.unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        for line in [0, 1] {
            for _ in 0..100 {
                let (gate, order) = (gate.clone(), order.clone());
                tasks.push(tokio::spawn(async move {
                    let pass = gate.enter(line, TEST_TIMEOUT).await.unwrap();
                    order.lock().unwrap().push(line);
                    drop(pass);
                }));
            }
        }
        settle().await;
        drop(held);
        for task in tasks {
            task.await.unwrap();
        }
        let order = order.lock().unwrap();
        let heavy = order[..80].iter().filter(|line| **line == 0).count();
        assert!((58..=62).contains(&heavy), "{heavy} of 80 places");
    }

    #[tokio::test]
    async fn a_guest_keeps_to_its_own_share() {
        let gate = ConcurrencyLimiter::new(8, [share(2, 0), share(8, 0)]);
        let first = gate.enter(0, TEST_TIMEOUT).await.unwrap();
        let _second = gate.enter(0, TEST_TIMEOUT).await.unwrap();
        assert_eq!(gate.enter(0, TEST_TIMEOUT).await.err(), Some(RejectionReason::LineFull));
        let _other = gate.enter(1, TEST_TIMEOUT).await.unwrap();
        drop(first);
        assert!(gate.enter(0, TEST_TIMEOUT).await.is_ok());
    }

    #[tokio::test]
    async fn many_requests_that_stopped_waiting_are_passed_over() {
        const WAITERS: usize = 200_000;
        let gate = ConcurrencyLimiter::new(1, [share(1, WAITERS + 1)]);
        let held = gate.enter(0, TEST_TIMEOUT).await.unwrap();
        for _ in 0..WAITERS {
            let mut waiting = Box::pin(gate.enter(0, TEST_TIMEOUT));
            assert!(futures_util::poll!(&mut waiting).is_pending());
        }
        let waiting = tokio::spawn({
            let gate = gate.clone();
            async move { gate.enter(0, TEST_TIMEOUT).await.is_ok() }
        });
        settle().await;
        drop(held);
        assert!(waiting.await.unwrap());
        assert_eq!(gate.count(0), (0, 0));
    }

    #[tokio::test]
    async fn a_parked_call_leaves_its_place_and_returns_before_its_line() {
        let gate = ConcurrencyLimiter::new(1, [share(1, 10), share(1, 10)]);
        let order = Arc::new(Mutex::new(Vec::new()));
        let parked = gate.enter(0, TEST_TIMEOUT).await.unwrap().park().ok().expect("there is room");
        let other = gate.enter(1, TEST_TIMEOUT).await.unwrap();
        let other = other.park().err().expect("as many are parked as there are places");
        let mut tasks = Vec::new();
        for name in ["second", "third"] {
            let (gate, order) = (gate.clone(), order.clone());
            tasks.push(tokio::spawn(async move {
                let pass = gate.enter(0, TEST_TIMEOUT).await.unwrap();
                order.lock().unwrap().push(name);
                drop(pass);
            }));
            settle().await;
        }
        let own = order.clone();
        tasks.push(tokio::spawn(async move {
            let pass = parked.enter(TEST_TIMEOUT).await.unwrap();
            own.lock().unwrap().push("parked");
            drop(pass);
        }));
        settle().await;
        drop(other);
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(*order.lock().unwrap(), ["parked", "second", "third"]);
        assert_eq!((gate.count(0), gate.count(1)), ((0, 0), (0, 0)));
        assert!(
            gate.enter(0, TEST_TIMEOUT).await.unwrap().park().is_ok(),
            "nothing is parked any more"
        );
    }

    #[tokio::test]
    async fn who_stops_waiting_leaves_no_place_behind() {
        let gate = ConcurrencyLimiter::new(1, [share(4, 4)]);
        let held = gate.enter(0, TEST_TIMEOUT).await.unwrap();
        for _ in 0..100 {
            let turned = gate.enter(0, Duration::from_millis(1)).await;
            assert_eq!(turned.err(), Some(RejectionReason::TooLate));
        }
        let waiting = tokio::spawn({
            let gate = gate.clone();
            async move { gate.enter(0, TEST_TIMEOUT).await.is_ok() }
        });
        settle().await;
        drop(held);
        assert!(waiting.await.unwrap());
        assert_eq!(gate.count(0), (0, 0));
    }
}
