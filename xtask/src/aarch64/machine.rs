//! The emulated machine: its root, its boot, and the output of the tests in it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::archive::Archive;
use super::packages::Files;
use super::{LIBRARIES, Options, folder};
use crate::command::{find, run, run_watched};
use crate::host;
use crate::tally::Tally;

/// Without output for this time the machine is ended. The longest test takes a minute in the
/// emulator.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(8 * 60);

/// Libraries that test programs load.
const LOADED: [&str; 4] = ["ld-linux-aarch64.so.1", "libc.so.6", "libgcc_s.so.1", "libm.so.6"];

/// Commands of busybox that [`INIT`] uses.
const COMMANDS: [&str; 8] = ["sh", "mount", "mkdir", "ip", "timeout", "poweroff", "cat", "sleep"];

/// The machine's first program: runs each test program in the folder of its package, and switches
/// the machine off.
const INIT: &str = r#"#!/bin/sh
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mkdir -p /dev/shm /tmp
mount -t tmpfs none /dev/shm
mount -t tmpfs none /tmp
ip link set lo up
export HOME=/tmp TMPDIR=/tmp RUST_TEST_THREADS=2 PROPTEST_CASES=8
while read -r name folder; do
    echo "== $name"
    cd "$folder"
    timeout 900 "/tests/$name" --show-output $(cat /tests/arguments) </dev/null 2>&1
    echo "== $name ended with $?"
done < /tests/list
echo "== all ended"
poweroff -f
"#;

/// Tests that take many minutes in the emulator: those that plant bugs and look whether other tests
/// catch them, and one with a hundred thousand faults. They run on x86-64.
const SLOW: [&str; 3] = ["planted", "are_caught", "hundreds_of_scattered_writers"];

/// A test program.
#[derive(Clone, Debug)]
pub(super) struct Program {
    /// The folder's name of its package.
    pub(super) package: String,
    pub(super) test: String,
    /// The package's folder, which tests read files of.
    pub(super) folder: PathBuf,
    pub(super) file: PathBuf,
}

impl Program {
    fn name(&self) -> String {
        format!("{}-{}", self.package, self.test)
    }
}

pub(super) struct Machine {
    files: Files,
    root: PathBuf,
    programs: Vec<Program>,
    filters: Vec<String>,
}

impl Machine {
    /// Makes its root.
    pub(super) fn new(options: &Options, programs: Vec<Program>) -> Result<Self> {
        if find("qemu-system-aarch64").is_none() {
            host::apt_install(&["qemu-system-arm"])?;
        }
        let files = Files::find_or_download(options.pages)?;
        let this = Self {
            files,
            root: folder().join("root.cpio"),
            programs,
            filters: options.filters.clone(),
        };
        this.write_root().with_context(|| this.root.display().to_string())?;
        Ok(this)
    }

    fn write_root(&self) -> Result<()> {
        let mut root = Archive::new(BufWriter::new(File::create(&self.root)?));
        for path in ["bin", "dev", "lib", "proc", "sys", "tests", "tmp"] {
            root.folder(path)?;
        }
        root.program("bin/busybox", &fs::read(&self.files.busybox)?)?;
        for command in COMMANDS {
            root.link(&format!("bin/{command}"), "busybox")?;
        }
        for library in LOADED {
            let path = Path::new(LIBRARIES).join(library);
            let content = fs::read(&path).with_context(|| path.display().to_string())?;
            root.program(&format!("lib/{library}"), &content)?;
        }
        root.program("init", INIT.as_bytes())?;
        let mut list = String::new();
        let (mut folders, mut data) = (BTreeSet::new(), Vec::new());
        let stripped = folder().join("stripped");
        for program in &self.programs {
            let name = program.name();
            // Debug information would be most of the archive.
            run(Command::new("aarch64-linux-gnu-strip")
                .arg("-o")
                .args([&stripped, &program.file]))?;
            root.program(&format!("tests/{name}"), &fs::read(&stripped)?)?;
            list.push_str(&format!("{name} {}\n", program.folder.display()));
            if folders.insert(program.folder.clone()) {
                for path in program.folder.ancestors().skip(1) {
                    folders.insert(path.to_owned());
                }
                collect(&program.folder.join("tests"), &mut folders, &mut data)?;
            }
        }
        // Sorted: each folder before the ones in it.
        for path in folders.iter().filter(|path| path.parent().is_some()) {
            root.folder(inside(path))?;
        }
        for path in &data {
            root.program(inside(path), &fs::read(path)?)?;
        }
        root.program("tests/list", list.as_bytes())?;
        let skipped = SLOW.iter().flat_map(|name| ["--skip", *name]);
        let arguments: Vec<_> = skipped.chain(self.filters.iter().map(String::as_str)).collect();
        root.program("tests/arguments", arguments.join(" ").as_bytes())?;
        Ok(root.finish()?)
    }

    /// Boots it, and counts the results of the tests.
    pub(super) fn run(&self, tally: &mut Tally) -> Result<()> {
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get().min(4));
        // As a child of another program, which the time limit without output ends.
        let mut qemu = Command::new("timeout");
        qemu.args(["7200", "qemu-system-aarch64"]);
        qemu.args(["-machine", "virt", "-cpu", "neoverse-n1", "-m", "3G", "-accel", "tcg"])
            .args(["-smp", &processors.to_string()])
            .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"])
            .args(["-serial", "stdio", "-append", "console=ttyAMA0 quiet panic=-1"])
            .arg("-kernel")
            .arg(&self.files.kernel)
            .arg("-initrd")
            .arg(&self.root);
        let (mut ended, mut all, mut bad) = (0, false, Vec::new());
        let result = run_watched(&mut qemu, OUTPUT_TIMEOUT, |line| {
            all |= line == "== all ended";
            if let Some((name, status)) =
                line.strip_prefix("== ").and_then(|rest| rest.split_once(" ended with "))
            {
                ended += 1;
                // 101 is a failed test, which its result line counts.
                if !["0", "101"].contains(&status) {
                    bad.push(format!("{name} ended with status {status}"));
                }
            }
            tally.read(line)
        });
        result?;
        if !bad.is_empty() {
            bail!("{}", bad.join("; "));
        }
        if !all || ended != self.programs.len() {
            bail!("the machine ended after {ended} of {} programs", self.programs.len());
        }
        Ok(())
    }
}

/// A path in the root of the machine, which has the host's files at their places.
fn inside(path: &Path) -> &str {
    path.to_str().unwrap_or_default().trim_start_matches('/')
}

/// The data that tests read: the files of `folder` that are not sources, and their folders.
fn collect(folder: &Path, folders: &mut BTreeSet<PathBuf>, data: &mut Vec<PathBuf>) -> Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    folders.insert(folder.to_owned());
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, folders, data)?;
        } else if path.extension().is_none_or(|extension| extension != "rs") {
            data.push(path);
        }
    }
    Ok(())
}
