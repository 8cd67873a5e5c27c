//! What the status page and the metrics show of all sandboxes.
//!
//! What it promises: nobody is waited for who is being called, and nothing is shown by which a sandbox could be reached.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use super::one::{Life, MARK, Sandbox};
use super::registry::{Sandboxes, lock};

/// Most sandboxes, and most states of one, that are shown.
const SHOWN: usize = 50;

impl Sandboxes {
    /// How many sandboxes there are: live, and saved.
    pub(crate) fn count(&self) -> (usize, usize) {
        let all: Vec<_> = lock(&self.all).values().cloned().collect();
        let saved = |sandbox: &&Arc<Sandbox>| {
            sandbox.life.try_lock().is_ok_and(|life| matches!(*life, Life::Saved))
        };
        let saved = all.iter().filter(saved).count();
        (all.len() - saved, saved)
    }

    /// What the status page shows of them: all in numbers, and of some the tree they stand in.
    pub(crate) fn overview(&self) -> Value {
        let (live, saved) = self.count();
        let mut all: Vec<_> = lock(&self.all).values().cloned().collect();
        all.sort_by_key(|sandbox| std::cmp::Reverse(sandbox.times().used));
        let some = all.iter().take(SHOWN).map(|sandbox| {
            let paused = sandbox.times().paused;
            // One that is being called is not waited for.
            let (at, states) = match sandbox.life.try_lock().as_deref() {
                Ok(Life::Live(session)) => {
                    let states = session.tree();
                    let states = states.iter().rev().take(SHOWN).rev().map(|state| {
                        json!({
                            "id": state.id.to_string(),
                            "parent": state.parent.map(|parent| parent.to_string()),
                            "name": state.name.as_deref().filter(|name| *name != MARK),
                        })
                    });
                    (Some(session.at().to_string()), states.collect())
                }
                _ => (None, Vec::new()),
            };
            json!({
                "id": &sandbox.id[..6],
                "template": sandbox.template,
                "state": if paused { "paused" } else { "running" },
                "runs": sandbox.runs.load(Ordering::Relaxed),
                "at": at,
                "states": states,
            })
        });
        json!({"live": live, "saved": saved, "some": some.collect::<Vec<_>>()})
    }
}
