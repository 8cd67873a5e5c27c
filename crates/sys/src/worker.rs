//! A thread that belongs to a value and ends with it.
//!
//! In the child of a fork this thread is missing, while its owner exists. Joining it would wait
//! without end, or return its stack to the C library twice, which reclaimed it at the fork. So a
//! worker knows the process it runs in, and in any other nothing is done.

use std::io;
use std::thread::{Builder, JoinHandle};

use crate::fork;

/// Owner's end of a thread. Dropping it detaches the thread.
#[derive(Debug)]
pub struct Worker {
    handle: Option<JoinHandle<()>>,
    generation: u32,
}

impl Worker {
    /// Starts a thread.
    ///
    /// # Errors
    /// When the system has no thread to spare.
    pub fn start(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let handle = Builder::new().name(name.to_owned()).spawn(work)?;
        Ok(Self { handle: Some(handle), generation: fork::generation() })
    }

    /// Whether the thread is one of this process.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.generation == fork::generation()
    }

    /// Wakes the thread if it is parked.
    pub fn unpark(&self) {
        if let Some(handle) = self.handle.as_ref().filter(|_| self.is_here()) {
            handle.thread().unpark();
        }
    }

    /// Waits until the thread has ended, and ignores its panics. Returns at once in a child of the
    /// process that started it.
    pub fn join(mut self) {
        if self.is_here()
            && let Some(handle) = self.handle.take()
        {
            let _ = handle.join();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if !self.is_here() {
            // Its destructor would detach a thread that does not exist.
            std::mem::forget(self.handle.take());
        }
    }
}
