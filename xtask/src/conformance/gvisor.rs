//! `cargo xtask conformance --gvisor`: gVisor's tests of Linux system calls, as a guest and on this
//! kernel.
//!
//! The denominator is the tests that pass on this kernel as an unprivileged user. A binary holds
//! many tests: each run takes all that have no result yet, so a test that ends or hangs its binary
//! costs one more run, not the others' results. `docs/gvisor-tests.md` has the counts.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Result, bail};

use super::gvisor_build::{self, TAG};
use super::{NOBODY, is_root, reason, run_limited, write};
use crate::command::{find, output};
use crate::host;

const REPOSITORY: &str = "https://github.com/google/gvisor";
/// Seconds that a run of a binary may take, as a guest and on this kernel.
const SECONDS: u64 = 100;
/// Runs of a binary that a test may end; the rest of its tests have no result then.
const MAX_ENDED_RUNS: usize = 12;
/// Tests of a binary that are run once more, each alone, if they do not pass: a loaded machine
/// makes them late.
const MAX_REPEATS: usize = 60;
/// Tests that are run together at first; fewer where they do not end in time, for their output is
/// lost then.
const MAX_TESTS: usize = 60;
/// Bytes of a filter; the kernel limits one string of the environment to 128 KiB.
const MAX_FILTER: usize = 100_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    Failed,
    Skipped,
    /// It ended its binary, or did not end in time.
    Ended,
}

impl Verdict {
    const ALL: [Self; 4] = [Self::Passed, Self::Failed, Self::Skipped, Self::Ended];

    fn of(word: &str) -> Option<Self> {
        match word {
            "OK" => Some(Self::Passed),
            "FAILED" => Some(Self::Failed),
            "SKIPPED" => Some(Self::Skipped),
            _ => None,
        }
    }
}

/// The results of tests by name, each with the first line of its message.
type Results = BTreeMap<String, (Verdict, String)>;

/// The tests of a binary that pass on this kernel, and the results of those that fail as guests.
struct Row {
    binary: String,
    count: usize,
    failed: Results,
}

/// Runs the binaries called `names`, or all, and writes the page after a run of all.
pub(super) fn main(source: Option<&str>, names: &[&str]) -> Result<()> {
    let source = source.unwrap_or(REPOSITORY);
    let folder = host::target_folder().join("conformance").join(format!("gvisor-{TAG}"));
    let binaries = gvisor_build::build(source, &folder, names)?;
    super::build_runner()?;
    let is_root = is_root()?;
    let mut rows = Vec::new();
    for binary in &binaries {
        let start = Instant::now();
        let row = measure(&folder, binary, is_root)?;
        let passed = row.count - row.failed.len();
        let seconds = start.elapsed().as_secs();
        println!("{binary}: {passed} of {} pass as guests ({seconds} s)", row.count);
        for (test, (verdict, why)) in &row.failed {
            println!("  {test}: {verdict:?}: {why}");
        }
        rows.push(row);
    }
    let text = table(&rows);
    print!("{text}");
    if names.is_empty() { write("docs/gvisor-tests.md", &text) } else { Ok(()) }
}

fn measure(folder: &Path, binary: &str, is_root: bool) -> Result<Row> {
    let program = folder.join("bin").join(binary);
    let tests = list(&program)?;
    let (native, log) = (folder.join("native").join(binary), folder.join("output"));
    let expected = match fs::read_to_string(&native) {
        Ok(text) => text.lines().map(str::to_owned).collect::<Vec<_>>(),
        Err(_) => {
            let results = run_all(&tests, &log, |filter, log| {
                run_native(folder, (&program, is_root), filter, log)
            })?;
            let passed = |test: &&String| matches!(results.get(*test), Some((Verdict::Passed, _)));
            let passed: Vec<_> = tests.iter().filter(passed).cloned().collect();
            fs::create_dir_all(folder.join("native"))?;
            fs::write(native, passed.join("\n"))?;
            passed
        }
    };
    let guest = |filter: &str, log: &Path| run_guest(folder, &program, filter, log);
    let mut failed = run_all(&expected, &log, guest)?;
    failed.retain(|_, (verdict, _)| *verdict != Verdict::Passed);
    let repeated: Vec<_> = failed.keys().take(MAX_REPEATS).cloned().collect();
    for test in repeated {
        failed.extend(run_all(std::slice::from_ref(&test), &log, guest)?);
    }
    failed.retain(|_, (verdict, _)| *verdict != Verdict::Passed);
    Ok(Row { binary: binary.to_owned(), count: expected.len(), failed })
}

/// The names of the tests in a binary, without disabled ones.
fn list(program: &Path) -> Result<Vec<String>> {
    let text = output(Command::new(program).arg("--gtest_list_tests"))?;
    Ok(names_in(&text))
}

