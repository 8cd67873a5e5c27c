//! Paths below `/proc` outside the tree: processes of the guest, and their files.
//!
//! Promises: they lead only to the guest's own data, for all grants. Paths are parsed here once, so
//! that opening, listing and reading a link agree on the existing entries.

use afresh_files::{Kind, Node, Tree};
use rustix::io::Errno;

use crate::sentry::fs::init_process::init_text;
use crate::sentry::fs::ipc_files::IpcFile;
use crate::sentry::fs::machine_files::{identifier, network};
use crate::sentry::fs::proc_dir::{INODES, ProcDir};
use crate::sentry::fs::proc_maps::ProcMaps;
use crate::sentry::fs::proc_settings::{NAMESPACES, ProcSetting, USER_KIND};
use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::kernel::open_fifo::Fifo;
use crate::sentry::kernel::process_info::INIT_PID;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::user_namespaces::INITIAL;
use crate::sentry::kernel::users::FOR_FILES;
use crate::sentry::syscalls::path::{path_of, path_of_name};
use crate::sentry::tty::terminals::TerminalEnd;

/// Names of the descriptors of a process in `/dev`: links in the tree.
pub(in crate::sentry) const OWN_DESCRIPTORS: [(&str, &str); 4] = [
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
];

/// Links that a path may lead through before it comes here.
const LINKS: usize = 8;

/// The meaning of a path outside the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::sentry) enum ProcTarget {
    Folder(ProcDir),
    /// A descriptor of a process.
    Descriptor(u32, u32),
    /// The program, directory and root of a process.
    Program(u32),
    Current(u32),
    Root(u32),
    /// `/proc/self` and `/proc/thread-self`: another name of a directory.
    Name(Vec<u8>, ProcDir),
    Text(Vec<u8>),
    /// The mappings of a process.
    Maps(ProcMaps),
    /// `/proc/uptime`, or, if `true`, `/proc/stat`, whose text depends on the clocks.
    Clock(bool),
    /// A file of `/proc/sysvipc`.
    Ipc(IpcFile),
    /// `/proc/keys`: the keys that its reader may view.
    Keys,
    /// A file that is made when it is read, and may be written.
    Setting(ProcSetting),
    /// A file of a process that the current one may not look into: its process and mode, which is 0
    /// below a directory that may not be searched.
    Hidden(u32, u32),
    /// A path below a directory that one of these links leads to.
    Beneath(Node, Vec<u8>),
}

/// An absolute path without `.`, `..` and empty names.
pub(in crate::sentry) fn plain(path: &[u8]) -> Vec<u8> {
    let mut names: Vec<&[u8]> = Vec::new();
    for name in path.split(|&byte| byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." => drop(names.pop()),
            name => names.push(name),
        }
    }
    names.iter().flat_map(|name| [b"/", *name].concat()).collect()
}

fn number(name: &[u8]) -> Option<u32> {
    // As they are written, without signs and zeros in front.
    let text = std::str::from_utf8(name).ok()?;
    text.parse().ok().filter(|number: &u32| number.to_string() == text)
}

/// The mode of a file of a process that is only for those who may look into it; 0 below such a
/// directory.
fn guarded_mode(names: &[&[u8]]) -> Option<u32> {
    match names {
        [b"fd" | b"fdinfo"] => Some(libc::S_IFDIR | 0o500),
        [b"exe" | b"cwd" | b"root"] => Some(libc::S_IFLNK | 0o777),
        [b"auxv" | b"environ" | b"io" | b"pagemap" | b"personality"] => Some(libc::S_IFREG | 0o400),
        [b"maps" | b"smaps" | b"smaps_rollup"] => Some(libc::S_IFREG | 0o444),
        [b"fd" | b"fdinfo" | b"exe" | b"cwd" | b"root", _, ..] => Some(0),
        _ => None,
    }
}

impl Kernel {
    /// The meaning of `path` from `at`, if it is outside the tree.
    pub(in crate::sentry) fn meant(&self, at: u64, path: &[u8]) -> Option<ProcTarget> {
        if self.has_own_root() && path.starts_with(b"/") {
            return self.meant_by(&self.absolute(self.root(), path)?);
        }
        if path.starts_with(b"/proc") || path.starts_with(b"/dev/") {
            return self.meant_by(path);
        }
        if path.starts_with(b"/") || path.is_empty() || at as i32 == libc::AT_FDCWD {
            return None;
        }
        match self.table.get(at).map(|description| &description.open) {
            Ok(FileObject::Folder(folder, _)) => {
                let path = [folder.path().as_bytes(), path].join(&b'/');
                // Entries of the tree are below `/proc` as well.
                Some(self.meant_by(&path).unwrap_or(ProcTarget::Beneath(Tree::ROOT, path)))
            }
            _ => None,
        }
    }

