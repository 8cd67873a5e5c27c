//! The process table in a snapshot.
//!
//! All but the identity of the current process has its own place in
//! [`PackedKernel`](crate::sentry::PackedKernel), as in the first snapshots. Argument strings that
//! processes share, because one is a fork of the other, are written once.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::ProcessTable;
use crate::sentry::kernel::exited_process::ExitedProcess;
use crate::sentry::kernel::process::Process;
use crate::sentry::kernel::process_info::{ArgumentStrings, ProcessInfo};
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
        let ProcessTable { current, mut others, layouts, ended, timed, tracing: _ } = table;
        let info = current.info.clone();
        let mut written = vec![(info.id, info.strings.clone())];
        for (&id, process) in &mut others {
            let strings = &mut process.info.strings;
            match written.iter().find(|(_, known)| known.shares_memory_with(strings)) {
                Some((first, _)) => *strings = ArgumentStrings::same_as(*first),
                None => written.push((id, strings.clone())),
            }
        }
        (current, Self { current: info, others, layouts, ended, timed })
    }

    /// The table, with the current process that has this identity.
    pub(in crate::sentry) fn joined(
        self,
        current: impl FnOnce(ProcessInfo) -> Process,
    ) -> ProcessTable {
        let Self { current: info, mut others, layouts, ended, timed } = self;
        let mut read = BTreeMap::from([(info.id, info.strings.clone())]);
        for (&id, process) in &mut others {
            let strings = &mut process.info.strings;
            if let Some(known) = strings.referent().and_then(|id| read.get(&id)) {
                *strings = known.clone();
            }
            read.insert(id, strings.clone());
        }
        let tracing = Default::default();
        ProcessTable { current: current(info), others, layouts, ended, timed, tracing }
    }
}

#[cfg(test)]
mod tests {
    use afresh_budget::{MAX_DECODED, decode};

    use super::*;
    use crate::sentry::kernel::identity::FIRST;
    use crate::sentry::kernel::process_table::PROCESSES;

    #[test]
    fn forks_share_their_argument_strings_in_a_snapshot() {
        let (mut table, len) = (ProcessTable::new(), 2 << 20);
        table.current.info.strings = ArgumentStrings::new(&[vec![b'a'; len]], &[]);
        let own = ArgumentStrings::new(&[b"other".to_vec()], &[]);
        for id in FIRST + 1..FIRST + PROCESSES as u32 - 1 {
            let mut process = table.current.clone();
            process.info.id = id;
            // Two of them run another program.
            if [FIRST + 9, FIRST + 10].contains(&id) {
                process.info.strings = own.clone();
            }
            table.others.insert(id, process);
        }
        let (current, packed) = PackedProcessTable::split(table.clone());
        let bytes = postcard::to_allocvec(&packed).unwrap();
        assert!(bytes.len() < 2 * len, "{} bytes", bytes.len());
        let (read, _) = decode::<PackedProcessTable>(&bytes, MAX_DECODED).unwrap();
        let joined = read.joined(|info| Process { info, ..current });
        assert!(joined == table);
        let all = || joined.iter().map(|process| &process.info.strings);
        assert_eq!(
            all()
                .filter(|strings| strings.shares_memory_with(&joined.current.info.strings))
                .count(),
            joined.others.len() - 1
        );
    }
}
