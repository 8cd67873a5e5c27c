//! `linux`, its files: rollback of two CPython sessions, one with ten files and one with ten
//! thousand, after a turn that changed ten. The rival copies the directory again, because it does
//! not know which files changed. Its directories are in memory as those of [`session_files`].
//!
//! [`session_files`]: crate::session_files

use std::path::PathBuf;
use std::time::{Duration, Instant};

use afresh_linux::Instance;
use afresh_snapshot::{Branch, SnapshotId, Tree};
use anyhow::ensure;

use crate::linux::Python;
use crate::row::{Contestant, Options, Sink, contest};
use crate::session_files::{copy, memory_directory};

/// Name of the table.
const TABLE: &str = "linux";
/// The numbers of files.
const COUNTS: [usize; 2] = [10, 10_000];
/// Bytes that the program may write.
const STORAGE: u64 = 1 << 30;

/// Makes FILES files; a turn changes ten of them, and each answer has the number of turns and the
/// lengths of the first ten.
const SCRIPT: &str = "import sys, os
path = lambda i: f'/files/d{i % 100}/f{i}'
for i in range(FILES):
    os.makedirs(os.path.dirname(path(i)), exist_ok=True)
    with open(path(i), 'w') as file: file.write('7' * 2000)
turns = 0
for line in sys.stdin:
    if line == 'turn\\n':
        turns += 1
        for i in range(10):
            with open(path((turns * 37 + i * 997) % FILES), 'w') as file: file.write('8' * 1000)
            with open(path(i), 'a') as file: file.write('9')
    print(turns, sum(os.stat(path(i)).st_size for i in range(10)), flush=True)
";

/// A session, and the state that it goes back to.
struct Session {
    branch: Branch<Instance>,
    root: SnapshotId,
}

impl Session {
    fn new(python: &Python, files: usize) -> anyhow::Result<Self> {
        let script = SCRIPT.replace("FILES", &files.to_string());
        let warm = python.guest(&script).storage_limit(STORAGE).request("look\n").warm()?;
        let branch = Branch::from_state(&Tree::new(), warm.home(), warm.state());
        let root = branch.at();
        Ok(Self { branch, root })
    }

    fn ask(&mut self, request: &str) -> anyhow::Result<Vec<u8>> {
        Ok(self.branch.guest_mut()?.call(request.as_bytes())?)
    }

    /// Time for going back, the first answer there included: the way back is made with that.
    fn go_back(&mut self) -> anyhow::Result<Duration> {
        let changed = self.ask("turn\n")?;
        ensure!(changed.starts_with(b"1 ") && changed != b"1 20000\n", "nothing was changed");
        let started = Instant::now();
        self.branch.rollback(self.root)?;
        let found = self.ask("look\n")?;
        let took = started.elapsed();
        ensure!(
            found == b"0 20000\n",
            "after the rollback it is {:?}",
            String::from_utf8_lossy(&found)
        );
        Ok(took)
    }
}

/// The same number of files in a host directory.
fn directory(files: usize) -> anyhow::Result<(tempfile::TempDir, PathBuf, PathBuf)> {
    let directory = memory_directory()?;
    let (from, to) = (directory.path().join("kept"), directory.path().join("files"));
    for index in 0..files {
        let folder = from.join(format!("d{}", index % 100));
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join(format!("f{index}")), [b'7'; 2000])?;
    }
    copy(&from, &to)?;
    Ok((directory, from, to))
}

/// The contest.
///
/// # Errors
/// The first that any contestant meets.
pub(crate) fn all(python: &Python, options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    const CASE: &str = "rollback/files";
    if !COUNTS.iter().any(|count| options.wants(CASE, &format!("afresh/{count}"))) {
        return Ok(());
    }
    // A copy of ten thousand files can take seconds: few rounds.
    let few = Options { rounds: options.rounds.min(3), ..options.clone() };
    let mut field = Vec::new();
    for count in COUNTS {
        let mut session = Session::new(python, count)?;
        field.push(Contestant::timed(format!("afresh/{count}"), move |n| {
            (0..n).map(|_| session.go_back()).sum()
        }));
        let (held, from, to) = directory(count)?;
        field.push(Contestant::new(format!("copy of a directory/{count}"), move || {
            let _ = &held;
            std::fs::remove_dir_all(&to)?;
            copy(&from, &to)
        }));
    }
    contest(TABLE, CASE, &few, field, sink)
}
