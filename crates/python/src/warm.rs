//! A warm guest: opened once, called many times, each time from the same state.

use std::path::PathBuf;

use afresh::linux::StopHandle;
use afresh::{Call, Guest, Options, Reference, SaveOptions};
use afresh_interpreter::{Interpreter, Request};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::background;
use crate::call::{Limits, Stop, guest_options};
use crate::error::{self, GuestError, OpenError, SaveError};
use crate::exit;
use crate::files::FileOptions;
use crate::outcome::{Callables, Setup, evaluate};
use crate::program::{ProgramOptions, call_timeout, language, seconds};
use crate::session::Session;
use crate::signals;
use crate::unlocked::Unlocked;

/// A guest in its warm state.
#[pyclass(frozen, module = "afresh._native")]
pub(crate) struct Warm {
    pub(crate) guest: Unlocked<Guest>,
    pub(crate) interpreter: Option<Interpreter>,
    setup: Setup,
}

/// The limits that are given in seconds and bytes.
pub(crate) fn limits(
    timeout: Option<f64>,
    cpu_limit: Option<f64>,
    memory: Option<usize>,
    output: usize,
    result: usize,
) -> PyResult<Limits> {
    let timeout = call_timeout(timeout)?;
    let cpu_time = cpu_limit.map(|limit| seconds(limit, "a cpu_limit")).transpose()?;
    Ok(Limits { timeout, cpu_time, memory: memory.unwrap_or(usize::MAX), output, result })
}

#[pymethods]
impl Warm {
    /// Opens `reference`, or makes a guest of `wasm` that errors call so, and warms it up. `env` is
    /// the environment. `linux` has the grants of a Linux program that is a snapshot. `precompiled`
    /// is the folder of guests compiled in advance; `portable` fills the cache for such a folder.
    #[staticmethod]
    #[pyo3(signature = (reference, wasm, warm_up, cache, memory, timeout, output, result, stack, files, env, linux, precompiled, portable))]
    #[allow(clippy::too_many_arguments, reason = "called by the Python half only")]
    fn open(
        py: Python<'_>,
        reference: &str,
        wasm: Option<PathBuf>,
        warm_up: Vec<(String, Vec<u8>)>,
        cache: Option<PathBuf>,
        memory: Option<usize>,
        timeout: Option<f64>,
        output: usize,
        result: usize,
        stack: Option<usize>,
        files: FileOptions,
        env: Vec<(String, String)>,
        linux: Option<ProgramOptions>,
        precompiled: Option<PathBuf>,
        portable: bool,
    ) -> PyResult<Self> {
        let limits = limits(timeout, None, memory, output, result)?;
        let stop = Stop::default();
        let mut wasm_options = guest_options(stop.clone());
        wasm_options.wasi.env = env;
        let mut options = Options::new().wasm(wasm_options);
        let tree = files.tree()?;
        if wasm.is_some() {
            // Sandboxes of an interpreter of this package have files, with nothing below them by
            // default.
            options = options.files(tree.unwrap_or_else(|| files.empty()));
        } else {
            if let Some(tree) = tree {
                options = options.files_below(tree);
            }
            if files.is_limited() {
                options = options.files(files.empty());
            }
        }
        if let Some(linux) = &linux {
            options = options.linux(linux.shape(None)?);
        }
        if let Some(cache) = cache {
            options = options.cache(cache);
        }
        if let Some(stack) = stack {
            options = options.stack(stack);
        }
        if let Some(precompiled) = precompiled {
            options = options.precompiled(precompiled);
        }
        if portable {
            options = options.portable();
        }
        for (function, input) in warm_up {
            options = options.warm(match input.is_empty() {
                true => Call::text(function, Vec::<String>::new()),
                false => Call::bytes(function, input),
            });
        }
        let name = reference.to_owned();
        let open = move || match wasm {
            Some(path) => {
                let read = |source| afresh::OpenError::Read { path: path.clone(), source };
                Guest::from_bytes(&name, &std::fs::read(&path).map_err(read)?, &options)
            }
            None => afresh::open(&name, &options),
        };
        let opened = background::run(py, || stop.set(), open)?;
        let guest = opened.map_err(|error| error::raise::<OpenError>(&error))?;
        if linux.is_some_and(|linux| linux.has_useless_net(&guest)) {
            return Err(PyValueError::new_err(format!(
                "{reference} is no Linux program, and only those connect to servers: leave `net` out"
            )));
        }
        let interpreter = Interpreter::of(&guest);
        Ok(Self { guest: Unlocked::new(guest), interpreter, setup: Setup::new(limits, &[]) })
    }

