//! How a sandbox is reset: a strategy of the engine, and a way to notice the writes of a KVM guest.

use std::fmt;

use afresh_memory::{Strategy, TrackerKind};

use crate::error::KvmError;
use crate::machine::abilities;

/// How writes to guest memory are noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Tracking {
    /// The best that this host has.
    #[default]
    Auto,
    /// KVM's dirty ring.
    Ring,
    /// KVM's dirty log.
    Log,
    /// The host's page tables: asynchronous userfaultfd write protection and `PAGEMAP_SCAN`.
    /// Independent of KVM.
    Scan,
    /// Not at all: every page counts as written.
    Nothing,
}

/// The tracking that KVM does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DirtyTracking {
    /// Nothing.
    Off,
    /// A bitmap for each memory slot.
    Log,
    /// A ring of entries, of this many.
    Ring(u32),
}

/// The method of resetting a sandbox to its image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ResetMethod {
    /// The strategy of a reset. A tracker that a strategy names counts for nothing here:
    /// [`ResetMethod::tracking`] does.
    pub strategy: Strategy,
    /// The method of tracking writes, for the strategies that need it.
    pub tracking: Tracking,
}

impl ResetMethod {
    /// Every method that differs from all others, for tests and benchmarks.
    pub const ALL: [Self; 10] = {
        const WRITE_SET: Strategy = Strategy::WriteSet(None);
        [
            Self::new(Strategy::Auto, Tracking::Auto),
            Self::new(Strategy::FullCopy, Tracking::Nothing),
            Self::new(Strategy::Discard, Tracking::Nothing),
            Self::new(WRITE_SET, Tracking::Ring),
            Self::new(WRITE_SET, Tracking::Log),
            Self::new(WRITE_SET, Tracking::Scan),
            Self::new(WRITE_SET, Tracking::Nothing),
            Self::new(Strategy::Reprotect, Tracking::Ring),
            Self::new(Strategy::Reprotect, Tracking::Log),
            Self::new(Strategy::Reprotect, Tracking::Scan),
        ]
    };

    /// This strategy over this tracking.
    #[must_use]
    pub const fn new(strategy: Strategy, tracking: Tracking) -> Self {
        Self { strategy, tracking }
    }

    /// The concrete form of this method on this host.
    pub(crate) fn here(self) -> Self {
        abilities().map_or(self, |abilities| self.resolve(&abilities).0)
    }

    /// The concrete form of this method on a host with `abilities`, without automatic parts, and
    /// the reason. Explicit choices stay.
    pub(crate) fn resolve(self, abilities: &HostSupport) -> (Self, &'static str) {
        let strategy = match self.strategy {
            Strategy::Auto | Strategy::WriteSet(_) => Strategy::WriteSet(None),
            forced => forced,
        };
        let (tracking, reason) = match (strategy, self.tracking) {
            (Strategy::FullCopy | Strategy::Discard, _) => {
                (Tracking::Nothing, "the strategy does not ask what was written")
            }
            (_, Tracking::Auto) if abilities.ring > 0 => {
                (Tracking::Ring, "KVM has a dirty ring: noticing new pages costs no system call")
            }
            (_, Tracking::Auto) if abilities.log => {
                (Tracking::Log, "KVM has no dirty ring, but a dirty log with manual protection")
            }
            (_, Tracking::Auto) if abilities.scan => {
                (Tracking::Scan, "KVM cannot track writes, but the host's page tables can")
            }
            (_, Tracking::Auto) => {
                (Tracking::Nothing, "nothing here notices writes: all memory is copied back")
            }
            (_, forced) => (forced, "it was asked for"),
        };
        (Self { strategy, tracking }, reason)
    }

    /// The engine's strategy.
    pub(crate) fn engine(self, abilities: &HostSupport) -> Strategy {
        let (resolved, _) = self.resolve(abilities);
        match (resolved.strategy, resolved.tracking) {
            (Strategy::WriteSet(_), Tracking::Scan) => {
                Strategy::WriteSet(Some(TrackerKind::UffdScan))
            }
            (Strategy::WriteSet(_), Tracking::Nothing) => {
                Strategy::WriteSet(Some(TrackerKind::Everything))
            }
            (strategy, _) => strategy,
        }
    }

