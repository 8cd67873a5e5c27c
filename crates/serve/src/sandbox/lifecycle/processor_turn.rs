//! The processor of a call: the wait for it, and the refusal where none becomes free.

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Instant;

use hyper::StatusCode;

use crate::error_response::ErrorResponse;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;

impl Sandboxes {
    /// A processor for a call of the sandbox. It waits for one until `deadline`, and while the
    /// `client` is there: another attempt of the client would run together with this one.
    pub(super) fn take_processor(
        &self,
        sandbox: &Sandbox,
        deadline: Instant,
        client: &Weak<()>,
    ) -> Result<(), ErrorResponse> {
        let is_left = || client.strong_count() == 0;
        let weight = self.accounts.budgets().of(&sandbox.tenant).weight.unwrap_or(1);
        let waits = || sandbox.waits_until(deadline) && !is_left();
        let turn = self.processors.enter(&sandbox.tenant, weight, waits);
        if is_left() {
            let message = "the client left before its call began";
            return Err(ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, message));
        }
        let Some(mut turn) = turn else {
            return Err(self.no_processor(sandbox));
        };
        let account = self.accounts.of(&sandbox.tenant);
        turn.report_wait(self.processor_metrics.waits(account.label(&sandbox.tenant)));
        sandbox.commands.compute(turn);
        Ok(())
    }

    /// A call that got no processor before its deadline, or whose sandbox ended.
    pub(super) fn no_processor(&self, sandbox: &Sandbox) -> ErrorResponse {
        if sandbox.killed.load(Ordering::Relaxed) {
            return Sandbox::not_running(&sandbox.id);
        }
        let account = self.accounts.of(&sandbox.tenant);
        self.processor_metrics.count_refusal(account.label(&sandbox.tenant));
        let message = "no processor became free for the call; run fewer at a time, or try again";
        ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, message)
    }
}
