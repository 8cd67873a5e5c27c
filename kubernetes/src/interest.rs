//! Objects that wait for others: claims for their template and pool, and pools for their template.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::queue::ObjectKey;

#[derive(Debug, Default)]
struct State {
    waiting: HashMap<ObjectKey, BTreeSet<ObjectKey>>,
    wanted: HashMap<ObjectKey, Vec<ObjectKey>>,
}

/// Objects that wait, with the objects that they wait for.
#[derive(Debug, Default)]
pub struct InterestTable(Mutex<State>);

impl InterestTable {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces what an object waits for. It must be set before those objects are read, so that no
    /// change between is lost.
    pub fn set(&self, waiting: &ObjectKey, wanted: Vec<ObjectKey>) {
        let mut state = self.state();
        for before in state.wanted.remove(waiting).unwrap_or_default() {
            if let Some(others) = state.waiting.get_mut(&before) {
                others.remove(waiting);
                if others.is_empty() {
                    state.waiting.remove(&before);
                }
            }
        }
        for key in &wanted {
            state.waiting.entry(key.clone()).or_default().insert(waiting.clone());
        }
        if !wanted.is_empty() {
            state.wanted.insert(waiting.clone(), wanted);
        }
    }

    /// The objects that wait for one.
    #[must_use]
    pub fn of(&self, wanted: &ObjectKey) -> Vec<ObjectKey> {
        self.state().waiting.get(wanted).into_iter().flatten().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource::{ClaimKind, TemplateKind};

    #[test]
    fn an_interest_replaces_the_one_before_and_leaves_nothing() {
        let table = InterestTable::default();
        let claim = ObjectKey::new::<ClaimKind>("a", "claim");
        let [one, two] = ["one", "two"].map(|name| ObjectKey::new::<TemplateKind>("a", name));
        table.set(&claim, vec![one.clone()]);
        assert_eq!(table.of(&one), std::slice::from_ref(&claim));
        table.set(&claim, vec![two.clone()]);
        assert!(table.of(&one).is_empty());
        assert_eq!(table.of(&two), std::slice::from_ref(&claim));
        table.set(&claim, Vec::new());
        let state = table.state();
        assert!(state.waiting.is_empty() && state.wanted.is_empty());
    }
}
