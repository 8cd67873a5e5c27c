//! Restarts of sandboxes from the state that they began in, with their files alone, and of their
//! code.
//!
//! Promises: a restarted sandbox has the memory and the programs of exactly the state that it began
//! in: a template of the configuration, with the same guest and the same options, or a build of a
//! template. Sandboxes of another origin are not restarted: their files belong to other programs.
//! May break it: a build that was deleted between a pause and the next resume; that resume keeps
//! the memory, and the log has the reason.

use std::sync::Arc;

use afresh::files::{Time, Tree};
use afresh::{Guest, Session};
use hyper::StatusCode;

use crate::error_response::ErrorResponse;
use crate::sandbox::agent::connect::went_back;
use crate::sandbox::catalog::base_guest::BaseGuest;
use crate::sandbox::catalog::base_state::BaseKind;
use crate::sandbox::http::session_error::refused;
use crate::sandbox::lifecycle::random::random;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
use crate::sandbox::transfer::file_entry;

/// The identity of a start of a Linux guest, which is a file.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Gives a session these files.
fn put_files(session: &mut Session, files: Tree) -> Result<(), ErrorResponse> {
    let put = session.files().map_err(|error| refused(&error))?.change("", |old| {
        *old = files;
        Ok(())
    });
    put.map_err(|error| refused(&error))
}

/// Takes a session back to its first state, with its present files.
fn roll_back_code(sandbox: &Sandbox, session: &mut Session) -> Result<(), ErrorResponse> {
    let root = session.tree().first().map(|state| state.id);
    let root = root.ok_or_else(|| {
        ErrorResponse::new(
            StatusCode::CONFLICT,
            "the sandbox has no first state to return to; create a new one",
        )
    })?;
    let files = session.files().map(|files| files.tree()).ok();
    sandbox.roll_back(session, root, &went_back())?;
    files.map_or(Ok(()), |files| put_files(session, files))
}

impl Sandboxes {
    /// The guest that a sandbox is restarted from without its memory, or the refusal of that.
    pub(crate) async fn base_guest(&self, sandbox: &Sandbox) -> Result<BaseGuest, ErrorResponse> {
        self.find_base(sandbox).await?.map_err(|why| {
            let message = format!(
                "the sandbox {} cannot lose its memory and keep its files: {why}; pause it with its memory",
                sandbox.id
            );
            // Clients take a conflict for a sandbox that is paused already.
            ErrorResponse::new(StatusCode::BAD_REQUEST, message)
        })
    }

    /// The guest of the state that a sandbox began in, or the reason why it is not here.
    async fn find_base(
        &self,
        sandbox: &Sandbox,
    ) -> Result<Result<BaseGuest, &'static str>, ErrorResponse> {
        let warm = self.template_of(sandbox);
        Ok(match sandbox.base.as_ref().and_then(|base| base.kind()) {
            Some(BaseKind::Template(identity)) => match warm.identity == identity {
                true => Ok(BaseGuest::Template(warm.clone())),
                false => Err("the template that it began in has changed since"),
            },
            Some(BaseKind::Build(id)) => match self.snapshot(&sandbox.tenant, id).await? {
                Some(known) => Ok(BaseGuest::Build(warm.clone(), Box::new(known))),
                None => Err("the build that it began in was deleted"),
            },
            None => Err("the state that it began in is not known"),
        })
    }

    /// Takes the code of a sandbox back to the state that the sandbox began in. The files stay.
    pub(crate) async fn restart_code(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
    ) -> Result<(), ErrorResponse> {
        // Only a sandbox that came back from the store needs it.
        let base = self.find_base(sandbox).await;
        let (this, own) = (self.clone(), sandbox.clone());
        self.with(sandbox, move |session| match own.first_is_saved() {
            true => this.replace_session(&own, session, base?),
            false => roll_back_code(&own, session),
        })
        .await
    }

    /// Replaces the guest of a sandbox that came back from the store: its tree has no earlier state
    /// than the saved one.
    fn replace_session(
        &self,
        sandbox: &Sandbox,
        session: &mut Session,
        base: Result<BaseGuest, &'static str>,
    ) -> Result<(), ErrorResponse> {
        let refuse = |why: &str| ErrorResponse::new(StatusCode::CONFLICT, why);
        let base = base.map_err(|why| {
            refuse(&format!("the context cannot be restarted: {why}; make a new sandbox"))
        })?;
        if session.tree().iter().any(|state| state.name.is_some()) {
            let why = "the sandbox came back from the store, and the restart of its context would drop its \
                       checkpoints; drop them first";
            return Err(refuse(why));
        }
        let fresh = match self.restart_guest(&base, session) {
            // It has no files.
            Err(refusal) if refusal.status == StatusCode::NOT_IMPLEMENTED => {
                self.guest_of(&base)?.session().map_err(|error| refused(&error))
            }
            fresh => fresh,
        };
        *session = fresh?;
        sandbox.set_first_is_saved(false);
        sandbox.leave_fork_group();
        sandbox.forget_marks(&went_back());
        Ok(())
    }

    /// The guest of a base. Blocks.
    fn guest_of(&self, base: &BaseGuest) -> Result<Guest, ErrorResponse> {
        match base {
            BaseGuest::Template(warm) => Ok(warm.guest.clone()),
            BaseGuest::Build(warm, known) => self.snapshot_guest(warm, known),
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
        let mut fresh = self.guest_of(base)?.session().map_err(|error| refused(&error))?;
        put_files(&mut fresh, tree)?;
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
        sandbox.set_first_is_saved(false);
        drop(session);
        self.admit_restarted(sandbox, &fresh)?;
        Ok(fresh)
    }
}
