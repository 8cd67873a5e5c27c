//! Keys of requests for new sandboxes, in the ledger.
//!
//! Promises: of all sandboxes with a key that hosts make at the same time, one is acknowledged. A
//! claim comes before the entry of its sandbox, and is confirmed after it, by compare-and-set. A
//! claim that replaces that of a lost sandbox removes its entry first, so no host that is back
//! keeps it. A claim without an answer makes no sandbox, and the next request with its key on this
//! host replaces it. A confirmation without an answer is read back before its sandbox is given up.
//! A host that dies between them blocks its key no longer than its lease. A claim lasts
//! [`CLAIM_LIFETIME`], and goes with its sandbox if a host ends that before. The claim of a sandbox
//! that ends without a host, or is lost with it, stays in the ledger without an effect, so
//! [`claim_counts`](super::claim_counts) limits the claims of a tenant.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use serde::{Deserialize, Serialize};

use super::Fleet;
use super::nats::{self, BucketEntry, NatsError};
use super::record::{self, Entry};
use crate::error_response::ErrorResponse;
use crate::format_version::FormatVersion;
use crate::sandbox::records::store::{CreationKey, KeyState, SandboxRecord, UnknownFields};

/// The first part of the keys of claims. Earlier versions find neither a digest nor a snapshot
/// under it.
const CLAIM: &str = "name.key.";
/// Time that a key is known, from the creation of its sandbox.
pub(super) const CLAIM_LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);
/// Maximum claims of a tenant in the ledger.
const MAX_CLAIMS: usize = 10_000;
/// Claims of a tenant that are checked at the same time.
const MAX_CONCURRENT_CLAIMS: usize = 64;
/// Lifetime of a claim without its sandbox: far longer than the time limits of all steps until the
/// sandbox has its entry.
const PENDING_LIFETIME: Duration = Duration::from_secs(60);
/// Pause between two attempts to confirm a claim.
const CONFIRM_RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// The claim of a sandbox to a key.
#[derive(Debug, Serialize, Deserialize)]
struct Claim {
    #[serde(default)]
    version: FormatVersion,
    sandbox: String,
    /// The life of the host that makes the sandbox.
    life: String,
    /// Whether the sandbox had its entry.
    #[serde(default)]
    made: bool,
    /// The tenant of the key. Earlier versions wrote none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tenant: Option<String>,
    #[serde(flatten)]
    unknown: UnknownFields,
}

impl Claim {
    fn new(sandbox: String, life: String, made: bool) -> Self {
        let (version, unknown) = (FormatVersion::default(), UnknownFields::default());
        Self { version, sandbox, life, made, tenant: None, unknown }
    }

    /// The claim of a record.
    fn of(record: &SandboxRecord, life: String, made: bool) -> Self {
        Self { tenant: Some(record.tenant.clone()), ..Self::new(record.id.clone(), life, made) }
    }

    /// Whether it counts for a tenant, of those with the same prefix.
    fn counts_for(&self, tenant: &str) -> bool {
        self.tenant.as_ref().is_none_or(|of| of == tenant)
    }
}

/// Whether an entry of the bucket is a claim.
pub(super) fn is_claim(key: &str) -> bool {
    key.starts_with(CLAIM)
}

fn claim_key(tenant: &str, key: &CreationKey) -> String {
    format!("{CLAIM}{}.{}", record::tenant_prefix(tenant), key.digest)
}

fn read(found: Option<BucketEntry>) -> Option<Claim> {
    // One that cannot be read is replaced.
    serde_json::from_slice(&found?.value).ok()
}

impl Fleet {
    async fn put_claim(
        &self,
        key: &str,
        claim: &Claim,
        revision: u64,
        lifetime: Duration,
    ) -> Result<u64, NatsError> {
        // Text.
        let value = Bytes::from(serde_json::to_vec(claim).unwrap_or_default());
        let lifetime = u64::try_from(lifetime.as_millis()).ok();
        nats::update_for(&self.links.kept, key, value, revision, lifetime).await
    }

    /// The sandbox of a key.
    pub(super) async fn state_of_key(
        &self,
        tenant: &str,
        key: &CreationKey,
    ) -> Result<KeyState, ErrorResponse> {
        let (_, found) = nats::find_slot(&self.links.kept, &claim_key(tenant, key)).await?;
        self.state_of_claim(read(found).as_ref()).await
    }

