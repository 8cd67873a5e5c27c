//! Places of snapshots, as a user writes them: `PLACE[@NAME]`.
//!
//! PLACE is a directory in the OCI image layout, the URL of a remote, or a single file. NAME is a
//! name in it, or the digest of a manifest (`sha256:…`). Where it is left out, `latest` is meant,
//! or else the only name there is. The last `@` divides the two, but not one in the authority of a
//! URL (`oci://user@host/repo`), nor one in a path that exists as it stands, nor one with a `/`
//! behind it unless what is before it exists (`/home/me@work/store`). A registry's own way,
//! `oci://host/repository:tag`, means the same as `@tag`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use afresh_store::RedactedUrl;

/// The default name.
pub const LATEST: &str = "latest";

/// A place of snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// A directory in the OCI image layout, which may not exist yet.
    Directory(PathBuf),
    /// An object store or registry, by its URL.
    Remote(String),
    /// An archive: a single file with one snapshot.
    File(PathBuf),
}

/// A snapshot in a place: `PLACE[@NAME]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    place: Place,
    name: Option<String>,
}

/// An invalid [`Reference`], or one that does not fit its use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceError {
    /// Place or name is empty.
    #[error("a snapshot is PLACE or PLACE@NAME, and neither may be empty")]
    Empty,
    /// A digest where a name is needed.
    #[error("`{0}` is a digest: save under a name instead")]
    Digest(String),
    /// A name for a file, which holds one snapshot and needs none.
    #[error("{} holds one snapshot and has no names: omit @{name}", path.display())]
    Single {
        /// The file.
        path: PathBuf,
        /// The name that was given.
        name: String,
    },
}

impl Place {
    fn new(text: &str, is_file: &dyn Fn(&Path) -> bool) -> Self {
        match text.contains("://") {
            true => Self::Remote(text.to_owned()),
            false => Self::of_path(Path::new(text), is_file),
        }
    }

    fn of_path(path: &Path, is_file: &dyn Fn(&Path) -> bool) -> Self {
        match path.extension().is_some_and(|e| e == "afresh") || is_file(path) {
            true => Self::File(path.to_owned()),
            false => Self::Directory(path.to_owned()),
        }
    }

    /// Its form, for messages.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Directory(_) => "a directory",
            Self::Remote(_) => "a remote",
            Self::File(_) => "a single file",
        }
    }

    /// Whether the place exists. A remote is not queried.
    #[must_use]
    pub fn exists(&self) -> bool {
        match self {
            Self::Remote(_) => true,
            Self::Directory(path) => path.is_dir(),
            Self::File(path) => path.is_file(),
        }
    }
}

/// Position of the tag in a registry's address: `oci://host/repository:tag`.
fn tag_of(text: &str) -> Option<usize> {
    let (scheme, _) = text.split_once("://").filter(|(scheme, _)| scheme.starts_with("oci"))?;
    let path = scheme.len() + 3 + text[scheme.len() + 3..].find('/')?;
    text.rfind(':').filter(|at| *at > path)
}

impl Reference {
    /// The snapshot of this name in a place.
    ///
    /// # Errors
    /// [`ReferenceError::Empty`] for an empty name.
    pub fn new(place: Place, name: impl Into<String>) -> Result<Self, ReferenceError> {
        let name = name.into();
        if name.is_empty() {
            return Err(ReferenceError::Empty);
        }
        Ok(Self { place, name: Some(name) })
    }

    /// The snapshot of a name that exists in a place.
    pub(crate) fn with_name(place: Place, name: String) -> Self {
        Self { place, name: Some(name) }
    }

    /// The snapshot in a directory or a file, without a name. The path is not parsed: an `@` is
    /// part of it, and it need not be UTF-8.
    #[must_use]
    pub fn at(path: impl AsRef<Path>) -> Self {
        let place = Place::of_path(path.as_ref(), &|path| path.is_file());
        Self { place, name: None }
    }

    fn parse(
        text: &str,
        exists: &dyn Fn(&Path) -> bool,
        is_file: &dyn Fn(&Path) -> bool,
    ) -> Result<Self, ReferenceError> {
        let divided = match text.split_once("://") {
            Some((scheme, rest)) => {
                let authority = scheme.len() + 3 + rest.find('/').unwrap_or(rest.len());
                let file = scheme == "file" || !rest.contains('/');
                text.rfind('@').filter(|at| *at > authority || file)
            }
            None if exists(Path::new(text)) => None,
            None => text
                .rfind('@')
                .filter(|at| !text[at + 1..].contains('/') || exists(Path::new(&text[..*at]))),
        };
        let (place, name) = match divided.or_else(|| tag_of(text)) {
            Some(at) => (&text[..at], Some(text[at + 1..].to_owned())),
            None => (text, None),
        };
        if place.is_empty() || name.as_ref().is_some_and(String::is_empty) {
            return Err(ReferenceError::Empty);
        }
        Ok(Self { place: Place::new(place, is_file), name })
    }

