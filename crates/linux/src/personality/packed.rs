//! A guest's state as plain bytes, for snapshots, and back.
//!
//! What comes out of a snapshot may be a stranger's. It names no place of the host's that the caller did not grant, asks for
//! no more than what every guest may have, and is refused where it does not fit together. No path of the host's is opened
//! before that is known.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use afresh_files::{Kind, Node, OpenFile, SavedTree, Time, Tree};
use serde::{Deserialize, Serialize};

use super::State;
use super::devices::Device;
use super::ground;
use super::layout::Layout;
use super::table::{Description, Open, Table};
use crate::error::{FreezeError, ThawError};

/// [`State`] but for its files, in a form that is written down.
#[derive(Serialize, Deserialize)]
pub(crate) struct Packed {
    layout: Layout,
    layers: Vec<Vec<u8>>,
    descriptors: Vec<(u32, u64, bool)>,
    descriptions: Vec<(u64, PackedOpen, u32)>,
    next: u64,
    directory: Node,
    umask: u32,
    handlers: Vec<(u64, [u8; 32])>,
    blocked: u64,
    signal_stack: [u64; 3],
    name: [u8; 16],
}

#[derive(Serialize, Deserialize)]
enum PackedOpen {
    Input,
    Output,
    Messages,
    /// With the size that it had, and when it was changed.
    File(OpenFile, u64, Time),
    /// With its number.
    Device(u64, OpenFile),
}

/// A state that does not fit together.
pub(crate) fn damaged(what: &str) -> ThawError {
    ThawError::State(what.to_owned())
}

impl State {
    /// The state, and the files that the guest has written.
    pub(crate) fn pack(&self) -> Result<(Packed, Vec<u8>), FreezeError> {
        let lost = |error: &dyn std::fmt::Display| FreezeError::State(error.to_string());
        let stat = |open: &OpenFile| self.tree.stat(open.node).map_err(|error| lost(&error));
        let (descriptors, open, next) = self.table.parts();
        let mut descriptions = Vec::new();
        for (id, description) in open {
            let open = match &description.open {
                Open::Input => PackedOpen::Input,
                Open::Output => PackedOpen::Output,
                Open::Messages => PackedOpen::Messages,
                Open::File(open) => {
                    let stat = stat(open)?;
                    PackedOpen::File(open.clone(), stat.size, stat.times.modified)
                }
                Open::Device(_, open) => PackedOpen::Device(stat(open)?.device, open.clone()),
            };
            descriptions.push((id, open, description.flags));
        }
        let packed = Packed {
            layout: self.layout.clone(),
            layers: self.layers.iter().map(|path| ground::bytes(path).to_vec()).collect(),
            descriptors: descriptors.collect(),
            descriptions,
            next,
            directory: self.directory,
            umask: self.umask,
            handlers: self.handlers.iter().map(|(&number, &handler)| (number, handler)).collect(),
            blocked: self.blocked,
            signal_stack: self.signal_stack,
            name: self.name,
        };
        let files = self.tree.saved().map_err(|error| lost(&error))?;
        Ok((packed, files.to_bytes()))
    }

    /// The state that was packed, over what the caller grants of the host, which must be all that it lay over.
    pub(crate) fn unpack(
        packed: Packed,
        files: &[u8],
        granted: &[PathBuf],
    ) -> Result<Self, ThawError> {
        packed.layout.check().map_err(damaged)?;
        let path = |bytes| PathBuf::from(OsString::from_vec(bytes));
        let layers: Vec<PathBuf> = packed.layers.into_iter().map(path).collect();
        for layer in &layers {
            let plain =
                layer.components().all(|part| !matches!(part, std::path::Component::ParentDir));
            if !plain || !granted.iter().any(|grant| layer.starts_with(grant)) {
                return Err(ThawError::NotGranted(layer.clone()));
            }
        }
        let (below, mounted) = ground::over(&layers);
        if let Some(path) = layers.iter().find(|path| !mounted.contains(path)) {
            let path = path.clone();
            return Err(ThawError::File { path, why: "it cannot be opened as a directory here" });
        }
        let tree = below.restored(&SavedTree::from_bytes(files)?)?;
        let mut descriptions = BTreeMap::new();
        for (id, open, flags) in packed.descriptions {
            let open = match open {
                PackedOpen::Input => Open::Input,
                PackedOpen::Output => Open::Output,
                PackedOpen::Messages => Open::Messages,
                PackedOpen::File(open, size, modified) => {
                    let stat = held(&tree, &open)?;
                    if stat.kind == Kind::File
                        && (stat.size, stat.times.modified) != (size, modified)
                    {
                        let path = PathBuf::from(format!("descriptor {id}"));
                        return Err(ThawError::File { path, why: "its file has changed since" });
                    }
                    Open::File(open)
                }
                PackedOpen::Device(number, open) => {
                    held(&tree, &open)?;
                    let device = Device::of(number).ok_or_else(|| damaged("an unknown device"))?;
                    Open::Device(device, open)
                }
            };
            descriptions.insert(id, Description { open, flags });
        }
        let table = Table::from_parts(packed.descriptors, descriptions, packed.next)
            .ok_or_else(|| damaged("its descriptors do not fit together"))?;
        if packed.handlers.iter().any(|(number, _)| !(1..=64).contains(number)) {
            return Err(damaged("a handler of no signal"));
        }
        if tree.stat(packed.directory).map(|stat| stat.kind) != Ok(Kind::Directory) {
            return Err(damaged("its directory is none"));
        }
        Ok(Self {
            layout: packed.layout,
            tree,
            layers: layers.into(),
            table,
            directory: packed.directory,
            umask: packed.umask & 0o777,
            handlers: packed.handlers.into_iter().collect(),
            blocked: packed.blocked,
            signal_stack: packed.signal_stack,
            name: packed.name,
        })
    }
}

/// What a file is that is open.
fn held(tree: &Tree, open: &OpenFile) -> Result<afresh_files::Stat, ThawError> {
    let stat = tree.stat(open.node).ok();
    if open.offset > i64::MAX as u64 {
        return Err(damaged("an offset is negative"));
    }
    stat.ok_or_else(|| damaged("a file that is open is not there"))
}
