//! Names of snapshots and templates on two hosts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::NatsServer;
use crate::fleet::policy::SplitMix64;
use crate::fleet::{Fleet, nats};
use crate::sandbox::records::store::{
    BuiltTemplate, SandboxStore, SavedState, SnapshotRecord, State, StoredSnapshot, UnknownFields,
};

pub(super) const TENANT: &str = "acme";

pub(super) fn build(number: u64, names: &[&str]) -> StoredSnapshot {
    let unknown = UnknownFields::default;
    let digest = format!("sha256:{number:064x}");
    let state = State { digest, bytes: 1, by: String::new(), unknown: unknown() };
    let (id, template) = (format!("b{number}"), "web".to_owned());
    let built = BuiltTemplate { id, template, made: number, unknown: unknown() };
    let record = SnapshotRecord {
        version: Default::default(),
        id: Fleet::id(TENANT).unwrap(),
        tenant: TENANT.to_owned(),
        template: "script".to_owned(),
        sandbox: String::new(),
        names: names.iter().map(|name| (*name).to_owned()).collect(),
        envs: BTreeMap::new(),
        directory: None,
        root: false,
        built: Some(built),
        stored: 1,
        base: None,
        unknown: unknown(),
    };
    StoredSnapshot { record, kept: SavedState { state: Some(state), ..SavedState::default() } }
}

/// The number of the build that a name opens.
pub(super) async fn opens(host: &Arc<Fleet>, name: &str) -> Option<u64> {
    let found = host.snapshot(TENANT, name).await.unwrap()?;
    found.record.built.map(|built| built.made)
}

async fn record(host: &Arc<Fleet>, name: &str) -> SnapshotRecord {
    host.snapshot(TENANT, name).await.unwrap().unwrap().record
}

