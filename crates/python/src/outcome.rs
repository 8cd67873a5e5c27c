//! One evaluation: the request to an interpreter, and its answer.

use std::error::Error;
use std::time::Duration;

use afresh::{CallCost, CallError, Function, Lease};
use afresh_interpreter::{CallConvention, Commands, Request, Tools};
use minicbor::Decoder;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use crate::call::{CallState, Limits, Reason, Stop};
use crate::error::{self, GuestError, MarshalError, StoppedError};
use crate::{exit, objects};

/// Shared by all calls of one sandbox.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) limits: Limits,
    tools: Tools,
}

/// The Python callables of one call, and other receivers of its output.
#[derive(Default)]
pub(crate) struct Callables {
    /// Called with a stream's number and the text written.
    pub(crate) sink: Option<Py<PyAny>>,
    /// Called with a tool's name, its arguments, its named arguments or `None`, and whether the
    /// call has a time limit.
    pub(crate) dispatch: Option<Py<PyAny>>,
    /// The commands of the sandbox, if it has any.
    pub(crate) commands: Option<Commands>,
}

impl Setup {
    pub(crate) fn new(limits: Limits, names: &[String]) -> Self {
        Self { limits, tools: Tools::new(names.iter().map(String::as_str)) }
    }

    /// The same, with another time limit.
    pub(crate) fn with_timeout(&self, timeout: Duration) -> Self {
        let limits = Limits { timeout: Some(timeout), ..self.limits.clone() };
        Self { limits, tools: self.tools.clone() }
    }

    /// The request for an evaluation; `arguments` is an array as guests read it.
    pub(crate) fn request(
        &self,
        what: u8,
        source: &str,
        name: &str,
        arguments: Option<&[u8]>,
        form: CallConvention,
    ) -> Request {
        Request::new(form, what, &self.tools, source, name, arguments)
    }

    /// The request for a minimal evaluation.
    pub(crate) fn minimal_request(&self, form: CallConvention, linux: bool) -> Vec<u8> {
        Request::minimal(form, &self.tools, linux)
    }
}

/// How an evaluation went.
pub(crate) struct Outcome {
    answer: Result<Vec<u8>, CallError>,
    state: CallState,
    pub(crate) cost: CallCost,
}

/// Makes one call of a guest with everything that belongs to it. The error is for the session to
/// know of. `counts` is whether the pages that differ afterwards are counted, which takes a
/// comparison of all written pages.
pub(crate) fn evaluate(
    lease: &mut Lease<'_>,
    handler: &Function,
    setup: &Setup,
    callables: Callables,
    stops: [Stop; 2],
    request: Request,
    counts: bool,
) -> (Outcome, bool) {
    let mut state = CallState::begin(&setup.limits, callables.sink, callables.dispatch, stops)
        .counting_pages(counts);
    if let Some(commands) = callables.commands {
        state = state.with_commands(commands);
    }
    let done = afresh_interpreter::evaluate(lease, handler, request, state);
    let whole = done.answer.is_ok();
    (Outcome { answer: done.answer, state: done.listener, cost: done.cost }, whole)
}

impl Outcome {
    /// A copy of the error of the call, for its session: errors cannot be cloned.
    pub(crate) fn failure(&self) -> Option<CallError> {
        let error = self.answer.as_ref().err()?;
        let (function, text) = ("the guest".to_owned(), error.to_string());
        Some(match (error, &self.state.reason) {
            (CallError::Request { .. }, _) => CallError::Request { function, source: text.into() },
            (CallError::Timeout { .. }, _) => CallError::Timeout { function, source: text.into() },
            (CallError::CpuTime { limit, .. }, _) => CallError::CpuTime { function, limit: *limit },
            // A Linux program is ended by its listener.
            (_, Some(Reason::Timeout)) => {
                CallError::Timeout { function, source: "it reached its time limit".into() }
            }
            (_, Some(Reason::Stopped | Reason::Interrupted(_))) => {
                CallError::Stopped { function, source: "it was stopped or interrupted".into() }
            }
            (CallError::Stopped { .. }, None) => {
                CallError::Stopped { function, source: text.into() }
            }
            (error, None) => {
                let cause = error.source().map_or(text, ToString::to_string);
                CallError::Guest { function, source: cause.into() }
            }
        })
    }

