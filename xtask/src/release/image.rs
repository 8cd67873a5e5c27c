//! A container image as a tar of the OCI layout, written without a daemon.
//!
//! The image has one layer: the static command, the certificates of authorities and an empty
//! `/tmp`. It runs as the user 65532 and needs no writable root.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::installation::{Installation, copy, create, write};
use super::{compress, digest, pack, time};
use crate::command::output;
use crate::host;

/// The bundle of certificates on Debian.
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";
/// The user of the image: that of other images without a shell.
const USER: u32 = 65_532;

/// Builds the tar of the layout.
pub(super) fn build(installed: &Installation, to: &Path) -> Result<PathBuf> {
    let version = env!("CARGO_PKG_VERSION");
    let (root, layout) = (to.join("image-root"), to.join("image"));
    for folder in ["usr/bin", "etc/ssl/certs", "tmp", "usr/share/doc/afresh"] {
        create(&root.join(folder))?;
    }
    copy(&installed.command(), &root.join("usr/bin/afresh"))?;
    for entry in std::fs::read_dir(installed.documents())? {
        let entry = entry?;
        copy(&entry.path(), &root.join("usr/share/doc/afresh").join(entry.file_name()))?;
    }
    if !Path::new(CERTIFICATES).is_file() {
        host::apt_install(&["ca-certificates"])?;
    }
    copy(Path::new(CERTIFICATES), &root.join("etc/ssl/certs/ca-certificates.crt"))?;
    let passwd = format!("root:x:0:0::/:\nafresh:x:{USER}:{USER}::/tmp:\n");
    write(&root.join("etc/passwd"), passwd.as_bytes())?;

    let blobs = layout.join("blobs/sha256");
    create(&blobs)?;
    let layer = to.join("layer.tar");
    pack(&root, &["etc", "tmp", "usr"], &layer)?;
    let uncompressed = digest(&layer)?;
    let layer = keep(&blobs, &compress(&layer)?)?;
    let created = output(Command::new("date").args([
        "-u",
        "-d",
        &format!("@{}", time()?),
        "+%Y-%m-%dT%H:%M:%SZ",
    ]))?;
    let configuration = document(
        &blobs,
        &json!({
            "created": created, "architecture": "amd64", "os": "linux",
            "config": {
                "User": USER.to_string(), "Entrypoint": ["/usr/bin/afresh"], "WorkingDir": "/tmp",
                "Env": ["PATH=/usr/bin", format!("SSL_CERT_FILE={CERTIFICATES}")],
                "Labels": {
                    "org.opencontainers.image.title": "afresh",
                    "org.opencontainers.image.version": version,
                    "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
                },
            },
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{uncompressed}")]},
            "history": [{"created": created, "created_by": "cargo xtask release"}],
        }),
    )?;
    let descriptor = |kind: &str, (digest, size): &(String, u64)| {
        json!({
            "mediaType": format!("application/vnd.oci.image.{kind}"),
            "digest": format!("sha256:{digest}"), "size": size,
        })
    };
    let manifest = document(
        &blobs,
        &json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("config.v1+json", &configuration),
            "layers": [descriptor("layer.v1.tar+gzip", &layer)],
        }),
    )?;
    let mut entry = descriptor("manifest.v1+json", &manifest);
    entry["annotations"] = json!({"org.opencontainers.image.ref.name": version});
    let index = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [entry],
    });
    write(&layout.join("index.json"), index.to_string().as_bytes())?;
    write(&layout.join("oci-layout"), br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let image = to.join(format!("afresh-{version}-oci.tar"));
    pack(&layout, &["blobs", "index.json", "oci-layout"], &image)?;
    for folder in [root, layout] {
        std::fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    Ok(image)
}

/// Moves a file among the blobs: its digest and size.
fn keep(blobs: &Path, file: &Path) -> Result<(String, u64)> {
    let (digest, size) = (digest(file)?, file.metadata()?.len());
    std::fs::rename(file, blobs.join(&digest)).context("cannot store a blob")?;
    Ok((digest, size))
}

/// Stores a document among the blobs.
fn document(blobs: &Path, value: &Value) -> Result<(String, u64)> {
    let file = blobs.join("document");
    write(&file, value.to_string().as_bytes())?;
    keep(blobs, &file)
}
