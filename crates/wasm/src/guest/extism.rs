//! Plug-ins of Extism as guests: the host functions of their SDK, next to the kernel that they are
//! linked with.
//!
//! Promises: a function of a plug-in is called like any handler of bytes
//! ([`Warm::bytes_entry`](crate::Warm::bytes_entry)). Its memory, the memory of the kernel and its
//! variables are guest state: each lease starts from their warm state, sessions roll them back, and
//! snapshots hold them.
//!
//! May break it: an address from a plug-in is looked up in its kernel, so a wrong one damages only
//! its own memory. A variable is a file in the tree of the guest, in [`VARIABLES`], where a plug-in
//! that also uses WASI can see it.

use std::collections::BTreeMap;
use std::sync::Arc;

use afresh_files::{Budget, Refused, Time, Tree};
use afresh_rewrite::extism::{FAILED, KERNEL, linked};
use afresh_rewrite::names;
use wasmtime::{Caller, Engine as WasmtimeEngine, Extern, FuncType, Linker, Val, ValType};

use crate::engine::call_path::now;
use crate::error::PluginFailure;
use crate::host::Host;
use crate::{Engine, Guest, GuestOptions, LoadError};

/// Directory of variables, each a file named by the digest of its name.
const VARIABLES: &str = "/extism-vars";
/// Bytes of variables of a plug-in whose guest has no file tree of the embedder: the limit of
/// Extism.
const VARIABLE_BUDGET: Budget = Budget { bytes: 1 << 20, files: 4096 };

/// Severity of a log message, lowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// For the author of the plug-in.
    Trace,
    /// For finding an error.
    Debug,
    /// Normal operation.
    Info,
    /// A possible error.
    Warn,
    /// An error.
    Error,
}

type Log = dyn Fn(LogLevel, &str) + Send + Sync;

/// Host of an Extism plug-in: its configuration and log. The default has no configuration and drops
/// the log.
///
/// HTTP requests are refused, unless [`GuestOptions::imports`] defines `http_request` of
/// `extism:host/env`. Functions of `extism:host/user` are defined there as well, with
/// [`extism_bytes`] and [`extism_handle`] for arguments and results.
#[derive(Clone, Default)]
pub struct Extism {
    config: BTreeMap<String, String>,
    log: Option<(LogLevel, Arc<Log>)>,
}

impl std::fmt::Debug for Extism {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let level = self.log.as_ref().map(|(level, _)| level);
        f.debug_struct("Extism").field("config", &self.config).field("log", &level).finish()
    }
}

impl Extism {
    /// The default.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a configuration value for the plug-in.
    #[must_use]
    pub fn config(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.config.insert(key.into(), value.into());
        self
    }

    /// Passes log messages of the plug-in from a level upwards to `log`.
    #[must_use]
    pub fn log(
        mut self,
        from: LogLevel,
        log: impl Fn(LogLevel, &str) + Send + Sync + 'static,
    ) -> Self {
        self.log = Some((from, Arc::new(log)));
        self
    }

    /// Options of a guest with this host, for [`Warm::thaw`](crate::Warm::thaw) and other functions
    /// without an [`Extism`] argument. Set the other options first.
    #[must_use]
    pub fn options(self, mut options: GuestOptions) -> GuestOptions {
        if options.wasi.files.is_none() && options.wasi.dirs.is_empty() {
            options.wasi.files = Some(Tree::new(VARIABLE_BUDGET));
        }
        let (extism, asynchronous) = (Arc::new(self), options.asynchronous);
        options.imports = std::mem::take(&mut options.imports)
            .after(move |linker| define(linker, &extism, asynchronous));
        options
    }
}

