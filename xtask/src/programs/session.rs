//! Runs of a case: preparation, a native run, a run as a guest.

use std::fs::{self, File};
use std::io::Read;
use std::net::ToSocketAddrs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::case::ProgramCase;
use crate::command::{find, output, succeeds};
use crate::host;

/// The search path of both runs, before the toolchain of Rust.
const PATH: &str =
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/games:/usr/local/go/bin";
/// The directory of a run, in the guest's memory or on the host.
const HOME: &str = "/tmp/afresh-programs";
/// The user without rights of native runs.
const NOBODY: u32 = 65534;
/// Maximum time of a run.
const RUN_TIMEOUT: Duration = Duration::from_secs(180);
/// Maximum time of a preparation, which may download.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(900);
/// MiB of memory and files of a guest.
const MEMORY: &str = "6144";
const STORAGE: &str = "4096";
/// Maximum characters of a reason.
const MAX_REASON: usize = 160;

/// The output of a run and its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RunEnd {
    pub(super) output: Vec<u8>,
    /// The exit status, or the reason of its absence.
    pub(super) status: Result<i32, String>,
}

/// A run: its ending and duration.
pub(super) struct TimedRun {
    pub(super) ending: RunEnd,
    pub(super) seconds: f64,
    /// The last line of standard error.
    pub(super) message: String,
}

/// The commands that run cases.
pub(super) struct Session {
    /// The command `afresh`.
    command: PathBuf,
    /// The toolchain of Rust, which is not at a fixed place.
    rust: Option<PathBuf>,
    is_root: bool,
}

impl Session {
    pub(super) fn new(command: PathBuf) -> Result<Self> {
        let rust = find("rustc").and_then(|_| {
            output(Command::new("rustc").args(["--print", "sysroot"])).ok().map(PathBuf::from)
        });
        let is_root = output(Command::new("id").arg("-u"))? == "0";
        Ok(Self { command, rust, is_root })
    }

    fn path(&self) -> String {
        match &self.rust {
            Some(rust) => format!("{PATH}:{}/bin", rust.display()),
            None => PATH.to_owned(),
        }
    }

    /// Why the case cannot run here, if it cannot.
    pub(super) fn missing(&self, case: &ProgramCase) -> Option<String> {
        if let Some(registry) = case.image.and_then(|image| image.registry()) {
            // Names of Docker's registry are served by another host.
            let server = if registry == "docker.io" { "registry-1.docker.io" } else { registry };
            let reached =
                (server, 443).to_socket_addrs().is_ok_and(|mut found| found.next().is_some());
            return (!reached).then(|| format!("the registry {registry} cannot be reached"));
        }
        let path = self.path();
        let has = |name: &&&str| match Path::new(name).is_absolute() {
            true => Path::new(name).is_file(),
            false => path.split(':').any(|folder| Path::new(folder).join(name).is_file()),
        };
        let missing: Vec<&str> = case.needs.iter().filter(|name| !has(name)).copied().collect();
        let packages = case.packages.join(" ");
        (!missing.is_empty())
            .then(|| format!("no {}; --install adds {packages}", missing.join(", ")))
    }

    /// The directory of the files of a case.
    fn files(case: &ProgramCase) -> PathBuf {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        let name: String = case.name.chars().map(plain).collect();
        host::target_folder().join("programs").join(name.trim_matches('-'))
    }

    /// Fills the directory of a case, unless the same script has filled it.
    pub(super) fn prepare(&self, case: &ProgramCase) -> Result<()> {
        let files = Self::files(case);
        let stamp = files.with_extension("prepared");
        if fs::read_to_string(&stamp).is_ok_and(|known| known == case.prepare) && files.is_dir() {
            return Ok(());
        }
        let _ = fs::remove_dir_all(&files);
        fs::create_dir_all(&files).with_context(|| files.display().to_string())?;
        if !case.prepare.is_empty() {
            let log = files.with_extension("prepare.log");
            let mut command = bash(case.prepare);
            command.env("PATH", self.path()).env("FILES", &files).current_dir(&files);
            let run = timed(&mut command, None, &log, PREPARE_TIMEOUT)?;
            if run.ending.status != Ok(0) {
                bail!("its preparation failed: {} ({})", run.message, log.display());
            }
        }
        fs::write(&stamp, case.prepare).with_context(|| stamp.display().to_string())
    }

    /// Runs a case without afresh.
    pub(super) fn native(&self, case: &ProgramCase) -> Result<TimedRun> {
        let _ = fs::remove_dir_all(HOME);
        fs::create_dir_all(HOME).context(HOME)?;
        let mut command = bash(&script(case));
        command.env_clear().envs(self.variables(case)).current_dir("/");
        if case.unprivileged && self.is_root {
            fs::set_permissions(HOME, fs::Permissions::from_mode(0o777)).context(HOME)?;
            command.uid(NOBODY).gid(NOBODY);
        }
        let run =
            timed(&mut command, None, &Self::files(case).with_extension("native.log"), RUN_TIMEOUT);
        let _ = fs::remove_dir_all(HOME);
        run
    }

