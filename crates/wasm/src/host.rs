//! Host state: what a call owns besides the guest's own memory. Made new for every call.
//!
//! The WASI context is built when a call first uses WASI, so that calls which do not use it pay nothing,
//! and is dropped when the call's lease is.

use std::any::Any;
use std::sync::Arc;

use wasmtime::ResourceLimiter;
use wasmtime::component::ResourceTable;
use wasmtime_wasi::p1::WasiP1Ctx;
use wasmtime_wasi::p2::pipe::{MemoryInputPipe, MemoryOutputPipe};
use wasmtime_wasi::{FsPerms, WasiCtx, WasiCtxBuilder, WasiCtxView, WasiView};

/// Where the guest's standard output and error go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Output {
    /// Nowhere.
    #[default]
    Discard,
    /// To this process's own.
    Inherit,
    /// Into memory, up to this many bytes each; read with [`Host::stdout`] and [`Host::stderr`].
    Capture(usize),
}

/// What WASI gives to every call. Nothing but arguments and environment by default: no files, no
/// network.
#[derive(Clone, Debug, Default)]
pub struct Wasi {
    /// Command-line arguments, the program's name first.
    pub args: Vec<String>,
    /// Environment variables.
    pub env: Vec<(String, String)>,
    /// Host directories and the paths at which the guest sees them, read-only when `false`.
    pub dirs: Vec<(std::path::PathBuf, String, bool)>,
    /// Standard output and error.
    pub output: Output,
    /// Standard input; the same bytes for every call.
    pub stdin: Vec<u8>,
}

enum Context {
    None,
    P1(Box<WasiP1Ctx>),
    P2(Box<(WasiCtx, ResourceTable)>),
}

/// The state of one call that lives outside the guest; the `T` of its `Store<T>`.
pub struct Host {
    wasi: Arc<Wasi>,
    context: Context,
    stdout: Option<MemoryOutputPipe>,
    stderr: Option<MemoryOutputPipe>,
    memory_limit: usize,
    generation: u64,
    data: Option<Box<dyn Any + Send>>,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host")
            .field("generation", &self.generation)
            .field("memory_limit", &self.memory_limit)
            .finish_non_exhaustive()
    }
}

impl Host {
    pub(crate) fn new(wasi: Arc<Wasi>, memory_limit: usize) -> Self {
        Self {
            wasi,
            context: Context::None,
            stdout: None,
            stderr: None,
            memory_limit,
            generation: 0,
            data: None,
        }
    }

    /// Forgets everything that belonged to the last call.
    #[inline]
    pub(crate) fn clear(&mut self) {
        if !matches!(self.context, Context::None) {
            self.context = Context::None;
            self.stdout = None;
            self.stderr = None;
        }
        if self.data.is_some() {
            self.data = None;
        }
    }

    pub(crate) fn set_generation(&mut self, generation: u64) {
        self.generation = generation;
    }

    /// Number of this clone: no two leases of a process have the same. Guests read it by importing
    /// `afresh.generation`.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The embedder's own state for this call, as set by [`Host::set_data`].
    pub fn data<T: 'static>(&mut self) -> Option<&mut T> {
        self.data.as_mut()?.downcast_mut()
    }

    /// Sets the embedder's own state; it is dropped with the lease.
    pub fn set_data(&mut self, data: impl Any + Send) {
        self.data = Some(Box::new(data));
    }

    /// What the call wrote to standard output so far, when captured.
    #[must_use]
    pub fn stdout(&self) -> Vec<u8> {
        self.stdout.as_ref().map(|p| p.contents().to_vec()).unwrap_or_default()
    }

    /// What the call wrote to standard error so far, when captured.
    #[must_use]
    pub fn stderr(&self) -> Vec<u8> {
        self.stderr.as_ref().map(|p| p.contents().to_vec()).unwrap_or_default()
    }

    fn builder(&mut self) -> WasiCtxBuilder {
        let mut builder = WasiCtxBuilder::new();
        builder.args(&self.wasi.args).envs(&self.wasi.env);
        for (host, guest, writable) in &self.wasi.dirs {
            let permissions = if *writable { FsPerms::ReadWrite } else { FsPerms::ReadOnly };
            // A directory that went away is simply not there for the guest, as on any system.
            let _ = builder.preopened_dir(host, guest, permissions);
        }
        if !self.wasi.stdin.is_empty() {
            builder.stdin(MemoryInputPipe::new(self.wasi.stdin.clone()));
        }
        match self.wasi.output {
            Output::Discard => {}
            Output::Inherit => {
                builder.inherit_stdout().inherit_stderr();
            }
            Output::Capture(most) => {
                let (out, err) = (MemoryOutputPipe::new(most), MemoryOutputPipe::new(most));
                builder.stdout(out.clone()).stderr(err.clone());
                (self.stdout, self.stderr) = (Some(out), Some(err));
            }
        }
        builder
    }

    /// The preview 1 context, built on first use.
    pub(crate) fn p1(&mut self) -> &mut WasiP1Ctx {
        if !matches!(self.context, Context::P1(_)) {
            self.context = Context::P1(Box::new(self.builder().build_p1()));
        }
        match &mut self.context {
            Context::P1(context) => context,
            _ => unreachable!("just built"),
        }
    }
}

impl WasiView for Host {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        if !matches!(self.context, Context::P2(_)) {
            let context = self.builder().build();
            self.context = Context::P2(Box::new((context, ResourceTable::new())));
        }
        match &mut self.context {
            Context::P2(context) => WasiCtxView { ctx: &mut context.0, table: &mut context.1 },
            _ => unreachable!("just built"),
        }
    }
}

impl ResourceLimiter for Host {
    fn memory_growing(
        &mut self,
        _current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        Ok(desired <= self.memory_limit)
    }

    fn table_growing(
        &mut self,
        _current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        // A table element takes a few words of host memory; the memory limit bounds those too.
        Ok(desired.saturating_mul(16) <= self.memory_limit)
    }
}
