//! Errors of the engine, as `errors.js` makes classes of them.

use serde_json::{Value, json};

/// An error with the class that it has in JavaScript.
#[derive(Debug)]
pub(crate) struct Failure {
    class: &'static str,
    message: String,
}

impl Failure {
    fn of(class: &'static str, error: &dyn std::error::Error) -> Self {
        Self { class, message: afresh::describe_error(error) }
    }

    /// A guest cannot be opened or warmed up.
    pub(crate) fn open(error: &dyn std::error::Error) -> Self {
        Self::of("OpenError", error)
    }

    /// A state cannot be saved.
    pub(crate) fn save(error: &dyn std::error::Error) -> Self {
        Self::of("SaveError", error)
    }

    /// The guest failed.
    pub(crate) fn guest(message: impl Into<String>) -> Self {
        Self { class: "GuestError", message: message.into() }
    }

    /// A sandbox cannot be used like this.
    pub(crate) fn sandbox(message: impl Into<String>) -> Self {
        Self { class: "SandboxError", message: message.into() }
    }

    /// Another operation uses the sandbox.
    pub(crate) fn busy() -> Self {
        let message =
            "another call is under way in this sandbox: wait for it, stop it, or fork the sandbox";
        Self { class: "BusyError", message: message.to_owned() }
    }

    /// A time limit was reached.
    pub(crate) fn timeout(message: impl Into<String>) -> Self {
        Self { class: "TimeoutError", message: message.into() }
    }

    /// A value cannot be carried between host and guest.
    pub(crate) fn marshal(message: impl Into<String>) -> Self {
        Self { class: "MarshalError", message: message.into() }
    }

    /// The host stopped the operation.
    pub(crate) fn stopped(message: impl Into<String>) -> Self {
        Self { class: "StoppedError", message: message.into() }
    }

    /// An argument is invalid.
    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self { class: "TypeError", message: message.into() }
    }

    /// A call failed.
    pub(crate) fn call(error: &afresh::CallError) -> Self {
        match error {
            afresh::CallError::Timeout { .. } | afresh::CallError::CpuTime { .. } => {
                Self::of("TimeoutError", error)
            }
            afresh::CallError::Stopped { .. } => Self::of("StoppedError", error),
            _ => Self::of("GuestError", error),
        }
    }

    /// A session refused an operation.
    pub(crate) fn session(error: &afresh::SessionError) -> Self {
        match error {
            afresh::SessionError::Call(error) => Self::call(error),
            other => Self::of("SandboxError", other),
        }
    }

    pub(crate) fn json(&self) -> Value {
        json!({ "class": self.class, "message": self.message })
    }
}
