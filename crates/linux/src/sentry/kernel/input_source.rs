//! The object through which a caller talks to its guest.

use serde::{Deserialize, Serialize};

/// The object that the caller talks to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum InputSource {
    /// Descriptor 0.
    Input,
    /// The socket that listens.
    Port,
}
