//! The queue of objects that are to be reconciled.
//!
//! Promises: namespaces take turns, so a namespace with many objects delays those of another one by
//! at most one object for each turn. At most [`MAX_RUNNING`] objects are at work, and those of one
//! namespace leave room for others. An object is at work once at a time, and a change during its
//! work is not lost.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::resource::Kind;

/// Objects that are reconciled at once.
pub const MAX_RUNNING: usize = 64;
/// Objects of one namespace that are reconciled at once, where there are others.
pub const MAX_RUNNING_OF_NAMESPACE: usize = 16;

/// The name of an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    /// The name of its kind.
    pub kind: &'static str,
    /// Its namespace.
    pub namespace: String,
    /// Its name there.
    pub name: String,
}

impl ObjectKey {
    /// The object `name` of a kind.
    #[must_use]
    pub fn new<K: Kind>(namespace: &str, name: &str) -> Self {
        Self { kind: K::KIND, namespace: namespace.to_owned(), name: name.to_owned() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Until a time, with its place among the timers.
    Waiting(Instant, u64),
    Ready,
    /// At work, and whether it changed meanwhile.
    Running {
        changed: bool,
    },
}

/// The objects of one namespace.
#[derive(Debug, Default)]
struct Lane {
    ready: VecDeque<ObjectKey>,
    running: usize,
}

#[derive(Debug, Default)]
struct State {
    phases: HashMap<ObjectKey, Phase>,
    lanes: HashMap<String, Lane>,
    /// Namespaces with objects that are ready, in the order of their turns.
    turns: VecDeque<String>,
    timers: BTreeSet<(Instant, u64, ObjectKey)>,
    /// The place of the next timer.
    place: u64,
    running: usize,
}

impl State {
    /// Ends the wait of an object.
    fn stop_timer(&mut self, key: &ObjectKey) {
        if let Some(Phase::Waiting(when, place)) = self.phases.get(key) {
            self.timers.remove(&(*when, *place, key.clone()));
        }
    }

    fn make_ready(&mut self, key: ObjectKey) {
        self.stop_timer(&key);
        let lane = self.lanes.entry(key.namespace.clone()).or_default();
        if lane.ready.is_empty() {
            self.turns.push_back(key.namespace.clone());
        }
        lane.ready.push_back(key.clone());
        self.phases.insert(key, Phase::Ready);
    }

    fn wait(&mut self, key: ObjectKey, when: Instant) {
        self.place += 1;
        self.timers.insert((when, self.place, key.clone()));
        self.phases.insert(key, Phase::Waiting(when, self.place));
    }

    /// Makes the objects ready whose time is over.
    fn advance(&mut self, now: Instant) {
        while self.timers.first().is_some_and(|(when, ..)| *when <= now) {
            if let Some((_, _, key)) = self.timers.pop_first() {
                self.make_ready(key);
            }
        }
    }

    /// The next object of the namespace whose turn it is.
    fn take(&mut self, limit: usize) -> Option<ObjectKey> {
        if self.running >= MAX_RUNNING {
            return None;
        }
        for _ in 0..self.turns.len() {
            let namespace = self.turns.pop_front()?;
            let lane = self.lanes.get_mut(&namespace)?;
            if lane.running >= limit {
                self.turns.push_back(namespace);
                continue;
            }
            let key = lane.ready.pop_front()?;
            lane.running += 1;
            if !lane.ready.is_empty() {
                self.turns.push_back(namespace);
            }
            self.running += 1;
            self.phases.insert(key.clone(), Phase::Running { changed: false });
            return Some(key);
        }
        None
    }
}

/// The queue.
#[derive(Debug)]
pub struct FairQueue {
    state: Mutex<State>,
    changed: Notify,
    /// Maximum objects of one namespace at work.
    limit: usize,
}

impl FairQueue {
    /// An empty queue.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { state: Mutex::default(), changed: Notify::new(), limit }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Objects that wait for their turn, and those at work.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        let state = self.state();
        let ready = state.turns.iter().filter_map(|namespace| state.lanes.get(namespace));
        (ready.map(|lane| lane.ready.len()).sum(), state.running)
    }

    /// An object has changed.
    pub fn add(&self, key: ObjectKey) {
        let mut state = self.state();
        match state.phases.get_mut(&key) {
            Some(Phase::Ready) => return,
            Some(Phase::Running { changed }) => {
                *changed = true;
                return;
            }
            Some(Phase::Waiting(..)) | None => state.make_ready(key),
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Waits for an object whose turn it is. Only one task may wait.
    pub async fn next(&self) -> ObjectKey {
        loop {
            let timer = {
                let mut state = self.state();
                state.advance(Instant::now());
                if let Some(key) = state.take(self.limit) {
                    return key;
                }
                state.timers.first().map(|(when, ..)| *when)
            };
            let Some(when) = timer else {
                self.changed.notified().await;
                continue;
            };
            tokio::select! {
                () = self.changed.notified() => {}
                () = tokio::time::sleep_until(when) => {}
            }
        }
    }

    /// The work on an object has ended, and begins again after a time. None waits for a change.
    pub fn finish(&self, key: ObjectKey, wait: Option<Duration>) {
        let mut state = self.state();
        let changed = matches!(state.phases.remove(&key), Some(Phase::Running { changed: true }));
        state.running = state.running.saturating_sub(1);
        if let Some(lane) = state.lanes.get_mut(&key.namespace) {
            lane.running = lane.running.saturating_sub(1);
            if lane.running == 0 && lane.ready.is_empty() {
                state.lanes.remove(&key.namespace);
            }
        }
        if changed {
            state.make_ready(key);
        } else if let Some(when) = wait.and_then(|wait| Instant::now().checked_add(wait)) {
            state.wait(key, when);
        }
        drop(state);
        self.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource::SandboxKind;

    fn key(namespace: &str, name: usize) -> ObjectKey {
        ObjectKey::new::<SandboxKind>(namespace, &name.to_string())
    }

    #[tokio::test]
    async fn namespaces_take_turns() {
        let queue = FairQueue::new(MAX_RUNNING_OF_NAMESPACE);
        for name in 0..10_000 {
            queue.add(key("many", name));
        }
        queue.add(key("few", 0));
        queue.add(key("few", 1));
        let mut order = Vec::new();
        for _ in 0..6 {
            let next = queue.next().await;
            order.push(next.namespace.clone());
            queue.finish(next, None);
        }
        assert_eq!(order, ["many", "few", "many", "few", "many", "many"]);
    }

    #[tokio::test]
    async fn slow_objects_of_one_namespace_leave_room_for_those_of_another() {
        let queue = FairQueue::new(2);
        (0..10).for_each(|name| queue.add(key("slow", name)));
        let running = [queue.next().await, queue.next().await];
        assert!(running.iter().all(|key| key.namespace == "slow"));
        queue.add(key("other", 0));
        assert_eq!(queue.next().await, key("other", 0));
        // The limit holds until one has ended.
        let third = queue.next();
        let mut third = std::pin::pin!(third);
        assert!(futures_util::poll!(&mut third).is_pending());
        let [first, _] = running;
        queue.finish(first, None);
        assert_eq!(third.await, key("slow", 2));
    }

    #[tokio::test]
    async fn all_namespaces_together_have_a_limit() {
        let queue = FairQueue::new(MAX_RUNNING_OF_NAMESPACE);
        for namespace in 0..100 {
            queue.add(key(&namespace.to_string(), 0));
        }
        for _ in 0..MAX_RUNNING {
            queue.next().await;
        }
        assert!(futures_util::poll!(std::pin::pin!(queue.next())).is_pending());
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_during_the_work_and_a_time_bring_an_object_back() {
        let queue = FairQueue::new(1);
        queue.add(key("a", 0));
        queue.add(key("a", 0));
        let first = queue.next().await;
        queue.add(first.clone());
        assert!(futures_util::poll!(std::pin::pin!(queue.next())).is_pending(), "once at a time");
        queue.finish(first.clone(), Some(Duration::from_secs(60)));
        assert_eq!(queue.next().await, first, "it changed during its work");
        let begun = Instant::now();
        queue.finish(first.clone(), Some(Duration::from_secs(60)));
        assert_eq!(queue.next().await, first);
        assert_eq!(begun.elapsed().as_secs(), 60);
        queue.finish(first.clone(), Some(Duration::from_secs(60)));
        queue.add(first.clone());
        let begun = Instant::now();
        assert_eq!(queue.next().await, first, "a change ends the wait");
        assert_eq!(begun.elapsed().as_secs(), 0);
        queue.finish(first, None);
        let state = queue.state();
        assert!(state.phases.is_empty() && state.timers.is_empty() && state.lanes.is_empty());
    }
}
