//! The origin of output: the stream that it was written to, and the session of the process that
//! wrote it.
//!
//! Every kind of guest and the API above them use these types, so a piece of output is passed on as
//! it came.

/// The stream that a guest wrote to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutputStream {
    /// Its answer: the standard output of a Linux program, or the connection that it is called
    /// through.
    Output,
    /// The standard error of a Linux program.
    Error,
    /// Output of a Linux program to the device `/dev/host`: for the host alone, apart from its
    /// standard output.
    Host,
}

/// The stream and the process of a piece of output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutputSource {
    /// The stream.
    pub stream: OutputStream,
    /// Session id (`setsid`) of the process that wrote; `None` in the session of the program
    /// itself.
    pub session_id: Option<u32>,
}

impl OutputSource {
    /// Output to `stream` by a process of this session.
    #[must_use]
    pub fn new(stream: OutputStream, session_id: Option<u32>) -> Self {
        Self { stream, session_id }
    }
}

impl From<OutputStream> for OutputSource {
    fn from(stream: OutputStream) -> Self {
        Self::new(stream, None)
    }
}
