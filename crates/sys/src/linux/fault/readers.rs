//! Counts the users of a value, which must not be freed under a signal handler.
//!
//! A count belongs to a process: a child of a fork inherits the number, but not the threads it
//! counted. So the word also holds the generation it was counted in, and counts of another
//! generation are void.

use super::sync::{AtomicU64, Ordering, constant, wait_for_leavers, wake_waiters};

/// Set permanently once entering is closed.
const CLOSED: u64 = 1 << 31;
const COUNT: u64 = CLOSED - 1;

/// The number of threads of this process that are inside.
#[derive(Debug)]
pub(crate) struct Readers {
    /// Generation, closed, count.
    word: AtomicU64,
}

impl Readers {
    constant! {
        /// Nobody is inside.
        fn new() -> Self {
            Self { word: AtomicU64::new(0) }
        }
    }

    /// Goes in; `false`, and nothing else, where it is closed. Takes no lock and never waits.
    pub(crate) fn enter(&self, generation: u32) -> bool {
        let before = self.word.fetch_add(1, Ordering::AcqRel);
        if before >> 32 != u64::from(generation) {
            return self.enter_first(generation);
        }
        if before & CLOSED != 0 {
            self.leave();
            return false;
        }
        true
    }

    /// As `enter`, when the word was another generation's a moment ago. Counts that are added to
    /// the old generation are lost with it.
    #[cold]
    fn enter_first(&self, generation: u32) -> bool {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            let mine = if word >> 32 == u64::from(generation) {
                word
            } else {
                u64::from(generation) << 32 | word & CLOSED
            };
            if mine & CLOSED != 0 {
                return false;
            }
            match self.word.compare_exchange(word, mine + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
    }

    /// Goes out again. A waiting thread may free this value once the count is down, so it is not
    /// touched afterwards.
    pub(crate) fn leave(&self) {
        let before = self.word.fetch_sub(1, Ordering::AcqRel);
        if before & (CLOSED | COUNT) == CLOSED | 1 {
            wake_waiters();
        }
    }

    /// Whether the count is zero. A thread that enters after a `true` sees everything that was done
    /// before the call.
    pub(crate) fn none(&self, generation: u32) -> bool {
        // An addition of zero, and not a load: in the order of changes to this word it stands
        // either before an `enter`, which then sees the caller's earlier writes; or behind, and
        // counts it.
        let word = self.word.fetch_add(0, Ordering::AcqRel);
        word >> 32 != u64::from(generation) || word & COUNT == 0
    }

    /// Refuses further entries, and waits until the last user has left.
    pub(crate) fn close(&self, generation: u32) {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            let count = if word >> 32 == u64::from(generation) { word & COUNT } else { 0 };
            let closed = u64::from(generation) << 32 | CLOSED | count;
            match self.word.compare_exchange(word, closed, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(now) => word = now,
            }
        }
        wait_for_leavers(|| self.word.load(Ordering::Acquire) & COUNT == 0);
    }
}
