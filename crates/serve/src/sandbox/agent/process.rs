//! Commands in a sandbox, in the shape of the E2B agent.
//!
//! Promises: a sandbox of a Linux program runs several at the same time as code. They are part of
//! its state, and continue after a pause, a snapshot or a fork. A client that starts a command or
//! connects to it gets its output from then on. May break it: output belongs to a command by its
//! session (`setsid`), so output of a process that leaves the session is lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use afresh::Session;
use afresh_interpreter::{Answer as GuestAnswer, Stream, Thrown};
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::HeaderMap;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::body::StreamedAnswer;
use crate::lock::lock;
use crate::sandbox::agent::commands::{EventStream, Subscriber};
use crate::sandbox::agent::connect::{self, ConnectError};
use crate::sandbox::agent::output_router::OutputRouter;
use crate::sandbox::http::authorization::AuthorizedSandbox;
use crate::sandbox::http::user::User;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::{Sandbox, command};
use crate::sandbox::request_body::requests::{
    Input, Part, ProcessRequest, Selector, Signal, StartRequest, Terminal,
};

/// The client's interval of keepalives, in seconds.
const ALIVE: &str = "keepalive-ping-interval";
/// The methods whose answer is a stream.
const STREAMS: [&str; 3] = ["Start", "Connect", "StreamInput"];
/// Default interval of keepalives.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(90);

impl Terminal {
    fn wanted(self) -> Value {
        json!([self.size.rows, self.size.cols])
    }
}

impl Input {
    /// A request to the guest's half of commands.
    fn wanted(self) -> Result<Value, ConnectError> {
        // The command itself knows which of the two it has.
        let data = self.stdin.or(self.pty);
        let none = || ConnectError::new("invalid_argument", "the input is missing");
        Ok(json!({"op": "input", "data": data.ok_or_else(none)?}))
    }
}

/// The agent's operations on processes.
pub(crate) async fn process(
    State(all): State<Arc<Sandboxes>>,
    AuthorizedSandbox(sandbox): AuthorizedSandbox,
    Path(method): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let unknown = |why: &str| {
        ConnectError::new("unimplemented", format!("this sandbox has no {method}: {why}"))
    };
    if !all.template_of(&sandbox).config.linux {
        return unknown("it evaluates code, and has no processes").into_response();
    }
    let user = match User::of_request(&headers) {
        Ok(user) => user.unwrap_or(User::of(sandbox.settings.root)),
        Err(refused) => return refused.into_response(),
    };
    let inside = CommandTarget { all, sandbox };
    let done = match method.as_str() {
        "Start" => inside.start(user, &headers, &body).await,
        "Connect" => inside.connect(&headers, &body).await,
        "List" => inside.list().await,
        "SendSignal" => inside.signal(&body).await,
        "SendInput" => inside.input(&body).await,
        "CloseStdin" => inside.close(&body).await,
        "Update" => inside.resize(&body).await,
        "StreamInput" => inside.stream(&body).await,
        _ => Err(unknown("it is not known")),
    };
    done.unwrap_or_else(|failed| match STREAMS.contains(&method.as_str()) {
        true => failed.into_stream(),
        false => failed.into_response(),
    })
}

/// A sandbox that runs commands.
pub(crate) struct CommandTarget {
    pub(crate) all: Arc<Sandboxes>,
    pub(crate) sandbox: Arc<Sandbox>,
}

type ProcessResult = Result<Response, ConnectError>;

/// An operation that is answered at once.
pub(crate) fn decode_request<T: DeserializeOwned>(body: &[u8]) -> Result<T, ConnectError> {
    serde_json::from_slice(body)
        .map_err(|error| ConnectError::new("invalid_argument", error.to_string()))
}

fn no_such_process() -> ConnectError {
    ConnectError::new("not_found", "there is no such command: it has ended, or there never was")
}

/// The number of a command that runs.
fn find(listed: &Value, wanted: &Selector) -> Result<u32, ConnectError> {
    let is_it = |command: &&Value| match (wanted.pid, &wanted.tag) {
        (Some(pid), _) => command["pid"] == pid,
        (None, Some(tag)) => command["tag"] == tag.as_str(),
        (None, None) => false,
    };
    let found = listed.as_array().and_then(|all| all.iter().find(is_it));
    let number = found.and_then(|command| command["pid"].as_u64());
    number.and_then(|number| u32::try_from(number).ok()).ok_or_else(no_such_process)
}

impl CommandTarget {
    /// One call to the guest side of commands, and the work after its answer.
    async fn ask<R: Send + 'static>(
        &self,
        mut router: OutputRouter,
        wanted: impl FnOnce(&mut CommandSession<'_>) -> Result<R, ConnectError> + Send + 'static,
    ) -> Result<R, ConnectError> {
        let language = self.all.template_of(&self.sandbox).language;
        let sandbox = self.sandbox.clone();
        let asked = self.all.with(&self.sandbox, move |session| {
            let router = &mut router;
            Ok(wanted(&mut CommandSession { sandbox: &sandbox, session, language, router }))
        });
        asked.await?
    }

