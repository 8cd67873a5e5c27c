//! The arguments of tools. Their doc comments are the descriptions that agents read.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;

/// The sandbox that exists from the start.
pub(crate) const MAIN: &str = "main";

fn main() -> String {
    MAIN.to_owned()
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NoArguments {}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SandboxArguments {
    /// Name of the sandbox.
    #[serde(default = "main")]
    pub(crate) sandbox: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CloseArguments {
    /// Name of the sandbox.
    pub(crate) sandbox: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CodeArguments {
    /// Source code. Variables of earlier calls are still defined. The value of the last expression
    /// is the result.
    pub(crate) code: String,
    /// Name of the sandbox.
    #[serde(default = "main")]
    pub(crate) sandbox: String,
    /// Time limit in seconds. Code that exceeds it is undone.
    #[schemars(range(min = 0.001, max = 86400.0))]
    pub(crate) timeout: Option<f64>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CommandArguments {
    /// Shell command, run by `/bin/sh -c`.
    pub(crate) command: String,
    /// Name of the sandbox.
    #[serde(default = "main")]
    pub(crate) sandbox: String,
    /// Working directory.
    pub(crate) cwd: Option<String>,
    /// Environment variables in addition to the sandbox's own.
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    /// Text for standard input. Without it, standard input is empty.
    pub(crate) stdin: Option<String>,
    /// Time limit in seconds. A command that exceeds it is killed.
    #[schemars(range(min = 0.001, max = 86400.0))]
    pub(crate) timeout: Option<f64>,
}

/// How bytes are written in JSON.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Encoding {
    /// Text.
    #[default]
    Utf8,
    /// Any bytes.
    Base64,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReadArguments {
    /// Absolute path of the file.
    pub(crate) path: String,
    /// Name of the sandbox.
    #[serde(default = "main")]
    pub(crate) sandbox: String,
    /// First byte to read.
    #[serde(default)]
    pub(crate) offset: u64,
    /// Maximum bytes to read. At most 1 MiB is read at once.
    pub(crate) length: Option<u64>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WriteArguments {
    /// Absolute path of the file. Missing directories are created.
    pub(crate) path: String,
    /// The whole content.
    pub(crate) content: String,
    /// Encoding of `content`.
    #[serde(default)]
    pub(crate) encoding: Encoding,
    /// Name of the sandbox.
    #[serde(default = "main")]
    pub(crate) sandbox: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListArguments {
    /// Absolute path of the directory.
    pub(crate) path: String,
    /// Name of the sandbox.
    #[serde(default = "main")]
    pub(crate) sandbox: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CheckpointArguments {
    /// Name for the present state.
    pub(crate) name: String,
    /// Name of the sandbox.
    #[serde(default = "main")]
    pub(crate) sandbox: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RollbackArguments {
    /// Name or id of a checkpoint, as `tree` lists it. The id of the first state takes the sandbox
    /// back to its start.
    pub(crate) to: String,
    /// Name of the sandbox.
    #[serde(default = "main")]
    pub(crate) sandbox: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ForkArguments {
    /// Number of new sandboxes. Each starts from the present state of this one.
    #[serde(default = "default_limit")]
    #[schemars(range(min = 1))]
    pub(crate) count: usize,
    /// Name of the sandbox.
    #[serde(default = "main")]
    pub(crate) sandbox: String,
}

fn default_limit() -> usize {
    1
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DiffArguments {
    /// Name or id of the earlier checkpoint.
    pub(crate) from: String,
    /// Name or id of the later checkpoint. By default the present state.
    pub(crate) to: Option<String>,
    /// Name of the sandbox.
    #[serde(default = "main")]
    pub(crate) sandbox: String,
}
