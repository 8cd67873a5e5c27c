//! The initial files of a guest: granted host files, as layers below its own, and the files of
//! every guest.
//!
//! Promises: `/proc`, `/sys` and `/dev` never come from the host, for all grants; host links are
//! resolved in the guest's tree. May break it: changes to granted files while a guest runs.

use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use afresh_files::{Budget, Kind, Layer, New, Refused, Time, Tree, Walk};

use crate::error::Incompatible;
use crate::sentry::abi::PROCESSOR;
use crate::sentry::fs::devices::{DEVICES, TERMINALS};
use crate::sentry::fs::machine_files;
use crate::sentry::fs::proc_paths::OWN_DESCRIPTORS;
use crate::sentry::kernel::identity::{DEFAULT_OWNER, RELEASE, VERSION};
use crate::sentry::kernel::prctl_state::CAPABILITIES;

/// Directories of the host that no grant can include.
const UNGRANTABLE_DIRECTORIES: [&str; 3] = ["/proc", "/sys", "/dev"];
/// The name of the machine.
pub(in crate::sentry) const HOST: &str = "afresh";
/// The guest's user on the host's system.
const NAME: &str = "user";
const HOME: &str = "/home/user";
/// User and group of files without an owner, and of senders without credentials.
pub(in crate::sentry) const OVERFLOW_ID: u32 = 65534;
/// Files that a guest may make.
const FILES: u64 = 1 << 16;

/// A path as the tree takes it.
pub(crate) fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

/// The visible host files: directories, which are read on demand, and single files and links, which
/// the guest gets copies of.
#[derive(Debug, Default)]
struct TreePlan {
    directories: Vec<PathBuf>,
    links: Vec<(PathBuf, PathBuf)>,
    files: Vec<PathBuf>,
}

impl TreePlan {
    /// Adds the entry at `path`, unless a grant above includes it.
    fn add(&mut self, path: &Path) {
        if UNGRANTABLE_DIRECTORIES.iter().any(|own| path.starts_with(own))
            || self.directories.iter().any(|above| path.starts_with(above))
        {
            return;
        }
        let Ok(meta) = path.symlink_metadata() else { return };
        if meta.is_symlink() {
            if let Ok(target) = path.read_link() {
                self.links.push((path.to_path_buf(), target));
            }
        } else if meta.is_file() {
            self.files.push(path.to_path_buf());
        } else if path.parent().is_none() {
            let names = path.read_dir().into_iter().flatten().flatten();
            let mut below: Vec<_> = names.map(|entry| entry.path()).collect();
            below.sort();
            below.iter().for_each(|path| self.add(path));
        } else if meta.is_dir() {
            self.directories.push(path.to_path_buf());
        }
    }
}

/// The tree over directories of the host, and those that could be opened.
fn over(mut tree: Tree, directories: &[PathBuf]) -> (Tree, Vec<PathBuf>) {
    let mut mounted = Vec::new();
    for path in directories {
        let joined =
            Layer::directory(path).and_then(|layer| tree.clone().with_layer(bytes(path), &layer));
        if let Ok(joined) = joined {
            tree = joined;
            mounted.push(path.clone());
        }
    }
    (tree, mounted)
}

/// Maximum directories of the host in a snapshot, unless the opener grants more.
const MAX_LAYERS: usize = 128;

