//! The client of the sandboxes of `afresh serve`.
//!
//! Promises: each request has a time limit, and an answer has a limit of bytes. The key is read
//! from its file for each request, so a renewed Secret needs no restart. A sandbox counts as
//! missing only if afresh says so of exactly that sandbox; a 404 of a proxy does not. A list
//! reports whether it is whole. Errors name no URL, since users read them in statuses.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;
use reqwest::{Method, RequestBuilder, Url};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Time for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum bytes of an answer: a page of 100 sandboxes with 16 KiB of labels each, escaped.
const MAX_ANSWER_BYTES: usize = 8 << 20;
/// Maximum bytes of the file with the key.
const MAX_KEY_BYTES: u64 = 4096;
/// Maximum pages of one list.
const MAX_PAGES: usize = 1000;

/// The label with the identifier of the cluster.
pub const CLUSTER_LABEL: &str = "kubernetes-cluster";
/// The label with the identifier of the `Sandbox`.
pub const UID_LABEL: &str = "kubernetes-uid";
/// The label with its namespace.
pub const NAMESPACE_LABEL: &str = "kubernetes-namespace";
/// The label with the fingerprint of its pod template.
pub const PLAN_LABEL: &str = "kubernetes-plan";
/// The label with its name.
pub const NAME_LABEL: &str = "kubernetes-name";
/// The label with the identifier of the controller that made it.
pub const CONTROLLER_LABEL: &str = "kubernetes-controller";
/// The header with the key of a creation. The server makes one sandbox of a key.
const KEY_HEADER: &str = "Idempotency-Key";
/// The header with the number of sandboxes that a list lacks.
const UNREADABLE_HEADER: &str = "x-afresh-unreadable";

/// Why a request has no useful answer.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// No answer.
    #[error("the afresh server does not answer: {why}; check that it runs")]
    Unreachable {
        /// The cause.
        why: String,
    },
    /// An answer with an error.
    #[error("the afresh server answered {status}: {message}")]
    Refused {
        /// The status.
        status: u16,
        /// Its message.
        message: String,
        /// Whether it has the form of errors of afresh. One of a proxy has another form.
        is_own: bool,
    },
    /// The key cannot be read.
    #[error("cannot read the API key from {path}: {why}; mount the Secret with the key there")]
    Key {
        /// The file.
        path: String,
        /// The cause.
        why: String,
    },
    /// A list that lacks sandboxes, which could be those that are looked for.
    #[error("the afresh server does not list all sandboxes: {why}")]
    Incomplete {
        /// The cause.
        why: String,
    },
    /// An answer that is no answer of afresh.
    #[error("the server is no afresh server with sandboxes: {why}")]
    Answer {
        /// The cause.
        why: String,
    },
}

impl ServerError {
    /// The reason in a condition.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Refused { status: 401 | 403, .. } | Self::Key { .. } => "KeyRefused",
            Self::Refused { is_own: false, .. } => "ServerUnavailable",
            Self::Refused { status: 404, .. } => "SandboxNotFound",
            Self::Refused { status: 429, .. } => "BudgetExceeded",
            Self::Refused { status: 400..=499, .. } => "SandboxRejected",
            Self::Refused { .. }
            | Self::Unreachable { .. }
            | Self::Incomplete { .. }
            | Self::Answer { .. } => "ServerUnavailable",
        }
    }

    /// Whether afresh itself says that it does not have what the request names.
    pub(crate) fn is_missing(&self, name: &str) -> bool {
        let Self::Refused { status: 404, message, is_own: true } = self else { return false };
        message.contains(name)
    }

    fn is_conflict(&self) -> bool {
        matches!(self, Self::Refused { status: 409, is_own: true, .. })
    }
}

/// An error of afresh.
#[derive(Deserialize)]
struct ErrorBody {
    code: u16,
    message: String,
}

/// A sandbox, as the server describes it.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemoteSandbox {
    /// Its identifier.
    #[serde(rename = "sandboxID")]
    pub id: String,
    /// The token of requests into it; a list need not have it.
    #[serde(rename = "envdAccessToken")]
    pub token: Option<String>,
    /// `running` or `paused`; none right after creation.
    pub state: Option<String>,
    /// When it began.
    pub started_at: Option<Timestamp>,
    /// When the server pauses it.
    pub end_at: Option<Timestamp>,
    /// Its labels.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
}

impl RemoteSandbox {
    /// Whether it is paused.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.state.as_deref() == Some("paused")
    }
}

