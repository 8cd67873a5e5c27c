//! Tenants whose ids begin with the same digits, so that the ledger has their entries together.

use hyper::HeaderMap;

use super::NatsServer;
use super::sweep::sandbox;
use crate::fleet::{Fleet, record};
use crate::sandbox::records::store::{CreationKey, SandboxRecord};

const OWN_TENANT: &str = "tenant-1085";
const OTHER_TENANT: &str = "tenant-6048";

fn sandbox_of(tenant: &str) -> SandboxRecord {
    SandboxRecord { id: Fleet::id(tenant).unwrap(), tenant: tenant.to_owned(), ..sandbox(600_000) }
}

async fn claim(host: &Fleet, tenant: &str, name: &str) {
    let mut headers = HeaderMap::new();
    headers.insert("idempotency-key", name.parse().unwrap());
    let key = CreationKey::read(&headers, tenant, b"{}").unwrap().unwrap();
    let record = SandboxRecord { key: Some(key.clone()), ..sandbox_of(tenant) };
    host.claim(&record, &key).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_of_a_tenant_with_the_same_prefix_do_not_count() {
    let Some(server) = NatsServer::start() else { return };
    assert_eq!(record::tenant_prefix(OWN_TENANT), record::tenant_prefix(OTHER_TENANT));
    let host = server.host().await;
    // Those of the other tenant are listed first.
    for tenant in [OTHER_TENANT, OTHER_TENANT, OTHER_TENANT, OWN_TENANT, OWN_TENANT, OTHER_TENANT] {
        host.enter(sandbox_of(tenant)).await.unwrap();
    }
    // A list that ends early reports how many entries it has not read.
    for (most, count, omitted) in [(1, 1, 2), (2, 2, 1), (3, 2, 0)] {
        let found = host.entries_of(OWN_TENANT, most).await.unwrap();
        assert_eq!((found.records.len(), found.omitted), (count, omitted), "of at most {most}");
        assert!(found.records.iter().all(|record| record.tenant == OWN_TENANT));
    }
    for name in ["one", "two", "three"] {
        claim(&host, OTHER_TENANT, name).await;
    }
    claim(&host, OWN_TENANT, "one").await;
    assert_eq!(host.sweep_claims(OWN_TENANT, 1).await.unwrap(), 1);
    assert_eq!(host.sweep_claims(OTHER_TENANT, 1).await.unwrap(), 2, "twice the limit");
    // The claims of another process are counted before the first of this one.
    let next = server.host().await;
    next.admit_claim(OWN_TENANT, 2).await.unwrap();
    assert!(next.admit_claim(OTHER_TENANT, 2).await.is_err());
}
