//! Paths: from a directory along names, through symbolic links, to an existing or possible file.
//!
//! Promises: nothing above the start, or above the root, is reached; 40 links at most are followed;
//! a path that ends in a slash means a directory.

use std::sync::Arc;

use crate::error::Refused;
use crate::nodes::name::{NAME, PATH};
use crate::nodes::node::{Kind, Node, Time};
use crate::trees::tree::{New, Rename, Tree};

/// Links that one path may lead through.
const LINKS: usize = 40;
/// Bytes in the target of a link that take a step to read.
const BYTES_PER_STEP: u64 = 16;

/// Options of following a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Walk {
    /// The start of relative paths.
    pub from: Node,
    /// Where absolute paths start, and `..` does not lead out of.
    pub root: Node,
    /// Whether a last name that is a symbolic link is followed.
    pub follow: bool,
    /// Whether the last name itself is the subject, to be made, removed or moved: it is not
    /// followed, even with a slash behind it.
    pub name: bool,
    /// Whether the path must stay within `from`: absolute ones and those that leave it are refused,
    /// also in the middle and through links. As in WASI.
    pub beneath: bool,
    /// Whether only directories are passed through that their owner may search.
    pub search: bool,
}

impl Walk {
    /// As Linux follows paths: `root` is `/`.
    #[must_use]
    pub fn new(from: Node) -> Self {
        let (follow, name, beneath, search) = (true, false, false, false);
        Self { from, root: Tree::ROOT, follow, name, beneath, search }
    }

    /// As WASI follows paths: only below a directory.
    #[must_use]
    pub fn beneath(from: Node) -> Self {
        Self { root: from, beneath: true, ..Self::new(from) }
    }

    /// The same with another answer to whether a last link is followed.
    #[must_use]
    pub fn follow(mut self, follow: bool) -> Self {
        self.follow = follow;
        self
    }

    /// The same for a name that will be made, removed or moved.
    #[must_use]
    pub fn name(mut self) -> Self {
        self.name = true;
        self
    }

    /// The same through directories alone that their owner may search.
    #[must_use]
    pub fn searching(mut self) -> Self {
        self.search = true;
        self
    }

    /// The same with another root.
    #[must_use]
    pub fn root(mut self, root: Node) -> Self {
        self.root = root;
        self
    }
}

/// The target of a path: a name in an existing directory, and the file with that name, if it
/// exists.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResolvedName {
    /// The directory of the last name.
    pub directory: Node,
    /// The last name; `.` for a path that ends in a directory's own (`/`, `a/.`, `a/..`).
    pub name: Arc<[u8]>,
    /// The file with the name.
    pub found: Option<(Node, Kind)>,
    /// Whether the path ended in a slash, so that only a directory can be meant.
    pub slash: bool,
}

impl ResolvedName {
    /// The existing file.
    ///
    /// # Errors
    /// [`Refused::Missing`].
    pub fn node(&self) -> Result<Node, Refused> {
        self.found.map(|(node, _)| node).ok_or(Refused::Missing)
    }
}

/// The names of a path, last first. A final `.` counts, because it means that the path before it is
/// a directory.
fn names(path: &[u8], ahead: &mut Vec<Arc<[u8]>>) -> Result<(), Refused> {
    let end = path.iter().rposition(|b| *b != b'/').map_or(0, |at| at + 1);
    for (back, name) in path[..end].split(|b| *b == b'/').rev().enumerate() {
        if name.len() > NAME {
            return Err(Refused::NameTooLong);
        }
        if !name.is_empty() && (name != b"." || back == 0) {
            ahead.push(name.into());
        }
    }
    Ok(())
}

impl Tree {
    /// Follows a path. The last name may mean nothing; every other must be a directory's.
    ///
    /// # Errors
    /// [`Refused::Missing`], [`Refused::NotDirectory`], [`Refused::Loop`],
    /// [`Refused::NameTooLong`]; [`Refused::NotPermitted`] for a path that leaves where it must
    /// stay; [`Refused::Denied`].
    pub fn walk(&self, path: &[u8], how: Walk) -> Result<ResolvedName, Refused> {
        let mut unlimited = u64::MAX;
        self.walk_within(path, how, &mut unlimited)
    }

