//! Restarts of sandboxes from the state that they began in, with their files alone.
//!
//! Promises: a restarted sandbox has the memory and the programs of exactly the state that it began
//! in: a template of the configuration, with the same guest and the same options, or a build of a
//! template. Sandboxes of another origin are not restarted: their files belong to other programs.
//! May break it: a build that was deleted between a pause and the next resume; that resume keeps
//! the memory, and the log has the reason.

use afresh::Session;
use afresh::files::Time;
use hyper::StatusCode;

use crate::error_response::ErrorResponse;
use crate::sandbox::catalog::base_guest::BaseGuest;
use crate::sandbox::catalog::base_state::BaseKind;
use crate::sandbox::http::session_error::refused;
use crate::sandbox::lifecycle::random::random;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
use crate::sandbox::transfer::file_entry;

/// The identity of a start of a Linux guest, which is a file.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

impl Sandboxes {
    /// The guest that a sandbox is restarted from without its memory, or the refusal of that.
    pub(crate) async fn base_guest(&self, sandbox: &Sandbox) -> Result<BaseGuest, ErrorResponse> {
        let refuse = |why: &str| {
            let message = format!(
                "the sandbox {} cannot lose its memory and keep its files: {why}; pause it with its memory",
                sandbox.id
            );
            // Clients take a conflict for a sandbox that is paused already.
            Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message))
        };
        let warm = self.template_of(sandbox);
        match sandbox.base.as_ref().and_then(|base| base.kind()) {
            Some(BaseKind::Template(identity)) => match warm.identity == identity {
                true => Ok(BaseGuest::Template(warm.clone())),
                false => refuse("the template that it began in has changed since"),
            },
            Some(BaseKind::Build(id)) => match self.snapshot(&sandbox.tenant, id).await? {
                Some(known) => Ok(BaseGuest::Build(warm.clone(), Box::new(known))),
                None => refuse("the build that it began in was deleted"),
            },
            None => refuse("the state that it began in is not known"),
        }
    }

    /// The guest that a saved sandbox is restarted from when it is resumed, if its memory is to be
    /// dropped.
    pub(crate) async fn restart_source(
        &self,
        sandbox: &Sandbox,
    ) -> Result<Option<BaseGuest>, ErrorResponse> {
        if !sandbox.restarts() {
            return Ok(None);
        }
        match self.base_guest(sandbox).await {
            Err(refusal) if refusal.status == StatusCode::BAD_REQUEST => {
                tracing::warn!(id = sandbox.id, why = refusal.message, "resumed with its memory");
                Ok(None)
            }
            found => found.map(Some),
        }
    }

    /// Starts `base` with the files of a session. Blocks.
    pub(crate) fn restart_guest(
        &self,
        base: &BaseGuest,
        session: &mut Session,
    ) -> Result<Session, ErrorResponse> {
        let mut tree = session.files().map_err(|error| refused(&error))?.tree();
        if tree.find(BOOT_ID).is_ok() {
            let id = random(16)?;
            let parts = [&id[..8], &id[8..12], &id[12..16], &id[16..20], &id[20..]];
            let text = format!("{}\n", parts.join("-"));
            tree.write_path(BOOT_ID, text.as_bytes(), Time::now())
                .map_err(|error| file_entry::refused(BOOT_ID, &error))?;
        }
        let guest = match base {
            BaseGuest::Template(warm) => warm.guest.clone(),
            BaseGuest::Build(warm, known) => self.snapshot_guest(warm, known)?,
        };
        let mut fresh = guest.session().map_err(|error| refused(&error))?;
        let put = fresh.files().map_err(|error| refused(&error))?.change("", |old| {
            *old = tree;
            Ok(())
        });
        put.map_err(|error| refused(&error))?;
        Ok(fresh)
    }

    /// Restarts a sandbox that comes back from the store, with a charge of the memory that it has
    /// then. Blocks.
    pub(crate) fn restart_resumed(
        &self,
        sandbox: &Sandbox,
        base: &BaseGuest,
        mut session: Session,
    ) -> Result<Session, ErrorResponse> {
        let fresh = match self.restart_guest(base, &mut session) {
            // A guest without files has nothing else to keep.
            Err(refusal) if refusal.status == StatusCode::NOT_IMPLEMENTED => {
                tracing::warn!(id = sandbox.id, why = refusal.message, "resumed with its memory");
                self.admit_restarted(sandbox, &session)?;
                return Ok(session);
            }
            fresh => fresh?,
        };
        drop(session);
        self.admit_restarted(sandbox, &fresh)?;
        Ok(fresh)
    }
}