impl Guest {
    /// A guest for a plug-in built with an Extism SDK. `kernel` is the kernel module of Extism,
    /// where plug-ins keep their input and output (`extism-runtime.wasm` in the sources of the
    /// crate `extism`). The last of `modules` is the plug-in, which may import from those before
    /// it, by the names given here.
    ///
    /// Each of its functions is a handler of bytes, for
    /// [`Warm::bytes_entry`](crate::Warm::bytes_entry) and
    /// [`WarmUp::call_bytes`](crate::WarmUp::call_bytes). A function that reports an error ends its
    /// call with [`CallError::Failed`](crate::CallError::Failed).
    ///
    /// Its variables are guest state, stored in its file tree. Without
    /// [`Wasi::files`](crate::Wasi::files) they get a tree of up to 1 MiB. With
    /// [`Wasi::dirs`](crate::Wasi::dirs) it can set no variable.
    ///
    /// # Errors
    /// [`LoadError::Modules`] when an import does not match its export, or `kernel` is no kernel of
    /// Extism.
    pub fn extism(
        engine: &Engine,
        kernel: &[u8],
        modules: &[(&str, &[u8])],
        extism: Extism,
        options: GuestOptions,
    ) -> Result<Self, LoadError> {
        Self::with_options(engine, &linked(kernel, modules)?, extism.options(options))
    }
}

/// Host functions for plug-ins.
#[derive(Clone, Copy)]
enum HostFunctionKind {
    Config,
    Variable,
    SetVariable,
    Http,
    HttpStatus,
    HttpHeaders,
    Log(LogLevel),
    Level,
    Failed,
}

/// Every function with its name, number of parameters and result.
const HOST_FUNCTIONS: [(&str, HostFunctionKind, usize, Option<ValType>); 12] = [
    ("config_get", HostFunctionKind::Config, 1, Some(ValType::I64)),
    ("var_get", HostFunctionKind::Variable, 1, Some(ValType::I64)),
    ("var_set", HostFunctionKind::SetVariable, 2, None),
    ("http_request", HostFunctionKind::Http, 2, Some(ValType::I64)),
    ("http_status_code", HostFunctionKind::HttpStatus, 0, Some(ValType::I32)),
    ("http_headers", HostFunctionKind::HttpHeaders, 0, Some(ValType::I64)),
    ("log_trace", HostFunctionKind::Log(LogLevel::Trace), 1, None),
    ("log_debug", HostFunctionKind::Log(LogLevel::Debug), 1, None),
    ("log_info", HostFunctionKind::Log(LogLevel::Info), 1, None),
    ("log_warn", HostFunctionKind::Log(LogLevel::Warn), 1, None),
    ("log_error", HostFunctionKind::Log(LogLevel::Error), 1, None),
    ("get_log_level", HostFunctionKind::Level, 0, Some(ValType::I32)),
];

fn define(
    linker: &mut Linker<Host>,
    extism: &Arc<Extism>,
    asynchronous: bool,
) -> wasmtime::Result<()> {
    let engine = linker.engine().clone();
    for (name, ask, params, result) in HOST_FUNCTIONS {
        let ty = FuncType::new(&engine, vec![ValType::I64; params], result);
        function(linker, (KERNEL, name), ty, (ask, extism), asynchronous)?;
    }
    let ty = status(&engine);
    function(linker, FAILED, ty, (HostFunctionKind::Failed, extism), asynchronous)
}

/// The type of [`FAILED`].
fn status(engine: &WasmtimeEngine) -> FuncType {
    FuncType::new(engine, [ValType::I32], [])
}

fn function(
    linker: &mut Linker<Host>,
    (module, name): (&str, &str),
    ty: FuncType,
    (ask, extism): (HostFunctionKind, &Arc<Extism>),
    asynchronous: bool,
) -> wasmtime::Result<()> {
    let extism = extism.clone();
    match asynchronous {
        false => linker.func_new(module, name, ty, move |mut caller, given, results| {
            now(answer(&mut caller, ask, &extism, given, results))
        })?,
        true => linker.func_new_async(module, name, ty, move |mut caller, given, results| {
            let extism = extism.clone();
            Box::new(async move { answer(&mut caller, ask, &extism, given, results).await })
        })?,
    };
    Ok(())
}

