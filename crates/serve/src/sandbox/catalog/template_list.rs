//! The templates of a server. A reload replaces some.
//!
//! Promises: new sandboxes are made from the templates of the last reload. A sandbox keeps the
//! template that it was made from, or that this server first restored it with. The store keeps the
//! state of a replaced template for its last sandbox, since saves of the sandbox build on it. The
//! first sweep after the end of that sandbox removes the state.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use hyper::StatusCode;

use crate::error::ServeError;
use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::catalog::template::{Warm, template_tag};
use crate::sandbox::config::{SandboxConfig, Template};
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
use crate::sandbox::records::store::StoredSnapshot;

/// The names of states of templates that a reload has opened begin like this. The next start of the
/// server removes them.
pub(crate) const RELOADED: &str = "reloaded-";

/// Names that clients of E2B have for its usual templates, and that stand for the first template.
const DEFAULT_TEMPLATES: [&str; 4] = ["", "base", "code-interpreter-v1", "code-interpreter"];

/// The templates.
pub(crate) struct TemplateList {
    /// At least one.
    current: RwLock<Arc<[Arc<Warm>]>>,
    /// The first without grants, once a state of a removed template needs it.
    ungranted: Mutex<Option<Arc<Warm>>>,
    /// Replaced templates that sandboxes may have, closed images, and the names of their states.
    replaced: Mutex<Vec<(Weak<Warm>, String)>>,
    /// Reloads that opened templates.
    reloads: AtomicU64,
}

impl TemplateList {
    pub(crate) fn new(templates: Vec<Arc<Warm>>) -> Self {
        Self {
            current: RwLock::new(templates.into()),
            ungranted: Mutex::default(),
            replaced: Mutex::default(),
            reloads: AtomicU64::new(0),
        }
    }

    /// All of them, in the order of the configuration.
    pub(crate) fn all(&self) -> Arc<[Arc<Warm>]> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Their configuration.
    pub(crate) fn configured(&self) -> Vec<Template> {
        self.all().iter().map(|template| template.config.clone()).collect()
    }

    /// The template of exactly this name.
    pub(crate) fn named(&self, name: &str) -> Option<Arc<Warm>> {
        self.all().iter().find(|template| template.config.name == name).cloned()
    }

    /// The first without its grants, the same until a reload.
    fn ungranted(&self) -> Arc<Warm> {
        // Held over the look at the first, so a reload clears the one of before.
        let mut ungranted = lock(&self.ungranted);
        let make = || Arc::new(self.all()[0].without_grants());
        ungranted.get_or_insert_with(make).clone()
    }

    /// Exchanges the templates. Returns those of before.
    fn replace(&self, templates: Vec<Arc<Warm>>) -> Arc<[Arc<Warm>]> {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *current, templates.into());
        let is_current = |tag: &str| current.iter().any(|warm| warm.tag == tag);
        before.iter().filter(|warm| !is_current(&warm.tag)).for_each(|warm| self.retire(warm));
        drop(current);
        lock(&self.ungranted).take();
        before
    }

    /// The store needs the state of a template no longer than the template is in use.
    pub(crate) fn retire(&self, warm: &Arc<Warm>) {
        lock(&self.replaced).push((Arc::downgrade(warm), warm.tag.clone()));
    }

    /// Takes out the names of states that no sandbox needs any more.
    fn take_unused(&self) -> Vec<String> {
        let mut replaced = lock(&self.replaced);
        let unused = replaced.extract_if(.., |(warm, _)| warm.strong_count() == 0);
        unused.map(|(_, tag)| tag).collect()
    }
}

impl Sandboxes {
    /// Whether a template of exactly this name exists.
    pub(crate) fn has_template(&self, name: &str) -> bool {
        self.templates.named(name).is_some()
    }

    /// The origin of new sandboxes with this name. A template of the configuration comes first,
    /// then a build or a snapshot, then the first template by the names of E2B for it.
    pub(crate) async fn resolve(
        &self,
        tenant: &str,
        name: &str,
    ) -> Result<(Arc<Warm>, Option<StoredSnapshot>), ErrorResponse> {
        if let Some(named) = self.templates.named(name) {
            return Ok((named, None));
        }
        match self.snapshot(tenant, name).await? {
            Some(known) => Ok((self.template_of_state(&known.record.template), Some(known))),
            None => Ok((self.default_template(name)?, None)),
        }
    }

    /// The same origin, if it is a template or a build of one. A snapshot has the memory of a
    /// sandbox, and is refused even with a name of the first template.
    pub(crate) async fn resolve_template(
        &self,
        tenant: &str,
        name: &str,
    ) -> Result<(Arc<Warm>, Option<StoredSnapshot>), ErrorResponse> {
        let found = self.resolve(tenant, name).await?;
        if found.1.as_ref().is_some_and(|known| known.record.built.is_none()) {
            let message = format!("there is no template `{name}`: it is a snapshot");
            return Err(ErrorResponse::new(StatusCode::NOT_FOUND, message));
        }
        Ok(found)
    }

