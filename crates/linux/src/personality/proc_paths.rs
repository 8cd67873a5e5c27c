//! What paths below `/proc` mean that are in no tree: the guest's processes, and what each of them has.
//!
//! Promises: what they lead to is the guest's own, whatever is granted of the host. Paths are taken apart here once, so that opening,
//! listing and telling agree about what there is.

use afresh_files::{Kind, Node, Tree};
use serde::{Deserialize, Serialize};

use super::fifos::Fifo;
use super::table::{Description, Open};
use super::terminals::TerminalEnd;
use super::{State, path_of};

/// Names of a process's own descriptors, which lie in the tree as links.
pub(super) const OWN_DESCRIPTORS: [(&str, &str); 4] = [
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
];
/// Links that a path may lead through before it comes here.
const LINKS: usize = 8;
/// Numbers of files of the tree are below this.
const INODES: u64 = 1 << 40;

/// A directory that is in no tree, or has more in it than the tree knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Folder {
    /// `/proc`.
    All,
    /// `/proc/<process>`.
    Process(u32),
    /// `/proc/<process>/fd`.
    Descriptors(u32),
    /// `/proc/<process>/fdinfo`.
    Infos(u32),
    /// `/proc/<process>/task`.
    Threads(u32),
    /// `/proc/<process>/task/<thread>`.
    Thread(u32, u32),
}

/// What a path means that is in no tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Meant {
    Folder(Folder),
    /// A descriptor of a process.
    Descriptor(u32, u32),
    /// The program, directory and root of a process.
    Program(u32),
    Current(u32),
    Root,
    /// `/proc/self` and `/proc/thread-self`: another name of a directory.
    Name(Vec<u8>, Folder),
    Text(Vec<u8>),
    /// What lies below a directory that one of these links leads to.
    Beneath(Node, Vec<u8>),
}

