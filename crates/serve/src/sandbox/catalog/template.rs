//! Templates: warm guests that run code, kept in the store so that their sandboxes save
//! differences.

use std::collections::HashSet;
use std::path::Path;

use afresh::files::{Budget, Time, Tree};
use afresh::wasm::{Engine, EngineConfig, GuestOptions, Watch};
use afresh::{Guest, Options, Reference, SaveOptions, Sha256};
use afresh_interpreter::{Answer, HostCallbacks, Language, RUN, is_module, listener};

use crate::failure::describe;
use crate::sandbox::agent::output_router::OutputRouter;
use crate::sandbox::catalog::template_identity::TemplateIdentity;
use crate::sandbox::catalog::template_source::{LastSource, TemplateSource};
use crate::sandbox::config::{SandboxConfig, Template};
use crate::sandbox::lifecycle::undo_point::UndoPoint;
use crate::sandbox::records::record::state_reference;
use crate::sandbox::records::store::SandboxStore;
use crate::sandbox::tenants::stored_blobs::digests_of;

/// Maximum bytes of output from code or a command. Nothing of it is kept.
#[cfg(linux_guests)]
const MAX_OUTPUT_BYTES: usize = 1 << 30;

/// Interval of the decisions whether a program of a sandbox computes on.
#[cfg(linux_guests)]
const POLL_INTERVAL: std::time::Duration = std::time::Duration::from_millis(10);

/// A template, ready.
pub(crate) struct Warm {
    pub(crate) config: Template,
    pub(crate) language: &'static Language,
    pub(crate) guest: Guest,
    /// How saved states of it are opened.
    pub(crate) options: Options,
    /// Options for saved states of other templates, without the grants of this one.
    ungranted: Options,
    /// The name of its state in the store.
    pub(crate) tag: String,
    /// The digest of its manifest, on which the hosts of a fleet agree.
    #[cfg_attr(not(feature = "fleet"), expect(dead_code, reason = "for other hosts"))]
    pub(crate) digest: String,
    /// The blobs of its state, which its sandboxes are not charged for.
    pub(crate) blobs: HashSet<Sha256>,
    /// The digest of all that its guest comes from, the same after a restart or an upgrade of the
    /// server.
    pub(crate) identity: String,
}

/// Options of opening the guests of a template.
struct TemplateOptions {
    /// For the reference of the template.
    first: Options,
    /// For saved states.
    saved: Options,
    /// The digest of its language's library.
    library: Option<String>,
}

impl TemplateOptions {
    fn new(
        config: &SandboxConfig,
        template: &Template,
        language: &'static Language,
    ) -> Result<Self, afresh::Cause> {
        if template.linux {
            return Self::of_program(config, template, language);
        }
        let cache = config.dir.join("cache");
        let mut engine = EngineConfig { cache: Some(cache.clone()), ..EngineConfig::default() };
        let path = Path::new(&template.reference);
        let module = is_module(path);
        if module {
            engine = engine.stack_for(&std::fs::read(path)?);
        } else if !template.warm.is_empty() || template.setup.is_some() {
            let (name, guest) = (&template.name, &template.reference);
            return Err(format!(
                "the template `{name}` has calls to warm it up, or a setup, and {guest} is no module: a snapshot is warm"
            )
            .into());
        }
        engine.stack = engine.stack.max(language.stack.unwrap_or_default());
        let budget = Budget { bytes: template.files, ..Budget::default() };
        let below = language.over_library(Tree::new(budget), path, template.library.as_deref());
        let (mut files, library) = below?;
        let mut wasm = GuestOptions::default();
        language.equip::<OutputRouter>(&mut wasm);
        wasm.watch = Watch::new(|host| listener::<OutputRouter>(host).proceeds());
        // Saved states carry their warm-up and files with them, but not the layers below.
        let saved = Options::new()
            .cache(cache)
            .wasm(wasm.clone())
            .files(Tree::new(budget))
            .files_below(files.clone())
            .engine(Engine::new(engine.clone())?)
            .timeout(config.call_timeout)
            .memory(template.memory);
        for directory in ["/home/user", "/tmp"] {
            files.make_directories(directory, Time::now())?;
        }
        let mut first = template
            .open
            .clone()
            .wasm(wasm)
            .engine(Engine::new(engine)?)
            .timeout(config.call_timeout)
            .memory(template.memory);
        if module {
            let own = language.warm_up().into_iter().chain(template.warm.iter().cloned());
            first = own.fold(first.files(files), Options::warm);
        } else {
            first = first.files(Tree::new(budget)).files_below(files);
        }
        Ok(Self { first, saved, library })
    }

