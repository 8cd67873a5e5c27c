//! Builds gVisor's tests of system calls without Bazel, against the distribution's Abseil and
//! GoogleTest.
//!
//! The rules of the project say which files a binary consists of. All of its helper sources go into
//! one archive, from which the linker takes those that a binary uses. [`SUPPORT`] replaces the
//! parts that need Bazel.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::{in_parallel, processors};
use crate::command::{output, run, succeeds};

/// The release whose tests are run.
pub(super) const TAG: &str = "release-20260817.0";

const TESTS: &str = "test/syscalls/linux";
const HELPERS: &str = "test/util";

/// In place of the helpers that need Bazel, benchmarks, or another system.
const SUPPORT: &str = r#"
#include <signal.h>
#include <stdlib.h>

#include <string>

#include "gtest/gtest.h"

namespace gvisor {
namespace testing {

void SetupGvisorDeathTest() {}

void TestInit(int* argc, char*** argv) {
  ::testing::InitGoogleTest(argc, *argv);
  signal(SIGPIPE, SIG_IGN);
}

int RunAllTests() { return RUN_ALL_TESTS(); }

// Programs that tests execute are in one folder.
std::string RunfilePath(std::string path) {
  const char* programs = getenv("TEST_PROGRAMS");
  return std::string(programs ? programs : ".") + "/" + path.substr(path.rfind('/') + 1);
}

}  // namespace testing
}  // namespace gvisor
"#;

/// Helpers that [`SUPPORT`] replaces, or that are for other systems.
const LEFT_OUT: [&str; 4] = [
    "test_util_impl.cc",
    "test_util_runfiles.cc",
    "save_util_other.cc",
    "fuchsia_capability_util.cc",
];

/// A rule of the project.
#[derive(Debug, Default, PartialEq, Eq)]
struct Rule {
    binary: bool,
    sources: Vec<String>,
    /// Rules of the same folder.
    needs: Vec<String>,
}

/// Builds the tests called `names`, or all, and returns the binaries that could be built.
pub(super) fn build(source: &str, folder: &Path, names: &[&str]) -> Result<Vec<String>> {
    super::gvisor::require_libraries()?;
    fetch(source, folder)?;
    let rules = rules(&fs::read_to_string(folder.join(TESTS).join("BUILD"))?);
    let binaries = rules.iter().filter(|(_, rule)| rule.binary).map(|(name, _)| name.as_str());
    let wanted: Vec<&str> = match names {
        [] => binaries.collect(),
        names => {
            let known: BTreeSet<_> = binaries.collect();
            if let Some(name) = names.iter().find(|name| !known.contains(*name)) {
                bail!("gVisor has no test binary {name:?}; the names are those of its BUILD file");
            }
            // Those that a test executes have other names than tests.
            let programs = known.iter().copied().filter(|name| !name.ends_with("_test"));
            programs.chain(names.iter().copied()).collect()
        }
    };
    for part in ["objects", "bin"] {
        fs::create_dir_all(folder.join(part))?;
    }
    println!("building {} test binaries of gVisor", wanted.len());
    let archive = archive(folder)?;
    let built = in_parallel(&wanted, processors(), |_, name| link(folder, &rules, name, &archive))?;
    let is_test = |name: &&str| name.ends_with("_test");
    let missing: Vec<_> =
        wanted.iter().zip(&built).filter(|(_, built)| !**built).map(|(name, _)| *name).collect();
    if !missing.is_empty() {
        println!("not built with this host's libraries: {}", missing.join(", "));
    }
    let built = wanted.iter().zip(built).filter(|(_, built)| *built).map(|(name, _)| *name);
    Ok(built.filter(is_test).map(str::to_owned).collect())
}

