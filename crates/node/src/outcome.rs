//! One evaluation: the request to an interpreter, and its answer.

use std::error::Error;
use std::sync::Arc;

use afresh::{CallCost, CallError, Function, Lease};
use afresh_interpreter::{CallConvention, Commands, DisplayedResult, Request, Tools};
use serde_json::{Value, json};

use crate::call::{Call, CallState, Limits, Reason, Stop};
use crate::error::Failure;
use crate::reply::Reply;

/// Shared by all calls of one sandbox.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) limits: Limits,
    tools: Tools,
}

impl Setup {
    pub(crate) fn new(limits: Limits, names: &[String]) -> Self {
        Self { limits, tools: Tools::new(names.iter().map(String::as_str)) }
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

/// Those who take part in a call.
pub(crate) struct Parties<'a> {
    pub(crate) call: &'a Arc<Call>,
    /// Ends the calls of a session.
    pub(crate) session: Stop,
    /// Whether output is sent while the guest runs.
    pub(crate) streams: bool,
    pub(crate) commands: Option<Commands>,
}

/// How an evaluation went.
pub(crate) struct Outcome {
    answer: Result<Vec<u8>, CallError>,
    state: CallState,
    cost: CallCost,
}

/// Makes one call of a guest. `counts` is whether the pages that differ afterwards are counted,
/// which takes a comparison of all written pages.
pub(crate) fn evaluate(
    lease: &mut Lease<'_>,
    handler: &Function,
    setup: &Setup,
    parties: Parties<'_>,
    request: Request,
    counts: bool,
) -> Outcome {
    let state = CallState::begin(&setup.limits, parties.call, parties.session, parties.streams)
        .with_commands(parties.commands)
        .counting_pages(counts);
    let done = afresh_interpreter::evaluate(lease, handler, request, state);
    Outcome { answer: done.answer, state: done.listener, cost: done.cost }
}

impl Outcome {
    /// A copy of the error of the call, for its session: errors cannot be cloned.
    pub(crate) fn failure(&self) -> Option<CallError> {
        let error = self.answer.as_ref().err()?;
        let (function, text) = ("the guest".to_owned(), error.to_string());
        Some(match (error, self.state.reason) {
            (CallError::Request { .. }, _) => CallError::Request { function, source: text.into() },
            (CallError::Timeout { .. }, _) | (_, Some(Reason::Timeout)) => {
                CallError::Timeout { function, source: "it reached its time limit".into() }
            }
            (CallError::CpuTime { limit, .. }, _) => CallError::CpuTime { function, limit: *limit },
            (CallError::Stopped { .. }, _) | (_, Some(Reason::Stopped)) => {
                CallError::Stopped { function, source: "its host stopped it".into() }
            }
            (error, None) => {
                let cause = error.source().map_or(text, ToString::to_string);
                CallError::Guest { function, source: cause.into() }
            }
        })
    }

    /// How a call ended that gave no answer.
    fn failed(&self, error: &CallError) -> Failure {
        match self.state.reason {
            Some(Reason::Stopped) => Failure::stopped("the call was stopped by its host"),
            Some(Reason::Timeout) => {
                Failure::timeout("the call ran longer than its time limit (`timeoutMs`)")
            }
            None => Failure::call(error),
        }
    }

    /// The answer of a handler of bytes.
    pub(crate) fn into_bytes(mut self) -> Result<Reply, Failure> {
        match std::mem::replace(&mut self.answer, Ok(Vec::new())) {
            Ok(bytes) => Ok(Reply { json: Value::Null, bytes }),
            Err(error) => Err(self.failed(&error)),
        }
    }

    /// The cost as JavaScript reads it.
    fn cost(&self) -> Value {
        let CallCost { wall, cpu, peak_memory, dirty_pages, .. } = self.cost;
        json!({
            "wallMs": wall.as_secs_f64() * 1e3,
            "cpuMs": cpu.as_secs_f64() * 1e3,
            "peakMemory": peak_memory,
            "dirtyPages": dirty_pages,
            "inputBytes": self.cost.input_bytes,
            "outputBytes": self.cost.output_bytes,
            "droppedBytes": self.cost.dropped_bytes,
        })
    }

    /// The answer of an interpreter, standard output and standard error one after another, and
    /// their lengths.
    pub(crate) fn into_reply(mut self) -> Reply {
        let (mut bytes, error) = match std::mem::replace(&mut self.answer, Ok(Vec::new())) {
            Ok(answer) => (answer, Value::Null),
            Err(error) => (Vec::new(), self.failed(&error).json()),
        };
        let json = json!({
            "lengths": [bytes.len(), self.state.stdout.len(), self.state.stderr.len()],
            "error": error,
            "truncated": self.state.truncated,
            "cost": self.cost(),
            "results": self.state.displayed.results.into_iter().map(displayed).collect::<Vec<_>>(),
        });
        bytes.append(&mut self.state.stdout);
        bytes.append(&mut self.state.stderr);
        Reply { json, bytes }
    }
}

/// A displayed result as JavaScript reads it.
fn displayed(result: DisplayedResult) -> Value {
    let texts: serde_json::Map<_, _> =
        result.texts.into_iter().map(|(name, text)| (name.to_owned(), text.into())).collect();
    json!({ "isMain": result.is_main, "texts": texts, "json": result.json })
}
