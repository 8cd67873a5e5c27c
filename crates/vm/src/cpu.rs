//! Which processor a guest sees: a named template, the same on every host that can serve it.
//!
//! A template is a list of features. CPUID shows those and no other, so a feature detected during
//! the warm-up exists wherever the snapshot is thawed; a snapshot records the template's name and
//! its features, and a host that lacks one of them refuses it by name.
//!
//! Promises: nothing that a template leaves out is shown; the order and meaning of `FEATURES` may
//! change freely, for only names are ever stored. May break it: a guest that uses an instruction
//! without checking for it. Features that a template leaves out are also forbidden where the
//! processor can do so: AVX and AVX-512 by XCR0; RDRAND, RDSEED, RDTSCP and INVPCID by KVM on
//! Intel, by the guest's CPUID; protection keys, user access to the FS and GS base, shadow stacks,
//! AMX, MPX, TSX tracing and UMWAIT are in no template and stay off. The others (SSE4, AES, SHA,
//! GFNI, BMI, ADX, MOVBE and so on) have no switch: level 3 can execute them wherever the processor
//! has them.

use std::borrow::Cow;

/// A register of a CPUID leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

use Register::{Eax, Ebx, Ecx, Edx};

/// Which of the named templates a feature belongs to: those of this level and above.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    V2,
    V3,
    V4,
    /// In none but the host's own.
    Host,
}

/// The state that a feature needs to be enabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequiredState {
    Nothing,
    Avx,
    Avx512,
}

/// One feature and where CPUID shows it.
#[derive(Debug)]
struct Feature {
    name: &'static str,
    leaf: u32,
    index: u32,
    register: Register,
    bit: u32,
    level: Level,
    needs: RequiredState,
}

macro_rules! features {
    ($($leaf:literal $index:literal $register:ident: $($name:literal $bit:literal $level:ident $needs:ident),*;)*) => {
        &[$($(Feature {
            name: $name,
            leaf: $leaf,
            index: $index,
            register: $register,
            bit: $bit,
            level: Level::$level,
            needs: RequiredState::$needs,
        }),*),*]
    };
}

