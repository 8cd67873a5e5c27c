//! One userfaultfd for all slots of a process.

use std::sync::{Mutex, PoisonError};

use afresh_sys::{SysError, Uffd, UffdMode, fork};

type Opened = Option<(u32, Result<&'static Uffd, SysError>)>;

/// A descriptor that is opened when it is first needed and lives as long as the process. It stays bound
/// to the memory of the process that opened it, so the child of a fork gets one of its own.
pub(super) struct Descriptor {
    mode: UffdMode,
    opened: Mutex<Opened>,
}

impl Descriptor {
    pub(super) const fn new(mode: UffdMode) -> Self {
        Self { mode, opened: Mutex::new(None) }
    }

    pub(super) fn get(&self) -> Result<&'static Uffd, SysError> {
        let generation = fork::generation();
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        match *opened {
            Some((of, result)) if of == generation => result,
            _ => {
                let result = Uffd::open(self.mode).map(|uffd| &*Box::leak(Box::new(uffd)));
                *opened = Some((generation, result));
                result
            }
        }
    }
}
