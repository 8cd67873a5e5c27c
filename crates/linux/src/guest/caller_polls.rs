//! Polls of the caller during a call: whether it continues, and what of its files is shown.

use std::time::{Duration, Instant};

use super::Guest;

impl Guest {
    /// Whether the caller lets the call continue, polled at each interval.
    pub(crate) fn proceeds(&mut self) -> bool {
        if self.asked.elapsed() < self.poll {
            return true;
        }
        // The caller may decide by the CPU time of the call.
        self.body.process.bill();
        let proceeds = self.sentry.streams.proceeds();
        let view = self.sentry.streams.view.as_ref();
        if let Some(view) = view.filter(|view| view.is_wanted()).cloned() {
            // It compares shared memory with its files. Without it the files are only older.
            let _ = self.sentry.publish_lasting();
            view.offer(&self.sentry.state.tree);
        }
        self.asked = Instant::now();
        proceeds
    }

    /// The part of a wait of `length` before the caller is polled again.
    pub(super) fn bounded(&self, length: Duration) -> Duration {
        if self.sentry.streams.is_polled() { length.min(self.poll) } else { length }
    }
}
