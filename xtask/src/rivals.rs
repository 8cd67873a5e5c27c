//! `rivals`: installs the programs that benchmarks compare afresh with into `target/rivals`. The
//! crates and the package of PyPI have fixed versions; Debian's packages have the version of the
//! release. The file `version` of a rival has the installed version for the report. A rival that
//! cannot be installed is reported with the reason, and the others are installed.
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
    let is_complete = install(&chosen, &folder)?;
    // Without `--only`, a host that cannot have some rivals is no failure.
    Ok(if is_complete || arguments.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Installs rivals and reports each. The result is whether all of them are installed.
fn install(rivals: &[&Rival], folder: &Path) -> Result<bool> {
    let mut is_complete = true;
    for rival in rivals {
        match (rival.install)(folder) {
            Ok(version) => {
                println!("{}: {version}", rival.name);
                let folder = folder.join(rival.name);
                fs::create_dir_all(&folder)?;
                fs::write(folder.join("version"), version)?;
            }
            Err(error) => {
                println!("SKIPPED: {}: {error:#}", rival.name);
                is_complete = false;
            }
        }
    }
    Ok(is_complete)
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
    let (sources, copy) = (host::repository().join("rivals/wago"), folder.join("source"));
    // Go writes a `go.sum` into the folder of the sources.
    fs::create_dir_all(&copy)?;
    for name in ["go.mod", "main.go"] {
        fs::copy(sources.join(name), copy.join(name))?;
    }
    let mut build = Command::new("go");
    build.args(["build", "-o"]).arg(folder.join("wago")).arg(".").current_dir(&copy);
    let version = match std::env::var_os(WAGO_SOURCE) {
        Some(source) => {
            let workspace = folder.join("go.work");
            let source = PathBuf::from(source);
            let used = [&copy, &source].map(|path| format!("use {path:?}\n"));
            fs::write(&workspace, format!("go 1.22\n{}", used.concat()))?;
            build.env("GOWORK", &workspace);
            let mut git = Command::new("git");
            let commit =
                output(git.arg("-C").arg(source).args(["rev-parse", "--short=12", "HEAD"]));
            commit.map_or_else(|_| "a checkout".to_owned(), |commit| commit.trim().to_owned())
        }
        None => {
            build.env("GOWORK", "off").env("GOFLAGS", "-mod=mod -modcacherw");
            required_version(&fs::read_to_string(sources.join("go.mod"))?)?.to_owned()
        }
    };
    output(&mut build).with_context(|| {
        format!("cannot build it (${WAGO_SOURCE} may name a checkout of its module)")
    })?;
    Ok(format!("wago {version}"))
}

/// The version of wago in a `go.mod`.
fn required_version(go_mod: &str) -> Result<&str> {
    let line = go_mod.lines().find(|line| line.starts_with("require "));
    line.and_then(|line| line.split_whitespace().nth(2)).context("go.mod requires no version")
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

    #[test]
    fn a_rival_that_fails_is_reported_and_the_others_leave_their_versions() {
        let folder = std::env::temp_dir().join(format!("xtask-rivals-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let good = Rival { name: "good", install: |_| Ok("good 1".to_owned()) };
        let bad = Rival { name: "bad", install: |_| bail!("no compiler") };
        assert!(!install(&[&bad, &good], &folder).unwrap());
        assert!(install(&[&good], &folder).unwrap());
        assert_eq!(fs::read_to_string(folder.join("good/version")).unwrap(), "good 1");
        assert!(!folder.join("bad").exists());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_version_of_wago_is_that_of_its_module() {
        let sources = host::repository().join("rivals/wago/go.mod");
        let text = fs::read_to_string(sources).unwrap();
        assert!(required_version(&text).unwrap().starts_with("v0.0.0-"), "{text}");
        assert!(required_version("module x").is_err());
    }
}
