//! The result of an operation, for JavaScript.

use serde_json::Value;

/// The result of an operation.
pub(crate) struct Reply {
    pub(crate) json: Value,
    pub(crate) bytes: Vec<u8>,
}

impl From<Value> for Reply {
    fn from(json: Value) -> Self {
        Self { json, bytes: Vec::new() }
    }
}
