//! Servers that tests talk to, and clients of others that carry our snapshots: an S3 gateway, an
//! OCI registry, nats-server, crane and oras from the Go module proxy; skopeo and umoci from the
//! distribution.
//!
//! Programs from the proxy are built once into `target/tools`, under names that carry versions.
//! Building all of them takes four to five minutes on two cores, in parallel with the other steps
//! and within a limit of time, and 2.8 GB of sources and objects, which are removed afterwards:
//! Go's own caches are left alone. Without Go, or without the proxy, their tests are skipped,
//! loudly.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use crate::command::find;
use crate::host;

/// Time for all, from when they were begun.
const LIMIT: Duration = Duration::from_secs(10 * 60);

/// A program that `go install` provides.
struct Tool {
    /// The file that comes out.
    program: &'static str,
    package: &'static str,
    version: &'static str,
    /// Where its tests look for it.
    variable: &'static str,
}

const TOOLS: [Tool; 5] = [
    Tool {
        program: "versitygw",
        package: "github.com/versity/versitygw/cmd/versitygw",
        version: "v1.8.0",
        variable: "AFRESH_TEST_VERSITYGW",
    },
    Tool {
        program: "registry",
        package: "github.com/distribution/distribution/v3/cmd/registry",
        version: "v3.1.2",
        variable: "AFRESH_TEST_REGISTRY",
    },
    Tool {
        program: "crane",
        package: "github.com/google/go-containerregistry/cmd/crane",
        version: "v0.20.6",
        variable: "AFRESH_TEST_CRANE",
    },
    Tool {
        program: "oras",
        package: "oras.land/oras/cmd/oras",
        version: "v1.2.3",
        variable: "AFRESH_TEST_ORAS",
    },
    Tool {
        program: "nats-server",
        package: "github.com/nats-io/nats-server/v2",
        version: "v2.15.1",
        variable: "AFRESH_TEST_NATS_SERVER",
    },
];

/// The programs from the distribution.
const PACKAGED: [&str; 2] = ["skopeo", "umoci"];

impl Tool {
    fn folder(&self) -> PathBuf {
        host::target_folder().join("tools").join(format!("{}-{}", self.program, self.version))
    }

    fn file(&self) -> PathBuf {
        self.folder().join(self.program)
    }
}

/// Installs the packages that are its arguments, from Python's index, in the folder `$0`.
pub(crate) const PIP: &str = "python3 -m venv --clear \"$0\" && \
    \"$0/bin/python\" -m pip install --quiet --disable-pip-version-check \"$@\"";

/// Where a package of a registry of another language is installed, by how that registry writes its
/// name and version.
pub(crate) fn of_registry(package: &str) -> PathBuf {
    let name = package.trim_start_matches('@').replace("==", "-").replace(['/', '@'], "-");
    host::target_folder().join("tools").join(name)
}

/// Go's caches during the build.
fn cache() -> PathBuf {
    host::target_folder().join("tools/cache")
}

/// The installations under way, and how each ended.
pub(crate) struct ToolInstallation(JoinHandle<Vec<Result<()>>>);

/// Begins to install missing tools, in the background: one after the other, for they have much in
/// common, and each build of Go compiles all that is not compiled yet when it begins.
pub(crate) fn install() -> ToolInstallation {
    let deadline = Instant::now() + LIMIT;
    ToolInstallation(std::thread::spawn(move || {
        TOOLS.iter().map(|tool| install_one(tool, deadline)).collect()
    }))
}

fn install_one(tool: &Tool, deadline: Instant) -> Result<()> {
    // A caller that sets the variable brings another one.
    if std::env::var_os(tool.variable).is_some() || tool.file().is_file() {
        return Ok(());
    }
    if find("go").is_none() {
        bail!("there is no Go to build it with");
    }
    let mut command = Command::new("go");
    command
        .args(["install", &format!("{}@{}", tool.package, tool.version)])
        .env("GOBIN", tool.folder())
        .env("GOMODCACHE", cache().join("modules"))
        .env("GOCACHE", cache().join("objects"))
        // Go protects its modules even from being removed.
        .env("GOFLAGS", "-modcacherw")
        // A folder's own settings for Go do not count here.
        .current_dir(std::env::temp_dir())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let child = command.spawn().context("cannot run go")?;
    let begun = Instant::now();
    wait(child, deadline, "go install")?;
    let seconds = begun.elapsed().as_secs();
    println!("(go install {}@{}: {seconds} s, in the background)", tool.package, tool.version);
    Ok(())
}

