//! The digests behind references, which say whether a name still means the same.

use afresh_files::OciDocument;
use afresh_store::Sha256;

use crate::{Cause, OpenError, Place, Reference};

impl Reference {
    /// The digest of the manifest, of a snapshot or an image, to which it resolves now. For an
    /// image of several platforms it may be the digest of their index. An archive has the digest of
    /// the whole file. Turns that are appended to a saved session do not change its digest.
    ///
    /// # Errors
    /// [`OpenError`] if there is no such name, or its place does not answer
    /// ([`OpenError::is_outage`]).
    pub fn digest(&self) -> Result<Sha256, OpenError> {
        match self.place() {
            Place::Remote(_) => self.remote_digest(),
            Place::Directory(path) => {
                let store = self.place().store()?;
                store.resolve(self.name()).or_else(|error| {
                    // Names of images are not those of snapshots.
                    let image = image_digest(&path.join("index.json"), self.explicit_name());
                    image.map_err(|_| self.not_opened(error))
                })
            }
            Place::File(path) => {
                let bytes = std::fs::read(path);
                let read = |source| OpenError::Read { path: path.clone(), source };
                Ok(Sha256::of(&bytes.map_err(read)?))
            }
        }
    }
}

/// The digest of the image that an index names.
fn image_digest(index: &std::path::Path, name: Option<&str>) -> Result<Sha256, Cause> {
    let document = OciDocument::parse(&index.to_string_lossy(), &std::fs::read(index)?)?;
    let found = document.leads_to(name)?.ok_or("it is no index")?;
    Ok(found.digest.parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_is_replaced_under_its_name_has_another_digest() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        std::fs::create_dir_all(dir.path().join("blobs/sha256")).unwrap();
        let reference: Reference = format!("{}@app", dir.path().display()).parse().unwrap();
        let mut digests = Vec::new();
        for digit in ["a", "b"] {
            let index = format!(
                r#"{{"schemaVersion":2,"manifests":[{{
                "mediaType":"application/vnd.oci.image.manifest.v1+json",
                "digest":"sha256:{}","size":2,
                "annotations":{{"org.opencontainers.image.ref.name":"app"}}}}]}}"#,
                digit.repeat(64)
            );
            std::fs::write(dir.path().join("index.json"), index).unwrap();
            digests.push(reference.digest().unwrap().to_string());
        }
        assert_eq!(digests, ["a", "b"].map(|digit| format!("sha256:{}", digit.repeat(64))));
        let other: Reference = format!("{}@other", dir.path().display()).parse().unwrap();
        let error = other.digest().unwrap_err();
        assert!(!error.is_outage(), "{error}");
    }
}
