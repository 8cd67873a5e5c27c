//! The connection to NATS, and the buckets that a fleet's hosts share.
//!
//! What it promises: everything has a time limit, also while no server answers; what was refused because somebody was
//! faster is told apart from what nobody answered.

use std::time::Duration;

use async_nats::jetstream::consumer::push::OrderedConfig;
use async_nats::jetstream::consumer::{DeliverPolicy, ReplayPolicy};
use async_nats::jetstream::kv::{
    Config, CreateError, CreateErrorKind, Operation, Store, UpdateErrorKind,
};
use async_nats::{Client, ConnectOptions};
use bytes::Bytes;
use futures_util::StreamExt;
use hyper::StatusCode;

use super::config::FleetConfig;
use crate::refusal::Refusal;

/// Longest wait for an answer about an entry.
const ANSWER: Duration = Duration::from_secs(5);
/// How long what is said of a removed entry stays: longer than anything is on its way.
const MARKERS: Duration = Duration::from_secs(3600);
/// Most bytes of an entry.
const ENTRY: i32 = 64 << 10;
/// The smallest message limit that works: a piece of a body, and its head.
const MESSAGE: usize = 128 << 10;

/// Why the ledger could not be asked, or not be changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    /// Somebody else changed the entry.
    #[error("the entry was changed by another host")]
    Changed,
    /// No answer.
    #[error("NATS does not answer: {0}")]
    Away(String),
}

impl From<LinkError> for Refusal {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Changed => Self::busy(
                StatusCode::SERVICE_UNAVAILABLE,
                "another host has just taken the sandbox; try again",
            ),
            LinkError::Away(why) => {
                tracing::warn!(why, "the fleet's ledger does not answer");
                Self::busy(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "the servers that hosts agree over do not answer; try again",
                )
            }
        }
    }
}

/// The connection and the buckets.
pub(crate) struct Links {
    pub(crate) client: Client,
    pub(crate) hosts: Store,
    pub(crate) sandboxes: Store,
    /// Snapshots and templates.
    pub(crate) kept: Store,
    prefix: String,
}

/// What an entry of a bucket is.
pub(crate) struct Found {
    pub(crate) revision: u64,
    pub(crate) value: Bytes,
}

async fn bounded<T, E: std::fmt::Display>(
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, LinkError> {
    match tokio::time::timeout(ANSWER, work).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(LinkError::Away(error.to_string())),
        Err(_) => Err(LinkError::Away(format!("nothing within {} s", ANSWER.as_secs()))),
    }
}

/// Whether a name can be part of a subject.
fn is_word(name: &str) -> bool {
    let sane = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=64).contains(&name.len()) && name.bytes().all(sane)
}

impl Links {
    /// Connects, and makes the buckets that are missing.
    pub(crate) async fn open(config: &FleetConfig, name: &str) -> Result<Self, afresh::Cause> {
        if !is_word(&config.fleet) {
            let fleet = &config.fleet;
            return Err(format!("`{fleet}` is no name of a fleet: letters, digits, - and _").into());
        }
        let mut options = ConnectOptions::new()
            .name(name)
            .connection_timeout(ANSWER)
            .request_timeout(Some(ANSWER))
            // A server that is gone without a word is noticed within a lease.
            .ping_interval((config.lease / 4).max(Duration::from_millis(250)))
            .reconnect_delay_callback(|attempts| {
                Duration::from_millis(25 << attempts.min(5)).min(Duration::from_millis(500))
            });
        if let Some(file) = &config.credentials {
            let text = std::fs::read_to_string(file)
                .map_err(|error| format!("the credentials {}: {error}", file.display()))?;
            let mut words = text.split_whitespace();
            options = match (words.next(), words.next(), words.next()) {
                (Some(token), None, None) => options.token(token.to_owned()),
                (Some(user), Some(password), None) => {
                    options.user_and_password(user.to_owned(), password.to_owned())
                }
                _ => {
                    let file = file.display();
                    return Err(format!(
                        "{file} is no credentials: one word is a token, two are a user and a password; keys \
                         that sign (`.creds`, nkeys) are not known to this build"
                    )
                    .into());
                }
            };
        }
        let servers: Vec<String> =
            config.nats.split(',').map(|url| url.trim().to_owned()).collect();
        let client = options
            .connect(servers)
            .await
            .map_err(|error| format!("no NATS server answers at {}: {error}", config.nats))?;
        let most = client.max_payload();
        if most < MESSAGE {
            return Err(format!(
                "the NATS server takes messages of {most} bytes, and {MESSAGE} are needed: raise its max_payload"
            )
            .into());
        }
        let context = async_nats::jetstream::context::ContextBuilder::new()
            .timeout(ANSWER)
            .build(client.clone());
        let bucket = |what: &str| Config {
            bucket: format!("afresh-{}-{what}", config.fleet),
            history: 1,
            max_value_size: ENTRY,
            num_replicas: config.replicas.max(1),
            limit_markers: Some(MARKERS),
            ..Config::default()
        };
        let made = async |what: &str| {
            let bucket = bucket(what);
            let name = bucket.bucket.clone();
            if let Ok(store) = context.get_key_value(&name).await {
                return Ok(store);
            }
            match context.create_key_value(bucket).await {
                Ok(store) => Ok(store),
                // Another host may have been faster.
                Err(error) => context.get_key_value(&name).await.map_err(|_| {
                    afresh::Cause::from(format!(
                        "the bucket {name} cannot be had: {error}; NATS 2.11 or later with JetStream (`nats-server -js`) is needed"
                    ))
                }),
            }
        };
        Ok(Self {
            hosts: made("hosts").await?,
            sandboxes: made("sandboxes").await?,
            kept: made("kept").await?,
            prefix: format!("afresh.{}", config.fleet),
            client,
        })
    }

