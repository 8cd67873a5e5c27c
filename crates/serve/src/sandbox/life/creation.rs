//! New sandboxes: of a template, a snapshot or an image.
//!
//! Promises: a tenant's new sandbox is within its budgets before its client is answered.

use std::sync::Arc;
use std::time::Duration;

use afresh::Session;
use hyper::StatusCode;

use crate::concurrency::Permit;
use crate::error_response::ErrorResponse;
use crate::sandbox::catalog::base_state::BaseState;
use crate::sandbox::http::session_error::refused;
use crate::sandbox::life::random::random;
use crate::sandbox::life::registry::Sandboxes;
use crate::sandbox::life::sandbox::{Residency, Sandbox, Times, next_event};
use crate::sandbox::life::tasks::blocking;
use crate::sandbox::records::record::SandboxSettings;
use crate::sandbox::tenants::charge::Charge;

/// Options of a new sandbox.
#[derive(Clone, Debug)]
pub(crate) struct CreateOptions {
    pub(crate) template: String,
    pub(crate) time: Duration,
    pub(crate) pause_at_end: bool,
    pub(crate) settings: SandboxSettings,
}

impl Sandboxes {
    /// Makes a sandbox of a template or a snapshot.
    pub(crate) async fn create(
        self: &Arc<Self>,
        tenant: &Arc<str>,
        wanted: CreateOptions,
    ) -> Result<Arc<Sandbox>, ErrorResponse> {
        self.memory.admit(1).await?;
        let snapshot = match self.has_template(&wanted.template) {
            true => None,
            false => self.snapshot(tenant, &wanted.template).await?,
        };
        let template = snapshot.as_ref().map_or(&wanted.template, |known| &known.record.template);
        let warm = match snapshot.is_some() || self.has_template(template) {
            true => self.template(template).clone(),
            false => self.usual_template(template)?.clone(),
        };
        let envs = snapshot.as_ref().map(|known| known.record.envs.clone()).unwrap_or_default();
        let directory = snapshot.as_ref().and_then(|known| known.record.directory.clone());
        let root = snapshot.as_ref().is_some_and(|known| known.record.root);
        let has_envs = !(envs.is_empty() && wanted.settings.envs.is_empty());
        if has_envs && !warm.config.linux {
            let message = "`envVars` needs a template of a Linux program; this one evaluates code";
            return Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message));
        }
        wanted.settings.network.accept(&warm.config)?;
        let name = warm.config.name.clone();
        let base = match snapshot.as_ref().map(|known| &known.record) {
            None => Some(BaseState::template(&warm.identity)),
            Some(record) if record.built.is_some() => Some(BaseState::build(&record.id)),
            Some(record) => record.base.clone(),
        };
        let session = match snapshot {
            None => warm.guest.session().map_err(|error| refused(&error))?,
            Some(known) => {
                let _place = self.pull_place(tenant).await?;
                let this = self.clone();
                blocking(move || {
                    this.snapshot_guest(&warm, &known)?.session().map_err(|e| refused(&e))
                })
                .await?
            }
        };
        let times = self.times(wanted.time, wanted.pause_at_end);
        let due = next_event(&session);
        let mut settings = wanted.settings;
        settings.envs = envs.into_iter().chain(settings.envs).collect();
        settings.directory = settings.directory.or(directory);
        settings.root |= root;
        let sandbox = self.assemble(tenant, (name, base), settings, session, times)?;
        self.admit(vec![sandbox.clone()]).await?;
        self.goes_on(&sandbox, due);
        Ok(sandbox)
    }

    /// A place among the snapshots and images that are opened now.
    pub(crate) async fn pull_place(&self, tenant: &Arc<str>) -> Result<Permit, ErrorResponse> {
        self.pulls.enter(&self.accounts, tenant, self.config.call_timeout).await
    }

    /// A new sandbox. Without a base it is not restarted without its memory.
    pub(crate) fn assemble(
        &self,
        tenant: &Arc<str>,
        (template, base): (String, Option<BaseState>),
        settings: SandboxSettings,
        session: Session,
        times: Times,
    ) -> Result<Arc<Sandbox>, ErrorResponse> {
        settings.check_size()?;
        let charge = Charge::default();
        charge.measure(&session);
        let life = Residency::Live(Box::new(session));
        let of = (tenant.clone(), template);
        let id = self.ledger.new_id(tenant)?;
        let mut sandbox = Sandbox::new(id, random(24)?, of, settings, life, times);
        (sandbox.charge, sandbox.base) = (charge, base);
        Ok(Arc::new(sandbox))
    }
}
