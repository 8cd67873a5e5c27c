//! The calls of the compiler while the tests are built, replayed for lints and documentation.
//!
//! `cargo clippy` and `cargo doc` would compile every dependency a second time, in a separate mode
//! whose results no build can use: on two cores, minutes for nothing. So the tests are built with
//! this program as cargo's `RUSTC_WRAPPER`. It records cargo's command for each target of the
//! workspace, and runs the compiler. Clippy and rustdoc then run with the same arguments, over the
//! existing dependencies. A wrapper does not change the output, so plain `cargo test` shares it.
//!
//! A target that was built without being written down, or whose dependencies have changed since, is
//! built anew.

mod part;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Instant, SystemTime};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::command::{cargo, metadata, output, output_until, run};
use crate::{artifact_cache, host};
use part::Part;

/// Where the wrapper writes; set for no other process.
const FOLDER: &str = "AFRESH_UNITS";
/// The variables that cargo itself was started with, which do not depend on a target; separated by
/// commas.
const KNOWN_VARIABLES: &str = "AFRESH_UNITS_KNOWN";

/// Arguments for the compiler's output.
const OUTPUT: [&str; 4] = ["--emit", "--out-dir", "--error-format", "--json"];

/// One target of the workspace, with cargo's arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Unit {
    name: String,
    source: PathBuf,
    /// Whether it is built with the harness of tests.
    test: bool,
    folder: PathBuf,
    /// The arguments of the compiler, without its own path.
    arguments: Vec<String>,
    variables: BTreeMap<String, String>,
}

/// All targets of the workspace.
#[derive(Debug, Default)]
pub(crate) struct Units {
    units: Vec<Unit>,
    /// The hashes of the third-party artifacts that they were built with.
    third_party: BTreeSet<String>,
}

/// The folder to write to, where this process was started by cargo as a wrapper of the compiler.
pub(crate) fn wrapped() -> Option<PathBuf> {
    std::env::var_os(FOLDER).map(PathBuf::from)
}

/// Records the compiler's arguments for a member of the workspace, and becomes the compiler.
pub(crate) fn wrap(folder: &Path) -> Result<std::convert::Infallible> {
    let mut arguments = std::env::args_os().skip(1);
    let compiler = arguments.next().context("a wrapper gets the compiler first")?;
    let arguments: Vec<OsString> = arguments.collect();
    if is_member(&arguments)
        && let Some(unit) = Unit::of_wrapper(&arguments)
    {
        unit.keep(folder)?;
    }
    let error = Command::new(&compiler)
        .args(arguments)
        .env_remove(FOLDER)
        .env_remove(KNOWN_VARIABLES)
        .exec();
    Err(error).with_context(|| format!("cannot run {}", compiler.display()))
}

/// Whether the compiler's arguments are for a member of the workspace: cargo names its source by a
/// path below the workspace, and all others by absolute ones. It sets `CARGO_PRIMARY_PACKAGE` only
/// for members with a target among those that are built by name.
fn is_member(arguments: &[OsString]) -> bool {
    let source =
        arguments.iter().map(Path::new).find(|word| word.extension() == Some("rs".as_ref()));
    source.is_some_and(Path::is_relative)
}

impl Unit {
    /// The target of this process, a wrapper.
    fn of_wrapper(arguments: &[OsString]) -> Option<Self> {
        // Cargo writes only UTF-8.
        let arguments: Option<Vec<String>> =
            arguments.iter().map(|word| word.to_str().map(str::to_owned)).collect();
        let known = std::env::var(KNOWN_VARIABLES).unwrap_or_default();
        let known: BTreeSet<&str> = known.split(',').collect();
        let variables = std::env::vars_os()
            .filter_map(|(name, value)| {
                Some((name.to_str()?.to_owned(), value.to_str()?.to_owned()))
            })
            .filter(|(name, _)| {
                !known.contains(name.as_str()) && name != FOLDER && name != KNOWN_VARIABLES
            })
            .collect();
        Self::new(std::env::current_dir().ok()?, arguments?, variables)
    }