    /// Options of an interpreter of the host or of an OCI image, a Linux program.
    #[cfg(linux_guests)]
    fn of_program(
        config: &SandboxConfig,
        template: &Template,
        language: &'static Language,
    ) -> Result<Self, afresh::Cause> {
        let of = |path: &str| language.program(afresh::linux::Program::new(path));
        if of(&template.reference).is_none() {
            let name = language.name();
            return Err(
                format!("no Linux program is known that evaluates `{name}`; `python` is").into()
            );
        }
        let (dirs, net, files) = (template.dirs.clone(), template.net.clone(), template.files);
        let shape = move |program: afresh::linux::Program| {
            let program = dirs.iter().fold(program, |program, dir| program.grant(dir));
            let program = net.iter().cloned().fold(program, afresh::linux::Program::reach);
            let program = program.storage_limit(files).output_limit(MAX_OUTPUT_BYTES);
            let program = program.poll_interval(POLL_INTERVAL);
            language.program(program.clone()).unwrap_or(program)
        };
        let limits = |options: Options| {
            let options = options.linux(shape.clone());
            options.timeout(config.call_timeout).memory(template.memory)
        };
        let first = limits(template.open.clone()).kind(afresh::Kind::Program);
        let first = template.warm.iter().cloned().fold(first, Options::warm);
        Ok(Self { first, saved: limits(Options::new()), library: None })
    }

    #[cfg(not(linux_guests))]
    fn of_program(_: &SandboxConfig, _: &Template, _: &Language) -> Result<Self, afresh::Cause> {
        Err(afresh::Kind::Program.missing_reason().unwrap_or_default().into())
    }

    /// The guest that `reference` names, warm and set up as the template says.
    fn guest(
        &self,
        template: &Template,
        reference: &str,
        language: &Language,
    ) -> Result<Guest, afresh::Cause> {
        let first = self.first.clone();
        let Some(setup) = &template.setup else {
            return Ok(afresh::open(reference, &first)?);
        };
        let whole = first.warm(match template.linux {
            true => language.program_setup(setup),
            false => language.setup(setup),
        });
        let error = match afresh::open(reference, &whole) {
            Ok(guest) => return Ok(guest),
            Err(error) => error,
        };
        // The guest just ends where a setup throws. Run as other code, it reports the exception.
        let mut session = afresh::open(reference, &self.first)?.session()?;
        let setup = (RUN, setup.as_str());
        let ran = crate::sandbox::lifecycle::sandbox::run(
            &mut session,
            language,
            setup,
            &mut UndoPoint::default(),
            &mut OutputRouter::default(),
        );
        Err(match ran {
            Ok(Answer::Threw(thrown)) => {
                let (name, told) = (&template.name, thrown.traceback());
                format!("the setup of the template `{name}` fails: {}", told.trim_end()).into()
            }
            _ => error.into(),
        })
    }
}

/// The source of the template at the last start of the server, if its state is in the store.
fn last_source(
    config: &SandboxConfig,
    template: &Template,
    key: &str,
    kept: &Reference,
) -> Option<TemplateSource> {
    let state = kept.place().store().ok()?.resolve(kept.name()).ok()?;
    let last = LastSource::recall(&config.dir, template, key, &state);
    last.inspect_err(|error| tracing::error!(%error, "the last source of a template is unreadable"))
        .ok()?
}

/// The name of the state of a template that a server opens at its start.
pub(crate) fn template_tag(name: &str) -> String {
    format!("template-{name}")
}

/// The template without grants.
fn ungranted(template: &Template) -> Template {
    Template {
        dirs: Vec::new(),
        #[cfg(linux_guests)]
        net: Vec::new(),
        ..template.clone()
    }
}

