//! `cargo xtask release`: every package of a release, in `target/release-archives`.
//!
//! Two commands are built: one for glibc, in the archive, the Debian and the RPM package, and a
//! static one for musl, in an archive and in the container image. The Python package is a wheel for
//! each C library. The npm package and the C library are for glibc. Each package has the licences
//! of everything that is linked into it, and those of the command have a list (CycloneDX) of it.
//! With `--try` each is installed in a clean Debian root without Rust or a compiler, and used
//! there. With `--target` the archive, the Debian package, the wheels and the npm package are for
//! arm64, in `target/release-archives-aarch64`, and are tried in an emulated machine.

mod archive;
mod bill;
mod c_library;
mod deb;
mod image;
mod installation;
mod origin;
mod precompiled;
mod rpm;
mod trial;
mod wheel;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::aarch64::{GuestCompiler, compile_guests};
use crate::command::{cargo, output, run};
use crate::host;
use installation::Installation;
use origin::{PACKAGE, time};

pub(crate) use precompiled::{add_to as add_precompiled, into_wheel as precompile_wheel};

const GLIBC: &str = "x86_64-unknown-linux-gnu";
const MUSL: &str = "x86_64-unknown-linux-musl";
const ARM64: &str = crate::aarch64::TARGET;

/// The program or library in a package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// The command for a target.
    Command(&'static str),
    /// The extension of Python for a platform of wheels.
    Wheel(&'static str),
    /// The extension of Node.
    Node,
    CLibrary,
}

/// The kinds of packages.
const KINDS: &[(&str, Content)] = &[
    ("archive", Content::Command(GLIBC)),
    ("deb", Content::Command(GLIBC)),
    ("rpm", Content::Command(GLIBC)),
    ("static-archive", Content::Command(MUSL)),
    ("image", Content::Command(MUSL)),
    ("wheel", Content::Wheel(wheel::MANYLINUX)),
    ("musl-wheel", Content::Wheel(wheel::MUSLLINUX)),
    ("npm", Content::Node),
    ("c-library", Content::CLibrary),
];

/// The kinds for arm64.
const ARM64_KINDS: &[(&str, Content)] = &[
    ("archive", Content::Command(ARM64)),
    ("deb", Content::Command(ARM64)),
    ("wheel", Content::Wheel(wheel::MANYLINUX)),
    ("musl-wheel", Content::Wheel(wheel::MUSLLINUX)),
    ("npm", Content::Node),
];

/// A processor that packages are for. Names of files differ between two, because a release has the
/// files of both.
#[derive(Debug, PartialEq, Eq)]
struct Processor {
    name: &'static str,
    glibc: &'static str,
    musl: &'static str,
    kinds: &'static [(&'static str, Content)],
    /// The folder of the packages in that of cargo.
    folder: &'static str,
    checksums: &'static str,
}

static X86_64_PROCESSOR: Processor = Processor {
    name: "x86_64",
    glibc: GLIBC,
    musl: MUSL,
    kinds: KINDS,
    folder: "release-archives",
    checksums: "SHA256SUMS-x86_64",
};
static ARM64_PROCESSOR: Processor = Processor {
    name: "aarch64",
    glibc: ARM64,
    musl: "aarch64-unknown-linux-musl",
    kinds: ARM64_KINDS,
    folder: "release-archives-aarch64",
    checksums: "SHA256SUMS-aarch64",
};

const USAGE: &str = "usage: cargo xtask release [--profile PROFILE | --command FILE] [--target TARGET] \
     [--only KIND,…] [--try]";

/// What to build.
struct Options {
    profile: String,
    /// A command that was built before.
    command: Option<PathBuf>,
    processor: &'static Processor,
    kinds: Vec<(&'static str, Content)>,
    tries: bool,
}

impl Options {
    fn parse(arguments: &[String]) -> Result<Self> {
        let mut options = Self {
            profile: "dist".to_owned(),
            command: None,
            processor: &X86_64_PROCESSOR,
            kinds: Vec::new(),
            tries: false,
        };
        let mut only: Option<Vec<&str>> = None;
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--try" => options.tries = true,
                "--command" => options.command = Some(arguments.next().context(USAGE)?.into()),
                "--profile" => options.profile = arguments.next().context(USAGE)?.clone(),
                "--target" => {
                    options.processor = match arguments.next().context(USAGE)?.as_str() {
                        ARM64 => &ARM64_PROCESSOR,
                        GLIBC => &X86_64_PROCESSOR,
                        other => bail!(
                            "no packages for {other:?}; there are some for {GLIBC} and {ARM64}"
                        ),
                    }
                }
                "--only" => only = Some(arguments.next().context(USAGE)?.split(',').collect()),
                other => bail!("unknown argument {other:?}; {USAGE}"),
            }
        }
        let kinds = options.processor.kinds;
        let chosen = |kind: &str| only.as_ref().is_none_or(|only| only.contains(&kind));
        options.kinds.extend(kinds.iter().filter(|(kind, _)| chosen(kind)));
        let known: Vec<&str> = kinds.iter().map(|(kind, _)| *kind).collect();
        if let Some(unknown) = only.iter().flatten().find(|kind| !known.contains(kind)) {
            bail!("there is no package {unknown}; the kinds are {}", known.join(", "));
        }
        let has = |kind| options.kinds.iter().any(|(known, _)| *known == kind);
        ensure!(
            has("wheel") || !has("musl-wheel"),
            "the wheel for musl gets the compiled guests of the one for glibc: --only wheel,musl-wheel"
        );
        Ok(options)
    }
}

