//! What stands for signatures and sealing where the feature `seal` is off: nothing is demanded, and no
//! key exists.

use crate::SealError;
use crate::blobs::BlobRead;
use crate::manifest::Manifest;
use crate::{OpenError, SaveError};

/// Demands nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Access;

/// There is none.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SealKey {}

/// There is none.
pub(crate) enum Sealer {}

impl Access {
    pub(crate) fn key(&self) -> Option<&SealKey> {
        None
    }

    pub(crate) fn check(&self, _: &Manifest) -> Result<(), OpenError> {
        Ok(())
    }
}

impl SealKey {
    pub(crate) fn sealer(&self) -> Result<Sealer, SaveError> {
        match *self {}
    }

    pub(crate) fn open(&self, _: Box<dyn BlobRead>) -> Result<Box<dyn BlobRead>, OpenError> {
        match *self {}
    }
}

impl Sealer {
    pub(crate) fn push(&mut self, _: &[u8], _: &mut Vec<u8>) -> Result<(), SealError> {
        match *self {}
    }

    pub(crate) fn finish(self, _: &mut Vec<u8>) -> Result<(), SealError> {
        match self {}
    }
}
