//! The ways to fill memory, and the choice between them.
//!
//! Each wins somewhere (`afresh-bench restore`, docs/restore.md), or works where the others do not.
//! The ways they are measured against live in the benchmark.

use std::str::FromStr;

#[cfg(all(target_os = "linux", not(afresh_portable)))]
use afresh_sys::{Feature, Features};

#[cfg(all(target_os = "linux", not(afresh_portable)))]
use crate::PageSource;

/// A way to fill memory from a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FillStrategy {
    /// Map an image that this host holds in memory, copy-on-write.
    Held,
    /// Map the source, fault pages in ahead from a second thread, then replace the mapping by owned
    /// memory piece by piece while the guest runs. A file that is cut short or changed before the
    /// end closes the memory.
    MapDetach,
    /// Answer faults while streaming ahead, huge page by huge page; nothing of the source is
    /// mapped.
    Stream,
    /// The working set first, from its compact copy, before the guest starts; the rest as
    /// [`FillStrategy::Stream`].
    WorkingSet,
    /// Read everything before the guest starts: for hosts without userfaultfd, and for guests that
    /// may wait for no page.
    Read,
}

impl FillStrategy {
    /// Every strategy.
    pub const ALL: [Self; 5] =
        [Self::Held, Self::MapDetach, Self::Stream, Self::WorkingSet, Self::Read];

    /// The name used on command lines and in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::MapDetach => "map-detach",
            Self::Stream => "stream",
            Self::WorkingSet => "working-set",
            Self::Read => "read",
        }
    }

    /// The choice for `source` on a host with `features`, if none is forced: pages that the host
    /// holds are mapped; a recorded working set is read first; a file that may be mapped is mapped
    /// and detached, unless the guest is known to write most of its memory; anything else is
    /// streamed. Without userfaultfd a file is mapped and detached, and what cannot be mapped is
    /// read.
    #[cfg(all(target_os = "linux", not(afresh_portable)))]
    #[must_use]
    pub fn choose(source: &dyn PageSource, mostly_written: bool, features: &Features) -> Self {
        let mappable = || source.pieces().is_some_and(|pieces| pieces.len() <= MAX_PIECES);
        let lazy = features.has(Feature::UffdSigbus);
        if source.held_memfd().is_some() {
            Self::Held
        } else if lazy && !source.working_set().is_empty() {
            Self::WorkingSet
        } else if !(lazy && mostly_written) && mappable() {
            Self::MapDetach
        } else if lazy {
            Self::Stream
        } else {
            Self::Read
        }
    }
}

#[cfg(all(target_os = "linux", not(afresh_portable)))]
/// Maximum mappings of a restore. The kernel allows a process 65,530 by default.
pub(crate) const MAX_PIECES: usize = 4096;

/// A name that is no strategy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown restore strategy `{0}`; known are {known}", known = FillStrategy::ALL.map(FillStrategy::name).join(", "))]
pub struct UnknownStrategy(String);

impl FromStr for FillStrategy {
    type Err = UnknownStrategy;

    fn from_str(name: &str) -> Result<Self, UnknownStrategy> {
        Self::ALL
            .into_iter()
            .find(|strategy| strategy.name() == name)
            .ok_or_else(|| UnknownStrategy(name.to_owned()))
    }
}

/// The thread that answers a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// The faulting thread, in its signal handler. A system call that touches a missing page fails
    /// with `EFAULT`: see `Restore::resolve`.
    Sigbus,
    /// A handler thread. System calls must not touch missing pages here either, for the descriptor
    /// is opened without privilege.
    Thread,
}