    async fn state_of_claim(&self, claim: Option<&Claim>) -> Result<KeyState, ErrorResponse> {
        let Some(claim) = claim else { return Ok(KeyState::Free) };
        let Some(entry) = self.look_up(&claim.sandbox).await? else {
            // A confirmed one had an entry, so it has ended.
            let is_free =
                claim.made || self.has_abandoned(claim) || self.is_lost(&claim.life).await;
            return Ok(if is_free { KeyState::Free } else { KeyState::Pending });
        };
        Ok(match () {
            // This host is removing it: its client got an error.
            () if self.is_unfinished(&claim.sandbox) => KeyState::Pending,
            () if self.has_lost(&entry).await => KeyState::Free,
            () if claim.made => KeyState::Made(Box::new(entry.record)),
            () => KeyState::Pending,
        })
    }

    /// Whether the claim is left of an earlier request of this host, whose change had no answer and
    /// which made no sandbox. Requests of a key take turns here, so none makes one now.
    fn has_abandoned(&self, claim: &Claim) -> bool {
        self.ours(&claim.life) && !self.is_unfinished(&claim.sandbox)
    }

    /// Whether a host has lost its sandboxes without a saved state. An earlier life of this process
    /// has not.
    async fn is_lost(&self, life: &str) -> bool {
        !self.ours(life) && self.free(Some(life)).await
    }

    /// Whether the host of a sandbox has lost it.
    async fn has_lost(&self, entry: &Entry) -> bool {
        entry.state.is_none()
            && match &entry.owner {
                Some(owner) => self.is_lost(owner).await,
                None => true,
            }
    }

    /// Removes the entry of a lost sandbox, whose host may be back with its memory.
    async fn fence_lost(&self, claim: &Claim) -> Result<(), ErrorResponse> {
        let Some(key) = record::key(&claim.sandbox) else { return Ok(()) };
        let Some((revision, entry)) = self.entry(&key).await? else { return Ok(()) };
        if !self.has_lost(&entry).await {
            return Err(CreationKey::pending());
        }
        match nats::remove(&self.links.sandboxes, &key, revision).await {
            Err(NatsError::Changed) => Err(CreationKey::pending()),
            removed => Ok(removed?),
        }
    }

    /// Claims the key of a sandbox that has no entry yet, and returns the revision of the claim.
    pub(super) async fn claim(
        &self,
        record: &SandboxRecord,
        key: &CreationKey,
    ) -> Result<u64, ErrorResponse> {
        self.check_lease()?;
        let place = claim_key(&record.tenant, key);
        let (revision, found) = nats::find_slot(&self.links.kept, &place).await?;
        let old = read(found);
        if !matches!(self.state_of_claim(old.as_ref()).await?, KeyState::Free) {
            return Err(CreationKey::pending());
        }
        if let Some(old) = &old {
            self.fence_lost(old).await?;
        }
        self.admit_claim(&record.tenant, MAX_CLAIMS).await?;
        let claim = Claim::of(record, self.life(), false);
        match self.put_claim(&place, &claim, revision, PENDING_LIFETIME).await {
            Err(NatsError::Changed) => {
                self.claims.release(&record.tenant);
                Err(CreationKey::pending())
            }
            // Without an answer the claim may be there, and no sandbox follows it. The next request
            // with the key takes it over.
            claimed => Ok(claimed.map_err(NatsError::repeatable)?),
        }
    }

    /// Counts another claim of a tenant, or refuses it at the limit.
    pub(super) async fn admit_claim(
        &self,
        tenant: &str,
        limit: usize,
    ) -> Result<(), ErrorResponse> {
        let count = self.claims.of(tenant);
        // Boxed, since the lists of a bucket have large futures.
        count.begin(Box::pin(self.count_claims(tenant, limit))).await?;
        count.admit(limit, Box::pin(self.sweep_claims(tenant, limit))).await
    }

    /// The number of claims of a tenant in the ledger, of twice the limit at most.
    async fn count_claims(&self, tenant: &str, limit: usize) -> Result<usize, ErrorResponse> {
        let filter = format!("{CLAIM}{}.*", record::tenant_prefix(tenant));
        let most = limit.saturating_mul(2);
        let read = |found: &BucketEntry| serde_json::from_slice::<Claim>(&found.value).ok();
        let own = |claim: &Claim| claim.counts_for(tenant);
        let list = self.list_readable(|links| &links.kept, &filter, most, read, own).await?;
        Ok(list.entries.len() + list.unreadable)
    }

