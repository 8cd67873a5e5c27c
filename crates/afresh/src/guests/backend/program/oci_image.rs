//! Containers' images behind the front door: found in a layout, or a tar of one, or fetched from a
//! registry, and made programs.
//!
//! Promises: nothing is unpacked before its digest was checked, and no more is fetched than an
//! image may hold. May break it: a registry decides what a tag means; name a digest to trust it
//! with nothing.

#[cfg(feature = "remote")]
mod fetch;
#[cfg(not(feature = "remote"))]
#[path = "oci_image/fetch_absent.rs"]
mod fetch;

use afresh_files::{LayerLimits, OciImage};
use afresh_linux::{Frozen, Program, Warm};
use afresh_store::Snapshot;

use crate::guests::backend::Backend;
use crate::{Cause, FoundSnapshot, OpenError, Options, Place, Reference};

/// Where programs of an image are found whose configuration does not say it.
const SEARCH_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How likely a reference means an image that could not be opened as a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ImageGuess {
    Surely,
    /// In another tool's layout an image may have a name of another kind, or none.
    Perhaps,
    No,
}

fn guess_image(reference: &Reference, error: &OpenError) -> ImageGuess {
    use afresh_store::OpenError as Error;
    let OpenError::Snapshot { source, .. } = error else { return ImageGuess::No };
    let source: &(dyn std::error::Error + 'static) = &**source;
    let open = source.downcast_ref::<Error>();
    let open = open.or_else(|| fetch::open_error(source));
    match (open, reference.place()) {
        (Some(Error::ContainerImage), _) => ImageGuess::Surely,
        (Some(Error::NoSuchName { .. }), Place::Directory(_)) => ImageGuess::Perhaps,
        // An archive of another tool.
        (Some(Error::Archive { .. } | Error::Io { .. }), Place::File(_)) => ImageGuess::Perhaps,
        _ => ImageGuess::No,
    }
}

/// The program of the image that a reference names, warm, if it could not be opened as a snapshot;
/// that error if it is not an image either.
pub(crate) fn open(
    reference: &Reference,
    options: &Options,
    error: OpenError,
) -> Result<Backend, OpenError> {
    let failed = |source: Cause| OpenError::Guest { reference: reference.to_string(), source };
    let image = match guess_image(reference, &error) {
        ImageGuess::No => return Err(error),
        ImageGuess::Perhaps => open_image(reference, options).map_err(|_| error)?,
        ImageGuess::Surely => open_image(reference, options).map_err(failed)?,
    };
    let program = Program::of_image(&image).map_err(|error| failed(error.into()))?;
    super::warm(&reference.to_string(), program, options)
}

/// The program of the OCI image that a reference names: in a layout, in an archive, or in a
/// registry. The image's configuration determines how it starts. Without `PATH` there, it has the
/// default one of shells.
///
/// # Errors
/// [`OpenError`] when there is no such image, or it cannot be fetched.
pub fn image_program(reference: &Reference, options: &Options) -> Result<Program, OpenError> {
    let failed = |source: Cause| OpenError::Guest { reference: reference.to_string(), source };
    let image = open_image(reference, options).map_err(failed)?;
    let program = Program::of_image(&image).map_err(|error| failed(error.into()))?;
    let named = image.config().env.iter().any(|(name, _)| name == "PATH");
    Ok(if named { program } else { program.env("PATH", SEARCH_PATH) })
}

/// The program of a reference: that of an OCI image ([`image_program`]), or one over the files of a
/// saved Linux program, with the command line of its arguments. `options` grant a saved program its
/// directories.
///
/// # Errors
/// [`OpenError`] when there is neither, or it cannot be opened.
pub fn stored_program(reference: &Reference, options: &Options) -> Result<Program, OpenError> {
    let error = match reference.find(options) {
        Ok(FoundSnapshot { reference, snapshot }) => {
            return with_files(&reference.to_string(), snapshot, options);
        }
        Err(error) => error,
    };
    match guess_image(reference, &error) {
        ImageGuess::No => Err(error),
        ImageGuess::Perhaps => image_program(reference, options).map_err(|_| error),
        ImageGuess::Surely => image_program(reference, options),
    }
}

/// A program with the files of one in a snapshot.
fn with_files(name: &str, snapshot: Snapshot, options: &Options) -> Result<Program, OpenError> {
    let kind = snapshot.guest().kind.clone();
    if kind != super::SNAPSHOT_KIND {
        return Err(OpenError::Guest {
            reference: name.to_owned(),
            source: format!("it is a snapshot of the kind {kind:?}, which has no programs; `afresh run` calls it")
                .into(),
        });
    }
    let failed = |source: Cause| OpenError::Guest { reference: name.to_owned(), source };
    let frozen = Frozen::load(snapshot, &options.pager).map_err(|error| failed(error.into()))?;
    let warm = Warm::thaw(&frozen, &options.grants()).map_err(|error| failed(error.into()))?;
    Ok(Program::with_files_of(&warm))
}

fn open_image(reference: &Reference, options: &Options) -> Result<OciImage, Cause> {
    let limits = LayerLimits::default();
    match reference.place() {
        Place::Directory(path) | Place::File(path) => {
            Ok(OciImage::open(path, reference.explicit_name(), &limits)?)
        }
        Place::Remote(_) => fetch::fetch_image(reference, options, &limits),
    }
}
