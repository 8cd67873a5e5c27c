//! Entries whose keys are used once, and fences that keep a late one out.
//!
//! Promises: of a fence and an entry of the same key one succeeds: the first that arrives.

use bytes::Bytes;

use super::nats::{self, Bucket, NatsError};

/// The revision that stands for the absence of an entry and of a removal marker.
const NO_MESSAGE: u64 = 0;

/// Makes an entry whose key was never used: not one that [`fence`] has seen, and none that was
/// removed lately.
pub(super) async fn create_unused(
    bucket: &Bucket,
    key: &str,
    value: Bytes,
) -> Result<u64, NatsError> {
    nats::update(bucket, key, value, NO_MESSAGE).await
}

/// Has every [`create_unused`] of a key fail that has not arrived yet, for the lifetime of a
/// removal marker.
///
/// # Errors
/// [`NatsError::Changed`] where the key has an entry or a removal marker.
pub(super) async fn fence(bucket: &Bucket, key: &str) -> Result<(), NatsError> {
    nats::remove(bucket, key, NO_MESSAGE).await
}