    /// The answer of a handler of bytes.
    pub(crate) fn into_bytes(mut self) -> PyResult<Vec<u8>> {
        match std::mem::replace(&mut self.answer, Ok(Vec::new())) {
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.raised(&error)),
        }
    }

    /// How a call ended that gave no answer.
    fn raised(&mut self, failed: &CallError) -> PyErr {
        match self.state.reason.take() {
            Some(Reason::Interrupted(error)) => error,
            Some(Reason::Stopped) => error::raise::<StoppedError>(failed),
            Some(Reason::Timeout) => {
                error::time_limit("the call ran longer than its time limit".to_owned())
            }
            None => match failed {
                CallError::Guest { .. } => error::raise::<GuestError>(failed),
                other => error::of_call(other),
            },
        }
    }

    /// As the Python half takes it: `(value, text, error, stdout, stderr, truncated, cost,
    /// displayed)`, where the cost is `(wall seconds, CPU seconds, peak of memory, dirty pages,
    /// bytes of input, bytes of output, dropped bytes)`, and `error` is an exception, or the
    /// program's own: `(name, message, stack, cause)`.
    ///
    /// # Errors
    /// What no program may catch, and answers that cannot be read.
    pub(crate) fn into_python(self, py: Python<'_>, exact: bool) -> PyResult<Bound<'_, PyTuple>> {
        // Making objects may run Python code, and lets other threads run.
        exit::hold(py, || self.convert(py, exact))
    }

    fn convert(mut self, py: Python<'_>, exact: bool) -> PyResult<Bound<'_, PyTuple>> {
        let none = || py.None().into_bound(py);
        let (value, text, error) = match std::mem::replace(&mut self.answer, Ok(Vec::new())) {
            // An answer that cannot be converted is not raised: the output would be lost.
            Ok(answer) => self.read(py, &answer, exact).unwrap_or_else(|error| {
                (
                    none(),
                    none(),
                    objects::marshal_error(py, error).into_value(py).into_bound(py).into_any(),
                )
            }),
            Err(failed) => {
                let interrupted = matches!(self.state.reason, Some(Reason::Interrupted(_)));
                let raised = self.raised(&failed);
                if interrupted {
                    return Err(raised);
                }
                (none(), none(), raised.into_value(py).into_bound(py).into_any())
            }
        };
        let displayed = std::mem::take(&mut self.state.displayed.results);
        let displayed: Vec<_> =
            displayed.into_iter().map(|shown| (shown.is_main, shown.texts, shown.json)).collect();
        let said = |bytes: &[u8]| PyString::new(py, &String::from_utf8_lossy(bytes)).into_any();
        PyTuple::new(
            py,
            [
                value,
                text,
                error,
                said(&self.state.stdout),
                said(&self.state.stderr),
                self.state.truncated.into_pyobject(py)?.to_owned().into_any(),
                self.cost_parts().into_pyobject(py)?.into_any(),
                displayed.into_pyobject(py)?.into_any(),
            ],
        )
    }

    #[allow(clippy::type_complexity, reason = "the parts of a cost")]
    fn cost_parts(&self) -> (f64, f64, Option<u64>, Option<usize>, u64, u64, u64) {
        let CallCost { wall, cpu, peak_memory, dirty_pages, .. } = self.cost;
        let CallCost { input_bytes, output_bytes, dropped_bytes, .. } = self.cost;
        let (wall, cpu) = (wall.as_secs_f64(), cpu.as_secs_f64());
        (wall, cpu, peak_memory, dirty_pages, input_bytes, output_bytes, dropped_bytes)
    }

    #[allow(clippy::type_complexity, reason = "the three parts of an answer")]
    fn read<'py>(
        &self,
        py: Python<'py>,
        answer: &[u8],
        exact: bool,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let broken = |error: minicbor::decode::Error| {
            MarshalError::new_err(format!("the guest's answer cannot be decoded: {error}"))
        };
        let mut from = Decoder::new(answer);
        let count = from.array().map_err(broken)?;
        let none = py.None().into_bound(py);
        let gave_value = from.u8().map_err(broken)? == 0 && count == Some(3);
        let mut values = objects::reader(py, from, exact && gave_value, self.state.result);
        if gave_value {
            return Ok((values.read()?, values.read()?, none));
        }
        let mut part = || values.read();
        let (name, message, stack, number) = (part()?, part()?, part()?, part()?);
        let cause = number
            .extract::<usize>()
            .ok()
            .and_then(|number| self.state.failures.get(number))
            .map(|error| error.clone_ref(py).into_value(py).into_bound(py).into_any())
            .unwrap_or_else(|| none.clone());
        let thrown = PyTuple::new(py, [name, message, stack, cause])?;
        Ok((none.clone(), none, thrown.into_any()))
    }
}
