//! The errors of operations on the ledger.
//!
//! Promises: an error that only an operator can remove names its cause and the way out, and is not
//! reported as a server that does not answer. A missing bucket may be one of a server that starts,
//! so it is no lasting refusal. A change that lost a race, one that the servers refused, and one
//! without an answer are different errors.

use std::collections::VecDeque;
use std::error::Error;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use async_nats::jetstream::context::{
    AccountError, AccountErrorKind, CreateKeyValueError, CreateKeyValueErrorKind,
    CreateStreamError, CreateStreamErrorKind,
};
use async_nats::jetstream::stream::{
    ConsumerError, ConsumerErrorKind, LastRawMessageError, LastRawMessageErrorKind,
};
use async_nats::jetstream::{Error as ServerAnswer, ErrorCode};
use async_nats::{ConnectError, ConnectErrorKind};
use hyper::StatusCode;

use super::cipher::CipherError;
use super::config::FleetConfig;
use crate::error_response::ErrorResponse;
use crate::failure::describe;
use crate::lock::lock;
use crate::sandbox::records::store::MAX_ENTRY;

/// An operation on the ledger failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NatsError {
    /// Another host changed the entry.
    #[error("the entry was changed by another host")]
    Changed,
    /// No answer to a read.
    #[error("NATS does not answer: {0}")]
    Away(String),
    /// The servers refuse it for now: a change was not made.
    #[error("NATS cannot do this now: {0}")]
    NotNow(String),
    /// No answer to a change, which may have been made.
    #[error("NATS does not answer, and a change may have been made or not: {0}")]
    Unknown(String),
    /// An operator must change something first.
    #[error("NATS refuses an operation on the bucket {bucket}: {why}")]
    Refused { bucket: String, why: String },
    /// The bucket is not there: its servers have just started, or have lost it.
    #[error(
        "NATS has no bucket {bucket}: {why}; unless its servers have just started, restore the ledger (`afresh fleet restore`), \
         or make an empty one (`afresh fleet init`), and start the hosts again"
    )]
    Missing { bucket: String, why: String },
    /// The entry cannot be sealed or opened.
    #[error("the entry {place} cannot be read: {source}")]
    Sealed { place: String, source: CipherError },
}

impl From<NatsError> for ErrorResponse {
    fn from(error: NatsError) -> Self {
        match error {
            NatsError::Changed => Self::busy(
                StatusCode::SERVICE_UNAVAILABLE,
                "another host took the sandbox; try again",
            ),
            error @ NatsError::Sealed { .. } => {
                tracing::error!(%error, "an entry of the ledger is unreadable");
                Self::host()
            }
            error @ NatsError::Refused { .. } => {
                tracing::error!(%error, "an operator of the fleet is needed");
                Self::busy(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "the servers that hosts agree over refuse this host; its operator finds the reason in its log",
                )
            }
            error @ NatsError::Missing { .. } => {
                tracing::error!(%error, "the fleet's ledger is missing");
                Self::busy(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "the servers that hosts agree over have no ledger yet; try again, and if it lasts, the operator of this host finds the reason in its log",
                )
            }
            NatsError::Unknown(why) => {
                tracing::warn!(why, "the outcome of a change of the fleet's ledger is unknown");
                Self::new(
                    StatusCode::GATEWAY_TIMEOUT,
                    "the servers that hosts agree over did not answer, and the outcome of this request is unknown: \
                     read the state of the sandbox before you send it again",
                )
            }
            NatsError::NotNow(why) => {
                tracing::warn!(why, "the fleet's ledger refuses this for now");
                Self::busy(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "the servers that hosts agree over refuse changes for now; try again",
                )
            }
            NatsError::Away(why) => {
                tracing::warn!(why, "the fleet's ledger does not answer");
                Self::busy(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "the servers that hosts agree over do not answer; try again",
                )
            }
        }
    }
}

impl NatsError {
    /// Whether the servers do not answer, or refuse operations on a whole bucket: other operations
    /// would fail as well.
    pub(crate) fn concerns_all(&self) -> bool {
        self.is_transient() || matches!(self, Self::Refused { .. })
    }

    /// Whether it may end without an operator.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Away(_) | Self::NotNow(_) | Self::Unknown(_) | Self::Missing { .. } => true,
            Self::Changed | Self::Refused { .. } | Self::Sealed { .. } => false,
        }
    }

    /// The error of a change that is made again without harm.
    pub(crate) fn repeatable(self) -> Self {
        match self {
            Self::Unknown(why) => Self::Away(why),
            error => error,
        }
    }
}

/// Time that the error of a server explains operations without an answer: the longest time limit of
/// one, and a moment.
const REFUSAL_LIFETIME: Duration = Duration::from_secs(11);

/// Refusals that a client remembers.
const MAX_REFUSALS: usize = 16;

/// The last errors that a server sent to a client. The server does not say which operation one
/// concerns.
#[derive(Debug, Default)]
pub(super) struct RecentRefusals(Mutex<VecDeque<(Instant, String)>>);