/// Puts the sources of the tests in `folder`, unless they are there.
fn fetch(source: &str, folder: &Path) -> Result<()> {
    let done = folder.join("fetched");
    if done.is_file() {
        return Ok(());
    }
    let git = || {
        let mut git = Command::new("git");
        git.arg("-C").arg(folder);
        git
    };
    fs::create_dir_all(folder)?;
    run(git().args(["init", "--quiet"]))?;
    run(git().args(["sparse-checkout", "set", TESTS, HELPERS]))?;
    if !succeeds(git().args(["remote", "set-url", "origin", source]).stderr(Stdio::null())) {
        run(git().args(["remote", "add", "origin", source]))?;
    }
    // The files of the tests arrive when they are checked out, and no others do.
    let fetch = ["fetch", "--quiet", "--depth", "1", "--filter=blob:none", "origin"];
    run(git().args(fetch).arg(format!("refs/tags/{TAG}")))?;
    run(git().args(["-c", "advice.detachedHead=false", "checkout", "--quiet", "FETCH_HEAD"]))?;
    for part in [TESTS, HELPERS] {
        for entry in fs::read_dir(folder.join(part))? {
            let path = entry?.path();
            if path.extension().is_some_and(|kind| kind == "cc" || kind == "h") {
                let text = fs::read_to_string(&path)?;
                fs::write(&path, adapt(&text))?;
            }
        }
    }
    Ok(fs::write(done, "")?)
}

/// Adapts a source to the older Abseil of distributions, which has a separate string view and other
/// names in its mutex.
fn adapt(text: &str) -> String {
    let text = text.replace("std::string_view", "absl::string_view");
    let text = text.replace("mu.lock()", "mu.Lock()").replace("mu.unlock()", "mu.Unlock()");
    let mut adapted = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        match line.split_once("absl::MutexLock ").and_then(|(_, rest)| rest.split_once('(')) {
            Some((_, mutex)) if !mutex.starts_with('&') => {
                adapted.push_str(&line[..line.len() - mutex.len()]);
                adapted.push('&');
                adapted.push_str(mutex);
            }
            _ => adapted.push_str(line),
        }
    }
    adapted
}

/// The rules for C++ in a BUILD file.
fn rules(text: &str) -> BTreeMap<String, Rule> {
    let mut rules = BTreeMap::new();
    let mut rest = text;
    while let Some(start) = ["cc_binary(", "cc_library("]
        .iter()
        .filter_map(|kind| rest.find(&format!("\n{kind}")))
        .min()
    {
        let block = &rest[start + 1..];
        let end = block.find("\n)").unwrap_or(block.len());
        let mut rule = Rule { binary: block.starts_with("cc_binary"), ..Rule::default() };
        let (mut name, mut attribute) = (String::new(), "");
        for line in block[..end].lines().skip(1) {
            let indented = line.strip_prefix("    ").filter(|line| !line.starts_with(' '));
            if let Some((key, _)) = indented.and_then(|line| line.split_once(" = ")) {
                attribute = key;
            }
            for literal in line.split('"').skip(1).step_by(2) {
                match attribute {
                    "name" => literal.clone_into(&mut name),
                    "srcs" if literal.ends_with(".cc") => rule.sources.push(literal.to_owned()),
                    "deps" => rule.needs.extend(literal.strip_prefix(':').map(str::to_owned)),
                    _ => {}
                }
            }
        }
        rules.insert(name, rule);
        rest = &block[end..];
    }
    rules
}

/// The source files of a rule and of those it needs.
fn sources<'a>(rules: &'a BTreeMap<String, Rule>, name: &str, found: &mut BTreeSet<&'a str>) {
    let Some(rule) = rules.get(name) else { return };
    found.extend(rule.sources.iter().map(String::as_str));
    for needed in &rule.needs {
        sources(rules, needed, found);
    }
}

/// The helpers as an archive.
fn archive(folder: &Path) -> Result<PathBuf> {
    let support = folder.join("support.cc");
    fs::write(&support, SUPPORT)?;
    let mut helpers = vec![support];
    for entry in fs::read_dir(folder.join(HELPERS))? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.ends_with(".cc") && !name.ends_with("_test.cc") && !LEFT_OUT.contains(&name) {
            helpers.push(path);
        }
    }
    let archive = folder.join("objects/helpers.a");
    if archive.is_file() {
        return Ok(archive);
    }
    let helpers: Vec<&Path> = helpers.iter().map(PathBuf::as_path).collect();
    let built =
        in_parallel(&helpers, processors(), |_, source| Ok(object(folder, source)?.is_some()))?;
    let objects = helpers.iter().zip(built).filter(|(_, built)| *built);
    let objects: Vec<_> = objects.map(|(source, _)| object_path(folder, source)).collect();
    run(Command::new("ar").arg("rcs").arg(&archive).args(objects))?;
    Ok(archive)
}

