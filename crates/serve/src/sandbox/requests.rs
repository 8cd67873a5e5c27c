//! Bodies of E2B requests, and the frames of Connect streams.
//!
//! Promises: a body that is decoded takes memory in proportion to its length. Fields without a type here are skipped.
//! May break it: a field that keeps any JSON.

use std::collections::BTreeMap;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CreateRequest {
    #[serde(rename = "templateID", default)]
    pub(super) template: String,
    pub(super) timeout: Option<u64>,
    #[serde(default)]
    pub(super) auto_pause: bool,
    /// Labels of the sandbox.
    #[serde(default)]
    pub(super) metadata: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize, Default)]
pub(super) struct TimeoutRequest {
    pub(super) timeout: Option<u64>,
    pub(super) duration: Option<u64>,
    pub(super) count: Option<usize>,
    pub(super) name: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct ExecuteRequest {
    pub(super) code: String,
    pub(super) language: Option<String>,
    pub(super) context_id: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct FilesystemRequest {
    #[serde(default)]
    pub(super) path: String,
    #[serde(default)]
    pub(super) depth: u32,
    #[serde(default)]
    pub(super) source: String,
    #[serde(default)]
    pub(super) destination: String,
}

#[derive(Deserialize)]
pub(super) struct StartRequest {
    pub(super) process: Config,
    pub(super) pty: Option<Terminal>,
    pub(super) tag: Option<String>,
    #[serde(default)]
    pub(super) stdin: bool,
}

#[derive(Deserialize)]
pub(super) struct Config {
    pub(super) cmd: String,
    #[serde(default)]
    pub(super) args: Vec<String>,
    #[serde(default)]
    pub(super) envs: BTreeMap<String, String>,
    pub(super) cwd: Option<String>,
}

/// A terminal, by its size.
#[derive(Clone, Copy, Deserialize)]
pub(super) struct Terminal {
    pub(super) size: TerminalSize,
}

#[derive(Clone, Copy, Deserialize)]
pub(super) struct TerminalSize {
    pub(super) rows: u16,
    pub(super) cols: u16,
}

/// Something with a command that runs.
#[derive(Deserialize)]
pub(super) struct Chosen {
    pub(super) process: Selector,
    pub(super) signal: Option<Signal>,
    pub(super) pty: Option<Terminal>,
    #[serde(default)]
    pub(super) input: Input,
}

/// A signal by its number, or by its name in the agent's protocol. 0 stands for an unknown one.
#[derive(Clone, Copy)]
pub(super) struct Signal(pub(super) u64);

impl<'de> Deserialize<'de> for Signal {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Named;
        // By a visitor: nothing that is neither is kept, however large.
        impl Visitor<'_> for Named {
            type Value = Signal;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a signal's number or name")
            }

            fn visit_u64<E>(self, number: u64) -> Result<Signal, E> {
                Ok(Signal(number))
            }

            fn visit_str<E>(self, name: &str) -> Result<Signal, E> {
                Ok(Signal(match name {
                    "SIGNAL_SIGKILL" => 9,
                    "SIGNAL_SIGTERM" => 15,
                    _ => 0,
                }))
            }
        }
        deserializer.deserialize_any(Named)
    }
}

#[derive(Deserialize)]
pub(super) struct Selector {
    pub(super) pid: Option<u32>,
    pub(super) tag: Option<String>,
}

#[derive(Default, Deserialize)]
pub(super) struct Input {
    pub(super) stdin: Option<String>,
    pub(super) pty: Option<String>,
}

/// A part of the input for a command.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Part {
    Start { process: Selector },
    Data { input: Input },
    KeepAlive {},
}

/// The messages of a Connect stream, each after a flag and its length.
pub(super) struct ConnectMessages<'a>(pub(super) &'a [u8]);

impl<'a> Iterator for ConnectMessages<'a> {
    type Item = Result<&'a [u8], &'static str>;

    fn next(&mut self) -> Option<Self::Item> {
        let body = std::mem::take(&mut self.0);
        if body.is_empty() {
            return None;
        }
        let Some((head, rest)) = body.split_first_chunk::<5>() else {
            return Some(Err("the stream breaks off"));
        };
        if head[0] != 0 {
            return Some(Err("a message comes as it is: without compression"));
        }
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        let Some((message, rest)) = rest.split_at_checked(length) else {
            return Some(Err("the message breaks off"));
        };
        self.0 = rest;
        Some(Ok(message))
    }
}