async fn answer(
    caller: &mut Caller<'_, Host>,
    ask: HostFunctionKind,
    extism: &Extism,
    given: &[Val],
    results: &mut [Val],
) -> wasmtime::Result<()> {
    let handle = |at: usize| given.get(at).and_then(Val::i64).unwrap_or_default().cast_unsigned();
    let result = match ask {
        HostFunctionKind::Config => {
            let key = take_text(caller, handle(0)).await?;
            match extism.config.get(&key) {
                Some(value) => Val::I64(give(caller, value.as_bytes()).await?.cast_signed()),
                None => Val::I64(0),
            }
        }
        HostFunctionKind::Variable => {
            let path = variable(&take(caller, handle(0)).await?);
            // The value has to fit the guest memory. A file in the tree may be longer, and takes no
            // memory of it.
            let most = caller.data().memory_limit().min(MAX_VARIABLE) as u64;
            let value = caller.data_mut().change_files(|tree| tree.read_path(&path, most));
            match value {
                Some(Ok(value)) => Val::I64(give(caller, &value).await?.cast_signed()),
                None | Some(Err(Refused::Missing)) => Val::I64(0),
                Some(Err(Refused::TooLarge)) => {
                    return Err(wasmtime::Error::msg(format!(
                        "a variable has more than the {most} bytes that a plug-in may read"
                    )));
                }
                Some(Err(error)) => return Err(wasmtime::Error::new(error)),
            }
        }
        HostFunctionKind::SetVariable => {
            let path = variable(&take(caller, handle(0)).await?);
            let value = match handle(1) {
                0 => None,
                at => Some(take(caller, at).await?),
            };
            return set_variable(caller.data_mut(), &path, value.as_deref());
        }
        HostFunctionKind::Http => {
            return Err(wasmtime::Error::msg(
                "the plug-in makes an HTTP request, which its host does not serve: define `http_request` of \
                 `extism:host/env` in `GuestOptions::imports`",
            ));
        }
        HostFunctionKind::HttpStatus => Val::I32(0),
        HostFunctionKind::HttpHeaders => Val::I64(0),
        HostFunctionKind::Log(level) => {
            match &extism.log {
                Some((from, log)) if level >= *from => {
                    log(level, &take_text(caller, handle(0)).await?);
                }
                _ => free(caller, handle(0)).await?,
            }
            return Ok(());
        }
        // Levels as Extism numbers them. A message below the requested level is not built.
        HostFunctionKind::Level => {
            Val::I32(extism.log.as_ref().map_or(i32::MAX, |(from, _)| *from as i32))
        }
        HostFunctionKind::Failed => {
            let status = given.first().and_then(Val::i32).unwrap_or_default();
            let said = kernel(caller, "error_get", &[], 1).await?;
            let message = match bytes(caller, said).await? {
                said if said.is_empty() => format!("it returned {status}"),
                said => String::from_utf8_lossy(&said).into_owned(),
            };
            return Err(wasmtime::Error::new(PluginFailure { status, message }));
        }
    };
    match results {
        [place] => *place = result,
        _ => unreachable!("a function with a result has one"),
    }
    Ok(())
}

/// Maximum bytes of a variable.
const MAX_VARIABLE: usize = 64 << 20;

/// The file of a variable.
fn variable(name: &[u8]) -> String {
    format!("{VARIABLES}/{}", blake3::hash(name).to_hex())
}

fn set_variable(host: &mut Host, path: &str, value: Option<&[u8]>) -> wasmtime::Result<()> {
    // A constant time, so that states with equal variables are equal.
    let time = Time::from_nanos(0);
    let done = host.change_files(|tree| match value {
        Some(value) => tree.write_path(path, value, time).map(drop),
        None => match tree.remove_path(path, time) {
            Err(Refused::Missing) => Ok(()),
            done => done,
        },
    });
    match done {
        Some(Ok(())) => Ok(()),
        Some(Err(error)) => Err(wasmtime::Error::new(error).context("a variable cannot be kept")),
        None => Err(wasmtime::Error::msg(
            "the plug-in sets a variable, which is kept in a file tree, and the guest has none beside its host \
             directories: make them layers of `Wasi::files`",
        )),
    }
}

/// Calls a function of the kernel.
async fn kernel(
    caller: &mut Caller<'_, Host>,
    name: &str,
    arguments: &[u64],
    results: usize,
) -> wasmtime::Result<u64> {
    let way = caller.data().call_path();
    let func = caller
        .get_export(&names::of_library(KERNEL, name))
        .and_then(Extern::into_func)
        .ok_or_else(|| {
            wasmtime::Error::msg(format!("the guest has no Extism kernel with {name:?}"))
        })?;
    let arguments: Vec<Val> =
        arguments.iter().map(|argument| Val::I64(argument.cast_signed())).collect();
    let mut result = [Val::I64(0)];
    way.call(func, caller, &arguments, &mut result[..results]).await?;
    Ok(result[0].i64().unwrap_or_default().cast_unsigned())
}

