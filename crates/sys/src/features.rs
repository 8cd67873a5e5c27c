//! The features that this kernel allows this process to use.
//!
//! Probed once by trying, not by reading version numbers: seccomp, sysctls and containers decide as
//! much as the kernel does. Features that every slot needs are tried together, and all others with
//! the first question about one of them: a start asks about none, and a first try of them costs
//! cold code of the kernel. Any feature can be masked, by [`Features::without`] or for the whole
//! process by `AFRESH_WITHOUT=uffd,pagemap-scan,…`, to simulate a host with fewer features;
//! everything above then takes the same path as on such a host.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::InheritedCell;

/// A kernel facility that some strategy needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Feature {
    /// Files in memory (`memfd_create`), which images are kept in. Nothing works without.
    Memfd,
    /// userfaultfd write protection answered by SIGBUS.
    UffdSigbus,
    /// userfaultfd write protection lifted by the kernel (WP_ASYNC).
    UffdAsync,
    /// userfaultfd that also handles faults in the kernel, including those of KVM. Needs privilege:
    /// `CAP_SYS_PTRACE`, or access to `/dev/userfaultfd`.
    UffdKernel,
    /// `PAGEMAP_SCAN`.
    PagemapScan,
    /// Fault signals with mprotect; there on every Linux, listed so that it can be masked.
    Mprotect,
    /// `MADV_POPULATE_WRITE`.
    Populate,
    /// KVM.
    Kvm,
}

impl Feature {
    /// Every feature.
    pub const ALL: [Feature; 8] = [
        Feature::Memfd,
        Feature::UffdSigbus,
        Feature::UffdAsync,
        Feature::UffdKernel,
        Feature::PagemapScan,
        Feature::Mprotect,
        Feature::Populate,
        Feature::Kvm,
    ];

    /// The name used in messages and in `AFRESH_WITHOUT`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Feature::Memfd => "memfd",
            Feature::UffdSigbus => "uffd-sigbus",
            Feature::UffdAsync => "uffd-async",
            Feature::UffdKernel => "uffd-kernel",
            Feature::PagemapScan => "pagemap-scan",
            Feature::Mprotect => "mprotect",
            Feature::Populate => "populate",
            Feature::Kvm => "kvm",
        }
    }
}

/// An unknown feature name in `AFRESH_WITHOUT` or on a command line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown feature `{0}`; known are memfd, uffd (every kind), uffd-sigbus, uffd-async, uffd-kernel, pagemap-scan, mprotect, populate, kvm"
)]
pub struct UnknownFeature(String);

impl FromStr for Feature {
    type Err = UnknownFeature;

    fn from_str(name: &str) -> Result<Self, UnknownFeature> {
        Feature::ALL
            .into_iter()
            .find(|f| f.name() == name)
            .ok_or_else(|| UnknownFeature(name.to_owned()))
    }
}

/// Features that are tried together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FeatureGroup {
    /// Those that a slot asks about when it is made.
    Slots,
    /// All others.
    Others,
}

impl FeatureGroup {
    const ALL: [Self; 2] = [Self::Slots, Self::Others];

    pub(crate) fn of(feature: Feature) -> Self {
        match feature {
            Feature::Memfd | Feature::UffdSigbus | Feature::PagemapScan | Feature::Mprotect => {
                Self::Slots
            }
            Feature::UffdAsync | Feature::UffdKernel | Feature::Populate | Feature::Kvm => {
                Self::Others
            }
        }
    }
}

/// The features that are missing, each with the reason.
type MissingFeatures = BTreeMap<Feature, String>;

/// The features found, each with the reason when it is missing.
pub struct Features {
    /// A group each, in the order of [`FeatureGroup::ALL`]. Only those of the host are found later.
    groups: [InheritedCell<MissingFeatures>; FeatureGroup::ALL.len()],
}

/// Results of a probe of a group.
#[derive(Debug, Default)]
pub(crate) struct ProbeResults {
    pub(crate) missing: MissingFeatures,
    /// Whether descriptors or memory ran out, so that a later probe may find more.
    pub(crate) short: bool,
}

impl Features {
    /// The features of this host, without those of `AFRESH_WITHOUT`. Each is probed with the first
    /// question about it, and has the same answer ever after. While the process is short of
    /// descriptors or memory, which looks like a missing feature, every question probes.
    ///
    /// An unknown name in the variable is reported on standard error and otherwise ignored: a
    /// misspelt mask must not take a service down, nor pass silently.
    pub fn host() -> &'static Features {
        static HOST: Features =
            Features { groups: [const { InheritedCell::new() }; FeatureGroup::ALL.len()] };
        &HOST
    }

    /// The missing features of a group.
    fn missing(&self, group: FeatureGroup) -> &MissingFeatures {
        let cell = &self.groups[group as usize];
        cell.get().unwrap_or_else(|| {
            let probed = crate::imp::probe(group);
            let mut missing = probed.missing;
            for feature in masked().iter().filter(|masked| FeatureGroup::of(**masked) == group) {
                missing.entry(*feature).or_insert_with(|| MASKED.to_owned());
            }
            if probed.short { for_now(group, missing) } else { cell.get_or_make(|| missing) }
        })
    }

    /// Whether `feature` can be used.
    #[must_use]
    pub fn has(&self, feature: Feature) -> bool {
        self.why_missing(feature).is_none()
    }

    /// Why `feature` cannot be used, or `None` when it can.
    #[must_use]
    pub fn why_missing(&self, feature: Feature) -> Option<&str> {
        self.missing(FeatureGroup::of(feature)).get(&feature).map(String::as_str)
    }

    /// The same host without `feature`.
    #[must_use]
    pub fn without(&self, feature: Feature) -> Features {
        let groups = FeatureGroup::ALL.map(|group| {
            let mut missing = self.missing(group).clone();
            if group == FeatureGroup::of(feature) {
                missing.entry(feature).or_insert_with(|| MASKED.to_owned());
            }
            missing.into()
        });
        Features { groups }
    }
}

