//! The rights of descriptors, as preview 1 numbers them.

pub(crate) const READ: u64 = 1 << 1;
pub(crate) const SEEK: u64 = 1 << 2;
pub(crate) const TELL: u64 = 1 << 5;
pub(crate) const WRITE: u64 = 1 << 6;
pub(crate) const READDIR: u64 = 1 << 14;
pub(crate) const SET_SIZE: u64 = 1 << 19;

/// The rights that say whether a file is opened for reading or writing.
pub(crate) const ACCESS: u64 = READ | READDIR | WRITE;
/// Everything about directories.
pub(crate) const DIRECTORY: u64 = {
    let paths = 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12 | 1 << 13 | 1 << 15 | 1 << 16 | 1 << 17;
    let attributes = 1 << 18 | 1 << 19 | 1 << 20 | 1 << 21 | 1 << 23;
    paths | attributes | 1 << 4 | 1 << 24 | 1 << 25 | 1 << 26 | READDIR
};
/// Everything about files.
pub(crate) const FILE: u64 = {
    let bytes = READ | SEEK | TELL | WRITE;
    bytes | 1 | 1 << 3 | 1 << 4 | 1 << 7 | 1 << 8 | 1 << 21 | 1 << 22 | 1 << 23 | 1 << 27
};
pub(crate) const EVERYTHING: u64 = DIRECTORY | FILE;
