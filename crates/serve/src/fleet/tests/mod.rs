//! Hosts of a fleet in this process, over a real nats-server.

mod access;
mod body_memory;
mod catalog;
mod creation_keys;
mod joining;
#[path = "../../../../store/tests/suite/support/listening.rs"]
mod listening;
mod lost_calls;
mod mixed;
mod nats_server;
mod paused_and_public;
mod recording;
mod refusals;
mod sealed;
mod shared_prefix;
mod silent_answers;
mod sweep;

use std::sync::Arc;
use std::time::Duration;

use nats_server::NatsServer;

use super::{Fleet, FleetConfig};

/// Longer than a test, so that no host of a busy machine loses its lease.
const LEASE: Duration = Duration::from_secs(300);

impl NatsServer {
    fn config(&self) -> FleetConfig {
        let mut config = FleetConfig::new(format!("nats://{}", self.address));
        config.lease = LEASE;
        config
    }

    async fn host(&self) -> Arc<Fleet> {
        Fleet::join(&self.config()).await.unwrap()
    }
}
