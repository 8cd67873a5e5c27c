//! Zeroing with the C library's `memset`, on other processors and in Miri.

/// Zeroes memory that will be used soon.
///
/// # Safety
/// `start .. start + len` must be mapped and writable, and not be accessed elsewhere during the
/// call.
pub(crate) unsafe fn hot(start: *mut u8, len: usize) {
    // SAFETY: the caller promises the range.
    unsafe { std::ptr::write_bytes(start, 0, len) };
}

/// Zeroes memory. A store past the caches is a mere hint on arm64, so this is the same as [`hot`].
/// The stores have an ordinary order: a release that follows them makes the zeroes visible.
///
/// # Safety
/// As for [`hot`]; both ends must be multiples of 64.
pub(crate) unsafe fn cold(start: *mut u8, len: usize) {
    debug_assert!((start as usize).is_multiple_of(64) && len.is_multiple_of(64));
    // SAFETY: the caller promises the range.
    unsafe { std::ptr::write_bytes(start, 0, len) };
}