    /// The meaning of a path that the tree does not have, perhaps through a link.
    pub(in crate::sentry) fn meant_behind(
        &self,
        from: Node,
        path: &[u8],
        follow: bool,
    ) -> Option<ProcTarget> {
        let mut path = self.absolute(from, path)?;
        for _ in 0..LINKS {
            if let Some(meant) = self.meant_by(&path) {
                return Some(meant);
            }
            // Links lead to what is below the root directory of a process.
            if self.has_own_root() {
                return None;
            }
            let how = afresh_files::Walk::new(Tree::ROOT).follow(false);
            let place = self.tree.walk(&path, how).ok()?;
            let (link, _) = place.found.filter(|(_, kind)| *kind == Kind::Link && follow)?;
            let target = self.tree.read_link(link).ok()?;
            path = self.absolute(place.directory, &target)?;
        }
        None
    }

    /// The meaning of a path of the tree.
    pub(in crate::sentry) fn meant_by(&self, path: &[u8]) -> Option<ProcTarget> {
        let mut path = plain(path);
        for (name, target) in OWN_DESCRIPTORS {
            if let Some(rest) = path.strip_prefix(name.as_bytes())
                && (rest.is_empty() || rest.starts_with(b"/"))
            {
                path = [target.as_bytes(), rest].concat();
                break;
            }
        }
        let rest = path.strip_prefix(b"/proc")?;
        let names: Vec<&[u8]> = rest.split(|&byte| byte == b'/').skip(1).collect();
        let own = self.processes.current_id();
        let (id, names) = match names.split_first() {
            None => return Some(ProcTarget::Folder(ProcDir::All)),
            Some((&b"self", [])) => {
                return Some(ProcTarget::Name(own.to_string().into_bytes(), ProcDir::Process(own)));
            }
            Some((&b"thread-self", names)) => {
                let thread = self.processes.current.threads.current_id();
                let name = format!("{own}/task/{thread}").into_bytes();
                return match names {
                    [] => Some(ProcTarget::Name(name, ProcDir::Thread(own, thread))),
                    names => self.meant_of(own, thread, names),
                };
            }
            Some((&b"self", names)) => (own, names),
            Some((&b"sysvipc", [])) => return Some(ProcTarget::Folder(ProcDir::Ipc)),
            Some((&b"sysvipc", [name])) => return IpcFile::named(name).map(ProcTarget::Ipc),
            Some((&b"net", [_])) => (own, &names[..]),
            Some((&b"sys", [b"kernel", b"random", b"uuid"])) => {
                return Some(ProcTarget::Text(identifier()?.into_bytes()));
            }
            Some((id, names)) => match number(id) {
                Some(id) => (id, names),
                None if names.is_empty() => {
                    return match *id {
                        b"uptime" => Some(ProcTarget::Clock(false)),
                        b"stat" => Some(ProcTarget::Clock(true)),
                        b"keys" => Some(ProcTarget::Keys),
                        id => Some(ProcTarget::Text(self.root_file(id)?)),
                    };
                }
                None => return None,
            },
        };
        if id == INIT_PID {
            return match names {
                [] => Some(ProcTarget::Folder(ProcDir::Process(INIT_PID))),
                names => init_text(names).map(ProcTarget::Text),
            };
        }
        if !self.processes.lives(id) && !self.processes.is_ended(id) {
            return None;
        }
        match names {
            [] => Some(ProcTarget::Folder(ProcDir::Process(id))),
            [b"task"] => Some(ProcTarget::Folder(ProcDir::Threads(id))),
            [b"task", thread, names @ ..] => {
                let thread = number(thread)?;
                self.processes.get(id)?.threads.get(thread)?;
                match names {
                    [] => Some(ProcTarget::Folder(ProcDir::Thread(id, thread))),
                    names => self.meant_of(id, thread, names),
                }
            }
            names => self.meant_of(id, id, names),
        }
    }

