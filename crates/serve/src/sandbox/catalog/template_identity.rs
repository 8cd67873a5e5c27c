//! The digests that identify templates.
//!
//! Promises: an image or a snapshot that is replaced under its name is another template, and so is
//! one with other `dirs`. Sandboxes can be restarted from a template by every version of the server
//! with the same [`STATE_FORMAT`]. The hosts of a fleet share a template of one version of the
//! server. May break it: no digest covers the libraries of a host program and the files in `dirs`.
//! The operator gives the template another `generation` when they change.

use sha2::{Digest, Sha256};

use crate::sandbox::config::Template;

/// The format of guests that sandboxes are restarted from with their files. Raised where a guest
/// that this version makes cannot have the files that a sandbox of an earlier version has written.
const STATE_FORMAT: u32 = 1;

/// All that the guest of a template comes from.
pub(crate) struct TemplateIdentity {
    name: String,
    contents: Vec<u8>,
    /// Its options, and the digest of its language's library.
    options: String,
}

impl TemplateIdentity {
    /// `contents` are those that the reference of the template has now.
    pub(crate) fn new(template: &Template, contents: Vec<u8>, library: Option<&String>) -> Self {
        let mut options = format!(
            "{} {} {} {} {:?} {:?} {:?}",
            template.language,
            template.linux,
            template.memory,
            template.files,
            template.warm,
            template.setup,
            library,
        );
        // Templates without them keep the digest that earlier versions gave them.
        if !template.dirs.is_empty() {
            options.push_str(&format!(" dirs {:?}", template.dirs));
        }
        if let Some(generation) = &template.generation {
            options.push_str(&format!(" generation {generation:?}"));
        }
        Self { name: template.name.clone(), contents, options }
    }

    /// The digest that records of sandboxes have.
    pub(crate) fn digest(&self) -> String {
        self.digest_of(STATE_FORMAT)
    }

    fn digest_of(&self, format: u32) -> String {
        let format = format.to_le_bytes();
        digits(&[&format, self.name.as_bytes(), &self.contents, self.options.as_bytes()])
    }

    /// The digest of one version of the server.
    pub(crate) fn shared_digest(&self, version: &str) -> String {
        self.shared_parts(version, digits)
    }

    /// The parts that hosts of this version of the server share the template by.
    pub(crate) fn shared_parts<R>(&self, version: &str, share: impl FnOnce(&[&[u8]]) -> R) -> R {
        let options = format!("{version} {}", self.options);
        share(&[self.name.as_bytes(), &self.contents, options.as_bytes()])
    }
}

/// The digest of these parts.
fn digits(parts: &[&[u8]]) -> String {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template() -> Template {
        let mut template = Template::new("script", "no such file", afresh::Options::new());
        template.warm.push(afresh::Call::text("warm", ["a", "b\n"]));
        template.warm.push(afresh::Call::bytes("load", [0, 255]));
        template.setup = Some("var a = \"1\"".to_owned());
        template
    }

    fn identity_of(template: &Template, contents: &str) -> TemplateIdentity {
        TemplateIdentity::new(template, contents.into(), Some(&"sha256:1".to_owned()))
    }

    fn identity() -> TemplateIdentity {
        identity_of(&template(), "no such file")
    }

    #[test]
    fn other_directories_another_generation_or_another_digest_make_another_template() {
        let mut digests = vec![identity().digest(), identity_of(&template(), "sha256:2").digest()];
        for directory in ["/srv/app-1", "/srv/app-2"] {
            let dirs = vec![directory.into()];
            digests.push(identity_of(&Template { dirs, ..template() }, "no such file").digest());
        }
        for generation in ["", "2", "3"] {
            let generation = Some(generation.to_owned());
            let changed = Template { generation, ..template() };
            digests.push(identity_of(&changed, "no such file").digest());
        }
        let (all, unique) =
            (digests.len(), digests.iter().collect::<std::collections::HashSet<_>>());
        assert_eq!(unique.len(), all, "{digests:?}");
    }

    #[test]
    fn the_digest_of_a_template_survives_an_upgrade_unless_the_format_of_its_state_changes() {
        let shared = |version| identity().shared_parts(version, |parts| parts.concat());
        assert_ne!(shared("1.0.0"), shared("1.0.1"));
        assert_ne!(identity().digest_of(1), identity().digest_of(2));
        assert_eq!(identity().digest(), identity().digest_of(STATE_FORMAT));
        // Records of sandboxes have this value. Another means that sandboxes which earlier versions
        // have made cannot be paused without memory.
        let golden = "768e369db7af71956e836b8f05080215f088fb9f88a1e4b74100e5a3c3e6d9b1";
        assert_eq!((STATE_FORMAT, &*identity().digest()), (1, golden));
    }
}
