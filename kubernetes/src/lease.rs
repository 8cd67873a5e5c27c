//! The lease of the controller at work: of several, one reconciles.
//!
//! Promises: a holder that cannot renew its lease stops before another one may take it. Times are
//! measured by the own clock, from the moment a change was seen, so clocks need not agree. A holder
//! that was paused for longer than its lease learns that from [`LeaseHolder::check`].

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use tokio::time::Instant;

use crate::context::{Failure, code};
use crate::health::{Loop, Monitor};
use crate::metrics::ErrorSource;

/// Time after which another controller takes a lease that is not renewed.
const LEASE_TIME: Duration = Duration::from_secs(15);
/// A holder stops if it could not renew the lease for this time.
const RENEWAL_LIMIT: Duration = Duration::from_secs(10);
/// Interval of renewals, and of attempts to take the lease.
const INTERVAL: Duration = Duration::from_secs(2);

/// A lease, and the name that it is held by.
pub struct LeaseHolder {
    api: Api<Lease>,
    name: String,
    identity: String,
    /// The begin of the last renewal.
    renewed: Mutex<Option<Instant>>,
    monitor: Arc<Monitor>,
}

impl LeaseHolder {
    /// The lease `name` in a namespace. The identity must be that of no other process.
    #[must_use]
    pub fn new(
        client: Client,
        namespace: &str,
        name: &str,
        identity: String,
        monitor: Arc<Monitor>,
    ) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            name: name.to_owned(),
            identity,
            renewed: Mutex::default(),
            monitor,
        }
    }

    fn note_renewal(&self, begun: Instant) {
        *self.renewed.lock().unwrap_or_else(PoisonError::into_inner) = Some(begun);
    }

    /// Whether the lease was renewed in time.
    fn is_current(&self) -> bool {
        let renewed = *self.renewed.lock().unwrap_or_else(PoisonError::into_inner);
        renewed.is_some_and(|renewed| renewed.elapsed() < RENEWAL_LIMIT)
    }

    /// Asks the API whether this process still holds the lease. The own clock alone is not enough,
    /// since a host may stop between the look at it and the next request.
    ///
    /// # Errors
    /// If another controller has the lease, or the API does not answer.
    pub async fn check(&self) -> Result<(), Failure> {
        if !self.is_current() {
            return Err(Failure::LeaseLost);
        }
        let lease = self.api.get_opt(&self.name).await?;
        let holder = lease.and_then(|lease| lease.spec?.holder_identity);
        if holder.as_ref() != Some(&self.identity) || !self.is_current() {
            return Err(Failure::LeaseLost);
        }
        Ok(())
    }

    fn spec(&self, before: Option<&LeaseSpec>) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let mut spec = before.cloned().unwrap_or_default();
        if spec.holder_identity.as_deref() != Some(&self.identity) {
            let taken = before.and_then(|spec| spec.lease_transitions).unwrap_or(-1);
            spec.lease_transitions = Some(taken.saturating_add(1));
            spec.acquire_time = Some(now.clone());
        }
        spec.holder_identity = Some(self.identity.clone());
        spec.lease_duration_seconds = i32::try_from(LEASE_TIME.as_secs()).ok();
        spec.renew_time = Some(now);
        spec
    }

    /// Writes the lease over a version that was read; whether no other controller was faster.
    async fn write(&self, lease: Option<Lease>) -> Result<bool, kube::Error> {
        let parameters = PostParams::default();
        let result = match lease {
            None => {
                let name = Some(self.name.clone());
                let mut metadata = ObjectMeta { name, ..ObjectMeta::default() };
                self.monitor.tenant.exchange(metadata.annotations.get_or_insert_default());
                let lease = Lease { metadata, spec: Some(self.spec(None)) };
                self.api.create(&parameters, &lease).await
            }
            Some(mut lease) => {
                lease.spec = Some(self.spec(lease.spec.as_ref()));
                let annotations = lease.metadata.annotations.get_or_insert_default();
                self.monitor.tenant.exchange(annotations);
                // It carries the version that was read.
                self.api.replace(&self.name, &parameters, &lease).await
            }
        };
        match result {
            Ok(_) => {
                self.monitor.note_lease(true);
                Ok(true)
            }
            Err(error) if code(&error) == 409 => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until this process holds the lease.
    ///
    /// # Errors
    /// If the API refuses access to leases.
    pub async fn acquire(&self) -> Result<(), kube::Error> {
        let mut seen: Option<(LeaseSpec, Instant)> = None;
        loop {
            let begun = Instant::now();
            self.monitor.beat(Loop::Lease);
            match tokio::time::timeout(RENEWAL_LIMIT, self.try_acquire(&mut seen)).await {
                Ok(Ok(true)) => {
                    self.note_renewal(begun);
                    return Ok(());
                }
                Ok(Ok(false)) => {}
                Ok(Err(error)) if matches!(code(&error), 401 | 403) => return Err(error),
                Ok(Err(error)) => {
                    self.monitor.metrics.count_error(ErrorSource::Kubernetes);
                    tracing::warn!(%error, "the lease cannot be read or written");
                }
                Err(_) => {
                    self.monitor.metrics.count_error(ErrorSource::Kubernetes);
                    tracing::warn!("the Kubernetes API does not answer a request for the lease");
                }
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    async fn try_acquire(
        &self,
        seen: &mut Option<(LeaseSpec, Instant)>,
    ) -> Result<bool, kube::Error> {
        let found = self.api.get_opt(&self.name).await?;
        self.monitor.note_answer();
        let Some(lease) = found else { return self.write(None).await };
        self.monitor.tenant.read(lease.metadata.annotations.as_ref());
        let spec = lease.spec.clone().unwrap_or_default();
        let is_free = spec.holder_identity.as_deref().is_none_or(str::is_empty);
        if is_free || spec.holder_identity.as_deref() == Some(&self.identity) {
            return self.write(Some(lease)).await;
        }
        let time = spec.lease_duration_seconds.and_then(|time| u64::try_from(time).ok());
        let time = time.map_or(LEASE_TIME, Duration::from_secs);
        match seen {
            Some((before, since)) if *before == spec => {
                if since.elapsed() >= time {
                    return self.write(Some(lease)).await;
                }
            }
            _ => {
                let holder = spec.holder_identity.as_deref().unwrap_or_default();
                tracing::debug!(holder, "another controller holds the lease");
                *seen = Some((spec, Instant::now()));
            }
        }
        Ok(false)
    }

    /// Renews the lease until that fails for too long, or another controller has it.
    pub async fn hold(&self) {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(INTERVAL).await;
            let begun = Instant::now();
            self.monitor.beat(Loop::Lease);
            let left = RENEWAL_LIMIT.saturating_sub(renewed.elapsed());
            match tokio::time::timeout(left, self.renew()).await {
                Ok(Ok(true)) => {
                    renewed = begun;
                    self.note_renewal(begun);
                }
                Ok(Ok(false)) => {
                    tracing::error!("another controller has taken the lease");
                    return;
                }
                Ok(Err(error)) => {
                    self.monitor.metrics.count_error(ErrorSource::Kubernetes);
                    tracing::warn!(%error, "the lease is not renewed");
                }
                Err(_) => self.monitor.metrics.count_error(ErrorSource::Kubernetes),
            }
            if renewed.elapsed() >= RENEWAL_LIMIT {
                tracing::error!("the lease could not be renewed in time");
                return;
            }
        }
    }

    async fn renew(&self) -> Result<bool, kube::Error> {
        let found = self.api.get_opt(&self.name).await?;
        self.monitor.note_answer();
        let Some(lease) = found else { return self.write(None).await };
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref());
        if holder != Some(&self.identity) {
            return Ok(false);
        }
        self.write(Some(lease)).await
    }

    /// Gives the lease up, so that another controller need not wait.
    pub async fn release(&self) {
        let released = async {
            let Some(mut lease) = self.api.get_opt(&self.name).await? else { return Ok(()) };
            let spec = lease.spec.get_or_insert_default();
            if spec.holder_identity.as_deref() == Some(&self.identity) {
                spec.holder_identity = Some(String::new());
                self.api.replace(&self.name, &PostParams::default(), &lease).await?;
            }
            Ok::<_, kube::Error>(())
        };
        match tokio::time::timeout(INTERVAL, released).await {
            Ok(Err(error)) => tracing::warn!(%error, "the lease is not released"),
            Err(_) => tracing::warn!("the lease is not released in time"),
            Ok(Ok(())) => {}
        }
    }
}