    fn output_router(&self) -> OutputRouter {
        self.all.output_router(&self.sandbox)
    }

    /// The router of an operation on commands that run.
    fn management(&self) -> OutputRouter {
        self.output_router().for_management()
    }

    async fn start(&self, user: User, headers: &HeaderMap, body: &[u8]) -> ProcessResult {
        let StartRequest { process, pty, tag, stdin } = connect::decode_stream_request(body)?;
        let mut envs = self.sandbox.settings.envs.clone();
        envs.extend(process.envs);
        let home = user.is_root().then(|| user.home().to_owned());
        let wanted = json!({
            "op": user.start_operation(),
            "cmd": process.cmd,
            "args": process.args,
            "envs": envs,
            "cwd": process.cwd.or_else(|| self.sandbox.settings.directory.clone()).or(home),
            "stdin": stdin,
            "size": pty.map(Terminal::wanted),
            "tag": tag,
        });
        let (subscriber, heard) = Subscriber::new(keepalive_interval(headers));
        let mut router = self.output_router();
        router.starts(subscriber, connect::limit(headers));
        let starting = self.ask(router, move |asking| {
            asking.sandbox.runs.fetch_add(1, Ordering::Relaxed);
            asking.of(&wanted)
        });
        stream_events(starting, heard).await
    }

    /// Starts a command without a client.
    pub(crate) async fn launch(&self, wanted: Value) -> Result<(), String> {
        let (subscriber, _unheard) = Subscriber::new(KEEPALIVE_INTERVAL);
        let mut router = self.output_router();
        router.starts(subscriber, None);
        let starting = self.ask(router, move |asking| asking.of(&wanted).map(drop));
        starting.await.map_err(|failed| failed.why().to_owned())
    }

    /// Runs a command without a client to its end, for at most `limit`, and hands over its output
    /// as text.
    pub(crate) async fn run(
        &self,
        wanted: &Value,
        limit: Duration,
        hear: impl FnMut(Stream, &str),
    ) -> Result<i64, String> {
        let (subscriber, heard) = Subscriber::new(KEEPALIVE_INTERVAL);
        let mut router = self.output_router();
        router.starts(subscriber, Some(limit));
        let wanted = wanted.clone();
        let starting = self.ask(router, move |asking| {
            asking.sandbox.runs.fetch_add(1, Ordering::Relaxed);
            asking.of(&wanted).map(drop)
        });
        // Output may come before the start is acknowledged.
        let (started, status) = tokio::join!(starting, connect::follow(heard, hear));
        started.map_err(|failed| failed.why().to_owned())?;
        status
    }

    async fn connect(&self, headers: &HeaderMap, body: &[u8]) -> ProcessResult {
        let ProcessRequest { process, .. } = connect::decode_stream_request(body)?;
        let (subscriber, heard) = Subscriber::new(keepalive_interval(headers));
        let connecting = self.ask(self.management(), move |asking| {
            let listed = asking.of(&json!({"op": "list"}))?;
            asking.sandbox.commands.listen(find(&listed, &process)?, subscriber, None);
            Ok(())
        });
        stream_events(connecting, heard).await
    }

    async fn list(&self) -> ProcessResult {
        let listed =
            self.ask(self.management(), |asking| asking.of(&json!({"op": "list"}))).await?;
        Ok(axum::Json(json!({ "processes": listed })).into_response())
    }

    async fn signal(&self, body: &[u8]) -> ProcessResult {
        let ProcessRequest { process, signal, .. } = decode_request(body)?;
        let Some(Signal(signal @ (9 | 15))) = signal else {
            let why = "a signal is SIGNAL_SIGTERM or SIGNAL_SIGKILL";
            return Err(ConnectError::new("invalid_argument", why));
        };
        self.chosen(process, vec![json!({"op": "signal", "signal": signal})]).await
    }

    async fn input(&self, body: &[u8]) -> ProcessResult {
        let ProcessRequest { process, input, .. } = decode_request(body)?;
        self.chosen(process, vec![input.wanted()?]).await
    }

    /// A terminal has another size now.
    async fn resize(&self, body: &[u8]) -> ProcessResult {
        let ProcessRequest { process, pty, .. } = decode_request(body)?;
        let none = || ConnectError::new("invalid_argument", "the terminal size is missing");
        let size = pty.ok_or_else(none)?.wanted();
        self.chosen(process, vec![json!({"op": "resize", "size": size})]).await
    }

