//! The arguments of an `execve`.

use afresh_files::Node;

/// A program that a guest process wants to run.
#[derive(Debug)]
pub(crate) struct ExecCommand {
    pub(crate) path: Vec<u8>,
    /// The start of relative paths.
    pub(crate) from: Node,
    pub(crate) args: Vec<Vec<u8>>,
    pub(crate) env: Vec<Vec<u8>>,
}
