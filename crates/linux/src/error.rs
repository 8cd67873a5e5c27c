//! Errors of warming, calling and verifying a program.

use std::path::PathBuf;

use crate::platform::PlatformError;
use crate::sentry::End;

/// A program could not be warmed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WarmError {
    /// The host or the process failed.
    #[error(transparent)]
    Platform(#[from] PlatformError),
    /// The program or its loader does not exist for the guest.
    #[error(
        "the guest has no {0}: it must be in its image, or exist on the host and be granted (`--dir`; in Python \
         `dirs`, in Rust `Program::grant`)"
    )]
    NotFound(PathBuf),
    /// The image has no entry point and no command, and the caller gave none.
    #[error("the image names no program: give one, and its arguments, as arguments")]
    NoProgram,
    /// The file is not a program that can be loaded.
    #[error("{path} cannot be loaded: {why}")]
    Unloadable {
        /// Which file.
        path: PathBuf,
        /// The reason.
        why: &'static str,
    },
    /// A file or directory could not be granted.
    #[error("{path} cannot be given to the guest: {error}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        error: afresh_files::Refused,
    },
    /// The program is a script without a usable interpreter in its first line.
    #[error("{path} is a script for {interpreter}: {help}")]
    Script {
        /// Which file.
        path: PathBuf,
        /// The interpreter that its first line names.
        interpreter: String,
        /// The way out.
        help: String,
    },
    /// Arguments, environment or the program's segments do not fit.
    #[error("the program does not fit into its memory limit, or its arguments into its stack")]
    TooLarge,
    /// The program ended before it waited for input.
    #[error(
        "the program {end} before it waited for input on descriptor 0{}",
        last_messages(messages)
    )]
    Ended {
        /// How.
        end: End,
        /// The end of its standard error.
        messages: String,
    },
    /// It was to stop, and its state to be kept, while nothing could continue it.
    #[error(
        "the program was stopped while it {what}; a state is kept of a program that has ended, waits for its \
         standard input, or waits as a server on a port"
    )]
    NotIdle {
        /// Its occupation.
        what: &'static str,
    },
    /// Its input could not be opened.
    #[error("its standard input: {0}")]
    Input(#[source] std::io::Error),
    /// Its [stop handle](crate::Program::stop_handle) ended the warm-up.
    #[error("the warm-up of the program was stopped by its host")]
    Stopped,
    /// The program did not wait for input within the time limit.
    #[error("the program did not wait for input within its start limit{}", last_messages(messages))]
    Late {
        /// The end of its standard error.
        messages: String,
    },
}

/// A call failed. The next call starts from the warm state in any case.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The host failed, or the guest's process ended by a fault.
    #[error("{source}{}", last_messages(messages))]
    Platform {
        /// The failed operation.
        source: PlatformError,
        /// The last bytes of standard error in this call.
        messages: String,
    },
    /// The guest ended instead of waiting for the next request.
    #[error("the guest {end}{}", last_messages(messages))]
    Ended {
        /// How.
        end: End,
        /// The output so far.
        output: Vec<u8>,
        /// The end of its standard error in this call.
        messages: String,
    },
    /// The call exceeded its time limit, and was killed.
    #[error("the guest ran longer than its time limit of {limit:?}{}", last_messages(messages))]
    Late {
        /// The limit of the call.
        limit: std::time::Duration,
        /// The end of its standard error in this call.
        messages: String,
    },
    /// The call exceeded its CPU time limit, and was killed.
    #[error("the guest used its CPU time limit of {limit:?}{}", last_messages(messages))]
    CpuTime {
        /// The limit of the call.
        limit: std::time::Duration,
        /// The end of its standard error in this call.
        messages: String,
    },
    /// An earlier call was cut short.
    #[error("an earlier call of this instance was cut short: reset it first")]
    NeedsReset,
}

/// The last messages of the guest, if any.
fn last_messages(messages: &str) -> String {
    match messages.trim_end() {
        "" => String::new(),
        said => format!("; it said: {said}"),
    }
}

/// A session's state could not be kept or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// Freezing failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The state is not that of a Linux program.
    #[error("the state is of another guest")]
    Foreign,
}

/// A program could not be frozen for a snapshot.
pub type FreezeError = afresh_pager::FreezeError<CallError>;

impl From<CallError> for FreezeError {
    fn from(error: CallError) -> Self {
        Self::Guest(error)
    }
}

/// A snapshot could not be thawed as a warm program.
pub type ThawError = afresh_pager::ThawError<Incompatible>;

impl From<Incompatible> for ThawError {
    fn from(error: Incompatible) -> Self {
        Self::Guest(error)
    }
}

/// A program does not fit this host or its grants.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Incompatible {
    /// The files that it has written are damaged, or a granted directory cannot be opened.
    #[error(transparent)]
    Files(#[from] afresh_files::TreeError),
    /// The host's kernel or processor differs in properties that the program depends on.
    #[error(
        "{what} differs from where the snapshot was made: open it there, or warm the program anew here"
    )]
    Host {
        /// The difference.
        what: &'static str,
    },
    /// A path of the host that the program could read.
    #[error(
        "{0} was granted to the program when the snapshot was made: if you trust the snapshot, grant it again, or a \
         directory above it (`--dir {0}`; in Python `dirs`, in Rust `Program::grant`)"
    )]
    NotGranted(PathBuf),
    /// Its directories of the host: more than a program can have, or some of them twice.
    #[error(
        "the snapshot names {0} directories of the host, too many or overlapping ones: it is damaged or forged"
    )]
    Layers(usize),
    /// A limit of the opener.
    #[error(
        "the program needs {needed} bytes of {what}, more than the {limit} that it is allowed here: raise `{way_out}` if you trust it"
    )]
    Limit {
        /// The limit.
        what: &'static str,
        /// Bytes that the snapshot's program has.
        needed: u64,
        /// Bytes that the opener allows.
        limit: u64,
        /// The option that sets the limit.
        way_out: &'static str,
    },
    /// A file that the program has open.
    #[error("{path} is open in the program, and {why}")]
    File {
        /// Which.
        path: PathBuf,
        /// The reason.
        why: &'static str,
    },
}

/// A difference from the warm state that a verification found.
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
    /// Registers, or other data of their frame.
    #[error("the registers or the stub's memory differ")]
    Registers,
    /// Descriptors, files, directory, signals or the layout.
    #[error("descriptors, files or other state differ")]
    State,
}
