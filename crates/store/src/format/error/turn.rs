//! Errors of session turns.

/// A turn is damaged, hostile, of another version, or of another parent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TurnError {
    /// It is shorter than its header says.
    #[error("the turn is cut short: {0} bytes")]
    Truncated(u64),
    /// The magic number is missing.
    #[error("not a turn of a session (no magic number)")]
    Magic,
    /// A version this build does not read.
    #[error("a turn of version {0}; this build reads version 1: use a newer afresh")]
    Version(u32),
    /// A field holds a value that the format does not allow.
    #[error("turn field `{field}` holds {value}, which is not allowed")]
    Field {
        /// Which field.
        field: &'static str,
        /// What it held.
        value: u64,
    },
    /// It exceeds a limit of the reader.
    #[error("{0}")]
    Limit(String),
    /// The compressed program is damaged.
    #[error("the turn does not decompress to its declared length: it was damaged")]
    Decompress,
    /// The result of the program does not match the header.
    #[error("the turn's program is damaged: {0}")]
    Program(&'static str),
    /// It does not match the digest in its root.
    #[error("the turn does not match its root digest: it was damaged or replaced")]
    Root,
    /// It belongs to another parent state.
    #[error("the turn was made from another state: apply it to the state that it was taken since")]
    Parent,
}