    fn new(
        folder: PathBuf,
        arguments: Vec<String>,
        variables: BTreeMap<String, String>,
    ) -> Option<Self> {
        let name = after(&arguments, "--crate-name")?.to_owned();
        let source = arguments.iter().find(|word| word.ends_with(".rs"))?;
        let source = folder.join(source);
        let test = arguments.iter().any(|word| word == "--test");
        Some(Self { name, source, test, folder, arguments, variables })
    }

    /// Cargo's hash that distinguishes builds of one name.
    fn hash(&self) -> &str {
        let extra = |word: &&String| word.starts_with("extra-filename=");
        let word = self.arguments.iter().find(extra).map_or("", String::as_str);
        word.strip_prefix("extra-filename=").unwrap_or(word)
    }

    /// Writes this down, whole or not at all: another wrapper may do the same.
    fn keep(&self, folder: &Path) -> Result<()> {
        let name = format!("{}{}.json", self.name, self.hash());
        let text = json!({
            "folder": self.folder, "arguments": self.arguments, "variables": self.variables,
        });
        let part = folder.join(format!("{name}.{}", std::process::id()));
        std::fs::write(&part, text.to_string()).with_context(|| part.display().to_string())?;
        std::fs::rename(&part, folder.join(name)).with_context(|| part.display().to_string())
    }

    fn read(text: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(text).ok()?;
        let words = |value: &Value| value.as_str().map(str::to_owned);
        let arguments: Option<_> = value["arguments"].as_array()?.iter().map(words).collect();
        let variables: Option<_> = value["variables"]
            .as_object()?
            .iter()
            .map(|(name, value)| Some((name.clone(), words(value)?)))
            .collect();
        Self::new(value["folder"].as_str()?.into(), arguments?, variables?)
    }

    /// Whether its package's manifest changed after it was recorded, and with it perhaps its
    /// dependencies and features.
    fn is_older_than_manifest(&self, recorded: SystemTime) -> bool {
        let folder = self.variables.get("CARGO_MANIFEST_DIR");
        let manifest = folder.map(|folder| Path::new(folder).join("Cargo.toml"));
        let changed = manifest.and_then(|manifest| manifest.metadata().ok()?.modified().ok());
        changed.is_some_and(|changed| changed > recorded)
    }

    /// The files of its dependencies.
    fn dependencies(&self) -> impl Iterator<Item = PathBuf> {
        let of = |word: &String| Some(self.folder.join(word.split_once('=')?.1));
        let externs = self.arguments.iter().zip(self.arguments.iter().skip(1));
        externs.filter(|(word, _)| *word == "--extern").filter_map(move |(_, word)| of(word))
    }

    /// Another program with the same arguments, except for the output folder, and `without` some of
    /// them.
    fn command(&self, program: &Path, without: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.folder).envs(&self.variables);
        // The original caller's job server has ended.
        command.env_remove("CARGO_MAKEFLAGS").env_remove("MAKEFLAGS");
        let mut arguments = self.arguments.iter();
        while let Some(word) = arguments.next() {
            let own = word.split_once('=').map_or(word.as_str(), |(name, _)| name);
            if !OUTPUT.contains(&own) && !without.contains(&own) {
                command.arg(word);
            } else if own == word {
                // Its value is the next word.
                arguments.next();
            }
        }
        command
    }

    /// Whether it is a program, or a part of one.
    fn program(&self) -> bool {
        after(&self.arguments, "--crate-type") == Some("bin")
    }

    /// Whether it is a library or a program that users meet.
    fn documented(&self) -> bool {
        let example = self.source.components().any(|part| part.as_os_str() == "examples");
        !self.test && !example && self.name != "build_script_build"
    }
}

/// The word after `name`.
fn after<'a>(words: &'a [String], name: &str) -> Option<&'a str> {
    let at = words.iter().position(|word| word == name)?;
    words.get(at + 1).map(String::as_str)
}

