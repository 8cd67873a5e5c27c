//! The front door: something that is named becomes a guest that can be called.
//!
//! Promises: all kinds of guests open the same way from every place, and every call
//! starts from the same state. May break it: see the kinds of guests below.

use std::io::Read;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use afresh_pager::SnapshotMemory;
use afresh_pool::PoolStats;
use afresh_store::Snapshot;

use crate::call::{Entry, Function};
use crate::delta::DigestBase;
#[cfg(feature = "vm")]
use crate::machine::{Machines, machines};
#[cfg(feature = "linux")]
use crate::program::{self, Programs};
use crate::{
    Answer, Call, CallError, Cause, Lease, LeaseError, OpenError, Options, Reference, Session,
    SessionError,
};

/// The kind of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// A Wasm core module.
    Module,
    /// A Wasm component.
    Component,
    /// A micro-VM.
    Machine,
    /// A Linux program, as it is.
    Program,
}

impl Kind {
    /// Recognises a guest by its file; `None` for any other file. An ELF executable that names a dynamic loader is a
    /// Linux program, another a micro-VM's, unless [`Options::kind`] is set.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Option<Self> {
        if bytes.starts_with(b"\x7fELF") {
            Some(if names_loader(bytes) { Self::Program } else { Self::Machine })
        } else if !bytes.starts_with(b"\0asm") {
            None
        } else if bytes.get(6..8) == Some(&[1, 0]) {
            // The layer field follows the version in the binary's header.
            Some(Self::Component)
        } else {
            Some(Self::Module)
        }
    }
}

/// Whether an ELF file has a header that names a dynamic loader (`PT_INTERP`).
fn names_loader(elf: &[u8]) -> bool {
    let word =
        |at: usize| Some(u64::from_le_bytes(elf.get(at..at.checked_add(8)?)?.try_into().ok()?));
    let half = |at: usize| Some(u16::from_le_bytes(elf.get(at..at + 2)?.try_into().ok()?));
    let (Some(first), Some(size), Some(count)) = (word(32), half(54), half(56)) else {
        return false;
    };
    (0..usize::from(count)).any(|index| {
        let at =
            usize::try_from(first).ok().and_then(|at| at.checked_add(index * usize::from(size)));
        let kind = at.and_then(|at| elf.get(at..at.checked_add(4)?));
        kind == Some(&[3, 0, 0, 0])
    })
}

/// A guest of any kind, warm and ready to be called. Cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct Guest {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) ready: Backend,
    pub(crate) options: Options,
    origin: Option<Origin>,
    reference: String,
    /// The base of digests of its sessions' states.
    pub(crate) anchor: OnceLock<DigestBase>,
}

pub(crate) enum Backend {
    #[cfg(feature = "wasm")]
    Module(afresh_wasm::Warm),
    #[cfg(feature = "wasm")]
    Component(afresh_wasm::WarmComponent),
    #[cfg(feature = "vm")]
    Machine(Box<Machines>),
    #[cfg(feature = "linux")]
    Program(Box<Programs>),
}

/// The snapshot that a guest came out of.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Origin {
    /// Where it is, and the name it was found under.
    pub reference: Reference,
    /// The snapshot.
    pub snapshot: Snapshot,
    /// Its pages, which may still be arriving.
    pub memory: SnapshotMemory,
    /// Time from the first look at the place to a guest that can be called.
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

/// Opens what `reference` names and makes a guest of it, warm and ready to be called: a file (a Wasm
/// module or component, a static-PIE ELF for a micro-VM, or a Linux program), a snapshot of a warm guest, in
/// a directory, an archive or a remote, or a container's image, in a directory of the OCI layout or a registry, whose
/// program is run as one of Linux. See [`Reference`] for how snapshots and images are named.
///
/// # Errors
/// [`OpenError`], with the cause and the way out.
pub fn open(reference: impl AsRef<str>, options: &Options) -> Result<Guest, OpenError> {
    let text = reference.as_ref();
    if let Some(reference) = snapshot_meant(text)? {
        return Guest::thaw(&reference, options);
    }
    let path = Path::new(text);
    let read = |source| OpenError::Read { path: path.to_owned(), source };
    let bytes = std::fs::read(path).map_err(read)?;
    #[cfg(feature = "linux")]
    if options.kind.or_else(|| Kind::of(&bytes)) == Some(Kind::Program) {
        return Guest::from_program(text, path, options);
    }
    Guest::from_bytes(text, &bytes, options)
}