fn names_in(text: &str) -> Vec<String> {
    let (mut suite, mut names) = (String::new(), Vec::new());
    for line in text.lines() {
        // A comment gives the parameters.
        let name = line.split('#').next().unwrap_or_default().trim();
        if !line.starts_with(' ') {
            name.clone_into(&mut suite);
        } else if suite.ends_with('.') {
            names.push(format!("{suite}{name}"));
        }
    }
    names.retain(|name| !name.contains("DISABLED_"));
    names
}

/// Runs `tests` until each has a result. `run` runs those that a filter names and writes their
/// output to a file.
fn run_all(
    tests: &[String],
    log: &Path,
    run: impl Fn(&str, &Path) -> Result<()>,
) -> Result<Results> {
    let mut results = Results::new();
    let (mut rest, mut ended, mut together): (&[String], usize, usize) = (tests, 0, MAX_TESTS);
    while let Some(first) = rest.first().filter(|_| ended < MAX_ENDED_RUNS) {
        let mut length = 0;
        let fits = |test: &&String| {
            length += test.len() + 1;
            length < MAX_FILTER
        };
        let count = rest.iter().take(together).take_while(fits).count().max(1);
        run(&rest[..count].join(":"), log)?;
        let text = String::from_utf8_lossy(&fs::read(log)?).into_owned();
        let found = judge(&text);
        if found.is_empty() && count > 1 {
            together = (count / 4).max(1);
            continue;
        }
        let is_ended = |(verdict, _): &(Verdict, String)| *verdict == Verdict::Ended;
        ended += usize::from(found.is_empty() || found.values().any(is_ended));
        // Tests run in the order of the binary. Those before the last result have run, too.
        let done = rest[..count].iter().rposition(|test| found.contains_key(test));
        if done.is_none() {
            let last = text.lines().last().map(reason).unwrap_or_default();
            results.insert(first.clone(), (Verdict::Ended, last));
        }
        results.extend(found);
        rest = &rest[done.map_or(1, |at| at + 1)..];
    }
    let unknown =
        tests.iter().filter(|test| !results.contains_key(*test)).cloned().collect::<Vec<_>>();
    results
        .extend(unknown.into_iter().map(|test| (test, (Verdict::Ended, "no result".to_owned()))));
    Ok(results)
}

/// The results in a binary's output.
fn judge(text: &str) -> Results {
    let mut results = Results::new();
    let (mut now, mut said) = (None, String::new());
    for line in text.lines() {
        if let Some((_, name)) = line.split_once("[ RUN      ] ") {
            (now, said) = (Some(name.trim().to_owned()), String::new());
            continue;
        }
        let word = line.strip_prefix('[').and_then(|line| line.split_once(']'));
        let verdict = word.and_then(|(word, rest)| Some((Verdict::of(word.trim())?, rest.trim())));
        match (verdict, &now) {
            (Some((verdict, rest)), Some(name))
                if rest.split([',', ' ']).next() == Some(name.as_str()) =>
            {
                results.insert(name.clone(), (verdict, std::mem::take(&mut said)));
                now = None;
            }
            _ if said.is_empty() && now.is_some() => said = message(line),
            _ => {}
        }
    }
    if let Some(name) = now {
        results.insert(name, (Verdict::Ended, said));
    }
    results
}

/// A line of a failure, without the path of the source.
fn message(line: &str) -> String {
    let line = line
        .rsplit_once('/')
        .filter(|(_, rest)| rest.contains(".cc:"))
        .map_or(line, |(_, rest)| rest);
    reason(line)
}

fn run_native(
    folder: &Path,
    (program, is_root): (&Path, bool),
    filter: &str,
    log: &Path,
) -> Result<()> {
    let scratch = folder.join("scratch");
    fs::create_dir_all(&scratch)?;
    fs::set_permissions(&scratch, fs::Permissions::from_mode(0o777))?;
    let mut command = Command::new(program);
    command.env_clear().envs(variables(folder)).env("GTEST_FILTER", filter);
    command.env("TEST_TMPDIR", &scratch).current_dir(&scratch);
    if is_root {
        command.uid(NOBODY).gid(NOBODY);
    }
    run_limited(&mut command, log, SECONDS + 10).map(drop)
}

fn run_guest(folder: &Path, program: &Path, filter: &str, log: &Path) -> Result<()> {
    let mut command = super::runner();
    command.arg("--dir").arg(folder.join("bin")).args(["--seconds", &SECONDS.to_string()]);
    let filter = ("GTEST_FILTER", filter.to_owned());
    for (name, value) in
        variables(folder).into_iter().chain([filter, ("TEST_TMPDIR", "/tmp".to_owned())])
    {
        command.arg("--env").arg(format!("{name}={value}"));
    }
    run_limited(command.arg(program), log, SECONDS + 10).map(drop)
}

