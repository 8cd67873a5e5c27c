//! One userfaultfd for all slots of a process.

use std::sync::OnceLock;

use afresh_sys::{PerProcess, SysError, Uffd, UffdMode};

/// A descriptor that is opened on first use and never closed. It stays bound to the memory of the
/// process that opened it, so the child of a fork opens another. A failure may be a shortage that
/// passes, so the next user tries again.
pub(crate) struct Descriptor {
    opened: PerProcess<OnceLock<Uffd>>,
    mode: UffdMode,
}

/// The one whose faults are answered by SIGBUS.
pub(crate) static SIGBUS: Descriptor = Descriptor::new(UffdMode::Sigbus);

impl Descriptor {
    pub(crate) const fn new(mode: UffdMode) -> Self {
        Self { opened: PerProcess::new(OnceLock::new), mode }
    }

    pub(crate) fn get(&'static self) -> Result<&'static Uffd, SysError> {
        let opened = self.opened.get();
        match opened.get() {
            Some(uffd) => Ok(uffd),
            None => {
                let new = Uffd::open(self.mode)?;
                Ok(opened.get_or_init(|| new))
            }
        }
    }
}