impl RecentRefusals {
    pub(super) fn add(&self, why: String) {
        let mut all = lock(&self.0);
        if all.len() == MAX_REFUSALS {
            all.pop_front();
        }
        all.push_back((Instant::now(), why));
    }

    /// The last one with this property that is not older than any operation that ends now.
    pub(super) fn find(&self, concerns: impl Fn(&str) -> bool) -> Option<String> {
        let all = lock(&self.0);
        let mut recent = all.iter().rev().take_while(|(at, _)| at.elapsed() < REFUSAL_LIFETIME);
        recent.find(|(_, why)| concerns(why)).map(|(_, why)| why.clone())
    }

    pub(super) fn last(&self) -> Option<String> {
        self.find(|_| true)
    }
}

/// The error of an operation that had no answer.
pub(super) fn away(error: impl std::fmt::Display) -> NatsError {
    NatsError::Away(error.to_string())
}

/// The error of an operation on a bucket.
pub(super) fn failed(bucket: &str, error: &(dyn Error + 'static)) -> NatsError {
    match server_answer(error) {
        // A server that starts answers so until it has read its streams.
        Some(answer) if answer.error_code() == ErrorCode::STREAM_NOT_FOUND => {
            NatsError::Missing { bucket: bucket.to_owned(), why: answer.to_string() }
        }
        Some(answer) if is_lasting(&answer) => {
            NatsError::Refused { bucket: bucket.to_owned(), why: reason(bucket, &answer) }
        }
        Some(answer) => NatsError::NotNow(answer.to_string()),
        None => NatsError::Away(describe(error)),
    }
}

/// The error of an operation on a bucket without an answer. A server answers nothing to a client
/// without the permission, and sends one of `refusals` by itself.
pub(super) fn unanswered(bucket: &str, why: String, refusals: &RecentRefusals) -> NatsError {
    let concerns = |refusal: &str| {
        refusal.contains(bucket) || refusal.to_ascii_lowercase().contains("authorization violation")
    };
    match refusals.find(concerns) {
        Some(refusal) => NatsError::Refused {
            bucket: bucket.to_owned(),
            why: format!(
                "{refusal}; give the credentials of this client the permissions of its role, which `deploy/nats/fleet.conf` lists"
            ),
        },
        None => NatsError::Away(why),
    }
}

/// The answer of the servers that an error has, if one came.
fn server_answer(error: &(dyn Error + 'static)) -> Option<ServerAnswer> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(answer) = error.downcast_ref::<ServerAnswer>() {
            return Some(answer.clone());
        }
        if let Some(error) = error.downcast_ref::<LastRawMessageError>()
            && let LastRawMessageErrorKind::JetStream(answer) = error.kind()
        {
            return Some(answer);
        }
        if let Some(error) = error.downcast_ref::<ConsumerError>()
            && let ConsumerErrorKind::JetStream(answer) = error.kind()
        {
            return Some(answer);
        }
        next = error.source();
    }
    None
}

/// Whether servers answer so while they have no leader, or too few of them are there.
fn is_electing(code: ErrorCode) -> bool {
    [
        ErrorCode::CLUSTER_NOT_AVAILABLE,
        ErrorCode::CLUSTER_NOT_LEADER,
        ErrorCode::CLUSTER_NOT_ACTIVE,
        ErrorCode::CLUSTER_NO_PEERS,
        ErrorCode::INSUFFICIENT_RESOURCES,
    ]
    .contains(&code)
}

fn lacks_jetstream(code: ErrorCode) -> bool {
    [ErrorCode::JETSTREAM_NOT_ENABLED, ErrorCode::JETSTREAM_NOT_ENABLED_FOR_ACCOUNT].contains(&code)
}

/// Whether servers answer the same until an operator changes something.
fn is_lasting(answer: &ServerAnswer) -> bool {
    let code = answer.error_code();
    lacks_jetstream(code)
        || (400..500).contains(&answer.code())
            && !is_electing(code)
            && code != ErrorCode::MAXIMUM_CONSUMERS_LIMIT
}

/// The reason of a refusal, and the way out.
fn reason(bucket: &str, answer: &ServerAnswer) -> String {
    let code = answer.error_code();
    let advice = if lacks_jetstream(code) {
        "enable JetStream for this account (`nats-server -js`)".to_owned()
    } else if code == ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM {
        format!("run `nats stream edit KV_{bucket} --max-msg-size {MAX_ENTRY}`")
    } else if code == ErrorCode::MESSAGE_TTL_DISABLED {
        format!("run `nats stream edit KV_{bucket} --allow-msg-ttl`")
    } else {
        format!("compare `nats stream info KV_{bucket}` with that of a new fleet")
    };
    format!("{answer}; {advice}")
}

/// Whether a bucket could not be made because the servers have no leader, or do not answer.
pub(super) fn lacks_leader(error: &CreateKeyValueError) -> bool {
    let Some(source) = error.source() else {
        return error.kind() == CreateKeyValueErrorKind::TimedOut;
    };
    if let Some(account) = source.downcast_ref::<AccountError>() {
        return match account.kind() {
            AccountErrorKind::TimedOut => true,
            AccountErrorKind::JetStream(error) => is_electing(error.error_code()),
            _ => false,
        };
    }
    source.downcast_ref::<CreateStreamError>().is_some_and(|error| match error.kind() {
        CreateStreamErrorKind::TimedOut => true,
        CreateStreamErrorKind::JetStream(error) => is_electing(error.error_code()),
        _ => false,
    })
}

