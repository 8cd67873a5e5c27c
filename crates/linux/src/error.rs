//! What can go wrong when a program is warmed, called or verified.

use std::path::PathBuf;

use crate::personality::End;
use crate::platform::PlatformError;

/// Why a program did not become warm.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WarmError {
    /// The host or the process failed.
    #[error(transparent)]
    Platform(#[from] PlatformError),
    /// The program, or what it names as its loader, is not there for the guest.
    #[error("{0} is not there for the guest: it must exist, and be granted with Program::grant")]
    NotFound(PathBuf),
    /// It is not a program that can be loaded.
    #[error("{path} cannot be loaded: {why}")]
    Unloadable {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Arguments, environment or the program's segments do not fit.
    #[error("the program does not fit into its memory limit, or its arguments into its stack")]
    TooLarge,
    /// The program ended before it waited for input.
    #[error("the program {end} before it waited for input on descriptor 0; it said: {messages}")]
    Ended {
        /// How.
        end: End,
        /// The end of its standard error.
        messages: String,
    },
    /// It did not come to wait for input in time.
    #[error("the program did not wait for input within its start limit; it said: {messages}")]
    Late {
        /// The end of its standard error.
        messages: String,
    },
}

/// Why a call has no answer. The next call starts from the warm state all the same.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The host failed, or the guest's process ended by a fault.
    #[error("{source}; the guest said: {messages}")]
    Platform {
        /// What failed.
        source: PlatformError,
        /// The end of the guest's standard error in this call.
        messages: String,
    },
    /// The guest ended in place of waiting for the next request.
    #[error("the guest {end}; it said: {messages}")]
    Ended {
        /// How.
        end: End,
        /// What it had answered.
        output: Vec<u8>,
        /// The end of its standard error in this call.
        messages: String,
    },
    /// It ran longer than its time limit, and was killed.
    #[error("the guest ran longer than its time limit; it said: {messages}")]
    Late {
        /// The end of its standard error in this call.
        messages: String,
    },
}

/// What a verification found to be different from the warm state.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// The reset itself failed.
    #[error(transparent)]
    Platform(#[from] PlatformError),
    /// A byte of memory.
    #[error("the byte at {0:#x} differs")]
    Memory(u64),
    /// The list of mappings.
    #[error("the mappings differ: {0}")]
    Mappings(String),
    /// Registers, or what lies around them.
    #[error("the registers or the stub's memory differ")]
    Registers,
    /// Descriptors, files, directory, signals or the layout.
    #[error("descriptors, files or other state differ")]
    State,
}
