//! How a sandbox is reset: the engine's strategies, over KVM's ways of noticing writes.

use afresh_memory::{Strategy as Engine, TrackerKind};

use crate::error::KvmError;

/// How KVM reports what the guest wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tracking {
    /// Not at all.
    Off,
    /// A bitmap for each memory slot.
    Log,
    /// A ring of entries, of this many.
    Ring(u32),
}

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
    pub(crate) fn engine(self, abilities: &Abilities) -> Engine {
        match self.resolve(abilities).0 {
            Self::FullCopy => Engine::FullCopy,
            Self::Discard => Engine::Discard,
            Self::Log | Self::Ring | Self::Scan => Engine::Scan,
            Self::WriteSetScan => Engine::WriteSet(Some(TrackerKind::UffdScan)),
            Self::Everything => Engine::WriteSet(Some(TrackerKind::Everything)),
            Self::Auto | Self::WriteSetLog | Self::WriteSetRing => Engine::WriteSet(None),
        }
    }

    /// What this strategy means on a host with `abilities`, with the reason in words. Only
    /// [`Strategy::Auto`] means something else than itself.
    pub(crate) fn resolve(self, abilities: &Abilities) -> (Self, &'static str) {
        match self {
            Self::Auto if abilities.ring > 0 => (
                Self::WriteSetRing,
                "KVM has a dirty ring: noticing new pages costs no system call",
            ),
            Self::Auto if abilities.log => {
                (Self::WriteSetLog, "KVM has no dirty ring, but a dirty log with manual protection")
            }
            Self::Auto if abilities.scan => {
                (Self::WriteSetScan, "KVM cannot track writes, but the host's page tables can")
            }
            Self::Auto => {
                (Self::Everything, "nothing here notices writes: all memory is copied back")
            }
            forced => (forced, "it was asked for"),
        }
    }

    /// The tracking it needs, for a guest of `pages` writable pages.
    pub(crate) fn tracking(
        self,
        pages: usize,
        abilities: &Abilities,
    ) -> Result<Tracking, KvmError> {
        // KVM keeps some entries in reserve and pushes up to 512 at once.
        let wanted = (pages + 1024).next_power_of_two().max(2048);
        match self.resolve(abilities).0 {
            Self::Log | Self::WriteSetLog if abilities.log => Ok(Tracking::Log),
            Self::Log | Self::WriteSetLog => {
                Err(KvmError::NoTracker("dirty log with manual protection"))
            }
            Self::Ring | Self::WriteSetRing if abilities.ring > 0 => {
                Ok(Tracking::Ring(u32::try_from(wanted).unwrap_or(u32::MAX).min(abilities.ring)))
            }
            Self::Ring | Self::WriteSetRing => Err(KvmError::NoTracker("dirty ring")),
            _ => Ok(Tracking::Off),
        }
    }
}

/// What this host offers to micro-VMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Abilities {
    /// Entries of the largest dirty ring; 0 where there is none.
    pub ring: u32,
    /// Whether the dirty log can be read without re-protecting.
    pub log: bool,
    /// Whether the host's page tables can be scanned for written pages.
    pub scan: bool,
    /// Whether the processor's extended state is cleared by XSAVE instructions.
    pub xsave: bool,
}

impl Abilities {
    /// What [`Strategy::Auto`] means here, and why.
    #[must_use]
    pub fn choice(&self) -> (Strategy, &'static str) {
        Strategy::Auto.resolve(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_missing_ability_selects_the_next_strategy() {
        let mut abilities = Abilities { ring: 65536, log: true, scan: true, xsave: true };
        assert_eq!(abilities.choice().0, Strategy::WriteSetRing);
        abilities.ring = 0;
        assert_eq!(abilities.choice().0, Strategy::WriteSetLog);
        abilities.log = false;
        assert_eq!(abilities.choice().0, Strategy::WriteSetScan);
        abilities.scan = false;
        assert_eq!(abilities.choice().0, Strategy::Everything);
    }

    #[test]
    fn a_forced_strategy_that_is_impossible_is_an_error() {
        let abilities = Abilities { ring: 0, log: false, scan: true, xsave: true };
        assert!(Strategy::WriteSetRing.tracking(100, &abilities).is_err());
        assert!(Strategy::Log.tracking(100, &abilities).is_err());
        assert!(matches!(Strategy::FullCopy.tracking(100, &abilities), Ok(Tracking::Off)));
    }

    #[test]
    fn a_ring_holds_every_page_of_a_small_guest_and_never_exceeds_the_limit() {
        let abilities = Abilities { ring: 65536, log: true, scan: true, xsave: true };
        for (pages, entries) in [(100, 2048), (4096, 8192), (1 << 20, 65536)] {
            let tracking = Strategy::Auto.tracking(pages, &abilities).unwrap();
            assert_eq!(tracking, Tracking::Ring(entries));
        }
    }
}