/// The tree over the directories that a snapshot names. Each must be in the plan that is computed
/// here for `granted`, or below one of its directories without a link in between. None may be
/// listed twice or contain another.
pub(crate) fn over_named(
    mut tree: Tree,
    named: &[PathBuf],
    granted: &[PathBuf],
) -> Result<Tree, Incompatible> {
    let mut plan = TreePlan::default();
    granted.iter().for_each(|path| plan.add(path));
    if named.len() > MAX_LAYERS.max(plan.directories.len()) {
        return Err(Incompatible::Layers(named.len()));
    }
    for (index, path) in named.iter().enumerate() {
        let plain =
            path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        let own = UNGRANTABLE_DIRECTORIES.iter().any(|own| path.starts_with(own));
        let above = plan.directories.iter().find(|directory| path.starts_with(directory));
        let Some(above) = above.filter(|_| plain && !own) else {
            return Err(Incompatible::NotGranted(path.clone()));
        };
        if named[..index].iter().any(|other| path.starts_with(other) || other.starts_with(path)) {
            return Err(Incompatible::Layers(named.len()));
        }
        let below = path.strip_prefix(above).unwrap_or(Path::new(""));
        let layer = match below.as_os_str().is_empty() {
            true => Layer::directory(above),
            false => Layer::subdirectory(above, below),
        };
        let joined = layer.and_then(|layer| tree.with_layer(bytes(path), &layer));
        tree = joined.map_err(|_| Incompatible::File {
            path: path.clone(),
            why: "it cannot be opened as a directory here",
        })?;
    }
    Ok(tree)
}

/// Bytes for the files that every guest has. They do not count as its own storage.
const EQUIPMENT: u64 = 1 << 20;

/// The budget of a tree from a snapshot: the opener's, regardless of the original guest's.
/// `granted` are its grants.
pub(crate) fn thawed_budget(storage: u64, granted: &[PathBuf]) -> Budget {
    let mut plan = TreePlan::default();
    granted.iter().for_each(|path| plan.add(path));
    // Single files that are granted the guest has copies of.
    let copies = plan.files.iter().filter_map(|path| path.metadata().ok()).map(|meta| meta.len());
    let bytes = copies.fold(storage.saturating_add(EQUIPMENT), u64::saturating_add);
    let files = FILES + 1024 + (plan.files.len() + plan.links.len()) as u64;
    Budget { bytes, files }
}

/// The tree with the granted files (sorted) below it, and room for `storage` bytes of guest data;
/// and the host directories that it is over.
pub(crate) fn prepare(
    below: Tree,
    granted: &[PathBuf],
    storage: u64,
) -> Result<(Tree, Vec<PathBuf>), Refused> {
    let mut plan = TreePlan::default();
    granted.iter().for_each(|path| plan.add(path));
    let is_missing = |path: &&str| below.find(path).is_err();
    let missing: Vec<_> = ["/dev/shm", "/tmp"].into_iter().filter(is_missing).collect();
    let (mut tree, mounted) = over(below, &plan.directories);
    for path in ["/dev/pts", "/proc", "/sys"] {
        tree.make_directories(path, Time::default())?;
    }
    for path in missing {
        let node = tree.make_directories(path, Time::default())?;
        // A grant in it has made it already, unless it is the host's.
        if !mounted.iter().any(|above| Path::new(path).starts_with(above)) {
            tree.set_mode(node, 0o1777, Time::default())?;
        }
    }
    for (path, target) in OWN_DESCRIPTORS {
        plant(&mut tree, Path::new(path), New::Link(target.as_bytes()), 0o777)?;
    }
    for (path, device, number) in DEVICES {
        plant(&mut tree, Path::new(path), New::Device(number), device.mode())?;
    }
    for (path, number) in TERMINALS {
        plant(&mut tree, Path::new(path), New::Device(number), 0o666)?;
    }
    for (path, target) in &plan.links {
        plant(&mut tree, path, New::Link(bytes(target)), 0o777)?;
    }
    for path in &plan.files {
        if is_shown(&tree, &mounted, path) {
            continue;
        }
        // Unreadable entries are left out.
        if let (Ok(content), Ok(meta)) = (std::fs::read(path), path.metadata()) {
            let node = tree.write_path(bytes(path), &content, Time::default())?;
            use std::os::unix::fs::MetadataExt;
            tree.set_mode(node, meta.mode(), Time::default())?;
        }
    }
    let used = tree.used();
    let budget = Budget { bytes: used.bytes.saturating_add(storage), files: used.files + FILES };
    Ok((tree.with_budget(budget), mounted))
}

