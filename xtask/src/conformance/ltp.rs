//! The Linux Test Project's cases for system calls, each run as a guest and on this kernel.
//!
//! Every case counts that passes on this kernel as an unprivileged user, whether a guest has its
//! call or not. `docs/linux-calls.md` has the counts, and a reason for each case that does not pass
//! as a guest. The reasons are in `ltp_reasons.txt`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::reasons::Reasons;
use super::{NOBODY, in_parallel, is_root, processors, reason, run_limited, runner, write};
use crate::command::{run, succeeds};
use crate::host;

const REPOSITORY: &str = "https://github.com/linux-test-project/ltp";
const TAG: &str = "20260529";
/// The folder of the cases, one folder for each call or family of calls.
const CASES: &str = "testcases/kernel/syscalls";
/// Seconds that a case may take.
const SECONDS: u64 = 60;
/// Cases for each processor that run together: most of a case is sleep.
const CASES_PER_PROCESSOR: usize = 2;
/// Why cases do not pass.
const REASONS: &str = include_str!("ltp_reasons.txt");

/// The result of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    /// It checked something, and all of that held.
    Passed,
    /// It checked nothing, for want of a call, a file, or rights.
    Skipped,
    Failed,
    /// It did not end.
    Hung,
    /// The runner failed, not the case.
    Crashed,
}

impl Verdict {
    fn of(name: &str) -> Option<Self> {
        [Self::Passed, Self::Skipped, Self::Failed, Self::Hung, Self::Crashed]
            .into_iter()
            .find(|verdict| format!("{verdict:?}") == name)
    }
}

/// A case: its name, and the command that it is, without a path.
struct Case {
    call: String,
    name: String,
    words: Vec<String>,
}

/// The result of a case as a guest; only for those that pass on this kernel.
struct Row {
    call: String,
    name: String,
    verdict: Verdict,
    why: String,
}

/// Runs the cases of the families called `names`, or all, and writes the page after a run of all.
pub(super) fn main(source: Option<&str>, names: &[&str]) -> Result<()> {
    let folder = host::target_folder().join("conformance").join(TAG);
    fetch(source.unwrap_or(REPOSITORY), &folder)?;
    build(&folder, names)?;
    super::build_runner()?;
    let cases = cases(&folder, names)?;
    let rows = run_all(&folder, &cases)?;
    let reasons = Reasons::parse(REASONS)?;
    let table = table(&rows, &reasons);
    print!("{table}");
    for row in rows.iter().filter(|row| row.verdict != Verdict::Passed) {
        println!("{} {}: {:?}: {}", row.call, row.name, row.verdict, row.why);
    }
    if names.is_empty() {
        let failed =
            |name: &str| rows.iter().any(|row| row.name == name && row.verdict != Verdict::Passed);
        let outdated = reasons.outdated(failed);
        if !outdated.is_empty() {
            println!("these cases pass, or do not count: {}", outdated.join(" "));
        }
        write("docs/linux-calls.md", &table)?;
    }
    Ok(())
}

/// Puts the sources in `folder`, unless they are there.
fn fetch(source: &str, folder: &Path) -> Result<()> {
    if folder.join("configure.ac").is_file() {
        return Ok(());
    }
    let mut clone = Command::new("git");
    clone.args(["-c", "advice.detachedHead=false", "clone", "--quiet", "--depth", "1"]);
    run(clone.args(["--branch", TAG, source]).arg(folder))
}

/// Builds the project's library and the cases. Cases that this host cannot build are left out.
fn build(folder: &Path, calls: &[&str]) -> Result<()> {
    let make = |arguments: &[&str]| {
        let mut make = Command::new("make");
        make.current_dir(folder).args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
        // Without debug information the cases take 0.5 GB instead of 2.
        make.env("DEBUG_CFLAGS", "");
        make
    };
    if !folder.join("lib/libltp.a").is_file() {
        let missing = ["autoconf", "automake", "m4", "make", "pkg-config"];
        let missing: Vec<_> =
            missing.into_iter().filter(|name| crate::command::find(name).is_none()).collect();
        if !missing.is_empty() {
            host::apt_install(&missing)?;
        }
        host::c_compiler()?;
        run(&mut make(&["autotools"]))?;
        let mut configure = Command::new("./configure");
        run(configure.current_dir(folder).env("CFLAGS", "-O2").stdout(Stdio::null()))?;
        run(&mut make(&["-C", "lib"]))?;
        run(&mut make(&["-C", "libs"]))?;
    }
    let homes = match calls {
        [] => vec![CASES.to_owned()],
        calls => calls.iter().map(|call| format!("{CASES}/{call}")).collect(),
    };
    for home in homes {
        if !folder.join(&home).is_dir() {
            bail!("the project has no cases in {home}");
        }
        println!("building {home}");
        // With `-k` make continues after errors; cases that were not built are not run.
        succeeds(&mut make(&["-k", "-j2", "-C", &home]));
    }
    Ok(())
}

