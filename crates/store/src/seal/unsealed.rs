//! Sealing where the feature `seal` is off: no key exists.

use crate::SealError;
use std::convert::Infallible;

use crate::format::blob::BlobRead;
use crate::{OpenError, SaveError};

/// There is none. The field is private so that code elsewhere is not taken for unreachable.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SealKey(Infallible);

/// There is none.
pub(crate) struct Sealer(Infallible);

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
