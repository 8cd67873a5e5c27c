//! The files of a sandbox, read and changed in its turn.
//!
//! Promises: a change that fails has no effect. A read does not wait for a call of a Linux program:
//! it gets the files as they are during the call.

use std::sync::Arc;
#[cfg(feature = "linux")]
use std::time::Duration;

use afresh::files::Tree;

use super::registry::Sandboxes;
use super::sandbox::Sandbox;
use super::session_error::refused;
#[cfg(feature = "linux")]
use super::tasks::blocking;
use crate::error_response::ErrorResponse;

/// How long a read of files waits for a view of those of a running program, before it waits for the
/// program.
#[cfg(feature = "linux")]
const VIEW_PATIENCE: Duration = Duration::from_millis(500);

/// The files of a Linux program that is called now, as they are during the call.
#[cfg(feature = "linux")]
async fn running_files(sandbox: &Arc<Sandbox>) -> Result<Option<Tree>, ErrorResponse> {
    if sandbox.life.try_lock().is_ok() || sandbox.times().paused {
        return Ok(None);
    }
    let _waiting = sandbox.wait()?;
    let view = sandbox.commands.view.clone();
    blocking(move || Ok(view.look(VIEW_PATIENCE))).await
}

impl Sandboxes {
    /// Reads the files of a sandbox. While a Linux program is called they are as they are then.
    pub(super) async fn tree<R: Send + 'static>(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        read: impl FnOnce(&Tree) -> Result<R, ErrorResponse> + Send + 'static,
    ) -> Result<R, ErrorResponse> {
        #[cfg(feature = "linux")]
        if let Some(tree) = running_files(sandbox).await? {
            self.ledger.check(&**sandbox)?;
            return blocking(move || read(&tree)).await;
        }
        self.with(sandbox, |session| {
            let tree = session.files().map_err(|error| refused(&error))?.tree();
            read(&tree)
        })
        .await
    }

    /// Changes the files of a sandbox. A failing change has no effect.
    pub(super) async fn files<R: Send + 'static>(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        change: impl FnOnce(&mut Tree) -> Result<R, ErrorResponse> + Send + 'static,
    ) -> Result<R, ErrorResponse> {
        self.with(sandbox, |session| {
            let mut files = session.files().map_err(|error| refused(&error))?;
            let mut tree = files.tree();
            let result = change(&mut tree)?;
            let put = files.change("", |old| {
                *old = tree;
                Ok(())
            });
            put.map_err(|error| refused(&error))?;
            Ok(result)
        })
        .await
    }
}
