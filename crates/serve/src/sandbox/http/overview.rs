//! The sandboxes on the status page and in the metrics.
//!
//! Promises: they wait for no running call, and show no token or other way to reach a sandbox.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use afresh::Session;
use hyper::StatusCode;

use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::http::session_error::refused;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::{Residency, Sandbox};
use crate::sandbox::lifecycle::tasks::blocking;

/// Maximum sandboxes shown, and maximum states of one.
const MAX_SHOWN: usize = 50;

/// The part of an id that is shown, which reaches no sandbox. It is the end, since ids of a fleet
/// begin with their tenant.
fn short_id(id: &str) -> &str {
    id.get(id.len().saturating_sub(6)..).unwrap_or_default()
}

/// Maximum runs of pages on a page map.
const MAX_RUNS: usize = 2000;

/// In which pages a session differs from its template, as of its last checkpoint.
fn changed(session: &Session) -> Result<Value, ErrorResponse> {
    let states = session.tree();
    let of = |id| states.iter().find(|state| state.id == id);
    let (Some(root), Some(at)) = (states.first(), of(session.at())) else {
        return Err(ErrorResponse::new(
            StatusCode::CONFLICT,
            "the state of its template was dropped",
        ));
    };
    let found = session.diff(root.id, at.id).map_err(|error| refused(&error))?;
    // Memories follow each other on the map.
    let memories = root.pages.len().max(at.pages.len());
    let mut begins = Vec::with_capacity(memories);
    let mut pages = 0;
    for memory in 0..memories {
        begins.push(pages);
        pages += root.pages.get(memory).max(at.pages.get(memory)).copied().unwrap_or(0);
    }
    let runs = found
        .ranges
        .iter()
        .take(MAX_RUNS)
        .map(|(memory, range)| json!([begins[*memory] + range.start, range.len]));
    Ok(json!({
        "pages": pages,
        "storedPages": at.stored_pages,
        "changedPages": found.pages,
        "changedBytes": found.bytes,
        "runs": runs.collect::<Vec<_>>(),
        "whole": found.ranges.len() <= MAX_RUNS,
    }))
}

/// Bytes that a probe of the directory writes.
const PROBE_BYTES: usize = 4096;

impl Sandboxes {
    /// Whether files can be written to the directory. Blocks.
    pub(crate) fn probe_directory(&self) -> std::io::Result<()> {
        let file = self.config.dir.join("probe");
        let written = std::fs::write(&file, [0; PROBE_BYTES]);
        let removed = std::fs::remove_file(&file);
        written.and(removed)
    }

    /// The number of live sandboxes, and of saved ones.
    pub(crate) fn count(&self) -> (usize, usize) {
        let all: Vec<_> = lock(&self.all).values().cloned().collect();
        let saved = |sandbox: &&Arc<Sandbox>| {
            sandbox.life.try_lock().is_ok_and(|life| matches!(*life, Residency::Saved))
        };
        let saved = all.iter().filter(saved).count();
        (all.len() - saved, saved)
    }

    /// Data of the status page: counts, and for an operator the states of some sandboxes.
    pub(crate) fn overview(&self, operator: bool) -> Value {
        let (live, saved) = self.count();
        if !operator {
            return json!({"live": live, "saved": saved, "some": []});
        }
        let mut all: Vec<_> = lock(&self.all).values().cloned().collect();
        all.sort_by_key(|sandbox| std::cmp::Reverse(sandbox.lifetime().used));
        let some = all.iter().take(MAX_SHOWN).map(|sandbox| {
            let paused = sandbox.lifetime().paused;
            // One that is being called is not waited for.
            let (at, states) = match sandbox.life.try_lock().as_deref() {
                Ok(Residency::Live(session)) => {
                    let states = session.tree();
                    let states = states.iter().rev().take(MAX_SHOWN).rev().map(|state| {
                        json!({
                            "id": state.id.to_string(),
                            "parent": state.parent.map(|parent| parent.to_string()),
                            "name": state.name,
                        })
                    });
                    (Some(session.at().to_string()), states.collect())
                }
                _ => (None, Vec::new()),
            };
            json!({
                "id": short_id(&sandbox.id),
                "template": sandbox.template,
                "state": if paused { "paused" } else { "running" },
                "runs": sandbox.runs.load(Ordering::Relaxed),
                "at": at,
                "states": states,
            })
        });
        json!({"live": live, "saved": saved, "some": some.collect::<Vec<_>>()})
    }

    /// In which pages a sandbox differs from its template. It is named as the status page shows it.
    pub(crate) async fn page_map(&self, id: &str) -> Result<Value, ErrorResponse> {
        let not_there = |why: &str| ErrorResponse::new(StatusCode::NOT_FOUND, why);
        let named = |sandbox: &&Arc<Sandbox>| short_id(&sandbox.id) == id;
        let sandbox = lock(&self.all).values().find(named).cloned();
        let sandbox = sandbox.ok_or_else(|| not_there("no such sandbox is on this host"))?;
        // One that is being called is not waited for, and one in the store is not fetched.
        let life = sandbox.life.clone().try_lock_owned();
        let life = life.map_err(|_| not_there("the sandbox is being called"))?;
        blocking(move || match &*life {
            Residency::Live(session) => changed(session),
            _ => Err(ErrorResponse::new(
                StatusCode::NOT_FOUND,
                "the sandbox is not in memory; connect to it first",
            )),
        })
        .await
    }
}