/// The snapshot that is meant, unless it is a guest's own file.
fn snapshot_meant(text: &str) -> Result<Option<Reference>, OpenError> {
    let path = Path::new(text);
    if path.is_file() && !is_archive(path)? {
        return Ok(None);
    }
    let reference: Reference = text
        .parse()
        .map_err(|source| OpenError::Reference { reference: text.to_owned(), source })?;
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

#[cfg(not(all(feature = "wasm", feature = "vm", feature = "linux")))]
fn lacking(reference: &str, feature: &'static str) -> OpenError {
    OpenError::Feature { what: reference.to_owned(), feature }
}

fn failed(reference: &str, error: impl Into<Cause>) -> OpenError {
    OpenError::Guest { reference: reference.to_owned(), source: error.into() }
}

fn refused(reference: &str, why: &'static str) -> OpenError {
    OpenError::Option { reference: reference.to_owned(), why }
}

impl Guest {
    /// Makes a guest of the bytes of its file: a Wasm module or component, or an ELF executable. Errors refer to it
    /// by `name`. A Linux program gets the file in a separate tree, under the last part of the name.
    ///
    /// # Errors
    /// As [`open`].
    pub fn from_bytes(name: &str, bytes: &[u8], options: &Options) -> Result<Self, OpenError> {
        let kind = options
            .kind
            .or_else(|| Kind::of(bytes))
            .ok_or_else(|| OpenError::Unknown { path: name.into() })?;
        let ready = match kind {
            #[cfg(feature = "wasm")]
            Kind::Module => module(name, bytes, options)?,
            #[cfg(feature = "wasm")]
            Kind::Component => component(name, bytes, options)?,
            #[cfg(not(feature = "wasm"))]
            Kind::Module | Kind::Component => return Err(lacking(name, "wasm")),
            #[cfg(feature = "vm")]
            Kind::Machine => machine(name, bytes, options)?,
            #[cfg(not(feature = "vm"))]
            Kind::Machine => return Err(lacking(name, "vm")),
            #[cfg(feature = "linux")]
            Kind::Program => {
                let path =
                    Path::new("/").join(Path::new(name).file_name().unwrap_or("program".as_ref()));
                program::ready(name, &path, Some(bytes), options)?
            }
            #[cfg(not(feature = "linux"))]
            Kind::Program => return Err(lacking(name, "linux")),
        };
        Ok(Self::put_together(ready, options, None, name.to_owned()))
    }

    /// Warms a Linux program where its file is.
    #[cfg(feature = "linux")]
    fn from_program(name: &str, path: &Path, options: &Options) -> Result<Self, OpenError> {
        let ready = program::ready(name, path, None, options)?;
        Ok(Self::put_together(ready, options, None, name.to_owned()))
    }

    fn put_together(
        ready: Backend,
        options: &Options,
        origin: Option<Origin>,
        reference: String,
    ) -> Self {
        let (options, anchor) = (options.clone(), OnceLock::new());
        let inner = Inner { ready, options, origin, reference, anchor };
        Self { inner: Arc::new(inner) }
    }

    /// Makes a guest of a snapshot.
    fn thaw(reference: &Reference, options: &Options) -> Result<Self, OpenError> {
        let said = reference.to_string();
        let started = Instant::now();
        let (reference, snapshot) = match reference.find(options) {
            Ok(found) => found,
            #[cfg(feature = "linux")]
            Err(error) => {
                let ready = crate::oci_image::ready(reference, options, error)?;
                return Ok(Self::put_together(ready, options, None, said));
            }
            #[cfg(not(feature = "linux"))]
            Err(error) => return Err(error),
        };
        if !options.warm_up.is_empty() {
            return Err(refused(
                &said,
                "it is a snapshot of a warm guest; only a guest that is not warm yet takes a warm-up",
            ));
        }
        let (ready, memory) = match snapshot.guest().kind.as_str() {
            #[cfg(feature = "wasm")]
            "wasm" => {
                let frozen = afresh_wasm::Frozen::load(snapshot.clone(), &lazily())
                    .map_err(|e| failed(&said, e))?;
                let ready = thaw_wasm(&frozen, options).map_err(|e| failed(&said, e))?;
                (ready, frozen.memory().clone())
            }
            #[cfg(not(feature = "wasm"))]
            "wasm" => return Err(lacking(&said, "wasm")),
            #[cfg(feature = "vm")]
            "vm" => {
                let frozen = afresh_vm::Frozen::load(snapshot.clone(), &lazily())
                    .map_err(|e| failed(&said, e))?;
                let sandbox = options.builder().thaw(&frozen).map_err(|e| failed(&said, e))?;
                let machines = machines(sandbox, options).map_err(|e| failed(&said, e))?;
                (Backend::Machine(Box::new(machines)), frozen.memory().clone())
            }
            #[cfg(not(feature = "vm"))]
            "vm" => return Err(lacking(&said, "vm")),
            #[cfg(feature = "linux")]
            "linux" => {
                let frozen = afresh_linux::Frozen::load(snapshot.clone(), &lazily())
                    .map_err(|e| failed(&said, e))?;
                let grants = options.grants();
                let warm =
                    afresh_linux::Warm::thaw(&frozen, &grants).map_err(|e| failed(&said, e))?;
                let ready = program::programs(warm, options).map_err(|e| failed(&said, e))?;
                (ready, frozen.memory().clone())
            }
            #[cfg(not(feature = "linux"))]
            "linux" => return Err(lacking(&said, "linux")),
            other => return Err(OpenError::Kind { reference: said, kind: other.to_owned() }),
        };
        let origin = Origin { reference, snapshot, memory, took: started.elapsed() };
        Ok(Self::put_together(ready, options, Some(origin), said))
    }

    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match &self.inner.ready {
            #[cfg(feature = "wasm")]
            Backend::Module(_) => Kind::Module,
            #[cfg(feature = "wasm")]
            Backend::Component(_) => Kind::Component,
            #[cfg(feature = "vm")]
            Backend::Machine(_) => Kind::Machine,
            #[cfg(feature = "linux")]
            Backend::Program(_) => Kind::Program,
        }
    }

    /// The snapshot that it came out of, if it did.
    #[must_use]
    pub fn origin(&self) -> Option<&Origin> {
        self.inner.origin.as_ref()
    }

    /// A guest that lives behind the scenes.
    #[cfg(any(feature = "linux", feature = "vm", feature = "wasm"))]
    pub(crate) fn assemble(ready: Backend, options: &Options) -> Self {
        Self::put_together(ready, options, None, "the guest".to_owned())
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }

    /// An instance in the warm state, for one call or several that belong together. Dropping the lease
    /// brings it back.
    ///
    /// # Errors
    /// [`LeaseError`] when the pool is exhausted or an instance cannot be made.
    #[inline]
    pub fn lease(&self) -> Result<Lease<'_>, LeaseError> {
        Lease::begin(self)
    }

    /// A live guest, whose calls continue from one another, beginning in the warm state. Its instance is made by the
    /// first call.
    ///
    /// # Errors
    /// [`SessionError::Guest`] for a component, [`SessionError::State`] for a module in fresh mode.
    pub fn session(&self) -> Result<Session, SessionError> {
        Session::begin(self)
    }

    /// Calls a handler with bytes from the warm state, and undoes the call.
    ///
    /// # Errors
    /// [`CallError`]; the next call starts from the warm state all the same.
    #[inline]
    pub fn call<'f>(
        &self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
    ) -> Result<Vec<u8>, CallError> {
        self.lease()?.call(function, input)
    }

    /// Makes any call from the warm state, and undoes it.
    ///
    /// # Errors
    /// As [`Guest::call`].
    pub fn ask(&self, call: &Call) -> Result<Answer, CallError> {
        self.lease()?.ask(call)
    }

    /// Looks a handler of bytes up, to be called many times.
    ///
    /// # Errors
    /// [`CallError::Request`] when the guest has no such handler. For components, micro-VMs and programs, the first
    /// call reports it.
    pub fn function(&self, name: &str) -> Result<Function, CallError> {
        match &self.inner.ready {
            #[cfg(feature = "wasm")]
            Backend::Module(warm) => {
                let entry = warm.bytes_entry(name).map_err(|e| CallError::of_wasm(name, e))?;
                Ok(Function { name: name.to_owned(), entry: Some(entry) })
            }
            #[allow(unreachable_patterns, reason = "without Wasm there is no other")]
            _ => Ok(Function {
                name: name.to_owned(),
                #[cfg(feature = "wasm")]
                entry: None,
            }),
        }
    }

    /// Counters of its pool of instances.
    #[must_use]
    pub fn pool_stats(&self) -> PoolStats {
        match &self.inner.ready {
            #[cfg(feature = "wasm")]
            Backend::Module(warm) => warm.pool_stats(),
            #[cfg(feature = "wasm")]
            Backend::Component(warm) => warm.pool_stats(),
            #[cfg(feature = "vm")]
            Backend::Machine(machines) => machines.stats(),
            #[cfg(feature = "linux")]
            Backend::Program(programs) => programs.stats(),
        }
    }

    /// The method of its resets in a word: `write-set-uffd`, say. `afresh doctor` explains it.
    #[must_use]
    pub fn strategy(&self) -> String {
        match &self.inner.ready {
            #[cfg(feature = "wasm")]
            Backend::Module(warm) => warm.strategy().to_string(),
            #[cfg(feature = "wasm")]
            Backend::Component(warm) => warm.strategy().to_string(),
            #[cfg(feature = "vm")]
            Backend::Machine(machines) => machines.pristine.reset_method().to_string(),
            #[cfg(feature = "linux")]
            Backend::Program(programs) => programs.pristine.resets_by().to_string(),
        }
    }

    /// The warm module, if it is one: for typed calls, host state, owned leases and calls that wait.
    #[cfg(feature = "wasm")]
    #[must_use]
    pub fn as_module(&self) -> Option<&afresh_wasm::Warm> {
        match &self.inner.ready {
            Backend::Module(warm) => Some(warm),
            #[allow(unreachable_patterns, reason = "other kinds are other features")]
            _ => None,
        }
    }

    /// Whether it is a Linux program that reads no input but listens on a port: a call's input then goes into a new
    /// connection, and the output of the connection is the answer. For a server of HTTP both are the bytes of a
    /// message.
    #[must_use]
    pub fn listens(&self) -> bool {
        match &self.inner.ready {
            #[cfg(feature = "linux")]
            Backend::Program(programs) => programs.pristine.listens(),
            #[allow(unreachable_patterns, reason = "other kinds are other features")]
            _ => false,
        }
    }

    /// The component, if it is one.
    #[cfg(feature = "wasm")]
    #[must_use]
    pub fn as_component(&self) -> Option<&afresh_wasm::WarmComponent> {
        match &self.inner.ready {
            Backend::Component(warm) => Some(warm),
            #[allow(unreachable_patterns, reason = "other kinds are other features")]
            _ => None,
        }
    }

    /// The state that a micro-VM's calls start from, if it is one.
    #[cfg(feature = "vm")]
    #[must_use]
    pub fn as_machine(&self) -> Option<&afresh_vm::Snapshot> {
        match &self.inner.ready {
            Backend::Machine(machines) => Some(&machines.pristine),
            #[allow(unreachable_patterns, reason = "other kinds are other features")]
            _ => None,
        }
    }

    /// The warm program, if it is one of Linux.
    #[cfg(feature = "linux")]
    #[must_use]
    pub fn as_program(&self) -> Option<&afresh_linux::Warm> {
        match &self.inner.ready {
            Backend::Program(programs) => Some(&programs.pristine),
            #[allow(unreachable_patterns, reason = "other kinds are other features")]
            _ => None,
        }
    }
}

