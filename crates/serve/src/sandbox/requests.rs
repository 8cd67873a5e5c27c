//! Bodies of E2B requests, and the frames of Connect streams.
//!
//! Promises: a body that is decoded takes memory in proportion to its length. Fields without a type
//! here are skipped. May break it: a field that keeps any JSON.

use std::collections::BTreeMap;

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::network_rules::{NetworkRule, NetworkRules};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct CreateRequest {
    #[serde(rename = "templateID", default)]
    pub(super) template: String,
    pub(super) timeout: Option<u64>,
    #[serde(default)]
    pub(super) auto_pause: bool,
    pub(super) auto_pause_memory: Option<bool>,
    pub(super) auto_resume: Option<AutoResume>,
    pub(super) secure: Option<bool>,
    #[serde(rename = "allow_internet_access")]
    pub(super) internet: Option<bool>,
    pub(super) network: Option<Network>,
    /// Labels of the sandbox.
    pub(super) metadata: Option<BTreeMap<String, String>>,
    /// Variables of its environment.
    pub(super) env_vars: Option<BTreeMap<String, String>>,
    #[serde(default)]
    pub(super) mcp: Presence,
    #[serde(default)]
    pub(super) iam: Presence,
    #[serde(default)]
    pub(super) volume_mounts: Presence,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AutoResume {
    #[serde(default)]
    pub(super) enabled: bool,
}

/// Rules for connections.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Network {
    /// Programs in the sandbox are reached without its token.
    pub(super) allow_public_traffic: Option<bool>,
    pub(super) allow_out: Option<Vec<String>>,
    pub(super) deny_out: Option<Vec<String>>,
    #[serde(default)]
    pub(super) dns_servers: Presence,
    #[serde(default)]
    pub(super) egress_proxy: Presence,
    /// The `Host` of requests to programs, where `${PORT}` stands for the port.
    pub(super) mask_request_host: Option<String>,
    #[serde(default)]
    pub(super) https_ports: Presence,
    pub(super) rules: Option<BTreeMap<String, Vec<NetworkRule>>>,
}

/// New rules for the connections of a sandbox.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct NetworkUpdate {
    allow_out: Option<Vec<String>>,
    deny_out: Option<Vec<String>>,
    #[serde(default)]
    dns_servers: Presence,
    #[serde(default)]
    egress_proxy: Presence,
    rules: Option<BTreeMap<String, Vec<NetworkRule>>>,
    #[serde(rename = "allow_internet_access")]
    internet: Option<bool>,
}

/// An option that this server does not have, and the reason.
pub(super) type Unsupported = (&'static str, &'static str);

const NO_SERVICE: &str = "this server has no such service";
const OWN_DNS: &str = "the server resolves the names in the `net` of a template";

impl NetworkUpdate {
    /// The first option that this server does not have, and the reason.
    pub(super) fn unsupported(&self) -> Option<Unsupported> {
        let all = [
            (self.dns_servers.0, "dnsServers", OWN_DNS),
            (self.egress_proxy.0, "egressProxy", NO_SERVICE),
        ];
        all.into_iter().find(|(given, ..)| *given).map(|(_, name, why)| (name, why))
    }

    pub(super) fn rules(self) -> NetworkRules {
        let Self { allow_out, deny_out, rules, internet, .. } = self;
        NetworkRules { allow_out, deny_out, rules, internet, ..NetworkRules::default() }
    }
}

/// Whether a field says something: it is neither null nor empty. Nothing of its value is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Presence(pub(super) bool);

impl<'de> Deserialize<'de> for Presence {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Presence;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("any value")
            }

            fn visit_unit<E>(self) -> Result<Presence, E> {
                Ok(Presence(false))
            }

            fn visit_bool<E>(self, value: bool) -> Result<Presence, E> {
                Ok(Presence(value))
            }

            fn visit_u64<E>(self, _: u64) -> Result<Presence, E> {
                Ok(Presence(true))
            }

            fn visit_i64<E>(self, _: i64) -> Result<Presence, E> {
                Ok(Presence(true))
            }

            fn visit_f64<E>(self, _: f64) -> Result<Presence, E> {
                Ok(Presence(true))
            }

            fn visit_str<E>(self, text: &str) -> Result<Presence, E> {
                Ok(Presence(!text.is_empty()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<Presence, A::Error> {
                let mut some = false;
                while all.next_element::<IgnoredAny>()?.is_some() {
                    some = true;
                }
                Ok(Presence(some))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut all: A) -> Result<Presence, A::Error> {
                let mut some = false;
                while all.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    some = true;
                }
                Ok(Presence(some))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

impl CreateRequest {
    /// The first option that this server does not have, and the reason.
    pub(super) fn unsupported(&self) -> Option<Unsupported> {
        let network = self.network.as_ref();
        let of = |rule: fn(&Network) -> Presence| network.is_some_and(|network| rule(network).0);
        let none = NO_SERVICE;
        let all = [
            (self.secure == Some(false), "secure", "every sandbox asks for its token"),
            (of(|rules| rules.dns_servers), "network.dnsServers", OWN_DNS),
            (of(|rules| rules.egress_proxy), "network.egressProxy", none),
            (of(|rules| rules.https_ports), "network.httpsPorts", none),
            (self.mcp.0, "mcp", none),
            (self.iam.0, "iam", none),
            (self.volume_mounts.0, "volumeMounts", none),
        ];
        all.into_iter().find(|(given, ..)| *given).map(|(_, name, why)| (name, why))
    }
}

#[derive(Deserialize, Default)]
pub(super) struct TimeoutRequest {
    pub(super) timeout: Option<u64>,
    pub(super) duration: Option<u64>,
    pub(super) count: Option<usize>,
    pub(super) name: Option<String>,
    /// Whether the memory is kept.
    pub(super) memory: Option<bool>,
}

#[derive(Deserialize)]
pub(super) struct ExecuteRequest {
    pub(super) code: String,
    pub(super) language: Option<String>,
    pub(super) context_id: Option<String>,
    pub(super) env_vars: Option<BTreeMap<String, String>>,
}

/// A new context of code.
#[derive(Default, Deserialize)]
pub(super) struct ContextRequest {
    pub(super) language: Option<String>,
    pub(super) cwd: Option<String>,
}

/// A watcher of a directory.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct WatchRequest {
    pub(super) path: String,
    pub(super) recursive: bool,
    pub(super) include_entry: bool,
    pub(super) watcher_id: String,
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