/// Whether the tree has the host file at `path` already: through a link such as `/bin`, in one of
/// the `mounted` directories.
fn is_shown(tree: &Tree, mounted: &[PathBuf], path: &Path) -> bool {
    let Ok(real) = path.canonicalize() else { return false };
    let found = tree.find(bytes(path));
    mounted.iter().any(|above| real.starts_with(above))
        && found.is_ok()
        && found == tree.find(bytes(&real))
}

/// The identity of a start of the guest, which its snapshots and forks keep: a random UUID.
fn boot_id() -> String {
    let mut random = [0; 16];
    // Without randomness starts have the same identity.
    let _ = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::NONBLOCK);
    random[6] = random[6] & 0x0f | 0x40;
    random[8] = random[8] & 0x3f | 0x80;
    let digits: Vec<_> = random.iter().map(|byte| format!("{byte:02x}")).collect();
    [0..4, 4..6, 6..8, 8..10, 10..16].map(|part| digits[part].concat()).join("-")
}

/// Files of `/proc` about the machine, as the calls return it: its memory is the guest's limit.
pub(crate) fn write_system_files(tree: &mut Tree, memory: u64) -> Result<(), Refused> {
    let kib = memory >> 10;
    let total =
        format!("MemTotal: {kib:>14} kB\nMemFree: {kib:>15} kB\nMemAvailable: {kib:>10} kB\n");
    let none = [
        "Buffers",
        "Cached",
        "SwapCached",
        "Active",
        "Inactive",
        "Unevictable",
        "Mlocked",
        "SwapTotal",
        "SwapFree",
        "Dirty",
        "Writeback",
        "AnonPages",
        "Mapped",
        "Shmem",
        "Slab",
        "SReclaimable",
        "SUnreclaim",
        "KernelStack",
        "PageTables",
        "CommitLimit",
        "Committed_AS",
    ];
    let none: String = none.iter().map(|name| format!("{name}: {:>14} kB\n", 0)).collect();
    let ports = crate::sentry::net::sockets::EPHEMERAL;
    let files = [
        ("/proc/meminfo", total + &none),
        ("/proc/cpuinfo", PROCESSOR.to_owned()),
        ("/proc/sys/kernel/tainted", "0\n".to_owned()),
        ("/proc/sys/kernel/random/boot_id", format!("{}\n", boot_id())),
        ("/proc/sys/kernel/hostname", format!("{HOST}\n")),
        ("/proc/sys/kernel/core_pattern", "core\n".to_owned()),
        ("/proc/sys/kernel/pid_max", "32768\n".to_owned()),
        ("/proc/sys/kernel/ostype", "Linux\n".to_owned()),
        ("/proc/sys/kernel/osrelease", format!("{RELEASE}\n")),
        ("/proc/sys/kernel/version", format!("{VERSION}\n")),
        ("/proc/sys/kernel/threads-max", format!("{}\n", crate::sentry::kernel::threads::THREADS)),
        ("/proc/sys/kernel/cap_last_cap", format!("{CAPABILITIES}\n")),
        ("/proc/sys/kernel/overflowuid", format!("{OVERFLOW_ID}\n")),
        ("/proc/sys/kernel/overflowgid", format!("{OVERFLOW_ID}\n")),
        // Reserved memory costs nothing until it is touched.
        ("/proc/sys/vm/overcommit_memory", "1\n".to_owned()),
        ("/proc/sys/vm/max_map_count", format!("{}\n", crate::sentry::mm::layout::MAPPINGS)),
        ("/proc/sys/net/core/somaxconn", format!("{}\n", crate::sentry::net::sockets::BACKLOG)),
        ("/proc/sys/net/ipv4/ip_local_port_range", format!("{}\t{}\n", ports.start, ports.end - 1)),
        (
            "/proc/sys/fs/inotify/max_user_watches",
            format!("{}\n", crate::sentry::kernel::inotify::WATCHES),
        ),
        (
            "/proc/sys/fs/inotify/max_user_instances",
            format!("{}\n", crate::sentry::kernel::inotify::MAX_INSTANCES),
        ),
        (
            "/proc/sys/fs/inotify/max_queued_events",
            format!("{}\n", crate::sentry::kernel::inotify::QUEUED),
        ),
        (
            "/proc/sys/fs/file-max",
            format!("{}\n", crate::sentry::kernel::resource_limits::DESCRIPTORS),
        ),
        (
            "/proc/sys/fs/pipe-max-size",
            format!("{}\n", crate::sentry::kernel::channels::MAX_RESERVED),
        ),
        (
            "/proc/sys/fs/nr_open",
            format!("{}\n", crate::sentry::kernel::resource_limits::DESCRIPTORS),
        ),
    ];
    for (path, text) in files {
        let node = tree.write_path(path.as_bytes(), text.as_bytes(), Time::default())?;
        tree.set_mode(node, 0o444, Time::default())?;
    }
    machine_files::write(tree)
}