/// A package that was built.
struct Package {
    kind: &'static str,
    path: PathBuf,
}

/// Builds the packages, and tries them if wanted.
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    let options = Options::parse(arguments)?;
    host::c_compiler()?;
    let processor = options.processor;
    let folder = host::target_folder().join(processor.folder);
    if folder.exists() {
        std::fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot empty {}", folder.display()))?;
    }
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot create {}", folder.display()))?;
    let mut packages = Vec::new();
    for target in [GLIBC, MUSL, ARM64] {
        let kinds = options.kinds.iter().filter(|(_, of)| *of == Content::Command(target));
        let kinds: Vec<&'static str> = kinds.map(|(kind, _)| *kind).collect();
        if kinds.is_empty() {
            continue;
        }
        let command = match &options.command {
            Some(command) => command.clone(),
            None => build(target, &options.profile)?,
        };
        let scratch = folder.join("scratch");
        let installed = Installation::assemble(&scratch, &command, target)?;
        for kind in kinds {
            let path = match kind {
                "deb" => deb::build(&installed, &folder)?,
                "rpm" => rpm::build(&installed, &folder)?,
                "image" => image::build(&installed, &folder)?,
                _ => archive::build(&installed, &folder, target)?,
            };
            packages.push(Package { kind, path });
        }
        let bill = folder.join(bill::name_for(target));
        std::fs::copy(installed.documents().join(bill::NAME), bill)?;
        std::fs::remove_dir_all(&scratch)
            .with_context(|| format!("cannot remove {}", scratch.display()))?;
    }
    for (kind, content) in &options.kinds {
        let path = match content {
            Content::Command(_) => continue,
            Content::Wheel(platform) => {
                wheel::build(platform, processor, &options.profile, &folder)?
            }
            Content::Node => npm(processor.glibc, &options.profile, &folder)?,
            Content::CLibrary => c_library::build(&options.profile, &folder)?,
        };
        packages.push(Package { kind, path });
    }
    write_checksums(&folder, processor.checksums)?;
    let tried = match (options.tries, processor == &ARM64_PROCESSOR) {
        (true, false) => trial::all(&packages)?,
        (true, true) => trial::all_of_arm64(&packages)?,
        (false, _) => Vec::new(),
    };
    println!("| package | MiB | tried by |\n|---|---|---|");
    for (index, Package { path, .. }) in packages.iter().enumerate() {
        let mib = size(path)? as f64 / f64::from(1 << 20);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        println!("| {name} | {mib:.1} | {} |", tried.get(index).map_or("", String::as_str));
    }
    Ok(())
}

/// Builds the command for a target.
fn build(target: &str, profile: &str) -> Result<PathBuf> {
    if target == MUSL && crate::command::find("musl-gcc").is_none() {
        host::apt_install(&["musl-tools"])?;
    }
    compile(&["--package", PACKAGE, "--bin", "afresh"], &[], target, profile)?;
    Ok(artifacts(target, profile).join("afresh"))
}

/// Builds the npm package.
fn npm(target: &str, profile: &str, to: &Path) -> Result<PathBuf> {
    compile(&["--package", "afresh-node", "--lib"], &[], target, profile)?;
    let licences = bill::licences_of_library("afresh-node", target)?;
    let native = artifacts(target, profile).join("libafresh_node.so");
    if target != ARM64 {
        return crate::node::pack(&native, "x64", Some(&licences), to, crate::node::compile);
    }
    // The tool of this host does not know the library.
    run(Command::new(installation::binutil("strip", target)).arg("--strip-unneeded").arg(&native))?;
    let compiler = GuestCompiler { interpreter: &["node", "-e"], program: crate::node::COMPILE };
    let compile = |package: &Path, folder: &Path| compile_guests(package, &compiler, folder);
    crate::node::pack(&native, "arm64", Some(&licences), to, compile)
}

/// Compiles one program or library for a target, with further `arguments` of rustc for it alone.
fn compile(what: &[&str], arguments: &[&str], target: &str, profile: &str) -> Result<()> {
    if target == ARM64 {
        crate::aarch64::compiler()?;
    }
    host::rust_target(target)?;
    let mut build = cargo();
    let (variable, linker_of_arm64) = crate::aarch64::LINKER;
    build.env(variable, linker_of_arm64);
    build.current_dir(host::repository()).args(["rustc", "--locked"]).args(what);
    build.args(["--target", target, "--profile", profile, "--"]).args(arguments);
    build.args(linker(target)?);
    run(build.env("RUSTFLAGS", flags()?))
}