    /// The meaning of names below the directory of a process or thread.
    fn meant_of(&self, id: u32, thread: u32, names: &[&[u8]]) -> Option<ProcTarget> {
        if let Some(mode) = guarded_mode(names)
            && self.processes.lives(id)
            && !self.may_inspect(id, FOR_FILES)
        {
            return Some(ProcTarget::Hidden(id, mode));
        }
        let beneath = |node: Node, names: &[&[u8]]| match names {
            [] => None,
            names => Some(ProcTarget::Beneath(node, names.join(&b'/'))),
        };
        match names {
            [b"fd"] => Some(ProcTarget::Folder(ProcDir::Descriptors(id))),
            [b"fdinfo"] => Some(ProcTarget::Folder(ProcDir::Infos(id))),
            [b"fd", name, names @ ..] => {
                let descriptor = number(name)?;
                let description = self.open_of(id, descriptor)?;
                match (&description.open, names) {
                    (_, []) => Some(ProcTarget::Descriptor(id, descriptor)),
                    (FileObject::File(open), names) => beneath(open.node, names),
                    _ => None,
                }
            }
            [b"fdinfo", name] => Some(ProcTarget::Text(self.info(id, number(name)?)?)),
            [b"net", name] => {
                let listed = self.list_sockets(name);
                let text = listed.or_else(|| Some(network(name)?.as_bytes().to_vec()))?;
                Some(ProcTarget::Text(text))
            }
            [b"ns"] => self.processes.info(id).map(|_| ProcTarget::Folder(ProcDir::Namespaces(id))),
            [b"ns", name] => Some(ProcTarget::Setting(self.namespace_of(id, name)?)),
            [b"uid_map"] => self.setting_of(id, ProcSetting::UserMap),
            [b"gid_map"] => self.setting_of(id, ProcSetting::GroupMap),
            [b"setgroups"] => self.setting_of(id, ProcSetting::GroupSwitch),
            [b"comm"] if self.thread_name(id, thread).is_some() => {
                Some(ProcTarget::Setting(ProcSetting::ThreadName(id, thread)))
            }
            [b"mem"] => {
                self.processes.info(id).map(|_| ProcTarget::Setting(ProcSetting::Memory(id)))
            }
            [b"pagemap"] => self.number_of(id, ProcSetting::PageMap),
            [b"oom_score_adj"] => self.number_of(id, ProcSetting::OomAdjustment),
            [b"coredump_filter"] => self.number_of(id, ProcSetting::DumpFilter),
            [b"attr", b"current"] => Some(ProcTarget::Text(b"unconfined\n".to_vec())),
            [b"maps"] => self.maps_of(id, false).map(ProcTarget::Maps),
            [b"smaps"] => self.maps_of(id, true).map(ProcTarget::Maps),
            [b"exe"] => self.processes.info(id).map(|_| ProcTarget::Program(id)),
            [b"cwd"] => self.processes.info(id).map(|_| ProcTarget::Current(id)),
            [b"cwd", names @ ..] => beneath(self.processes.get(id)?.directory, names),
            [b"root"] => self.processes.info(id).map(|_| ProcTarget::Root(id)),
            [b"root", names @ ..] => beneath(self.processes.get(id)?.root(), names),
            [name] => Some(ProcTarget::Text(self.contents_of(id, thread, name)?)),
            _ => None,
        }
    }

    /// A file with a number of a process.
    fn number_of(&self, id: u32, of: impl Fn(u32) -> ProcSetting) -> Option<ProcTarget> {
        self.processes.info(id).map(|_| ProcTarget::Setting(of(id)))
    }

    /// A file about the user namespace of a process.
    fn setting_of(&self, id: u32, of: impl Fn(u32) -> ProcSetting) -> Option<ProcTarget> {
        self.processes.info(id)?;
        Some(ProcTarget::Setting(of(self.namespaces.of(id).namespace)))
    }

    /// The namespace of a process that has a name in `/proc/<process>/ns`.
    fn namespace_of(&self, id: u32, name: &[u8]) -> Option<ProcSetting> {
        self.processes.info(id)?;
        let kind = NAMESPACES.iter().position(|(known, _)| known.as_bytes() == name)? as u8;
        let own = if kind == USER_KIND { self.namespaces.of(id).namespace } else { INITIAL };
        Some(ProcSetting::Namespace(kind, own))
    }

    /// The object of a descriptor of a process.
    pub(in crate::sentry) fn open_of(&self, id: u32, descriptor: u32) -> Option<&Description> {
        let found = |(number, _, _): &(u32, u64, &Description)| *number == descriptor;
        self.descriptors_of(id).find(found).map(|(_, _, description)| description)
    }