fn variables(folder: &Path) -> [(&'static str, String); 3] {
    [
        ("PATH", "/usr/bin:/bin".to_owned()),
        ("GTEST_COLOR", "no".to_owned()),
        ("TEST_PROGRAMS", folder.join("bin").display().to_string()),
    ]
}

/// A table by binary: how many tests pass, and which do not, tests with parameters together.
fn table(rows: &[Row]) -> String {
    let all: usize = rows.iter().map(|row| row.count).sum();
    let failed: usize = rows.iter().map(|row| row.failed.len()).sum();
    let mut text = format!(
        "Of {all} tests that pass on the kernel itself {} pass as guests ({:.1} %).\n\n| binary | passed | not passed |\n|---|---|---|\n",
        all - failed,
        100.0 * (all - failed) as f64 / all.max(1) as f64,
    );
    for row in rows.iter().filter(|row| row.count > 0) {
        let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
        for name in row.failed.keys() {
            *kinds.entry(kind(name)).or_default() += 1;
        }
        let kinds: Vec<_> = kinds
            .into_iter()
            .map(
                |(kind, count)| {
                    if count == 1 { kind.to_owned() } else { format!("{kind} ({count})") }
                },
            )
            .collect();
        let passed = row.count - row.failed.len();
        let _ =
            writeln!(text, "| {} | {passed} of {} | {} |", row.binary, row.count, kinds.join(", "));
    }
    let verdicts = Verdict::ALL.map(|verdict| {
        let of = |row: &Row| row.failed.values().filter(|(is, _)| *is == verdict).count();
        (verdict, rows.iter().map(of).sum::<usize>())
    });
    let [_, (_, failed), (_, skipped), (_, ended)] = verdicts;
    let _ = writeln!(
        text,
        "\nOf the others {failed} fail, {skipped} are skipped as guests, and {ended} end their binary or do not end in \
         {SECONDS} s."
    );
    text
}

/// A test's name without its instantiation and parameters: `Prefix/Suite.Test/3` is `Test`.
fn kind(name: &str) -> &str {
    let test = name.split_once('.').map_or(name, |(_, test)| test);
    test.split('/').next().unwrap_or(test)
}

/// Fails with the way out if this host cannot build C++.
pub(super) fn require_libraries() -> Result<()> {
    let found = Path::new("/usr/include/absl/strings/str_cat.h").exists()
        && Path::new("/usr/include/gmock/gmock.h").exists();
    if !found {
        if find("apt-get").is_none() {
            bail!("gVisor's tests need the headers of Abseil and GoogleTest; install them first");
        }
        host::apt_install(&["libabsl-dev", "libgtest-dev", "libgmock-dev"])?;
    }
    host::cxx_compiler()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_suites_and_no_parameters() {
        let text = "Plain.\n  One\n  DISABLED_Two\nAll/Typed.  # TypeParam = int\n  Three/0  # GetParam() = 4\n";
        assert_eq!(names_in(text), ["Plain.One", "All/Typed.Three/0"]);
        assert_eq!(kind("All/Typed.Three/0"), "Three");
    }

    #[test]
    fn results_are_read_also_where_a_binary_ends() {
        let text = "[==========] Running 4 tests\n[ RUN      ] A.One\n[       OK ] A.One (0 ms)\n[ RUN      ] A.Two\n\
                    a/b/x.cc:3: Failure\n[  FAILED  ] A.Two, where GetParam() = 1 (2 ms)\n[ RUN      ] A.Three\n\
                    [  SKIPPED ] A.Three (0 ms)\n[ RUN      ] A.Four\nkilled\n";
        let results = judge(text);
        let verdicts: Vec<_> =
            results.iter().map(|(name, (verdict, _))| (&name[..], *verdict)).collect();
        assert_eq!(
            verdicts,
            [
                ("A.Four", Verdict::Ended),
                ("A.One", Verdict::Passed),
                ("A.Three", Verdict::Skipped),
                ("A.Two", Verdict::Failed),
            ]
        );
        assert_eq!(results["A.Two"].1, "x.cc:3: Failure");
    }

    #[test]
    fn a_test_that_ends_its_binary_costs_only_its_own_result() {
        let tests = ["A.One", "A.Two", "A.Three"].map(str::to_owned);
        let log = std::env::temp_dir().join(format!("afresh-gvisor-{}", std::process::id()));
        let results = run_all(&tests, &log, |filter, log| {
            let text: String = filter
                .split(':')
                .take_while(|test| *test != "A.Two" || filter.starts_with("A.Two"))
                .map(|test| format!("[ RUN      ] {test}\n[       OK ] {test} (0 ms)\n"))
                .collect();
            let dies = filter.starts_with("A.Two");
            fs::write(log, if dies { "[ RUN      ] A.Two\n".to_owned() } else { text })?;
            Ok(())
        });
        let _ = fs::remove_file(log);
        let results = results.expect("results");
        assert_eq!(results["A.One"].0, Verdict::Passed);
        assert_eq!(results["A.Two"].0, Verdict::Ended);
        assert_eq!(results["A.Three"].0, Verdict::Passed);
    }
}
