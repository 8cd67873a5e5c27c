//! The files of a sandbox, read and changed in its turn.
//!
//! Promises: a change that fails has no effect. A read does not wait for a call of a Linux program:
//! it gets the files as they are during the call. It is a call itself: its tenant has CPU time
//! left, it has a place among those of all tenants, and its CPU time counts.

use std::sync::Arc;
#[cfg(linux_guests)]
use std::sync::atomic::Ordering;
#[cfg(linux_guests)]
use std::time::Duration;

use afresh::files::Tree;

#[cfg(linux_guests)]
use crate::cpu_time::CpuTimer;
use crate::error_response::ErrorResponse;
use crate::sandbox::http::session_error::refused;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
#[cfg(linux_guests)]
use crate::sandbox::lifecycle::tasks::blocking;
#[cfg(linux_guests)]
use crate::sandbox::lifecycle::undo_point::Operation;

/// How long a read of files waits for a view of those of a running program, before it waits for the
/// program.
#[cfg(linux_guests)]
const VIEW_PATIENCE: Duration = Duration::from_millis(500);

#[cfg(linux_guests)]
impl Sandboxes {
    /// Reads the files of a Linux program that is called now, as they are during the call. Gives
    /// `read` back if no program shows its files.
    async fn read_running<R, Read>(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        read: Read,
    ) -> Result<Result<R, Read>, ErrorResponse>
    where
        R: Send + 'static,
        Read: FnOnce(&Tree) -> Result<R, ErrorResponse> + Send + 'static,
    {
        if sandbox.life.try_lock().is_ok() || sandbox.lifetime().paused {
            return Ok(Err(read));
        }
        let waiting = sandbox.wait(Operation::Call)?;
        self.accounts.check_call(&sandbox.tenant)?;
        // Not of those for calls: the call that runs may have the only one of its tenant.
        let patience = self.config.call_timeout;
        let place = self.views.enter(&self.accounts, &sandbox.tenant, patience).await?;
        self.ledger.check(&**sandbox)?;
        let (this, own) = (self.clone(), sandbox.clone());
        blocking(move || {
            let (_place, _waiting) = (place, waiting);
            let timer = CpuTimer::start();
            let Some(tree) = own.commands.view.look(VIEW_PATIENCE) else { return Ok(Err(read)) };
            let done = read(&tree);
            let ran = timer.stop();
            own.usage.ran(ran);
            this.accounts.add_run(&own.tenant, ran, true);
            if own.killed.load(Ordering::Relaxed) {
                return Err(Sandbox::not_running(&own.id));
            }
            this.ledger.check(&*own)?;
            done.map(Ok)
        })
        .await
    }
}

impl Sandboxes {
    /// Reads the files of a sandbox. While a Linux program is called they are as they are then.
    pub(crate) async fn tree<R: Send + 'static>(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        read: impl FnOnce(&Tree) -> Result<R, ErrorResponse> + Send + 'static,
    ) -> Result<R, ErrorResponse> {
        #[cfg(linux_guests)]
        let read = match self.read_running(sandbox, read).await? {
            Ok(done) => return Ok(done),
            Err(read) => read,
        };
        self.with(sandbox, |session| {
            let tree = session.files().map_err(|error| refused(&error))?.tree();
            read(&tree)
        })
        .await
    }

    /// Changes the files of a sandbox. A failing change has no effect.
    pub(crate) async fn files<R: Send + 'static>(
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