/// Whether a connection ended at a certificate: it is an error of the data of the connection.
fn is_tls(error: &ConnectError) -> bool {
    let is_data = |error: &std::io::Error| error.kind() == std::io::ErrorKind::InvalidData;
    let io = error.source().and_then(|source| source.downcast_ref());
    error.kind() == ConnectErrorKind::Tls || io.is_some_and(is_data)
}

/// The reason that no server accepts the connection, and the way out.
pub(super) fn not_connected(config: &FleetConfig, error: &ConnectError) -> String {
    let (place, why) = (config.servers(), describe(error));
    match error.kind() {
        _ if is_tls(error) => format!(
            "no encrypted connection to NATS at {place}: {why}; check that `ca` names the authority of its certificate, \
             and `certificate` one that it accepts"
        ),
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => {
            let advice = match config.credentials {
                Some(_) => "check the file `credentials` and the users of the server",
                None => "give `credentials`, or a client `certificate`",
            };
            format!("NATS at {place} refuses this client: {why}; {advice}")
        }
        ConnectErrorKind::Dns => {
            format!("the name of a NATS server in {place} is not found: {why}; check `nats`")
        }
        // A password may have a comma, and end the part that is not shown.
        ConnectErrorKind::ServerParse if config.nats.contains('@') => format!(
            "`nats` is no list of NATS servers: {why}; write nats://HOST:PORT or tls://HOST:PORT, and credentials in a file"
        ),
        ConnectErrorKind::ServerParse => {
            format!(
                "`{place}` is no list of NATS servers: {why}; write nats://HOST:PORT or tls://HOST:PORT"
            )
        }
        _ => format!("no NATS server answers at {place}: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_without_an_answer_is_not_sent_again() {
        let unknown = ErrorResponse::from(NatsError::Unknown("silent".to_owned()));
        assert_eq!((unknown.status, unknown.later), (StatusCode::GATEWAY_TIMEOUT, false));
        for away in [NatsError::Away("silent".to_owned()), NatsError::Unknown(String::new())] {
            let away = ErrorResponse::from(away.repeatable());
            assert_eq!((away.status, away.later), (StatusCode::SERVICE_UNAVAILABLE, true));
        }
    }

    #[test]
    fn a_change_that_servers_refuse_for_now_was_not_made() {
        let answer = serde_json::json!({
            "code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"
        });
        let answer: ServerAnswer = serde_json::from_value(answer).unwrap();
        let refused = failed("bucket", &answer);
        assert!(matches!(refused, NatsError::NotNow(_)), "{refused:?}");
        let refused = ErrorResponse::from(refused);
        assert_eq!((refused.status, refused.later), (StatusCode::SERVICE_UNAVAILABLE, true));
    }

    #[test]
    fn credentials_in_the_address_of_a_server_are_not_shown() {
        for (nats, shown) in [
            ("nats://user:secret@127.0.0.1:4222", "nats://127.0.0.1:4222"),
            ("tls://secret@one, tls://user:se@cret@two:1", "tls://one,tls://two:1"),
            ("user:secret@one:4222,two", "one:4222,two"),
            ("nats://one:4222", "nats://one:4222"),
        ] {
            let config = FleetConfig::new(nats);
            assert_eq!(config.servers(), shown);
            let kinds = [
                ConnectErrorKind::Io,
                ConnectErrorKind::Dns,
                ConnectErrorKind::Tls,
                ConnectErrorKind::ServerParse,
                ConnectErrorKind::Authentication,
            ];
            for kind in kinds {
                let error = not_connected(&config, &ConnectError::new(kind));
                assert!(!error.contains("secret") && !error.contains("cret"), "{error}");
            }
            assert!(!format!("{config:?}").contains("cret"), "{config:?}");
        }
        let config = FleetConfig::new("nats://user:sec,ret@one");
        let error = not_connected(&config, &ConnectError::new(ConnectErrorKind::ServerParse));
        assert!(!error.contains("sec"), "{error}");
    }

    #[test]
    fn an_old_refusal_explains_no_operation() {
        let refusals = RecentRefusals::default();
        assert_eq!(refusals.last(), None);
        refusals.add("violation of one".to_owned());
        refusals.add("violation of two".to_owned());
        assert_eq!(refusals.last().as_deref(), Some("violation of two"));
        assert!(refusals.find(|why| why.ends_with("one")).is_some());
        (0..MAX_REFUSALS).for_each(|_| refusals.add("violation of three".to_owned()));
        assert_eq!(refusals.find(|why| why.ends_with("one")), None);
        let old = Instant::now().checked_sub(REFUSAL_LIFETIME).unwrap();
        lock(&refusals.0).iter_mut().for_each(|(at, _)| *at = old);
        assert_eq!(refusals.last(), None);
    }
}
