//! A guest's state as plain bytes, for snapshots, and back.
//!
//! What comes out of a snapshot may be a stranger's. It names no place of the host's that the caller did not grant, asks for
//! no more than what every guest may have, and is refused where it does not fit together. No file is opened before that
//! is known.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::State;
use super::layout::Layout;
use super::table::{Description, HostFile, Open, Table};
use super::tree::{Device, Found, Kind, PackedInode, PackedTree, Tree};
use crate::error::ThawError;

/// [`State`], in a form that is written down.
#[derive(Serialize, Deserialize)]
pub(crate) struct Packed {
    layout: Layout,
    tree: PackedTree,
    descriptors: Vec<(u32, u64, bool)>,
    descriptions: Vec<(u64, PackedDescription)>,
    next: u64,
    directory: Vec<u8>,
    umask: u32,
    handlers: Vec<(u64, [u8; 32])>,
    blocked: u64,
    signal_stack: [u64; 3],
    name: [u8; 16],
}

#[derive(Serialize, Deserialize)]
struct PackedDescription {
    open: PackedOpen,
    path: Vec<u8>,
    offset: u64,
    flags: u32,
}

#[derive(Serialize, Deserialize)]
enum PackedOpen {
    Input,
    Output,
    Messages,
    /// Its size and when it was changed.
    Host(u64, i64, i64),
    Layer(u64),
    Directory(Option<Vec<Vec<u8>>>),
    Device(u8),
    Place,
}

pub(super) fn bytes(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

pub(super) fn path(bytes: Vec<u8>) -> PathBuf {
    PathBuf::from(OsString::from_vec(bytes))
}

pub(super) fn device_number(device: Device) -> u8 {
    device as u8
}

pub(super) fn device(number: u8) -> Option<Device> {
    [Device::Null, Device::Zero, Device::Random].into_iter().find(|d| *d as u8 == number)
}

/// A state that does not fit together.
pub(crate) fn damaged(what: &str) -> ThawError {
    ThawError::State(what.to_owned())
}

impl State {
    pub(crate) fn pack(&self) -> Packed {
        let open = |open: &Open| match open {
            Open::Input => PackedOpen::Input,
            Open::Output => PackedOpen::Output,
            Open::Messages => PackedOpen::Messages,
            Open::Host(file) => PackedOpen::Host(file.size, file.modified.0, file.modified.1),
            Open::Layer(inode) => PackedOpen::Layer(*inode),
            Open::Directory(names) => PackedOpen::Directory(
                names.as_ref().map(|names| names.iter().map(|n| n.as_bytes().to_vec()).collect()),
            ),
            Open::Device(device) => PackedOpen::Device(device_number(*device)),
            Open::Place => PackedOpen::Place,
        };
        let (descriptors, descriptions, next) = self.table.parts();
        Packed {
            layout: self.layout.clone(),
            tree: self.tree.pack(),
            descriptors: descriptors.collect(),
            descriptions: descriptions
                .map(|(id, d)| {
                    let (offset, flags) = (d.offset, d.flags);
                    let (open, path) = (open(&d.open), bytes(&d.path));
                    (id, PackedDescription { open, path, offset, flags })
                })
                .collect(),
            next,
            directory: bytes(&self.directory),
            umask: self.umask,
            handlers: self.handlers.iter().map(|(&number, &handler)| (number, handler)).collect(),
            blocked: self.blocked,
            signal_stack: self.signal_stack,
            name: self.name,
        }
    }

    /// The state that was packed, with what the caller grants of the host.
    pub(crate) fn unpack(packed: Packed, granted: &[PathBuf]) -> Result<Self, ThawError> {
        packed.layout.check().map_err(damaged)?;
        let tree = Tree::unpack(packed.tree, granted)?;
        let mut descriptions = BTreeMap::new();
        for (id, packed) in packed.descriptions {
            let path = path(packed.path);
            let open = match packed.open {
                PackedOpen::Input => Open::Input,
                PackedOpen::Output => Open::Output,
                PackedOpen::Messages => Open::Messages,
                PackedOpen::Host(size, seconds, nanoseconds) => {
                    Open::Host(Arc::new(reopen(&tree, &path, size, (seconds, nanoseconds))?))
                }
                PackedOpen::Layer(inode) => {
                    tree.inode(inode).map_err(|_| damaged("a file that is open is not there"))?;
                    Open::Layer(inode)
                }
                PackedOpen::Directory(names) => {
                    let names = names
                        .map(|names| Arc::new(names.into_iter().map(OsString::from_vec).collect()));
                    Open::Directory(names)
                }
                PackedOpen::Device(number) => {
                    Open::Device(device(number).ok_or_else(|| damaged("an unknown device"))?)
                }
                PackedOpen::Place => Open::Place,
            };
            let (offset, flags) = (packed.offset, packed.flags);
            if offset > i64::MAX as u64 {
                return Err(damaged("an offset is negative"));
            }
            descriptions.insert(id, Description { open, path, offset, flags });
        }
        let table = Table::from_parts(packed.descriptors, descriptions, packed.next)
            .ok_or_else(|| damaged("its descriptors do not fit together"))?;
        if packed.handlers.iter().any(|(number, _)| !(1..=64).contains(number)) {
            return Err(damaged("a handler of no signal"));
        }
        Ok(Self {
            layout: packed.layout,
            tree,
            table,
            directory: path(packed.directory),
            umask: packed.umask & 0o777,
            handlers: packed.handlers.into_iter().collect(),
            blocked: packed.blocked,
            signal_stack: packed.signal_stack,
            name: packed.name,
        })
    }
}

/// Opens a file of the host's again, if it is granted and what it was.
fn reopen(
    tree: &Tree,
    path: &Path,
    size: u64,
    modified: (i64, i64),
) -> Result<HostFile, ThawError> {
    let refused = |why| ThawError::File { path: path.to_path_buf(), why };
    let Found::Host(attributes, None) = tree.look(path) else {
        return Err(refused("it is not there, or not granted"));
    };
    if attributes.size != size || attributes.modified != modified {
        return Err(refused("it has changed since"));
    }
    let file = Tree::open_host(path).map_err(|_| refused("it cannot be opened"))?;
    Ok(HostFile { file, size, modified })
}

pub(super) fn pack_kind(kind: &Kind) -> PackedInode {
    match kind {
        Kind::File(content) => PackedInode::File(content.to_vec()),
        Kind::Directory => PackedInode::Directory,
        Kind::Link(target) => PackedInode::Link(bytes(target)),
        Kind::Device(device) => PackedInode::Device(device_number(*device)),
    }
}

pub(super) fn unpack_kind(kind: PackedInode) -> Result<Kind, ThawError> {
    Ok(match kind {
        PackedInode::File(content) => Kind::File(Arc::new(content)),
        PackedInode::Directory => Kind::Directory,
        PackedInode::Link(target) => Kind::Link(path(target)),
        PackedInode::Device(number) => {
            Kind::Device(device(number).ok_or_else(|| damaged("an unknown device"))?)
        }
    })
}
