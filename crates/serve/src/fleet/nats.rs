//! The connection to NATS, and the buckets that a fleet's hosts share.
//!
//! Promises: every operation has a time limit, also while no server answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::header::{NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, NATS_MESSAGE_TTL};
use async_nats::jetstream::Context;
use async_nats::jetstream::consumer::push::OrderedConfig;
use async_nats::jetstream::consumer::{Consumer, DeliverPolicy, ReplayPolicy};
use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::kv::{Config, CreateError, CreateErrorKind, Store, UpdateErrorKind};
use async_nats::jetstream::stream::LastRawMessageErrorKind;
use async_nats::{Client, Event, HeaderMap, HeaderValue};
use bytes::Bytes;
use futures_util::StreamExt;
use tokio::sync::Semaphore;

use super::bucket_check::check_bucket;
use super::cipher::{self, FleetKey};
use super::config::FleetConfig;
use super::credentials::{self, Role};
pub(crate) use super::nats_error::NatsError;
use super::nats_error::{RecentRefusals, away, failed, lacks_leader, not_connected, unanswered};
use crate::sandbox::records::store::MAX_ENTRY;

/// Longest wait for an answer about an entry.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a host that joins waits for NATS servers which have just started, and elect their
/// leaders. Nothing else needs one.
const JOIN_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause between two attempts of a host that joins.
const JOIN_RETRY_INTERVAL: Duration = Duration::from_millis(250);
/// Lifetime of a removal marker: longer than any message is under way.
const MARKER_LIFETIME: Duration = Duration::from_secs(3600);
/// The smallest message limit that works: a piece of a body, and its head.
const MIN_MESSAGE: usize = 128 << 10;

/// The connection and the buckets.
pub(crate) struct NatsConnection {
    pub(crate) client: Client,
    pub(crate) hosts: Bucket,
    pub(crate) sandboxes: Bucket,
    /// Snapshots and templates.
    pub(crate) kept: Bucket,
    /// Distinguishes the fleet's keys; empty without one.
    pub(super) fingerprint: String,
    /// The last error that a server sent, such as a missing permission.
    pub(super) refusals: Arc<RecentRefusals>,
    prefix: String,
}

/// A bucket, and the cipher of its entries.
#[derive(Clone)]
pub(crate) struct Bucket {
    store: Store,
    context: Context,
    cipher: Option<Arc<FleetKey>>,
    /// Whether values are read as they are stored.
    is_raw: bool,
    /// The last error that a server sent to this client.
    refusals: Arc<RecentRefusals>,
}

impl Bucket {
    /// The place that an entry is bound to.
    fn place(&self, key: &str) -> String {
        format!("{}/{key}", self.store.name)
    }

    /// The error of an operation on this bucket.
    fn failed(&self, error: &(dyn std::error::Error + 'static)) -> NatsError {
        failed(&self.store.name, error)
    }

    /// Does something within a time limit.
    async fn within<T>(
        &self,
        limit: Duration,
        work: impl Future<Output = Result<T, NatsError>>,
    ) -> Result<T, NatsError> {
        let why = match tokio::time::timeout(limit, work).await {
            Ok(Err(NatsError::Away(why))) => why,
            Ok(done) => return done,
            Err(_) => format!("nothing within {} s", limit.as_secs()),
        };
        Err(unanswered(&self.store.name, why, &self.refusals))
    }

    /// Makes a change within a time limit. One without an answer may have been made.
    async fn change<T>(
        &self,
        change: impl Future<Output = Result<T, NatsError>>,
    ) -> Result<T, NatsError> {
        self.within(ANSWER_TIMEOUT, change).await.map_err(|error| match error {
            NatsError::Away(why) => NatsError::Unknown(why),
            error => error,
        })
    }

    fn seal(&self, key: &str, value: Bytes) -> Result<Bytes, NatsError> {
        self.seal_at(&self.place(key), value)
    }

    pub(super) fn open(&self, key: &str, value: Bytes) -> Result<Bytes, NatsError> {
        if self.is_raw {
            return Ok(value);
        }
        self.open_at(&self.place(key), value)
    }

    /// A value as it is stored at `place`.
    pub(super) fn seal_at(&self, place: &str, value: Bytes) -> Result<Bytes, NatsError> {
        cipher::seal(self.cipher.as_ref(), place, value)
            .map_err(|source| NatsError::Sealed { place: place.to_owned(), source })
    }

    /// A value that was stored at `place`.
    pub(super) fn open_at(&self, place: &str, value: Bytes) -> Result<Bytes, NatsError> {
        cipher::open(self.cipher.as_ref(), place, value)
            .map_err(|source| NatsError::Sealed { place: place.to_owned(), source })
    }
}

/// An entry of a bucket.
pub(crate) struct BucketEntry {
    pub(crate) key: String,
    pub(crate) revision: u64,
    pub(crate) value: Bytes,
    /// When it was changed by the clock of the NATS servers, in milliseconds since 1970.
    pub(crate) time: u64,
}

/// Whether a name can be part of a subject.
fn is_word(name: &str) -> bool {
    let sane = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=64).contains(&name.len()) && name.bytes().all(sane)
}