    /// Opens a Linux program of the host, or of an image, that evaluates code in a language, and
    /// runs `setups` in it. `limits` are those of calls from the warm state: seconds, and the bytes
    /// of output and of a result.
    #[staticmethod]
    fn program(
        py: Python<'_>,
        reference: &str,
        language_name: &str,
        setups: Vec<String>,
        cache: Option<PathBuf>,
        linux: ProgramOptions,
        call_limits: (Option<f64>, usize, usize),
    ) -> PyResult<Self> {
        let limits = limits(call_limits.0, None, None, call_limits.1, call_limits.2)?;
        let language = language(language_name)?;
        let stop = StopHandle::default();
        let (shape, own) = (linux.shape(Some(language))?, stop.clone());
        let shape = move |program| shape(program).stop_handle(own.clone());
        let mut options = Options::new().kind(afresh::Kind::Program).linux(shape);
        if let Some(cache) = cache {
            options = options.cache(cache);
        }
        options = setups
            .iter()
            .fold(options, |options, setup| options.warm(language.program_setup(setup)));
        let name = reference.to_owned();
        let opened = background::run(py, || stop.stop(), move || afresh::open(&name, &options))?;
        let guest = opened.map_err(|error| match is_late(&error) {
            true => error::time_limit(format!(
                "{reference} and its setup were not ready in time: simplify the setup, or raise `setup_timeout`"
            )),
            false => error::raise::<OpenError>(&error),
        })?;
        let interpreter = Interpreter::of(&guest);
        Ok(Self { guest: Unlocked::new(guest), interpreter, setup: Setup::new(limits, &[]) })
    }

