//! The front door: something that is named becomes a guest that can be called.
//!
//! Promises: all kinds of guests open the same way from every place, and every call
//! starts from the same state. May break it: see the kinds of guests in `backend`.

use std::io::Read;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use afresh_pager::SnapshotMemory;
use afresh_pool::PoolStats;
use afresh_store::Snapshot;

use crate::guests::backend::{self, Backend, GuestFile, WarmGuest, dispatch};
use crate::guests::call::{Entry, Function};
use crate::guests::digest_base::DigestBase;
use crate::{
    Answer, Call, CallError, CallOptions, FoundSnapshot, Kind, Lease, LeaseError, LeaseOptions,
    OpenError, Options, OwnedLease, Reference, Session, SessionError,
};

/// A guest of any kind, warm and ready to be called. Cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct Guest {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) backend: Backend,
    pub(crate) options: Options,
    origin: Option<Origin>,
    reference: String,
    /// The base of digests of its sessions' states.
    pub(crate) digest_base: OnceLock<DigestBase>,
}

/// The snapshot from which a guest was opened.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Origin {
    /// Its place and name.
    pub reference: Reference,
    /// The snapshot.
    pub snapshot: Snapshot,
    /// Its pages, which may still be arriving.
    pub memory: SnapshotMemory,
    /// Time from the first access to the place until the guest was ready.
    pub took: Duration,
}

impl std::fmt::Debug for Guest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guest")
            .field("reference", &self.inner.reference)
            .field("kind", &self.kind())
            .finish_non_exhaustive()
    }
}

/// Opens and warms the guest of `reference`. It is a file (a Wasm module or component, a static-PIE
/// ELF for a micro-VM, or a Linux program), a snapshot of a warm guest (in a directory, an archive
/// or a remote), or an OCI image (in an image layout or a registry), whose program runs as a Linux
/// program. See [`Reference`] for how snapshots and images are named.
///
/// # Errors
/// [`OpenError`], with the cause and the way out.
pub fn open(reference: impl AsRef<Path>, options: &Options) -> Result<Guest, OpenError> {
    let path = reference.as_ref();
    if let Some(reference) = snapshot_meant(path)? {
        return Guest::thaw(&reference, options);
    }
    let read = |source| OpenError::Read { path: path.to_owned(), source };
    let bytes = std::fs::read(path).map_err(read)?;
    let name = &*path.to_string_lossy();
    Guest::from_file(&GuestFile { name, bytes: &bytes, path: Some(path) }, options)
}

/// The snapshot that is meant, unless it is a guest's own file.
fn snapshot_meant(path: &Path) -> Result<Option<Reference>, OpenError> {
    if path.is_file() && !is_archive(path)? {
        return Ok(None);
    }
    let reference = match path.to_str() {
        Some(text) => text
            .parse()
            .map_err(|source| OpenError::Reference { reference: text.to_owned(), source })?,
        // A name behind an `@` is text.
        None => Reference::at(path),
    };
    Ok(reference.place().exists().then_some(reference))
}

/// Whether the file is a tar archive, as a snapshot in a single file is.
fn is_archive(path: &Path) -> Result<bool, OpenError> {
    let read = |source| OpenError::Read { path: path.to_owned(), source };
    let mut start = Vec::new();
    let file = std::fs::File::open(path).map_err(read)?;
    file.take(512).read_to_end(&mut start).map_err(read)?;
    Ok(start.get(257..262) == Some(b"ustar"))
}

impl Guest {
    /// Makes a guest from the bytes of its file: a Wasm module or component, or an ELF executable.
    /// Errors name it `name`. A Linux program finds its file under the last part of the name.
    ///
    /// # Errors
    /// As [`open`].
    pub fn from_bytes(name: &str, bytes: &[u8], options: &Options) -> Result<Self, OpenError> {
        Self::from_file(&GuestFile { name, bytes, path: None }, options)
    }

    fn from_file(file: &GuestFile<'_>, options: &Options) -> Result<Self, OpenError> {
        let kind = options.guest.kind.or_else(|| Kind::of(file.bytes));
        let kind = kind.ok_or_else(|| OpenError::Unknown { path: file.name.into() })?;
        let backend = backend::open_file(kind, file, options)?;
        Ok(Self::put_together(backend, options, None, file.name.to_owned()))
    }

    fn put_together(
        backend: Backend,
        options: &Options,
        origin: Option<Origin>,
        reference: String,
    ) -> Self {
        let (options, digest_base) = (options.clone(), OnceLock::new());
        let inner = Inner { backend, options, origin, reference, digest_base };
        Self { inner: Arc::new(inner) }
    }