fn lazily() -> afresh_pager::Options {
    afresh_pager::Options::default()
}

/// A warm Wasm guest out of a frozen one.
#[cfg(feature = "wasm")]
pub(crate) fn thaw_wasm(frozen: &afresh_wasm::Frozen, options: &Options) -> Result<Backend, Cause> {
    let (engine, wasm) = (options.make_engine(None, frozen.stack())?, options.for_wasm());
    Ok(if frozen.is_component() {
        Backend::Component(afresh_wasm::WarmComponent::thaw(&engine, &wasm, frozen)?)
    } else {
        Backend::Module(afresh_wasm::Warm::thaw(&engine, &wasm, frozen)?)
    })
}

/// The calls of the warm-up.
#[cfg(feature = "wasm")]
fn warm_up(options: &Options) -> afresh_wasm::WarmUp {
    use crate::call::CallInput;
    let mut warm_up = afresh_wasm::WarmUp::new();
    for call in &options.warm_up {
        match &call.given {
            CallInput::Text(texts) => warm_up = warm_up.call_text(&call.function, texts),
            CallInput::Bytes(input) => warm_up = warm_up.call_bytes(&call.function, input.clone()),
        }
    }
    warm_up
}

#[cfg(feature = "wasm")]
fn module(name: &str, wasm: &[u8], options: &Options) -> Result<Backend, OpenError> {
    let load = |e| failed(name, e);
    let engine = options.make_engine(Some(wasm), None).map_err(load)?;
    let guest =
        afresh_wasm::Guest::with_options(&engine, wasm, options.for_wasm()).map_err(load)?;
    let warm = guest.warm(warm_up(options)).map_err(|e| failed(name, e))?;
    Ok(Backend::Module(warm))
}

