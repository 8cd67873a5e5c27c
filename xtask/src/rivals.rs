//! `rivals`: installs the programs that benchmarks compare afresh with, by name and version, into
//! `target/rivals`. A rival that cannot be installed is reported with the reason, and the others
//! are installed.
//!
//! Neither the build nor `test` needs them. `afresh-bench` leaves out the rows of those that are
//! missing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};

use crate::command::{cargo, find, output, run};
use crate::{host, tools};

/// A rival, and how it is installed.
struct Rival {
    name: &'static str,
    install: fn(&Path) -> Result<String>,
}

const RIVALS: [Rival; 4] = [
    Rival { name: "gvisor", install: gvisor },
    Rival { name: "eryx", install: eryx },
    Rival { name: "fuzz", install: fuzz },
    Rival { name: "wago", install: wago },
];

/// The release of Debian with a `runsc` that has the platform systrap, and with a Python for which
/// eryx has a wheel.
const RELEASE: &str = "trixie";
const PACKAGES: &str = "runsc,python3.13-minimal,libpython3.13-stdlib";
const ERYX: &str = "0.11.0";
/// Crates with the sources of libpng and zlib.
const LIBPNG: (&str, &str) = ("libpng-sys", "1.1.11");
const ZLIB: (&str, &str) = ("libz-sys", "1.1.33");
/// A checkout of wago, which replaces its module.
const WAGO_SOURCE: &str = "AFRESH_WAGO_SOURCE";

/// Runs a Python of the Debian root, with the packages beside this script.
const ERYX_PYTHON: &str = r#"#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
root=$here/../debian
export PYTHONHOME="$root/usr" PYTHONPATH="$here/packages"
exec "$root/usr/lib64/ld-linux-x86-64.so.2" --library-path "$root/usr/lib/x86_64-linux-gnu" \
    "$root/usr/bin/python3.13" "$@"
"#;

pub(crate) fn main(arguments: &[String]) -> Result<ExitCode> {
    let chosen = chosen(arguments)?;
    let folder = host::target_folder().join("rivals");
    fs::create_dir_all(&folder)?;
    for rival in chosen {
        match (rival.install)(&folder) {
            Ok(version) => println!("{}: {version}", rival.name),
            Err(error) => println!("SKIPPED: {}: {error:#}", rival.name),
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The rivals that `--only NAME` names, or all.
fn chosen(arguments: &[String]) -> Result<Vec<&'static Rival>> {
    let mut chosen = Vec::new();
    for pair in arguments.chunks(2) {
        let [option, name] = pair else { bail!("{} needs a name", pair[0]) };
        ensure!(option == "--only", "unknown: {option}");
        let names = RIVALS.each_ref().map(|rival| rival.name).join(", ");
        let rival = RIVALS.iter().find(|rival| rival.name == name);
        chosen.push(rival.with_context(|| format!("no rival {name}; there are {names}"))?);
    }
    Ok(if chosen.is_empty() { RIVALS.iter().collect() } else { chosen })
}

/// The files of some packages of Debian, which are not installed on the host.
fn debian(folder: &Path) -> Result<PathBuf> {
    let root = folder.join("debian");
    if root.is_dir() {
        return Ok(root);
    }
    if find("mmdebstrap").is_none() {
        host::apt_install(&["mmdebstrap"])?;
    }
    let fresh = folder.join("debian.new");
    if fresh.is_dir() {
        fs::remove_dir_all(&fresh)?;
    }
    let mut debian = Command::new("mmdebstrap");
    debian.args(["--quiet", "--variant=extract"]).arg(format!("--include={PACKAGES}"));
    run(debian.arg(RELEASE).arg(&fresh))?;
    fs::rename(&fresh, &root).context("cannot rename the Debian root")?;
    Ok(root)
}

fn gvisor(folder: &Path) -> Result<String> {
    let runsc = debian(folder)?.join("usr/bin/runsc");
    let said = output(Command::new(runsc).arg("--version"))?;
    Ok(said.lines().next().unwrap_or_default().to_owned())
}

fn eryx(folder: &Path) -> Result<String> {
    debian(folder)?;
    let folder = folder.join("eryx");
    let (python, packages) = (folder.join("python"), folder.join("packages"));
    let package = format!("pyeryx=={ERYX}");
    if !packages.join(format!("pyeryx-{ERYX}.dist-info")).is_dir() {
        fs::create_dir_all(&folder)?;
        let mut pip = Command::new("sh");
        pip.args(["-c", tools::PIP]).arg(folder.join("pip")).arg("--no-deps");
        pip.args(["--only-binary=:all:", "--python-version=3.13", "--upgrade", "--target"]);
        run(pip.arg(&packages).arg(&package))?;
        // Another version has made it.
        let _ = fs::remove_file(folder.join("factory.bin"));
    }
    fs::write(&python, ERYX_PYTHON)?;
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755))?;
    let factory = folder.join("factory.bin");
    let program = |code: &str| {
        let mut program = Command::new(&python);
        program.args(["-c", &format!("import eryx, sys; {code}")]).arg(&factory);
        program
    };
    if !factory.is_file() {
        run(&mut program("eryx.SandboxFactory(cache=True).save(sys.argv[1])"))?;
    }
    let said = output(&mut program(
        "sandbox = eryx.SandboxFactory.load(sys.argv[1]).create_sandbox(); \
         print(sandbox.execute('print(6 * 7)').stdout)",
    ))?;
    ensure!(said.contains("42"), "eryx answers {said:?} to 6 * 7");
    Ok(package)
}