/// Arguments for the linker that comes with Rust, which folds equal functions into one. Generic
/// code has many. Neither this code nor that of a dependency gives a meaning to the address of a
/// function.
fn linker(target: &str) -> Result<Vec<String>> {
    let sysroot = output(Command::new("rustc").args(["--print", "sysroot"]))?;
    let folder = Path::new(&sysroot).join("lib/rustlib").join(GLIBC).join("bin/gcc-ld");
    ensure!(
        folder.join("ld.lld").is_file(),
        "{} has no linker: install a toolchain of rustup for {GLIBC}",
        folder.display()
    );
    let mut arguments = vec![format!("-B{}", folder.display())];
    arguments.extend(["-fuse-ld=lld", "-Wl,--icf=all"].map(str::to_owned));
    if target == MUSL {
        // A tenth of the space. Loaders of glibc before 2.36 do not know the form; a static program
        // brings its own.
        arguments.push("-Wl,-z,pack-relative-relocs".to_owned());
    }
    Ok(arguments.iter().map(|argument| format!("-Clink-arg={argument}")).collect())
}

/// The folder of programs and libraries for a target.
fn artifacts(target: &str, profile: &str) -> PathBuf {
    let folder = if profile == "dev" { "debug" } else { profile };
    host::target_folder().join(target).join(folder)
}

/// Flags that keep the paths of the sources, of the package cache and of generated sources out of a
/// program, so that every checkout and every target folder give the same bytes. The last prefix
/// that fits replaces a path.
fn flags() -> Result<String> {
    let home = output(Command::new("sh").args(["-c", "echo \"${CARGO_HOME:-$HOME/.cargo}\""]))?;
    let prefixes = [
        (host::repository().display().to_string(), "/afresh"),
        (home, "/cargo"),
        (host::target_folder().display().to_string(), "/afresh/target"),
    ];
    let flags = prefixes.map(|(from, to)| format!("--remap-path-prefix={from}={to}"));
    Ok(flags.join(" "))
}

/// A reproducible tar of these entries of a folder: sorted, owned by root, all of one time.
fn pack(folder: &Path, entries: &[&str], archive: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--format=gnu", "--owner=0", "--group=0", "--numeric-owner"]);
    tar.args(["--mode=u=rwX,go=rX", &format!("--mtime=@{}", time()?)]);
    tar.arg("-cf").arg(archive).arg("-C").arg(folder).args(entries);
    run(&mut tar)
}

/// Compresses a file in place, without its name and time, and returns the new path.
fn compress(file: &Path) -> Result<PathBuf> {
    run(Command::new("gzip").args(["-n", "-9", "-f"]).arg(file))?;
    let mut path = file.as_os_str().to_owned();
    path.push(".gz");
    Ok(path.into())
}

/// The SHA-256 digest of a file.
fn digest(file: &Path) -> Result<String> {
    let line = output(Command::new("sha256sum").arg(file))?;
    Ok(line.split(' ').next().unwrap_or_default().trim_start_matches('\\').to_owned())
}

/// Writes the file `to` with the digests of all files in the folder.
fn write_checksums(folder: &Path, to: &str) -> Result<()> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            names.push(entry.file_name());
        }
    }
    names.sort();
    let sums = output(Command::new("sha256sum").current_dir(folder).args(names))?;
    std::fs::write(folder.join(to), sums + "\n").with_context(|| format!("cannot write {to}"))
}

/// Bytes of a file, or of all files in a folder.
fn size(path: &Path) -> Result<u64> {
    if path.is_file() {
        return Ok(path.metadata()?.len());
    }
    std::fs::read_dir(path)?.map(|entry| size(&entry?.path())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_kind_or_argument_is_refused() {
        let parse = |arguments: &[&str]| {
            let arguments: Vec<String> = arguments.iter().map(|text| (*text).to_owned()).collect();
            Options::parse(&arguments)
        };
        let only = parse(&["--only", "deb,image", "--try"]).unwrap();
        let expected = [("deb", Content::Command(GLIBC)), ("image", Content::Command(MUSL))];
        assert_eq!(only.kinds, expected);
        assert!(only.tries);
        assert!(parse(&["--only", "msi"]).err().unwrap().to_string().contains("deb"));
        assert!(parse(&["--only", "musl-wheel"]).err().unwrap().to_string().contains("wheel,musl"));
        assert!(parse(&["--only", "musl-wheel,wheel"]).is_ok());
        let arm64 = parse(&["--only", "archive", "--target", ARM64]).unwrap();
        assert_eq!(arm64.kinds, [("archive", Content::Command(ARM64))]);
        assert_eq!(arm64.processor, &ARM64_PROCESSOR);
        // The target may come last, and has fewer kinds.
        let npm = parse(&["--only", "npm", "--target", ARM64]).unwrap();
        assert_eq!((npm.kinds.len(), npm.processor.glibc), (1, ARM64));
        assert!(parse(&["--only", "rpm", "--target", ARM64]).is_err());
        assert_eq!(parse(&["--target", GLIBC]).unwrap().processor, &X86_64_PROCESSOR);
        assert!(parse(&["--target", "riscv64gc-unknown-linux-gnu"]).is_err());
        assert!(parse(&["--olny"]).is_err() && parse(&["--profile"]).is_err());
    }
}
