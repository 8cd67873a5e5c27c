//! The files of a tree as data: numbers, names, attributes and contents. It imports no other room.

pub(crate) mod attributes;
pub(crate) mod content;
pub(crate) mod inode;
pub(crate) mod map;
pub(crate) mod name;
pub(crate) mod node;
pub(crate) mod source;
