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
pub(crate) struct CreateRequest {
    #[serde(rename = "templateID", default)]
    pub(crate) template: String,
    /// A name of a snapshot is refused. A server without this field refuses the request.
    #[serde(default)]
    pub(crate) template_only: bool,
    pub(crate) timeout: Option<u64>,
    #[serde(default)]
    pub(crate) auto_pause: bool,
    pub(crate) auto_pause_memory: Option<bool>,
    pub(crate) auto_resume: Option<AutoResume>,
    pub(crate) secure: Option<bool>,
    #[serde(rename = "allow_internet_access")]
    pub(crate) internet: Option<bool>,
    pub(crate) network: Option<Network>,
    /// Labels of the sandbox.
    pub(crate) metadata: Option<BTreeMap<String, String>>,
    /// Variables of its environment.
    pub(crate) env_vars: Option<BTreeMap<String, String>>,
    #[serde(default)]
    pub(crate) mcp: Presence,
    #[serde(default)]
    pub(crate) iam: Presence,
    #[serde(default)]
    pub(crate) volume_mounts: Presence,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AutoResume {
    #[serde(default)]
    pub(crate) enabled: bool,
}

/// Rules for connections.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Network {
    /// Programs in the sandbox are reached without its token.
    pub(crate) allow_public_traffic: Option<bool>,
    pub(crate) allow_out: Option<Vec<String>>,
    pub(crate) deny_out: Option<Vec<String>>,
    #[serde(default)]
    pub(crate) dns_servers: Presence,
    #[serde(default)]
    pub(crate) egress_proxy: Presence,
    /// The `Host` of requests to programs, where `${PORT}` stands for the port.
    pub(crate) mask_request_host: Option<String>,
    #[serde(default)]
    pub(crate) https_ports: Presence,
    pub(crate) rules: Option<BTreeMap<String, Vec<NetworkRule>>>,
}

/// New rules for the connections of a sandbox.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct NetworkUpdate {
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
pub(crate) type UnsupportedOption = (&'static str, &'static str);

const NO_SERVICE: &str = "this server has no such service";
const OWN_DNS: &str = "the server resolves the names in the `net` of a template";

impl NetworkUpdate {
    /// The first option that this server does not have, and the reason.
    pub(crate) fn unsupported(&self) -> Option<UnsupportedOption> {
        let all = [
            (self.dns_servers.0, "dnsServers", OWN_DNS),
            (self.egress_proxy.0, "egressProxy", NO_SERVICE),
        ];
        all.into_iter().find(|(given, ..)| *given).map(|(_, name, why)| (name, why))
    }

    pub(crate) fn rules(self) -> NetworkRules {
        let Self { allow_out, deny_out, rules, internet, .. } = self;
        NetworkRules { allow_out, deny_out, rules, internet, ..NetworkRules::default() }
    }
}

/// Whether a field says something: it is neither null nor empty. Nothing of its value is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Presence(pub(crate) bool);

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
    pub(crate) fn unsupported(&self) -> Option<UnsupportedOption> {
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
pub(crate) struct TimeoutRequest {
    pub(crate) timeout: Option<u64>,
    pub(crate) duration: Option<u64>,
    pub(crate) count: Option<usize>,
    pub(crate) name: Option<String>,
    /// Whether the memory is kept.
    pub(crate) memory: Option<bool>,
}

#[derive(Deserialize)]
pub(crate) struct ExecuteRequest {
    pub(crate) code: String,
    pub(crate) language: Option<String>,
    pub(crate) context_id: Option<String>,
    pub(crate) env_vars: Option<RunVariables>,
}

/// Maximum bytes of the variables of one run, each with [`VARIABLE_BYTES`]. The limit of the
/// body is that of code, and variables take many times their bytes.
const MAX_VARIABLES_BYTES: usize = 1 << 20;
const VARIABLE_BYTES: usize = 64;

/// Variables of the environment of one run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RunVariables(pub(crate) BTreeMap<String, String>);

impl<'de> Deserialize<'de> for RunVariables {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Variables;

        impl<'de> Visitor<'de> for Variables {
            type Value = RunVariables;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("variables and their values")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<RunVariables, M::Error> {
                let (mut found, mut bytes) = (BTreeMap::new(), 0);
                while let Some((name, value)) = map.next_entry::<String, String>()? {
                    bytes += name.len() + value.len() + VARIABLE_BYTES;
                    if bytes > MAX_VARIABLES_BYTES {
                        return Err(serde::de::Error::custom(format!(
                            "the variables have more than {MAX_VARIABLES_BYTES} bytes, each with {VARIABLE_BYTES}; write them to a file"
                        )));
                    }
                    found.insert(name, value);
                }
                Ok(RunVariables(found))
            }
        }

        deserializer.deserialize_map(Variables)
    }
}

