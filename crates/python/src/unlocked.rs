//! A value that is dropped without Python's lock.
//!
//! Python drops objects with its lock held. A guest has memory to unmap and processes to end, for
//! which other threads of Python would wait.

use std::ops::Deref;

use pyo3::prelude::*;

use crate::exit;

/// Dropped without Python's lock, except at the end of the interpreter.
pub(crate) struct Unlocked<T: Send>(Option<T>);

impl<T: Send> Unlocked<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: Send> Deref for Unlocked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("only a drop takes the value")
    }
}

impl<T: Send> Drop for Unlocked<T> {
    fn drop(&mut self) {
        let value = self.0.take();
        Python::attach(|py| {
            let _refused = exit::detach(py, || {
                drop(value);
                Ok(())
            });
        });
    }
}
