//! Limits of names.

/// Longest name of a file.
pub(in crate::sentry) const NAME: usize = 255;
/// Longest path, with its end.
pub(in crate::sentry) const PATH_LEN: usize = 4096;
