//! Work of a request that runs on another thread, or to its end.

use tracing::Instrument;

use crate::error_response::ErrorResponse;
use crate::failure::internal;

/// Runs blocking work on a thread for such.
pub(crate) async fn blocking<R: Send + 'static>(
    work: impl FnOnce() -> Result<R, ErrorResponse> + Send + 'static,
) -> Result<R, ErrorResponse> {
    let span = tracing::Span::current();
    match tokio::task::spawn_blocking(move || span.in_scope(work)).await {
        Ok(result) => result,
        Err(error) => {
            tracing::error!(%error, "a call of a sandbox panicked");
            Err(ErrorResponse::host())
        }
    }
}

/// Runs work that must not be cut off. It continues when its client disconnects; its waits must
/// end.
pub(crate) async fn to_its_end<R: Send + 'static>(
    work: impl Future<Output = Result<R, ErrorResponse>> + Send + 'static,
) -> Result<R, ErrorResponse> {
    match tokio::spawn(work.in_current_span()).await {
        Ok(result) => result,
        Err(error) => Err(internal(&error)),
    }
}
