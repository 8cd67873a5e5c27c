//! Addresses of remotes, and the clients that serve them.

use std::sync::Arc;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::local::LocalFileSystem;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, ObjectStoreScheme, RetryConfig};

use super::backend::Backend;
use super::listen::ListeningConnector;
use super::objects::{Objects, PART};
use super::registry::{self, Registry};
use super::retry::Retrier;
use super::retry_ledger::{MAX_PAUSE, RetryLedger};
use super::{Remote, RemoteError, RetryPolicy};
use crate::RedactedUrl;

/// The forms of an address; the end of an error message.
const FORMS: &str = "use s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, \
                     oci://registry/repository[:tag] or file:///directory";

impl Remote {
    /// Opens a remote by its address:
    ///
    /// * `s3://bucket/prefix`: credentials, region and endpoint from the `AWS_…` environment
    ///   variables;
    /// * `gs://bucket/prefix`: from the `GOOGLE_…` variables;
    /// * `az://container/prefix`: from the `AZURE_…` variables;
    /// * `oci://registry/repository[:tag]` or `…@sha256:digest`: an OCI registry. Credentials from
    ///   `AFRESH_REGISTRY_USER` and `AFRESH_REGISTRY_PASSWORD`, for the one registry (`host` or
    ///   `host:port`) that `AFRESH_REGISTRY` names, or from `config.json` in `$DOCKER_CONFIG` or
    ///   `~/.docker`, inline or by a credential helper. `localhost` and loopback addresses are
    ///   spoken to by http, others by https; `oci+http://` and `oci+https://` say which;
    /// * `file:///directory`.
    ///
    /// # Errors
    /// [`RemoteError::Url`] for another scheme or a password, [`RemoteError::Object`] when the
    /// configuration is incomplete. No request is made.
    pub fn open(url: &str, retry: RetryPolicy) -> Result<Self, RemoteError> {
        Self::open_with(url, retry, &[])
    }

    /// As [`Remote::open`], with options that come before the environment: named as the variables
    /// are, in lower case (`aws_endpoint`, `aws_access_key_id`, …), and `user` and `password` for
    /// registries.
    ///
    /// # Errors
    /// As [`Remote::open`]; [`RemoteError::Url`] for an option that the scheme does not know.
    pub fn open_with(
        url: &str,
        retry: RetryPolicy,
        options: &[(&str, &str)],
    ) -> Result<Self, RemoteError> {
        let retrier = Retrier::from(retry);
        let budget = retrier.budget.clone();
        let bad = |why: String| RemoteError::Url { url: RedactedUrl(url).to_string(), why };
        if let Some(address) = registry::Address::parse(url)? {
            let name = address.name.clone();
            let registry = Registry::new(address, retrier, options)?;
            return Self::with_backend(Arc::new(registry), name, budget);
        }
        let parsed = url::Url::parse(url).map_err(|e| bad(format!("{e}; {FORMS}")))?;
        if parsed.password().is_some() {
            return Err(bad("credentials do not belong in an address; set the variables of the \
                            store, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                .to_owned()));
        }
        let (scheme, prefix) =
            ObjectStoreScheme::parse(&parsed).map_err(|e| bad(format!("{e}; {FORMS}")))?;
        let object = |source| RemoteError::Object { what: url.to_owned(), source };
        // One kind of client: a key for every option, and a build for each way to retry.
        macro_rules! cloud {
            ($builder:expr, $key:ty) => {{
                let mut builder = $builder.with_url(url);
                for (key, value) in options {
                    let key: $key = key.parse().map_err(object)?;
                    builder = builder.with_config(key, *value);
                }
                let client = client(retry, options);
                let build = |retries, client, ledger| {
                    let builder = builder.clone().with_retry(retry_config(retry, retries));
                    let builder = builder.with_http_connector(ListeningConnector { ledger });
                    builder.with_client_options(client).build().map_err(object)
                };
                // The code that repeats a request also limits its time.
                let objects: Arc<dyn ObjectStore> =
                    Arc::new(build(0, client.clone().with_timeout_disabled(), None)?);
                let retries = retry.attempts.saturating_sub(1);
                let client = client.with_timeout(retry.sending(PART));
                let ledger = RetryLedger::new(budget.clone(), retry.attempts);
                let uploads = build(retries, client, Some(Arc::new(ledger)))?;
                (objects, Arc::new(uploads) as Arc<dyn ObjectStore>)
            }};
        }
        let (objects, uploads) = match scheme {
            ObjectStoreScheme::Local => {
                let root = LocalFileSystem::new().path_to_filesystem(&prefix).map_err(object)?;
                let backend = Arc::new(Objects::in_directory(root, prefix, retrier));
                return Self::with_backend(backend, None, budget);
            }
            ObjectStoreScheme::AmazonS3 => cloud!(AmazonS3Builder::from_env(), AmazonS3ConfigKey),
            ObjectStoreScheme::GoogleCloudStorage => {
                cloud!(GoogleCloudStorageBuilder::from_env(), GoogleConfigKey)
            }
            ObjectStoreScheme::MicrosoftAzure => {
                cloud!(MicrosoftAzureBuilder::from_env(), AzureConfigKey)
            }
            _ => return Err(bad(FORMS.to_owned())),
        };
        let backend: Arc<dyn Backend> = Arc::new(Objects::new(objects, uploads, prefix, retrier));
        Self::with_backend(backend, None, budget)
    }
}

fn retry_config(retry: RetryPolicy, max_retries: u32) -> RetryConfig {
    let (init_backoff, max_backoff) = (retry.pause, MAX_PAUSE);
    let backoff = BackoffConfig { init_backoff, max_backoff, ..BackoffConfig::default() };
    RetryConfig { backoff, max_retries: max_retries as usize, retry_timeout: retry.sending(PART) }
}

/// Plain http only to an endpoint that was configured so.
fn client(retry: RetryPolicy, options: &[(&str, &str)]) -> ClientOptions {
    const ENDPOINTS: [&str; 6] = [
        "aws_endpoint",
        "aws_endpoint_url",
        "aws_endpoint_url_s3",
        "azure_endpoint",
        "azure_storage_endpoint",
        "google_base_url",
    ];
    let plain = |endpoint: &str| endpoint.starts_with("http://");
    let allow_http = options.iter().any(|(key, value)| ENDPOINTS.contains(key) && plain(value))
        || ENDPOINTS
            .iter()
            .any(|key| std::env::var(key.to_uppercase()).is_ok_and(|value| plain(&value)));
    ClientOptions::new().with_allow_http(allow_http).with_connect_timeout(retry.connect())
}
