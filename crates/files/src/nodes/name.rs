//! Names in directories, and the limits of names and paths.

use std::sync::Arc;

use crate::error::Refused;

/// Bytes of a name, at most.
pub(crate) const NAME: usize = 255;
/// Maximum bytes of a path, and of the target of a link.
pub(crate) const PATH: usize = 4096;

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name(pub(crate) Arc<[u8]>);

impl std::borrow::Borrow<[u8]> for Name {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl From<&[u8]> for Name {
    fn from(name: &[u8]) -> Self {
        Self(name.into())
    }
}

/// Checks one name of a path.
pub(crate) fn check_name(name: &[u8]) -> Result<(), Refused> {
    if name.len() > NAME {
        return Err(Refused::NameTooLong);
    }
    if name.is_empty()
        || name == b"."
        || name == b".."
        || name.iter().any(|b| matches!(b, 0 | b'/'))
    {
        return Err(Refused::Invalid);
    }
    Ok(())
}
