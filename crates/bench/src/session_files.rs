//! `session`, its files: a tree of ten thousand files, ten of them changed by a turn, compared with
//! copying the tree, in memory and as host directories.
//!
//! The host directories are on a file system in memory if there is one. On ext4 a copy made after
//! its predecessor was removed searches for an inode that was not deleted within the last seconds,
//! which took over a second for ten thousand files.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use afresh_files::{Budget, Layer, Time, Tree};

use crate::row::{Contestant, Options, Sink, contest};

/// Name of the table.
const TABLE: &str = "session";
/// Files, in a hundred directories.
const FILES: usize = 10_000;
/// Files that a turn changes.
const CHANGED: usize = 10;
/// Bytes of a file.
const BYTES: usize = 2000;
/// Where Linux mounts a file system in memory.
const MEMORY_DIR: &str = "/dev/shm";

fn path(index: usize) -> String {
    format!("d{}/f{index}", index % 100)
}

/// The files that a turn changes.
fn turn(number: u64) -> impl Iterator<Item = (String, [u8; BYTES])> {
    (0..CHANGED).map(move |index| {
        let file = (number as usize * 37 + index * 997) % FILES;
        (path(file), [number as u8; BYTES])
    })
}

/// Our tree, and its states.
struct OurTree {
    tree: Tree,
    turns: u64,
}

impl OurTree {
    fn new() -> anyhow::Result<Self> {
        let mut tree = Tree::new(Budget { bytes: 1 << 30, files: 1 << 20 });
        for index in 0..FILES {
            tree.write_path(path(index), &[7; BYTES], Time::default())?;
        }
        Ok(Self { tree, turns: 0 })
    }

    /// Over the same files in a host directory, which was read for an earlier save.
    fn over(host: &Path) -> anyhow::Result<Self> {
        let tree = Tree::new(Budget { bytes: 1 << 30, files: 1 << 20 });
        let tree = tree.with_layer("/", &Layer::directory(host)?)?;
        tree.capture_host_directories()?;
        Ok(Self { tree, turns: 0 })
    }

    fn turn(&mut self) -> anyhow::Result<()> {
        self.turns += 1;
        for (path, bytes) in turn(self.turns) {
            self.tree.write_path(path, &bytes, Time::default())?;
        }
        Ok(())
    }
}

/// The same files as a map, which is copied.
struct Map {
    files: BTreeMap<String, Vec<u8>>,
    turns: u64,
}

impl Map {
    fn new() -> Self {
        let files = (0..FILES).map(|index| (path(index), vec![7; BYTES])).collect();
        Self { files, turns: 0 }
    }

    fn turn(&mut self) {
        self.turns += 1;
        self.files.extend(turn(self.turns).map(|(path, bytes)| (path, bytes.to_vec())));
    }
}

/// A directory in memory if the host has one, else where temporary files are.
pub(crate) fn memory_directory() -> std::io::Result<tempfile::TempDir> {
    tempfile::tempdir_in(MEMORY_DIR).or_else(|_| tempfile::tempdir())
}

/// The same files in a host directory.
fn directory() -> anyhow::Result<tempfile::TempDir> {
    let directory = memory_directory()?;
    for index in 0..FILES {
        let path = directory.path().join("tree").join(path(index));
        std::fs::create_dir_all(path.parent().unwrap_or(&path))?;
        std::fs::write(path, [7; BYTES])?;
    }
    Ok(directory)
}

pub(crate) fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    std::fs::create_dir(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &to)?;
        } else {
            std::fs::copy(entry.path(), &to)?;
        }
    }
    Ok(())
}

/// Times `n` rounds of `then` after a turn of `before`.
fn timed<S>(
    n: u64,
    state: &mut S,
    before: impl Fn(&mut S) -> anyhow::Result<()>,
    mut then: impl FnMut(&mut S) -> anyhow::Result<()>,
) -> anyhow::Result<Duration> {
    let mut total = Duration::ZERO;
    for _ in 0..n {
        before(state)?;
        let started = Instant::now();
        then(state)?;
        total += started.elapsed();
    }
    Ok(total)
}

/// The contests.
///
/// # Errors
/// The first that any contestant meets.
pub(crate) fn all(options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    let few = Options { rounds: options.rounds.min(7), ..options.clone() };
    for case in ["checkpoint", "rollback"] {
        let back = case == "rollback";
        let (mut ours, mut map, host) = (OurTree::new()?, Map::new(), directory()?);
        let (mut kept, mut kept_map) = (ours.tree.clone(), map.files.clone());
        let field = vec![
            Contestant::timed("afresh", move |n| {
                timed(n, &mut ours, OurTree::turn, |ours| {
                    match back {
                        true => ours.tree = kept.clone(),
                        false => kept = ours.tree.clone(),
                    }
                    Ok(())
                })
            }),
            Contestant::timed("copy in memory", move |n| {
                let turn = |map: &mut Map| {
                    map.turn();
                    Ok(())
                };
                timed(n, &mut map, turn, |map| {
                    match back {
                        true => map.files = kept_map.clone(),
                        false => kept_map = map.files.clone(),
                    }
                    Ok(())
                })
            }),
            Contestant::new("copy of a directory", move || {
                let (from, to) = (host.path().join("tree"), host.path().join("copy"));
                copy(&from, &to)?;
                Ok(std::fs::remove_dir_all(&to)?)
            }),
        ];
        contest(TABLE, &format!("files10k/{case}"), &few, field, sink)?;
    }
    save(&few, sink)
}

/// The cost of session files when they are saved, over a host directory: only the changes of a turn
/// are recorded, as everything else was stored the first time. The whole directory was copied each
/// time before.
fn save(options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    let host = directory()?;
    let (from, to) = (host.path().join("tree"), host.path().join("copy"));
    let mut ours = OurTree::over(&from)?;
    let field = vec![
        Contestant::timed("afresh", move |n| {
            timed(n, &mut ours, OurTree::turn, |ours| {
                let saved = ours.tree.capture_host_directories()?.saved()?;
                anyhow::ensure!(saved.pages.len() >= CHANGED, "a changed file was not saved");
                Ok(())
            })
        }),
        Contestant::new("copy of a directory", move || {
            copy(&from, &to)?;
            Ok(std::fs::remove_dir_all(&to)?)
        }),
    ];
    contest(TABLE, "files10k/save", options, field, sink)
}
