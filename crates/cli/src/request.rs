//! What is asked of a guest, and its answer: the same for every command that calls one.

use std::io::{Read, Write};

use afresh_wasm::{BytesEntry, CallError, Lease, Val, Warm, parse_arguments, show_value};
use anyhow::Context;
use clap::Args;
use serde_json::Value;

/// A call.
#[derive(Debug, Args)]
pub(crate) struct CallArguments {
    /// The exported function to call.
    #[arg(long, value_name = "F", default_value = "_start")]
    pub(crate) call: String,
    /// Bytes for a guest that handles bytes: text, `@FILE`, or `-` for standard input.
    #[arg(long, value_name = "TEXT|@FILE|-")]
    pub(crate) input: Option<String>,
    /// Arguments of the function.
    #[arg(allow_hyphen_values = true, trailing_var_arg = true)]
    pub(crate) arguments: Vec<String>,
}

impl CallArguments {
    /// The call, for a Wasm guest.
    pub(crate) fn request(&self, warm: &Warm) -> anyhow::Result<Request> {
        match self.input.as_deref().map(read_input).transpose()? {
            Some(input) => Request::bytes(warm, &self.call, input),
            None => Request::values(warm, &self.call, &self.arguments),
        }
    }

    /// The input, for a guest that knows nothing but bytes.
    pub(crate) fn bytes(&self) -> anyhow::Result<Vec<u8>> {
        match &self.input {
            Some(input) => read_input(input),
            None => Ok(self.arguments.join(" ").into_bytes()),
        }
    }
}

/// The bytes that an argument names.
fn read_input(input: &str) -> anyhow::Result<Vec<u8>> {
    if input == "-" {
        let mut bytes = Vec::new();
        std::io::stdin().read_to_end(&mut bytes).context("reading standard input")?;
        return Ok(bytes);
    }
    match input.strip_prefix('@') {
        Some(path) => std::fs::read(path).with_context(|| format!("cannot read {path}")),
        None => Ok(input.as_bytes().to_vec()),
    }
}

/// A call of a Wasm guest that can be repeated.
pub(crate) struct Request {
    name: String,
    values: Vec<Val>,
    bytes: Option<(BytesEntry, Vec<u8>)>,
}

impl Request {
    /// A call of a handler that takes and gives bytes.
    pub(crate) fn bytes(warm: &Warm, name: &str, input: Vec<u8>) -> anyhow::Result<Self> {
        let bytes = Some((warm.bytes_entry(name)?, input));
        Ok(Self { name: name.to_owned(), values: Vec::new(), bytes })
    }

    /// A call with arguments of the function's own types.
    pub(crate) fn values(warm: &Warm, name: &str, texts: &[String]) -> anyhow::Result<Self> {
        let values = parse_arguments(&warm.function_type(name)?, texts)
            .with_context(|| format!("calling {name}"))?;
        Ok(Self { name: name.to_owned(), values, bytes: None })
    }

    /// Calls.
    pub(crate) fn ask(&self, lease: &mut Lease<'_>) -> Result<Answer, CallError> {
        match &self.bytes {
            Some((entry, input)) => Ok(Answer::Bytes(lease.call_bytes(entry, input)?)),
            None => Ok(Answer::Values(lease.call(&self.name, &self.values)?)),
        }
    }
}

/// What a guest answered.
pub(crate) enum Answer {
    Values(Vec<Val>),
    Bytes(Vec<u8>),
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        match self {
            Answer::Values(values) => values.iter().map(show_value).collect(),
            Answer::Bytes(bytes) => Value::String(String::from_utf8_lossy(bytes).into_owned()),
        }
    }

    /// In one line.
    pub(crate) fn text(&self) -> String {
        match self {
            Answer::Values(values) => values.iter().map(show_value).collect::<Vec<_>>().join(" "),
            Answer::Bytes(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        }
    }

    pub(crate) fn print(&self, out: &mut dyn Write) -> std::io::Result<()> {
        match self {
            Answer::Values(values) => {
                for value in values {
                    writeln!(out, "{}", show_value(value))?;
                }
                Ok(())
            }
            Answer::Bytes(bytes) => {
                out.write_all(bytes)?;
                if bytes.last() == Some(&b'\n') { Ok(()) } else { writeln!(out) }
            }
        }
    }
}
