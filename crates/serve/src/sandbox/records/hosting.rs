//! The sandboxes of this server for its fleet: which it has, and how they come and go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Body;
use hyper::{HeaderMap, Request};

use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::agent::connect::ConnectError;
#[cfg(linux_guests)]
use crate::sandbox::connections::port;
use crate::sandbox::http::authorization::{
    no_token, shows_token, shows_traffic_token, takes_traffic_token,
};
use crate::sandbox::http::signature::is_signed_by;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::{Residency, Sandbox};
use crate::sandbox::lifecycle::termination::end_session;
use crate::sandbox::records::store::{
    OwnedEntry, SandboxAccess, SandboxHost, SandboxRecord, StoreEntry, StoredSandbox, TenantUse,
};

impl SandboxHost for Sandboxes {
    fn has(&self, id: &str) -> bool {
        lock(&self.all).contains_key(id) || lock(&self.killed).contains_key(id)
    }

    fn check(&self, id: &str) -> Result<(), ErrorResponse> {
        match self.any(id) {
            Some(sandbox) => self.ledger.check(&*sandbox),
            None => Ok(()),
        }
    }

    fn proves(&self, request: &Request<Body>, access: &SandboxAccess, inside: bool) -> bool {
        let headers = request.headers();
        if !inside {
            return self.config.keys.tenant(headers).is_ok_and(|tenant| tenant == access.tenant);
        }
        match self.is_for_port(headers) || takes_traffic_token(request.uri().path()) {
            true => shows_traffic_token(headers, &access.token),
            false => shows_token(headers, &access.token) || is_signed_by(request, &access.token),
        }
    }

    fn is_for_port(&self, headers: &HeaderMap) -> bool {
        #[cfg(linux_guests)]
        return port::of(headers).is_some();
        #[cfg(not(linux_guests))]
        {
            let _ = headers;
            false
        }
    }

    fn no_token(&self, headers: &HeaderMap, id: &str) -> ErrorResponse {
        #[cfg(linux_guests)]
        if let Some(port) = port::of(headers) {
            return port::no_token(id, port);
        }
        let _ = (headers, id);
        no_token()
    }

    fn tenant(&self, headers: &HeaderMap) -> Option<Arc<str>> {
        self.config.keys.tenant(headers).ok()
    }

    fn templates(&self) -> Vec<String> {
        self.templates.all().iter().map(|template| template.config.name.clone()).collect()
    }

    fn has_template(&self, name: &str) -> bool {
        self.templates.named(name).is_some()
    }

    fn template_digest(&self, name: Option<&str>) -> Option<String> {
        let fits = |known: &str| name.is_none_or(|name| known == name);
        let templates = self.templates.all();
        let found = templates.iter().find(|template| fits(&template.config.name));
        found.map(|template| template.digest.clone())
    }

    fn held_sources(&self) -> Vec<String> {
        let templates = self.templates.all();
        let templates = templates.iter().map(|template| template.digest.clone());
        let snapshots: Vec<String> = lock(&self.opened).keys().cloned().collect();
        templates.chain(snapshots).collect()
    }

    fn busy(&self) -> (usize, usize) {
        self.busy_calls()
    }

    fn live(&self) -> usize {
        self.count().0
    }

    fn tenant_uses(&self) -> Vec<(Arc<str>, TenantUse)> {
        let held = self.resource_use();
        self.accounts.uses(|tenant| held.get(tenant).map_or(0, |held| held.memory))
    }

    fn adopt(&self, record: SandboxRecord, owned_entry: OwnedEntry, is_current: &dyn Fn() -> bool) {
        let id = record.id.clone();
        self.remote_usage.subtract(&record.tenant, record.stored);
        let mut sandbox = Sandbox::recorded(record);
        let from = owned_entry.state.clone().into();
        let mut all = lock(&self.all);
        // Under the lock that `doubt_all` takes after the life was given up: one of the two sees
        // the other.
        let doubt = AtomicBool::new(!is_current());
        let owned_entry = Arc::new(Some(owned_entry).into());
        sandbox.standing = StoreEntry { owned_entry, doubt, from, ..StoreEntry::default() };
        all.insert(id, Arc::new(sandbox));
    }

    fn doubt_all(&self) {
        for sandbox in lock(&self.all).values() {
            sandbox.standing.doubt.store(true, Ordering::Release);
        }
    }

    fn doubtful(&self) -> Vec<Arc<dyn StoredSandbox>> {
        let all = lock(&self.all);
        let doubtful = all.values().filter(|one| one.standing.doubt.load(Ordering::Acquire));
        doubtful.map(|one| one.clone() as Arc<dyn StoredSandbox>).collect()
    }

    fn confirm(&self, sandbox: &dyn StoredSandbox, is_current: &dyn Fn() -> bool) {
        let _all = lock(&self.all);
        // As when one is adopted: a life that was given up confirms nothing.
        if is_current() {
            sandbox.entry().doubt.store(false, Ordering::Release);
        }
    }

    fn give_up(&self, id: &str) {
        let Some(sandbox) = lock(&self.all).remove(id) else { return };
        tokio::spawn(async move {
            // A call that is under way ends first; its answer is refused.
            end_session(&sandbox, Residency::Moved).await;
            sandbox.charge.downloads.end();
            let why = "another host has the sandbox now";
            sandbox.commands.end(&ConnectError::new("unavailable", why));
        });
    }
}
