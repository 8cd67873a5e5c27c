//! How a sandbox is reset: the engine's strategies, over KVM's ways of noticing writes.

use afresh_memory::{Strategy as Engine, TrackerKind};

use crate::machine::{KvmError, Tracking};

/// How a sandbox is brought back to its image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Strategy {
    /// The write set over the best tracker this host has.
    #[default]
    Auto,
    /// Copy all memory back.
    FullCopy,
    /// Throw every private page away and let the next run fault it back in.
    Discard,
    /// The dirty log; every written page is copied back and write-protected again.
    Log,
    /// The dirty ring; every written page is copied back and write-protected again.
    Ring,
    /// The write set, with new pages noticed by the dirty log.
    WriteSetLog,
    /// The write set, with new pages noticed by the dirty ring.
    WriteSetRing,
    /// The write set, with new pages noticed in the host's page tables: asynchronous userfaultfd
    /// write protection and `PAGEMAP_SCAN`. Independent of KVM's dirty tracking.
    WriteSetScan,
    /// The same, with every written page protected again.
    Scan,
    /// Every page counts as written: the fallback where nothing can be noticed.
    Everything,
}

impl Strategy {
    /// Every strategy, for tests and benchmarks.
    pub const ALL: [Self; 10] = [
        Self::Auto,
        Self::FullCopy,
        Self::Discard,
        Self::Log,
        Self::Ring,
        Self::WriteSetLog,
        Self::WriteSetRing,
        Self::WriteSetScan,
        Self::Scan,
        Self::Everything,
    ];

    /// The name used by benchmarks and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::FullCopy => "full-copy",
            Self::Discard => "discard",
            Self::Log => "log",
            Self::Ring => "ring",
            Self::WriteSetLog => "write-set-log",
            Self::WriteSetRing => "write-set-ring",
            Self::WriteSetScan => "write-set-scan",
            Self::Scan => "scan",
            Self::Everything => "everything",
        }
    }

    /// What the engine does.
    pub(crate) fn engine(self) -> Engine {
        match self {
            Self::FullCopy => Engine::FullCopy,
            Self::Discard => Engine::Discard,
            Self::Log | Self::Ring | Self::Scan => Engine::Scan,
            Self::WriteSetScan => Engine::WriteSet(Some(TrackerKind::UffdScan)),
            Self::Everything => Engine::WriteSet(Some(TrackerKind::Everything)),
            Self::Auto | Self::WriteSetLog | Self::WriteSetRing => Engine::WriteSet(None),
        }
    }

    /// The tracking it needs, for a guest of `pages` writable pages on a host whose rings hold up
    /// to `ring_limit` entries.
    pub(crate) fn tracking(self, pages: usize, ring_limit: u32) -> Result<Tracking, KvmError> {
        // KVM keeps some entries in reserve and pushes up to 512 at once.
        let wanted = (pages + 1024).next_power_of_two().max(2048);
        let ring = u32::try_from(wanted).unwrap_or(u32::MAX).min(ring_limit);
        Ok(match self {
            Self::FullCopy | Self::Discard | Self::WriteSetScan | Self::Scan | Self::Everything => {
                Tracking::Off
            }
            Self::Log | Self::WriteSetLog => Tracking::Log,
            Self::Ring | Self::WriteSetRing if ring_limit == 0 => {
                return Err(KvmError::NoTracker("dirty ring"));
            }
            Self::Ring | Self::WriteSetRing => Tracking::Ring(ring),
            Self::Auto if ring_limit == 0 => Tracking::Log,
            Self::Auto => Tracking::Ring(ring),
        })
    }
}