impl NatsConnection {
    /// Connects as `name`, and makes missing buckets if the role does so.
    pub(crate) async fn open(
        config: &FleetConfig,
        name: &str,
        role: Role,
    ) -> Result<Self, afresh::Cause> {
        if !is_word(&config.fleet) {
            let fleet = &config.fleet;
            return Err(format!("`{fleet}` is no name of a fleet: letters, digits, - and _").into());
        }
        let refusals = Arc::new(RecentRefusals::default());
        let noted = refusals.clone();
        let options = credentials::options(config, role, ANSWER_TIMEOUT)?
            .name(name)
            .event_callback(move |event| {
                let noted = noted.clone();
                async move {
                    if let Event::ServerError(error) = event {
                        tracing::warn!(%error, "NATS refused something");
                        noted.add(error.to_string());
                    }
                }
            })
            // A dead server is noticed within a lease.
            .ping_interval((config.lease / 4).max(Duration::from_millis(250)))
            .reconnect_delay_callback(|attempts| {
                Duration::from_millis(25 << attempts.min(5)).min(Duration::from_millis(500))
            });
        if config.require_sealed && config.entry_key.is_none() {
            return Err(
                "`require-sealed` needs `entry-key`, the key that entries are sealed by".into()
            );
        }
        let key = |file| FleetKey::read(file, config.require_sealed);
        let cipher = config.entry_key.as_deref().map(key).transpose()?;
        let servers: Vec<String> =
            config.nats.split(',').map(|url| url.trim().to_owned()).collect();
        let client =
            options.connect(servers).await.map_err(|error| not_connected(config, &error))?;
        let most = client.max_payload();
        if most < MIN_MESSAGE {
            return Err(format!(
                "the NATS server takes messages of {most} bytes, and {MIN_MESSAGE} are needed: raise its max_payload"
            )
            .into());
        }
        let context = async_nats::jetstream::context::ContextBuilder::new()
            .timeout(ANSWER_TIMEOUT)
            .build(client.clone());
        let bucket = |what: &str| Config {
            bucket: format!("afresh-{}-{what}", config.fleet),
            history: 1,
            max_value_size: i32::try_from(MAX_ENTRY).unwrap_or(i32::MAX),
            num_replicas: config.replicas.max(1),
            limit_markers: Some(MARKER_LIFETIME),
            ..Config::default()
        };
        let until = Instant::now() + JOIN_TIMEOUT;
        let made = async |what: &str| {
            let bucket = bucket(what);
            let name = bucket.bucket.clone();
            let found = loop {
                match context.get_key_value(&name).await {
                Ok(store) => break store,
                Err(error) if !role.makes_buckets() => {
                    let fleet = &config.fleet;
                    // Without the permission to receive answers, the request has none.
                    return Err(afresh::Cause::from(match refusals.last() {
                        Some(why) => {
                            format!("NATS refuses this to the given credentials: {why}")
                        }
                        None => format!(
                            "no fleet `{fleet}` is known at {}: {error}; its first host makes it",
                            config.servers()
                        ),
                    }));
                }
                Err(_) => match context.create_key_value(bucket.clone()).await {
                    Ok(store) => break store,
                    Err(error) if lacks_leader(&error) && Instant::now() < until => {
                        tracing::info!(bucket = name, %error, "NATS has no leader yet");
                        tokio::time::sleep(JOIN_RETRY_INTERVAL).await;
                    }
                    // Another host may have been faster.
                    Err(error) => break context.get_key_value(&name).await.map_err(|_| {
                        afresh::Cause::from(format!(
                            "cannot make the bucket {name}: {error}; NATS 2.11 or later with JetStream (`nats-server -js`) is needed"
                        ))
                    })?,
                },
            }
            };
            if role.makes_buckets() {
                check_bucket(&name, &found.stream.cached_info().config)?;
            }
            let kept = found.stream.cached_info().config.num_replicas;
            if role.makes_buckets() && kept < config.replicas {
                let wanted = config.replicas;
                return Err(afresh::Cause::from(format!(
                    "the bucket {name} has {kept} replicas, and {wanted} are configured; run `nats stream update KV_{name} --replicas {wanted}`, or configure {kept}"
                )));
            }
            Ok(found)
        };
        let fingerprint = cipher.as_ref().map_or_else(String::new, |key| key.fingerprint());
        let with = |store: Store, cipher: Option<Arc<FleetKey>>| Bucket {
            store,
            cipher,
            context: context.clone(),
            is_raw: false,
            refusals: refusals.clone(),
        };
        Ok(Self {
            // Names of hosts and numbers.
            hosts: with(made("hosts").await?, None),
            sandboxes: with(made("sandboxes").await?, cipher.clone()),
            kept: with(made("kept").await?, cipher),
            fingerprint,
            refusals,
            prefix: format!("afresh.{}", config.fleet),
            client,
        })
    }