    /// What it is: `module`, `component`, `machine` or `program`.
    #[getter]
    fn kind(&self) -> &'static str {
        match self.guest.kind() {
            afresh::Kind::Module => "module",
            afresh::Kind::Component => "component",
            afresh::Kind::Machine => "machine",
            afresh::Kind::Program => "program",
            _ => "guest",
        }
    }

    /// Whether it evaluates code.
    #[getter]
    fn is_interpreter(&self) -> bool {
        self.interpreter.is_some()
    }

    /// Calls a handler of bytes from the warm state, and drops its changes.
    #[pyo3(signature = (export, input, timeout = None))]
    fn call<'py>(
        &self,
        py: Python<'py>,
        export: &str,
        input: &[u8],
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        self.check_signals()?;
        self.check_call()?;
        let setup = self.setup_of_call(timeout)?;
        let request = Request::plain(input);
        let outcome = exit::detach(py, || {
            let handler = self.guest.function(export).map_err(|error| error::of_call(&error))?;
            let mut lease =
                self.guest.lease().map_err(|error| error::raise::<GuestError>(&error))?;
            Ok::<_, PyErr>(
                evaluate(
                    &mut lease,
                    &handler,
                    &setup,
                    Callables::default(),
                    Default::default(),
                    request,
                    false,
                )
                .0,
            )
        })?;
        Ok(PyBytes::new(py, &outcome.into_bytes()?))
    }

    /// Evaluates code from the warm state, and drops its changes.
    #[pyo3(signature = (code, name, timeout = None))]
    fn run<'py>(
        &self,
        py: Python<'py>,
        code: &str,
        name: &str,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        self.check_signals()?;
        let setup = self.setup_of_call(timeout)?;
        let Interpreter { handler, form } = self.interpreter.as_ref().ok_or_else(no_interpreter)?;
        let outcome = exit::detach(py, || {
            let request = setup.request(0, code, name, None, *form);
            let mut lease =
                self.guest.lease().map_err(|error| error::raise::<GuestError>(&error))?;
            let stops: [Stop; 2] = Default::default();
            Ok::<_, PyErr>(
                evaluate(&mut lease, handler, &setup, Callables::default(), stops, request, false)
                    .0,
            )
        })?;
        outcome.into_python(py, false)
    }

    /// Makes a live guest, with tools by their names and the function that calls them.
    #[pyo3(signature = (tools, dispatch, timeout, cpu_limit, memory, output, result))]
    #[allow(clippy::too_many_arguments, reason = "called by the Python half only")]
    fn session(
        slf: &Bound<'_, Self>,
        tools: Vec<String>,
        dispatch: Option<Py<PyAny>>,
        timeout: Option<f64>,
        cpu_limit: Option<f64>,
        memory: Option<usize>,
        output: usize,
        result: usize,
    ) -> PyResult<Session> {
        let setup = Setup::new(limits(timeout, cpu_limit, memory, output, result)?, &tools);
        let this = slf.get();
        let session = exit::detach(slf.py(), || Ok(this.guest.session()))?;
        let session = session.map_err(|error| error::of_session(&error))?;
        Ok(Session::new(session, slf.clone().unbind(), setup, dispatch))
    }

    /// Saves the warm state; returns its id.
    fn save(&self, py: Python<'_>, to: &str) -> PyResult<String> {
        let to = reference(to)?;
        let form = self.interpreter.as_ref().map(|interpreter| interpreter.form);
        let linux = self.guest.kind() == afresh::Kind::Program;
        let least =
            form.map(|form| Call::bytes(form.function(), self.setup.minimal_request(form, linux)));
        let guest = Guest::clone(&self.guest);
        let save = move || {
            // Pages that every evaluation touches are read first when the snapshot is opened, and
            // not one by one.
            let recorded = least.map(|call| guest.save(&to, &SaveOptions::new().record(call)));
            match recorded {
                // A guest that answers nothing now is saved as well.
                None | Some(Err(afresh::SaveError::Record { .. })) => {
                    guest.save(&to, &SaveOptions::new())
                }
                Some(saved) => saved,
            }
        };
        // A save is atomic, so one that is not awaited any more harms nothing.
        let saved = background::run(py, || (), save)?;
        Ok(saved.map_err(|error| error::raise::<SaveError>(&error))?.id.to_string())
    }
}

impl Warm {
    /// Refuses calls of bytes where the standard input is that of an interpreter.
    pub(crate) fn check_call(&self) -> PyResult<()> {
        match self.guest.kind() == afresh::Kind::Program && self.interpreter.is_some() {
            true => Err(error::SessionError::new_err(
                "this guest is a Linux program that evaluates code, and has no exports: use `run_code` or `apply`",
            )),
            false => Ok(()),
        }
    }

    /// The setup of a call, whose time limit may be another one.
    fn setup_of_call(&self, timeout: Option<f64>) -> PyResult<Setup> {
        Ok(match call_timeout(timeout)? {
            Some(timeout) => self.setup.with_timeout(timeout),
            None => self.setup.clone(),
        })
    }

    /// Refuses to run a Wasm guest whose traps would reach a Python handler.
    fn check_signals(&self) -> PyResult<()> {
        match self.guest.kind() {
            afresh::Kind::Program => Ok(()),
            _ => signals::check(),
        }
    }
}

/// Whether a Linux program did not become ready within its time.
fn is_late(error: &afresh::OpenError) -> bool {
    let afresh::OpenError::Guest { source, .. } = error else { return false };
    matches!(source.downcast_ref(), Some(afresh::linux::WarmError::Late { .. }))
}

/// Parses a reference.
pub(crate) fn reference(text: &str) -> PyResult<Reference> {
    text.parse().map_err(|error: afresh::ReferenceError| error::raise::<SaveError>(&error))
}

/// Code was given to a guest that evaluates none.
pub(crate) fn no_interpreter() -> PyErr {
    error::SessionError::new_err(
        "this guest evaluates no code: call one of its exports with `call(export, input)`",
    )
}
