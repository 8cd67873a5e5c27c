//! Where snapshots are, as a user writes it: `PLACE[@NAME]`.
//!
//! PLACE is a directory in the OCI image layout, the URL of a remote, or a single file. NAME is a name in
//! it, or the digest of a manifest (`sha256:…`), and `latest` where it is left out. The last `@` divides
//! the two, but not one in the authority of a URL (`oci://user@host/repo`), nor one in a path that exists as
//! it stands, nor one with a `/` behind it unless what is before it exists (`/home/me@work/store`). A
//! registry's own way, `oci://host/repository:tag`, means the same as `@tag`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;

use afresh_store::remote::{Patience, Remote};
use afresh_store::seal::Access;
use afresh_store::{Snapshot, Store, archive};
use anyhow::{Context, bail};

/// The name that is meant where none is given.
pub(crate) const LATEST: &str = "latest";

static ACCESS: OnceLock<Access> = OnceLock::new();

/// Sets what is demanded of every snapshot that this process opens. Only the first call has an effect.
pub(crate) fn demand(access: Access) {
    let _ = ACCESS.set(access);
}

/// What is demanded of snapshots: nothing, unless [`demand`] was called.
fn access() -> &'static Access {
    ACCESS.get_or_init(Access::new)
}

/// Where snapshots are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A directory in the OCI image layout, which may not exist yet.
    Store(PathBuf),
    /// An object store or registry.
    Remote(String),
    /// An archive: a single file with one snapshot.
    File(PathBuf),
}

/// A snapshot in a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    pub(crate) place: Place,
    /// The name, if one was given.
    pub(crate) name: Option<String>,
}

impl Place {
    fn new(text: &str, is_file: &dyn Fn(&Path) -> bool) -> Self {
        let path = Path::new(text);
        if text.contains("://") {
            Self::Remote(text.to_owned())
        } else if path.extension().is_some_and(|e| e == "afresh") || is_file(path) {
            Self::File(path.to_owned())
        } else {
            Self::Store(path.to_owned())
        }
    }

    /// The store in a directory that is one.
    pub(crate) fn store(&self) -> anyhow::Result<Store> {
        Ok(Store::open(self.directory()?)?)
    }

    /// The store in a directory, made if it is missing or empty.
    pub(crate) fn create(&self) -> anyhow::Result<Store> {
        Ok(Store::create(self.directory()?)?)
    }

    fn directory(&self) -> anyhow::Result<&Path> {
        match self {
            Self::Store(path) => Ok(path),
            Self::Remote(url) => {
                bail!(
                    "{url} is a remote; this needs a local directory: `afresh pull {url} DIR` first"
                )
            }
            Self::File(path) => Err(single_file(path)),
        }
    }

    /// The remote behind a URL.
    pub(crate) fn remote(&self) -> anyhow::Result<Remote> {
        match self {
            Self::Remote(url) => Ok(Remote::open(url, Patience::default())?),
            Self::Store(path) => bail!(
                "{} is no remote: a remote is a URL, such as s3://bucket/prefix or \
                 file:///directory",
                path.display()
            ),
            Self::File(path) => Err(single_file(path)),
        }
    }
}

/// Where the tag of a registry's address begins, as registries write it: `oci://host/repository:tag`.
fn tag_of(text: &str) -> Option<usize> {
    let (scheme, _) = text.split_once("://").filter(|(scheme, _)| scheme.starts_with("oci"))?;
    let path = scheme.len() + 3 + text[scheme.len() + 3..].find('/')?;
    text.rfind(':').filter(|at| *at > path)
}

/// The error for a single file where there can be none.
fn single_file(path: &Path) -> anyhow::Error {
    anyhow::anyhow!(
        "{} is a single file; this needs a directory (an OCI image layout) or a remote (a URL)",
        path.display()
    )
}

impl Reference {
    fn parse(
        text: &str,
        exists: &dyn Fn(&Path) -> bool,
        is_file: &dyn Fn(&Path) -> bool,
    ) -> Result<Self, String> {
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
            return Err("it is PLACE or PLACE@NAME, and neither may be empty".to_owned());
        }
        Ok(Self { place: Place::new(place, is_file), name })
    }

    /// The name that is meant.
    pub(crate) fn name(&self) -> &str {
        self.name.as_deref().unwrap_or(LATEST)
    }

    /// The name to write under, which a digest can not be; `default` where none was given.
    pub(crate) fn target<'a>(&'a self, default: &'a str) -> anyhow::Result<&'a str> {
        let name = self.name.as_deref().unwrap_or(default);
        anyhow::ensure!(
            !name.starts_with("sha256:"),
            "{name} is a digest, which can not be given to a snapshot: write under a name"
        );
        Ok(name)
    }

    /// Opens the snapshot where it is. Pages of a remote one are fetched when they are used, and kept in
    /// `cache` if there is one.
    pub(crate) fn load(&self, cache: Option<&Path>) -> anyhow::Result<Snapshot> {
        let snapshot = match &self.place {
            Place::Store(_) => {
                self.place.store()?.load_with(self.name(), access()).map_err(anyhow::Error::from)
            }
            Place::Remote(_) => {
                let mut remote = self.place.remote()?;
                remote.prepare();
                if let Some(dir) = cache {
                    remote = remote.with_cache(dir);
                }
                remote.load_with(self.name(), access()).map_err(anyhow::Error::from)
            }
            Place::File(path) => {
                anyhow::ensure!(
                    self.name.is_none(),
                    "{} is a file with one snapshot: leave @{} out",
                    path.display(),
                    self.name()
                );
                archive::open_with(path, access()).map_err(anyhow::Error::from)
            }
        };
        snapshot.with_context(|| format!("opening {self}"))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Store(path) | Self::File(path) => write!(f, "{}", path.display()),
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
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text, &|path| path.exists(), &|path| path.is_file())
    }
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("it may not be empty".to_owned());
        }
        Ok(Self::new(text, &|path| path.is_file()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses where the paths in `dirs` and `files` exist.
    fn parse(text: &str, dirs: &[&str], files: &[&str]) -> Result<(Place, Option<String>), String> {
        let is = |list: &[&str], path: &Path| list.iter().any(|there| Path::new(there) == path);
        Reference::parse(text, &|p| is(dirs, p) || is(files, p), &|p| is(files, p))
            .map(|reference| (reference.place, reference.name))
    }

    fn store(path: &str) -> Place {
        Place::Store(path.into())
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
            assert!(parse(text, &[], &[]).is_err(), "{text}");
        }
    }

    #[test]
    fn an_at_sign_in_a_path_is_told_by_what_exists() {
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
        assert!(url.store().unwrap_err().to_string().contains("afresh pull file:///nowhere DIR"));
        let dir: Place = "/nowhere".parse().unwrap();
        assert!(dir.remote().unwrap_err().to_string().contains("s3://bucket/prefix"));
        let file: Place = "x.afresh".parse().unwrap();
        assert!(file.store().unwrap_err().to_string().contains("is a single file"));
        let file: Reference = "x.afresh@v1".parse().unwrap();
        assert!(file.load(None).unwrap_err().to_string().contains("leave @v1 out"));
    }
}
