//! A run of test programs in the machine, and its counts.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use super::cross::{TARGET, folder};
use super::guest_programs;
use super::machine::Machine;
use crate::tally::Tally;

/// Runs each test program in the folder of its package.
const SCRIPT: &str = r#"
export RUST_TEST_THREADS=2 PROPTEST_CASES=8
while read -r name folder; do
    echo "== $name"
    cd "$folder"
    timeout 3600 "/tests/$name" --show-output $(cat /tests/arguments) </dev/null 2>&1
    echo "== $name ended with $?"
done < /tests/list
echo "== all ended"
"#;

/// Tests that take many minutes in the emulator: those that plant bugs and look whether other tests
/// catch them, one with a hundred thousand faults, and those that kill a transfer at many moments.
/// They run on x86-64.
const SLOW: [&str; 4] =
    ["planted", "are_caught", "hundreds_of_scattered_writers", "kill_during_pu"];

/// Certificates of authorities, which clients of registries and object stores need to start.
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Tests that the machine fails: its shell and its `tar` are busybox, which sets `SHLVL` and runs
/// its own commands without a process, and its first user has all capabilities.
const OF_ANOTHER_HOST: [&str; 8] = [
    "a_process_that_is_killed_while_it_waits_ends_the_call_alone",
    "a_program_is_known_without_links_and_called_as_it_was_named",
    "a_shell_names_its_descriptors",
    "proc_reveals_nothing_of_the_host",
    "sockets_and_queues_do_what_they_do_on_linux",
    "status_shows_the_umask_of_its_process",
    "tar_reads_the_archive_and_what_it_extracts_is_a_store",
    "user_0_of_a_guest_reads_and_writes_nothing_beyond_its_grants",
];

/// A test program.
#[derive(Clone, Debug)]
pub(super) struct TestProgram {
    /// The folder's name of its package.
    pub(super) package: String,
    pub(super) test: String,
    /// The package's folder, which tests read files of.
    pub(super) folder: PathBuf,
    pub(super) file: PathBuf,
}

/// Test programs and the files that they need.
#[derive(Debug, Default)]
pub(super) struct TestRun {
    pub(super) programs: Vec<TestProgram>,
    /// Programs that tests run, at the host's paths.
    pub(super) commands: Vec<PathBuf>,
    /// Other files, at the host's paths.
    pub(super) files: Vec<PathBuf>,
    /// Parts of names: only such tests run.
    pub(super) filters: Vec<String>,
}

impl TestRun {
    /// Runs the tests in `machine`, and counts their results.
    pub(super) fn run(&self, mut machine: Machine, tally: &mut Tally) -> Result<()> {
        let mut list = String::new();
        for program in &self.programs {
            let name = format!("{}-{}", program.package, program.test);
            machine.add_program(&program.file, &Path::new("/tests").join(&name))?;
            list.push_str(&format!("{name} {}\n", program.folder.display()));
            machine.add_folder(&program.folder)?;
        }
        let mut folders: Vec<_> = self.programs.iter().map(|program| &program.folder).collect();
        folders.dedup();
        for folder in folders {
            add_data(&mut machine, &folder.join("tests"))?;
        }
        if self.programs.iter().any(|program| program.package == "linux") {
            guest_programs::add(&mut machine)?;
        }
        for command in &self.commands {
            machine.add_program(command, command)?;
        }
        for file in &self.files {
            machine.add_file(file, file)?;
        }
        if Path::new(CERTIFICATES).is_file() {
            machine.add_file(Path::new(CERTIFICATES), Path::new(CERTIFICATES))?;
        }
        // Cargo makes it for tests (`CARGO_TARGET_TMPDIR`).
        machine.add_folder(&folder().join(TARGET).join("tmp"))?;
        machine.add(Path::new("/tests/list"), list.as_bytes())?;
        // Filters select slow tests too.
        let left_out: Vec<_> = if self.filters.is_empty() {
            SLOW.into_iter().chain(OF_ANOTHER_HOST).collect()
        } else {
            Vec::new()
        };
        let skipped = left_out.iter().flat_map(|name| ["--skip", *name]);
        let arguments: Vec<_> = skipped.chain(self.filters.iter().map(String::as_str)).collect();
        machine.add(Path::new("/tests/arguments"), arguments.join(" ").as_bytes())?;

        let (mut ended, mut all, mut bad) = (0, false, Vec::new());
        machine.boot(SCRIPT, |line| {
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
        })?;
        if !bad.is_empty() {
            bail!("{}", bad.join("; "));
        }
        if !all || ended != self.programs.len() {
            bail!("the machine ended after {ended} of {} programs", self.programs.len());
        }
        Ok(())
    }
}

/// Adds the data that tests read: the files of `folder` that are not sources, and their folders.
fn add_data(machine: &mut Machine, folder: &Path) -> Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    machine.add_folder(folder)?;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            add_data(machine, &path)?;
        } else if path.extension().is_none_or(|extension| extension != "rs") {
            machine.add_file(&path, &path)?;
        }
    }
    Ok(())
}
