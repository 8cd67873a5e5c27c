//! Requirements on the host, and how to get them: Rust targets by rustup, compilers by apt.
//!
//! No step asks a question. If installation is impossible (no root and no sudo, no apt), the error
//! names the packages to install by hand.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{cargo, find, output, run, succeeds};

/// Makes sure that the toolchain in use can build for `target`.
pub(crate) fn rust_target(target: &str) -> Result<()> {
    let sysroot = output(Command::new("rustc").args(["--print", "sysroot"]))?;
    if Path::new(&sysroot).join("lib/rustlib").join(target).join("lib").is_dir() {
        return Ok(());
    }
    if find("rustup").is_none() {
        bail!(
            "this Rust lacks the target {target}, and there is no rustup to add it; install rustup, or that target, first"
        );
    }
    run(Command::new("rustup").args(["target", "add", target]))
}

/// Makes sure that the toolchain in use has the component `name`, which provides `cargo COMMAND`.
pub(crate) fn rust_component(name: &str, command: &str) -> Result<()> {
    if succeeds(cargo().args([command, "--version"])) {
        return Ok(());
    }
    if find("rustup").is_none() {
        bail!(
            "`cargo {command}` is missing, and there is no rustup to add it; install {name} first"
        );
    }
    run(Command::new("rustup").args(["component", "add", name]))
}

/// Makes sure that the host has a C compiler.
pub(crate) fn c_compiler() -> Result<()> {
    if std::env::var_os("CC").is_some() || find("cc").is_some() {
        return Ok(());
    }
    apt_install(&["gcc", "libc6-dev"]).context("a C compiler, `cc`, is needed")
}

/// Makes sure that the host has a C++ compiler.
pub(crate) fn cxx_compiler() -> Result<()> {
    if std::env::var_os("CXX").is_some() || find("c++").is_some() {
        return Ok(());
    }
    apt_install(&["g++"]).context("a C++ compiler, `c++`, is needed")
}

/// A C compiler and C library headers for `wasm32-wasip1`.
#[derive(Debug)]
pub(crate) enum WasiCompiler {
    /// A wasi-sdk that the user points at with `WASI_SDK`.
    Sdk,
    /// The distribution's clang with the headers in this folder.
    Clang { headers: PathBuf },
}

impl WasiCompiler {
    /// Finds one, installing clang and wasi-libc when they are missing.
    pub(crate) fn find_or_install() -> Result<Self> {
        if std::env::var_os("WASI_SDK").is_some() {
            return Ok(Self::Sdk);
        }
        let mut missing = Vec::new();
        if !clang_knows_wasm() {
            missing.push("clang");
        }
        if wasi_headers().is_none() {
            missing.push("wasi-libc");
        }
        if find("ar").is_none() {
            missing.push("binutils");
        }
        if !missing.is_empty() {
            apt_install(&missing).context(
                "the JavaScript guest needs clang and the WASI C library; \
                 install them, or set WASI_SDK to the folder of a wasi-sdk",
            )?;
        }
        let headers =
            wasi_headers().context("wasi-libc is installed, but its headers were not found")?;
        if !clang_knows_wasm() {
            bail!("the clang in PATH cannot compile for wasm32-wasi; put one that can before it");
        }
        Ok(Self::Clang { headers })
    }

    /// Passes it to a cargo command, in the variables that the crates `cc` and `rquickjs-sys` read.
    pub(crate) fn configure(&self, cargo: &mut Command) {
        match self {
            Self::Sdk => {}
            Self::Clang { headers } => {
                // The host's own C headers must not be found.
                let flags = format!("-nostdlibinc -isystem {}", headers.display());
                cargo
                    .env("RQUICKJS_SYS_NO_WASI_SDK", "1")
                    .env("CC_wasm32_wasip1", "clang")
                    .env("AR_wasm32_wasip1", "ar")
                    .env("CFLAGS_wasm32_wasip1", flags);
            }
        }
    }
}

fn clang_knows_wasm() -> bool {
    let args = ["--target=wasm32-wasi", "-x", "c", "-c", "-o", "/dev/null", "/dev/null"];
    succeeds(Command::new("clang").args(args))
}

fn wasi_headers() -> Option<PathBuf> {
    ["/usr/include/wasm32-wasip1", "/usr/include/wasm32-wasi"]
        .into_iter()
        .map(PathBuf::from)
        .find(|folder| folder.join("stdlib.h").is_file())
}

/// Installs Debian packages without a prompt, as root or through a sudo without a password.
pub(crate) fn apt_install(packages: &[&str]) -> Result<()> {
    let names = packages.join(" ");
    if find("apt-get").is_none() {
        bail!("missing on this host, which has no apt-get: {names}");
    }
    let root = output(Command::new("id").arg("-u"))? == "0";
    if !root && !succeeds(Command::new("sudo").args(["-n", "true"])) {
        bail!(
            "missing: {names}. This user is not root and cannot use sudo without a password; run: sudo apt-get install -y {names}"
        );
    }
    let apt = |arguments: &[&str]| {
        let mut command = if root { Command::new("env") } else { Command::new("sudo") };
        if !root {
            command.args(["-n", "env"]);
        }
        command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "-q"]).args(arguments);
        command
    };
    let install = [&["install", "-y", "--no-install-recommends"], packages].concat();
    // The package lists may be absent (a fresh container) or too old to install from.
    let listed = packages.iter().all(|name| {
        output(Command::new("apt-cache").args(["show", "--no-all-versions", name]))
            .is_ok_and(|shown| !shown.is_empty())
    });
    if listed && run(&mut apt(&install)).is_ok() {
        return Ok(());
    }
    run(&mut apt(&["update"]))?;
    run(&mut apt(&install))
}

/// The target folder of this repository's main workspace.
pub(crate) fn target_folder() -> PathBuf {
    let root = repository();
    // A relative folder is relative to where cargo was started, which is not known here; the root
    // is where cargo xtask is meant to be run.
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir))
}

/// The root of this repository.
pub(crate) fn repository() -> PathBuf {
    // Cargo sets the path of a running package, also after the repository moved.
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest.parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}
