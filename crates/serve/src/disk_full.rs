//! Errors whose cause is a full disk.

/// Whether the cause of an error is a full disk.
pub(crate) fn is_disk_full(error: &(dyn std::error::Error + 'static)) -> bool {
    use std::io::{Error, ErrorKind};
    std::iter::successors(Some(error), |error| (*error).source()).any(|cause| {
        let Some(cause) = cause.downcast_ref::<Error>() else { return false };
        // The source of such an error is not the error within it.
        let within = cause.get_ref();
        matches!(cause.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
            || within.is_some_and(|within| is_disk_full(within))
    })
}
