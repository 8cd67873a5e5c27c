//! Guests for tests: C programs, compiled when they are needed.

pub(crate) mod layout;
pub(crate) mod states;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use afresh_linux::{Instance, PlatformError, Program, WarmError};

/// Compiles `name`, or prints why that is impossible.
pub(crate) fn compiled(name: &str, flags: &[&str]) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guests").join(name);
    let mut out = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    // Tests run in parallel: each has a separate file.
    let thread = std::thread::current().name().unwrap_or("main").replace("::", "-");
    out.push(format!("{name}-{thread}-{}", std::process::id()));
    let made =
        Command::new("cc").args(["-O1", "-w"]).args(flags).arg("-o").args([&out, &source]).output();
    match made {
        Ok(made) if made.status.success() => Some(out),
        Ok(made) => {
            let said = String::from_utf8_lossy(&made.stderr);
            assert!(said.contains("cannot find -l"), "cc {flags:?} {name}: {said}");
            println!("SKIPPED: no static C library: cc {flags:?} {name}");
            None
        }
        Err(error) => {
            println!("SKIPPED: no C compiler (cc): {error}");
            None
        }
    }
}

/// A time limit of so many seconds, and of ten times as many on arm64, which tests emulate.
pub(crate) fn limit(seconds: u64) -> Duration {
    Duration::from_secs(if cfg!(target_arch = "aarch64") { 10 * seconds } else { seconds })
}

/// The value, or `None` with a line about the missing host feature.
pub(crate) fn here<T>(result: Result<T, WarmError>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(WarmError::Platform(error @ PlatformError::Missing { .. })) => {
            println!("SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// An instance of a static C program, warmed.
pub(crate) fn warm(name: &str, shape: impl Fn(Program) -> Program) -> Option<Instance> {
    let path = compiled(name, &["-static"])?;
    let mut instance = here(shape(Program::new(path)).warm())?.instance();
    instance.prepare().unwrap();
    Some(instance)
}

/// CPython, with the host files that it needs granted.
pub(crate) fn python() -> Option<Program> {
    let ask = "import sys; print(sys.executable); print(sys.base_prefix); print(sys.prefix)";
    let out = match Command::new("python3").args(["-c", ask]).output() {
        Ok(out) if out.status.success() => String::from_utf8_lossy(&out.stdout).into_owned(),
        Ok(out) => {
            println!("SKIPPED: python3: {}", out.status);
            return None;
        }
        Err(error) => {
            println!("SKIPPED: no python3: {error}");
            return None;
        }
    };
    let mut lines = out.lines();
    let program = Program::new(lines.next()?).env("PYTHONDONTWRITEBYTECODE", "1");
    // The system's own directories are granted anyway.
    Some(
        lines
            .filter(|prefix| *prefix != "/usr")
            .fold(program, |program, prefix| program.grant(prefix)),
    )
}
