//! Who may run now: a bound on requests that run at the same time, shared fairly by the guests.
//!
//! What it promises: no more passes are out than there are places, and no guest has more than its own limit.
//! A free place goes to the next guest in turn that has somebody waiting, so a guest with a thousand requests
//! in its line delays another guest's request by one place, not by a thousand. A line is bounded: who does not
//! fit is told at once. Somebody who stops waiting loses nothing for those behind.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tracing::Instrument;

/// What one guest may have at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// Requests that run.
    pub(crate) running: usize,
    /// Requests that wait.
    pub(crate) waiting: usize,
}

/// Why nobody was let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turned {
    /// The guest's own line is full.
    LineFull,
    /// No place became free in time.
    TooLate,
}

/// The gate. Lines are numbered in the order of their shares.
pub(crate) struct Gate {
    #[cfg(feature = "fleet")]
    places: usize,
    state: Mutex<State>,
}

struct State {
    free: usize,
    lines: Vec<Line>,
    /// The line that is asked first for the next free place.
    next: usize,
}

struct Line {
    share: Share,
    running: usize,
    waiting: VecDeque<oneshot::Sender<Pass>>,
}

/// The right to run one request, given back when dropped.
pub(crate) struct Pass {
    gate: Arc<Gate>,
    line: usize,
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.gate.leave(self.line);
    }
}

impl State {
    /// Takes a place for the next line in turn that has somebody who may have it.
    fn call_next(&mut self) -> Option<(usize, oneshot::Sender<Pass>)> {
        if self.free == 0 {
            return None;
        }
        let count = self.lines.len();
        for step in 0..count {
            let number = (self.next + step) % count;
            let line = &mut self.lines[number];
            if line.running >= line.share.running {
                continue;
            }
            if let Some(sender) = line.waiting.pop_front() {
                line.running += 1;
                self.free -= 1;
                self.next = (number + 1) % count;
                return Some((number, sender));
            }
        }
        None
    }
}

impl Gate {
    /// A gate with so many places.
    pub(crate) fn new(places: usize, shares: impl IntoIterator<Item = Share>) -> Arc<Self> {
        let lines = shares.into_iter();
        let lines = lines.map(|share| Line { share, running: 0, waiting: VecDeque::new() });
        let state = State { free: places.max(1), lines: lines.collect(), next: 0 };
        Arc::new(Self {
            #[cfg(feature = "fleet")]
            places: places.max(1),
            state: Mutex::new(state),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing in here unwinds half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a request of `line`, waiting at most `patience` for one.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        line: usize,
        patience: Duration,
    ) -> Result<Pass, Turned> {
        let receiver = {
            let mut state = self.state();
            let state = &mut *state;
            let own = &mut state.lines[line];
            if state.free > 0 && own.running < own.share.running && own.waiting.is_empty() {
                own.running += 1;
                state.free -= 1;
                return Ok(Pass { gate: self.clone(), line });
            }
            if own.waiting.len() >= own.share.waiting {
                // Some of those may have gone away.
                own.waiting.retain(|sender| !sender.is_closed());
                if own.waiting.len() >= own.share.waiting {
                    return Err(Turned::LineFull);
                }
            }
            let (sender, receiver) = oneshot::channel();
            own.waiting.push_back(sender);
            receiver
        };
        let waiting = tokio::time::timeout(patience, receiver);
        match waiting.instrument(tracing::debug_span!("wait for a place")).await {
            Ok(Ok(pass)) => Ok(pass),
            _ => Err(Turned::TooLate),
        }
    }

    fn leave(self: &Arc<Self>, line: usize) {
        let called = {
            let mut state = self.state();
            state.lines[line].running -= 1;
            state.free += 1;
            state.call_next()
        };
        if let Some((number, sender)) = called {
            // Where nobody waits for it any more, the pass comes back, is dropped, and the next is called.
            drop(sender.send(Pass { gate: self.clone(), line: number }));
        }
    }

    /// Requests that run or wait, of so many that may run.
    #[cfg(feature = "fleet")]
    pub(crate) fn busy(&self) -> (usize, usize) {
        let state = self.state();
        let waiting: usize = state.lines.iter().map(|line| line.waiting.len()).sum();
        (self.places - state.free.min(self.places) + waiting, self.places)
    }

    /// Requests of `line` that run, and that wait.
    pub(crate) fn count(&self, line: usize) -> (usize, usize) {
        let state = self.state();
        let line = &state.lines[line];
        (line.running, line.waiting.iter().filter(|sender| !sender.is_closed()).count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    fn share(running: usize, waiting: usize) -> Share {
        Share { running, waiting }
    }

    /// Lets every task that can run do so.
    async fn settle() {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_flood_of_one_guest_delays_another_by_one_place() {
        let gate = Gate::new(1, [share(1, 1000), share(1, 10)]);
        let order = Arc::new(Mutex::new(Vec::new()));
        let held = gate.enter(0, LONG).await.unwrap();
        let mut tasks = Vec::new();
        for (line, count) in [(0, 500), (1, 1)] {
            for _ in 0..count {
                let (gate, order) = (gate.clone(), order.clone());
                tasks.push(tokio::spawn(async move {
                    let pass = gate.enter(line, LONG).await.unwrap();
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
    async fn a_guest_keeps_to_its_own_share() {
        let gate = Gate::new(8, [share(2, 0), share(8, 0)]);
        let first = gate.enter(0, LONG).await.unwrap();
        let _second = gate.enter(0, LONG).await.unwrap();
        assert_eq!(gate.enter(0, LONG).await.err(), Some(Turned::LineFull));
        let _other = gate.enter(1, LONG).await.unwrap();
        drop(first);
        assert!(gate.enter(0, LONG).await.is_ok());
    }

    #[tokio::test]
    async fn who_stops_waiting_leaves_no_place_behind() {
        let gate = Gate::new(1, [share(4, 4)]);
        let held = gate.enter(0, LONG).await.unwrap();
        for _ in 0..100 {
            let turned = gate.enter(0, Duration::from_millis(1)).await;
            assert_eq!(turned.err(), Some(Turned::TooLate));
        }
        let waiting = tokio::spawn({
            let gate = gate.clone();
            async move { gate.enter(0, LONG).await.is_ok() }
        });
        settle().await;
        drop(held);
        assert!(waiting.await.unwrap());
        assert_eq!(gate.count(0), (0, 0));
    }
}
