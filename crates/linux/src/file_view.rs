//! A view of the files of a running program, for another thread.
//!
//! Promises: a reader gets the files at a moment after its request, or nothing within its time
//! limit. Without a request a program checks one flag each 100 ms. May break it: nothing outside.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use afresh_files::Tree;

/// A view of the files of a running program, for
/// [`Instance::show_files`](crate::Instance::show_files). Clones share it.
#[derive(Clone, Debug, Default)]
pub struct FileView(Arc<SharedTree>);

#[derive(Debug, Default)]
struct SharedTree {
    wanted: AtomicBool,
    shown: Mutex<ViewState>,
    offered: Condvar,
}

#[derive(Debug, Default)]
struct ViewState {
    /// Number of times that files were shown.
    round: u64,
    /// Questions that wait for the next round. The last one takes the files.
    waiting: usize,
    tree: Option<Tree>,
}

impl FileView {
    /// The files of the program; `None` if it does not run, or does not show its files within
    /// `patience`.
    #[must_use]
    pub fn look(&self, patience: Duration) -> Option<Tree> {
        let mut shown = self.0.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let before = shown.round;
        shown.waiting += 1;
        self.0.wanted.store(true, Ordering::Release);
        let same = |shown: &mut ViewState| shown.round == before;
        let waited = self.0.offered.wait_timeout_while(shown, patience, same);
        let (mut shown, _) = waited.unwrap_or_else(PoisonError::into_inner);
        shown.waiting -= 1;
        let found = shown.tree.clone().filter(|_| shown.round != before);
        if shown.waiting == 0 {
            shown.tree = None;
            self.0.wanted.store(false, Ordering::Release);
        }
        found
    }

    /// Whether a reader waits for the files.
    pub(crate) fn is_wanted(&self) -> bool {
        self.0.wanted.load(Ordering::Acquire)
    }

    /// Shows the files, if they are wanted.
    pub(crate) fn offer(&self, tree: &Tree) {
        if self.0.wanted.swap(false, Ordering::AcqRel) {
            let mut shown = self.0.shown.lock().unwrap_or_else(PoisonError::into_inner);
            shown.round += 1;
            shown.tree = Some(tree.clone()).filter(|_| shown.waiting > 0);
            self.0.offered.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use afresh_files::{Budget, Time};

    use super::*;

    #[test]
    fn files_are_shown_to_waiting_readers_and_not_kept() {
        let view = FileView::default();
        let mut tree = Tree::new(Budget::default());
        tree.write_path("/a", b"1", Time::default()).unwrap();
        assert!(!view.is_wanted());
        view.offer(&tree);
        assert!(view.look(Duration::ZERO).is_none());
        assert!(!view.is_wanted(), "a reader that has left wants nothing");
        let asked = [(); 2].map(|()| {
            let asking = view.clone();
            std::thread::spawn(move || asking.look(Duration::from_secs(600)))
        });
        while !asked.iter().all(std::thread::JoinHandle::is_finished) {
            view.offer(&tree);
            std::thread::yield_now();
        }
        for one in asked {
            let found = one.join().unwrap().unwrap();
            assert_eq!(found.read_path("/a", 9).unwrap(), b"1");
        }
        assert!(view.0.shown.lock().unwrap().tree.is_none());
    }
}
