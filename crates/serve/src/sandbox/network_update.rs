//! The request that replaces the network rules of a sandbox.

use std::sync::Arc;

use axum::response::IntoResponse;
use bytes::Bytes;
use hyper::StatusCode;

use super::answer::{Answer, json};
use super::authorization::TenantSandbox;
use super::control::refuse_unsupported;
use super::network_rules::NetworkRules;
use super::record::SandboxSettings;
use super::registry::Sandboxes;
use super::requests::NetworkUpdate;
use super::sandbox::Sandbox;
use super::tasks::to_its_end;
use crate::error_response::ErrorResponse;

/// Replaces the rules of a sandbox. A field without a value is cleared.
pub(super) async fn update(chosen: TenantSandbox, body: Bytes) -> Answer {
    let update: NetworkUpdate = json(&body)?;
    refuse_unsupported(update.unsupported())?;
    let (all, sandbox) = chosen.sandbox()?;
    let rules = update.rules();
    rules.accept(&all.template(&sandbox.template).config)?;
    SandboxSettings { network: rules.clone(), ..sandbox.settings.clone() }.check_size()?;
    all.set_network(&sandbox, rules).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

impl Sandboxes {
    /// Replaces the rules of a sandbox. Its record has them before the client is answered. Where
    /// the record cannot be written, the rules before return.
    async fn set_network(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        rules: NetworkRules,
    ) -> Result<(), ErrorResponse> {
        let (this, sandbox, rules) = (self.clone(), sandbox.clone(), Arc::new(rules));
        // Also where the client leaves meanwhile.
        to_its_end(async move {
            sandbox.network.replace(rules.clone());
            match this.note(&sandbox, |_| sandbox.network.rules()).await {
                Ok(written) => sandbox.network.note_written(written),
                Err(error) => {
                    sandbox.network.undo(&rules);
                    return Err(error);
                }
            }
            Ok(())
        })
        .await
    }
}
