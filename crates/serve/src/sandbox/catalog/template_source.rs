//! The contents behind the reference of a template when it is opened: those of a file, or the
//! digest that the name of an image or a snapshot has then.
//!
//! Promises: a guest from a registry is opened by the digest that is in the identity of its
//! template, so a tag that moves in between changes neither. A server whose registry does not
//! answer starts with the state of its last start, if the template is otherwise the same, and logs
//! a warning. May break it: turns that are appended to a saved session do not change its digest.

use std::path::Path;

use afresh::{OpenError, Place, Reference};
use serde::{Deserialize, Serialize};

use crate::sandbox::config::Template;
use crate::sandbox::records::record::Records;

/// The directory of the digests that templates had at the last start.
const SOURCES: &str = "template-sources";

/// The contents of the reference of a template.
#[derive(Debug)]
pub(crate) struct TemplateSource {
    /// The contents of a file, or a digest as text.
    pub(crate) contents: Vec<u8>,
    /// The reference that these contents are opened by.
    pub(crate) reference: String,
}

impl TemplateSource {
    /// The present contents.
    pub(crate) fn find(reference: &str) -> Result<Self, OpenError> {
        if let Ok(contents) = std::fs::read(reference) {
            return Ok(Self { contents, reference: reference.to_owned() });
        }
        let named = reference.parse::<Reference>().ok();
        match named.filter(|named| named.place().exists()) {
            Some(named) => Ok(Self::of_digest(reference, &named.digest()?.to_string())),
            // The attempt to open it reports the reason.
            None => Ok(Self::of_digest(reference, reference)),
        }
    }

    fn of_digest(reference: &str, digest: &str) -> Self {
        let url = match reference.parse::<Reference>().map(|named| named.place().clone()) {
            Ok(Place::Remote(url)) if url.starts_with("oci") && digest != reference => Some(url),
            _ => None,
        };
        let reference = url.map_or(reference.to_owned(), |url| format!("{url}@{digest}"));
        Self { contents: digest.as_bytes().to_vec(), reference }
    }

    /// Whether it is that of a name in a remote, which may not answer at the next start.
    fn is_remote(template: &Template) -> bool {
        template.reference.contains("://")
    }
}

/// The source of a template at the last start of the server, and the state that was made of it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LastSource {
    /// The identity of the template with the text of its reference in place of the contents.
    pub(crate) key: String,
    /// The digest that the reference had.
    digest: String,
    /// The digest of the state in the store of the server.
    state: String,
}

impl LastSource {
    pub(crate) fn new(key: String, source: &TemplateSource, state: &afresh::Sha256) -> Self {
        let digest = String::from_utf8_lossy(&source.contents).into_owned();
        Self { key, digest, state: state.to_string() }
    }

    /// Keeps it for the next start.
    pub(crate) fn remember(&self, dir: &Path, template: &Template) -> std::io::Result<()> {
        if !TemplateSource::is_remote(template) {
            return Ok(());
        }
        let (records, id) = (Records::open(dir.join(SOURCES))?, record_id(template));
        match records.get::<Self>(&id)?.is_some_and(|known| known == *self) {
            true => Ok(()),
            false => records.store_record(&id, self),
        }
    }

    /// The source of the last start, if `state` was made of the same template.
    pub(crate) fn recall(
        dir: &Path,
        template: &Template,
        key: &str,
        state: &afresh::Sha256,
    ) -> std::io::Result<Option<TemplateSource>> {
        let known: Option<Self> = Records::open(dir.join(SOURCES))?.get(&record_id(template))?;
        let known = known.filter(|known| known.key == key && known.state == state.to_string());
        Ok(known.map(|known| TemplateSource::of_digest(&template.reference, &known.digest)))
    }
}

/// Names of templates are any text.
fn record_id(template: &Template) -> String {
    let digest = afresh::Sha256::of(template.name.as_bytes()).to_string();
    digest.trim_start_matches("sha256:").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_of_a_registry_is_opened_by_the_digest_of_its_tag() {
        let digest = format!("sha256:{}", "a".repeat(64));
        let pinned = |reference| TemplateSource::of_digest(reference, &digest).reference;
        assert_eq!(pinned("oci://host:5000/a/b:v1"), format!("oci://host:5000/a/b@{digest}"));
        assert_eq!(pinned("oci://me@host/a"), format!("oci://me@host/a@{digest}"));
        // Sessions in object stores and directories may have turns, which belong to the name.
        for reference in ["s3://bucket/a@v1", "/srv/store@v1"] {
            assert_eq!(pinned(reference), reference);
        }
        let missing = TemplateSource::find("no such file").unwrap();
        assert_eq!(
            (&*missing.contents, &*missing.reference),
            (&b"no such file"[..], "no such file")
        );
    }

    #[test]
    fn a_server_recalls_the_source_of_its_last_start_for_the_same_template_and_state() {
        let dir = tempfile::tempdir().unwrap();
        let template = Template::new("a/../b", "oci://host/a:v1", afresh::Options::new());
        let (one, two) = (afresh::Sha256::of(b"1"), afresh::Sha256::of(b"2"));
        let source = TemplateSource::of_digest(&template.reference, &one.to_string());
        LastSource::new("key".to_owned(), &source, &two).remember(dir.path(), &template).unwrap();
        let recall = |key, state| LastSource::recall(dir.path(), &template, key, state).unwrap();
        assert_eq!(recall("key", &two).unwrap().reference, format!("oci://host/a@{one}"));
        assert!(recall("key", &one).is_none(), "another state");
        assert!(recall("other", &two).is_none(), "another template");
    }
}