/// Every feature that a template can hold: those that a program at level 3 may detect and use. Left
/// out, so never shown: features that need a switch that a guest does not have (protection keys,
/// FSGSBASE, CET, AMX, MPX), that have separate state (TSX), that wait (MONITOR, WAITPKG) or that
/// reveal the host's processor (RDPID, performance counters), and virtualisation.
#[rustfmt::skip]
static FEATURES: &[Feature] = features! {
    0x1 0 Ecx:
        "sse3" 0 V2 Nothing, "pclmulqdq" 1 V3 Nothing, "ssse3" 9 V2 Nothing, "fma" 12 V3 Avx,
        "cmpxchg16b" 13 V2 Nothing, "sse4.1" 19 V2 Nothing, "sse4.2" 20 V2 Nothing, "movbe" 22 V3 Nothing,
        "popcnt" 23 V2 Nothing, "aes" 25 V3 Nothing, "xsave" 26 V2 Nothing, "avx" 28 V3 Nothing,
        "f16c" 29 V3 Avx, "rdrand" 30 V3 Nothing;
    0x1 0 Edx:
        "tsc" 4 V2 Nothing, "cmpxchg8b" 8 V2 Nothing, "cmov" 15 V2 Nothing, "clflush" 19 V2 Nothing,
        "mmx" 23 V2 Nothing, "fxsr" 24 V2 Nothing, "sse" 25 V2 Nothing, "sse2" 26 V2 Nothing;
    0x7 0 Ebx:
        "bmi1" 3 V3 Nothing, "avx2" 5 V3 Avx, "bmi2" 8 V3 Nothing, "erms" 9 V3 Nothing,
        "avx512f" 16 V4 Avx, "avx512dq" 17 V4 Avx512, "rdseed" 18 V3 Nothing, "adx" 19 V3 Nothing,
        "avx512ifma" 21 V4 Avx512, "clflushopt" 23 Host Nothing, "clwb" 24 Host Nothing,
        "avx512cd" 28 V4 Avx512, "sha" 29 V4 Nothing, "avx512bw" 30 V4 Avx512, "avx512vl" 31 V4 Avx512;
    0x7 0 Ecx:
        "prefetchwt1" 0 Host Nothing, "avx512vbmi" 1 V4 Avx512, "avx512vbmi2" 6 V4 Avx512, "gfni" 8 V4 Nothing,
        "vaes" 9 V4 Avx, "vpclmulqdq" 10 V4 Avx, "avx512vnni" 11 V4 Avx512, "avx512bitalg" 12 V4 Avx512,
        "avx512vpopcntdq" 14 V4 Avx512, "cldemote" 25 Host Nothing, "movdiri" 27 Host Nothing,
        "movdir64b" 28 Host Nothing;
    0x7 0 Edx:
        "fsrm" 4 Host Nothing, "avx512vp2intersect" 8 Host Avx512, "serialize" 14 Host Nothing,
        "avx512fp16" 23 Host Avx512;
    0x7 1 Eax:
        "sha512" 0 Host Avx, "sm3" 1 Host Avx, "sm4" 2 Host Avx, "avxvnni" 4 Host Avx,
        "avx512bf16" 5 Host Avx512, "cmpccxadd" 7 Host Nothing, "fzrm" 10 Host Nothing, "fsrs" 11 Host Nothing,
        "fsrc" 12 Host Nothing, "avxifma" 23 Host Avx;
    0x7 1 Edx:
        "avxvnniint8" 4 Host Avx, "avxneconvert" 5 Host Avx, "avxvnniint16" 10 Host Avx,
        "prefetchi" 14 Host Nothing;
    0xd 1 Eax:
        "xsaveopt" 0 V3 Nothing, "xsavec" 1 Host Nothing, "xgetbv1" 2 Host Nothing;
    0x8000_0001 0 Ecx:
        "lahf" 0 V2 Nothing, "lzcnt" 5 V3 Nothing, "sse4a" 6 Host Nothing, "misalignsse" 7 Host Nothing,
        "prefetchw" 8 V3 Nothing, "xop" 11 Host Avx, "fma4" 16 Host Avx, "tbm" 21 Host Nothing;
    0x8000_0001 0 Edx:
        "mmxext" 22 Host Nothing, "fxsropt" 25 Host Nothing, "rdtscp" 27 V3 Nothing, "3dnowext" 30 Host Nothing,
        "3dnow" 31 Host Nothing;
    0x8000_0007 0 Edx:
        "invtsc" 8 Host Nothing;
    0x8000_0008 0 Ebx:
        "clzero" 0 Host Nothing, "xsaveerptr" 2 Host Nothing, "wbnoinvd" 9 Host Nothing;
};

const _: () = assert!(FEATURES.len() <= 128, "one bit of a set for each");

/// A set of features: bit `n` is `FEATURES[n]`.
type FeatureSet = u128;

fn all_features() -> impl Iterator<Item = (FeatureSet, &'static Feature)> {
    FEATURES.iter().enumerate().map(|(index, feature)| (1 << index, feature))
}

fn find(name: &str) -> Option<(FeatureSet, &'static Feature)> {
    all_features().find(|(_, feature)| feature.name == name)
}

/// The bits of features with these names, which must all exist.
fn bits(names: &[&str]) -> FeatureSet {
    names.iter().filter_map(|name| find(name)).fold(0, |set, (bit, _)| set | bit)
}

/// Removes features whose prerequisites are missing.
fn close(mut set: FeatureSet) -> FeatureSet {
    let has = |set: FeatureSet, name: &str| set & bits(&[name]) != 0;
    if !has(set, "xsave") {
        set &= !bits(&["avx", "xsaveopt", "xsavec", "xgetbv1"]);
    }
    let (avx, avx512) = (has(set, "avx"), has(set, "avx") && has(set, "avx512f"));
    for (bit, feature) in all_features() {
        let works = match feature.needs {
            RequiredState::Nothing => true,
            RequiredState::Avx => avx,
            RequiredState::Avx512 => avx512,
        };
        if !works {
            set &= !bit;
        }
    }
    set
}

/// A feature's name that no template knows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no CPU feature is called {0:?}; CpuTemplate::known_features lists the names")]
#[non_exhaustive]
pub struct UnknownFeature(pub String);

/// The processor that guests see, as a name and a list of features.
///
/// ```
/// let template = afresh_vm::CpuTemplate::v3().with("sha")?;
/// assert_eq!(template.name(), "x86-64-v3+sha");
/// assert!(template.features().any(|name| name == "avx2"));
/// # Ok::<(), afresh_vm::UnknownFeature>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuTemplate {
    name: Cow<'static, str>,
    set: FeatureSet,
}

