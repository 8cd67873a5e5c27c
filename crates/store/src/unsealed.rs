//! What stands for signatures and sealing where the feature `seal` is off: nothing is demanded, and no
//! key exists.

use crate::SealError;
use std::convert::Infallible;

use crate::blobs::BlobRead;
use crate::manifest::Manifest;
use crate::{OpenError, SaveError};

/// Demands nothing.
#[derive(Clone, Debug)]
pub(crate) struct Access;

/// There is none. The field is private so that code elsewhere is not taken for unreachable.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SealKey(Infallible);

/// There is none.
pub(crate) struct Sealer(Infallible);

impl Access {
    pub(crate) fn new() -> Self {
        Self
    }

    pub(crate) fn key(&self) -> Option<&SealKey> {
        None
    }

    pub(crate) fn check(&self, _: &Manifest) -> Result<(), OpenError> {
        Ok(())
    }
}

impl SealKey {
    pub(crate) fn sealer(&self) -> Result<Sealer, SaveError> {
        match self.0 {}
    }

    pub(crate) fn open(&self, _: Box<dyn BlobRead>) -> Result<Box<dyn BlobRead>, OpenError> {
        match self.0 {}
    }
}

impl Sealer {
    pub(crate) fn push(&mut self, _: &[u8], _: &mut Vec<u8>) -> Result<(), SealError> {
        match self.0 {}
    }

    pub(crate) fn finish(self, _: &mut Vec<u8>) -> Result<(), SealError> {
        match self.0 {}
    }
}