    /// The first template, for the names that clients of E2B have for it.
    pub(crate) fn default_template(&self, name: &str) -> Result<Arc<Warm>, ErrorResponse> {
        let templates = self.templates.all();
        if DEFAULT_TEMPLATES.contains(&name) {
            return Ok(templates[0].clone());
        }
        let known: Vec<_> = templates.iter().map(|known| known.config.name.as_str()).collect();
        let message = format!(
            "there is no template or snapshot `{name}`; the templates are {}",
            known.join(", ")
        );
        Err(ErrorResponse::new(StatusCode::NOT_FOUND, message))
    }

    /// The present template of this name. If the configuration has none, the first without its
    /// `net` and `dirs`, because a guest reaches nothing that its own template did not grant.
    pub(crate) fn template(&self, name: &str) -> Arc<Warm> {
        self.templates.named(name).unwrap_or_else(|| self.templates.ungranted())
    }

    /// As [`Sandboxes::template`], for a saved state that is opened now.
    pub(crate) fn template_of_state(&self, name: &str) -> Arc<Warm> {
        if !self.has_template(name) {
            tracing::warn!(
                template = name,
                "the configuration has no template of this name: a saved state gets no `net` and `dirs`"
            );
        }
        self.template(name)
    }

    /// The template of a sandbox.
    pub(crate) fn template_of(&self, sandbox: &Sandbox) -> Arc<Warm> {
        sandbox.warm.get().cloned().unwrap_or_else(|| self.template(&sandbox.template))
    }

    /// Opens the templates of `config` that differ from the present ones. Nothing is exchanged.
    pub(crate) async fn reopen_templates(
        self: &Arc<Self>,
        config: &SandboxConfig,
    ) -> Result<Vec<Arc<Warm>>, ServeError> {
        let (this, wanted) = (self.clone(), config.templates.clone());
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let failed = |source: afresh::Cause| ServeError::Sandboxes { source };
        let open = move || {
            if let Err(Ok(unwanted)) = sender.send(this.reopen_now(&wanted)) {
                this.discard(unwanted);
            }
        };
        let opening = std::thread::Builder::new().name("afresh-open".to_owned());
        opening.spawn(open).map_err(|error| failed(error.into()))?;
        receiver.await.map_err(|error| failed(error.into()))?.map_err(failed)
    }

    fn reopen_now(&self, wanted: &[Template]) -> Result<Vec<Arc<Warm>>, afresh::Cause> {
        if wanted.is_empty() {
            return Err("no template is named that sandboxes could be made from".into());
        }
        let present = self.templates.all();
        let reload = self.templates.reloads.fetch_add(1, Ordering::Relaxed) + 1;
        let mut templates = Vec::with_capacity(wanted.len());
        for template in wanted {
            match self.reopen_one(template, &present, reload) {
                Ok(warm) => templates.push(warm),
                Err(error) => {
                    self.discard(templates);
                    return Err(error);
                }
            }
        }
        Ok(templates)
    }

    /// The present template of this configuration, or a new one.
    fn reopen_one(
        &self,
        template: &Template,
        present: &[Arc<Warm>],
        reload: u64,
    ) -> Result<Arc<Warm>, afresh::Cause> {
        let same = |warm: &&Arc<Warm>| warm.config.is_equivalent(template);
        if let Some(warm) = present.iter().find(same)
            && warm.is_unchanged(&self.config)?
        {
            return Ok(warm.clone());
        }
        let tag = format!("{RELOADED}{reload}-{}", template_tag(&template.name));
        let opened = Warm::open_as(&self.config, template, Some(&*self.ledger), tag.clone());
        opened.map(Arc::new).inspect_err(|_| self.untag(&tag))
    }

    /// Removes the states of templates that were opened for nothing.
    fn discard(&self, templates: Vec<Arc<Warm>>) {
        let present = self.templates.all();
        for warm in templates {
            if !present.iter().any(|known| Arc::ptr_eq(known, &warm)) {
                let tag = warm.tag.clone();
                drop(warm);
                self.untag(&tag);
            }
        }
    }

    /// Makes new sandboxes from these templates. Present ones keep theirs.
    pub(crate) fn replace_templates(self: &Arc<Self>, templates: Vec<Arc<Warm>>) {
        let before = self.templates.replace(templates);
        // Images have the options of a template. Later ones are kept only for a present template.
        let images = std::mem::take(&mut *lock(&self.builds.images));
        images.values().for_each(|image| self.templates.retire(&image.warm));
        // New sandboxes of snapshots have the options of the new templates.
        let snapshots = std::mem::take(&mut *lock(&self.opened));
        let this = self.clone();
        // Guests end, and the store is written.
        tokio::task::spawn_blocking(move || {
            drop((before, images, snapshots));
            this.untag_unused_templates();
        });
    }

    /// Removes the states of replaced templates whose last sandbox has ended.
    pub(crate) fn collect_templates(self: &Arc<Self>) {
        if lock(&self.templates.replaced).iter().any(|(warm, _)| warm.strong_count() == 0) {
            let this = self.clone();
            tokio::task::spawn_blocking(move || this.untag_unused_templates());
        }
    }

    fn untag_unused_templates(&self) {
        self.templates.take_unused().iter().for_each(|tag| self.untag(tag));
    }
}
