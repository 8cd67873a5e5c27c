//! Devices that every guest has. The file tree keeps their numbers; reads and writes decide by
//! these.

use std::sync::Arc;

use afresh_files::{Access, Node};

use crate::sentry::Sentry;
use crate::sentry::fs::special_files::FIFO;
use crate::sentry::kernel::device::{Device, GenerationWatch};
use crate::sentry::result::SyscallResult;
use crate::sentry::tty::terminal::{CONTROLLING_TERMINAL, MULTIPLEXER, is_terminal};

/// Names of terminal devices, and their numbers.
pub(in crate::sentry) const TERMINALS: [(&str, u64); 3] = [
    ("/dev/ptmx", MULTIPLEXER),
    ("/dev/pts/ptmx", MULTIPLEXER),
    ("/dev/tty", CONTROLLING_TERMINAL),
];

/// Names and numbers, as Linux has them.
pub(crate) const DEVICES: [(&str, Device, u64); 7] = [
    ("/dev/null", Device::Null, 0x103),
    ("/dev/zero", Device::Zero, 0x105),
    ("/dev/full", Device::Full, 0x107),
    ("/dev/random", Device::Random, 0x108),
    ("/dev/urandom", Device::Random, 0x109),
    // A private device; Linux leaves the number to local use.
    ("/dev/host", Device::Host, 0x3c01),
    ("/dev/afresh/generation", Device::Generation(GenerationWatch::UNOPENED), 0x3c04),
];

/// Whether opening a device takes more than its number.
pub(in crate::sentry) fn is_special(device: u64) -> bool {
    device == FIFO || is_terminal(device)
}

impl Sentry {
    /// Opens a device.
    pub(in crate::sentry) fn open_special(
        &mut self,
        device: u64,
        node: Node,
        access: Access,
        flags: i32,
        found: Option<(Node, Arc<[u8]>)>,
    ) -> SyscallResult {
        match device {
            FIFO => self.open_fifo(node, access, flags, found),
            device => self.open_terminal(device, node, access, flags, found),
        }
    }
}

impl Device {
    /// The access rights of its file.
    pub(in crate::sentry) fn mode(self) -> u32 {
        if matches!(self, Self::Generation(_)) { 0o444 } else { 0o666 }
    }

    /// The device of this number, if guests have it.
    pub(crate) fn of(number: u64) -> Option<Self> {
        DEVICES.iter().find(|(_, _, known)| *known == number).map(|(_, device, _)| *device)
    }
}
