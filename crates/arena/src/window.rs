//! The size of a mapping at a fault: windows that grow while touches run on, and shrink when they
//! jump.
//!
//! Counted in huge pages. A fault where the last window ended doubles the window; any other
//! halves it. After a reset the first window is as large as the run of the previous cycle, so that
//! a workload that repeats itself takes one fault. All state is a few atomics with relaxed order:
//! a race between two faulting threads costs a poorer guess, nothing else.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The state of the guess.
#[derive(Debug)]
pub(crate) struct Window {
    /// Largest window, in huge pages.
    most: usize,
    /// The next window's size.
    size: AtomicUsize,
    /// Where the last window ended.
    end: AtomicUsize,
    /// Huge pages mapped in a row since the last jump.
    run: AtomicUsize,
    /// The longest run of this cycle.
    longest: AtomicUsize,
}

impl Window {
    pub(crate) fn new(most: usize) -> Self {
        Self { most: most.max(1), size: 1.into(), end: 0.into(), run: 0.into(), longest: 0.into() }
    }

    /// The number of huge pages to map for a fault in `hugepage`, at least one.
    pub(crate) fn at(&self, hugepage: usize) -> usize {
        let size = self.size.load(Ordering::Relaxed);
        if hugepage == self.end.load(Ordering::Relaxed) {
            return size;
        }
        let smaller = (size / 2).max(1);
        self.size.store(smaller, Ordering::Relaxed);
        self.run.store(0, Ordering::Relaxed);
        smaller
    }

    /// `len` huge pages from `hugepage` on were mapped.
    pub(crate) fn mapped(&self, hugepage: usize, len: usize) {
        let run = self.run.load(Ordering::Relaxed) + len;
        self.run.store(run, Ordering::Relaxed);
        self.longest.fetch_max(run, Ordering::Relaxed);
        self.end.store(hugepage + len, Ordering::Relaxed);
        let size = self.size.load(Ordering::Relaxed);
        self.size.store((size * 2).min(self.most), Ordering::Relaxed);
    }

    /// A new cycle begins.
    pub(crate) fn reset(&self) {
        let longest = self.longest.swap(0, Ordering::Relaxed);
        self.size.store(longest.clamp(1, self.most), Ordering::Relaxed);
        self.end.store(0, Ordering::Relaxed);
        self.run.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(window: &Window, hugepage: usize) -> usize {
        let size = window.at(hugepage);
        window.mapped(hugepage, size);
        size
    }

    #[test]
    fn sequential_touches_take_few_faults_and_the_next_cycle_takes_one() {
        let window = Window::new(64);
        let mut at = 0;
        let mut faults = 0;
        while at < 63 {
            at += fault(&window, at);
            faults += 1;
        }
        assert_eq!((at, faults), (63, 6));
        window.reset();
        assert_eq!(fault(&window, 0), 63);
    }

    #[test]
    fn jumps_shrink_the_window_to_one_chunk() {
        let window = Window::new(64);
        for at in [0, 1, 3, 7] {
            fault(&window, at);
        }
        let sizes: Vec<_> = [40, 20, 33, 2, 50].map(|hugepage| fault(&window, hugepage)).into();
        assert!(sizes.iter().all(|size| *size <= 8), "{sizes:?}");
        assert_eq!(window.at(9), 1.max(sizes[4]));
    }
}
