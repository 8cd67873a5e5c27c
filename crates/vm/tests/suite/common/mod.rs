//! Sample guests for the tests: built once a test run by the ordinary host toolchain.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Whether tests that need KVM can run; prints it when they cannot.
pub(crate) fn kvm() -> bool {
    static USABLE: OnceLock<bool> = OnceLock::new();
    *USABLE.get_or_init(|| {
        let usable = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
        if !usable {
            eprintln!("SKIPPED: /dev/kvm is missing or not accessible; micro-VM tests did not run");
        }
        usable
    })
}

/// The ELF of a sample guest.
pub(crate) fn guest(name: &str) -> Vec<u8> {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let folder = BUILT.get_or_init(|| {
        let guests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guests/vm");
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("guests-vm");
        let status = Command::new(env!("CARGO"))
            .args(["build", "--release", "--quiet"])
            .current_dir(&guests)
            .env("CARGO_TARGET_DIR", &target)
            .env_remove("RUSTFLAGS")
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .status()
            .expect("cargo runs");
        assert!(status.success(), "the sample guests build");
        target.join("release")
    });
    std::fs::read(folder.join(name)).expect("the sample guest was built")
}

/// Input for the `dirty` guest.
pub(crate) fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The ELF of a C sample; `None`, with a message, if there is no C compiler.
pub(crate) fn c_guest(name: &str) -> Option<Vec<u8>> {
    let guests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guests/vm");
    let output =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let status = Command::new(&compiler)
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-static-pie", "-fPIE", "-nostdlib"])
        .args(["-ffreestanding", "-fno-stack-protector", "-Wl,--no-dynamic-linker"])
        .args(["-Wl,-z,max-page-size=4096", "-Wl,-z,noexecstack", "-I"])
        .arg(guests.join("include"))
        .arg(guests.join("c").join(format!("{name}.c")))
        .arg("-o")
        .arg(&output)
        .status();
    let Ok(status) = status else {
        eprintln!("SKIPPED: no C compiler `{compiler}`; the C guest was not tested");
        return None;
    };
    assert!(status.success(), "the C guest compiles");
    let elf = std::fs::read(&output).expect("the C guest was linked");
    let _ = std::fs::remove_file(&output);
    Some(elf)
}
