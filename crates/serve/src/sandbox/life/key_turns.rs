//! The order of requests that make a sandbox with the same key on this server.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::OwnedMutexGuard;

use crate::lock::lock;

type Turn = Arc<tokio::sync::Mutex<()>>;

/// The keys that requests have now.
#[derive(Default)]
pub(crate) struct KeyTurns(Mutex<HashMap<String, Turn>>);

/// The turn of one request with a key, or its place in the queue.
pub(crate) struct KeyTurn {
    turns: Arc<KeyTurns>,
    digest: String,
    guard: Option<OwnedMutexGuard<()>>,
}

impl KeyTurns {
    /// Waits until no other request has this key.
    pub(crate) async fn wait(self: &Arc<Self>, digest: &str) -> KeyTurn {
        let turn = lock(&self.0).entry(digest.to_owned()).or_default().clone();
        let mut place = KeyTurn { turns: self.clone(), digest: digest.to_owned(), guard: None };
        // A request that leaves meanwhile drops this wait before its place.
        place.guard = Some(turn.lock_owned().await);
        place
    }
}

impl Drop for KeyTurn {
    fn drop(&mut self) {
        let mut turns = lock(&self.turns.0);
        self.guard = None;
        // Others hold it while they wait. They took it under this lock.
        if turns.get(&self.digest).is_some_and(|turn| Arc::strong_count(turn) == 1) {
            turns.remove(&self.digest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requests_of_one_key_take_turns_and_leave_nothing() {
        let turns = Arc::new(KeyTurns::default());
        let first = turns.wait("a").await;
        let other = turns.wait("b").await;
        let second = tokio::spawn({
            let turns = turns.clone();
            async move { turns.wait("a").await }
        });
        let mut third = Box::pin(turns.wait("a"));
        assert!(futures_util::poll!(&mut third).is_pending());
        drop(third);
        assert_eq!(lock(&turns.0).len(), 2);
        drop(first);
        drop(second.await.unwrap());
        drop(other);
        assert!(lock(&turns.0).is_empty());
    }
}
