//! How something is opened. The defaults suit a guest that is trusted with time and memory.

use std::path::PathBuf;
#[cfg(any(feature = "wasm", feature = "vm", feature = "linux"))]
use std::time::Duration;

#[cfg(any(feature = "wasm", feature = "vm", feature = "linux"))]
use crate::Call;
use crate::access::Access;

#[cfg(feature = "vm")]
type Build = dyn Fn(afresh_vm::SandboxBuilder) -> afresh_vm::SandboxBuilder + Send + Sync;
#[cfg(feature = "linux")]
type Shape = dyn Fn(afresh_linux::Program) -> afresh_linux::Program + Send + Sync;

/// Options and limits of a guest.
///
/// Options that every kind of guest has are set here; those of one kind go to the crate below ([`Options::wasm`],
/// [`Options::vm`], [`Options::linux`]).
#[derive(Clone, Default)]
#[must_use]
pub struct Options {
    pub(crate) access: Access,
    cache: Option<PathBuf>,
    page_cache: Option<PathBuf>,
    #[cfg(any(feature = "wasm", feature = "vm", feature = "linux"))]
    pub(crate) warm_up: Vec<Call>,
    #[cfg(any(feature = "wasm", feature = "vm", feature = "linux"))]
    pub(crate) timeout: Option<Duration>,
    #[cfg(any(feature = "wasm", feature = "vm", feature = "linux"))]
    pub(crate) memory: Option<u64>,
    #[cfg(any(feature = "wasm", feature = "vm", feature = "linux"))]
    pub(crate) kind: Option<crate::Kind>,
    #[cfg(any(feature = "wasm", feature = "vm", feature = "linux"))]
    pub(crate) limits: afresh_pool::Limits,
    #[cfg(feature = "wasm")]
    pub(crate) engine: Option<afresh_wasm::Engine>,
    #[cfg(feature = "wasm")]
    stack: Option<usize>,
    #[cfg(feature = "wasm")]
    files: Option<afresh_files::Tree>,
    #[cfg(feature = "wasm")]
    pub(crate) wasm: afresh_wasm::GuestOptions,
    #[cfg(feature = "vm")]
    pub(crate) vm: Option<std::sync::Arc<Build>>,
    #[cfg(feature = "linux")]
    pub(crate) linux: Option<std::sync::Arc<Shape>>,
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("cache", &self.cache)
            .field("page_cache", &self.page_cache)
            .finish_non_exhaustive()
    }
}

impl Options {
    /// No limits, no cache, nothing demanded, no warm-up.
    pub fn new() -> Self {
        Self::default()
    }

    /// Demands on snapshots: a signature, a key.
    #[cfg(feature = "seal")]
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Directory for compiled guests, pages of remote snapshots and OCI images between runs. The files are native
    /// code, so the directory must be the embedder's own. Nothing is kept if not set.
    pub fn cache(mut self, dir: impl Into<PathBuf>) -> Self {
        self.cache = Some(dir.into());
        self
    }

    /// Directory for pages of remote snapshots, if not `pages` below [`Options::cache`]. Any number of processes may
    /// share it.
    pub fn cache_pages(mut self, dir: impl Into<PathBuf>) -> Self {
        self.page_cache = Some(dir.into());
        self
    }

    /// Directory for OCI images.
    #[cfg(all(feature = "linux", feature = "remote"))]
    pub(crate) fn image_cache(&self) -> Option<PathBuf> {
        Some(self.cache.as_ref()?.join("images"))
    }

    #[cfg(feature = "remote")]
    pub(crate) fn page_cache(&self) -> Option<PathBuf> {
        self.page_cache.clone().or_else(|| Some(self.cache.as_ref()?.join("pages")))
    }
}

/// Options of guests.
#[cfg(any(feature = "wasm", feature = "vm", feature = "linux"))]
impl Options {
    /// Adds a call to the warm-up: the state that all of them leave is the one every later call starts
    /// from. For Wasm guests, and for Linux programs, which get it as input; a snapshot is warm already, a micro-VM
    /// warms itself up.
    pub fn warm(mut self, call: Call) -> Self {
        self.warm_up.push(call);
        self
    }

    /// The calls of the warm-up.
    #[must_use]
    pub fn warm_up(&self) -> &[Call] {
        &self.warm_up
    }

    /// Time limit of one call.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Maximum bytes of one memory of a Wasm guest; for a micro-VM, its memory, 64 MiB if not set; for a Linux
    /// program, its mappings, 1 GiB if not set.
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = Some(bytes);
        self
    }

    /// The kind of the file, overriding [`Kind::of`](crate::Kind::of): a static Linux program looks the same as a
    /// micro-VM program.
    pub fn kind(mut self, kind: crate::Kind) -> Self {
        self.kind = Some(kind);
        self
    }

    /// Limits of the pool of instances that calls draw from.
    pub fn limits(mut self, limits: afresh_pool::Limits) -> Self {
        self.limits = limits;
        self
    }
}

