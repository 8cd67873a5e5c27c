//! Answers that are longer than their host takes.
//!
//! Promises: the bytes of such an answer in a stream are not kept.

use afresh::CallError;

/// An answer that is longer than [`max_frame`](crate::HostCallbacks::max_frame) of its host. It is
/// not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its answer has {bytes} bytes, and may have {limit}")]
#[non_exhaustive]
pub struct AnswerTooLong {
    /// Bytes that it has.
    pub bytes: usize,
    /// Bytes that it may have.
    pub limit: usize,
}

impl AnswerTooLong {
    /// Separates an answer of more than `limit` bytes from calls that failed. The guest has made
    /// it, so it can be called again.
    ///
    /// # Errors
    /// Any other [`CallError`].
    pub fn separate(
        answer: Result<Vec<u8>, CallError>,
        limit: usize,
    ) -> Result<Result<Vec<u8>, Self>, CallError> {
        match answer {
            Ok(answer) if answer.len() > limit => Ok(Err(Self { bytes: answer.len(), limit })),
            Err(CallError::Guest { function, source }) => match source.downcast::<Self>() {
                Ok(too_long) => Ok(Err(*too_long)),
                Err(source) => Err(CallError::Guest { function, source }),
            },
            answer => answer.map(Ok),
        }
    }
}
