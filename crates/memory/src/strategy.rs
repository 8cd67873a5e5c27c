//! Strategies: the kinds of resets, and the choice of one.
//!
//! A caller names a [`Strategy`]; [`Strategy::choose`] turns it into one that this host supports,
//! with the reason in words, which `afresh doctor` prints. A strategy that is forced and impossible
//! is an error, never silently another one.

use std::fmt;
use std::str::FromStr;

use afresh_sys::{Feature, Features, PORTABLE};

use crate::{SlotError, TrackerKind};

/// The algorithm of resetting a slot to its image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Strategy {
    /// The best the host allows; falls back to discarding while a workload keeps writing new pages.
    #[default]
    Auto,
    /// Copy the whole image back. Slow and simple: the oracle for all others.
    FullCopy,
    /// Throw written pages away (`madvise`); the next run faults them in again.
    Discard,
    /// Copy written pages back and protect them again; the next write to each is noticed anew.
    Reprotect,
    /// Keep learned pages writable and copy them back; notice others with the given tracker, or the
    /// best one when `None`.
    WriteSet(Option<TrackerKind>),
}

impl Strategy {
    /// Every strategy that can be forced, for tests and benchmarks.
    pub const FORCED: [Strategy; 6] = [
        Strategy::FullCopy,
        Strategy::Discard,
        Strategy::Reprotect,
        Strategy::WriteSet(Some(TrackerKind::UffdSigbus)),
        Strategy::WriteSet(Some(TrackerKind::UffdScan)),
        Strategy::WriteSet(Some(TrackerKind::Mprotect)),
    ];
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Strategy::Auto => f.write_str("auto"),
            Strategy::FullCopy => f.write_str("full-copy"),
            Strategy::Discard => f.write_str("discard"),
            Strategy::Reprotect => f.write_str("reprotect"),
            Strategy::WriteSet(None) => f.write_str("write-set"),
            Strategy::WriteSet(Some(kind)) => write!(f, "write-set-{kind}"),
        }
    }
}

/// A strategy name that is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown strategy `{0}`; known are auto, full-copy, discard, reprotect, write-set, write-set-uffd, \
     write-set-scan, write-set-mprotect"
)]
pub struct UnknownStrategy(String);

impl FromStr for Strategy {
    type Err = UnknownStrategy;

    fn from_str(name: &str) -> Result<Self, UnknownStrategy> {
        [Strategy::Auto, Strategy::WriteSet(None)]
            .into_iter()
            .chain(Strategy::FORCED)
            .find(|s| s.to_string() == name)
            .ok_or_else(|| UnknownStrategy(name.to_owned()))
    }
}

/// Writers of slot memory other than the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostAccess {
    /// Only threads of this process, in user mode.
    #[default]
    Threads,
    /// System calls too (`read(2)` into guest memory), which trackers based on signals turn into
    /// `EFAULT`.
    Syscalls,
}

/// The chosen strategy, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The strategy, never [`Strategy::Auto`], with its tracker named.
    pub strategy: Strategy,
    /// Whether the slot may fall back to discarding if learning a write set is more expensive.
    pub adaptive: bool,
    /// The reason, as text.
    pub reason: String,
}

fn usable(kind: TrackerKind, features: &Features) -> Result<(), String> {
    let needs: &[Feature] = match kind {
        TrackerKind::UffdSigbus => &[Feature::UffdSigbus],
        TrackerKind::UffdScan => &[Feature::UffdAsync, Feature::PagemapScan],
        TrackerKind::Mprotect => &[Feature::Mprotect],
        TrackerKind::Everything | TrackerKind::Other(_) => &[],
    };
    for feature in needs {
        if let Some(why) = features.why_missing(*feature) {
            return Err(format!("{} is missing ({why})", feature.name()));
        }
    }
    Ok(())
}