    /// The tracking that KVM must do, for a guest of `pages` writable pages.
    pub(crate) fn dirty_tracking(
        self,
        pages: usize,
        abilities: &HostSupport,
    ) -> Result<DirtyTracking, KvmError> {
        // KVM keeps some entries in reserve and pushes up to 512 at once.
        let wanted = (pages + 1024).next_power_of_two().max(2048);
        match self.resolve(abilities).0.tracking {
            Tracking::Log if abilities.log => Ok(DirtyTracking::Log),
            Tracking::Log => Err(KvmError::NoTracker("dirty log with manual protection")),
            Tracking::Ring if abilities.ring > 0 => {
                let entries = u32::try_from(wanted).unwrap_or(u32::MAX).min(abilities.ring);
                Ok(DirtyTracking::Ring(entries))
            }
            Tracking::Ring => Err(KvmError::NoTracker("dirty ring")),
            Tracking::Auto | Tracking::Scan | Tracking::Nothing => Ok(DirtyTracking::Off),
        }
    }
}

impl fmt::Display for ResetMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by = match (self.strategy, self.tracking) {
            (Strategy::FullCopy | Strategy::Discard, _) | (_, Tracking::Auto) => "",
            (_, Tracking::Ring) => "-ring",
            (_, Tracking::Log) => "-log",
            (_, Tracking::Scan) => "-scan",
            (_, Tracking::Nothing) => "-everything",
        };
        write!(f, "{}{by}", self.strategy)
    }
}

/// The abilities of this host for micro-VMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostSupport {
    /// Entries of the largest dirty ring; 0 without one.
    pub ring: u32,
    /// Whether the dirty log can be read without re-protecting.
    pub log: bool,
    /// Whether the host's page tables can be scanned for written pages.
    pub scan: bool,
    /// Whether the processor's extended state is cleared by XSAVE instructions.
    pub xsave: bool,
}

impl HostSupport {
    /// The concrete form of the automatic method here, and the reason.
    #[must_use]
    pub fn choice(&self) -> (ResetMethod, &'static str) {
        ResetMethod::default().resolve(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn method(strategy: Strategy, tracking: Tracking) -> ResetMethod {
        ResetMethod::new(strategy, tracking)
    }

    #[test]
    fn each_missing_ability_selects_the_next_tracking() {
        let mut abilities = HostSupport { ring: 65536, log: true, scan: true, xsave: true };
        assert_eq!(abilities.choice().0.tracking, Tracking::Ring);
        abilities.ring = 0;
        assert_eq!(abilities.choice().0.tracking, Tracking::Log);
        abilities.log = false;
        assert_eq!(abilities.choice().0.tracking, Tracking::Scan);
        abilities.scan = false;
        assert_eq!(abilities.choice().0.tracking, Tracking::Nothing);
        let engine = ResetMethod::default().engine(&abilities);
        assert_eq!(engine, Strategy::WriteSet(Some(TrackerKind::Everything)));
    }

    #[test]
    fn a_forced_method_that_is_impossible_is_an_error() {
        let abilities = HostSupport { ring: 0, log: false, scan: true, xsave: true };
        let needs = |method: ResetMethod| method.dirty_tracking(100, &abilities);
        assert!(needs(method(Strategy::Auto, Tracking::Ring)).is_err());
        assert!(needs(method(Strategy::Reprotect, Tracking::Log)).is_err());
        let copy = method(Strategy::FullCopy, Tracking::Ring);
        assert!(matches!(needs(copy), Ok(DirtyTracking::Off)));
    }

    #[test]
    fn a_ring_holds_every_page_of_a_small_guest_and_never_exceeds_the_limit() {
        let abilities = HostSupport { ring: 65536, log: true, scan: true, xsave: true };
        for (pages, entries) in [(100, 2048), (4096, 8192), (1 << 20, 65536)] {
            let tracking = ResetMethod::default().dirty_tracking(pages, &abilities).unwrap();
            assert_eq!(tracking, DirtyTracking::Ring(entries));
        }
    }

    #[test]
    fn every_method_has_its_own_name() {
        let mut names = ResetMethod::ALL.map(|method| method.to_string());
        names.sort();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
    }
}
