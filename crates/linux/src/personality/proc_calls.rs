//! Calls on what is in no tree: paths that lead there, and what is opened, listed and told of it.

use afresh_files::{Access, Kind, Node, Place, Tree, Walk};
use rustix::io::Errno;

use super::devices::{Device, is_special};
use super::encode::{Attributes, Bytes};
use super::fifos::Fifo;
use super::proc_paths::{Folder, Meant};
use super::table::{Description, Open};
use super::terminals::TerminalEnd;
use super::{Outcome, Person, Served, State, clock_calls, copy_out};
use crate::platform::Process;

/// Bytes of entries that one call lists.
const LISTED: usize = 1 << 16;
/// Where the processes begin in a list of `/proc`, behind what the tree has there.
const BEHIND: u64 = 1 << 32;

/// What a path leads to.
#[derive(Debug)]
pub(super) enum Reach {
    Place(Place),
    /// What is in no tree.
    Own(Meant),
}

/// An entry of a list: where the next begins, its number, type and name.
type Entry = (u64, u64, u32, Vec<u8>);

impl Person {
    /// Follows a path of the guest's, from the directory `at`, as `how` says.
    pub(super) fn reach(&self, at: u64, path: &[u8], how: impl Fn(Walk) -> Walk) -> Served<Reach> {
        match self.state.meant(at, path) {
            Some(Meant::Beneath(node, rest)) => {
                return Ok(Reach::Place(
                    self.state.tree.walk(&rest, how(Walk::new(node).searching()))?,
                ));
            }
            Some(meant) => return Ok(Reach::Own(meant)),
            None => {}
        }
        let how = how(Walk::new(self.base(at, path)?).searching());
        match self.state.tree.walk(path, how) {
            Err(afresh_files::Refused::Missing) => {
                let follow = how.follow && !how.name;
                match self.state.meant_behind(how.from, path, follow) {
                    Some(Meant::Beneath(..)) | None => Err(Errno::NOENT.into()),
                    Some(meant) => Ok(Reach::Own(meant)),
                }
            }
            place => Ok(Reach::Place(place?)),
        }
    }

    /// The file of the tree that something means, where it means one.
    pub(super) fn node_of(&self, meant: &Meant) -> Served<Node> {
        let state = &self.state;
        match meant {
            Meant::Descriptor(id, number) => match &state.open_of(*id, *number) {
                Some(Description {
                    open:
                        Open::File(open)
                        | Open::Device(_, open)
                        | Open::Fifo(Fifo { open, .. })
                        | Open::Terminal(TerminalEnd { open, .. }),
                    ..
                }) => Ok(open.node),
                Some(_) => Err(Errno::ACCESS.into()),
                None => Err(Errno::NOENT.into()),
            },
            Meant::Program(id) => {
                let kin = state.family.kin(*id).ok_or(Errno::NOENT)?;
                Ok(state.tree.walk(&kin.program, Walk::new(Tree::ROOT))?.node()?)
            }
            Meant::Current(id) => Ok(state.directory_of(*id).ok_or(Errno::NOENT)?),
            Meant::Root => Ok(Tree::ROOT),
            Meant::Folder(Folder::All) => {
                Ok(state.tree.walk(b"/proc", Walk::new(Tree::ROOT))?.node()?)
            }
            // Nothing of them can be changed or gone to.
            Meant::Folder(_) | Meant::Name(..) | Meant::Text(_) | Meant::Beneath(..) => {
                Err(Errno::ACCESS.into())
            }
        }
    }

    /// The path of a program that is to be run, and where it starts.
    pub(super) fn program_at(&self, at: u64, path: Vec<u8>) -> Served<(Vec<u8>, Node)> {
        match self.state.meant(at, &path) {
            Some(Meant::Beneath(node, rest)) => Ok((rest, node)),
            Some(meant) => {
                let target = self.state.target(&meant).ok_or(Errno::ACCESS)?;
                Ok((target, Tree::ROOT))
            }
            None => {
                let from = self.base(at, &path)?;
                Ok((path, from))
            }
        }
    }

    /// Opens what is in no tree.
    pub(super) fn open_meant(&mut self, meant: &Meant, flags: i32) -> Served {
        let has = |flag: i32| flags & flag == flag;
        let is_link = self.state.target(meant).is_some();
        if has(libc::O_CREAT | libc::O_EXCL) {
            return Err(Errno::EXIST.into());
        }
        if is_link && has(libc::O_NOFOLLOW) {
            return Err(Errno::LOOP.into());
        }
        match meant {
            Meant::Text(_) if has(libc::O_DIRECTORY) => Err(Errno::NOTDIR.into()),
            Meant::Text(text) => self.open_text(text, flags),
            Meant::Folder(folder) | Meant::Name(_, folder) => {
                if flags & libc::O_ACCMODE != libc::O_RDONLY || has(libc::O_CREAT) {
                    return Err(Errno::ISDIR.into());
                }
                self.add(Open::Folder(*folder, 0), flags)
            }
            Meant::Descriptor(id, number) => {
                let found = self.state.open_of(*id, *number).ok_or(Errno::NOENT)?;
                let (open, name) = (found.open.clone(), found.found.clone());
                self.open_again(open, name, flags)
            }
            meant => {
                let node = self.node_of(meant)?;
                self.open_node(node, None, flags)
            }
        }
    }