    /// Removes claims of sandboxes that have ended, and returns the number of the others, of twice
    /// the limit at most.
    pub(super) async fn sweep_claims(
        &self,
        tenant: &str,
        limit: usize,
    ) -> Result<usize, ErrorResponse> {
        let filter = format!("{CLAIM}{}.*", record::tenant_prefix(tenant));
        let read = |found: &nats::BucketEntry| {
            let claim = serde_json::from_slice::<Claim>(&found.value).ok()?;
            Some((found.key.clone(), found.revision, claim))
        };
        let most = limit.saturating_mul(2);
        let own = |(_, _, claim): &(String, u64, Claim)| claim.counts_for(tenant);
        let list = self.list_readable(|links| &links.kept, &filter, most, read, own).await?;
        let unreadable = list.unreadable;
        let left = futures_util::stream::iter(list.entries)
            .map(|(key, revision, claim)| async move {
                // A confirmed one had an entry.
                let is_over = claim.made && self.look_up(&claim.sandbox).await?.is_none();
                Ok::<_, ErrorResponse>(match is_over {
                    // One that has changed is another claim now.
                    true => nats::remove(&self.links.kept, &key, revision).await.is_err(),
                    false => true,
                })
            })
            .buffer_unordered(MAX_CONCURRENT_CLAIMS)
            .fold(Ok(unreadable), async |sum: Result<usize, ErrorResponse>, is_left| {
                Ok(sum? + usize::from(is_left?))
            });
        left.await
    }

    /// Confirms the claim of a sandbox that has its entry now. After an error the sandbox must be
    /// removed: another request may have claimed the key. The outcome of a change without an answer
    /// is read back, however long that takes, also without a lease: until then another host may
    /// have acknowledged the sandbox. Only a host that ends does not wait for it; its sandbox is
    /// then lost with it. A claim that nothing confirms ends after [`PENDING_LIFETIME`].
    pub(super) async fn confirm_claim(
        &self,
        record: &SandboxRecord,
        key: &CreationKey,
        mut revision: u64,
    ) -> Result<(), ErrorResponse> {
        let place = claim_key(&record.tenant, key);
        let mut confirmed = Claim::of(record, self.life(), true);
        loop {
            let put = self.put_claim(&place, &confirmed, revision, CLAIM_LIFETIME).await;
            let Err(error) = put else { return Ok(()) };
            // The change may have been made without an answer.
            if let Ok((now, found)) = nats::find_slot(&self.links.kept, &place).await {
                match read(found) {
                    Some(claim) if claim.sandbox == record.id && claim.made => return Ok(()),
                    Some(claim) if claim.sandbox == record.id => {
                        revision = now;
                        (confirmed.version, confirmed.unknown) = (claim.version, claim.unknown);
                    }
                    _ => return Err(CreationKey::pending()),
                }
            }
            if !self.safe() && self.draining.load(Ordering::Relaxed) {
                return Err(error.into());
            }
            tokio::time::sleep(CONFIRM_RETRY_INTERVAL).await;
        }
    }

    /// Removes the claim of a sandbox that is not there any more. If this fails, the claim has no
    /// effect, and its lifetime ends it.
    pub(super) async fn release_claim(&self, record: &SandboxRecord) {
        let Some(key) = &record.key else { return };
        let place = claim_key(&record.tenant, key);
        let removed = async {
            let (revision, found) = nats::find_slot(&self.links.kept, &place).await?;
            match read(found) {
                Some(claim) if claim.sandbox == record.id => {
                    nats::remove(&self.links.kept, &place, revision).await?;
                    self.claims.release(&record.tenant);
                    Ok::<_, NatsError>(())
                }
                _ => Ok(()),
            }
        };
        if let Err(error) = removed.await {
            tracing::debug!(%error, id = record.id, "the key of a sandbox is left to expire");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format_version::tests::{check_goldens, check_unknown_fields};

    #[test]
    fn claims_of_keys_are_read_and_written_as_they_were() {
        check_goldens("claim", &Claim::new("id".to_owned(), "a-1".to_owned(), true));
        check_unknown_fields::<Claim>("claim", 1);
    }
}
