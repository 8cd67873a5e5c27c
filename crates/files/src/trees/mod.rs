//! The tree, and the operations of a file system on it.

pub(crate) mod bytes;
pub(crate) mod changeset;
pub(crate) mod diff;
pub(crate) mod gathered;
pub(crate) mod ground;
pub(crate) mod names;
pub(crate) mod open;
pub(crate) mod outside;
pub(crate) mod over;
pub(crate) mod path;
pub(crate) mod tree;
pub(crate) mod tree_attributes;