impl Clone for Features {
    fn clone(&self) -> Self {
        Self { groups: FeatureGroup::ALL.map(|group| self.missing(group).clone().into()) }
    }
}

impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(FeatureGroup::ALL.map(|group| self.missing(group))).finish()
    }
}

impl PartialEq for Features {
    fn eq(&self, other: &Self) -> bool {
        FeatureGroup::ALL.into_iter().all(|group| self.missing(group) == other.missing(group))
    }
}

impl Eq for Features {}

/// Why a masked feature is missing.
const MASKED: &str = "masked on request";

/// The features that `AFRESH_WITHOUT` names.
fn masked() -> &'static [Feature] {
    static MASK: InheritedCell<Vec<Feature>> = InheritedCell::new();
    MASK.get_or_make(|| match std::env::var("AFRESH_WITHOUT").map(|list| parse_list(&list)) {
        Ok(Ok(masked)) => masked,
        Ok(Err(error)) => {
            eprintln!("afresh: AFRESH_WITHOUT: {error}");
            Vec::new()
        }
        Err(_) => Vec::new(),
    })
}

/// The same, until the next probe. Leaks memory only when the findings have changed.
fn for_now(group: FeatureGroup, missing: MissingFeatures) -> &'static MissingFeatures {
    static LAST: [AtomicPtr<MissingFeatures>; FeatureGroup::ALL.len()] =
        [const { AtomicPtr::new(std::ptr::null_mut()) }; FeatureGroup::ALL.len()];
    let last = &LAST[group as usize];
    // SAFETY: a stored value is never freed and never changed.
    match unsafe { last.load(Ordering::Acquire).as_ref() } {
        Some(last) if *last == missing => last,
        _ => {
            let new = Box::leak(Box::new(missing));
            last.store(new, Ordering::Release);
            new
        }
    }
}

/// Parses a comma-separated list; `uffd` stands for every kind.
fn parse_list(list: &str) -> Result<Vec<Feature>, UnknownFeature> {
    let mut features = Vec::new();
    for name in list.split(',').map(str::trim).filter(|n| !n.is_empty()) {
        if name == "uffd" {
            features.extend([Feature::UffdSigbus, Feature::UffdAsync, Feature::UffdKernel]);
        } else {
            features.push(name.parse()?);
        }
    }
    Ok(features)
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for feature in Feature::ALL {
            match self.why_missing(feature) {
                None => writeln!(f, "{:<14} yes", feature.name())?,
                Some(why) => writeln!(f, "{:<14} no: {why}", feature.name())?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_each_feature_and_refuses_unknown_ones() {
        assert_eq!(
            parse_list("uffd, pagemap-scan").unwrap(),
            [Feature::UffdSigbus, Feature::UffdAsync, Feature::UffdKernel, Feature::PagemapScan]
        );
        assert!(parse_list("uffd,warp-drive").unwrap_err().to_string().contains("warp-drive"));
    }

    #[test]
    fn a_masked_feature_is_missing_with_a_reason() {
        let masked = Features::host().without(Feature::UffdAsync);
        assert!(!masked.has(Feature::UffdAsync));
        assert!(masked.why_missing(Feature::UffdAsync).is_some());
    }

    #[test]
    fn a_copy_has_the_findings_of_the_host() {
        let host = Features::host();
        assert_eq!(host.clone(), *host);
        for feature in Feature::ALL {
            let masked = host.without(feature);
            for other in Feature::ALL.into_iter().filter(|other| *other != feature) {
                assert_eq!(masked.why_missing(other), host.why_missing(other), "{other:?}");
            }
            assert!(!masked.has(feature), "{feature:?}");
        }
    }

    #[test]
    fn a_question_about_slots_tries_no_other_feature() {
        static FRESH: Features =
            Features { groups: [const { InheritedCell::new() }; FeatureGroup::ALL.len()] };
        let _ = FRESH.has(Feature::UffdSigbus);
        assert!(FRESH.groups[FeatureGroup::Others as usize].get().is_none());
        let _ = FRESH.has(Feature::Kvm);
        assert_eq!(FRESH, *Features::host());
    }
}
