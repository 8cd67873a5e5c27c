//! The features that this kernel allows this process to use.
//!
//! Probed once by trying, not by reading version numbers: seccomp, sysctls and containers decide as
//! much as the kernel does. Any feature can be masked, by [`Features::without`] or for the whole
//! process by `AFRESH_WITHOUT=uffd,pagemap-scan,…`, to play a poorer host; everything above then
//! takes the same path as on such a host.

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

/// The features found, each with the reason when it is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Features {
    missing: BTreeMap<Feature, String>,
}

/// Results of a probe.
#[derive(Debug, Default)]
pub(crate) struct ProbeResults {
    pub(crate) missing: BTreeMap<Feature, String>,
    /// Whether descriptors or memory ran out, so that a later probe may find more.
    pub(crate) short: bool,
}

impl Features {
    /// Probes the host once, applies `AFRESH_WITHOUT`, and returns the same answer ever after.
    /// While the process is short of descriptors or memory, which looks like a missing feature,
    /// every call probes.
    ///
    /// An unknown name in the variable is reported on standard error and otherwise ignored: a
    /// misspelt mask must not take a service down, nor pass silently.
    pub fn host() -> &'static Features {
        static HOST: InheritedCell<Features> = InheritedCell::new();
        HOST.get().unwrap_or_else(|| {
            let (features, short) = Self::probe();
            if short { features.for_now() } else { HOST.get_or_make(|| features) }
        })
    }

    /// Tries everything; also whether a shortage may be why something is missing.
    fn probe() -> (Self, bool) {
        let probed = crate::imp::probe();
        let mut features = Features { missing: probed.missing };
        if let Ok(list) = std::env::var("AFRESH_WITHOUT") {
            match parse_list(&list) {
                Ok(masked) => {
                    for feature in masked {
                        features = features.without(feature);
                    }
                }
                Err(error) => eprintln!("afresh: AFRESH_WITHOUT: {error}"),
            }
        }
        (features, probed.short)
    }

    /// The same, until the next probe. Leaks memory only when the findings have changed.
    fn for_now(self) -> &'static Self {
        static LAST: AtomicPtr<Features> = AtomicPtr::new(std::ptr::null_mut());
        // SAFETY: a stored value is never freed and never changed.
        match unsafe { LAST.load(Ordering::Acquire).as_ref() } {
            Some(last) if *last == self => last,
            _ => {
                let new = Box::leak(Box::new(self));
                LAST.store(new, Ordering::Release);
                new
            }
        }
    }

    /// Whether `feature` can be used.
    #[must_use]
    pub fn has(&self, feature: Feature) -> bool {
        !self.missing.contains_key(&feature)
    }

    /// Why `feature` cannot be used, or `None` when it can.
    #[must_use]
    pub fn why_missing(&self, feature: Feature) -> Option<&str> {
        self.missing.get(&feature).map(String::as_str)
    }

    /// The same host without `feature`.
    #[must_use]
    pub fn without(&self, feature: Feature) -> Features {
        let mut features = self.clone();
        features.missing.entry(feature).or_insert_with(|| "masked on request".to_owned());
        features
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
}
