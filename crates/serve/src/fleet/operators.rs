//! The requests of operators: to list hosts, and to drain one.
//!
//! Promises: a list has every host that is up: it is complete once each host with a lease has
//! answered.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;

use super::config::FleetConfig;
use super::credentials::Role;
use super::nats::NatsConnection;
use super::policy::NodeStatus;
use super::{Fleet, lease_renewal};

/// Longest wait for the next answer. A host with a lease that does not answer for so long is left
/// out.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// A fleet could not be queried.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodesError {
    /// It cannot be reached.
    #[error("cannot reach the fleet")]
    Away(#[source] afresh::Cause),
    /// NATS refused it.
    #[error("NATS refuses this to the given credentials: {why}")]
    Refused {
        /// The server's reason.
        why: String,
    },
    /// No host of this name.
    #[error("no host `{name}` answers; `afresh nodes` lists those that do")]
    NoHost {
        /// The name that was given.
        name: String,
    },
    /// Several hosts of this name.
    #[error("several hosts are called `{name}`; name one by its id, as `afresh nodes` lists it")]
    Several {
        /// The name that was given.
        name: String,
    },
}

fn text(advert: &NodeStatus) -> Bytes {
    Bytes::from(serde_json::to_vec(advert).unwrap_or_default())
}

/// Answers requests for the list of hosts, and to end.
pub(super) async fn begin(fleet: &Arc<Fleet>) -> Result<(), afresh::Cause> {
    let client = fleet.links.client.clone();
    let mut asked = client.subscribe(fleet.links.subject("who")).await?;
    let mut ended =
        client.subscribe(fleet.links.subject(&format!("host.{}.drain", fleet.node))).await?;
    let this = Arc::downgrade(fleet);
    fleet.spawn(async move {
        while let Some(message) = asked.next().await {
            let Some(fleet) = this.upgrade() else { return };
            if let Some(reply) = message.reply {
                // The caller may have left.
                let _ = fleet.links.client.publish(reply, text(&fleet.advert())).await;
            }
        }
    });
    let this = Arc::downgrade(fleet);
    fleet.spawn(async move {
        while let Some(message) = ended.next().await {
            let Some(fleet) = this.upgrade() else { return };
            tracing::warn!(host = fleet.node, "told to end");
            if let Some(reply) = message.reply {
                let _ = fleet.links.client.publish(reply, text(&fleet.advert())).await;
                let _ = fleet.links.client.flush().await;
            }
            if let Some(host) = fleet.host() {
                host.shutdown();
            }
        }
    });
    Ok(())
}

async fn ask(config: &FleetConfig) -> Result<(NatsConnection, Vec<NodeStatus>), NodesError> {
    let links =
        NatsConnection::open(config, "afresh", Role::Operator).await.map_err(NodesError::Away)?;
    let away = |error: &dyn std::fmt::Display| NodesError::Away(error.to_string().into());
    let inbox = links.client.new_inbox();
    let mut answers = links.client.subscribe(inbox.clone()).await.map_err(|e| away(&e))?;
    let asked = links.client.publish_with_reply(links.subject("who"), inbox, Bytes::new());
    asked.await.map_err(|error| away(&error))?;
    // After the request: hosts answer meanwhile.
    let mut missing = lease_renewal::names(&links).await.map_err(|error| away(&error))?;
    let mut all: Vec<NodeStatus> = Vec::new();
    while !missing.is_empty()
        && let Ok(Some(message)) = tokio::time::timeout(ANSWER_TIMEOUT, answers.next()).await
    {
        match serde_json::from_slice::<NodeStatus>(&message.payload) {
            Ok(advert) => {
                if let Some(at) = missing.iter().position(|name| *name == advert.name) {
                    missing.swap_remove(at);
                }
                all.push(advert);
            }
            // No host is up.
            Err(_) if message.payload.is_empty() => break,
            Err(_) => {}
        }
    }
    all.sort_by(|one, two| (&one.name, &one.host).cmp(&(&two.name, &two.host)));
    Ok((links, all))
}

/// The hosts of a fleet, by their names.
///
/// # Errors
/// [`NodesError::Away`].
pub async fn nodes(config: &FleetConfig) -> Result<Vec<NodeStatus>, NodesError> {
    Ok(ask(config).await?.1)
}

/// Asks a host to save its sandboxes and end, as SIGTERM does. The host is named by its name or its
/// id.
///
/// # Errors
/// [`NodesError`].
pub async fn drain(config: &FleetConfig, name: &str) -> Result<NodeStatus, NodesError> {
    let (links, all) = ask(config).await?;
    let mut named = all.iter().filter(|advert| advert.name == name || advert.host == name);
    let host = match (named.next(), named.next()) {
        (Some(host), None) => host,
        (None, _) => return Err(NodesError::NoHost { name: name.to_owned() }),
        _ => return Err(NodesError::Several { name: name.to_owned() }),
    };
    let node = host.host.split_once('-').map_or(host.host.as_str(), |(node, _)| node);
    let subject = links.subject(&format!("host.{node}.drain"));
    let told = links.client.request(subject, Bytes::new()).await;
    told.map_err(|error| match links.refusals.last() {
        Some(why) => NodesError::Refused { why },
        None => NodesError::Away(Box::new(error)),
    })?;
    Ok(host.clone())
}
