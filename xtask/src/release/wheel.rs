//! Wheels of the Python package, by maturin with zig as the compiler and linker for C.
//!
//! Zig brings the old versions of glibc and musl that the platform tags promise. `auditwheel` then
//! compares each wheel for glibc with its tag. The guests that the package has are then compiled
//! with the wheel itself, and added.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::installation::write;
use super::{ARM64, Processor, bill, precompiled, time};
use crate::aarch64::{GuestCompiler, compile_guests};
use crate::command::{output, run};
use crate::{host, python};

/// The platform of the wheel for glibc, which Debian 10, Ubuntu 20.04 and RHEL 8 have.
pub(super) const MANYLINUX: &str = "manylinux_2_28";
/// The platform of the wheel for musl, which Alpine 3.13 has.
pub(super) const MUSLLINUX: &str = "musllinux_1_2";

const TOOLS: [&str; 4] =
    ["maturin==1.16.0", "ziglang==0.17.1", "auditwheel==6.8.2", "wheel==0.45.1"];

/// The compiler of a wheel for arm64.
const ARM64_COMPILER: GuestCompiler =
    GuestCompiler { interpreter: &["python3", "-B", "-c"], program: precompiled::COMPILE };

/// Builds the wheel for a platform.
pub(super) fn build(
    platform: &str,
    processor: &Processor,
    profile: &str,
    to: &Path,
) -> Result<PathBuf> {
    let target = if platform == MUSLLINUX { processor.musl } else { processor.glibc };
    host::rust_target(target)?;
    stage(target)?;
    let base = python::interpreter().context("a wheel takes a python3 of 3.10 or newer")?;
    let inside = python::tools(&base, "release", &TOOLS)?;
    let mut build = Command::new(&inside);
    build.current_dir(python::package()).args(["-m", "maturin", "build", "--locked", "--zig"]);
    build.args(["--profile", profile, "--target", target, "--compatibility", platform]);
    build.env("SOURCE_DATE_EPOCH", time()?).env("RUSTFLAGS", super::flags()?);
    // maturin asks the `python3` of the path for zig otherwise, which need not be this one.
    build.env("CARGO_ZIGBUILD_PYTHON_PATH", &inside);
    run(build.arg("--out").arg(to))?;
    let wheel = to.join(name(env!("CARGO_PKG_VERSION"), platform, processor.name));
    if platform == MANYLINUX {
        if target == ARM64 {
            let compile =
                |package: &Path, folder: &Path| compile_guests(package, &ARM64_COMPILER, folder);
            precompiled::into_wheel_by(&inside, &wheel, compile)?;
        } else {
            precompiled::into_wheel(&inside, &wheel)?;
        }
    } else {
        precompiled::into_other_wheel(&inside, &wheel)?;
    }
    if platform == MUSLLINUX {
        let library = super::artifacts(target, profile).join("libafresh_native.so");
        // auditwheel asks the host's musl for its version, and a host with glibc has none.
        let shown = output(Command::new("readelf").arg("-d").arg(library))?;
        ensure!(needs_musl_alone(&shown), "{} needs more than musl:\n{shown}", wheel.display());
        return Ok(wheel);
    }
    let shown = output(Command::new(&inside).args(["-m", "auditwheel", "show"]).arg(&wheel))?;
    ensure!(
        is_consistent(&shown, platform),
        "{} does not keep what {platform} promises:\n{shown}",
        wheel.display()
    );
    Ok(wheel)
}

/// Puts the guest, and the licences of all that the wheel contains, into the folder of the package.
fn stage(target: &str) -> Result<()> {
    python::stage_guest()?;
    let licences = bill::licences_of_library("afresh-python", target)?;
    write(&python::package().join("python/afresh/guests/THIRD-PARTY-LICENSES"), licences.as_bytes())
}

/// Whether readelf names no library but musl's.
fn needs_musl_alone(shown: &str) -> bool {
    let mut needed = shown.lines().filter(|line| line.contains("(NEEDED)"));
    needed.all(|line| line.ends_with("[libc.so]"))
}

fn name(version: &str, platform: &str, processor: &str) -> String {
    format!("afresh-{version}-cp310-abi3-{platform}_{processor}.whl")
}

/// Whether auditwheel reports that the wheel keeps the promises of its platform. It names the
/// oldest platform, which may be older than this one.
fn is_consistent(shown: &str, platform: &str) -> bool {
    let words = shown.split_whitespace().collect::<Vec<_>>().join(" ");
    let version = |platform: &str| -> Option<(String, u32, u32)> {
        let mut parts = platform.split('_');
        let name = parts.next()?.to_owned();
        Some((name, parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
    };
    let reported = words.split_once("following platform tag: \"").map(|(_, after)| after);
    let (Some(reported), Some(promised)) = (reported.and_then(version), version(platform)) else {
        return false;
    };
    reported.0 == promised.0 && (reported.1, reported.2) <= (promised.1, promised.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheel_that_needs_a_newer_system_than_its_tag_says_is_refused() {
        let shown = |tag: &str| {
            format!(
                "afresh.whl is consistent with the\nfollowing platform tag: \"{tag}_x86_64\".\n\nThe"
            )
        };
        assert!(is_consistent(&shown("manylinux_2_28"), MANYLINUX));
        assert!(is_consistent(&shown("manylinux_2_17"), MANYLINUX));
        assert!(!is_consistent(&shown("manylinux_2_34"), MANYLINUX));
        assert!(!is_consistent(&shown("manylinux_2_17"), MUSLLINUX));
        assert!(is_consistent(&shown("musllinux_1_2"), MUSLLINUX));
        assert!(!is_consistent(&shown("linux"), MANYLINUX));
        assert!(!is_consistent("", MANYLINUX));
        let needed = |library| format!("Tag\n 0x1 (NEEDED)  Shared library: [{library}]\n");
        assert!(needs_musl_alone(&needed("libc.so")));
        assert!(!needs_musl_alone(&needed("libgcc_s.so.1")));
    }
}