    /// A subject of this fleet.
    pub(crate) fn subject(&self, rest: &str) -> String {
        format!("{}.{rest}", self.prefix)
    }
}

/// The entry of a key.
pub(crate) async fn find(store: &Store, key: &str) -> Result<Option<Found>, LinkError> {
    let entry = bounded(store.entry(key)).await?;
    let entry = entry.filter(|entry| entry.operation == Operation::Put);
    Ok(entry.map(|entry| Found { revision: entry.revision, value: entry.value }))
}

fn not_made(error: &CreateError) -> LinkError {
    match error.kind() {
        CreateErrorKind::AlreadyExists => LinkError::Changed,
        _ => LinkError::Away(error.to_string()),
    }
}

/// Makes an entry that is not there.
pub(crate) async fn create(store: &Store, key: &str, value: Bytes) -> Result<u64, LinkError> {
    let made = async { store.create(key, value).await.map_err(|error| not_made(&error)) };
    within(ANSWER, made).await
}

/// Makes an entry that is not there, for as long as what is said of a removed one stays.
pub(crate) async fn mark(store: &Store, key: &str, value: Bytes) -> Result<u64, LinkError> {
    let made = store.create_with_ttl(key, value, MARKERS);
    within(ANSWER, async { made.await.map_err(|error| not_made(&error)) }).await
}

/// Changes an entry that nobody has changed since `revision`.
pub(crate) async fn update(
    store: &Store,
    key: &str,
    value: Bytes,
    revision: u64,
) -> Result<u64, LinkError> {
    let updated = async {
        store.update(key, value, revision).await.map_err(|error| match error.kind() {
            UpdateErrorKind::WrongLastRevision => LinkError::Changed,
            _ => LinkError::Away(error.to_string()),
        })
    };
    within(ANSWER, updated).await
}

/// Sets an entry, whatever it was.
pub(crate) async fn put(store: &Store, key: &str, value: Bytes) -> Result<(), LinkError> {
    bounded(store.put(key, value)).await.map(drop)
}

/// Removes an entry that nobody has changed since `revision`.
pub(crate) async fn remove(store: &Store, key: &str, revision: u64) -> Result<(), LinkError> {
    let removed = async {
        let purge = store.purge_expect_revision_with_ttl(key, revision, MARKERS);
        purge.await.map_err(|error| match error.kind() {
            UpdateErrorKind::WrongLastRevision => LinkError::Changed,
            _ => LinkError::Away(error.to_string()),
        })
    };
    within(ANSWER, removed).await
}

async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, LinkError>>,
) -> Result<T, LinkError> {
    match tokio::time::timeout(limit, work).await {
        Ok(done) => done,
        Err(_) => Err(LinkError::Away(format!("nothing within {} s", limit.as_secs()))),
    }
}

/// Longest wait for all entries of a bucket.
const EVERYTHING: Duration = Duration::from_secs(600);

/// Every entry of a bucket, however many.
pub(crate) async fn every(client: &Client, store: &Store) -> Result<Vec<Found>, LinkError> {
    within(EVERYTHING, read(client, store, ">", usize::MAX)).await
}

/// Every entry whose key matches, at most `most`.
pub(crate) async fn all(
    client: &Client,
    store: &Store,
    filter: &str,
    most: usize,
) -> Result<Vec<Found>, LinkError> {
    within(ANSWER, read(client, store, filter, most)).await
}

async fn read(
    client: &Client,
    store: &Store,
    filter: &str,
    most: usize,
) -> Result<Vec<Found>, LinkError> {
    let away = |error: &dyn std::fmt::Display| LinkError::Away(error.to_string());
    let consumer = store
        .stream
        .create_consumer(OrderedConfig {
            deliver_subject: client.new_inbox(),
            filter_subject: format!("{}{filter}", store.prefix),
            replay_policy: ReplayPolicy::Instant,
            deliver_policy: DeliverPolicy::LastPerSubject,
            ..OrderedConfig::default()
        })
        .await
        .map_err(|error| away(&error))?;
    let mut found = Vec::new();
    if consumer.cached_info().num_pending == 0 {
        return Ok(found);
    }
    let mut messages = consumer.messages().await.map_err(|error| away(&error))?;
    loop {
        // A list that breaks off is no list.
        let message = messages.next().await.ok_or_else(|| away(&"the list broke off"))?;
        let message = message.map_err(|error| away(&error))?;
        let info = message.info().map_err(|error| away(&error))?;
        let (revision, left) = (info.stream_sequence, info.pending);
        let removed = message.headers.as_ref().is_some_and(|all| all.get("KV-Operation").is_some());
        if !removed && !message.payload.is_empty() {
            found.push(Found { revision, value: message.payload.clone() });
        }
        if left == 0 || found.len() >= most {
            break;
        }
    }
    Ok(found)
}