fn memory(caller: &mut Caller<'_, Host>) -> wasmtime::Result<wasmtime::Memory> {
    caller
        .get_export(&names::of_library(KERNEL, "memory"))
        .and_then(Extern::into_memory)
        .ok_or_else(|| wasmtime::Error::msg("the guest has no Extism kernel with a memory"))
}

async fn free(caller: &mut Caller<'_, Host>, at: u64) -> wasmtime::Result<()> {
    match at {
        0 => Ok(()),
        at => kernel(caller, "free", &[at], 0).await.map(drop),
    }
}

/// Bytes that a plug-in passes to its host, which frees them.
async fn take(caller: &mut Caller<'_, Host>, at: u64) -> wasmtime::Result<Vec<u8>> {
    let taken = bytes(caller, at).await?;
    free(caller, at).await?;
    Ok(taken)
}

async fn take_text(caller: &mut Caller<'_, Host>, at: u64) -> wasmtime::Result<String> {
    Ok(String::from_utf8(take(caller, at).await?)?)
}

async fn bytes(caller: &mut Caller<'_, Host>, at: u64) -> wasmtime::Result<Vec<u8>> {
    if at == 0 {
        return Ok(Vec::new());
    }
    let length = kernel(caller, "length", &[at], 1).await?;
    let memory = memory(caller)?;
    let data = memory.data(&*caller);
    let start = usize::try_from(at)?;
    let end = start.checked_add(usize::try_from(length)?);
    let there = end.and_then(|end| data.get(start..end));
    let there = there.ok_or_else(|| {
        wasmtime::Error::msg(format!("{length} bytes at {at:#x} are outside the kernel memory"))
    })?;
    let bytes = there.to_vec();
    caller.data().check_memory()?;
    Ok(bytes)
}

async fn give(caller: &mut Caller<'_, Host>, bytes: &[u8]) -> wasmtime::Result<u64> {
    if bytes.is_empty() {
        return Ok(0);
    }
    let at = kernel(caller, "alloc", &[bytes.len() as u64], 1).await?;
    let memory = memory(caller)?;
    if at == 0 || memory.write(&mut *caller, usize::try_from(at)?, bytes).is_err() {
        return Err(wasmtime::Error::msg(format!(
            "the kernel has no room for {} bytes from its host",
            bytes.len()
        )));
    }
    Ok(at)
}

/// Bytes of a plug-in at a handle that it passes to a host function; nothing at 0. The plug-in and
/// the host function agree on the owner of the handle.
///
/// In an [asynchronous](GuestOptions::asynchronous) guest use [`extism_bytes_async`].
///
/// # Errors
/// A trap of the kernel, or a missing kernel. The host function has to return the error.
pub fn extism_bytes(caller: &mut Caller<'_, Host>, handle: u64) -> wasmtime::Result<Vec<u8>> {
    now(bytes(caller, handle))
}

/// [`extism_bytes`] for a host function that may wait.
///
/// # Errors
/// As [`extism_bytes`].
pub async fn extism_bytes_async(
    caller: &mut Caller<'_, Host>,
    handle: u64,
) -> wasmtime::Result<Vec<u8>> {
    bytes(caller, handle).await
}

/// A handle of bytes for a plug-in, which then owns them; 0 for none.
///
/// In an [asynchronous](GuestOptions::asynchronous) guest use [`extism_handle_async`].
///
/// # Errors
/// A kernel without room; as [`extism_bytes`].
pub fn extism_handle(caller: &mut Caller<'_, Host>, bytes: &[u8]) -> wasmtime::Result<u64> {
    now(give(caller, bytes))
}

/// [`extism_handle`] for a host function that may wait.
///
/// # Errors
/// As [`extism_handle`].
pub async fn extism_handle_async(
    caller: &mut Caller<'_, Host>,
    bytes: &[u8],
) -> wasmtime::Result<u64> {
    give(caller, bytes).await
}
