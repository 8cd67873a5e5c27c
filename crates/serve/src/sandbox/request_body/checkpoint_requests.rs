//! Bodies of requests for checkpoints, which E2B does not have.
//!
//! Promises: as `requests`.

use serde::Deserialize;

/// The name of a new checkpoint.
#[derive(Deserialize)]
pub(crate) struct CheckpointName {
    pub(crate) name: String,
}

/// The checkpoint of a rollback.
#[derive(Deserialize)]
pub(crate) struct RollbackTarget {
    pub(crate) to: String,
}