    /// The place.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// The name, if the reference has one.
    #[must_use]
    pub fn explicit_name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The name, or [`LATEST`].
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or(LATEST)
    }

    /// The name for a write, or `default`. A digest is an error.
    ///
    /// # Errors
    /// [`ReferenceError::Digest`].
    pub fn target<'a>(&'a self, default: &'a str) -> Result<&'a str, ReferenceError> {
        let name = self.name.as_deref().unwrap_or(default);
        if name.starts_with("sha256:") {
            return Err(ReferenceError::Digest(name.to_owned()));
        }
        Ok(name)
    }

    /// This place, with the name to write under.
    #[cfg(feature = "guests")]
    pub(crate) fn named(&self) -> Result<Self, ReferenceError> {
        Self::new(self.place.clone(), self.target(LATEST)?)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) | Self::File(path) => write!(f, "{}", path.display()),
            Self::Remote(url) => RedactedUrl(url).fmt(f),
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.place, &self.name) {
            (Place::File(_), None) => write!(f, "{}", self.place),
            // A password may have the `@` that divides the two.
            (Place::Remote(url), _) => RedactedUrl(&format!("{url}@{}", self.name())).fmt(f),
            _ => write!(f, "{}@{}", self.place, self.name()),
        }
    }
}

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        Self::parse(text, &|path| path.exists(), &|path| path.is_file())
    }
}

impl FromStr for Place {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        if text.is_empty() {
            return Err(ReferenceError::Empty);
        }
        Ok(Self::new(text, &|path| path.is_file()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses where the paths in `dirs` and `files` exist.
    fn parse(
        text: &str,
        dirs: &[&str],
        files: &[&str],
    ) -> Result<(Place, Option<String>), ReferenceError> {
        let is = |list: &[&str], path: &Path| list.iter().any(|there| Path::new(there) == path);
        Reference::parse(text, &|p| is(dirs, p) || is(files, p), &|p| is(files, p))
            .map(|reference| (reference.place, reference.name))
    }

    fn store(path: &str) -> Place {
        Place::Directory(path.into())
    }

    fn remote(url: &str) -> Place {
        Place::Remote(url.into())
    }

    #[test]
    fn a_reference_is_a_place_and_a_name() {
        let digest = format!("sha256:{}", "a".repeat(64));
        let cases: Vec<(String, Place, Option<&str>)> = vec![
            ("store".into(), store("store"), None),
            ("a/b@v1".into(), store("a/b"), Some("v1")),
            (format!("store@{digest}"), store("store"), Some(&digest)),
            ("s3://bucket/a@v1.2".into(), remote("s3://bucket/a"), Some("v1.2")),
            ("s3://bucket@v1".into(), remote("s3://bucket"), Some("v1")),
            ("oci://me@host:5000/repo".into(), remote("oci://me@host:5000/repo"), None),
            ("oci://me@host/a/b@app/v1".into(), remote("oci://me@host/a/b"), Some("app/v1")),
            ("oci://host:5000/a/b:v1".into(), remote("oci://host:5000/a/b"), Some("v1")),
            ("oci://host/b:v1@v2".into(), remote("oci://host/b:v1"), Some("v2")),
            ("file:///tmp/x@y".into(), remote("file:///tmp/x"), Some("y")),
            (format!("gs://b/p@{digest}"), remote("gs://b/p"), Some(&digest)),
            ("warm.afresh@v1".into(), Place::File("warm.afresh".into()), Some("v1")),
            ("image".into(), Place::File("image".into()), None),
        ];
        for (text, place, name) in cases {
            let expected = (place, name.map(str::to_owned));
            assert_eq!(parse(&text, &[], &["image"]).unwrap(), expected, "{text}");
        }
        for text in ["", "@v1", "store@", "s3://bucket/a@"] {
            assert_eq!(parse(text, &[], &[]), Err(ReferenceError::Empty), "{text}");
        }
    }

    #[test]
    fn an_at_sign_in_a_path_is_resolved_by_the_existing_files() {
        let home = "/home/me@work/new";
        assert_eq!(parse(home, &[], &[]).unwrap(), (store(home), None));
        assert_eq!(parse("a@b", &["a@b"], &[]).unwrap(), (store("a@b"), None));
        assert_eq!(parse("a@b@v1", &["a@b"], &[]).unwrap(), (store("a@b"), Some("v1".into())));
        assert_eq!(parse("a@x/v1", &["a"], &[]).unwrap(), (store("a"), Some("x/v1".into())));
    }

    #[test]
    fn nothing_is_written_under_a_digest() {
        let reference: Reference = "store@sha256:00".parse().unwrap();
        assert!(reference.target(LATEST).is_err());
        let reference: Reference = "store".parse().unwrap();
        assert_eq!(reference.target("v1").unwrap(), "v1");
        assert!(reference.target("sha256:00").is_err());
    }
}