/// A sandbox to be made.
#[derive(Clone, Debug)]
pub struct NewSandbox<'a> {
    /// The key of its creation: the same for each attempt.
    pub key: &'a str,
    /// The template.
    pub template: &'a str,
    /// The server refuses a snapshot of that name.
    pub template_only: bool,
    /// Variables.
    pub envs: &'a BTreeMap<String, String>,
    /// Labels.
    pub metadata: &'a BTreeMap<String, String>,
    /// Time until the server pauses it, unless it is prolonged.
    pub time: Duration,
}

/// Sandboxes with a label.
#[derive(Clone, Debug, Default)]
pub struct RemoteList {
    /// Those that the server can name.
    pub sandboxes: Vec<RemoteSandbox>,
    /// Why there may be others.
    pub missing: Option<&'static str>,
}

impl RemoteList {
    /// All sandboxes with the label.
    ///
    /// # Errors
    /// If there may be others.
    pub fn into_whole(self) -> Result<Vec<RemoteSandbox>, ServerError> {
        match self.missing {
            None => Ok(self.sandboxes),
            Some(why) => Err(ServerError::Incomplete { why: why.to_owned() }),
        }
    }
}

/// A successful answer.
struct Answer {
    bytes: Vec<u8>,
    /// The start of the next page.
    next: Option<String>,
    /// Whether a list has every sandbox.
    is_complete: bool,
}

/// The server, and the key.
#[derive(Clone, Debug)]
pub struct Server {
    url: Url,
    key: PathBuf,
    http: reqwest::Client,
}

impl Server {
    /// A client of the server at `url`, with the key in a file.
    ///
    /// # Errors
    /// If no TLS client can be made on this host.
    pub fn new(url: Url, key: PathBuf) -> anyhow::Result<Self> {
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(REQUEST_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .build()?;
        Ok(Self { url, key, http })
    }

    fn key(&self) -> Result<String, ServerError> {
        let wrong = |why: String| ServerError::Key { path: self.key.display().to_string(), why };
        let metadata = std::fs::metadata(&self.key).map_err(|error| wrong(error.to_string()))?;
        if metadata.len() > MAX_KEY_BYTES {
            return Err(wrong(format!("it has more than {MAX_KEY_BYTES} bytes")));
        }
        let text = std::fs::read_to_string(&self.key).map_err(|error| wrong(error.to_string()))?;
        match text.trim() {
            "" => Err(wrong("it is empty".to_owned())),
            key => Ok(key.to_owned()),
        }
    }

    /// Sends a request: the body of the answer, and the start of the next page.
    async fn send(
        &self,
        method: Method,
        path: &[&str],
        query: &[(&str, &str)],
        body: Option<&Value>,
    ) -> Result<Answer, ServerError> {
        self.receive(self.request(method, path, query, body)?).await
    }

    fn request(
        &self,
        method: Method,
        path: &[&str],
        query: &[(&str, &str)],
        body: Option<&Value>,
    ) -> Result<RequestBuilder, ServerError> {
        let mut url = self.url.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let mut request = self.http.request(method, url).header("X-API-Key", self.key()?);
        if let Some(body) = body {
            request = request.header("Content-Type", "application/json").body(body.to_string());
        }
        Ok(request)
    }

    async fn receive(&self, request: RequestBuilder) -> Result<Answer, ServerError> {
        let unreachable = |error: reqwest::Error| {
            let error = error.without_url();
            let mut why = error.to_string();
            let mut cause = std::error::Error::source(&error);
            while let Some(error) = cause {
                why = format!("{why}: {error}");
                cause = error.source();
            }
            ServerError::Unreachable { why }
        };
        let mut answer = request.send().await.map_err(unreachable)?;
        let status = answer.status();
        let header = |name| Some(answer.headers().get(name)?.to_str().ok()?.to_owned());
        let next = header("x-next-token");
        let is_complete = header(UNREADABLE_HEADER).is_none_or(|count| count == "0");
        let mut bytes = Vec::new();
        while let Some(part) = answer.chunk().await.map_err(unreachable)? {
            if bytes.len() + part.len() > MAX_ANSWER_BYTES {
                let why = format!("an answer has more than {MAX_ANSWER_BYTES} bytes");
                return Err(ServerError::Answer { why });
            }
            bytes.extend_from_slice(&part);
        }
        if status.is_success() {
            return Ok(Answer { bytes, next, is_complete });
        }
        let said: Option<ErrorBody> = serde_json::from_slice(&bytes).ok();
        let said = said.filter(|said| said.code == status.as_u16());
        let is_own = said.is_some();
        let message = said.map_or_else(
            || {
                "without a message of afresh; check what is between it and the controller"
                    .to_owned()
            },
            |said| said.message,
        );
        Err(ServerError::Refused { status: status.as_u16(), message, is_own })
    }

    fn decode<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, ServerError> {
        let wrong = |error: serde_json::Error| ServerError::Answer { why: error.to_string() };
        serde_json::from_slice(bytes).map_err(wrong)
    }

    /// Makes a sandbox, or gets the one that an earlier attempt has made.
    ///
    /// # Errors
    /// If the server refuses it or does not answer.
    pub async fn create(&self, new: &NewSandbox<'_>) -> Result<RemoteSandbox, ServerError> {
        let mut body = json!({
            "templateID": new.template, "envVars": new.envs, "metadata": new.metadata,
            "timeout": new.time.as_secs(), "autoPause": true,
        });
        // A server that does not know the field refuses the request.
        if new.template_only {
            body["templateOnly"] = true.into();
        }
        let request = self.request(Method::POST, &["sandboxes"], &[], Some(&body))?;
        let answer = self.receive(request.header(KEY_HEADER, new.key)).await?;
        self.decode(&answer.bytes)
    }

    /// The sandboxes with this value of a label.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn list(&self, label: &str, value: &str) -> Result<RemoteList, ServerError> {
        let labels = format!("{label}={value}");
        let (mut all, mut token) = (RemoteList::default(), None::<String>);
        for _ in 0..MAX_PAGES {
            let mut query = vec![("metadata", labels.as_str()), ("order", "asc")];
            query.extend(token.as_deref().map(|token| ("nextToken", token)));
            let answer = self.send(Method::GET, &["v2", "sandboxes"], &query, None).await?;
            if !answer.is_complete {
                all.missing = Some("it cannot read some of their entries");
            }
            all.sandboxes.extend(self.decode::<Vec<RemoteSandbox>>(&answer.bytes)?);
            match answer.next {
                Some(next) => token = Some(next),
                None => return Ok(all),
            }
        }
        all.missing = Some("there are too many");
        Ok(all)
    }

