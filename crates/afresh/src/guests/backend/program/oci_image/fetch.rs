//! OCI images out of registries.

use afresh_files::{LayerLimits, OciDocument, OciImage};
use afresh_store::remote::RemoteError;
use afresh_store::{OpenError, Store};

use crate::guests::temp_dir::TempDir;
use crate::{Cause, LATEST, Options, Reference};

/// Maximum indexes that lead to one another.
const MAX_DEPTH: usize = 4;

/// The cause that no snapshot was opened in a remote, if `source` is the remote's error.
pub(super) fn open_error<'a>(
    source: &'a (dyn std::error::Error + 'static),
) -> Option<&'a OpenError> {
    match source.downcast_ref()? {
        RemoteError::Open(open) => Some(open),
        _ => None,
    }
}

/// Fetches an image into the cache, or into a directory that is removed once the image is open.
pub(super) fn fetch_image(
    reference: &Reference,
    options: &Options,
    limits: &LayerLimits,
) -> Result<OciImage, Cause> {
    let remote = reference.place().remote()?;
    let scratch = TempDir::new()?;
    let cache = options.cache.as_ref().map(|cache| cache.join("images"));
    let folder = cache.as_deref().unwrap_or_else(|| scratch.path());
    let store = Store::create(folder)?;
    let mut name = reference.explicit_name().or(remote.name()).unwrap_or(LATEST).to_owned();
    for _ in 0..MAX_DEPTH {
        let (digest, bytes) = remote.document(&store, &name)?;
        let document = OciDocument::parse(&reference.to_string(), &bytes)?;
        if let Some(next) = document.leads_to(None)? {
            name = next.digest;
            continue;
        }
        let blobs = document.blobs();
        let all = blobs.iter().fold(0, |all: u64, blob| all.saturating_add(blob.size));
        if all > limits.bytes {
            return Err(format!(
                "the image has {all} bytes, packed; {} are allowed unpacked",
                limits.bytes
            )
            .into());
        }
        for blob in blobs {
            remote.fetch(&store, blob.digest.parse()?, blob.size)?;
        }
        return Ok(OciImage::open(folder, Some(&digest.to_string()), limits)?);
    }
    Err("its indexes name one another".into())
}