    /// A subject of this fleet.
    pub(crate) fn subject(&self, rest: &str) -> String {
        format!("{}.{rest}", self.prefix)
    }
}

/// The entry of a key, from the leader of the bucket. The store's own `entry` is a direct get,
/// which any replica answers, however far it lags behind.
pub(crate) async fn find(bucket: &Bucket, key: &str) -> Result<Option<BucketEntry>, NatsError> {
    Ok(find_slot(bucket, key).await?.1)
}

/// As [`find`], with the revision that the next change names, which may be that of a marker.
pub(super) async fn find_slot(
    bucket: &Bucket,
    key: &str,
) -> Result<(u64, Option<BucketEntry>), NatsError> {
    let store = &bucket.store;
    let subject = format!("{}{key}", store.prefix);
    let read = async {
        match store.stream.get_last_raw_message_by_subject(&subject).await {
            Ok(message) => Ok(Some(message)),
            Err(error) => match error.kind() {
                LastRawMessageErrorKind::NoMessageFound => Ok(None),
                _ => Err(bucket.failed(&error)),
            },
        }
    };
    let found = bucket.within(ANSWER_TIMEOUT, read).await?;
    let Some(message) = found else { return Ok((0, None)) };
    let revision = message.sequence;
    // Removed entries have a marker, and so have expired ones.
    if ["KV-Operation", "Nats-Marker-Reason"].iter().any(|of| message.headers.get(*of).is_some()) {
        return Ok((revision, None));
    }
    let time = milliseconds(message.time.unix_timestamp_nanos());
    let value = bucket.open(key, message.payload)?;
    Ok((revision, Some(BucketEntry { key: key.to_owned(), revision, value, time })))
}

fn milliseconds(nanoseconds: i128) -> u64 {
    u64::try_from(nanoseconds / 1_000_000).unwrap_or_default()
}

fn not_made(bucket: &Bucket, error: &CreateError) -> NatsError {
    match error.kind() {
        CreateErrorKind::AlreadyExists => NatsError::Changed,
        _ => bucket.failed(error),
    }
}

/// Repeats an operation of a host that joins, while it has no answer or servers read their buckets.
pub(crate) async fn patiently<T>(
    mut attempt: impl AsyncFnMut() -> Result<T, NatsError>,
) -> Result<T, NatsError> {
    let until = Instant::now() + JOIN_TIMEOUT;
    loop {
        match attempt().await {
            Err(error) if error.is_transient() && Instant::now() < until => {
                tracing::info!(%error, "NATS is asked again");
                tokio::time::sleep(JOIN_RETRY_INTERVAL).await;
            }
            done => return done,
        }
    }
}

/// Makes a new entry.
pub(crate) async fn create(bucket: &Bucket, key: &str, value: Bytes) -> Result<u64, NatsError> {
    let value = bucket.seal(key, value)?;
    let made =
        async { bucket.store.create(key, value).await.map_err(|error| not_made(bucket, &error)) };
    bucket.change(made).await
}

