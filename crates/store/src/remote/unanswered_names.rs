//! Names of sessions that may have changed, because the answer to the change was lost.
//!
//! Promises: a writer replaces the session that its own unanswered change began, if no other writer
//! has saved a turn there.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::RemoteError;
use crate::local::naming::ExpectedName;
use crate::turn::JOURNAL_HEADER;
use crate::{SaveError, Sha256};

/// Names that are remembered. Of more, a change has to be repeated over any target.
const MAX_UNANSWERED: usize = 1024;

/// Changes of one name that are remembered, of those without an answer in sequence.
const MAX_CHANGES: usize = 8;

/// By name, the manifests of the last unanswered changes.
#[derive(Default)]
pub(super) struct UnansweredNames(Mutex<HashMap<String, Vec<Sha256>>>);

impl UnansweredNames {
    /// Changes the target of `name` to the session of the manifest `id`. `publish` does so for an
    /// expected target.
    pub(super) fn publish(
        &self,
        name: &str,
        id: Sha256,
        expected: ExpectedName,
        publish: impl Fn(ExpectedName) -> Result<(), RemoteError>,
    ) -> Result<(), RemoteError> {
        let is_moved = |result: &Result<(), RemoteError>| {
            matches!(result, Err(RemoteError::Save(SaveError::Moved(_))))
        };
        let before = self.names().get(name).cloned().unwrap_or_default();
        let mut result = publish(expected);
        for manifest in before.iter().rev() {
            if !is_moved(&result) {
                break;
            }
            // Its journal is known here alone, unless another writer has opened the session.
            result = publish(ExpectedName::Session(*manifest, JOURNAL_HEADER as u64));
        }
        let mut names = self.names();
        if result.is_ok() || is_moved(&result) {
            names.remove(name);
        } else if names.len() < MAX_UNANSWERED || names.contains_key(name) {
            let changes = names.entry(name.to_owned()).or_default();
            if changes.len() == MAX_CHANGES {
                changes.remove(0);
            }
            changes.push(id);
        }
        result
    }

    fn names(&self) -> MutexGuard<'_, HashMap<String, Vec<Sha256>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
