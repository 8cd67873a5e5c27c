//! The wall clock of a host, which a test can step. The library `clock.c` stands between the host
//! and the C library.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A clock for one host.
pub(crate) struct Clock {
    library: PathBuf,
    offset: PathBuf,
}

impl Clock {
    /// Builds the library in `dir`.
    pub(crate) fn build(dir: &Path) -> PathBuf {
        let library = dir.join("clock.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fleet/clock.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"]).arg(&library);
        let status = compiler.arg(source).status().expect("cc, which links this test, runs");
        assert!(status.success(), "{status}");
        library
    }

    /// The clock of the host `name`, which shows the right time.
    pub(crate) fn new(library: &Path, dir: &Path, name: &str) -> Self {
        let clock = Self { library: library.to_owned(), offset: dir.join(format!("{name}.clock")) };
        clock.step(0);
        clock
    }

    /// Makes the host's clock differ from the right time by so many seconds.
    pub(crate) fn step(&self, seconds: i64) {
        // In place: the host has the file mapped.
        let options = &mut fs::File::options();
        let file = options.create(true).truncate(false).write(true).open(&self.offset).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &seconds.to_ne_bytes(), 0).unwrap();
    }

    /// Gives a host that is to be started this clock.
    pub(crate) fn equip(&self, command: &mut Command) {
        command.env("LD_PRELOAD", &self.library).env("AFRESH_TEST_CLOCK", &self.offset);
    }
}

#[test]
fn a_program_with_a_stepped_clock_sees_the_step() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Clock::new(&Clock::build(dir.path()), dir.path(), "date");
    let seconds = || -> i64 {
        let mut command = Command::new("date");
        clock.equip(&mut command);
        let output = command.arg("+%s").output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().parse().unwrap()
    };
    let before = seconds();
    clock.step(-100_000);
    assert!(seconds() < before - 50_000);
}
