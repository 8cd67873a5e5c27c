//! Heartbeats: sending them, receiving those of a part of the fleet, and learning what their
//! senders hold.
//!
//! Promises: NATS delivers at most about [`super::policy::HeartbeatInterval::bytes`] of heartbeats
//! in a second to all hosts together, and stores none. Each host is heard by those that watch its
//! lease. Every route and template that a host of the fleet holds is known to all others within a
//! minute or two, also where each hears a part of the fleet.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use async_nats::Subscriber;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::SelectAll;
use tokio::sync::Semaphore;

use super::clock::now;
use super::policy::{
    Group, Heartbeat, HeartbeatCost, HeartbeatGroups, NodeStatus, bound_held, expiry, place_tokens,
    set_digest,
};
use super::{Fleet, lease_renewal, record};
use crate::lock::lock;

/// Subject of announcements to all hosts.
const SETS: &str = "sets";
/// Time between two turns of a host to announce its set, on average.
const ANNOUNCEMENT_INTERVAL: Duration = Duration::from_secs(30);
/// Turns after which a host listens to another far group.
const TURNS_OF_FAR_GROUP: u32 = 10;
/// Longest wait for the status of another host.
const STATUS_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest wait for the next status of a host that joins.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before a lost subscription is made again.
const SUBSCRIBE_INTERVAL: Duration = Duration::from_secs(1);
/// Longest interval that another host may claim.
const MAX_INTERVAL: Duration = Duration::from_secs(600);
/// Sets that are remembered.
const MAX_SETS: usize = 1_000;
/// Hosts that are asked for their status at the same time because of their heartbeats.
static STATUS_REQUESTS: Semaphore = Semaphore::const_new(256);
/// Bytes of the protocol around a message, without its subject.
const MESSAGE_OVERHEAD: usize = 24;

/// Sets of held things, by their digests.
#[derive(Default)]
pub(super) struct KnownSets(HashMap<String, Vec<String>>);

impl KnownSets {
    fn learn(&mut self, mut set: Vec<String>) {
        if self.0.len() >= MAX_SETS {
            self.0.clear();
        }
        let digest = set_digest(&set);
        bound_held(&mut set);
        self.0.insert(digest, set);
    }
}

/// The things of a status that are in the set, and the others: snapshots, which a host opens on
/// demand.
fn split(held: &[String]) -> (Vec<String>, Vec<String>) {
    held.iter().cloned().partition(|held| record::key(held).is_none())
}

fn text(value: &impl serde::Serialize) -> Bytes {
    Bytes::from(serde_json::to_vec(value).unwrap_or_default())
}

/// Begins to send and receive heartbeats, and asks some hosts for their status, so that they are
/// known before the first request.
pub(super) async fn begin(fleet: &Arc<Fleet>) -> Result<(), afresh::Cause> {
    let lives = lease_renewal::list_lives(&fleet.links).await?;
    let own = fleet.life();
    let around = HeartbeatGroups::new(&own, lives.len(), &mut lock(&fleet.random));
    *lock(&fleet.heartbeat_groups) = around.clone();
    let heard = subscribe(fleet).await?;
    let client = fleet.links.client.clone();
    let mut asked =
        client.subscribe(fleet.links.subject(&format!("host.{}.status", fleet.node))).await?;
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
    fleet.spawn(receiving(Arc::downgrade(fleet), heard));
    fleet.spawn(sending(Arc::downgrade(fleet)));
    fleet.spawn(announcing(Arc::downgrade(fleet)));
    let inbox = client.new_inbox();
    let mut answers = client.subscribe(inbox.clone()).await?;
    if around.is_partial() {
        let near = |life: &&String| around.groups().any(|group| group.contains(life));
        for life in lives.iter().map(|(life, _)| life).filter(near) {
            client
                .publish_with_reply(status_subject(fleet, life), inbox.clone(), Bytes::new())
                .await?;
        }
    } else {
        client.publish_with_reply(fleet.links.subject("who"), inbox, Bytes::new()).await?;
    }
    client.flush().await?;
    let this = Arc::downgrade(fleet);
    fleet.spawn(async move {
        while let Ok(Some(message)) = tokio::time::timeout(ANSWER_TIMEOUT, answers.next()).await {
            let Some(fleet) = this.upgrade() else { return };
            if let Ok(status) = serde_json::from_slice::<NodeStatus>(&message.payload) {
                fleet.receive_status(status);
            }
        }
    });
    Ok(())
}

