//! How a server joins a fleet.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::policy::HeartbeatInterval;

/// More machines that share the work.
#[derive(Clone)]
#[non_exhaustive]
pub struct FleetConfig {
    /// NATS servers: one URL, or several with commas between.
    pub nats: String,
    /// A file with a token for NATS, a user and a password, the seed of an nkey, or a JWT and its
    /// seed (`.creds`). It is read again for each connection.
    pub credentials: Option<PathBuf>,
    /// A file with the certificates that NATS servers are checked by, instead of those of the
    /// system.
    pub ca: Option<PathBuf>,
    /// A file with this host's certificate for NATS.
    pub certificate: Option<PathBuf>,
    /// A file with the key of `certificate`.
    pub certificate_key: Option<PathBuf>,
    /// A file with the key that ledger entries are sealed by. It must match on all hosts.
    pub entry_key: Option<PathBuf>,
    /// Refuse entries that are not sealed. Without it, entries from before the fleet had a key are
    /// read.
    pub require_sealed: bool,
    /// The place of saved states for all hosts: the URL of a remote, or a directory that all of
    /// them see. Needed for sandboxes.
    pub store: Option<String>,
    /// The fleet's name; hosts of different fleets have nothing to do with each other.
    pub fleet: String,
    /// Name of this host for people; its host name if not set.
    pub name: Option<String>,
    /// Host lease: after this long without a renewal, other hosts may take its sandboxes. It must
    /// match on all hosts.
    pub lease: Duration,
    /// Replicas of each bucket in NATS.
    pub replicas: usize,
    /// Interval of heartbeats.
    pub pace: HeartbeatInterval,
    /// Maximum bytes of a request for a guest that only other hosts serve. These have limits as
    /// well.
    pub max_body: usize,
    /// Time limit of a call that another host answers.
    pub patience: Duration,
}

impl FleetConfig {
    /// A fleet that meets at these NATS servers.
    #[must_use]
    pub fn new(nats: impl Into<String>) -> Self {
        Self {
            nats: nats.into(),
            credentials: None,
            ca: None,
            certificate: None,
            certificate_key: None,
            entry_key: None,
            require_sealed: false,
            store: None,
            fleet: "default".to_owned(),
            name: None,
            lease: Duration::from_secs(10),
            replicas: 1,
            pace: HeartbeatInterval::default(),
            max_body: 64 << 20,
            patience: Duration::from_secs(600),
        }
    }

    /// The NATS servers without the credentials that their URLs may have: for messages.
    pub(super) fn servers(&self) -> String {
        let server = |url: &str| {
            let (scheme, rest) = url.trim().split_at(url.trim().find("://").map_or(0, |at| at + 3));
            format!("{scheme}{}", rest.rsplit('@').next().unwrap_or_default())
        };
        self.nats.split(',').map(server).collect::<Vec<_>>().join(",")
    }
}

impl fmt::Debug for FleetConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FleetConfig")
            .field("nats", &self.servers())
            .field(
                "store",
                &self.store.as_deref().map(|store| afresh::store::RedactedUrl(store).to_string()),
            )
            .field("fleet", &self.fleet)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}
