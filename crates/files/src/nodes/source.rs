//! Where the bytes of a file are that a layer has.

use crate::error::Refused;
use crate::nodes::node::Node;

/// Where the bytes of a file below are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Host(Node),
    Archive { layer: u32, file: u32 },
}

/// A version of a host file: device, number, size, and time of modification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SourceVersion(pub(crate) [u64; 5]);

/// The bytes of files in the layers below a tree.
pub(crate) trait LowerBytes {
    /// Reads the bytes of a source at `at`. If a version is given, those of another one are
    /// [`Refused::ChangedOnHost`].
    fn read(
        &self,
        source: Source,
        version: Option<SourceVersion>,
        at: u64,
        out: &mut [u8],
    ) -> Result<(), Refused>;

    /// The next position from `at` on that is not in a hole, as far as the source records holes.
    fn next_data(&self, source: Source, at: u64) -> Option<u64>;
}