/// Builds tests of the workspace, and returns the compiler's arguments for them; `None` if the
/// build was ended at the deadline.
///
/// `arguments`: what follows `cargo`, as the tests are run later.
pub(crate) fn build(arguments: &[&str], deadline: Option<Instant>) -> Result<Option<Units>> {
    let folder = host::target_folder().join("units");
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    // The build replaces this program's own file.
    let wrapper = folder.join("wrapper");
    let own = std::env::current_exe().context("cannot find this program's own file")?;
    drop(std::fs::remove_file(&wrapper));
    std::fs::copy(&own, &wrapper).with_context(|| wrapper.display().to_string())?;
    let Some(built) = compile(arguments, deadline, &wrapper, &folder)? else { return Ok(None) };
    let (units, missing) = built.units(&folder)?;
    if missing.is_empty() {
        return Ok(Some(units));
    }
    println!("{} packages were built without this program, and are built anew", missing.len());
    let mut clean = cargo();
    clean.current_dir(host::repository()).args(["clean", "--quiet", "--locked"]);
    run(clean.args(missing.iter().flat_map(|package| ["--package", package])))?;
    let Some(built) = compile(arguments, deadline, &wrapper, &folder)? else { return Ok(None) };
    let (units, missing) = built.units(&folder)?;
    if !missing.is_empty() {
        bail!("nothing is known of how {missing:?} were built; remove {}", folder.display());
    }
    Ok(Some(units))
}

fn compile(
    arguments: &[&str],
    deadline: Option<Instant>,
    wrapper: &Path,
    folder: &Path,
) -> Result<Option<BuildReport>> {
    let mut command = cargo();
    command.current_dir(host::repository()).args(arguments).args([
        "--no-run",
        "--message-format",
        "json-render-diagnostics",
    ]);
    // Variables that clippy and rustdoc inherit need not be recorded, and a registry's token must
    // not be. The variables about the package differ between this program and every target.
    let own = |name: &String| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    let known = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let known = known.filter(|name| !own(name));
    command
        .env("RUSTC_WRAPPER", wrapper)
        .env(FOLDER, folder)
        .env(KNOWN_VARIABLES, known.collect::<Vec<_>>().join(","));
    let report = output_until(&mut command, deadline).context("the tests do not compile")?;
    report.map(|report| BuildReport::read(&report)).transpose()
}

/// A target, as cargo speaks of it once it is built.
#[derive(Debug)]
struct Target {
    package: String,
    files: Vec<PathBuf>,
}

impl Target {
    /// Whether a file of it is named as that target's are. Programs are named by their names alone.
    fn is(&self, unit: &Unit) -> bool {
        let named = |file: &PathBuf| file.to_string_lossy().contains(unit.hash());
        self.files.iter().any(named)
    }
}

/// Cargo's report of a build.
#[derive(Debug, Default)]
struct BuildReport {
    /// The members' targets: where each begins, and whether it is one of tests.
    targets: BTreeMap<(PathBuf, bool), Target>,
    /// Every file, those of dependencies included.
    files: BTreeSet<PathBuf>,
    third_party: BTreeSet<String>,
}

impl BuildReport {
    fn read(said: &str) -> Result<Self> {
        let mut built = Self::default();
        for line in said.lines() {
            let told: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
            let files = told["filenames"].as_array().into_iter().flatten();
            let mut files: Vec<_> =
                files.filter_map(|file| Some(PathBuf::from(file.as_str()?))).collect();
            // The output of a build script, the only file of its kind of line.
            files.extend(told["out_dir"].as_str().map(PathBuf::from));
            // "path+file:///…/crates/sys#afresh-sys@0.1.0", or without the name if it equals the
            // folder's.
            let id = told["package_id"].as_str().unwrap_or_default();
            let id = id.strip_prefix("path+file://");
            if id.is_none() {
                built.third_party.extend(files.iter().filter_map(|file| hash_of(file)));
            }
            if told["reason"] != "compiler-artifact" {
                continue;
            }
            built.files.extend(files.iter().cloned());
            let Some(id) = id else { continue };
            let source = told["target"]["src_path"].as_str().context("a target has a source")?;
            let test = told["profile"]["test"].as_bool().context("a profile says if of tests")?;
            let package = package(id).to_owned();
            built.targets.insert((source.into(), test), Target { package, files });
        }
        Ok(built)
    }

