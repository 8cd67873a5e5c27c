//! Templates: warm guests that run code, kept in the store so that what their sandboxes save is the difference.

use std::path::Path;

use afresh::files::{Budget, Time, Tree};
use afresh::wasm::{Engine, EngineConfig};
use afresh::{Guest, Options, Reference, SaveOptions};

use super::config::{SandboxConfig, Template};
use super::language::{self, Language};

/// A template, ready.
pub(super) struct Warm {
    pub(super) config: Template,
    pub(super) language: &'static dyn Language,
    pub(super) guest: Guest,
    /// How saved states of it are opened.
    pub(super) options: Options,
    /// The digest of its manifest.
    #[cfg(feature = "fleet")]
    pub(super) digest: String,
}

impl Warm {
    /// Opens the template, keeps it in the store, and opens that: what its sandboxes save is the difference.
    /// `share` has all hosts of a fleet use the same.
    pub(super) fn open(
        config: &SandboxConfig,
        template: &Template,
        #[cfg(feature = "fleet")] share: Option<&super::moving::Share>,
    ) -> Result<Self, afresh::Cause> {
        let language = language::named(&template.language)
            .ok_or_else(|| format!("no guest is known to run `{}`", template.language))?;
        let cache = config.dir.join("cache");
        let mut engine = EngineConfig { cache: Some(cache.clone()), ..EngineConfig::default() };
        let path = Path::new(&template.reference);
        if path.is_file() {
            engine = engine.stack_for(&std::fs::read(path)?);
        }
        let budget = Budget { bytes: template.files, ..Budget::default() };
        // Of saved states as well, which carry their warm-up and files with them.
        let options = Options::new()
            .cache(cache)
            .files(Tree::new(budget))
            .engine(Engine::new(engine.clone())?)
            .timeout(config.call_timeout)
            .memory(template.memory);
        let mut files = Tree::new(budget);
        for directory in ["/home/user", "/tmp"] {
            files.make_directories(directory, Time::now())?;
        }
        let first = template
            .open
            .clone()
            .files(files)
            .engine(Engine::new(engine)?)
            .timeout(config.call_timeout)
            .memory(template.memory);
        let kept: Reference = kept(&config.dir, &format!("template-{}", template.name)).parse()?;
        let make = || -> Result<(), afresh::Cause> {
            afresh::open(&template.reference, &first)?.save(&kept, &SaveOptions::new())?;
            Ok(())
        };
        #[cfg(feature = "fleet")]
        let digest = match share {
            Some(share) => share.template(template, &kept, make)?,
            None => {
                make()?;
                String::new()
            }
        };
        #[cfg(not(feature = "fleet"))]
        make()?;
        let guest = afresh::open(kept.to_string(), &options)?;
        // A guest that has no sessions, or no such function, is found out now.
        let mut session = guest.session()?;
        let how = (language, template.call.as_str());
        super::one::run(&mut session, how, "1", &mut None).map_err(|refusal| refusal.message)?;
        Ok(Self {
            config: template.clone(),
            language,
            guest,
            options,
            #[cfg(feature = "fleet")]
            digest,
        })
    }
}

/// What is kept in the store under a name.
pub(super) fn kept(dir: &Path, name: &str) -> String {
    format!("{}@{name}", dir.join("snapshots").display())
}