impl CpuTemplate {
    /// x86-64-v2 and XSAVE: SSE4.2, POPCNT, CMPXCHG16B. AVX is off.
    #[must_use]
    pub fn v2() -> Self {
        Self::level("x86-64-v2", Level::V2)
    }

    /// x86-64-v3 (AVX2, BMI, FMA, MOVBE) with AES, PCLMULQDQ, ADX, RDRAND, RDSEED and RDTSCP: Intel
    /// since Broadwell, AMD since Zen. AVX-512 is off; SHA, VAES, GFNI and VNNI are not shown.
    #[must_use]
    pub fn v3() -> Self {
        Self::level("x86-64-v3", Level::V3)
    }

    /// x86-64-v4 (AVX-512 F, BW, CD, DQ, VL) with all of `v3`, SHA, GFNI, VAES, VPCLMULQDQ and the
    /// AVX-512 extensions IFMA, VBMI, VBMI2, VNNI, BITALG and VPOPCNTDQ: Intel servers since Ice
    /// Lake, AMD since Zen 4.
    #[must_use]
    pub fn v4() -> Self {
        Self::level("x86-64-v4", Level::V4)
    }

    fn level(name: &'static str, level: Level) -> Self {
        let set =
            all_features().filter(|(_, f)| f.level <= level).fold(0, |set, (bit, _)| set | bit);
        Self { name: name.into(), set }
    }

    /// Every feature that CPUID shows by `register`, which gives the value of a leaf, index and
    /// register.
    pub(crate) fn from_cpuid(
        name: &'static str,
        mut register: impl FnMut(u32, u32, Register) -> u32,
    ) -> Self {
        // Features of one register are grouped, so that each register is read once.
        let mut last = None;
        let mut shown = |f: &Feature| {
            let place = (f.leaf, f.index, f.register);
            let value = match last {
                Some((known, value)) if known == place => value,
                _ => register(f.leaf, f.index, f.register),
            };
            last = Some((place, value));
            value >> f.bit & 1 == 1
        };
        let set = all_features().filter(|(_, f)| shown(f)).fold(0, |set, (bit, _)| set | bit);
        Self { name: name.into(), set: close(set) }
    }

    /// The template with this name: `x86-64-v2`, `x86-64-v3` or `x86-64-v4`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::v2(), Self::v3(), Self::v4()].into_iter().find(|template| template.name == name)
    }

    /// A template out of a snapshot.
    pub(crate) fn recorded(name: String, features: &[String]) -> Result<Self, UnknownFeature> {
        let mut set = 0;
        for feature in features {
            set |= find(feature).ok_or_else(|| UnknownFeature(feature.clone()))?.0;
        }
        Ok(Self { name: name.into(), set: close(set) })
    }

    /// The same with one feature more, and its prerequisites.
    ///
    /// # Errors
    /// [`UnknownFeature`].
    pub fn with(self, feature: &str) -> Result<Self, UnknownFeature> {
        let (bit, found) = find(feature).ok_or_else(|| UnknownFeature(feature.to_owned()))?;
        let needed = match found.needs {
            RequiredState::Nothing if found.name == "avx" || found.leaf == 0xd => bits(&["xsave"]),
            RequiredState::Nothing => 0,
            RequiredState::Avx => bits(&["xsave", "avx"]),
            RequiredState::Avx512 => bits(&["xsave", "avx", "avx512f"]),
        };
        let name = format!("{}+{feature}", self.name).into();
        Ok(Self { name, set: self.set | bit | needed })
    }

    /// The same with one feature less, and without its dependants.
    ///
    /// # Errors
    /// [`UnknownFeature`].
    pub fn without(self, feature: &str) -> Result<Self, UnknownFeature> {
        let (bit, _) = find(feature).ok_or_else(|| UnknownFeature(feature.to_owned()))?;
        let name = format!("{}-{feature}", self.name).into();
        Ok(Self { name, set: close(self.set & !bit) })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The names of its features.
    pub fn features(&self) -> impl Iterator<Item = &'static str> {
        let set = self.set;
        all_features().filter(move |(bit, _)| set & bit != 0).map(|(_, feature)| feature.name)
    }

    /// The names of all features that a template can have.
    pub fn known_features() -> impl Iterator<Item = &'static str> {
        FEATURES.iter().map(|feature| feature.name)
    }

    /// Whether it has a feature.
    #[must_use]
    pub fn has(&self, feature: &str) -> bool {
        find(feature).is_some_and(|(bit, _)| self.set & bit != 0)
    }

    /// Features of this one that `other` lacks.
    pub(crate) fn missing_in(&self, other: &Self) -> Vec<&'static str> {
        Self { name: Cow::Borrowed(""), set: self.set & !other.set }.features().collect()
    }

    /// Bits of a register that stand for its features.
    pub(crate) fn bits(&self, leaf: u32, index: u32, register: Register) -> u32 {
        let here = |f: &Feature| (f.leaf, f.index, f.register) == (leaf, index, register);
        all_features()
            .filter(|(bit, feature)| self.set & bit != 0 && here(feature))
            .fold(0, |bits, (_, feature)| bits | 1 << feature.bit)
    }

    /// The extended state that a guest may use, as XCR0.
    pub(crate) fn xcr0(&self) -> u64 {
        let mut xcr0 = 3;
        if self.has("avx") {
            xcr0 |= 4;
        }
        if self.has("avx512f") {
            xcr0 |= 0xe0;
        }
        xcr0
    }
}