/// Defines the guest's user and names, unless the image or a granted file does. `users` for a guest
/// on the host's system that does not see its user database. Numbers that have a name already get
/// no other one.
pub(crate) fn settle(tree: &mut Tree, users: bool, [user, group]: [u32; 2]) -> Result<(), Refused> {
    let named = |number: u32, usual: u32| match number {
        0 | OVERFLOW_ID => usual,
        number => number,
    };
    let is_usual = [0, OVERFLOW_ID].contains(&user);
    // sshd of root runs its part for strangers as this user.
    let servers = match user {
        0 => format!("sshd:x:100:{OVERFLOW_ID}::/run/sshd:/usr/sbin/nologin\n"),
        _ => String::new(),
    };
    let (user, own) = (named(user, DEFAULT_OWNER[0]), group);
    let group = named(group, DEFAULT_OWNER[1]);
    let own = if is_usual { group } else { own };
    let passwd = format!(
        "root:x:0:0:root:/root:/bin/sh\n\
         {NAME}:x:{user}:{own}:{NAME}:{HOME}:/bin/sh\n\
         nobody:x:{OVERFLOW_ID}:{OVERFLOW_ID}:nobody:/nonexistent:/usr/sbin/nologin\n{servers}"
    );
    let group = format!("root:x:0:\n{NAME}:x:{group}:\nnogroup:x:{OVERFLOW_ID}:\n");
    let hosts = format!("127.0.0.1\tlocalhost {HOST}\n");
    let files = [
        ("/etc/hosts", hosts),
        ("/etc/hostname", format!("{HOST}\n")),
        // Names outside are found by the opener's grants.
        ("/etc/resolv.conf", "nameserver 127.0.0.1\n".to_owned()),
        ("/etc/passwd", passwd),
        ("/etc/group", group),
        ("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n".to_owned()),
    ];
    for (path, text) in &files[..if users { files.len() } else { 3 }] {
        // Images have empty files where a container's are put.
        if tree.stat_path(path).is_ok_and(|stat| stat.kind != Kind::File || stat.size > 0) {
            continue;
        }
        let node = tree.write_path(path.as_bytes(), text.as_bytes(), Time::default())?;
        tree.set_mode(node, 0o644, Time::default())?;
    }
    if users {
        for path in [HOME, "/opt", "/root", "/run"] {
            tree.make_directories(path, Time::default())?;
        }
        for path in ["/run/lock", "/var/tmp"] {
            make_shared_directory(tree, path)?;
        }
    }
    Ok(())
}

/// Makes a directory in which all users may make files, unless there is something already.
fn make_shared_directory(tree: &mut Tree, path: &str) -> Result<(), Refused> {
    if tree.find(path).is_err() {
        let node = tree.make_directories(path, Time::default())?;
        tree.set_mode(node, 0o1777, Time::default())?;
    }
    Ok(())
}

