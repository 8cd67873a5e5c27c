//! The file systems that a guest sees, and where they are mounted.
//!
//! The files of all of them but the nameless ones are in the one file tree. A file belongs to the
//! mount whose directory it is below.
//!
//! Promises: `stat`, `statfs`, `/proc/mounts` and `listmount` agree. No name moves from one file
//! system to another, so the file system of a directory never changes. May break it: a rename that
//! does not compare them.

use afresh_files::{Kind, Node, Tree};

/// Directories above a file that are searched for its mount. One that is deeper counts as a file of
/// the root.
const MAX_DEPTH: usize = 256;
/// Unique numbers of mounts begin behind this, as on Linux.
pub(in crate::sentry) const UNIQUE_OFFSET: u64 = 1 << 31;

/// A file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FileSystem {
    /// The tree: layers with copy-on-write, which Linux calls `overlay`.
    #[default]
    Root,
    Proc,
    Sys,
    Dev,
    Terminals,
    SharedMemory,
    Pipes,
    Sockets,
    Anonymous,
    Queues,
}

/// A mount.
#[derive(Clone, Copy, Debug)]
pub(in crate::sentry) struct Mount {
    pub(in crate::sentry) system: FileSystem,
    pub(in crate::sentry) parent: FileSystem,
    pub(in crate::sentry) path: &'static str,
    pub(in crate::sentry) kind: &'static str,
    pub(in crate::sentry) source: &'static str,
    pub(in crate::sentry) read_only: bool,
}

const fn mount(
    system: FileSystem,
    parent: FileSystem,
    path: &'static str,
    kind: &'static str,
    source: &'static str,
) -> Mount {
    Mount { system, parent, path, kind, source, read_only: matches!(system, FileSystem::Sys) }
}

/// All mounts, in the order of their numbers.
pub(in crate::sentry) const MOUNTS: [Mount; 6] = [
    mount(FileSystem::Root, FileSystem::Root, "/", "overlay", "afresh"),
    mount(FileSystem::Proc, FileSystem::Root, "/proc", "proc", "proc"),
    mount(FileSystem::Sys, FileSystem::Root, "/sys", "sysfs", "sysfs"),
    mount(FileSystem::Dev, FileSystem::Root, "/dev", "devtmpfs", "devtmpfs"),
    mount(FileSystem::Terminals, FileSystem::Dev, "/dev/pts", "devpts", "devpts"),
    mount(FileSystem::SharedMemory, FileSystem::Dev, "/dev/shm", "tmpfs", "tmpfs"),
];

/// The kinds of file systems, as `/proc/filesystems` lists them.
pub(in crate::sentry) const KINDS: [&str; 6] =
    ["sysfs", "tmpfs", "proc", "devtmpfs", "devpts", "overlay"];

impl Mount {
    fn options(&self) -> &'static str {
        if self.read_only { "ro" } else { "rw" }
    }
}

impl FileSystem {
    /// That of a file of the tree. A file without a name, or with several, counts as one of the
    /// root.
    pub(crate) fn of(tree: &Tree, node: Node) -> Self {
        Self::of_named(tree, node).unwrap_or_default()
    }

    /// That of a file of the tree with one name.
    pub(in crate::sentry) fn of_named(tree: &Tree, node: Node) -> Option<Self> {
        match tree.stat(node).map(|stat| stat.kind) {
            Ok(Kind::Directory) => Some(Self::of_directory(tree, node)),
            _ => tree.name(node).map(|(above, _)| Self::of_directory(tree, above)),
        }
    }

    /// That of the files in a directory of the tree.
    pub(crate) fn of_directory(tree: &Tree, directory: Node) -> Self {
        // The directory in the root that leads to it, and the one in that.
        let (mut at, mut top, mut second) = (directory, Tree::ROOT, None);
        for _ in 0..MAX_DEPTH {
            if at == Tree::ROOT {
                break;
            }
            second = Some(top).filter(|top| *top != Tree::ROOT);
            top = at;
            let Ok(above) = tree.parent(at) else { return Self::Root };
            at = above;
        }
        if at != Tree::ROOT || top == Tree::ROOT {
            return Self::Root;
        }
        let is = |above: Node, name: &[u8], node: Node| tree.lookup(above, name) == Ok(node);
        match second {
            _ if is(Tree::ROOT, b"proc", top) => Self::Proc,
            _ if is(Tree::ROOT, b"sys", top) => Self::Sys,
            _ if !is(Tree::ROOT, b"dev", top) => Self::Root,
            Some(second) if is(top, b"pts", second) => Self::Terminals,
            Some(second) if is(top, b"shm", second) => Self::SharedMemory,
            _ => Self::Dev,
        }
    }