    /// A sandbox, if it exists.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn get(&self, id: &str) -> Result<Option<RemoteSandbox>, ServerError> {
        match self.send(Method::GET, &["sandboxes", id], &[], None).await {
            Ok(answer) => self.decode(&answer.bytes).map(Some),
            Err(error) if error.is_missing(id) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Ends a sandbox, if it exists.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn kill(&self, id: &str) -> Result<(), ServerError> {
        match self.send(Method::DELETE, &["sandboxes", id], &[], None).await {
            Err(error) if !error.is_missing(id) => Err(error),
            _ => Ok(()),
        }
    }

    /// Pauses a sandbox, if it runs.
    ///
    /// # Errors
    /// If the server refuses it or does not answer.
    pub async fn pause(&self, id: &str) -> Result<(), ServerError> {
        match self.send(Method::POST, &["sandboxes", id, "pause"], &[], Some(&json!({}))).await {
            Ok(_) => Ok(()),
            // Either it is paused already, or it cannot be.
            Err(error) if error.is_conflict() => match self.get(id).await? {
                Some(remote) if remote.is_paused() => Ok(()),
                _ => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    /// Resumes a sandbox if it is paused, for this time.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn connect(&self, id: &str, time: Duration) -> Result<(), ServerError> {
        let body = json!({"timeout": time.as_secs()});
        self.send(Method::POST, &["sandboxes", id, "connect"], &[], Some(&body)).await.map(drop)
    }

    /// Sets the time until the server pauses a sandbox.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn set_timeout(&self, id: &str, time: Duration) -> Result<(), ServerError> {
        let body = json!({"timeout": time.as_secs()});
        self.send(Method::POST, &["sandboxes", id, "timeout"], &[], Some(&body)).await.map(drop)
    }

    /// The tenant of the key. None for a key of administrators, which the server answers with all
    /// tenants.
    ///
    /// # Errors
    /// If the server refuses the key or does not answer.
    pub async fn tenant(&self) -> Result<Option<String>, ServerError> {
        #[derive(Deserialize)]
        struct Usage {
            tenant: Option<String>,
        }
        match self.send(Method::GET, &["usage"], &[], None).await {
            Ok(answer) => Ok(self.decode::<Usage>(&answer.bytes)?.tenant),
            // A key without the right to see its use.
            Err(ServerError::Refused { status: 403 | 404, is_own: true, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the server has a template or a build of this name. Snapshots of sandboxes are no
    /// templates.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn has_template(&self, image: &str) -> Result<bool, ServerError> {
        // They are no parts of a path, and would reach another endpoint.
        if matches!(image, "" | "." | "..") {
            return Ok(false);
        }
        match self.send(Method::GET, &["templates", "aliases", image], &[], None).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_missing(image) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