    /// Opens once more what is open already: a file from its start, another end of a pipe.
    fn open_again(
        &mut self,
        open: Open,
        name: Option<(Node, std::sync::Arc<[u8]>)>,
        flags: i32,
    ) -> Served {
        let mode = flags & libc::O_ACCMODE;
        if flags & libc::O_DIRECTORY != 0 && !matches!(open, Open::File(_) | Open::Folder(..)) {
            return Err(Errno::NOTDIR.into());
        }
        match open {
            Open::File(open)
            | Open::Device(_, open)
            | Open::Fifo(Fifo { open, .. })
            | Open::Terminal(TerminalEnd { open, .. }) => self.open_node(open.node, name, flags),
            Open::Folder(folder, _) if mode == libc::O_RDONLY => {
                self.add(Open::Folder(folder, 0), flags)
            }
            Open::Input if mode == libc::O_RDONLY => self.add(Open::Input, flags),
            open @ (Open::Output | Open::Messages) if mode == libc::O_WRONLY => {
                self.add(open, flags)
            }
            Open::Folder(..) | Open::Input | Open::Output | Open::Messages => {
                Err(Errno::ACCESS.into())
            }
            Open::Pipe { channel, .. } if mode != libc::O_RDWR => {
                let writes = mode == libc::O_WRONLY;
                self.state.table.check_room()?;
                self.change().channels.join(channel, writes);
                self.add(Open::Pipe { channel, writes }, flags)
            }
            // What has no name cannot be opened by one.
            _ => Err(Errno::NXIO.into()),
        }
    }

    /// Opens a file of the tree that was found otherwise than by its path.
    fn open_node(
        &mut self,
        node: Node,
        name: Option<(Node, std::sync::Arc<[u8]>)>,
        flags: i32,
    ) -> Served {
        let only_named = flags & libc::O_PATH != 0;
        let mode = flags & libc::O_ACCMODE;
        let access = Access {
            read: !only_named && mode != libc::O_WRONLY,
            write: !only_named && mode != libc::O_RDONLY,
            append: !only_named && flags & libc::O_APPEND != 0,
        };
        let stat = self.state.tree.stat(node)?;
        self.may_open(stat.mode, access, flags)?;
        match stat.kind {
            Kind::Directory if access.write || flags & libc::O_CREAT != 0 => {
                return Err(Errno::ISDIR.into());
            }
            Kind::Directory => {}
            _ if flags & libc::O_DIRECTORY != 0 => return Err(Errno::NOTDIR.into()),
            Kind::File if flags & libc::O_TRUNC != 0 && !only_named => {
                self.cut(node, clock_calls::now())?;
            }
            _ => {}
        }
        if stat.kind == Kind::Device && is_special(stat.device) && !only_named {
            return self.open_special(stat.device, node, access, flags, name);
        }
        self.state.table.check_room()?;
        let open = self.change().tree.open(node, access)?;
        match Device::of(stat.device).filter(|_| stat.kind == Kind::Device && !only_named) {
            Some(device) => self.add_found(Open::Device(device, open), flags, name),
            None => self.add_found(Open::File(open), flags, name),
        }
    }

    /// What is told of something that is in no tree; of a link itself, unless it is to be followed.
    pub(super) fn attributes_meant(&self, meant: &Meant, follow: bool) -> Served<Attributes> {
        let none = Attributes::default();
        let link = |inode: u64, mode: u32| Attributes {
            inode,
            mode: libc::S_IFLNK | mode,
            links: 1,
            size: 64,
            ..none
        };
        match meant {
            Meant::Folder(folder) => Ok(folder_attributes(*folder)),
            Meant::Name(_, folder) if follow => Ok(folder_attributes(*folder)),
            Meant::Name(_, folder) => Ok(link(folder.inode() + (8 << 32), 0o777)),
            Meant::Text(_) => {
                Ok(Attributes { inode: 1, mode: libc::S_IFREG | 0o444, links: 1, ..none })
            }
            Meant::Descriptor(id, number) => {
                let mut list = self.state.descriptors_of(*id);
                let found = list.find(|(n, _, _)| n == number);
                let (_, open, description) = found.ok_or(Errno::NOENT)?;
                if follow {
                    return self.attributes_of(open, description);
                }
                let may = |may: bool, bits: u32| if may { bits } else { 0 };
                let bits = may(description.reads(), 0o500) | may(description.writes(), 0o300);
                Ok(link(Folder::Descriptors(*id).inode() + ((u64::from(*number) + 8) << 32), bits))
            }
            Meant::Program(id) | Meant::Current(id) if !follow => {
                Ok(link(Folder::Process(*id).inode() + (9 << 32), 0o777))
            }
            Meant::Root if !follow => Ok(link(Folder::All.inode() + (9 << 32), 0o777)),
            meant => Ok(Attributes::from(self.state.tree.stat(self.node_of(meant)?)?)),
        }
    }