    /// [`Tree::walk`]. Each name takes one of `steps`, and each link further ones for its target.
    /// Without any left, the path is a [`Refused::Loop`].
    pub(crate) fn walk_within(
        &self,
        path: &[u8],
        how: Walk,
        steps: &mut u64,
    ) -> Result<ResolvedName, Refused> {
        if path.is_empty() {
            return Err(Refused::Missing);
        }
        if path.len() >= PATH {
            return Err(Refused::NameTooLong);
        }
        if path.contains(&0) {
            return Err(Refused::Invalid);
        }
        let start = |path: &[u8], at: Node| match (path.starts_with(b"/"), how.beneath) {
            (true, true) => Err(Refused::NotPermitted),
            (true, false) => Ok(how.root),
            (false, _) => Ok(at),
        };
        let mut at = start(path, how.from)?;
        let mut ahead = Vec::new();
        names(path, &mut ahead)?;
        let mut slash = path.ends_with(b"/");
        let mut links = 0;
        let here = |at: Node, slash: bool| ResolvedName {
            directory: at,
            name: Arc::from(&b"."[..]),
            found: Some((at, Kind::Directory)),
            slash,
        };
        let mut place = None;
        while let Some(name) = ahead.pop() {
            *steps = steps.checked_sub(1).ok_or(Refused::Loop)?;
            if matches!(&*name, b"." | b"..") && self.stat(at)?.kind != Kind::Directory {
                return Err(Refused::NotDirectory);
            }
            if &*name == b"." {
                place = None;
                continue;
            }
            if &*name == b".." {
                if at == how.root || how.beneath && at == how.from {
                    if how.beneath {
                        return Err(Refused::NotPermitted);
                    }
                } else {
                    at = self.entry_in(at, &name, how.search)?.ok_or(Refused::Missing)?.0;
                }
                place = None;
                continue;
            }
            let found = self.entry_in(at, &name, how.search)?;
            let last = ahead.is_empty();
            if let Some((node, Kind::Link)) = found
                && (!last || !how.name && (how.follow || slash))
            {
                links += 1;
                if links > LINKS {
                    return Err(Refused::Loop);
                }
                let target = self.read_link(node)?;
                let more = target.len() as u64 / BYTES_PER_STEP;
                *steps =
                    steps.checked_sub(more).ok_or(Refused::Loop).inspect_err(|_| *steps = 0)?;
                if target.len() + ahead.iter().map(|name| name.len() + 1).sum::<usize>() > 2 * PATH
                {
                    return Err(Refused::NameTooLong);
                }
                at = start(&target, at)?;
                slash |= last && target.ends_with(b"/");
                names(&target, &mut ahead)?;
                place = None;
                continue;
            }
            if last {
                place = Some(ResolvedName { directory: at, name, found, slash });
                break;
            }
            at = match found {
                None => return Err(Refused::Missing),
                Some((node, Kind::Directory)) => node,
                Some(_) => return Err(Refused::NotDirectory),
            };
        }
        let place = match place {
            Some(place) => place,
            None if self.stat(at)?.kind != Kind::Directory => return Err(Refused::NotDirectory),
            None => here(at, slash),
        };
        match place.found {
            Some((_, kind)) if place.slash && kind != Kind::Directory && !how.name => {
                Err(Refused::NotDirectory)
            }
            _ => Ok(place),
        }
    }

    /// [`Tree::create`] at the place of a [`Walk::name`].
    ///
    /// # Errors
    /// As [`Tree::create`]; [`Refused::IsDirectory`] and [`Refused::Missing`] for a slash behind
    /// the name of a file that is not a directory.
    pub fn create_at(
        &mut self,
        place: &ResolvedName,
        new: New<'_>,
        mode: u32,
        now: Time,
    ) -> Result<Node, Refused> {
        match (place.found, new) {
            (Some(_), _) => Err(Refused::Exists),
            (None, New::File) if place.slash => Err(Refused::IsDirectory),
            (None, New::Link(_) | New::Device(_)) if place.slash => Err(Refused::Missing),
            _ => self.create(place.directory, &place.name, new, mode, now),
        }
    }

    /// [`Tree::link`] at the place of a [`Walk::name`].
    ///
    /// # Errors
    /// As [`Tree::link`]; [`Refused::Missing`] for a slash behind the name.
    pub fn link_at(&mut self, node: Node, place: &ResolvedName, now: Time) -> Result<(), Refused> {
        match place.found {
            Some(_) => Err(Refused::Exists),
            None if place.slash => Err(Refused::Missing),
            None => self.link(node, place.directory, &place.name, now),
        }
    }

    /// [`Tree::remove_file`] at the place of a [`Walk::name`].
    ///
    /// # Errors
    /// As [`Tree::remove_file`]; [`Refused::NotDirectory`] for a slash behind the name.
    pub fn remove_file_at(&mut self, place: &ResolvedName, now: Time) -> Result<(), Refused> {
        match place.found {
            Some((_, kind)) if place.slash && kind != Kind::Directory => Err(Refused::NotDirectory),
            _ => self.remove_file(place.directory, &place.name, now),
        }
    }

    /// [`Tree::remove_directory`] at the place of a [`Walk::name`].
    ///
    /// # Errors
    /// As [`Tree::remove_directory`].
    pub fn remove_directory_at(&mut self, place: &ResolvedName, now: Time) -> Result<(), Refused> {
        self.remove_directory(place.directory, &place.name, now)
    }

    /// [`Tree::rename`] between the places of two [`Walk::name`]s.
    ///
    /// # Errors
    /// As [`Tree::rename`]; [`Refused::NotDirectory`] for a slash behind the name of a file that is
    /// not a directory.
    pub fn rename_at(
        &mut self,
        from: &ResolvedName,
        to: &ResolvedName,
        how: Rename,
        now: Time,
    ) -> Result<(), Refused> {
        let (_, kind) = from.found.ok_or(Refused::Missing)?;
        let other = to.found.map(|(_, kind)| kind);
        if kind != Kind::Directory && (from.slash || to.slash && how != Rename::Exchange)
            || how == Rename::Exchange
                && to.slash
                && other.is_some_and(|kind| kind != Kind::Directory)
        {
            return Err(Refused::NotDirectory);
        }
        self.rename(from.directory, &from.name, to.directory, &to.name, how, now)
    }

    /// The target of a path from a directory, as Linux resolves it.
    pub(crate) fn walk_to(
        &self,
        from: Node,
        path: &[u8],
        steps: &mut u64,
    ) -> Result<Node, Refused> {
        self.walk_within(path, Walk::new(from), steps)?.node()
    }
}
