//! Sockets and named pipes in the file tree, which keeps them as devices.

use afresh_files::Kind;

/// Numbers of sockets and named pipes in the tree, which are not devices to a guest.
pub(in crate::sentry) const SOCKET: u64 = 0x3c02;
pub(in crate::sentry) const FIFO: u64 = 0x3c03;

/// The type bits of a file.
pub(in crate::sentry) fn type_of(kind: Kind, device: u64) -> u32 {
    match (kind, device) {
        (Kind::Device, SOCKET) => libc::S_IFSOCK,
        (Kind::Device, FIFO) => libc::S_IFIFO,
        (kind, _) => kind.mode(),
    }
}
