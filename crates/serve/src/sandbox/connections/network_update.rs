//! The request that replaces the network rules of a sandbox.

use std::sync::Arc;

use axum::response::IntoResponse;
use bytes::Bytes;
use hyper::StatusCode;

use crate::error_response::ErrorResponse;
use crate::sandbox::http::authorization::TenantSandbox;
use crate::sandbox::http::control::refuse_unsupported;
use crate::sandbox::http::response::{Answer, json};
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
use crate::sandbox::lifecycle::tasks::to_its_end;
use crate::sandbox::records::record::SandboxSettings;
use crate::sandbox::request_body::network_rules::NetworkRules;
use crate::sandbox::request_body::requests::NetworkUpdate;

/// Replaces the rules of a sandbox. A field without a value is cleared.
pub(crate) async fn update(chosen: TenantSandbox, body: Bytes) -> Answer {
    let update: NetworkUpdate = json(&body)?;
    refuse_unsupported(update.unsupported())?;
    let (all, sandbox) = chosen.sandbox()?;
    let rules = update.rules();
    rules.accept(&all.template_of(&sandbox).config)?;
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