impl Warm {
    /// Whether its guest and library are those that it was opened with. They count as unchanged
    /// where a registry or a store does not answer.
    pub(crate) fn is_unchanged(&self, config: &SandboxConfig) -> Result<bool, afresh::Cause> {
        let opening = TemplateOptions::new(config, &self.config, self.language)?;
        let source = match TemplateSource::find(&self.config.reference) {
            Err(error) if error.is_outage() => {
                let (template, why) = (&self.config.name, describe(&error));
                tracing::warn!(template, why, "a reload keeps the present state of a template");
                return Ok(true);
            }
            source => source?,
        };
        let library = opening.library.as_ref();
        let identity = TemplateIdentity::new(&self.config, source.contents, library);
        Ok(identity.digest() == self.identity)
    }

    /// The same template for states of another one, without the grants that were not for these.
    pub(crate) fn without_grants(&self) -> Self {
        Self {
            config: ungranted(&self.config),
            language: self.language,
            guest: self.guest.clone(),
            options: self.ungranted.clone(),
            ungranted: self.ungranted.clone(),
            tag: self.tag.clone(),
            digest: self.digest.clone(),
            blobs: self.blobs.clone(),
            // No sandbox began in it.
            identity: String::new(),
        }
    }

    /// Opens the template, keeps it in the store, and opens that, so that its sandboxes save
    /// differences. All hosts of a `ledger` use the same; without one it is for this server alone.
    pub(crate) fn open(
        config: &SandboxConfig,
        template: &Template,
        ledger: Option<&dyn SandboxStore>,
    ) -> Result<Self, afresh::Cause> {
        Self::open_as(config, template, ledger, template_tag(&template.name))
    }

    /// The same, with the name of its state in the store.
    pub(crate) fn open_as(
        config: &SandboxConfig,
        template: &Template,
        ledger: Option<&dyn SandboxStore>,
        tag: String,
    ) -> Result<Self, afresh::Cause> {
        let language = Language::named(&template.language)?;
        let opening = TemplateOptions::new(config, template, language)?;
        let kept: Reference = state_reference(&config.dir, &tag).parse()?;
        let library = opening.library.as_ref();
        let key = TemplateIdentity::new(template, template.reference.clone().into(), library);
        let key = key.shared_digest(env!("CARGO_PKG_VERSION"));
        let is_start = tag == template_tag(&template.name);
        let (source, is_saved) = match TemplateSource::find(&template.reference) {
            Err(error) if is_start && error.is_outage() => {
                match last_source(config, template, &key, &kept) {
                    Some(last) => {
                        let (template, why) = (&template.name, describe(&error));
                        let digest = String::from_utf8_lossy(&last.contents);
                        tracing::warn!(
                            template,
                            why,
                            image = &*digest,
                            "a template has the state of the last start: its image may have changed since"
                        );
                        (last, true)
                    }
                    None => return Err(error.into()),
                }
            }
            source => (source?, false),
        };
        let make = || -> Result<(), afresh::Cause> {
            if !is_saved {
                let guest = opening.guest(template, &source.reference, language)?;
                guest.save(&kept, &SaveOptions::new())?;
            }
            Ok(())
        };
        let identity = TemplateIdentity::new(template, source.contents.clone(), library);
        let digest = match ledger {
            None => make().map(|()| String::new())?,
            Some(ledger) => {
                let version = env!("CARGO_PKG_VERSION");
                identity.shared_parts(version, |parts| ledger.template(parts, &kept, &make))?
            }
        };
        let guest = afresh::open(kept.to_string(), &opening.saved)?;
        let store = kept.place().store()?;
        let state = store.resolve(&tag)?;
        let blobs = digests_of(&store, state)?;
        // A guest that has no sessions, or does not evaluate the language, is found out now.
        let mut session = guest.session()?;
        crate::sandbox::lifecycle::sandbox::run(
            &mut session,
            language,
            (RUN, "1"),
            &mut UndoPoint::default(),
            &mut OutputRouter::default(),
        )
        .map_err(|refusal| refusal.message)?;
        if is_start {
            let last = LastSource::new(key, &source, &state);
            if let Err(error) = last.remember(&config.dir, template) {
                tracing::warn!(%error, "the source of a template is not kept for the next start");
            }
        }
        // Only Linux programs have grants.
        let ungranted = match template.linux {
            true => TemplateOptions::of_program(config, &ungranted(template), language)?.saved,
            false => opening.saved.clone(),
        };
        Ok(Self {
            config: template.clone(),
            language,
            guest,
            options: opening.saved,
            ungranted,
            tag,
            digest,
            blobs,
            identity: identity.digest(),
        })
    }
}
