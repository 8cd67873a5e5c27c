//! A named pipe that a descriptor has open, or that a thread waits to open.

use afresh_files::{Access, Kind, Node, OpenFile};
use serde::{Deserialize, Serialize};

use crate::sentry::fs::special_files::FIFO;

/// A named pipe that is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fifo {
    pub(crate) channel: u64,
    /// Its file, and which ends of the channel are meant.
    pub(crate) open: OpenFile,
    /// Whether no writer has opened it since. Reads then wait instead of returning the end.
    pub(crate) unmet: bool,
}

impl Fifo {
    /// The ends that it has of its channel, and whether it writes them.
    pub(crate) fn ends(&self) -> Vec<(u64, bool)> {
        let Access { read, write, .. } = self.open.access;
        let end = |has: bool, writes: bool| has.then_some((self.channel, writes));
        end(read, false).into_iter().chain(end(write, true)).collect()
    }
}

/// An open that completes once the other end is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PendingOpen {
    pub(crate) fifo: Fifo,
    /// The directory that it was found in, and its name there.
    pub(crate) found: Option<(Node, Vec<u8>)>,
}

impl PendingOpen {
    /// Whether a guest could wait for this open, in a tree with its file.
    pub(in crate::sentry) fn is_sound(&self, kind: Kind, device: u64) -> bool {
        let short = self
            .found
            .as_ref()
            .is_none_or(|(_, name)| name.len() <= crate::sentry::name_lengths::NAME);
        short && kind == Kind::Device && device == FIFO
    }
}