    pub(in crate::sentry) fn descriptors_of(
        &self,
        id: u32,
    ) -> impl Iterator<Item = (u32, u64, &Description)> + '_ {
        self.table.listed((id != self.processes.current_id()).then_some(id))
    }

    /// The path of the tree that a descriptor of a process has.
    pub(in crate::sentry) fn descriptor_path(&self, id: u32, number: u32) -> Option<Vec<u8>> {
        let found = self.descriptors_of(id).find(|(n, _, _)| *n == number)?;
        self.name_of(found.1, found.2)
    }

    /// The target of a link, as it is read, or why it cannot be: no call takes some paths. `None`
    /// for other objects.
    pub(in crate::sentry) fn target(&self, meant: &ProcTarget) -> Option<Result<Vec<u8>, Errno>> {
        match meant {
            ProcTarget::Descriptor(id, number) => {
                let found = self.descriptors_of(*id).find(|(n, _, _)| n == number)?;
                let name = self.name_of(found.1, found.2).map(|name| self.visible_path(name));
                Some(name.ok_or(Errno::NAMETOOLONG))
            }
            ProcTarget::Program(id) => {
                Some(Ok(self.visible_path(self.processes.info(*id)?.program.clone())))
            }
            ProcTarget::Current(id) => Some(self.path_seen(self.processes.get(*id)?.directory)),
            ProcTarget::Root(id) => Some(self.path_seen(self.processes.get(*id)?.root())),
            ProcTarget::Name(name, _) => Some(Ok(name.clone())),
            ProcTarget::Setting(setting) => setting.link().map(Ok),
            ProcTarget::Folder(_)
            | ProcTarget::Text(_)
            | ProcTarget::Maps(_)
            | ProcTarget::Clock(_)
            | ProcTarget::Ipc(_)
            | ProcTarget::Keys
            | ProcTarget::Hidden(..)
            | ProcTarget::Beneath(..) => None,
        }
    }

    /// The name of a description: a path if it was found by one, or its kind and number. `None` for
    /// a path that no call takes.
    fn name_of(&self, id: u64, description: &Description) -> Option<Vec<u8>> {
        let inode = self.inode_of(id, &description.open);
        let kind = match &description.open {
            FileObject::Input
            | FileObject::Output
            | FileObject::Messages
            | FileObject::Pipe { .. } => {
                return Some(format!("pipe:[{inode}]").into_bytes());
            }
            FileObject::Socket(_) => return Some(format!("socket:[{inode}]").into_bytes()),
            FileObject::File(open)
            | FileObject::Device(_, open)
            | FileObject::Fifo(Fifo { open, .. })
            | FileObject::Terminal(TerminalEnd { open, .. }) => {
                return self.path_of_open(open.node, description);
            }
            FileObject::Folder(folder, _) => return Some(folder.path().into_bytes()),
            FileObject::Proc(file) => {
                return Some(file.setting.link().unwrap_or_else(|| b"/proc".to_vec()));
            }
            FileObject::Event { .. } => "[eventfd]",
            FileObject::Timer(_) => "[timerfd]",
            FileObject::Epoll(_) => "[eventpoll]",
            FileObject::Process(_) => "[pidfd]",
            FileObject::Signals(_) => "[signalfd]",
            FileObject::Queue(id) => {
                let name = self.named_queues.get(*id).and_then(|queue| queue.name.clone());
                let named = |name: Vec<u8>| [b"/", &name[..]].concat();
                return Some(name.map_or_else(|| b"/ (deleted)".to_vec(), named));
            }
            FileObject::Watches(_) => "inotify",
        };
        Some(format!("anon_inode:{kind}").into_bytes())
    }

    fn path_of_open(&self, node: Node, description: &Description) -> Option<Vec<u8>> {
        match path_of(&self.tree, node) {
            Ok(path) => return Some(path),
            Err(Errno::NAMETOOLONG) => return None,
            Err(_) => {}
        }
        let Some((above, name)) = &description.found else {
            return Some(format!("/memfd:{} (deleted)", node.0).into_bytes());
        };
        let mut path = match path_of_name(&self.tree, *above, name) {
            Err(Errno::NAMETOOLONG) => return None,
            path => path.unwrap_or_else(|_| [b"/", &name[..]].concat()),
        };
        if self.tree.lookup(*above, name) != Ok(node) {
            path.extend(b" (deleted)");
        }
        Some(path)
    }

    /// The inode number of an object other than a file; both ends of a pipe have the same.
    pub(in crate::sentry) fn inode_of(&self, id: u64, open: &FileObject) -> u64 {
        match open {
            FileObject::Pipe { channel, .. } => INODES + (16 << 32) + channel,
            FileObject::File(open)
            | FileObject::Device(_, open)
            | FileObject::Fifo(Fifo { open, .. })
            | FileObject::Terminal(TerminalEnd { open, .. }) => self.tree.inode_number(open.node),
            FileObject::Folder(folder, _) => folder.inode(),
            FileObject::Proc(file) => file.setting.inode(),
            _ => INODES + (17 << 32) + id,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_plain_before_they_mean_anything() {
        assert_eq!(plain(b"/proc/./self//fd/../fd/3/"), b"/proc/self/fd/3");
        assert_eq!(plain(b"/../proc"), b"/proc");
        assert_eq!(plain(b"/"), b"");
        for (name, expected) in [(&b"12"[..], Some(12)), (b"012", None), (b"+1", None), (b"", None)]
        {
            assert_eq!(number(name), expected);
        }
    }
}