    /// Lists a directory that is in no tree.
    pub(super) fn list_folder(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        to: u64,
        len: u64,
    ) -> Served {
        let Open::Folder(folder, from) = self.state.table.get(descriptor)?.open else {
            return Err(Errno::NOTDIR.into());
        };
        let mut bytes = Bytes::default();
        let mut next = from;
        let entries = self.state.entries(folder);
        for (after, inode, kind, name) in entries.iter().filter(|(after, ..)| *after > from) {
            let length = (19 + name.len() + 1).next_multiple_of(8);
            if bytes.0.len() + length > (len as usize).min(LISTED) {
                if bytes.0.is_empty() {
                    return Err(Errno::INVAL.into());
                }
                break;
            }
            next = *after;
            let before = bytes.0.len();
            bytes = bytes.word(*inode).word(next).half(length as u16);
            bytes.0.push((kind >> 12) as u8);
            bytes.0.extend(&name[..]);
            bytes.0.resize(before + length, 0);
        }
        copy_out(process, to, &bytes.0)?;
        self.change().table.get_mut(descriptor)?.open = Open::Folder(folder, next);
        Ok(Outcome::Value(bytes.0.len() as u64))
    }
}

fn folder_attributes(folder: Folder) -> Attributes {
    let mode = libc::S_IFDIR | 0o555;
    Attributes { inode: folder.inode(), mode, links: 2, ..Attributes::default() }
}

impl State {
    /// What is in a directory, in order. Where an entry stands does not depend on others, so that some may come and go between two calls.
    fn entries(&self, folder: Folder) -> Vec<Entry> {
        let (directory, link, file) = (libc::S_IFDIR, libc::S_IFLNK, libc::S_IFREG);
        let named = |at: u64, inode: u64, kind: u32, name: &str| {
            (at, inode, kind, name.as_bytes().to_vec())
        };
        let mut entries =
            vec![named(1, folder.inode(), directory, "."), named(2, 1, directory, "..")];
        let numbered = |number: u32, behind: u64, kind: u32| {
            let at = behind + u64::from(number) + 3;
            named(at, folder.inode() + u64::from(number), kind, &number.to_string())
        };
        match folder {
            Folder::All => {
                let walk = self.tree.walk(b"/proc", Walk::new(Tree::ROOT));
                let listed = walk.and_then(|place| self.tree.list(place.node()?));
                let listed = listed.unwrap_or_default().into_iter().enumerate();
                entries.extend(listed.map(|(at, entry)| {
                    (at as u64 + 3, entry.node.0, entry.kind.mode(), entry.name.to_vec())
                }));
                entries.push(named(BEHIND, folder.inode(), link, "self"));
                let own = super::told::OWN_FILES.iter().zip(BEHIND + 1..);
                entries.extend(own.map(|(name, at)| named(at, folder.inode(), file, name)));
                let mut ids = self.family.numbers();
                ids.sort_unstable();
                entries.extend(ids.into_iter().map(|id| numbered(id, BEHIND, directory)));
            }
            Folder::Process(id) | Folder::Thread(id, _) => {
                let lives = self.family.lives(id);
                let all = super::told::FILES.iter().filter(|name| lives || name.1);
                let files = all.map(|(name, _)| (*name, file));
                let links = [("cwd", link), ("exe", link), ("root", link)];
                let folders = [("fd", directory), ("fdinfo", directory), ("task", directory)];
                let rest = links.into_iter().chain(folders).filter(|_| lives);
                entries.extend(
                    files
                        .chain(rest)
                        .enumerate()
                        .map(|(at, (name, kind))| named(at as u64 + 3, folder.inode(), kind, name)),
                );
            }
            Folder::Descriptors(id) | Folder::Infos(id) => {
                let kind = if matches!(folder, Folder::Infos(_)) { file } else { link };
                let list = self.descriptors_of(id);
                entries.extend(list.map(|(number, ..)| numbered(number, 0, kind)));
            }
            Folder::Threads(id) => {
                let threads = self.threads_of(id).into_iter().flat_map(super::Threads::iter);
                entries.extend(threads.map(|(thread, _)| numbered(thread, 0, directory)));
            }
        }
        entries
    }
}
