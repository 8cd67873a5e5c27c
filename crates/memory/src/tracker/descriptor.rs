//! One userfaultfd for all slots of a process.

use afresh_sys::{PerProcess, SysError, Uffd, UffdMode};

/// A descriptor that is opened when it is first needed and lives as long as the process. It stays bound
/// to the memory of the process that opened it, so the child of a fork gets one of its own.
pub(crate) struct Descriptor {
    opened: PerProcess<Result<Uffd, SysError>>,
}

/// The one whose faults are answered by SIGBUS.
pub(crate) static SIGBUS: Descriptor = Descriptor::new(|| Uffd::open(UffdMode::Sigbus));

impl Descriptor {
    pub(crate) const fn new(open: fn() -> Result<Uffd, SysError>) -> Self {
        Self { opened: PerProcess::new(open) }
    }

    pub(crate) fn get(&'static self) -> Result<&'static Uffd, SysError> {
        self.opened.get().as_ref().map_err(|error| *error)
    }
}