    /// The recorded units of these targets, and the packages without one.
    fn units(&self, folder: &Path) -> Result<(Units, BTreeSet<String>)> {
        let mut found = BTreeMap::new();
        for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let entry = entry?;
            let path = entry.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let text =
                std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let Some(unit) = Unit::read(&text) else { continue };
            let key = (unit.source.clone(), unit.test);
            let Some(target) = self.targets.get(&key) else { continue };
            let recorded = entry.metadata()?.modified()?;
            // Units of an earlier build have other dependencies, or are older versions of the same
            // unit.
            if !self.fits(&unit) || unit.is_older_than_manifest(recorded) {
                continue;
            }
            let rank = (target.is(&unit), recorded);
            if found.get(&key).is_none_or(|(other, _)| *other < rank) {
                found.insert(key, (rank, unit));
            }
        }
        let mut missing = BTreeSet::new();
        let mut units = Vec::new();
        for (key, target) in &self.targets {
            match found.remove(key) {
                Some((_, unit)) => units.push(unit),
                None => drop(missing.insert(target.package.clone())),
            }
        }
        Ok((Units { units, third_party: self.third_party.clone() }, missing))
    }

    fn fits(&self, unit: &Unit) -> bool {
        unit.dependencies().all(|file| {
            // If the compiler runs before a library is complete, it gets the library's metadata.
            self.files.contains(&file) || self.files.contains(&file.with_extension("rlib"))
        })
    }
}

/// The hash of an artifact, which its own name has or that of its folder.
fn hash_of(file: &Path) -> Option<String> {
    let mut names = file.iter().rev().take(2).filter_map(|name| name.to_str());
    names.find_map(artifact_cache::hash).map(str::to_owned)
}

/// The package's name in cargo's identifier of it.
fn package(id: &str) -> &str {
    let (folder, version) = id.rsplit_once('#').unwrap_or((id, ""));
    match version.split_once('@') {
        Some((name, _)) => name,
        None => folder.rsplit('/').next().unwrap_or(folder),
    }
}

impl Units {
    pub(crate) fn third_party(&self) -> &BTreeSet<String> {
        &self.third_party
    }

    /// Lints every target; a clippy warning is an error.
    pub(crate) fn clippy(&self) -> Result<()> {
        self.lint(&host::target_folder().join("units/lints"))
    }

    /// Clippy's output for the targets goes to the folder `made`.
    fn lint(&self, made: &Path) -> Result<()> {
        let driver = tool("clippy-driver")?;
        self.each("clippy", |unit| {
            let mut command = unit.command(&driver, &[]);
            // As with `cargo clippy -- -D warnings`.
            let deny = "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__";
            command.args(["--emit", "metadata", "--out-dir"]).arg(made).env("CLIPPY_ARGS", deny);
            Some(command)
        })
    }

    /// Lints a package's library or program as users of only `features` compile it: with the code
    /// of those features, and without the dependencies that they do not need. Present dependencies
    /// have all their features.
    pub(crate) fn part(&self, package: &str, features: &str) -> Result<()> {
        let told = metadata(&["--no-deps"])?;
        let packages = told["packages"].as_array().context("cargo tells packages")?;
        let package = packages
            .iter()
            .find(|one| one["name"] == package)
            .with_context(|| format!("there is no package {package}"))?;
        let of = package["manifest_path"].as_str().context("a package has a manifest")?;
        let source = Path::new(of).with_file_name("src");
        let part = Part::new(package, features);
        let own =
            self.units.iter().filter(|unit| !unit.test && unit.source.parent() == Some(&source));
        let units = own.map(|unit| part.of(unit)).collect();
        let only = Self { units, third_party: BTreeSet::new() };
        if only.units.is_empty() {
            bail!("no target of {of} was built");
        }
        only.lint(&host::target_folder().join("units/parts"))
            .with_context(|| format!("with features {features}"))
    }

