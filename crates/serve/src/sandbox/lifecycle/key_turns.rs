//! The order of requests that make a sandbox with the same key on this server.
//!
//! Promises: requests with one key take turns. A tenant has at most [`MAX_KEYED_CREATIONS`]
//! requests with keys at a time, those whose clients have left included.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::OwnedMutexGuard;

use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::tenants::accounts::Account;

/// Maximum requests of a tenant that have keys and make sandboxes at the same time.
const MAX_KEYED_CREATIONS: usize = 1000;

type Turn = Arc<tokio::sync::Mutex<()>>;

/// The keys that requests have now.
#[derive(Default)]
pub(crate) struct KeyTurns(Mutex<PresentKeys>);

#[derive(Default)]
struct PresentKeys {
    turns: HashMap<String, Turn>,
    /// Requests of each tenant.
    requests: HashMap<Arc<str>, usize>,
}

/// The turn of one request with a key, or its place in the queue.
pub(crate) struct KeyTurn {
    turns: Arc<KeyTurns>,
    tenant: Arc<str>,
    digest: String,
    guard: Option<OwnedMutexGuard<()>>,
}

impl KeyTurns {
    /// A place for a request with a key of a tenant, in the queue of that key.
    fn enter(
        self: &Arc<Self>,
        (tenant, account): (&Arc<str>, &Account),
        digest: &str,
    ) -> Result<(KeyTurn, Turn), ErrorResponse> {
        let mut present = lock(&self.0);
        let used = present.requests.get(tenant).copied().unwrap_or(0);
        let limit = Some(MAX_KEYED_CREATIONS as u64);
        let advice = "make fewer sandboxes with an `Idempotency-Key` at a time";
        account.admit("keyed-creations", limit, (used as u64, 1), advice)?;
        present.requests.insert(tenant.clone(), used + 1);
        let turn = present.turns.entry(digest.to_owned()).or_default().clone();
        let (tenant, digest) = (tenant.clone(), digest.to_owned());
        Ok((KeyTurn { turns: self.clone(), tenant, digest, guard: None }, turn))
    }

    /// Waits until no other request has this key.
    pub(crate) async fn wait(
        self: &Arc<Self>,
        of: (&Arc<str>, &Account),
        digest: &str,
    ) -> Result<KeyTurn, ErrorResponse> {
        let (mut place, turn) = self.enter(of, digest)?;
        // A request that leaves meanwhile drops this wait before its place.
        place.guard = Some(turn.lock_owned().await);
        Ok(place)
    }
}

impl Drop for KeyTurn {
    fn drop(&mut self) {
        let mut present = lock(&self.turns.0);
        self.guard = None;
        // Others hold it while they wait. They took it under this lock.
        if present.turns.get(&self.digest).is_some_and(|turn| Arc::strong_count(turn) == 1) {
            present.turns.remove(&self.digest);
        }
        match present.requests.get_mut(&self.tenant) {
            Some(requests) if *requests > 1 => *requests -= 1,
            _ => drop(present.requests.remove(&self.tenant)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::tenants::accounts::Accounts;
    use crate::sandbox::tenants::budgets::Budgets;

    fn accounts() -> Accounts {
        Accounts::open(tempfile::tempdir().unwrap().path(), Budgets::default()).unwrap()
    }

    #[tokio::test]
    async fn requests_of_one_key_take_turns_and_leave_nothing() {
        let tenant: Arc<str> = "acme".into();
        let account = accounts().of(&tenant);
        let of = (&tenant, &*account);
        let turns = Arc::new(KeyTurns::default());
        let first = turns.wait(of, "a").await.unwrap();
        let other = turns.wait(of, "b").await.unwrap();
        let second = tokio::spawn({
            let (turns, tenant, account) = (turns.clone(), tenant.clone(), account.clone());
            async move { turns.wait((&tenant, &account), "a").await.ok() }
        });
        let mut third = Box::pin(turns.wait(of, "a"));
        assert!(futures_util::poll!(&mut third).is_pending());
        drop(third);
        assert_eq!(lock(&turns.0).turns.len(), 2);
        drop(first);
        drop(second.await.unwrap());
        drop(other);
        let left = lock(&turns.0);
        assert!(left.turns.is_empty() && left.requests.is_empty());
    }

    #[tokio::test]
    async fn requests_of_one_tenant_with_keys_are_limited() {
        let accounts = accounts();
        let [one, two]: [Arc<str>; 2] = ["one".into(), "two".into()];
        let (own, other) = (accounts.of(&one), accounts.of(&two));
        let turns = Arc::new(KeyTurns::default());
        let mut held = Vec::new();
        for number in 0..MAX_KEYED_CREATIONS {
            held.push(turns.wait((&one, &own), &number.to_string()).await.unwrap());
        }
        let refused =
            turns.wait((&one, &own), "more").await.err().expect("it has as many as it may");
        let excess = refused.budget.expect("it names the budget");
        assert_eq!((excess.name, excess.used), ("keyed-creations", MAX_KEYED_CREATIONS as u64));
        assert!(turns.wait((&two, &other), "more").await.is_ok());
        held.pop();
        assert!(turns.wait((&one, &own), "more").await.is_ok());
        drop(held);
        assert!(lock(&turns.0).turns.is_empty());
    }
}
