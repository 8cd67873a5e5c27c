//! How a server joins a fleet.

use std::path::PathBuf;
use std::time::Duration;

use super::policy::Pace;

/// More machines that share the work.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FleetConfig {
    /// NATS servers: one URL, or several with commas between.
    pub nats: String,
    /// A file with a token for NATS, or with a user and a password.
    pub credentials: Option<PathBuf>,
    /// Where saved states are kept for all hosts: the URL of a remote, or a directory that all of them see. Needed
    /// for sandboxes.
    pub store: Option<String>,
    /// The fleet's name; hosts of different fleets have nothing to do with each other.
    pub fleet: String,
    /// What people call this host; its host name if not set.
    pub name: Option<String>,
    /// After so long without a sign of a host, others may take what it had.
    pub lease: Duration,
    /// How often NATS keeps what it is told.
    pub replicas: usize,
    /// How often hosts tell of themselves.
    pub pace: Pace,
    /// Most bytes of a request for a guest that only other hosts serve, which have limits of their own.
    pub max_body: usize,
    /// A call that another host answers may take so long.
    pub patience: Duration,
}

impl FleetConfig {
    /// A fleet that meets at these NATS servers.
    #[must_use]
    pub fn new(nats: impl Into<String>) -> Self {
        Self {
            nats: nats.into(),
            credentials: None,
            store: None,
            fleet: "default".to_owned(),
            name: None,
            lease: Duration::from_secs(10),
            replicas: 1,
            pace: Pace::default(),
            max_body: 64 << 20,
            patience: Duration::from_secs(600),
        }
    }
}