    /// Documents every library and program; a warning is an error.
    pub(crate) fn document(&self) -> Result<()> {
        let rustdoc = tool("rustdoc")?;
        let made = host::target_folder().join("units/documentation");
        self.each("rustdoc", |unit| {
            if !unit.documented() {
                return None;
            }
            // Arguments that only a compilation of code needs.
            let mut command = unit.command(&rustdoc, &["-C", "--diagnostic-width"]);
            command.args(["-D", "warnings", "--out-dir"]);
            // As cargo does: readers of a program are its authors. A library may have the same
            // name.
            if unit.program() {
                command.arg(made.join("programs")).arg("--document-private-items");
            } else {
                command.arg(&made);
            }
            Some(command)
        })
    }

    /// Runs a command for each target that it is made for, as many at a time as there are
    /// processors.
    fn each(&self, what: &str, make: impl Fn(&Unit) -> Option<Command> + Sync) -> Result<()> {
        println!("$ {what} of {} targets", self.units.len());
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(Vec::new());
        let work = || {
            while let Some(unit) = self.units.get(next.fetch_add(1, Ordering::Relaxed)) {
                let Some(mut command) = make(unit) else { continue };
                let said = command.stdin(Stdio::null()).output();
                let fault = match said {
                    Ok(said) if said.status.success() => continue,
                    Ok(said) => String::from_utf8_lossy(&said.stderr).into_owned(),
                    Err(error) => error.to_string(),
                };
                println!("{what}: {}\n{fault}", unit.source.display());
                let mut failed = failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                failed.push(unit.source.display().to_string());
            }
        };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| (0..processors).for_each(|_| drop(scope.spawn(work))));
        let failed = failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !failed.is_empty() {
            bail!("{what} rejects {}", failed.join(", "));
        }
        Ok(())
    }
}

