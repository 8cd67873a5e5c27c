//! The queue of lines that the writer of the audit log takes.
//!
//! Promises: lines and their bytes are bounded. Only the writer waits.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::lock::lock;

/// Maximum lines that wait.
const MAX_LINES: usize = 65_536;
/// Maximum bytes of the lines that wait.
const MAX_BYTES: usize = 16 << 20;

/// Work for the writer.
pub(super) enum Entry {
    /// A line, and the place of its result. It is left out if no one waits for the result any more.
    Line { text: String, result: Option<oneshot::Sender<bool>> },
    /// Opens the file again.
    Reopen,
    /// Reports that all entries before this one are done.
    Flush(oneshot::Sender<()>),
}

impl Entry {
    fn bytes(&self) -> usize {
        match self {
            Self::Line { text, .. } => text.len(),
            Self::Reopen | Self::Flush(_) => 0,
        }
    }
}

#[derive(Default)]
struct QueueState {
    entries: VecDeque<Entry>,
    bytes: usize,
    /// When the writer took the entry that it works on.
    taken: Option<Instant>,
    is_closed: bool,
}

/// Entries in the order in which they are done.
#[derive(Default)]
pub(super) struct LineQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

impl LineQueue {
    /// Adds a line, or returns false if the queue is full.
    pub(super) fn add_line(&self, text: String, result: Option<oneshot::Sender<bool>>) -> bool {
        let mut state = lock(&self.state);
        let bytes = state.bytes.saturating_add(text.len());
        if state.entries.len() >= MAX_LINES || bytes > MAX_BYTES {
            return false;
        }
        state.bytes = bytes;
        state.entries.push_back(Entry::Line { text, result });
        drop(state);
        self.changed.notify_one();
        true
    }

    /// Has the file opened again before the next line, also if the queue is full.
    pub(super) fn add_reopen(&self) {
        let mut state = lock(&self.state);
        // Two in a row are one, so that the queue stays bounded.
        if !matches!(state.entries.back(), Some(Entry::Reopen)) {
            state.entries.push_back(Entry::Reopen);
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Reports to `done` when all that waits now is done.
    pub(super) fn add_flush(&self, done: oneshot::Sender<()>) {
        lock(&self.state).entries.push_back(Entry::Flush(done));
        self.changed.notify_one();
    }

    /// The writer's next entry. None once the queue is closed and empty.
    pub(super) fn take(&self) -> Option<Entry> {
        let mut state = lock(&self.state);
        state.taken = None;
        loop {
            if let Some(entry) = state.entries.pop_front() {
                state.bytes -= entry.bytes();
                state.taken = Some(Instant::now());
                return Some(entry);
            }
            if state.is_closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether the writer has worked on one entry for longer than `time`.
    pub(super) fn is_stalled(&self, time: Duration) -> bool {
        lock(&self.state).taken.is_some_and(|taken| taken.elapsed() > time)
    }

    /// Lines that wait.
    pub(super) fn lines(&self) -> usize {
        let state = lock(&self.state);
        state.entries.iter().filter(|entry| matches!(entry, Entry::Line { .. })).count()
    }

    /// Ends the writer once it has done all entries.
    pub(super) fn close(&self) {
        lock(&self.state).is_closed = true;
        self.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_their_bytes_are_bounded() {
        let queue = LineQueue::default();
        let half = "x".repeat(MAX_BYTES / 2);
        assert!(queue.add_line(half.clone(), None) && queue.add_line(half, None));
        assert!(!queue.add_line("x".to_owned(), None));
        // The line that the writer has is no part of the queue.
        assert!(matches!(queue.take(), Some(Entry::Line { .. })));
        assert!((1..MAX_LINES).all(|_| queue.add_line("x".to_owned(), None)));
        assert_eq!(queue.lines(), MAX_LINES);
        assert!(!queue.add_line("x".to_owned(), None));
        (0..3).for_each(|_| queue.add_reopen());
        queue.close();
        let left = std::iter::from_fn(|| queue.take()).count();
        assert_eq!(left, MAX_LINES + 1);
        assert_eq!(lock(&queue.state).bytes, 0);
    }
}