/// The cases that were built, of those that the project itself runs.
fn cases(folder: &Path, calls: &[&str]) -> Result<Vec<Case>> {
    let root = folder.join(CASES);
    let mut homes = BTreeMap::new();
    let mut folders = match calls {
        [] => vec![root.clone()],
        calls => calls.iter().map(|call| root.join(call)).collect(),
    };
    while let Some(home) = folders.pop() {
        let call = home.strip_prefix(&root).unwrap_or(&home).display().to_string();
        for entry in fs::read_dir(&home).with_context(|| format!("{}", home.display()))? {
            let (entry, call) = (entry?, call.clone());
            let metadata = entry.metadata()?;
            if metadata.is_dir() {
                folders.push(entry.path());
            } else if metadata.permissions().mode() & 0o111 != 0 {
                homes.insert(entry.file_name().to_string_lossy().into_owned(), call);
            }
        }
    }
    let lists = ["runtest/syscalls", "runtest/syscalls-ipc"]
        .map(|list| fs::read_to_string(folder.join(list)));
    let lists = lists.into_iter().collect::<Result<String, _>>()?;
    let case = |line: &str| {
        let mut words = line.split_whitespace().map(str::to_owned);
        let (name, words): (_, Vec<_>) = (words.next()?, words.collect());
        let call = homes.get(words.first()?)?.clone();
        Some((name.clone(), Case { call, name, words }))
    };
    // A case that is in both lists is one.
    let cases: BTreeMap<_, _> =
        lists.lines().filter(|line| !line.starts_with('#')).filter_map(case).collect();
    Ok(cases.into_values().collect())
}

/// Runs the cases, and once more, one after another, those that do not pass: a loaded machine makes
/// some of them late.
fn run_all(folder: &Path, cases: &[Case]) -> Result<Vec<Row>> {
    let is_root = is_root()?;
    let threads = processors() * CASES_PER_PROCESSOR;
    let natives =
        in_parallel(cases, threads, |thread, case| native(folder, case, thread, is_root))?;
    let passed = cases.iter().zip(natives).filter(|(_, verdict)| *verdict == Verdict::Passed);
    let cases: Vec<_> = passed.map(|(case, _)| case).collect();
    println!("running {} cases", cases.len());
    let mut results = in_parallel(&cases, threads, |_, case| guest(folder, case))?;
    for (case, result) in cases.iter().zip(&mut results) {
        if !matches!(result.0, Verdict::Passed | Verdict::Skipped) {
            *result = guest(folder, case)?;
        }
    }
    let row = |(case, (verdict, why)): (&&Case, _)| Row {
        call: case.call.clone(),
        name: case.name.clone(),
        verdict,
        why,
    };
    let mut rows: Vec<_> = cases.iter().zip(results).map(row).collect();
    rows.sort_by(|a, b| (&a.call, &a.name).cmp(&(&b.call, &b.name)));
    Ok(rows)
}

impl Case {
    fn home(&self, folder: &Path) -> PathBuf {
        folder.join(CASES).join(&self.call)
    }