/// The program of `rivals/libafl` and its targets, some of them compiled by AFL++.
fn fuzz(folder: &Path) -> Result<String> {
    if find("afl-clang-fast").is_none()
        && let Err(error) = host::apt_install(&["afl++"])
    {
        println!("SKIPPED: afl++: {error:#}");
    }
    let folder = folder.join("fuzz");
    let manifest = host::repository().join("rivals/libafl/Cargo.toml");
    let mut build = cargo();
    build.args(["build", "--release", "--locked", "--manifest-path"]).arg(manifest);
    run(build.env("CARGO_TARGET_DIR", &folder))?;
    let program = folder.join("release/afresh-rival-libafl");
    let (libpng, zlib) = (crate_sources(LIBPNG)?, crate_sources(ZLIB)?);
    let mut png = Command::new(program);
    run(png.arg("build-png").arg(libpng.join("vendor")).arg(zlib.join("src/zlib")))?;
    let mut query = Command::new("dpkg-query");
    let said = output(query.args(["-W", "-f", "${Package} ${Version}", "afl++"]));
    let aflpp = said.unwrap_or_else(|_| "no AFL++".to_owned());
    Ok(format!("LibAFL, {} {}, {aflpp}", LIBPNG.0, LIBPNG.1))
}

/// The sources of a crate that cargo has fetched and checked. It builds nothing.
pub(crate) fn crate_sources((name, version): (&str, &str)) -> Result<PathBuf> {
    let mut fetch = cargo();
    fetch.args(["info", "--quiet", &format!("{name}@{version}")]).current_dir(host::repository());
    output(&mut fetch).with_context(|| format!("cannot fetch the crate {name} {version}"))?;
    let home = match std::env::var_os("CARGO_HOME") {
        Some(home) => PathBuf::from(home),
        None => PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?).join(".cargo"),
    };
    let registries = home.join("registry/src");
    let listed = fs::read_dir(&registries)
        .with_context(|| format!("cannot read {}", registries.display()))?;
    listed
        .flatten()
        .map(|entry| entry.path().join(format!("{name}-{version}")))
        .find(|path| path.is_dir())
        .with_context(|| format!("{} has no sources of {name} {version}", registries.display()))
}

/// The program of `rivals/wago`. The module proxy has no version of its module, so a checkout in
/// `$AFRESH_WAGO_SOURCE` may replace it.
fn wago(folder: &Path) -> Result<String> {
    if find("go").is_none() {
        bail!("there is no Go to build it with");
    }
    let folder = folder.join("wago");
    fs::create_dir_all(&folder)?;
    let sources = host::repository().join("rivals/wago");
    let workspace = folder.join("go.work");
    let mut build = Command::new("go");
    build.args(["build", "-o"]).arg(folder.join("wago")).arg(".").current_dir(&sources);
    match std::env::var_os(WAGO_SOURCE) {
        Some(source) => {
            let used = [sources, PathBuf::from(source)].map(|path| format!("use {:?}\n", path));
            fs::write(&workspace, format!("go 1.22\n{}", used.concat()))?;
            build.env("GOWORK", &workspace);
        }
        None => {
            build.env("GOWORK", "off").env("GOFLAGS", "-mod=mod -modcacherw");
        }
    }
    output(&mut build).with_context(|| {
        format!("the module proxy has no wago; ${WAGO_SOURCE} may name a checkout")
    })?;
    Ok("built".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(arguments: &[&str]) -> Result<Vec<&'static str>> {
        let arguments: Vec<String> = arguments.iter().map(|&text| text.to_owned()).collect();
        Ok(chosen(&arguments)?.iter().map(|rival| rival.name).collect())
    }

    #[test]
    fn all_rivals_are_installed_unless_some_are_named() {
        assert_eq!(names(&[]).unwrap(), ["gvisor", "eryx", "fuzz", "wago"]);
        assert_eq!(names(&["--only", "fuzz", "--only", "eryx"]).unwrap(), ["fuzz", "eryx"]);
        let error = names(&["--only", "docker"]).unwrap_err().to_string();
        assert!(error.contains("there are gvisor, eryx"), "{error}");
        assert!(names(&["--only"]).is_err() && names(&["--all", "fuzz"]).is_err());
    }
}
