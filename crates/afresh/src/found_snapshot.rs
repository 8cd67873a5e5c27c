//! Snapshots that are opened by their references.
//!
//! Where no name is given and there is no `latest`, the only name in the place is meant.

use std::path::Path;

use afresh_store::{Snapshot, Store};

use crate::{Cause, OpenError, Options, Place, Reference, ReferenceError};

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

    pub(crate) fn failed(&self, error: impl Into<Cause>) -> OpenError {
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

impl Reference {
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
                let reference = Self::with_name(self.place().clone(), only);
                let snapshot = reference.try_load(options)?;
                Ok(FoundSnapshot { reference, snapshot })
            }
        }
    }

    /// The only name in the place, if none was given and there is no `latest`.
    fn only_name(&self, error: &OpenError) -> Option<String> {
        let OpenError::Snapshot { source, .. } = error else { return None };
        match (self.explicit_name(), unknown_name(&**source)?) {
            (None, [only]) => Some(only.clone()),
            _ => None,
        }
    }

    fn try_load(&self, options: &Options) -> Result<Snapshot, OpenError> {
        match self.place() {
            Place::Directory(_) => {
                let store = self.place().store()?;
                store.load_with(self.name(), &options.access).map_err(|e| self.not_opened(e))
            }
            Place::Remote(_) => self.load_remote(options),
            Place::File(path) => {
                if let Some(name) = self.explicit_name() {
                    let source =
                        ReferenceError::Single { path: path.clone(), name: name.to_owned() };
                    return Err(OpenError::Reference { reference: self.to_string(), source });
                }
                afresh_store::archive::open_with(path, &options.access)
                    .map_err(|e| self.not_opened(e))
            }
        }
    }

    pub(crate) fn place_failed(&self, error: impl Into<Cause>) -> OpenError {
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

#[cfg(test)]
mod tests {
    use super::*;

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
