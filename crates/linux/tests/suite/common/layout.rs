//! OCI images for tests: layers of this host's own programs, in a directory of the OCI layout.

use std::path::{Path, PathBuf};
use std::process::Command;

use afresh_files::{LayerLimits, OciImage};
use sha2::{Digest, Sha256};

/// A directory of the OCI layout with one image.
pub(crate) struct Layout(tempfile::TempDir);

impl Layout {
    /// An image of these layers, each a tar, and this configuration.
    pub(crate) fn new(layers: &[Vec<u8>], config: &str) -> Self {
        let layout = Self(tempfile::tempdir().unwrap());
        std::fs::create_dir_all(layout.path().join("blobs/sha256")).unwrap();
        let layers: Vec<_> = layers.iter().map(|layer| layout.put("layer.v1.tar", layer)).collect();
        let config = layout.put("config.v1+json", config.as_bytes());
        let layers = layers.join(",");
        let manifest = format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{layers}]}}"#);
        let manifest = layout.put("manifest.v1+json", manifest.as_bytes());
        let index = format!(r#"{{"schemaVersion":2,"manifests":[{manifest}]}}"#);
        std::fs::write(layout.path().join("index.json"), index).unwrap();
        std::fs::write(layout.path().join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)
            .unwrap();
        layout
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn open(&self) -> OciImage {
        OciImage::open(self.path(), None, &LayerLimits::default()).unwrap()
    }

    fn put(&self, kind: &str, bytes: &[u8]) -> String {
        let hex: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
        std::fs::write(self.path().join("blobs/sha256").join(&hex), bytes).unwrap();
        let (media, size) = (format!("application/vnd.oci.image.{kind}"), bytes.len());
        format!(r#"{{"mediaType":"{media}","digest":"sha256:{hex}","size":{size}}}"#)
    }
}

/// A layer with programs of this host's, by their names in `PATH`, in `/bin`, and their libraries.
pub(crate) fn programs(names: &[&str]) -> Option<Vec<u8>> {
    let root = tempfile::tempdir().unwrap();
    let copy = |from: &Path, to: &Path| {
        let to = root.path().join(to.strip_prefix("/").unwrap_or(to));
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(from, to).unwrap();
    };
    for name in names {
        let found = ["/bin", "/usr/bin"].iter().map(|folder| Path::new(folder).join(name));
        let Some(path) = found.into_iter().find(|path| path.is_file()) else {
            println!("SKIPPED: this host has no {name}");
            return None;
        };
        copy(&path, &Path::new("/bin").join(name));
        // Lines of `ldd` end with a path and an address.
        let out = Command::new("ldd").arg(&path).output().ok()?;
        let out = String::from_utf8_lossy(&out.stdout).into_owned();
        let paths = out.split_whitespace().filter(|word| word.starts_with('/'));
        paths.map(PathBuf::from).for_each(|path| copy(&path, &path));
    }
    Some(layer(root.path()))
}

/// A layer with the contents of a directory.
pub(crate) fn layer(root: &Path) -> Vec<u8> {
    let out = Command::new("tar").arg("-C").arg(root).args(["-cf", "-", "."]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    out.stdout
}