fn status_subject(fleet: &Fleet, life: &str) -> String {
    let node = life.split_once('-').map_or(life, |(node, _)| node);
    fleet.links.subject(&format!("host.{node}.status"))
}

/// Listens to the groups of this host.
async fn subscribe(fleet: &Fleet) -> Result<SelectAll<Subscriber>, afresh::Cause> {
    let groups: Vec<Group> = lock(&fleet.heartbeat_groups).groups().collect();
    let mut heard = SelectAll::new();
    for group in groups {
        let subject = fleet.links.subject(&format!("advert.{}", group.wildcard()));
        heard.push(fleet.links.client.subscribe(subject).await?);
    }
    heard.push(fleet.links.client.subscribe(fleet.links.subject(SETS)).await?);
    Ok(heard)
}

async fn receiving(fleet: Weak<Fleet>, mut heard: SelectAll<Subscriber>) {
    loop {
        let Some(regrouped) = fleet.upgrade().map(|fleet| fleet.regrouped.clone()) else { return };
        tokio::select! {
            message = heard.next() => {
                let Some(this) = fleet.upgrade() else { return };
                let Some(message) = message else {
                    tokio::time::sleep(SUBSCRIBE_INTERVAL).await;
                    this.regrouped.notify_one();
                    continue;
                };
                let beat = serde_json::from_slice::<Heartbeat>(&message.payload).ok();
                let Some(beat) = beat.and_then(Heartbeat::bounded) else { continue };
                if message.subject.ends_with(SETS) && beat.host != this.life() {
                    lock(&this.announcements).receive(&beat.set);
                }
                this.receive_heartbeat(beat);
            }
            () = regrouped.notified() => {
                let Some(this) = fleet.upgrade() else { return };
                // The earlier subscriptions end once the new ones are there.
                match subscribe(&this).await {
                    Ok(groups) => heard = groups,
                    Err(error) => {
                        tracing::warn!(%error, "heartbeats of other hosts cannot be received");
                        tokio::time::sleep(SUBSCRIBE_INTERVAL).await;
                        this.regrouped.notify_one();
                    }
                }
            }
        }
    }
}

async fn sending(fleet: Weak<Fleet>) {
    let (mut bytes, mut changed) = (400, Instant::now());
    loop {
        let Some(this) = fleet.upgrade() else { return };
        let cost = this.heartbeat_cost(bytes);
        let every = this.config.pace.usual(cost);
        let (own, mut beat) = this.heartbeat(every);
        beat.tenants = this.tenant_report();
        // It needs no message to know itself.
        this.record_status(own, every);
        let subject = this.links.subject(&format!("advert.{}", place_tokens(&beat.host)));
        let message = text(&beat);
        bytes = message.len() + subject.len() + MESSAGE_OVERHEAD;
        if let Err(error) = this.links.client.publish(subject, message).await {
            tracing::warn!(%error, "a heartbeat was not sent");
        }
        // A changed group is counted once each of its hosts has been heard.
        if changed.elapsed() > every * 2 && this.adjust_groups() {
            changed = Instant::now();
        }
        let pause = this.config.pace.next(cost, &mut lock(&this.random));
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // News that others should not wait for.
            () = this.drain.notified() => {}
        }
    }
}

async fn announcing(fleet: Weak<Fleet>) {
    for turn in 1.. {
        let Some(this) = fleet.upgrade() else { return };
        let random = u32::try_from(lock(&this.random).below(1000)).unwrap_or(0);
        drop(this);
        tokio::time::sleep(ANNOUNCEMENT_INTERVAL / 2 + ANNOUNCEMENT_INTERVAL / 1000 * random).await;
        let Some(this) = fleet.upgrade() else { return };
        if !lock(&this.heartbeat_groups).is_partial() {
            continue;
        }
        let (_, beat) = this.heartbeat(ANNOUNCEMENT_INTERVAL);
        if lock(&this.announcements).is_due(&beat.set) {
            let subject = this.links.subject(SETS);
            if let Err(error) = this.links.client.publish(subject, text(&beat)).await {
                tracing::warn!(%error, "an announcement was not sent");
            }
        }
        if turn % TURNS_OF_FAR_GROUP == 0 {
            lock(&this.heartbeat_groups).change_far(&mut lock(&this.random));
            this.regrouped.notify_one();
        }
    }
}