/// The keys of names in the ledger.
async fn keys(host: &Arc<Fleet>) -> usize {
    let links = &host.links;
    nats::all(&links.client, &links.kept, "name.>", usize::MAX).await.unwrap().len()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_tag_opens_no_template_on_any_host() {
    let Some(server) = NatsServer::start() else { return };
    let (one, two) = (server.host().await, server.host().await);
    one.create_snapshot(build(1, &["web", "web:default", "web:v1"])).await.unwrap();
    assert_eq!((opens(&two, "web:v1").await, keys(&two).await), (Some(1), 3));
    two.remove_names(&record(&two, "web:v1").await, &["web:v1".to_owned()]).await.unwrap();
    for host in [&one, &two] {
        assert_eq!((opens(host, "web:v1").await, opens(host, "web").await), (None, Some(1)));
    }
    assert_eq!(keys(&one).await, 2, "the key is left");
    // A removal with a record of before removes the present names as well.
    let before = record(&two, "web").await;
    assert!(one.add_names(&before, &["web:v2".to_owned()]).await.unwrap());
    two.remove_snapshot(&before).await.unwrap();
    assert_eq!((opens(&one, "web:v2").await, keys(&one).await), (None, 0));
    assert!(!one.add_names(&before, &["web:v3".to_owned()]).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tag_for_an_older_build_takes_no_other_name_back() {
    let Some(server) = NatsServer::start() else { return };
    let (one, two) = (server.host().await, server.host().await);
    one.create_snapshot(build(1, &["web", "web:default"])).await.unwrap();
    let older = record(&one, "web").await;
    one.add_names(&older, &["web:v1".to_owned()]).await.unwrap();
    two.create_snapshot(build(2, &["web", "web:default"])).await.unwrap();
    // The request has read the record of the older build before it lost `web`.
    assert!(one.add_names(&older, &["web:v2".to_owned()]).await.unwrap());
    for host in [&one, &two] {
        assert_eq!(
            (opens(host, "web").await, opens(host, "web:default").await),
            (Some(2), Some(2))
        );
        assert_eq!((opens(host, "web:v1").await, opens(host, "web:v2").await), (Some(1), Some(1)));
    }
    // A client that asks for it gets it back.
    assert!(two.add_names(&older, &["web".to_owned()]).await.unwrap());
    assert_eq!(opens(&one, "web").await, Some(1));
    let listed = one.snapshots(TENANT, 100).await.unwrap();
    let names: usize = listed.iter().map(|record| record.names.len()).sum();
    assert_eq!((names, keys(&two).await), (4, 4));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_finished_earlier_never_replaces_a_later_one() {
    let Some(server) = NatsServer::start() else { return };
    let (one, two) = (server.host().await, server.host().await);
    let names = ["web", "web:default"];
    let (earlier, later) = (build(1, &names), build(2, &names));
    let state = earlier.kept.state.as_ref().unwrap();
    let claimed = one.claim_first(&earlier.record, state).await.unwrap();
    // The host stands still here.
    assert_eq!(two.create_snapshot(later).await.unwrap(), names);
    assert!(one.set_names(&earlier.record, claimed).await.unwrap().is_empty());
    for host in [&one, &two] {
        assert_eq!(
            (opens(host, "web").await, opens(host, "web:default").await),
            (Some(2), Some(2))
        );
    }
    let listed = two.snapshots(TENANT, 100).await.unwrap();
    let of = |made: u64| {
        let mut all = listed.iter();
        all.find(|one| one.built.as_ref().unwrap().made == made).unwrap().names.len()
    };
    assert_eq!((of(1), of(2)), (0, 2));
    // A host that died before it pointed to its build leaves no name in lists.
    let lost = build(3, &["web:lost"]);
    one.claim_first(&lost.record, lost.kept.state.as_ref().unwrap()).await.unwrap();
    assert_eq!(opens(&two, "web:lost").await, None);
    assert!(two.snapshots(TENANT, 100).await.unwrap().iter().all(|one| one.names.len() != 1));
}

/// A change of names.
#[derive(Clone, Debug)]
enum Change {
    Build(u64, Vec<&'static str>),
    Add(u64, &'static str),
    Drop(u64, &'static str),
    Forget(u64),
}

/// The records of all builds, and the expected state of the catalog.
#[derive(Clone, Default)]
struct Model {
    live: BTreeSet<u64>,
    names: BTreeMap<&'static str, u64>,
}

impl Model {
    fn apply(&mut self, change: &Change) {
        match change {
            Change::Build(number, names) => {
                self.live.insert(*number);
                self.names.extend(names.iter().map(|name| (*name, *number)));
            }
            Change::Add(number, name) if self.live.contains(number) => {
                self.names.insert(name, *number);
            }
            Change::Add(..) => {}
            Change::Drop(number, name) => {
                if self.names.get(name) == Some(number) {
                    self.names.remove(name);
                }
            }
            Change::Forget(number) => {
                self.live.remove(number);
                self.names.retain(|_, holder| holder != number);
            }
        }
    }
}

async fn perform(host: Arc<Fleet>, built: StoredSnapshot, change: Change) {
    let record = &built.record;
    match change {
        Change::Build(..) => drop(host.create_snapshot(built.clone()).await.unwrap()),
        Change::Add(_, name) => drop(host.add_names(record, &[name.to_owned()]).await.unwrap()),
        Change::Drop(_, name) => host.remove_names(record, &[name.to_owned()]).await.unwrap(),
        Change::Forget(_) => host.remove_snapshot(record).await.unwrap(),
    }
}

/// Pairs of random changes, each pair at the same time on two hosts. Afterwards the catalog is as
/// after one order of both, on both hosts, in lookups and in lists.
#[tokio::test(flavor = "multi_thread")]
async fn names_are_as_after_some_order_of_concurrent_changes() {
    const NAMES: [&str; 4] = ["web", "web:default", "web:v1", "web:v2"];
    let Some(server) = NatsServer::start() else { return };
    let hosts = [server.host().await, server.host().await];
    let mut seed = SplitMix64::new(0x5eed);
    let mut pick = move |below: usize| seed.below(below);
    let mut built: BTreeMap<u64, StoredSnapshot> = BTreeMap::new();
    let mut model = Model::default();
    for round in 0..60 {
        let changes: Vec<Change> = (0..2)
            .map(|_| {
                let live: Vec<u64> = model.live.iter().copied().collect();
                let kind = if live.is_empty() { 0 } else { pick(7) };
                if kind < 2 {
                    let number = built.len() as u64 + 1;
                    let names = NAMES[pick(2)..2 + pick(3)].to_vec();
                    built.insert(number, build(number, &names));
                    return Change::Build(number, names);
                }
                let (number, name) = (live[pick(live.len())], NAMES[pick(NAMES.len())]);
                match kind {
                    2..5 => Change::Add(number, name),
                    5 => Change::Drop(*model.names.get(name).unwrap_or(&number), name),
                    _ => Change::Forget(number),
                }
            })
            .collect();
        let running: Vec<_> = changes
            .iter()
            .zip(&hosts)
            .map(|(change, host)| {
                let (Change::Build(number, _)
                | Change::Add(number, _)
                | Change::Drop(number, _)
                | Change::Forget(number)) = change;
                tokio::spawn(perform(host.clone(), built[number].clone(), change.clone()))
            })
            .collect();
        for one in running {
            one.await.unwrap();
        }
        let mut seen = [BTreeMap::new(), BTreeMap::new()];
        for (host, seen) in hosts.iter().zip(&mut seen) {
            for name in NAMES {
                seen.extend(opens(host, name).await.map(|number| (name, number)));
            }
        }
        let orders = [[0, 1], [1, 0]].map(|order| {
            let mut after = model.clone();
            order.into_iter().for_each(|at| after.apply(&changes[at]));
            after
        });
        let after = orders.iter().find(|after| seen.iter().all(|seen| *seen == after.names));
        let after = after.unwrap_or_else(|| panic!("round {round}: {changes:?} gave {seen:?}"));
        let mut listed = BTreeMap::new();
        for record in hosts[round % 2].snapshots(TENANT, 100).await.unwrap() {
            let number = record.built.as_ref().unwrap().made;
            listed.extend(record.names.into_iter().map(|name| (name, number)));
        }
        let expected = after.names.iter().map(|(name, number)| ((*name).to_owned(), *number));
        assert_eq!(listed, expected.collect(), "round {round}: {changes:?}");
        assert_eq!(keys(&hosts[0]).await, after.names.len(), "round {round}: {changes:?}");
        model = after.clone();
    }
}