impl Strategy {
    /// Decides the concrete form of this strategy on a host with `features`.
    ///
    /// # Errors
    /// [`SlotError::Unavailable`] when a forced strategy needs a feature that the host lacks.
    pub fn choose(self, features: &Features, access: HostAccess) -> Result<Choice, SlotError> {
        let unavailable = |reason| SlotError::Unavailable { strategy: self.to_string(), reason };
        let forced = |strategy| Choice {
            strategy,
            adaptive: false,
            reason: "forced by the caller".to_owned(),
        };
        if let Some(why) = features.why_missing(Feature::Memfd) {
            return Err(unavailable(format!("{why}; images are kept in such files")));
        }
        match self {
            Strategy::FullCopy | Strategy::Discard => Ok(forced(self)),
            Strategy::Reprotect => {
                usable(TrackerKind::UffdScan, features).map_err(unavailable)?;
                Ok(forced(self))
            }
            Strategy::WriteSet(Some(kind)) => {
                usable(kind, features).map_err(unavailable)?;
                Ok(forced(self))
            }
            Strategy::Auto | Strategy::WriteSet(None) => {
                let order: &[TrackerKind] = match access {
                    HostAccess::Threads => {
                        &[TrackerKind::UffdSigbus, TrackerKind::Mprotect, TrackerKind::UffdScan]
                    }
                    HostAccess::Syscalls => &[TrackerKind::UffdScan],
                };
                let mut passed_over = String::new();
                for kind in order {
                    match usable(*kind, features) {
                        Ok(()) => {
                            let why = match (kind, access) {
                                (TrackerKind::UffdSigbus, _) => {
                                    "no system call and no fault in the steady state"
                                }
                                (TrackerKind::Mprotect, _) => {
                                    "no system call and no fault in the steady state, at the price \
                                     of one mapping per run of open pages"
                                }
                                (_, HostAccess::Syscalls) => {
                                    "system calls write the memory, which only a scan tolerates"
                                }
                                _ => "one scan per reset",
                            };
                            return Ok(Choice {
                                strategy: Strategy::WriteSet(Some(*kind)),
                                adaptive: self == Strategy::Auto,
                                reason: format!("{passed_over}write set over {kind}: {why}"),
                            });
                        }
                        Err(why) => passed_over.push_str(&format!("{kind}: {why}; ")),
                    }
                }
                if self == Strategy::Auto && PORTABLE {
                    return Ok(Choice {
                        strategy: Strategy::FullCopy,
                        adaptive: false,
                        reason: "a portable build notices no writes, so it copies the whole image"
                            .to_owned(),
                    });
                }
                if self == Strategy::Auto {
                    return Ok(Choice {
                        strategy: Strategy::Discard,
                        adaptive: false,
                        reason: format!("{passed_over}discard needs nothing from the host"),
                    });
                }
                Err(unavailable(passed_over))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for strategy in Strategy::FORCED.into_iter().chain([Strategy::Auto]) {
            assert_eq!(strategy.to_string().parse::<Strategy>().unwrap(), strategy);
        }
        assert!("fast".parse::<Strategy>().is_err());
    }

    #[test]
    fn each_missing_feature_selects_the_next_strategy_and_says_so() {
        let mut features = Features::host().clone();
        let mut previous = String::new();
        let masks = [Feature::UffdSigbus, Feature::Mprotect, Feature::PagemapScan];
        let whole = features.has(Feature::UffdAsync) && masks.iter().all(|f| features.has(*f));
        if !whole {
            println!("SKIPPED: this host lacks features anyway; only the last choice is checked");
        }
        for masked in masks {
            features = features.without(masked);
            let choice = Strategy::Auto.choose(&features, HostAccess::Threads).unwrap();
            assert!(!whole || choice.reason != previous, "{}", choice.reason);
            previous = choice.reason;
        }
        let choice = Strategy::Auto.choose(&features, HostAccess::Threads).unwrap();
        let last = if PORTABLE { Strategy::FullCopy } else { Strategy::Discard };
        assert_eq!(choice.strategy, last);
        assert!(Strategy::Reprotect.choose(&features, HostAccess::Threads).is_err());
    }

    #[test]
    fn memory_that_system_calls_write_never_gets_a_signal_tracker() {
        let choice = Strategy::Auto.choose(Features::host(), HostAccess::Syscalls).unwrap();
        assert!(!matches!(
            choice.strategy,
            Strategy::WriteSet(Some(TrackerKind::UffdSigbus | TrackerKind::Mprotect))
        ));
    }
}