/// Makes a new entry, with the lifetime of a removal marker.
pub(crate) async fn mark(bucket: &Bucket, key: &str, value: Bytes) -> Result<u64, NatsError> {
    let value = bucket.seal(key, value)?;
    let made = bucket.store.create_with_ttl(key, value, MARKER_LIFETIME);
    let made = async { made.await.map_err(|error| not_made(bucket, &error)) };
    bucket.change(made).await
}

/// Changes an entry that is still at `revision`.
pub(crate) async fn update(
    bucket: &Bucket,
    key: &str,
    value: Bytes,
    revision: u64,
) -> Result<u64, NatsError> {
    let value = bucket.seal(key, value)?;
    let updated = async {
        bucket.store.update(key, value, revision).await.map_err(|error| match error.kind() {
            UpdateErrorKind::WrongLastRevision => NatsError::Changed,
            _ => bucket.failed(&error),
        })
    };
    bucket.change(updated).await
}

/// Changes an entry that is still at `revision`. The servers remove it after `lifetime`
/// milliseconds, if that is given: whole seconds, and at least one.
pub(crate) async fn update_for(
    bucket: &Bucket,
    key: &str,
    value: Bytes,
    revision: u64,
    lifetime: Option<u64>,
) -> Result<u64, NatsError> {
    let Some(lifetime) = lifetime else { return update(bucket, key, value, revision).await };
    let value = bucket.seal(key, value)?;
    let mut headers = HeaderMap::new();
    headers.insert(NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, HeaderValue::from(revision));
    headers.insert(NATS_MESSAGE_TTL, HeaderValue::from(lifetime.div_ceil(1000).max(1)));
    let subject = format!("{}{key}", bucket.store.prefix);
    let failed = |error: PublishError| match error.kind() {
        PublishErrorKind::WrongLastSequence => NatsError::Changed,
        _ => bucket.failed(&error),
    };
    let updated = async {
        let sent = bucket.context.publish_with_headers(subject, headers, value).await;
        Ok(sent.map_err(failed)?.await.map_err(failed)?.sequence)
    };
    bucket.change(updated).await
}

/// Sets an entry, in place of any other.
pub(crate) async fn put(bucket: &Bucket, key: &str, value: Bytes) -> Result<u64, NatsError> {
    let value = bucket.seal(key, value)?;
    let put = async { bucket.store.put(key, value).await.map_err(|error| bucket.failed(&error)) };
    bucket.change(put).await
}

/// Removes an entry that is still at `revision`.
pub(crate) async fn remove(bucket: &Bucket, key: &str, revision: u64) -> Result<(), NatsError> {
    let removed = async {
        let purge = bucket.store.purge_expect_revision_with_ttl(key, revision, MARKER_LIFETIME);
        purge.await.map_err(|error| match error.kind() {
            UpdateErrorKind::WrongLastRevision => NatsError::Changed,
            _ => bucket.failed(&error),
        })
    };
    bucket.change(removed).await
}

/// Longest wait for all entries of a bucket.
const LISTING_TIMEOUT: Duration = Duration::from_secs(600);

/// Every entry of a bucket, however many.
pub(crate) async fn every(client: &Client, bucket: &Bucket) -> Result<Vec<BucketEntry>, NatsError> {
    bucket.within(LISTING_TIMEOUT, read(client, bucket, ">", usize::MAX)).await
}

/// As [`every`], with the values as they are stored: sealed, if they are.
pub(super) async fn every_stored(
    client: &Client,
    bucket: &Bucket,
) -> Result<Vec<BucketEntry>, NatsError> {
    every(client, &Bucket { is_raw: true, ..bucket.clone() }).await
}

/// Lists that are read at the same time. Each takes a consumer, and NATS bounds their number.
static LISTS: Semaphore = Semaphore::const_new(16);

/// Every entry whose key matches, at most `most`.
pub(crate) async fn all(
    client: &Client,
    bucket: &Bucket,
    filter: &str,
    most: usize,
) -> Result<Vec<BucketEntry>, NatsError> {
    let reading = async {
        let _turn = LISTS.acquire().await.map_err(away)?;
        read(client, bucket, filter, most).await
    };
    bucket.within(ANSWER_TIMEOUT, reading).await
}