    /// Runs a case as a guest.
    pub(super) fn guest(&self, case: &ProgramCase) -> Result<TimedRun> {
        let files = Self::files(case);
        let mut command = Command::new(&self.command);
        command.args(["exec", "--memory", MEMORY, "--storage", STORAGE]).current_dir("/");
        if files.is_dir() && case.image.is_none() {
            command.arg("--dir").arg(&files);
        }
        if case.unprivileged && self.is_root {
            command.arg("--user").arg(NOBODY.to_string());
        }
        if let Some(rust) = self.rust.as_ref().filter(|_| case.needs.contains(&"rustc")) {
            command.arg("--dir").arg(rust);
        }
        let log = files.with_extension("guest.log");
        let Some(image) = case.image else {
            for (name, value) in self.variables(case) {
                command.arg("--env").arg(format!("{name}={value}"));
            }
            command.args(["--", "bash", "-euc", &script(case)]);
            return timed(&mut command, None, &log, RUN_TIMEOUT);
        };
        match image.registry() {
            Some(_) => command.arg(image.reference),
            None => command.arg(files.join(image.reference)),
        };
        command.arg("--").args(image.command);
        timed(&mut command, Some(case.script), &log, RUN_TIMEOUT)
    }

    fn variables(&self, case: &ProgramCase) -> Vec<(&'static str, String)> {
        let files = Self::files(case).display().to_string();
        let own = |name, value: &str| (name, value.to_owned());
        vec![
            ("PATH", self.path()),
            ("FILES", files),
            own("HOME", HOME),
            own("LC_ALL", "C.UTF-8"),
            own("TZ", "UTC"),
        ]
    }
}

/// The script of a case, in its own directory.
fn script(case: &ProgramCase) -> String {
    format!("mkdir -p \"$HOME\"; cd \"$HOME\"; umask 022\n{}", case.script)
}

fn bash(script: &str) -> Command {
    let mut command = Command::new("bash");
    command.args(["-euc", script]);
    command
}

/// Runs a command with `input`, and its standard error in `log`. All that it has started ends with
/// it.
fn timed(
    command: &mut Command,
    input: Option<&str>,
    log: &Path,
    limit: Duration,
) -> Result<TimedRun> {
    let errors = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    let source = match input {
        Some(text) => {
            let file = log.with_extension("input");
            fs::write(&file, text).with_context(|| file.display().to_string())?;
            Stdio::from(File::open(&file)?)
        }
        None => Stdio::null(),
    };
    command.stdin(source).stdout(Stdio::piped()).stderr(errors).process_group(0);
    let started = Instant::now();
    let mut child = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
    let mut stdout = child.stdout.take().context("its output is a pipe")?;
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        stdout.read_to_end(&mut bytes).map(|_| bytes)
    });
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if started.elapsed() > limit {
            break None;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let seconds = started.elapsed().as_secs_f64();
    // Servers that the script has left.
    succeeds(Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]));
    let _ = child.wait();
    let output =
        reader.join().unwrap_or_else(|_| Err(std::io::Error::other("the reader panicked")))?;
    let status = match status {
        None => Err(format!("it did not end in {} s", limit.as_secs())),
        Some(status) => status.code().ok_or_else(|| status.to_string()),
    };
    let errors = String::from_utf8_lossy(&fs::read(log)?).into_owned();
    let last = errors.lines().rev().find(|line| !line.trim().is_empty());
    let message = last.unwrap_or_default().chars().take(MAX_REASON).collect();
    Ok(TimedRun { ending: RunEnd { output, status }, seconds, message })
}

/// The first difference between two endings.
pub(super) fn difference(expected: &RunEnd, found: &TimedRun) -> Option<String> {
    if *expected == found.ending {
        return None;
    }
    let text = |ending: &RunEnd| String::from_utf8_lossy(&ending.output).into_owned();
    let (one, two) = (text(expected), text(&found.ending));
    let mut lines = two.lines();
    let mut reason = one
        .lines()
        .find_map(|line| match lines.next() {
            Some(other) if other == line => None,
            Some(other) => Some(format!("`{other}` instead of `{line}`")),
            None => Some(format!("its output ends before `{line}`")),
        })
        .or_else(|| lines.next().map(|line| format!("`{line}` after the expected end")))
        .unwrap_or_default();
    match &found.ending.status {
        Err(why) => reason = format!("{why}; {reason}"),
        Ok(code) if expected.status != Ok(*code) => reason = format!("status {code}; {reason}"),
        Ok(_) => {}
    }
    let reason: String = reason.chars().filter(|c| !c.is_control()).take(MAX_REASON).collect();
    let message = if found.message.is_empty() {
        String::new()
    } else {
        format!("; last message: {}", found.message)
    };
    Some(reason.trim_end_matches("; ").to_owned() + &message)
}
