//! Devices that every guest has. The file tree keeps their numbers; what they do is decided where bytes move.

use std::sync::Arc;

use afresh_files::{Access, Kind, Node};

use super::terminal_calls::{MULTIPLEXER, OWN, is_terminal};
use super::{Person, Served};

/// A character device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    Null,
    Zero,
    Random,
    /// What is written there is for the host alone, apart from what the program prints.
    Host,
}

/// Numbers by which the tree keeps the names of local sockets and of named pipes, which are no devices to a guest.
pub(super) const SOCKET: u64 = 0x3c02;
pub(super) const FIFO: u64 = 0x3c03;

/// Names of what leads to terminals, and their numbers.
pub(super) const TERMINALS: [(&str, u64); 3] =
    [("/dev/ptmx", MULTIPLEXER), ("/dev/pts/ptmx", MULTIPLEXER), ("/dev/tty", OWN)];

/// Names and numbers, as Linux has them.
pub(crate) const DEVICES: [(&str, Device, u64); 5] = [
    ("/dev/null", Device::Null, 0x103),
    ("/dev/zero", Device::Zero, 0x105),
    ("/dev/random", Device::Random, 0x108),
    ("/dev/urandom", Device::Random, 0x109),
    // Of our own; the number is one that Linux leaves to local use.
    ("/dev/host", Device::Host, 0x3c01),
];

/// The type of a file, as programs are told it.
pub(super) fn type_of(kind: Kind, device: u64) -> u32 {
    match (kind, device) {
        (Kind::Device, SOCKET) => libc::S_IFSOCK,
        (Kind::Device, FIFO) => libc::S_IFIFO,
        (kind, _) => kind.mode(),
    }
}

/// Whether opening a device takes more than its number.
pub(super) fn is_special(device: u64) -> bool {
    device == FIFO || is_terminal(device)
}

impl Person {
    /// Opens what is special.
    pub(super) fn open_special(
        &mut self,
        device: u64,
        node: Node,
        access: Access,
        flags: i32,
        found: Option<(Node, Arc<[u8]>)>,
    ) -> Served {
        match device {
            FIFO => self.open_fifo(node, access, flags, found),
            device => self.open_terminal(device, node, access, flags, found),
        }
    }
}

impl Device {
    /// The device of this number, if guests have it.
    pub(crate) fn of(number: u64) -> Option<Self> {
        DEVICES.iter().find(|(_, _, known)| *known == number).map(|(_, device, _)| *device)
    }
}
