//! Calling functions of the host.

use alloc::vec;
use core::sync::atomic::{AtomicI64, Ordering};

use crate::abi::FromWire;
use crate::abi::{CALL_FIND, CALL_HOST, ERR_ARGUMENTS, ERR_CAPACITY, ERR_NO_FUNCTION};
use crate::hypercall::hypercall;

/// Why a host function returned nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostCallError {
    /// The embedder did not register it.
    Unknown,
    /// Its types differ from this guest's declaration.
    Arguments,
    /// It failed.
    Failed,
    /// Its result does not fit, or does not decode.
    Result,
}

impl core::fmt::Display for HostCallError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Unknown => "the host has no function of that name",
            Self::Arguments => "the host's function has other argument types",
            Self::Failed => "the host's function failed",
            Self::Result => "the host function's result does not fit or decode",
        })
    }
}

/// A host function, looked up by name at its first use. One looked up during the initialisation
/// stays known, because its number is then part of the image.
pub struct Import {
    name: &'static str,
    number: AtomicI64,
}

const NOT_ASKED: i64 = i64::MIN;

impl Import {
    /// An import that was not looked up yet.
    pub const fn new(name: &'static str) -> Self {
        Self { name, number: AtomicI64::new(NOT_ASKED) }
    }

    /// The host's number for it.
    ///
    /// # Errors
    /// [`HostCallError::Unknown`].
    pub fn number(&self) -> Result<u64, HostCallError> {
        let mut number = self.number.load(Ordering::Relaxed);
        if number == NOT_ASKED {
            number =
                hypercall(CALL_FIND, [self.name.as_ptr() as u64, self.name.len() as u64, 0, 0, 0]);
            self.number.store(number, Ordering::Relaxed);
        }
        u64::try_from(number).map_err(|_| HostCallError::Unknown)
    }

    /// Calls it with encoded arguments and decodes the result, of at most 4 KiB.
    ///
    /// # Errors
    /// See [`HostCallError`].
    pub fn call<R: FromWire>(&self, arguments: &[u8]) -> Result<R, HostCallError> {
        let number = self.number()?;
        let mut buffer = vec![0; 4096];
        let len = call_host(number, arguments, &mut buffer)?;
        let mut rest = buffer.get(..len).ok_or(HostCallError::Result)?;
        R::from_wire(&mut rest).ok_or(HostCallError::Result)
    }
}

/// Calls host function `number` with encoded arguments; returns the length of the encoded result.
///
/// # Errors
/// See [`HostCallError`].
pub fn call_host(number: u64, arguments: &[u8], result: &mut [u8]) -> Result<usize, HostCallError> {
    let outcome = hypercall(
        CALL_HOST,
        [
            number,
            arguments.as_ptr() as u64,
            arguments.len() as u64,
            result.as_mut_ptr() as u64,
            result.len() as u64,
        ],
    );
    match outcome {
        len if len >= 0 => Ok(len as usize),
        ERR_NO_FUNCTION => Err(HostCallError::Unknown),
        ERR_ARGUMENTS => Err(HostCallError::Arguments),
        ERR_CAPACITY => Err(HostCallError::Result),
        _ => Err(HostCallError::Failed),
    }
}
