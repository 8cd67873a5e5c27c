//! Commands in a sandbox, in the shape of E2B's agent.
//!
//! What it promises: a sandbox of a Linux program runs them, beside code and beside one another. They are part of its state: what a pause, a
//! snapshot or a fork keeps goes on from there. Who starts a command or connects to it is told what it prints from then on. What may
//! break it: a command's output is told by the session (`setsid`) that it is printed in, so what leaves its command's is not heard.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use afresh::Session;
use afresh_interpreter::Answer as Came;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::HeaderMap;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::commands::{Ear, Heard};
use super::connect::{self, Failed};
use super::one::{Sandbox, command};
use super::registry::{Sandboxes, lock};
use super::routes::Inside;
use super::speaker::Speaker;
use crate::body::InPieces;

/// How often a client wants to be told that a command runs on, in seconds.
const ALIVE: &str = "keepalive-ping-interval";
/// How often it is told otherwise.
const SELDOM: Duration = Duration::from_secs(90);

#[derive(Deserialize)]
struct Start {
    process: Config,
    pty: Option<Terminal>,
    tag: Option<String>,
    #[serde(default)]
    stdin: bool,
}

#[derive(Deserialize)]
struct Config {
    cmd: String,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    envs: BTreeMap<String, String>,
    cwd: Option<String>,
}

/// A terminal, by its size.
#[derive(Clone, Copy, Deserialize)]
struct Terminal {
    size: Size,
}

#[derive(Clone, Copy, Deserialize)]
struct Size {
    rows: u16,
    cols: u16,
}

impl Terminal {
    fn wanted(self) -> Value {
        json!([self.size.rows, self.size.cols])
    }
}

/// Something with a command that runs.
#[derive(Deserialize)]
struct Chosen {
    process: Selector,
    signal: Option<Value>,
    pty: Option<Terminal>,
    #[serde(default)]
    input: Input,
}

#[derive(Deserialize)]
struct Selector {
    pid: Option<u32>,
    tag: Option<String>,
}

#[derive(Default, Deserialize)]
struct Input {
    stdin: Option<String>,
    pty: Option<String>,
}

/// A part of what a command is to read.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Part {
    Start { process: Selector },
    Data { input: Input },
    KeepAlive {},
}

impl Input {
    /// What the guest's half of commands is asked.
    fn wanted(self) -> Result<Value, Failed> {
        // Which of the two a command has it knows itself.
        let data = self.stdin.or(self.pty);
        let none = || Failed::new("invalid_argument", "it is not said what is to be read");
        Ok(json!({"op": "input", "data": data.ok_or_else(none)?}))
    }
}

/// The agent's operations on processes.
pub(super) async fn process(
    State(all): State<Arc<Sandboxes>>,
    Inside(sandbox): Inside,
    Path(method): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let unknown = |why: &str| {
        Failed::new("unimplemented", format!("{method} is not there in this sandbox: {why}"))
    };
    if !all.template(&sandbox.template).config.linux {
        return unknown("it evaluates code, and has no processes").into_response();
    }
    let inside = Commanded { all, sandbox };
    let done = match method.as_str() {
        "Start" => inside.start(&headers, &body).await,
        "Connect" => inside.connect(&headers, &body).await,
        "List" => inside.list().await,
        "SendSignal" => inside.signal(&body).await,
        "SendInput" => inside.input(&body).await,
        "CloseStdin" => inside.close(&body).await,
        "Update" => inside.resize(&body).await,
        "StreamInput" => inside.stream(&body).await,
        _ => Err(unknown("it is not known")),
    };
    done.unwrap_or_else(Failed::into_response)
}

/// A sandbox that runs commands.
struct Commanded {
    all: Arc<Sandboxes>,
    sandbox: Arc<Sandbox>,
}

type Done = Result<Response, Failed>;

/// What an operation asks for that is answered at once.
fn asked<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failed> {
    serde_json::from_slice(body).map_err(|error| Failed::new("invalid_argument", error.to_string()))
}

fn gone() -> Failed {
    Failed::new("not_found", "there is no such command: it has ended, or there never was")
}

/// The number of a command that runs.
fn find(listed: &Value, wanted: &Selector) -> Result<u32, Failed> {
    let is_it = |command: &&Value| match (wanted.pid, &wanted.tag) {
        (Some(pid), _) => command["pid"] == pid,
        (None, Some(tag)) => command["tag"] == tag.as_str(),
        (None, None) => false,
    };
    let found = listed.as_array().and_then(|all| all.iter().find(is_it));
    let number = found.and_then(|command| command["pid"].as_u64());
    number.and_then(|number| u32::try_from(number).ok()).ok_or_else(gone)
}

impl Commanded {
    /// One call of the guest's half of commands, and what is done within it once it has answered.
    async fn ask<R: Send + 'static>(
        &self,
        mut speaker: Speaker,
        wanted: impl FnOnce(&mut Asking<'_>) -> Result<R, Failed> + Send + 'static,
    ) -> Result<R, Failed> {
        let language = self.all.template(&self.sandbox.template).language;
        let sandbox = self.sandbox.clone();
        let asked = self.all.with(&self.sandbox, move |session| {
            let speaker = &mut speaker;
            Ok(wanted(&mut Asking { sandbox: &sandbox, session, language, speaker }))
        });
        asked.await?
    }

    fn speaker(&self) -> Speaker {
        self.all.speaker(&self.sandbox)
    }

