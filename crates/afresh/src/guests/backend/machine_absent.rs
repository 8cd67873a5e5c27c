//! No micro-VMs: this build lacks the feature `vm`.

use super::absent::Absent;
use super::{OpenFile, Thaw};

pub(super) const SNAPSHOT_KIND: &str = "vm";
pub(super) const OPEN: Option<OpenFile> = None;
pub(super) const THAW: Option<Thaw> = None;

pub(crate) type Machines = Absent;
pub(crate) type MachineLease<'a> = Absent;
pub(crate) type MachineOptions = ();
