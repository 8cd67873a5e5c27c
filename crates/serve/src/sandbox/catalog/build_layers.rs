//! States after the steps of builds, from which later builds begin.
//!
//! Promises: a tenant has at most [`MAX_LAYERS`] of them, and the oldest go first.

use std::sync::Arc;

use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::catalog::snapshots::SnapshotOptions;
use crate::sandbox::catalog::step_environment::StepEnvironment;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;

/// Maximum states after steps that are kept for a tenant.
const MAX_LAYERS: usize = 64;

impl Sandboxes {
    /// Keeps the state after a step for later builds. A fleet keeps none: no host would remove
    /// those of a lost host.
    pub(super) async fn keep_layer(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        key: &str,
        around: &StepEnvironment,
    ) -> Result<(), ErrorResponse> {
        if self.ledger.releases() {
            return Ok(());
        }
        let keep = SnapshotOptions {
            names: vec![key.to_owned()],
            built: None,
            envs: around.envs.clone(),
            directory: around.directory.clone(),
            root: around.user.is_root(),
        };
        // A forced build, or one at the same time, has made it before.
        let earlier = self.snapshot(&sandbox.tenant, key).await?;
        self.keep(sandbox, keep).await?;
        if let Some(earlier) = earlier {
            self.forget(earlier.record).await?;
        }
        let exceeds = {
            let mut layers = lock(&self.builds.layers);
            let own = layers.entry(sandbox.tenant.to_string()).or_default();
            own.retain(|known| known != key);
            own.push(key.to_owned());
            own.len() > MAX_LAYERS
        };
        if exceeds {
            self.forget_oldest_layer(&sandbox.tenant).await?;
        }
        Ok(())
    }

    /// Forgets the oldest state after a step of a tenant. False if there is none.
    pub(crate) async fn forget_oldest_layer(
        self: &Arc<Self>,
        tenant: &Arc<str>,
    ) -> Result<bool, ErrorResponse> {
        let oldest = {
            let mut layers = lock(&self.builds.layers);
            let own = layers.get_mut(&**tenant).filter(|own| !own.is_empty());
            own.map(|own| own.remove(0))
        };
        let Some(oldest) = oldest else { return Ok(false) };
        if let Some(known) = self.snapshot(tenant, &oldest).await? {
            self.forget(known.record).await?;
        }
        Ok(true)
    }
}