#[cfg(feature = "wasm")]
fn component(name: &str, wasm: &[u8], options: &Options) -> Result<Backend, OpenError> {
    let load = |e| failed(name, e);
    let engine = options.make_engine(Some(wasm), None).map_err(load)?;
    let guest =
        afresh_wasm::Guest::with_options(&engine, wasm, options.for_wasm()).map_err(load)?;
    let warm = guest.warm_component_with(&warm_up(options));
    Ok(Backend::Component(warm.map_err(|e| failed(name, e))?))
}

#[cfg(feature = "vm")]
fn machine(name: &str, elf: &[u8], options: &Options) -> Result<Backend, OpenError> {
    if !options.warm_up.is_empty() {
        return Err(refused(
            name,
            "a micro-VM warms itself up when it is initialised; a warm-up is for Wasm modules",
        ));
    }
    let builder = options.builder().memory(options.memory.unwrap_or(64 << 20));
    let sandbox = builder.build(elf).map_err(|e| failed(name, e))?;
    let machines = machines(sandbox, options).map_err(|e| failed(name, e))?;
    Ok(Backend::Machine(Box::new(machines)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_told_by_how_its_file_begins() {
        for (bytes, kind) in [
            (&b"\x7fELF\x02\x01"[..], Some(Kind::Machine)),
            (b"\0asm\x01\0\0\0", Some(Kind::Module)),
            (b"\0asm\x0d\0\x01\0", Some(Kind::Component)),
            (b"\0asm", Some(Kind::Module)),
            (b"(module)", None),
            (b"", None),
        ] {
            assert_eq!(Kind::of(bytes), kind, "{bytes:?}");
        }
    }
}
