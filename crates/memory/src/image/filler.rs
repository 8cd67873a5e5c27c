//! The source of a lazily filled image: its interface, and its results.

use afresh_sys::PageRange;

/// Fetches the content of a lazily filled image and puts it in place, through its inserter.
///
/// Pages are counted as in the image. Its answer is not trusted: the inserter knows whether a page
/// is in place.
pub trait Filler: Send + Sync {
    /// Returns once `page` is in place, or `false` once it is certain that it will never be. Called
    /// in a signal handler of the thread that needs it: nothing may be locked that the thread could
    /// hold.
    fn fill_in_handler(&self, page: usize) -> bool;

    /// Returns once all of `pages` is in place, or `false` once it is certain that it will never
    /// be.
    fn fill(&self, pages: PageRange) -> bool;

    /// Why pages will never come, once that is certain.
    fn failure(&self) -> Option<String>;
}

/// The result of a fault on a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultOutcome {
    /// The page is in place: something else caused the fault.
    Present,
    /// It is in place now.
    Filled,
    /// It will never be.
    Closed,
}
