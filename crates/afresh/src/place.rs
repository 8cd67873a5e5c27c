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

use afresh_store::{Snapshot, Store};

use crate::{OpenError, Options, ReferenceError};

/// The name that is meant where none is given.
pub const LATEST: &str = "latest";

/// Where snapshots are.
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

/// A snapshot that was opened by a reference.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FoundSnapshot {
    /// The place, and the name that it was found under.
    pub reference: Reference,
    /// The snapshot.
    pub snapshot: Snapshot,
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

    /// Whether something is there. A remote is not queried.
    #[must_use]
    pub fn exists(&self) -> bool {
        match self {
            Self::Remote(_) => true,
            Self::Directory(path) => path.is_dir(),
            Self::File(path) => path.is_file(),
        }
    }

    /// The store in a directory.
    ///
    /// # Errors
    /// [`OpenError::Place`] for a remote or a file, [`OpenError::Snapshot`] without a store.
    pub fn store(&self) -> Result<Store, OpenError> {
        Store::open(self.directory()?).map_err(|error| self.failed(error))
    }

    /// The store in a directory, made if it is missing or empty.
    ///
    /// # Errors
    /// As [`Place::store`].
    pub fn create(&self) -> Result<Store, OpenError> {
        Store::create(self.directory()?).map_err(|error| self.failed(error))
    }

    pub(crate) fn failed(&self, error: impl Into<crate::Cause>) -> OpenError {
        OpenError::Snapshot { reference: self.to_string(), source: error.into() }
    }

    fn directory(&self) -> Result<&Path, OpenError> {
        match self {
            Self::Directory(path) => Ok(path),
            Self::Remote(_) => Err(OpenError::Place {
                place: self.clone(),
                needs: "a local directory: pull the snapshot into one first",
            }),
            Self::File(_) => Err(OpenError::Place {
                place: self.clone(),
                needs: "a directory (an OCI image layout)",
            }),
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

    /// The snapshot in a directory or a file, without a name. The path is taken as it is: an `@` is
    /// part of it, and it need not be text.
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

    /// The name, if one was given.
    #[must_use]
    pub fn explicit_name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The name that is meant: [`LATEST`] where none was given.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or(LATEST)
    }

    /// The name to write under, which a digest cannot be; `default` where none was given.
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

    /// Opens the snapshot where it is. Pages of a remote one are fetched when they are used.
    ///
    /// # Errors
    /// [`OpenError`] by cause.
    pub fn load(&self, options: &Options) -> Result<Snapshot, OpenError> {
        self.find(options).map(|found| found.snapshot)
    }

    /// As [`Reference::load`], with the name it was found under.
    ///
    /// # Errors
    /// As [`Reference::load`].
    pub fn find(&self, options: &Options) -> Result<FoundSnapshot, OpenError> {
        match self.try_load(options) {
            Ok(snapshot) => Ok(FoundSnapshot { reference: self.clone(), snapshot }),
            Err(error) => {
                let Some(only) = self.only_name(&error) else { return Err(error) };
                let reference = Self { place: self.place.clone(), name: Some(only) };
                let snapshot = reference.try_load(options)?;
                Ok(FoundSnapshot { reference, snapshot })
            }
        }
    }

    /// The only name in the place, if none was given and there is no `latest`.
    fn only_name(&self, error: &OpenError) -> Option<String> {
        let OpenError::Snapshot { source, .. } = error else { return None };
        match (&self.name, unknown_name(&**source)?) {
            (None, [only]) => Some(only.clone()),
            _ => None,
        }
    }

    fn try_load(&self, options: &Options) -> Result<Snapshot, OpenError> {
        match &self.place {
            Place::Directory(_) => {
                let store = self.place.store()?;
                store.load_with(self.name(), &options.access).map_err(|e| self.not_opened(e))
            }
            Place::Remote(_) => self.load_remote(options),
            Place::File(path) => {
                if let Some(name) = &self.name {
                    let source = ReferenceError::Single { path: path.clone(), name: name.clone() };
                    return Err(OpenError::Reference { reference: self.to_string(), source });
                }
                afresh_store::archive::open_with(path, &options.access)
                    .map_err(|e| self.not_opened(e))
            }
        }
    }

    pub(crate) fn place_failed(&self, error: impl Into<crate::Cause>) -> OpenError {
        OpenError::Snapshot { reference: self.to_string(), source: error.into() }
    }

    pub(crate) fn not_opened(&self, error: afresh_store::OpenError) -> OpenError {
        match error {
            afresh_store::OpenError::Seal(source) => {
                OpenError::Seal { reference: self.to_string(), source }
            }
            other => self.place_failed(other),
        }
    }
}

/// The names in a place, if the error is that the requested one is not among them.
fn unknown_name<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a [String]> {
    match error.downcast_ref::<afresh_store::OpenError>()? {
        afresh_store::OpenError::NoSuchName { known, .. } => Some(known),
        _ => None,
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) | Self::File(path) => write!(f, "{}", path.display()),
            Self::Remote(url) => f.write_str(url),
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.place, &self.name) {
            (Place::File(_), None) => write!(f, "{}", self.place),
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

    #[test]
    fn a_place_of_the_wrong_kind_is_refused_with_the_way_out() {
        let url: Place = "file:///nowhere".parse().unwrap();
        let error = url.store().unwrap_err().to_string();
        assert!(error.contains("is a remote") && error.contains("pull the snapshot"), "{error}");
        let file: Place = "x.afresh".parse().unwrap();
        assert!(file.store().unwrap_err().to_string().contains("is a single file"));
        let file: Reference = "x.afresh@v1".parse().unwrap();
        let error = file.load(&Options::new()).unwrap_err();
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains("omit @v1"), "{error}: {cause}");
    }
}
