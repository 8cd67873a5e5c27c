//! Which guest build a snapshot belongs to.
//!
//! A snapshot's memory is meaningful only to the code that wrote it: the same module, compiled by
//! the same engine for a CPU with at least the same features. [`GuestBuild::accept`] names the
//! first thing that differs.

use serde::{Deserialize, Serialize};

use crate::GuestMismatch;

/// The build of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestBuild {
    /// `wasm`, `vm`, `linux`, `arena`, or a word of the embedder.
    pub kind: String,
    /// Hash of the module, kernel or layout that gives the memory its meaning.
    pub module: String,
    /// Name and version of the engine.
    pub engine: String,
    /// CPU features the guest may have been compiled for, or detected and remembered.
    pub cpu: Vec<String>,
}

impl GuestBuild {
    /// Checks that memory of this build, that of a snapshot, can run as `here`, whose `cpu` lists
    /// the features of the host.
    ///
    /// # Errors
    /// The first difference, by name. Additional CPU features of the host are not a difference.
    pub fn accept(&self, here: &GuestBuild) -> Result<(), GuestMismatch> {
        if self.kind != here.kind {
            return Err(GuestMismatch::Kind {
                snapshot: self.kind.clone(),
                here: here.kind.clone(),
            });
        }
        if self.module != here.module {
            return Err(GuestMismatch::Module {
                snapshot: self.module.clone(),
                here: here.module.clone(),
            });
        }
        if self.engine != here.engine {
            return Err(GuestMismatch::Engine {
                snapshot: self.engine.clone(),
                here: here.engine.clone(),
            });
        }
        let missing: Vec<_> = self.cpu.iter().filter(|f| !here.cpu.contains(f)).cloned().collect();
        if missing.is_empty() { Ok(()) } else { Err(GuestMismatch::Cpu(missing)) }
    }
}

/// The features of this CPU that a compiler may use, sorted.
///
/// On arm64 the first is the architecture: a list without features of x86-64 fits every processor
/// otherwise.
#[must_use]
pub fn host_cpu_features() -> Vec<String> {
    #[allow(unused_mut, reason = "other architectures list none")]
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! probe {
            ($($name:tt)*) => {
                $(if std::arch::is_x86_feature_detected!($name) { found.push($name.to_owned()); })*
            };
        }
        probe!("avx" "avx2" "avx512bw" "avx512dq" "avx512f" "avx512vbmi" "avx512vl" "bmi1" "bmi2"
            "fma" "lzcnt" "popcnt" "sse3" "sse4.1" "sse4.2" "ssse3");
    }
    #[cfg(target_arch = "aarch64")]
    {
        found.push("aarch64".to_owned());
        macro_rules! probe {
            ($($name:tt)*) => {
                $(if std::arch::is_aarch64_feature_detected!($name) { found.push($name.to_owned()); })*
            };
        }
        probe!("aes" "bti" "crc" "dotprod" "fhm" "fp16" "i8mm" "lse" "lse2" "paca" "rcpc" "rdm" "sha2" "sha3"
            "sve" "sve2");
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build() -> GuestBuild {
        GuestBuild {
            kind: "wasm".into(),
            module: "m1".into(),
            engine: "wasmtime 48.0.1".into(),
            cpu: vec!["avx2".into()],
        }
    }

    #[test]
    fn each_difference_is_refused_by_name() {
        let snapshot = build();
        assert_eq!(snapshot.accept(&build()), Ok(()));
        type Edit = fn(&mut GuestBuild);
        let edits: [(Edit, &str); 4] = [
            (|b| b.kind = "vm".into(), "vm guest"),
            (|b| b.module = "m2".into(), "module m1"),
            (|b| b.engine = "wasmtime 49".into(), "wasmtime 49"),
            (|b| b.cpu.clear(), "avx2"),
        ];
        for (edit, word) in edits {
            let mut here = build();
            edit(&mut here);
            let message = snapshot.accept(&here).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn a_cpu_that_can_do_more_is_accepted() {
        let mut here = build();
        here.cpu.push("avx512f".into());
        assert_eq!(build().accept(&here), Ok(()));
    }
}
