//! The memory of windows for calls inside, which hold contents of files. It counts in the guest's
//! budget for such contents.
//!
//! Promises: windows and files of a guest take no more than the budget together. A window is
//! charged at its largest size, because its memory stays until its process ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of the windows of all processes of a guest.
#[derive(Clone, Debug, Default)]
pub(crate) struct WindowBudget(Arc<AtomicU64>);

impl WindowBudget {
    /// Bytes that are charged.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The charge for the window of a process, which ends with this value.
#[derive(Debug, Default)]
pub(crate) struct WindowCharge {
    budget: WindowBudget,
    bytes: u64,
}

impl WindowCharge {
    /// Charges `budget` for a window of `bytes`. Returns whether `room`, the bytes left in the
    /// budget, was enough.
    pub(crate) fn grow(&mut self, budget: &WindowBudget, bytes: u64, room: u64) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        if more == 0 {
            return true;
        }
        if more > room {
            return false;
        }
        if self.bytes == 0 {
            self.budget = budget.clone();
        }
        self.budget.0.fetch_add(more, Ordering::Relaxed);
        self.bytes = bytes;
        true
    }
}

impl Drop for WindowCharge {
    fn drop(&mut self) {
        self.budget.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_charged_at_their_largest_size_until_they_end() {
        let budget = WindowBudget::default();
        let (mut one, mut two) = (WindowCharge::default(), WindowCharge::default());
        assert!(one.grow(&budget, 8192, 8192) && two.grow(&budget, 4096, 4096));
        assert!(one.grow(&budget, 4096, 0), "it was as large before");
        assert!(!two.grow(&budget, 12288, 8191));
        assert_eq!(budget.bytes(), 12288);
        drop(one);
        assert_eq!(budget.bytes(), 4096);
        drop(two);
        assert_eq!(budget.bytes(), 0);
    }
}