    /// Makes a guest of a snapshot.
    fn thaw(reference: &Reference, options: &Options) -> Result<Self, OpenError> {
        let said = reference.to_string();
        let started = Instant::now();
        let FoundSnapshot { reference, snapshot } = match reference.find(options) {
            Ok(found) => found,
            Err(error) => {
                let backend = backend::open_image(reference, options, error)?;
                return Ok(Self::put_together(backend, options, None, said));
            }
        };
        if !options.guest.warm_up.is_empty() {
            return Err(OpenError::Option {
                reference: said,
                why: "it is a snapshot of a warm guest; only a guest that is not warm yet takes a warm-up",
            });
        }
        let (backend, memory) = backend::thaw(&said, snapshot.clone(), options)?;
        let origin = Origin { reference, snapshot, memory, took: started.elapsed() };
        Ok(Self::put_together(backend, options, Some(origin), said))
    }

    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> Kind {
        dispatch!(Backend, &self.inner.backend, guest => guest.kind())
    }

    /// The snapshot from which it was opened, if any.
    #[must_use]
    pub fn origin(&self) -> Option<&Origin> {
        self.inner.origin.as_ref()
    }

    /// A guest that lives behind the scenes.
    pub(crate) fn assemble(backend: Backend, options: &Options) -> Self {
        Self::put_together(backend, options, None, "the guest".to_owned())
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }

    /// Takes an instance in the warm state, for one or several calls. Dropping the lease returns
    /// it.
    ///
    /// # Errors
    /// [`LeaseError::Exhausted`] or [`LeaseError::Timeout`] when all instances are in use,
    /// [`LeaseError::Create`] and [`LeaseError::Guest`] when a new one cannot be made.
    #[inline]
    pub fn lease(&self) -> Result<Lease<'_>, LeaseError> {
        Lease::begin(self)
    }

    /// As [`Guest::lease`], with options of this lease.
    ///
    /// # Errors
    /// As [`Guest::lease`]; [`LeaseError::Option`] for one that the guest cannot have.
    pub fn lease_with(&self, options: &LeaseOptions) -> Result<Lease<'_>, LeaseError> {
        Lease::begin_with(self, options)
    }

    /// As [`Guest::lease`], for a lease that owns a reference to the guest: see [`OwnedLease`]. It
    /// takes some nanoseconds longer, for a reference count that all threads share.
    ///
    /// # Errors
    /// As [`Guest::lease`].
    pub fn lease_owned(&self) -> Result<OwnedLease, LeaseError> {
        OwnedLease::begin_owned(self, &LeaseOptions::new())
    }

    /// As [`Guest::lease_owned`], with options of this lease.
    ///
    /// # Errors
    /// As [`Guest::lease_with`].
    pub fn lease_owned_with(&self, options: &LeaseOptions) -> Result<OwnedLease, LeaseError> {
        OwnedLease::begin_owned(self, options)
    }

    /// A live guest whose calls build on one another, starting in the warm state. The first call
    /// makes its instance.
    ///
    /// # Errors
    /// [`SessionError::Guest`] for a component, [`SessionError::State`] for a module in fresh mode.
    pub fn session(&self) -> Result<Session, SessionError> {
        Session::begin(self)
    }

    /// Calls a handler with bytes from the warm state, and undoes the call.
    ///
    /// # Errors
    /// [`CallError`]. The next call starts from the warm state in any case.
    #[inline]
    pub fn call<'f>(
        &self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
    ) -> Result<Vec<u8>, CallError> {
        self.lease()?.call(function, input)
    }

    /// As [`Guest::call`], with options of this call.
    ///
    /// # Errors
    /// As [`Guest::call`]; [`CallError::Option`] for one that the guest cannot have.
    pub fn call_with<'f>(
        &self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
        options: &CallOptions,
    ) -> Result<Vec<u8>, CallError> {
        self.lease()?.call_with(function, input, options)
    }

    /// Makes any call from the warm state, and undoes it.
    ///
    /// # Errors
    /// As [`Guest::call`].
    pub fn invoke(&self, call: &Call) -> Result<Answer, CallError> {
        self.lease()?.invoke(call)
    }

    /// As [`Guest::invoke`], with options of this call.
    ///
    /// # Errors
    /// As [`Guest::call_with`].
    pub fn invoke_with(&self, call: &Call, options: &CallOptions) -> Result<Answer, CallError> {
        self.lease()?.invoke_with(call, options)
    }

    /// Looks up a handler of bytes, for repeated calls.
    ///
    /// # Errors
    /// [`CallError::Request`] when the guest has no such handler. For components, micro-VMs and
    /// programs, the first call reports it.
    pub fn function(&self, name: &str) -> Result<Function, CallError> {
        dispatch!(Backend, &self.inner.backend, guest => guest.find_function(name))
    }

    /// Counters of the guest's pool of instances.
    #[must_use]
    pub fn pool_stats(&self) -> PoolStats {
        dispatch!(Backend, &self.inner.backend, guest => guest.count_instances())
    }

    /// The name of its reset method, such as `write-set-uffd`. `afresh doctor` explains it.
    #[must_use]
    pub fn strategy(&self) -> String {
        dispatch!(Backend, &self.inner.backend, guest => guest.describe_resets())
    }

    /// Whether it is a Linux program that listens on a port instead of reading input. A call then
    /// sends its input over a new connection, and the output of the connection is the answer. For
    /// an HTTP server both are the bytes of a message.
    #[must_use]
    pub fn listens(&self) -> bool {
        dispatch!(Backend, &self.inner.backend, guest => guest.is_listening())
    }
}