impl ToolInstallation {
    /// Waits for the installations and passes the paths of the programs to `command`; `missing`
    /// receives those that are missing.
    pub(crate) fn finish(self, command: &mut Command, mut missing: impl FnMut(&str)) {
        let results = self.0.join().unwrap_or_else(|_| {
            TOOLS.iter().map(|_| Err(anyhow!("the installation panicked"))).collect()
        });
        for (tool, result) in TOOLS.iter().zip(results) {
            match result {
                Ok(()) if std::env::var_os(tool.variable).is_some() => {}
                Ok(()) if tool.file().is_file() => {
                    command.env(tool.variable, tool.file());
                }
                Ok(()) => missing(&line(tool, "go install left no file")),
                Err(error) => missing(&line(tool, &format!("{error:#}"))),
            }
        }
        let packages = PACKAGED.into_iter().filter(|program| find(program).is_none());
        for program in packages {
            if let Err(error) = host::apt_install(&[program]) {
                missing(&format!("SKIPPED: tests with {program}: {error:#}"));
            }
        }
        if let Err(error) = std::fs::remove_dir_all(cache())
            && error.kind() != std::io::ErrorKind::NotFound
        {
            println!("cannot remove {}: {error}", cache().display());
        }
    }
}

fn line(tool: &Tool, why: &str) -> String {
    format!("SKIPPED: tests with {} {}: {why}", tool.program, tool.version)
}

/// Waits for an installation until `deadline`, and no longer. Fails with the last output of the
/// program.
pub(crate) fn wait(mut child: Child, deadline: Instant, what: &str) -> Result<()> {
    let begun = Instant::now();
    // Its output is read at the same time, so that it never waits for a reader.
    let mut stderr = child.stderr.take();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        if let Some(stderr) = &mut stderr {
            // Unreadable output is only missing from the message.
            let _ = std::io::Read::read_to_string(stderr, &mut text);
        }
        text
    });
    let status = loop {
        if let Some(status) =
            child.try_wait().with_context(|| format!("cannot wait until {what} ends"))?
        {
            break status;
        }
        if Instant::now() >= deadline {
            // It may have ended just now. Compilers that it started end with their file.
            let _ = child.kill();
            child.wait().with_context(|| format!("cannot wait until {what} ends"))?;
            bail!("{what} did not end within {} seconds", begun.elapsed().as_secs());
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let said = reader.join().unwrap_or_default();
    if !status.success() {
        let last = said.lines().rfind(|line| !line.starts_with("go: downloading"));
        bail!("{what} failed: {status}: {}", last.unwrap_or_default().trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn sh(script: &str) -> Child {
        Command::new("sh").args(["-c", script]).stderr(Stdio::piped()).spawn().expect("sh runs")
    }

    #[test]
    fn an_installation_that_fails_says_why_and_one_that_hangs_is_ended() {
        let soon = || Instant::now() + Duration::from_secs(20);
        assert!(wait(sh("exit 0"), soon(), "sh").is_ok());
        let script = "echo 'no such host' >&2; echo 'go: downloading x' >&2; exit 1";
        let error = wait(sh(script), soon(), "sh").expect_err("exit 1").to_string();
        assert!(error.contains("no such host"), "{error}");
        let start = Instant::now();
        let error =
            wait(sh("exec sleep 60"), Instant::now(), "sh").expect_err("too late").to_string();
        assert!(error.contains("within"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(50));
    }

    #[test]
    fn tools_are_installed_under_their_version_in_the_target_folder() {
        for tool in &TOOLS {
            let file = tool.file();
            assert!(file.starts_with(host::target_folder()), "{}", file.display());
            assert!(file.to_string_lossy().contains(tool.version), "{}", file.display());
            // The last part of a path may be a version.
            let package = tool.package.trim_end_matches("/v2");
            let name: Option<&str> = Path::new(package).file_name().and_then(|n| n.to_str());
            assert_eq!(name, Some(tool.program));
        }
    }
}
