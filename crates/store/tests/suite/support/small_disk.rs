//! A small disk that a test fills: a tmpfs. Shared by the tests of several crates.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A mounted tmpfs.
pub(crate) struct SmallDisk {
    dir: PathBuf,
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Also where a file of it is still open.
        run("umount", &["-l".as_ref(), self.dir.as_ref()]);
    }
}

fn run(program: &str, arguments: &[&std::ffi::OsStr]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

impl SmallDisk {
    /// Mounts one of so many MiB at an empty directory. `None`, with a message, where that is not
    /// permitted.
    pub(crate) fn mount(dir: &Path, mib: usize) -> Option<Self> {
        let size = format!("size={mib}m");
        let arguments = ["-t", "tmpfs", "-o", &size, "tmpfs"].map(std::ffi::OsStr::new);
        if !run("mount", &[&arguments[..], &[dir.as_os_str()]].concat()) {
            println!("SKIPPED: a small disk needs the right to mount a tmpfs");
            return None;
        }
        Some(Self { dir: dir.to_owned() })
    }

    fn ballast(&self) -> PathBuf {
        self.dir.join("ballast")
    }

    /// Leaves so many bytes free.
    pub(crate) fn fill(&self, free: u64) {
        let mut file = File::create(self.ballast()).unwrap();
        let error = loop {
            if let Err(error) = file.write_all(&[1; 4096]) {
                break error;
            }
        };
        assert_eq!(error.kind(), ErrorKind::StorageFull);
        let length = file.metadata().unwrap().len();
        file.set_len(length.saturating_sub(free)).unwrap();
    }

    /// Makes room again.
    pub(crate) fn empty(&self) {
        // A child of another test has the file open until it executes its program.
        File::create(self.ballast()).unwrap();
        std::fs::remove_file(self.ballast()).unwrap();
    }
}
