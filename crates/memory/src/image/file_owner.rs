//! The owner of a file whose parts are images.

use std::fmt;

use afresh_sys::{Memfd, PageRange};

/// The owner of a file whose parts are borrowed.
pub trait FileOwner: fmt::Debug + Send + Sync {
    /// The file.
    fn file(&self) -> &Memfd;

    /// The part: always the same.
    fn part(&self) -> PageRange;
}
