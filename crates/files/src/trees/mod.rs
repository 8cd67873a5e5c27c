//! The tree, and the operations of a file system on it.

pub(crate) mod bytes;
pub(crate) mod changeset;
pub(crate) mod diff;
pub(crate) mod held_file;
pub(crate) mod host_capture;
pub(crate) mod host_files;
pub(crate) mod lower_layers;
pub(crate) mod names;
pub(crate) mod open;
pub(crate) mod outside;
pub(crate) mod path;
pub(crate) mod sharing;
pub(crate) mod tree;
pub(crate) mod tree_attributes;
pub(crate) mod with_layer;