#[cfg(feature = "wasm")]
impl Options {
    /// The engine to run in. Guests that share one share its thread for timeouts and its configuration, which must
    /// then allow these options. If not set, it is the one that the process's guests with the same needs share
    /// ([`afresh_wasm::Engine::shared`]).
    pub fn engine(mut self, engine: afresh_wasm::Engine) -> Self {
        self.engine = Some(engine);
        self
    }

    /// Maximum bytes of native stack for a Wasm guest. By default it is the size that the guest was built for, if its
    /// file shows it, and otherwise 512 KiB. It is part of the engine, so it does not change a given one.
    pub fn stack(mut self, bytes: usize) -> Self {
        self.stack = Some(bytes);
        self
    }

    /// Options of Wasm guests alone: mode, strategy, WASI, imports, fuel. Its time limit, memory limit and pool
    /// limits give way to those of these options.
    pub fn wasm(mut self, options: afresh_wasm::GuestOptions) -> Self {
        self.wasm = options;
        self
    }

    /// A file tree in memory for the guest, which it finds as `/`. It is part of its state: each call starts from the
    /// tree after the warm-up, sessions checkpoint, roll back and fork it with the memory, and snapshots hold it, the
    /// files of its layers included. A snapshot with files has its own tree, and takes only the budget from this one
    /// (default: 64 MiB in 65,536 files). Host directories that WASI gets instead ([`afresh_wasm::Wasi::dirs`]) are
    /// not part of any state.
    pub fn files(mut self, files: afresh_files::Tree) -> Self {
        self.files = Some(files);
        self
    }

    /// The tree below the files of snapshots that do not hold it ([`afresh_files::Layer::known_as`]): a tree over the
    /// same layers. Snapshots that hold their files whole, or have none, need none of it.
    pub fn files_below(mut self, files: afresh_files::Tree) -> Self {
        self.wasm.files_below = Some(files);
        self
    }

    /// The given engine, or a new one for a guest whose file may be available, or which had this native stack when it
    /// was frozen.
    pub(crate) fn make_engine(
        &self,
        wasm: Option<&[u8]>,
        had: Option<usize>,
    ) -> Result<afresh_wasm::Engine, afresh_wasm::LoadError> {
        if let Some(engine) = &self.engine {
            return Ok(engine.clone());
        }
        let usual = afresh_wasm::EngineConfig::default();
        let config = afresh_wasm::EngineConfig {
            timeouts: self.timeout.or(self.wasm.timeout).is_some() || self.wasm.watch.is_some(),
            fuel: self.wasm.fuel.is_some(),
            cache: self.cache.clone(),
            stack: self.stack.or(had).unwrap_or(usual.stack),
            ..usual
        };
        afresh_wasm::Engine::shared(match (self.stack, wasm) {
            (None, Some(wasm)) => config.stack_for(wasm),
            _ => config,
        })
    }

    /// The options of a Wasm guest.
    pub(crate) fn for_wasm(&self) -> afresh_wasm::GuestOptions {
        let mut options = self.wasm.clone();
        options.limits = self.limits;
        if let Some(files) = &self.files {
            options.wasi.files = Some(files.clone());
        }
        if let Some(timeout) = self.timeout {
            options.timeout = Some(timeout);
        }
        if let Some(bytes) = self.memory {
            options.memory_limit = usize::try_from(bytes).unwrap_or(usize::MAX);
        }
        options
    }
}

#[cfg(feature = "vm")]
impl Options {
    /// Options of micro-VMs alone: `build` adds host functions, regions, a log and so on to the builder, for a
    /// program and for a snapshot alike.
    pub fn vm(
        mut self,
        build: impl Fn(afresh_vm::SandboxBuilder) -> afresh_vm::SandboxBuilder + Send + Sync + 'static,
    ) -> Self {
        self.vm = Some(std::sync::Arc::new(build));
        self
    }

    /// The builder of a micro-VM.
    pub(crate) fn builder(&self) -> afresh_vm::SandboxBuilder {
        let mut builder = afresh_vm::Sandbox::builder();
        if let Some(build) = &self.vm {
            builder = build(builder);
        }
        match self.timeout {
            Some(timeout) => builder.timeout(timeout),
            None => builder,
        }
    }
}

#[cfg(feature = "linux")]
impl Options {
    /// Options of Linux programs alone: `shape` adds arguments, environment, files and granted directories, for a
    /// program and for the directories that a snapshot of one may read.
    pub fn linux(
        mut self,
        shape: impl Fn(afresh_linux::Program) -> afresh_linux::Program + Send + Sync + 'static,
    ) -> Self {
        self.linux = Some(std::sync::Arc::new(shape));
        self
    }
}
