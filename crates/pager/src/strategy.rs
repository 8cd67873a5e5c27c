//! The ways to fill memory, and the choice between them.

use std::str::FromStr;

use crate::PageSource;

/// A way to fill memory from a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Strategy {
    /// Map the source privately and leave it mapped. The rival to beat. Whoever cuts the file short ends
    /// the guest by SIGBUS.
    Mmap,
    /// Map it and fault every page in at once.
    MmapPopulate,
    /// Map it, fault pages in ahead from a second thread, then replace the mapping by owned memory
    /// piece by piece while the guest runs. A file that is cut short or changed before the end closes the
    /// memory.
    MapDetach,
    /// Read everything into 4 KiB pages before the guest starts.
    Read,
    /// Read everything into huge pages before the guest starts.
    ReadHuge,
    /// On demand by UFFDIO_COPY.
    UffdCopy,
    /// On demand: read into staged pages, move them in by UFFDIO_MOVE.
    UffdMove,
    /// On demand by UFFDIO_CONTINUE, from a memfd.
    UffdContinue,
    /// Answer faults while streaming ahead, huge page by huge page; nothing of the source is mapped.
    CopyHybrid,
    /// The working set first, from its compact copy, before the guest starts; the rest as
    /// [`Strategy::CopyHybrid`].
    WorkingSet,
    /// Map an image that this host holds in memory, copy-on-write.
    Held,
}

impl Strategy {
    /// Every strategy.
    pub const ALL: [Strategy; 11] = [
        Strategy::Mmap,
        Strategy::MmapPopulate,
        Strategy::MapDetach,
        Strategy::Read,
        Strategy::ReadHuge,
        Strategy::UffdCopy,
        Strategy::UffdMove,
        Strategy::UffdContinue,
        Strategy::CopyHybrid,
        Strategy::WorkingSet,
        Strategy::Held,
    ];

    /// The name used on command lines and in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Strategy::Mmap => "mmap",
            Strategy::MmapPopulate => "mmap-populate",
            Strategy::MapDetach => "map-detach",
            Strategy::Read => "read",
            Strategy::ReadHuge => "read-huge",
            Strategy::UffdCopy => "uffd-copy",
            Strategy::UffdMove => "uffd-move",
            Strategy::UffdContinue => "uffd-continue",
            Strategy::CopyHybrid => "copy-hybrid",
            Strategy::WorkingSet => "working-set",
            Strategy::Held => "held",
        }
    }

    /// The choice for `source` when nobody forces one: what the host holds is mapped; a recorded
    /// working set is read first; a file that may be mapped is mapped and detached, unless the guest
    /// is known to write most of its memory; anything else is streamed.
    #[must_use]
    pub fn choose(source: &dyn PageSource, mostly_written: bool) -> Strategy {
        if source.held().is_some() {
            Strategy::Held
        } else if !source.working_set().is_empty() {
            Strategy::WorkingSet
        } else if source.pieces().is_some_and(|pieces| pieces.len() <= MAX_PIECES)
            && !mostly_written
        {
            Strategy::MapDetach
        } else {
            Strategy::CopyHybrid
        }
    }
}

/// Most mappings that a restore makes; the kernel allows a process 65,530 by default.
pub(crate) const MAX_PIECES: usize = 4096;

/// A name that is no strategy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown restore strategy `{0}`; known are auto, {known}", known = Strategy::ALL.map(Strategy::name).join(", "))]
pub struct UnknownStrategy(String);

impl FromStr for Strategy {
    type Err = UnknownStrategy;

    fn from_str(name: &str) -> Result<Self, UnknownStrategy> {
        Strategy::ALL
            .into_iter()
            .find(|strategy| strategy.name() == name)
            .ok_or_else(|| UnknownStrategy(name.to_owned()))
    }
}

/// Who answers a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// The faulting thread, in its signal handler. A system call that touches a missing page fails
    /// with `EFAULT`: see `Restore::resolve`.
    Sigbus,
    /// A handler thread. System calls must not touch missing pages here either, for the descriptor
    /// is opened without privilege.
    Thread,
}