/// A program of the toolchain in use.
fn tool(name: &str) -> Result<PathBuf> {
    let sysroot = output(Command::new("rustc").args(["--print", "sysroot"]))?;
    Ok(Path::new(&sysroot).join("bin").join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn unit(words: &[&str]) -> Unit {
        let words = words.iter().map(|word| (*word).to_owned()).collect();
        Unit::new("/w".into(), words, BTreeMap::new()).expect("a target")
    }

    #[test]
    fn members_of_the_workspace_are_named_by_relative_paths() {
        for (source, is_of_workspace) in [("crates/one/src/lib.rs", true), ("/r/two/lib.rs", false)]
        {
            let words = ["--crate-name", "one", source, "--test"].map(OsString::from);
            assert_eq!(is_member(&words), is_of_workspace, "{source}");
        }
        assert!(!is_member(&[OsString::from("-vV")]));
    }

    #[test]
    fn a_target_comes_back_as_it_was_written_down() {
        let folder = std::env::temp_dir().join(format!("afresh-units-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let mut one = unit(&[
            "--crate-name",
            "one",
            "crates/one/src/lib.rs",
            "--test",
            "-C",
            "extra-filename=-1f",
            "--extern",
            "two=/t/libtwo-2.rmeta",
        ]);
        one.variables.insert("OUT_DIR".to_owned(), "two words\n".to_owned());
        one.keep(&folder).expect("kept");
        let text = std::fs::read_to_string(folder.join("one-1f.json")).expect("its file");
        assert_eq!(Unit::read(&text), Some(one));
        std::fs::remove_dir_all(&folder).expect("removed");
    }

    #[test]
    fn another_program_gets_the_same_filters_without_foreign_ones() {
        let one = unit(&[
            "--crate-name",
            "one",
            "--emit=dep-info,link",
            "--out-dir",
            "/o",
            "one.rs",
            "-C",
            "opt-level=1",
            "--cfg",
            "x",
        ]);
        let command = one.command(Path::new("lint"), &["-C"]);
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
        assert_eq!(words, ["--crate-name", "one", "one.rs", "--cfg", "x"]);
    }

    #[test]
    fn of_two_that_fit_the_one_whose_file_was_built_is_taken_also_when_it_is_older() {
        let folder = std::env::temp_dir().join(format!("afresh-ranks-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        for (hash, at) in [("-new", 2), ("-old", 1), ("-older", 0)] {
            let extra = format!("extra-filename={hash}");
            let words = ["--crate-name", "one", "one.rs", "-C", &extra];
            unit(&words).keep(&folder).expect("kept");
            let time = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(at);
            let file =
                std::fs::File::options().write(true).open(folder.join(format!("one{hash}.json")));
            file.and_then(|file| file.set_modified(time)).expect("its time");
        }
        let of = |file: &str| {
            let said = format!(
                r#"{{"reason":"compiler-artifact","package_id":"path+file:///w/crates/one#afresh-one@0.1.0","filenames":["{file}"],"target":{{"src_path":"/w/one.rs"}},"profile":{{"test":false}}}}"#
            );
            let built = BuildReport::read(&said).expect("as cargo says it");
            built.units(&folder).expect("read").0.units[0].hash().to_owned()
        };
        assert_eq!(of("/t/libone-old.rlib"), "-old");
        assert_eq!(of("/t/one"), "-new");
        std::fs::remove_dir_all(&folder).expect("removed");
    }

    #[test]
    fn third_party_artifacts_are_those_outside_of_the_workspace_with_their_build_scripts() {
        let said = r#"{"reason":"compiler-artifact","package_id":"registry+x#two@1.0.0","filenames":["/t/libtwo-0000000000000002.rlib"],"target":{},"profile":{}}
{"reason":"compiler-artifact","package_id":"registry+x#two@1.0.0","filenames":["/t/build/two-0000000000000003/build-script-build"],"target":{},"profile":{}}
{"reason":"build-script-executed","package_id":"registry+x#two@1.0.0","out_dir":"/t/build/two-0000000000000004/out"}
{"reason":"build-script-executed","package_id":"path+file:///w/crates/one#afresh-one@0.1.0","out_dir":"/t/build/one-0000000000000005/out"}"#;
        let built = BuildReport::read(said).expect("as cargo says it");
        let hashes: Vec<_> = (2..5).map(|number| format!("{number:016}")).collect();
        assert!(built.third_party.iter().eq(&hashes), "{:?}", built.third_party);
    }

    #[test]
    fn a_target_with_other_or_unknown_dependencies_is_built_anew() {
        let said = |hash: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","package_id":"registry+x#two@1.0.0","filenames":["/t/libtwo-{hash}.rlib"],"target":{{}},"profile":{{}}}}
{{"reason":"compiler-artifact","package_id":"path+file:///w/crates/one#afresh-one@0.1.0","filenames":[],"target":{{"src_path":"/w/one.rs"}},"profile":{{"test":false}}}}
{{"reason":"build-finished","success":true}}"#
            )
        };
        let one = unit(&["--crate-name", "one", "one.rs", "--extern", "two=/t/libtwo-2.rmeta"]);
        let built = BuildReport::read(&said("2")).expect("as cargo says it");
        assert!(built.fits(&one));
        assert_eq!(built.targets[&("/w/one.rs".into(), false)].package, "afresh-one");
        assert!(built.third_party.is_empty(), "a name without a hash");
        assert!(!BuildReport::read(&said("3")).expect("as cargo says it").fits(&one));
        assert_eq!(package("/w/xtask#0.1.0"), "xtask");
    }
}
