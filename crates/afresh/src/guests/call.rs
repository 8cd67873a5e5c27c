//! Calls and answers, the same for every kind of guest.

use std::time::Duration;

#[cfg(feature = "wasm")]
use afresh_wasm::BytesEntry as FunctionEntry;

use super::CallError;
use crate::Cause;

/// No other kind looks functions up.
#[cfg(not(feature = "wasm"))]
type FunctionEntry = std::convert::Infallible;

/// A call: a function of the guest, and its input.
///
/// Micro-VMs and Linux programs have one entry point and ignore the name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub(crate) function: String,
    pub(crate) given: CallInput,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CallInput {
    Bytes(Vec<u8>),
    Text(Vec<String>),
}

impl Call {
    /// A call of a handler that takes and returns bytes. A Wasm module implements the interface of
    /// [`wasm::BytesEntry`](afresh_wasm::BytesEntry). A component's function takes one string.
    #[cfg_attr(not(feature = "wasm"), allow(rustdoc::broken_intra_doc_links))]
    pub fn bytes(function: impl Into<String>, input: impl Into<Vec<u8>>) -> Self {
        Self { function: function.into(), given: CallInput::Bytes(input.into()) }
    }

    /// A call with arguments as text, each parsed as the type that the function declares. A
    /// micro-VM gets them as one input, separated by spaces, and a Linux program as a line of
    /// input. `_start` runs a WASI command, also that of a component.
    pub fn text<A: Into<String>>(
        function: impl Into<String>,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        let arguments = arguments.into_iter().map(Into::into).collect();
        Self { function: function.into(), given: CallInput::Text(arguments) }
    }

    /// The function's name.
    #[must_use]
    pub fn function(&self) -> &str {
        &self.function
    }
}

/// The answer of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answer {
    /// The bytes of a handler.
    Bytes(Vec<u8>),
    /// The results of a function, as text.
    Values(Vec<String>),
}

impl Answer {
    /// The bytes of a handler; results as text.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Values(_) => self.text().into_bytes(),
        }
    }

    /// The answer as text: results separated by spaces, or bytes with invalid UTF-8 replaced.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::Bytes(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            Self::Values(values) => values.join(" "),
        }
    }
}

/// A handler of bytes, from [`Guest::function`](crate::Guest::function). A call through it does not
/// look its name up again.
#[derive(Clone, Debug)]
pub struct Function {
    pub(crate) name: String,
    #[allow(dead_code, reason = "only a module looks functions up")]
    pub(crate) entry: Option<FunctionEntry>,
}

/// A function to call: a name, or a [`Function`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Entry<'a> {
    /// By name.
    Name(&'a str),
    /// Looked up before.
    Function(&'a Function),
}

impl Entry<'_> {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Name(name) => name,
            Self::Function(function) => &function.name,
        }
    }
}

impl<'a> From<&'a str> for Entry<'a> {
    fn from(name: &'a str) -> Self {
        Self::Name(name)
    }
}

impl<'a> From<&'a Function> for Entry<'a> {
    fn from(function: &'a Function) -> Self {
        Self::Function(function)
    }
}

/// The cause of a failed call.
#[allow(dead_code, reason = "not every kind of guest has every cause")]
pub(super) enum ErrorKind {
    Timeout,
    /// The limit of CPU time.
    CpuTime(Duration),
    Stopped,
    Request,
    Guest,
    Host,
}

impl CallError {
    #[allow(dead_code, reason = "called by each kind of guest")]
    pub(super) fn of(function: &str, kind: ErrorKind, source: Cause) -> Self {
        let function = function.to_owned();
        match kind {
            ErrorKind::Timeout => Self::Timeout { function, source },
            ErrorKind::CpuTime(limit) => Self::CpuTime { function, limit },
            ErrorKind::Stopped => Self::Stopped { function, source },
            ErrorKind::Request => Self::Request { function, source },
            ErrorKind::Guest => Self::Guest { function, source },
            ErrorKind::Host => Self::Host { function, source },
        }
    }
}

/// The exit of a guest that ended instead of answering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exit<'a> {
    /// Its exit code, which is not zero.
    pub code: i32,
    /// Output of a Linux program before its exit. Streams of WASI are written while the guest runs.
    pub output: &'a [u8],
    /// The end of a Linux program's standard error in this call.
    pub messages: &'a str,
}