/// Passes every entry whose key matches to `each`, with the value as it is stored: sealed, if it
/// is. Ends after `most` entries for which `each` returns `true`, and returns the number of those
/// that are left then.
pub(super) async fn each_stored(
    client: &Client,
    bucket: &Bucket,
    filter: &str,
    most: usize,
    each: impl FnMut(BucketEntry) -> bool + Send,
) -> Result<u64, NatsError> {
    let bucket = Bucket { is_raw: true, ..bucket.clone() };
    let reading = async {
        let _turn = LISTS.acquire().await.map_err(away)?;
        read_each(client, &bucket, filter, most, each).await
    };
    bucket.within(ANSWER_TIMEOUT, reading).await
}

async fn read(
    client: &Client,
    bucket: &Bucket,
    filter: &str,
    most: usize,
) -> Result<Vec<BucketEntry>, NatsError> {
    let mut found = Vec::new();
    let each = |entry| {
        found.push(entry);
        true
    };
    read_each(client, bucket, filter, most, each).await?;
    Ok(found)
}

async fn read_each(
    client: &Client,
    bucket: &Bucket,
    filter: &str,
    most: usize,
    each: impl FnMut(BucketEntry) -> bool + Send,
) -> Result<u64, NatsError> {
    let store = &bucket.store;
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
        .map_err(|error| bucket.failed(&error))?;
    // NATS keeps a consumer for a while after its last message, and limits their number.
    let name = consumer.cached_info().name.clone();
    let ended = read_from(bucket, consumer, most, each).await;
    if let Err(error) = store.stream.delete_consumer(&name).await {
        tracing::debug!(%error, "a consumer is left to expire");
    }
    ended
}

async fn read_from(
    bucket: &Bucket,
    consumer: Consumer<OrderedConfig>,
    most: usize,
    mut each: impl FnMut(BucketEntry) -> bool + Send,
) -> Result<u64, NatsError> {
    if consumer.cached_info().num_pending == 0 {
        return Ok(0);
    }
    let mut count = 0;
    let mut messages = consumer.messages().await.map_err(away)?;
    loop {
        // A list that breaks off is not valid.
        let message = messages.next().await.ok_or_else(|| away("the list broke off"))?;
        let message = message.map_err(away)?;
        let info = message.info().map_err(away)?;
        let (revision, left) = (info.stream_sequence, info.pending);
        let time = milliseconds(info.published.unix_timestamp_nanos());
        let removed = message.headers.as_ref().is_some_and(|all| all.get("KV-Operation").is_some());
        if !removed && !message.payload.is_empty() {
            let key = message.subject.strip_prefix(&bucket.store.prefix).unwrap_or_default();
            let value = bucket.open(key, message.payload.clone())?;
            count += usize::from(each(BucketEntry { key: key.to_owned(), revision, value, time }));
        }
        if left == 0 || count >= most {
            return Ok(left);
        }
    }
}

/// A change of an entry.
pub(crate) struct EntryChange {
    pub(crate) key: String,
    pub(crate) removed: bool,
    /// Changes that follow at once.
    pub(crate) left: u64,
}

/// Has `each` see every entry of a bucket, and from then on each change, without values, until it
/// returns `false`. It sees `None` if the bucket is empty at first.
pub(crate) async fn watch(
    client: &Client,
    bucket: &Bucket,
    mut each: impl FnMut(Option<EntryChange>) -> bool,
) -> Result<(), NatsError> {
    let store = &bucket.store;
    let making = store.stream.create_consumer(OrderedConfig {
        deliver_subject: client.new_inbox(),
        filter_subject: format!("{}>", store.prefix),
        replay_policy: ReplayPolicy::Instant,
        deliver_policy: DeliverPolicy::LastPerSubject,
        headers_only: true,
        ..OrderedConfig::default()
    });
    let making = async { making.await.map_err(|error| bucket.failed(&error)) };
    let consumer = bucket.within(ANSWER_TIMEOUT, making).await?;
    let empty = consumer.cached_info().num_pending == 0;
    let mut messages = consumer.messages().await.map_err(away)?;
    if empty && !each(None) {
        return Ok(());
    }
    while let Some(message) = messages.next().await {
        let message = message.map_err(away)?;
        let left = message.info().map_err(away)?.pending;
        let has = |name: &str| message.headers.as_ref().is_some_and(|all| all.get(name).is_some());
        let removed = has("KV-Operation") || has("Nats-Marker-Reason");
        let key = message.subject.strip_prefix(&store.prefix).unwrap_or_default().to_owned();
        if !each(Some(EntryChange { key, removed, left })) {
            return Ok(());
        }
    }
    Err(away("the watch broke off"))
}
