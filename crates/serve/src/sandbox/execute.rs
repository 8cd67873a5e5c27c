//! Running code in E2B's shape: `/execute`, whose answer is a line of JSON for each thing that came of it,
//! and begins as soon as the code prints something.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::{SystemTime, UNIX_EPOCH};

use afresh_interpreter::{Answer as Outcome, Thrown};
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame};
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::one::run;
use super::registry::Sandboxes;
use super::routes::{Answer, Inside, answer, json};
use super::speaker::Speaker;
use crate::body::InPieces;
use crate::refusal::Refusal;

type All = State<Arc<Sandboxes>>;

/// The one context that a sandbox has.
const CONTEXT: &str = "default";

#[derive(Deserialize)]
pub(super) struct Code {
    code: String,
    language: Option<String>,
    context_id: Option<String>,
}

fn known_context(id: Option<&str>) -> Result<(), Refusal> {
    match id {
        None | Some(CONTEXT) => Ok(()),
        Some(other) => {
            let message = format!("the context {other} was not found; a sandbox has `{CONTEXT}`");
            Err(Refusal::new(StatusCode::NOT_FOUND, message))
        }
    }
}

pub(super) async fn execute(State(all): All, Inside(sandbox): Inside, body: Bytes) -> Answer {
    let wanted: Code = json(&body)?;
    known_context(wanted.context_id.as_deref())?;
    let template = all.template(&sandbox.template).clone();
    let names = template.language.names;
    if let Some(language) = wanted.language.as_deref().filter(|name| !names.contains(name)) {
        let message = format!("this sandbox runs {}, not {language}", names.join(" or "));
        return Err(Refusal::new(StatusCode::BAD_REQUEST, message));
    }
    let (checking, own) = ((all.clone(), sandbox.clone()), sandbox.clone());
    let check = move || checking.0.ledger.check(&checking.1);
    let (mut speaker, mut printed) = Speaker::new(all.config.call_timeout, check);
    let mut running: Running = Box::pin(async move {
        let ran = all.with(&sandbox, move |session| {
            let mut mark = own.mark.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let number = own.runs.fetch_add(1, Ordering::Relaxed) + 1;
            let head = line(&json!({"type": "number_of_executions", "execution_count": number}));
            speaker.begin(head.clone());
            let outcome = run(session, template.language, &wanted.code, &mut mark, speaker)?;
            Ok((head, outcome))
        });
        ran.await
    });
    let mut response = tokio::select! {
        biased;
        Some(first) = printed.recv() => {
            let told = Telling { first: Some(first), printed, running: Some(running) };
            let mut response = Response::new(Body::new(told));
            response.extensions_mut().insert(InPieces);
            response
        }
        // Most code prints nothing, and its answer is whole.
        ran = &mut running => {
            let (head, outcome) = ran?;
            Response::new(Body::from(head + &last(&outcome)))
        }
    };
    let kind = HeaderValue::from_static("application/x-ndjson");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}

/// Gives the line that comes first, and what came of the code.
type Running = Pin<Box<dyn Future<Output = Result<(String, Outcome), Refusal>> + Send>>;

/// An answer that begins while the code still runs: what it prints, then what came of it.
struct Telling {
    first: Option<Bytes>,
    printed: mpsc::Receiver<Bytes>,
    /// None once everything is told.
    running: Option<Running>,
}

impl HttpBody for Telling {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        // It ends with the call, whose answer comes after all that it printed.
        if let Some(piece) = ready!(self.printed.poll_recv(context)) {
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        let Some(running) = &mut self.running else { return Poll::Ready(None) };
        let ran = ready!(running.as_mut().poll(context));
        self.running = None;
        let outcome = match ran {
            Ok((_, outcome)) => outcome,
            // What would have been a refusal, had nothing been told yet.
            Err(refusal) => {
                let name = "SandboxError".to_owned();
                Outcome::Threw(Thrown { name, message: refusal.message, trace: None })
            }
        };
        Poll::Ready(Some(Ok(Frame::data(last(&outcome).into()))))
    }
}

/// Nanoseconds since 1970.
pub(super) fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    u64::try_from(now).unwrap_or(u64::MAX)
}

fn line(said: &Value) -> String {
    format!("{said}\n")
}

/// The lines of what came of code.
fn last(outcome: &Outcome) -> String {
    let came = match outcome {
        Outcome::Done => None,
        Outcome::Value(shown) => {
            let mut said = json!({"type": "result", "text": shown.text, "is_main_result": true});
            if let Some(json @ (Value::Object(_) | Value::Array(_))) = &shown.json {
                said["json"] = json.clone();
            }
            Some(said)
        }
        Outcome::Threw(thrown) => Some(json!({
            "type": "error",
            "name": thrown.name,
            "value": thrown.message,
            "traceback": thrown.traceback(),
        })),
    };
    let end = json!({"type": "end_of_execution"});
    came.iter().chain([&end]).map(line).collect()
}

fn context(all: &Sandboxes, template: &str) -> Value {
    let language = all.template(template).language.name();
    json!({"id": CONTEXT, "language": language, "cwd": "/"})
}

pub(super) async fn contexts(State(all): All, Inside(sandbox): Inside) -> Answer {
    Ok(answer(StatusCode::OK, &json!([context(&all, &sandbox.template)])))
}

pub(super) async fn no_context(Inside(_): Inside) -> Refusal {
    let message = "a sandbox has one context; fork the sandbox for another";
    Refusal::new(StatusCode::NOT_IMPLEMENTED, message)
}

/// Takes the sandbox back to how its template is.
pub(super) async fn restart(
    State(all): All,
    Inside(sandbox): Inside,
    Path(id): Path<String>,
) -> Answer {
    known_context(Some(&id))?;
    all.with(&sandbox, |session| {
        let root = session.tree().first().map(|state| state.id);
        let root =
            root.ok_or_else(|| Refusal::new(StatusCode::CONFLICT, "its root was dropped"))?;
        session.rollback(root).map_err(|error| super::one::refused(&error))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