/// Makes something at a path, with the directories above it, unless there is something already.
fn plant(tree: &mut Tree, path: &Path, new: New<'_>, mode: u32) -> Result<(), Refused> {
    if let Some(above) = path.parent() {
        tree.make_directories(bytes(above), Time::default())?;
    }
    let place = tree.walk(bytes(path), Walk::new(Tree::ROOT).name())?;
    if place.found.is_none() {
        tree.create_at(&place, new, mode, Time::default())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_mounted_over_directories_of_the_opener_alone() {
        let folder = tempfile::tempdir().unwrap();
        let top = folder.path().canonicalize().unwrap();
        let granted = [top.join("granted")];
        for path in ["granted/in/deep", "secret", "granted-not"] {
            std::fs::create_dir_all(top.join(path)).unwrap();
        }
        std::os::unix::fs::symlink(top.join("secret"), top.join("granted/link")).unwrap();
        let open = |named: &[&str]| {
            let named: Vec<_> = named.iter().map(|path| top.join(path)).collect();
            over_named(Tree::new(Budget::default()), &named, &granted).map(drop)
        };
        open(&["granted"]).unwrap();
        open(&["granted/in"]).unwrap();
        for named in [&["granted/in", "granted/in"][..], &["granted", "granted/in"]] {
            assert!(matches!(open(named), Err(Incompatible::Layers(2))), "{named:?}");
        }
        assert!(matches!(open(&["granted/link"]), Err(Incompatible::File { .. })));
        for named in ["secret", "granted-not", "granted/../secret", "/proc", "/dev", "/sys", "/"] {
            assert!(matches!(open(&[named]), Err(Incompatible::NotGranted(_))), "{named}");
        }
        let many: Vec<_> = (0..=MAX_LAYERS).map(|n| top.join(format!("granted/{n}"))).collect();
        let error = over_named(Tree::new(Budget::default()), &many, &granted).unwrap_err();
        assert!(matches!(error, Incompatible::Layers(_)), "{error}");
    }

    #[test]
    fn all_users_may_make_temporary_files() {
        let granted = tempfile::tempdir().unwrap();
        let (mut tree, _) =
            prepare(Tree::new(Budget::default()), &[granted.path().to_owned()], 1 << 20).unwrap();
        settle(&mut tree, true, [0, 0]).unwrap();
        for path in ["/tmp", "/var/tmp", "/dev/shm", "/run/lock"] {
            assert_eq!(tree.stat_path(path).unwrap().mode, 0o1777, "{path}");
        }
        // A directory that exists keeps its mode.
        let mut below = Tree::new(Budget::default());
        let node = below.make_directories("/tmp", Time::default()).unwrap();
        below.set_mode(node, 0o700, Time::default()).unwrap();
        let (tree, _) = prepare(below, &[], 1 << 20).unwrap();
        assert_eq!(tree.stat_path("/tmp").unwrap().mode, 0o700);
    }

    #[test]
    fn a_granted_file_is_copied_only_if_no_granted_directory_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let top = folder.path().canonicalize().unwrap();
        for path in ["alone", "real"] {
            std::fs::create_dir(top.join(path)).unwrap();
            std::fs::write(top.join(path).join("program"), b"program").unwrap();
        }
        std::os::unix::fs::symlink("real", top.join("link")).unwrap();
        let granted = ["alone/program", "link", "link/program", "real"].map(|path| top.join(path));
        let (tree, _) = prepare(Tree::new(Budget::default()), &granted, 1 << 20).unwrap();
        let is_host_file = |path: &str| {
            let node = tree.find(bytes(&top.join(path))).unwrap();
            assert_eq!(tree.stat(node).unwrap().size, 7);
            tree.host_file(node).is_some()
        };
        assert!(is_host_file("link/program") && is_host_file("real/program"));
        assert!(!is_host_file("alone/program"));
        // Without the link, the path is the guest's own.
        let granted = ["link/program", "real"].map(|path| top.join(path));
        let (tree, _) = prepare(Tree::new(Budget::default()), &granted, 1 << 20).unwrap();
        assert!(tree.host_file(tree.find(bytes(&top.join("link/program"))).unwrap()).is_none());
    }
}