    fn variables(&self, folder: &Path) -> [(&'static str, String); 3] {
        [
            ("PATH", format!("{}:/usr/bin:/bin", self.home(folder).display())),
            ("KCONFIG_SKIP_CHECK", "1".to_owned()),
            ("LTP_COLORIZE_OUTPUT", "n".to_owned()),
        ]
    }
}

/// Runs a case on this kernel. The verdict is kept: it is the same every time, and some cases take
/// long.
fn native(folder: &Path, case: &Case, thread: usize, is_root: bool) -> Result<Verdict> {
    let known = folder.join("native").join(&case.name);
    if let Some(verdict) = fs::read_to_string(&known).ok().as_deref().and_then(Verdict::of) {
        return Ok(verdict);
    }
    let scratch = host::target_folder().join("conformance").join(format!("scratch-{thread}"));
    fs::create_dir_all(&scratch)?;
    fs::set_permissions(&scratch, fs::Permissions::from_mode(0o777))?;
    let log = folder.join("native-logs").join(&case.name);
    fs::create_dir_all(folder.join("native-logs"))?;
    let run = || {
        let mut command = Command::new(case.home(folder).join(&case.words[0]));
        command.args(&case.words[1..]).env_clear().envs(case.variables(folder));
        command.env("TMPDIR", &scratch).current_dir(&scratch);
        if is_root {
            command.uid(NOBODY).gid(NOBODY);
        }
        judge(&mut command, &log)
    };
    let (mut verdict, _) = run()?;
    if verdict == Verdict::Failed {
        (verdict, _) = run()?;
    }
    fs::create_dir_all(folder.join("native"))?;
    fs::write(known, format!("{verdict:?}"))?;
    Ok(verdict)
}

/// Runs a case as a guest.
fn guest(folder: &Path, case: &Case) -> Result<(Verdict, String)> {
    let mut guest = runner();
    guest.arg("--dir").arg(folder).args(["--seconds", &SECONDS.to_string()]);
    for (name, value) in case.variables(folder).into_iter().chain([("TMPDIR", "/tmp".to_owned())]) {
        guest.arg("--env").arg(format!("{name}={value}"));
    }
    guest.arg(case.home(folder).join(&case.words[0])).args(&case.words[1..]);
    let log = folder.join("guest").join(&case.name);
    fs::create_dir_all(folder.join("guest"))?;
    judge(&mut guest, &log)
}

/// Runs a case, whose output is kept in `log`; returns the result, and the reason.
fn judge(command: &mut Command, log: &Path) -> Result<(Verdict, String)> {
    let status = run_limited(command, log, SECONDS + 10)?;
    let text = String::from_utf8_lossy(&fs::read(log)?).into_owned();
    let line = |words: &[&str]| {
        text.lines().find(|line| words.iter().any(|word| line.contains(word))).map(reason)
    };
    let bad = line(&["TFAIL", "TBROK", "TWARN"]);
    let last = || text.lines().last().map(reason).unwrap_or_default();
    Ok(match status {
        None => (Verdict::Hung, last()),
        Some(status) if status.code() == Some(125) => {
            let late = text.contains("once:") && text.contains("start limit");
            (if late { Verdict::Hung } else { Verdict::Crashed }, last())
        }
        Some(_) if bad.is_some() => (Verdict::Failed, bad.unwrap_or_default()),
        Some(status) if status.signal().is_some() || status.code() > Some(127) => {
            (Verdict::Failed, last())
        }
        Some(_) if text.contains("TPASS") => (Verdict::Passed, String::new()),
        Some(_) => match line(&["TCONF"]) {
            Some(why) => (Verdict::Skipped, why),
            None => (Verdict::Failed, last()),
        },
    })
}

/// The counts, a table of reasons, and a table by call with the cases that do not pass.
fn table(rows: &[Row], reasons: &Reasons<'_>) -> String {
    let mut by_call: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
    rows.iter().for_each(|row| by_call.entry(&row.call).or_default().push(row));
    let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
    let passed = count(Verdict::Passed);
    let mut text = format!(
        "Of {} cases that pass on the kernel itself {passed} pass as guests ({:.1} %). {} fail, {} check\n\
         nothing there, {} do not end in time, and {} end the guest by an engine error.\n\n",
        rows.len(),
        100.0 * passed as f64 / rows.len().max(1) as f64,
        count(Verdict::Failed),
        count(Verdict::Skipped),
        count(Verdict::Hung),
        count(Verdict::Crashed),
    );
    let failed = rows.iter().filter(|row| row.verdict != Verdict::Passed);
    text += &reasons.table(failed.map(|row| (row.name.as_str(), row.why.as_str())));
    text += "\n| call | passed | not passed |\n|---|---|---|\n";
    for (call, rows) in by_call {
        let passed = rows.iter().filter(|row| row.verdict == Verdict::Passed).count();
        let rest = rows.iter().filter(|row| row.verdict != Verdict::Passed);
        let rest: Vec<_> = rest
            .map(|row| match row.verdict {
                Verdict::Skipped => format!("{} (skipped)", row.name),
                Verdict::Hung => format!("{} (not in time)", row.name),
                Verdict::Crashed => format!("{} (error)", row.name),
                _ => row.name.clone(),
            })
            .collect();
        let _ = writeln!(text, "| {call} | {passed} of {} | {} |", rows.len(), rest.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_judged_by_what_it_says_and_how_it_ends() {
        let folder = std::env::temp_dir().join(format!("afresh-judge-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let judged = |script: &str| {
            let mut command = Command::new("sh");
            judge(command.args(["-c", script]), &folder.join("log")).expect("it runs").0
        };
        assert_eq!(judged("echo 'a: TPASS: x'"), Verdict::Passed);
        assert_eq!(judged("echo 'a: TPASS: x'; echo 'a: TFAIL: y'; exit 1"), Verdict::Failed);
        assert_eq!(judged("echo 'a: TCONF: no such call'; exit 32"), Verdict::Skipped);
        assert_eq!(judged("echo 'a: TPASS: x'; kill -9 $$"), Verdict::Failed);
        assert_eq!(judged("exit 0"), Verdict::Failed);
        assert_eq!(judged("echo 'once: broken' >&2; exit 125"), Verdict::Crashed);
        let _ = fs::remove_dir_all(&folder);
    }

    #[test]
    fn each_reason_of_the_list_is_for_one_case() {
        Reasons::parse(REASONS).expect("a list of reasons");
    }
}