impl std::fmt::Display for CpuTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_places_are_unique() {
        for (index, one) in FEATURES.iter().enumerate() {
            assert!(one.bit < 32);
            for other in &FEATURES[index + 1..] {
                assert_ne!(one.name, other.name);
                let place = |f: &Feature| (f.leaf, f.index, f.register as u8, f.bit);
                assert_ne!(place(one), place(other), "{} and {}", one.name, other.name);
            }
        }
    }

    #[test]
    fn each_level_holds_the_one_below_and_what_its_name_promises() {
        let (v2, v3, v4) = (CpuTemplate::v2(), CpuTemplate::v3(), CpuTemplate::v4());
        assert!(v2.missing_in(&v3).is_empty() && v3.missing_in(&v4).is_empty());
        for name in ["cmpxchg16b", "lahf", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"] {
            assert!(v2.has(name), "{name}");
        }
        for name in ["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"] {
            assert!(v3.has(name), "{name}");
        }
        for name in ["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"] {
            assert!(v4.has(name) && !v3.has(name), "{name}");
        }
        assert_eq!((v2.xcr0(), v3.xcr0(), v4.xcr0()), (3, 7, 0xe7));
        assert_eq!(CpuTemplate::named("x86-64-v3"), Some(v3));
        assert_eq!(CpuTemplate::named("x86-64-v9"), None);
    }

    #[test]
    fn a_feature_brings_and_removes_its_dependencies() {
        let none = CpuTemplate::v4().without("avx").unwrap();
        assert!(!none.has("vaes") && !none.has("avx512bw") && none.has("sha"));
        assert_eq!(none.xcr0(), 3);
        let some = CpuTemplate::v2().with("avx512vnni").unwrap();
        assert!(some.has("avx") && some.has("avx512f") && !some.has("avx2"));
        assert_eq!(some.xcr0(), 0xe7);
        let error = CpuTemplate::v2().with("avx9000").unwrap_err();
        assert!(error.to_string().contains("avx9000"), "{error}");
    }

    #[test]
    fn a_recorded_template_is_the_one_that_was_recorded() {
        for template in [CpuTemplate::v2(), CpuTemplate::v4().without("gfni").unwrap()] {
            let names: Vec<String> = template.features().map(str::to_owned).collect();
            let again = CpuTemplate::recorded(template.name().to_owned(), &names).unwrap();
            assert_eq!(again, template);
        }
        assert!(CpuTemplate::recorded("x".into(), &["avx9000".into()]).is_err());
        // A feature without its prerequisites is dropped.
        let odd = CpuTemplate::recorded("x".into(), &["avx2".into()]).unwrap();
        assert_eq!(odd.features().count(), 0);
    }

    #[test]
    fn bits_and_names_are_two_ways_to_say_the_same() {
        for template in [CpuTemplate::v2(), CpuTemplate::v3(), CpuTemplate::v4()] {
            let again = CpuTemplate::from_cpuid("again", |leaf, index, register| {
                template.bits(leaf, index, register)
            });
            assert_eq!(again.set, template.set);
        }
    }
}
