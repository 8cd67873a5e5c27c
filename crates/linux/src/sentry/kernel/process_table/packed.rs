//! The process table in a snapshot.
//!
//! All but the identity of the current process has its own place in
//! [`PackedKernel`](crate::sentry::PackedKernel), as in the first snapshots.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ExitedProcess, ProcessTable};
use crate::sentry::kernel::process::Process;
use crate::sentry::kernel::process_info::ProcessInfo;
use crate::sentry::mm::layout::Layout;

/// A [`ProcessTable`] with only the identity of its current process.
#[derive(Serialize, Deserialize)]
pub(crate) struct PackedProcessTable {
    current: ProcessInfo,
    others: BTreeMap<u32, Process>,
    layouts: BTreeMap<u32, Layout>,
    ended: BTreeMap<u32, ExitedProcess>,
    timed: bool,
}

impl PackedProcessTable {
    /// The current process of a table, and the packed table.
    pub(in crate::sentry) fn split(table: ProcessTable) -> (Process, Self) {
        let ProcessTable { current, others, layouts, ended, timed } = table;
        let info = current.info.clone();
        (current, Self { current: info, others, layouts, ended, timed })
    }

    /// The table, with the current process that has this identity.
    pub(in crate::sentry) fn joined(
        self,
        current: impl FnOnce(ProcessInfo) -> Process,
    ) -> ProcessTable {
        let Self { current: info, others, layouts, ended, timed } = self;
        ProcessTable { current: current(info), others, layouts, ended, timed }
    }
}
