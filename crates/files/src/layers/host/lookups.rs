//! Names that are looked up in a host directory before it is listed.
//!
//! A directory of a system has a thousand names, and a program that runs uses a few of them. So
//! each of the first lookups opens one name on the host. A directory with more lookups is listed.
//!
//! Promises: a name that a lookup has found keeps its file, also once the directory is listed.
//! May break it: a name that the host makes between a lookup and the list is found by the list.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::FileType;

use super::{HostDirectory, HostFile, failed, kind_of, know};
use crate::error::Refused;
use crate::layers::name_lookup::NameLookup;
use crate::nodes::name::Name;
use crate::nodes::node::{Kind, Node};

/// Lookups in a directory before it is listed.
const MAX_LOOKUPS: usize = 32;
/// The bit of a mode with which the owner of a directory may search it.
const SEARCH: u32 = 0o100;

/// A directory that was not listed yet.
#[derive(Debug)]
pub(super) struct UnlistedDirectory {
    mode: u32,
    lookups: usize,
    /// Names that were found.
    pub(super) found: Vec<(Name, Node, Kind)>,
}

impl UnlistedDirectory {
    fn new(mode: u32) -> Self {
        Self { mode, lookups: 0, found: Vec::new() }
    }

    fn get(&self, name: &[u8]) -> Option<(Node, Kind)> {
        let found = self.found.iter().find(|(known, ..)| *known.0 == *name);
        found.map(|(_, node, kind)| (*node, *kind))
    }
}

impl HostDirectory {
    /// Looks up `name` in a directory without listing that, unless it has been or has to be; with
    /// `search`, if its owner may search it.
    pub(crate) fn lookup(
        &self,
        directory: Node,
        name: &[u8],
        search: bool,
    ) -> Result<NameLookup, Refused> {
        let check = |mode| match search && mode & SEARCH == 0 {
            true => Err(Refused::Denied),
            false => Ok(()),
        };
        let (path, mode) = {
            let known = self.lock_entries();
            let here = known.get(&directory).ok_or(Refused::Missing)?;
            if here.inode.is_some() || self.is_kept() {
                return Ok(NameLookup::Listed);
            }
            if let Some(unlisted) = &here.unlisted {
                check(unlisted.mode)?;
                if let Some(found) = unlisted.get(name) {
                    return Ok(NameLookup::Known(Some(found)));
                }
                if unlisted.lookups >= MAX_LOOKUPS {
                    return Ok(NameLookup::Listed);
                }
            }
            (super::path_of(&known, directory)?, here.unlisted.as_ref().map(|here| here.mode))
        };
        let mode = match mode {
            Some(mode) => mode,
            None => self.stat_at(&path).map_err(|error| failed(&path, error))?.1.st_mode,
        };
        if FileType::from_raw_mode(mode) != FileType::Directory {
            return Err(Refused::NotDirectory);
        }
        check(mode)?;
        let found = self.find_child(directory, &path, name)?;
        let mut known = self.lock_entries();
        let here = known.get_mut(&directory).ok_or(Refused::Missing)?;
        if here.inode.is_some() {
            return Ok(NameLookup::Listed);
        }
        let unlisted = here.unlisted.get_or_insert_with(|| UnlistedDirectory::new(mode));
        unlisted.lookups += 1;
        if let Some((child, kind)) = found
            && unlisted.get(name).is_none()
        {
            unlisted.found.push((Name::from(name), child, kind));
        }
        Ok(NameLookup::Known(unlisted.get(name)))
    }

    /// The directory above a directory that was not listed yet, and its name there.
    pub(crate) fn unlisted(&self, directory: Node) -> Option<(Node, Arc<[u8]>)> {
        let known = self.lock_entries();
        let here = known.get(&directory)?;
        let is_unlisted = here.inode.is_none() && here.unlisted.is_some();
        is_unlisted.then(|| (here.parent, here.name.0.clone()))
    }

    /// The file with a name, which is known from now on.
    fn find_child(
        &self,
        directory: Node,
        above: &Path,
        name: &[u8],
    ) -> Result<Option<(Node, Kind)>, Refused> {
        let path = above.join(OsStr::from_bytes(name));
        let (fd, stat) = match self.stat_at(&path).map_err(|error| failed(&path, error)) {
            Ok(opened) => opened,
            Err(Refused::Missing) => return Ok(None),
            Err(error) => return Err(error),
        };
        let Some(kind) = kind_of(FileType::from_raw_mode(stat.st_mode)) else { return Ok(None) };
        let child = self.node(path.as_os_str().as_bytes());
        know(&mut self.lock_entries(), child, directory, Name::from(name))
            .map_err(|error| failed(&path, error))?;
        let inode = match kind {
            Kind::Directory => None,
            _ => {
                let inode = self.inode_of(child, &path, &fd, &stat);
                Some(Arc::new(inode.map_err(|error| failed(&path, error))?))
            }
        };
        let mut known = self.lock_entries();
        let entry = known.get_mut(&child).ok_or(Refused::Missing)?;
        self.settle_number(child, entry, &stat);
        match inode {
            Some(inode) if entry.inode.is_none() => {
                (entry.inode, entry.seen) = (Some(inode), Some(HostFile::of_stat(&stat)));
            }
            None if entry.inode.is_none() => {
                entry.unlisted.get_or_insert_with(|| UnlistedDirectory::new(stat.st_mode));
            }
            _ => {}
        }
        Ok(Some((child, kind)))
    }
}
