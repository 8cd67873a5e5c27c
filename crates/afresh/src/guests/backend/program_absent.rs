//! No Linux programs: this build lacks the feature `linux`.

use super::absent::Absent;
use super::{OpenFile, Thaw};
use crate::Cause;
use crate::guests::call::Exit;

pub(super) const SNAPSHOT_KIND: &str = "linux";
pub(super) const OPEN: Option<OpenFile> = None;
pub(super) const THAW: Option<Thaw> = None;

pub(crate) type Programs = Absent;
pub(crate) type ProgramLease<'a> = Absent;
pub(crate) type ProgramOptions = ();

/// The exit of a guest, if that is the cause of an error.
pub(super) fn exit(_: &Cause) -> Option<Exit<'_>> {
    None
}

pub(super) mod oci_image {
    use crate::guests::backend::Backend;
    use crate::{OpenError, Options, Reference};

    /// Fails with the error of the reference, which names no snapshot.
    pub(crate) fn open(_: &Reference, _: &Options, error: OpenError) -> Result<Backend, OpenError> {
        Err(error)
    }
}
