//! `cargo xtask wasi-testsuite`: the public test suite of WASI, preview 1, over `afresh run`.
//!
//! Each of its programs runs twice: over a file tree in memory (`--files`), and over a directory of
//! the host (`--dir`). A separate command: the suite comes by git, which our tests cannot count on.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::command::{cargo, run};
use crate::host;

/// The repository of the compiled programs, and the revision.
const SUITE: &str = "https://github.com/WebAssembly/wasi-testsuite";
const COMMIT: &str = "9f80ca35444cfd9e63100725615140a346652e6c";
/// Languages that the programs are written in, each in a folder.
const LANGUAGES: [&str; 3] = ["assemblyscript", "c", "rust"];
/// The command is built with its tests, so that the dependencies are those of all tests, and there
/// already.
const ALL: [&str; 4] = ["test", "--workspace", "--all-features", "--locked"];

/// `cargo xtask wasi-testsuite`
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    let suite = match arguments {
        [] => fetched()?,
        [folder] => PathBuf::from(folder),
        _ => bail!("usage: cargo xtask wasi-testsuite [FOLDER]"),
    };
    run(cargo().current_dir(host::repository()).args(ALL).args(["--no-run", "--test", "cli"]))?;
    let mut failed = 0;
    for tree in [Tree::Memory, Tree::Host] {
        let mut passed = BTreeMap::new();
        for language in LANGUAGES {
            for program in programs(&suite, language)? {
                match Case::read(&program)?.hold(tree)? {
                    None => *passed.entry(language).or_insert(0) += 1,
                    Some(why) => {
                        failed += 1;
                        println!("FAILED {language} {} {}: {why}", name(&program), tree.option());
                    }
                }
            }
        }
        println!("{}: passed {passed:?}", tree.option());
    }
    if failed > 0 {
        bail!("{failed} cases failed");
    }
    Ok(())
}

/// The suite, fetched once.
fn fetched() -> Result<PathBuf> {
    let folder = host::target_folder().join("tools").join(format!("wasi-testsuite-{COMMIT}"));
    if !folder.exists() {
        let part = folder.with_extension("part");
        if part.exists() {
            fs::remove_dir_all(&part)?;
        }
        fs::create_dir_all(&part)?;
        let git = |arguments: &[&str]| run(Command::new("git").current_dir(&part).args(arguments));
        git(&["init", "--quiet"])?;
        git(&["fetch", "--quiet", "--depth", "1", SUITE, COMMIT])?;
        git(&["checkout", "--quiet", "FETCH_HEAD"])?;
        fs::rename(&part, &folder)?;
    }
    Ok(folder)
}

fn programs(suite: &Path, language: &str) -> Result<Vec<PathBuf>> {
    let folder = suite.join("tests").join(language).join("testsuite/wasm32-wasip1");
    let missing = || format!("{} is not the suite as it is built", suite.display());
    let entries = fs::read_dir(&folder).with_context(missing)?;
    let mut programs = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "wasm") {
            programs.push(path);
        }
    }
    programs.sort();
    Ok(programs)
}

fn name(program: &Path) -> String {
    program.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// The place where a program finds its files.
#[derive(Clone, Copy)]
enum Tree {
    Memory,
    Host,
}

impl Tree {
    fn option(self) -> &'static str {
        match self {
            Self::Memory => "--files",
            Self::Host => "--dir",
        }
    }
}

/// A program, and its specification in the file next to it, if it has one.
struct Case {
    program: PathBuf,
    arguments: Vec<String>,
    environment: Vec<String>,
    root: Option<PathBuf>,
    code: i64,
    output: Option<String>,
}

impl Case {
    fn read(program: &Path) -> Result<Self> {
        let mut case = Self {
            program: program.to_owned(),
            arguments: Vec::new(),
            environment: Vec::new(),
            root: None,
            code: 0,
            output: None,
        };
        let path = program.with_extension("json");
        if !path.exists() {
            return Ok(case);
        }
        let odd = || format!("{} has an unknown entry", path.display());
        let said: Value = serde_json::from_slice(&fs::read(&path)?).with_context(odd)?;
        for (key, value) in said.as_object().with_context(odd)? {
            let text = || value.as_str().with_context(odd);
            match key.as_str() {
                "args" => {
                    for argument in value.as_array().with_context(odd)? {
                        case.arguments.push(argument.as_str().with_context(odd)?.to_owned());
                    }
                }
                "env" => {
                    for (name, value) in value.as_object().with_context(odd)? {
                        let value = value.as_str().with_context(odd)?;
                        case.environment.push(format!("{name}={value}"));
                    }
                }
                "root" => case.root = Some(program.with_file_name(text()?)),
                "exit_code" => case.code = value.as_i64().with_context(odd)?,
                "stdout" => case.output = Some(text()?.to_owned()),
                other => bail!("{}: {other} is not known here", path.display()),
            }
        }
        Ok(case)
    }

    /// Runs it; returns its fault, if any.
    fn hold(&self, tree: Tree) -> Result<Option<String>> {
        let target = host::target_folder();
        // Longer than any of them takes.
        let mut command = Command::new(target.join("debug/afresh"));
        command.args(["run", "--timeout", "60000"]).arg(&self.program).stdin(Stdio::null());
        for variable in &self.environment {
            command.arg("--env").arg(variable);
        }
        if let Some(root) = &self.root {
            // Each gets a separate copy: they write, and expect no files of one another.
            let copy = target.join("tmp/wasi-testsuite");
            if copy.exists() {
                fs::remove_dir_all(&copy)?;
            }
            copy_folder(root, &copy)?;
            command.arg(tree.option()).arg(match tree {
                Tree::Memory => format!("{}::/", copy.display()),
                Tree::Host => format!("{}::/:rw", copy.display()),
            });
        }
        let output = command.arg("--").args(&self.arguments).output()?;
        let (out, err) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if output.status.code().map(i64::from) != Some(self.code) {
            return Ok(Some(format!("{}, not {}: {out}{err}", output.status, self.code)));
        }
        let expected = self.output.as_deref().filter(|expected| *expected != out);
        Ok(expected.map(|expected| format!("wrote {out:?}, not {expected:?}")))
    }
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}