    /// Whether a directory is that of a mount, which is busy.
    pub(in crate::sentry) fn is_mount_point(tree: &Tree, node: Node) -> bool {
        let is_root = node == Tree::ROOT;
        is_root
            || tree.parent(node).is_ok_and(|above| {
                Self::of_directory(tree, node) != Self::of_directory(tree, above)
            })
    }

    /// The number of its device (`st_dev`), whose major number is 0.
    pub(crate) fn device(self) -> u32 {
        self as u32 + 1
    }

    /// The number of its mount.
    pub(crate) fn mount_id(self, is_unique: bool) -> u64 {
        u64::from(self.device()) + if is_unique { UNIQUE_OFFSET } else { 0 }
    }

    /// The number of its kind, as `statfs` has it.
    pub(in crate::sentry) fn magic(self) -> u64 {
        match self {
            Self::Root => libc::OVERLAYFS_SUPER_MAGIC as u64,
            Self::Proc => libc::PROC_SUPER_MAGIC as u64,
            Self::Sys => libc::SYSFS_MAGIC as u64,
            Self::Dev | Self::SharedMemory => libc::TMPFS_MAGIC as u64,
            Self::Terminals => 0x1cd1,
            Self::Pipes => 0x5049_5045,
            Self::Sockets => 0x534f_434b,
            Self::Anonymous => 0x0904_1934,
            Self::Queues => 0x1980_0202,
        }
    }

    /// Whether it stores bytes of the guest, which its budget bounds.
    pub(in crate::sentry) fn stores_files(self) -> bool {
        matches!(self, Self::Root | Self::Dev | Self::SharedMemory)
    }

    /// Its mount, if it has one.
    pub(in crate::sentry) fn mount(self) -> Option<&'static Mount> {
        MOUNTS.iter().find(|mount| mount.system == self)
    }
}

/// `/proc/mounts`.
pub(in crate::sentry) fn mounts_text() -> String {
    let line = |m: &Mount| format!("{} {} {} {} 0 0\n", m.source, m.path, m.kind, m.options());
    MOUNTS.iter().map(line).collect()
}

/// `/proc/<process>/mountinfo`.
pub(in crate::sentry) fn mount_info_text() -> String {
    let line = |m: &Mount| {
        // The parent of the root is outside.
        let above = if m.system == FileSystem::Root { 0 } else { m.parent.device() };
        let id = m.system.device();
        let (path, kind, source, options) = (m.path, m.kind, m.source, m.options());
        format!("{id} {above} 0:{id} / {path} {options} - {kind} {source} {options}\n")
    };
    MOUNTS.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use afresh_files::{Budget, Time};

    use super::*;

    #[test]
    fn a_file_belongs_to_the_mount_above_it() {
        let mut tree = Tree::new(Budget::default());
        for (path, expected) in [
            ("/a/b/c", FileSystem::Root),
            ("/proc/sys/kernel/ostype", FileSystem::Proc),
            ("/sys/x", FileSystem::Sys),
            ("/dev/null", FileSystem::Dev),
            ("/dev/pts/x", FileSystem::Terminals),
            ("/dev/shm/a/b", FileSystem::SharedMemory),
            ("/a/dev/shm/b", FileSystem::Root),
            ("/shm/a", FileSystem::Root),
        ] {
            let node = tree.write_path(path, b"x", Time::default()).unwrap();
            assert_eq!(FileSystem::of(&tree, node), expected, "{path}");
        }
        for (path, is_point) in
            [("/", true), ("/proc", true), ("/dev/shm", true), ("/dev/shm/a", false), ("/a", false)]
        {
            let node = tree.find(path).unwrap();
            assert_eq!(FileSystem::is_mount_point(&tree, node), is_point, "{path}");
        }
    }

    #[test]
    fn mounts_have_the_numbers_of_their_devices() {
        for (at, mount) in MOUNTS.iter().enumerate() {
            assert_eq!(mount.system.device() as usize, at + 1);
            assert_eq!(mount.system.mount().unwrap().path, mount.path);
        }
        assert!(mount_info_text().starts_with("1 0 0:1 / / rw - overlay afresh rw\n2 1 0:2 "));
        assert!(mounts_text().starts_with("afresh / overlay rw 0 0\nproc /proc proc rw 0 0\n"));
        assert_eq!(FileSystem::Pipes.mount().map(|mount| mount.path), None);
    }
}