    /// Input in parts is written once all of it is there.
    async fn stream(&self, body: &[u8]) -> ProcessResult {
        let mut parts = connect::messages(body)?.into_iter();
        let Some(Part::Start { process }) = parts.next() else {
            return Err(ConnectError::new("invalid_argument", "the command is missing"));
        };
        let data = parts.filter_map(|part| match part {
            Part::Data { input } => Some(input.wanted()),
            _ => None,
        });
        match self.chosen(process, data.collect::<Result<_, _>>()?).await {
            Ok(_) => Ok(streamed(connect::end_of_stream().into())),
            Err(failed) if failed.is_refused() => Err(failed),
            Err(failed) => Ok(streamed(connect::broken_off(&failed).into())),
        }
    }

    async fn close(&self, body: &[u8]) -> ProcessResult {
        let ProcessRequest { process, .. } = decode_request(body)?;
        self.chosen(process, vec![json!({"op": "close"})]).await
    }

    /// Does things with one command.
    async fn chosen(&self, process: Selector, all: Vec<Value>) -> ProcessResult {
        let limit = self.all.config.call_timeout;
        let done = self.ask(self.management(), move |asking| {
            let begun = Instant::now();
            let number = match process.pid {
                Some(number) => number,
                None => find(&asking.of(&json!({"op": "list"}))?, &process)?,
            };
            for mut wanted in all {
                // A body has many parts, and each has the time of a call.
                if begun.elapsed() > limit {
                    let why = "the parts took longer than a call may; send fewer at a time";
                    return Err(ConnectError::new("deadline_exceeded", why));
                }
                wanted["pid"] = number.into();
                if asking.of(&wanted)? != Value::Bool(true) {
                    return Err(no_such_process());
                }
            }
            Ok(())
        });
        done.await?;
        Ok(axum::Json(json!({})).into_response())
    }
}

/// A sandbox, in its turn.
struct CommandSession<'a> {
    sandbox: &'a Sandbox,
    session: &'a mut Session,
    language: &'static afresh_interpreter::Language,
    router: &'a mut OutputRouter,
}

impl CommandSession<'_> {
    /// The answer from the guest side of commands; an exception becomes an error.
    fn of(&mut self, wanted: &Value) -> Result<Value, ConnectError> {
        let mut mark = lock(&self.sandbox.mark);
        match command(self.session, self.language, wanted, &mut mark, self.router)? {
            GuestAnswer::Value(shown) => Ok(shown.json.unwrap_or_default()),
            GuestAnswer::Done => Ok(Value::Null),
            GuestAnswer::Threw(thrown) => Err(thrown_error(wanted, &thrown)),
        }
    }
}

/// The error for an exception of the guest side. That of an earlier version does not know the
/// operation for `root`. It takes it for one on a running command, and misses the number.
fn thrown_error(wanted: &Value, thrown: &Thrown) -> ConnectError {
    if wanted["op"] == User::Root.start_operation() && thrown.name == "KeyError" {
        let why = "an earlier version saved this sandbox, and it cannot run commands as `root`: \
                   run them as `user`, or make a new sandbox";
        return ConnectError::new("failed_precondition", why);
    }
    ConnectError::of(thrown)
}

pub(crate) fn keepalive_interval(headers: &HeaderMap) -> Duration {
    let asked = headers.get(ALIVE).and_then(|seconds| seconds.to_str().ok()?.parse::<u32>().ok());
    asked.map_or(KEEPALIVE_INTERVAL, |seconds| Duration::from_secs(seconds.max(1).into()))
}

/// A stream that begins with the first event, though its call lasts.
async fn stream_events<R>(
    call: impl Future<Output = Result<R, ConnectError>>,
    mut heard: EventStream,
) -> ProcessResult {
    let body = tokio::select! {
        biased;
        true = heard.wait_until_begun() => Body::new(heard),
        called = call => match called {
            Err(failed) if failed.is_refused() => return Err(failed),
            Err(failed) => Body::from(connect::broken_off(&failed)),
            // Events may have come since the last look.
            Ok(_) => Body::new(heard),
        },
    };
    let mut response = streamed(body);
    response.extensions_mut().insert(StreamedAnswer);
    Ok(response)
}

pub(crate) fn streamed(body: Body) -> Response {
    let mut response = Response::new(body);
    let kind = HeaderValue::from_static("application/connect+json");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_root_are_refused_by_the_guest_side_of_an_earlier_version() {
        let (name, message) = ("KeyError".to_owned(), "'pid'".to_owned());
        let thrown = Thrown { name, message, trace: None };
        let why = |op: &str| thrown_error(&json!({ "op": op }), &thrown).why().to_owned();
        assert!(why("start as root").contains("earlier version"));
        assert_eq!(why("start"), "KeyError: 'pid'");
    }
}