    async fn start(&self, headers: &HeaderMap, body: &[u8]) -> Done {
        let Start { process, pty, tag, stdin } = connect::asked(body)?;
        let wanted = json!({
            "op": "start",
            "cmd": process.cmd,
            "args": process.args,
            "envs": process.envs,
            "cwd": process.cwd,
            "stdin": stdin,
            "size": pty.map(Terminal::wanted),
            "tag": tag,
        });
        let (ear, heard) = Ear::new(alive(headers));
        let mut speaker = self.speaker();
        speaker.starts(ear, connect::limit(headers));
        let starting = self.ask(speaker, move |asking| {
            asking.sandbox.runs.fetch_add(1, Ordering::Relaxed);
            asking.of(&wanted)
        });
        heard_while(starting, heard).await
    }

    async fn connect(&self, headers: &HeaderMap, body: &[u8]) -> Done {
        let Chosen { process, .. } = connect::asked(body)?;
        let (ear, heard) = Ear::new(alive(headers));
        let connecting = self.ask(self.speaker(), move |asking| {
            let listed = asking.of(&json!({"op": "list"}))?;
            asking.sandbox.commands.listen(find(&listed, &process)?, ear, None);
            Ok(())
        });
        heard_while(connecting, heard).await
    }

    async fn list(&self) -> Done {
        let listed = self.ask(self.speaker(), |asking| asking.of(&json!({"op": "list"}))).await?;
        Ok(axum::Json(json!({ "processes": listed })).into_response())
    }

    async fn signal(&self, body: &[u8]) -> Done {
        let Chosen { process, signal, .. } = asked(body)?;
        let signal = match &signal {
            Some(Value::Number(number)) => number.as_u64(),
            Some(Value::String(name)) if name == "SIGNAL_SIGKILL" => Some(9),
            Some(Value::String(name)) if name == "SIGNAL_SIGTERM" => Some(15),
            _ => None,
        };
        let Some(signal @ (9 | 15)) = signal else {
            let why = "a signal is SIGNAL_SIGTERM or SIGNAL_SIGKILL";
            return Err(Failed::new("invalid_argument", why));
        };
        self.chosen(process, vec![json!({"op": "signal", "signal": signal})]).await
    }

    async fn input(&self, body: &[u8]) -> Done {
        let Chosen { process, input, .. } = asked(body)?;
        self.chosen(process, vec![input.wanted()?]).await
    }

    /// A terminal has another size now.
    async fn resize(&self, body: &[u8]) -> Done {
        let Chosen { process, pty, .. } = asked(body)?;
        let none = || Failed::new("invalid_argument", "it is not said how large the terminal is");
        let size = pty.ok_or_else(none)?.wanted();
        self.chosen(process, vec![json!({"op": "resize", "size": size})]).await
    }

    /// What comes in parts is written once all of it is there.
    async fn stream(&self, body: &[u8]) -> Done {
        let mut parts = connect::messages(body)?.into_iter();
        let Some(Part::Start { process }) = parts.next() else {
            return Err(Failed::new("invalid_argument", "it is not said which command is to read"));
        };
        let data = parts.filter_map(|part| match part {
            Part::Data { input } => Some(input.wanted()),
            _ => None,
        });
        match self.chosen(process, data.collect::<Result<_, _>>()?).await {
            Ok(_) => Ok(streamed(connect::taken().into())),
            Err(failed) if failed.is_refused() => Err(failed),
            Err(failed) => Ok(streamed(connect::broken_off(&failed).into())),
        }
    }

    async fn close(&self, body: &[u8]) -> Done {
        let Chosen { process, .. } = asked(body)?;
        self.chosen(process, vec![json!({"op": "close"})]).await
    }

    /// Does things with one command.
    async fn chosen(&self, process: Selector, all: Vec<Value>) -> Done {
        let done = self.ask(self.speaker(), move |asking| {
            let number = match process.pid {
                Some(number) => number,
                None => find(&asking.of(&json!({"op": "list"}))?, &process)?,
            };
            for mut wanted in all {
                wanted["pid"] = number.into();
                if asking.of(&wanted)? != Value::Bool(true) {
                    return Err(gone());
                }
            }
            Ok(())
        });
        done.await?;
        Ok(axum::Json(json!({})).into_response())
    }
}

/// A sandbox, in its turn.
struct Asking<'a> {
    sandbox: &'a Sandbox,
    session: &'a mut Session,
    language: &'static afresh_interpreter::Language,
    speaker: &'a mut Speaker,
}

impl Asking<'_> {
    /// What the guest's half of commands answers; what it threw is told as such.
    fn of(&mut self, wanted: &Value) -> Result<Value, Failed> {
        let mut mark = lock(&self.sandbox.mark);
        match command(self.session, self.language, wanted, &mut mark, self.speaker)? {
            Came::Value(shown) => Ok(shown.json.unwrap_or_default()),
            Came::Done => Ok(Value::Null),
            Came::Threw(thrown) => Err(Failed::of(&thrown)),
        }
    }
}

fn alive(headers: &HeaderMap) -> Duration {
    let asked = headers.get(ALIVE).and_then(|seconds| seconds.to_str().ok()?.parse::<u32>().ok());
    asked.map_or(SELDOM, |seconds| Duration::from_secs(seconds.max(1).into()))
}

/// A stream that begins as soon as there is something to tell, though the call that brings it about lasts.
async fn heard_while<R>(call: impl Future<Output = Result<R, Failed>>, mut heard: Heard) -> Done {
    let body = tokio::select! {
        biased;
        true = heard.begun() => Body::new(heard),
        called = call => match called {
            Err(failed) if failed.is_refused() => return Err(failed),
            Err(failed) => Body::from(connect::broken_off(&failed)),
            // What it told may have come since it was looked for.
            Ok(_) => Body::new(heard),
        },
    };
    let mut response = streamed(body);
    response.extensions_mut().insert(InPieces);
    Ok(response)
}

fn streamed(body: Body) -> Response {
    let mut response = Response::new(body);
    let kind = HeaderValue::from_static("application/connect+json");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}