/// A new context of code.
#[derive(Default, Deserialize)]
pub(crate) struct ContextRequest {
    pub(crate) language: Option<String>,
    pub(crate) cwd: Option<String>,
}

/// A watcher of a directory.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct WatchRequest {
    pub(crate) path: String,
    pub(crate) recursive: bool,
    pub(crate) include_entry: bool,
    pub(crate) watcher_id: String,
}

#[derive(Deserialize)]
pub(crate) struct FilesystemRequest {
    #[serde(default)]
    pub(crate) path: String,
    #[serde(default)]
    pub(crate) depth: u32,
    #[serde(default)]
    pub(crate) source: String,
    #[serde(default)]
    pub(crate) destination: String,
}

#[derive(Deserialize)]
pub(crate) struct StartRequest {
    pub(crate) process: Config,
    pub(crate) pty: Option<Terminal>,
    pub(crate) tag: Option<String>,
    #[serde(default)]
    pub(crate) stdin: bool,
}

#[derive(Deserialize)]
pub(crate) struct Config {
    pub(crate) cmd: String,
    #[serde(default)]
    pub(crate) args: Vec<String>,
    #[serde(default)]
    pub(crate) envs: BTreeMap<String, String>,
    pub(crate) cwd: Option<String>,
}

/// A terminal, by its size.
#[derive(Clone, Copy, Deserialize)]
pub(crate) struct Terminal {
    pub(crate) size: TerminalSize,
}

#[derive(Clone, Copy, Deserialize)]
pub(crate) struct TerminalSize {
    pub(crate) rows: u16,
    pub(crate) cols: u16,
}

/// Something with a command that runs.
#[derive(Deserialize)]
pub(crate) struct ProcessRequest {
    pub(crate) process: Selector,
    pub(crate) signal: Option<Signal>,
    pub(crate) pty: Option<Terminal>,
    #[serde(default)]
    pub(crate) input: Input,
}

/// A signal by its number, or by its name in the agent's protocol. 0 stands for an unknown one.
#[derive(Clone, Copy)]
pub(crate) struct Signal(pub(crate) u64);

impl<'de> Deserialize<'de> for Signal {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SignalVisitor;
        // By a visitor: nothing that is neither is kept, however large.
        impl Visitor<'_> for SignalVisitor {
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
        deserializer.deserialize_any(SignalVisitor)
    }
}

#[derive(Deserialize)]
pub(crate) struct Selector {
    pub(crate) pid: Option<u32>,
    pub(crate) tag: Option<String>,
}

#[derive(Default, Deserialize)]
pub(crate) struct Input {
    pub(crate) stdin: Option<String>,
    pub(crate) pty: Option<String>,
}

/// A part of the input for a command.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Part {
    Start { process: Selector },
    Data { input: Input },
    KeepAlive {},
}

/// The messages of a Connect stream, each after a flag and its length.
pub(crate) struct ConnectMessages<'a>(pub(crate) &'a [u8]);

impl<'a> Iterator for ConnectMessages<'a> {
    type Item = Result<&'a [u8], &'static str>;

    fn next(&mut self) -> Option<Self::Item> {
        let body = std::mem::take(&mut self.0);
        if body.is_empty() {
            return None;
        }
        let Some((head, rest)) = body.split_first_chunk::<5>() else {
            return Some(Err("the stream ends inside the head of a message"));
        };
        if head[0] != 0 {
            return Some(Err("a message is compressed, or has unknown flags; send it without"));
        }
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        let Some((message, rest)) = rest.split_at_checked(length) else {
            return Some(Err("the stream ends inside a message"));
        };
        self.0 = rest;
        Some(Ok(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Code of many megabytes is accepted, and as many bytes of variables would take ten times
    /// their bytes.
    #[test]
    fn variables_of_a_run_are_bounded_while_they_are_read() {
        let read = |count: usize| {
            let pairs: Vec<_> = (0..count).map(|number| format!("\"{number}\":\"\"")).collect();
            let body = format!("{{\"code\":\"1\",\"env_vars\":{{{}}}}}", pairs.join(","));
            serde_json::from_str::<ExecuteRequest>(&body).map_err(|error| error.to_string())
        };
        assert_eq!(read(10_000).unwrap().env_vars.unwrap().0.len(), 10_000);
        let refused = read(100_000).err().unwrap();
        assert!(refused.contains("write them to a file"), "{refused}");
        let same = format!(
            "{{\"code\":\"\",\"env_vars\":{{{}\"a\":\"\"}}}}",
            "\"a\":\"\",".repeat(100_000)
        );
        assert!(serde_json::from_str::<ExecuteRequest>(&same).is_err());
        let none = serde_json::from_str::<ExecuteRequest>("{\"code\":\"\",\"env_vars\":null}");
        assert_eq!(none.unwrap().env_vars, None);
    }
}
