//! A limit of the time that a wait takes in all.
//!
//! Promises: only waiting counts. A process that is stopped, frozen or not scheduled for a minute
//! has waited for one step, so it finds no deadline expired when it continues.

use std::time::{Duration, Instant};

/// The rest of a time limit. Only waiting counts.
#[derive(Debug)]
pub(crate) struct WaitBudget {
    left: Duration,
}

impl WaitBudget {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { left: limit }
    }

    /// Waits by `wait`, which is given `step` as its time limit, and returns its result; `None`
    /// when the limit is used up. However long the step takes, at most `step` counts.
    pub(crate) fn step<T>(
        &mut self,
        step: Duration,
        wait: impl FnOnce(Duration) -> T,
    ) -> Option<T> {
        if self.left.is_zero() {
            return None;
        }
        let began = Instant::now();
        let result = wait(step);
        self.left = self.left.saturating_sub(began.elapsed().min(step));
        Some(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_takes_longer_counts_once() {
        let step = Duration::from_millis(5);
        let mut budget = WaitBudget::new(3 * step);
        let mut steps = 0;
        while budget.step(step, |_| std::thread::sleep(8 * step)).is_some() {
            steps += 1;
        }
        assert_eq!(steps, 3);
    }
}