/// An absolute path without `.`, `..` and empty names.
fn plain(path: &[u8]) -> Vec<u8> {
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

impl Folder {
    pub(super) fn path(self) -> String {
        match self {
            Self::All => "/proc".to_owned(),
            Self::Process(id) => format!("/proc/{id}"),
            Self::Descriptors(id) => format!("/proc/{id}/fd"),
            Self::Infos(id) => format!("/proc/{id}/fdinfo"),
            Self::Threads(id) => format!("/proc/{id}/task"),
            Self::Thread(id, thread) => format!("/proc/{id}/task/{thread}"),
        }
    }

    /// The number that it is told by.
    pub(super) fn inode(self) -> u64 {
        let (kind, id) = match self {
            Self::All => (0, 0),
            Self::Process(id) => (1, id),
            Self::Descriptors(id) => (2, id),
            Self::Infos(id) => (3, id),
            Self::Threads(id) => (4, id),
            Self::Thread(_, thread) => (5, thread),
        };
        INODES + (kind << 32) + u64::from(id)
    }
}

impl State {
    /// What `path` from `at` means, if it means anything that is in no tree.
    pub(super) fn meant(&self, at: u64, path: &[u8]) -> Option<Meant> {
        if path.starts_with(b"/proc") || path.starts_with(b"/dev/") {
            return self.meant_by(path);
        }
        if path.starts_with(b"/") || path.is_empty() || at as i32 == libc::AT_FDCWD {
            return None;
        }
        match self.table.get(at).map(|description| &description.open) {
            Ok(Open::Folder(folder, _)) => {
                let path = [folder.path().as_bytes(), path].join(&b'/');
                // What the tree has there lies below `/proc` as well.
                Some(self.meant_by(&path).unwrap_or(Meant::Beneath(Tree::ROOT, path)))
            }
            _ => None,
        }
    }

    /// What a path means that leads nowhere in the tree: perhaps by a link to what is in none.
    pub(super) fn meant_behind(&self, from: Node, path: &[u8], follow: bool) -> Option<Meant> {
        let mut path = self.absolute(from, path)?;
        for _ in 0..LINKS {
            if let Some(meant) = self.meant_by(&path) {
                return Some(meant);
            }
            let how = afresh_files::Walk::new(Tree::ROOT).follow(false);
            let place = self.tree.walk(&path, how).ok()?;
            let (link, _) = place.found.filter(|(_, kind)| *kind == Kind::Link && follow)?;
            let target = self.tree.read_link(link).ok()?;
            path = self.absolute(place.directory, &target)?;
        }
        None
    }

    fn absolute(&self, from: Node, path: &[u8]) -> Option<Vec<u8>> {
        if path.starts_with(b"/") {
            return Some(path.to_vec());
        }
        Some([path_of(&self.tree, from).ok()?, path.to_vec()].join(&b'/'))
    }

    fn meant_by(&self, path: &[u8]) -> Option<Meant> {
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
        let own = self.family.own.id;
        let (id, names) = match names.split_first() {
            None => return Some(Meant::Folder(Folder::All)),
            Some((&b"self", [])) => {
                return Some(Meant::Name(own.to_string().into_bytes(), Folder::Process(own)));
            }
            Some((&b"thread-self", names)) => {
                let thread = self.threads.current_id();
                let name = format!("{own}/task/{thread}").into_bytes();
                return match names {
                    [] => Some(Meant::Name(name, Folder::Thread(own, thread))),
                    names => self.meant_of(own, thread, names),
                };
            }
            Some((&b"self", names)) => (own, names),
            Some((id, names)) => match number(id) {
                Some(id) => (id, names),
                None if names.is_empty() => return Some(Meant::Text(self.told(id)?)),
                None => return None,
            },
        };
        if !self.family.lives(id) && !self.family.is_ended(id) {
            return None;
        }
        match names {
            [] => Some(Meant::Folder(Folder::Process(id))),
            [b"task"] => Some(Meant::Folder(Folder::Threads(id))),
            [b"task", thread, names @ ..] => {
                let thread = number(thread)?;
                self.threads_of(id)?.get(thread)?;
                match names {
                    [] => Some(Meant::Folder(Folder::Thread(id, thread))),
                    names => self.meant_of(id, thread, names),
                }
            }
            names => self.meant_of(id, id, names),
        }
    }

    /// What names below the directory of a process or thread mean.
    fn meant_of(&self, id: u32, thread: u32, names: &[&[u8]]) -> Option<Meant> {
        let beneath = |node: Node, names: &[&[u8]]| match names {
            [] => None,
            names => Some(Meant::Beneath(node, names.join(&b'/'))),
        };
        match names {
            [b"fd"] => Some(Meant::Folder(Folder::Descriptors(id))),
            [b"fdinfo"] => Some(Meant::Folder(Folder::Infos(id))),
            [b"fd", name, names @ ..] => {
                let descriptor = number(name)?;
                let description = self.open_of(id, descriptor)?;
                match (&description.open, names) {
                    (_, []) => Some(Meant::Descriptor(id, descriptor)),
                    (Open::File(open), names) => beneath(open.node, names),
                    _ => None,
                }
            }
            [b"fdinfo", name] => Some(Meant::Text(self.info(id, number(name)?)?)),
            [b"exe"] => self.family.kin(id).map(|_| Meant::Program(id)),
            [b"cwd"] => self.family.kin(id).map(|_| Meant::Current(id)),
            [b"cwd", names @ ..] => beneath(self.directory_of(id)?, names),
            [b"root"] => Some(Meant::Root),
            [b"root", names @ ..] => beneath(Tree::ROOT, names),
            [name] => Some(Meant::Text(self.told_of(id, thread, name)?)),
            _ => None,
        }
    }

    /// What a descriptor of a process is open on.
    pub(super) fn open_of(&self, id: u32, descriptor: u32) -> Option<&Description> {
        let found = |(number, _, _): &(u32, u64, &Description)| *number == descriptor;
        self.descriptors_of(id).find(found).map(|(_, _, description)| description)
    }

    pub(super) fn descriptors_of(
        &self,
        id: u32,
    ) -> impl Iterator<Item = (u32, u64, &Description)> + '_ {
        self.table.listed((id != self.family.own.id).then_some(id))
    }

    /// What a link leads to, as it is read; nothing if it is none.
    pub(super) fn target(&self, meant: &Meant) -> Option<Vec<u8>> {
        match meant {
            Meant::Descriptor(id, number) => {
                let found = self.descriptors_of(*id).find(|(n, _, _)| n == number)?;
                Some(self.name_of(found.1, found.2))
            }
            Meant::Program(id) => Some(self.family.kin(*id)?.program.clone()),
            Meant::Current(id) => path_of(&self.tree, self.directory_of(*id)?).ok(),
            Meant::Root => Some(b"/".to_vec()),
            Meant::Name(name, _) => Some(name.clone()),
            Meant::Folder(_) | Meant::Text(_) | Meant::Beneath(..) => None,
        }
    }

    /// By which name a description is told: a path, where it was found by one, or what it is and its number.
    fn name_of(&self, id: u64, description: &Description) -> Vec<u8> {
        let inode = self.inode_of(id, &description.open);
        let kind = match &description.open {
            Open::Input | Open::Output | Open::Messages | Open::Pipe { .. } => {
                return format!("pipe:[{inode}]").into_bytes();
            }
            Open::Socket(_) => return format!("socket:[{inode}]").into_bytes(),
            Open::File(open)
            | Open::Device(_, open)
            | Open::Fifo(Fifo { open, .. })
            | Open::Terminal(TerminalEnd { open, .. }) => {
                return self.path_of_open(open.node, description);
            }
            Open::Folder(folder, _) => return folder.path().into_bytes(),
            Open::Event { .. } => "[eventfd]",
            Open::Timer(_) => "[timerfd]",
            Open::Epoll(_) => "[eventpoll]",
            Open::Process(_) => "[pidfd]",
            Open::Signals(_) => "[signalfd]",
            Open::Watches(_) => "inotify",
        };
        format!("anon_inode:{kind}").into_bytes()
    }

    fn path_of_open(&self, node: Node, description: &Description) -> Vec<u8> {
        if let Ok(path) = path_of(&self.tree, node) {
            return path;
        }
        let Some((above, name)) = &description.found else {
            return format!("/memfd:{} (deleted)", node.0).into_bytes();
        };
        let mut path = path_of(&self.tree, *above).unwrap_or_default();
        if !path.ends_with(b"/") {
            path.push(b'/');
        }
        path.extend(&name[..]);
        if self.tree.lookup(*above, name) != Ok(node) {
            path.extend(b" (deleted)");
        }
        path
    }

    /// The number by which what is no file is told; the ends of a pipe have one.
    pub(super) fn inode_of(&self, id: u64, open: &Open) -> u64 {
        match open {
            Open::Pipe { channel, .. } => INODES + (16 << 32) + channel,
            Open::File(open)
            | Open::Device(_, open)
            | Open::Fifo(Fifo { open, .. })
            | Open::Terminal(TerminalEnd { open, .. }) => open.node.0,
            Open::Folder(folder, _) => folder.inode(),
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