fn object_path(folder: &Path, source: &Path) -> PathBuf {
    let home = source.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
    let name = source.file_name().unwrap_or_default().to_string_lossy();
    folder.join("objects").join(format!("{home}-{name}.o"))
}

/// Compiles a file, unless that is done; the answer is `None` where this host's libraries do not
/// suit it.
fn object(folder: &Path, source: &Path) -> Result<Option<PathBuf>> {
    let object = object_path(folder, source);
    if object.is_file() {
        return Ok(Some(object));
    }
    let part = object.with_extension("part");
    let mut compiler = Command::new("c++");
    compiler.current_dir(folder).args(["-std=c++17", "-O0", "-w", "-I.", "-c"]).arg(source);
    compiler.args(["-include", "absl/strings/string_view.h"]);
    if !succeeds(compiler.arg("-o").arg(&part).stderr(Stdio::null())) {
        return Ok(None);
    }
    fs::rename(&part, &object)?;
    Ok(Some(object))
}

/// Links a binary, unless that is done. The answer is whether it is there.
fn link(folder: &Path, rules: &BTreeMap<String, Rule>, name: &str, archive: &Path) -> Result<bool> {
    let binary = folder.join("bin").join(name);
    if binary.is_file() {
        return Ok(true);
    }
    let mut files = BTreeSet::new();
    sources(rules, name, &mut files);
    let mut objects = Vec::new();
    for file in files {
        let path = folder.join(TESTS).join(file);
        match if path.is_file() { object(folder, &path)? } else { None } {
            Some(object) => objects.push(object),
            None => return Ok(false),
        }
    }
    let libraries = output(Command::new("pkg-config").args(["--libs", "gmock"]))?;
    let part = folder.join("objects").join(name);
    let mut linker = Command::new("c++");
    linker.arg("-o").arg(&part).args(objects).arg("-Wl,--start-group").arg(archive);
    linker.args(libraries.split_whitespace()).args(abseil()?).arg("-Wl,--end-group").arg("-lrt");
    if !succeeds(linker.stderr(Stdio::null())) {
        return Ok(false);
    }
    fs::rename(part, binary).context("a binary")?;
    Ok(true)
}

/// Arguments that link every library of Abseil.
fn abseil() -> Result<Vec<String>> {
    let home = output(Command::new("pkg-config").args(["--variable=libdir", "absl_strings"]))?;
    let mut names = Vec::new();
    for entry in fs::read_dir(&home).with_context(|| home.clone())? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if let Some(name) = name.strip_prefix("libabsl_").and_then(|name| name.strip_suffix(".so"))
        {
            names.push(format!("-labsl_{name}"));
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_suit_an_older_abseil() {
        let text = "  absl::MutexLock ml(mu);\n  absl::MutexLock other(&mu);\n  mu.unlock();\n";
        let adapted = "  absl::MutexLock ml(&mu);\n  absl::MutexLock other(&mu);\n  mu.Unlock();\n";
        assert_eq!(adapt(text), adapted);
    }

    #[test]
    fn a_rule_has_its_files_and_those_of_the_rules_it_needs() {
        let text = "\ncc_library(\n    name = \"base\",\n    srcs = [\"base.cc\", \"base.h\"],\n)\n\ncc_binary(\n    \
                    name = \"a_test\",\n    srcs = select_arch(\n        amd64 = [\"a.cc\"],\n    ),\n    \
                    deps = select_gtest() + [\n        \":base\",\n        \"//test/util:test_main\",\n    ],\n)\n";
        let rules = rules(text);
        assert!(rules["a_test"].binary && !rules["base"].binary);
        let mut files = BTreeSet::new();
        sources(&rules, "a_test", &mut files);
        assert_eq!(files.into_iter().collect::<Vec<_>>(), ["a.cc", "base.cc"]);
    }
}