impl Fleet {
    /// The status of this host, and its heartbeat.
    fn heartbeat(&self, every: Duration) -> (NodeStatus, Heartbeat) {
        let status = self.advert();
        let (set, others) = split(&status.held);
        let every = u64::try_from(every.as_millis()).unwrap_or(u64::MAX);
        let beat = Heartbeat::new(&status, &set, &others, every);
        (status, beat)
    }

    /// The cost of a heartbeat of this many bytes.
    fn heartbeat_cost(&self, bytes: usize) -> HeartbeatCost {
        let around = lock(&self.heartbeat_groups);
        let near = lock(&self.members).count(|host| around.has_near(host)).max(1);
        // As many hear it because it is in their far group.
        let heard_by = if around.is_partial() { 2 * near } else { near };
        HeartbeatCost { hosts: around.hosts(near), heard_by, bytes }
    }

    /// The size of the fleet, as far as this host knows.
    pub(super) fn size(&self) -> usize {
        self.heartbeat_cost(0).hosts
    }

    /// Adapts the groups to the number of hosts. Returns whether they changed.
    fn adjust_groups(&self) -> bool {
        let mut around = lock(&self.heartbeat_groups);
        let near = lock(&self.members).count(|host| around.has_near(host));
        let changed = around.adjust(near, &mut lock(&self.random));
        if changed {
            self.regrouped.notify_one();
        }
        changed
    }

    /// A heartbeat of another host. If its set is not known, the host is asked for it.
    fn receive_heartbeat(self: &Arc<Self>, mut beat: Heartbeat) {
        if self.is_over(&beat.host) {
            return;
        }
        self.counts.adverts.inc();
        let every = Duration::from_millis(beat.every).min(MAX_INTERVAL);
        if let Some(report) = beat.tenants.take() {
            self.receive_tenants(&beat.host, report, now() + expiry(every));
        }
        let set = lock(&self.sets).0.get(&beat.set).cloned();
        if let Some(set) = set {
            self.record_status(beat.status(&set), every);
            return;
        }
        // Further hosts are asked at their next heartbeats.
        let Ok(turn) = STATUS_REQUESTS.try_acquire() else { return };
        let this = self.clone();
        tokio::spawn(async move {
            let _turn = turn;
            if !this.ask_status(&beat.host).await {
                // Its lease is watched all the same, and it holds what it held as far as is known.
                let held =
                    lock(&this.members).get(&beat.host).map(|known| known.advert.held.clone());
                this.record_status(beat.status(&held.unwrap_or_default()), every);
            }
        });
    }

    /// Asks another host for its status. Returns whether it answered.
    async fn ask_status(&self, life: &str) -> bool {
        let asking = self.links.client.request(status_subject(self, life), Bytes::new());
        let Ok(Ok(message)) = tokio::time::timeout(STATUS_TIMEOUT, asking).await else {
            return false;
        };
        match serde_json::from_slice::<NodeStatus>(&message.payload) {
            Ok(status) => {
                self.receive_status(status);
                true
            }
            Err(_) => false,
        }
    }

    /// Learns of a host that this host does not hear.
    pub(super) async fn learn(&self, life: &str) {
        let unknown =
            lock(&self.heartbeat_groups).is_partial() && lock(&self.members).get(life).is_none();
        if unknown && !self.is_over(life) {
            self.ask_status(life).await;
        }
    }

    /// The status of a host that was asked for it.
    fn receive_status(&self, status: NodeStatus) {
        let Some(status) = status.bounded() else { return };
        lock(&self.sets).learn(split(&status.held).0);
        // In a large fleet its next heartbeat may be far off.
        let is_large = lock(&self.heartbeat_groups).is_partial();
        let least = match is_large {
            true => ANNOUNCEMENT_INTERVAL,
            false => self.config.pace.least,
        };
        let every = self.config.pace.usual(self.heartbeat_cost(MESSAGE_OVERHEAD * 10));
        self.record_status(status, every.max(least));
    }

    fn record_status(&self, status: NodeStatus, every: Duration) {
        if !self.is_over(&status.host) {
            lock(&self.members).receive(status, now() + expiry(every));
        }
    }

    /// Whether this host watches the lease of another because both are in one group.
    pub(super) fn watches(&self, life: &str, count: usize) -> bool {
        self.neighbours(count).iter().any(|near| near == life)
    }

    /// The hosts whose leases this host watches.
    pub(super) fn neighbours(&self, count: usize) -> Vec<String> {
        let around = lock(&self.heartbeat_groups);
        lock(&self.members).after(&self.life(), count, |host| around.has_near(host))
    }
}
