//! The tools: their descriptions for agents, and their calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use afresh::Kind;
use rmcp::ErrorData;
use rmcp::model::{CallToolResult, ContentBlock, JsonObject, Tool, ToolAnnotations};
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::arguments::{
    CheckpointArguments, CloseArguments, CodeArguments, CommandArguments, DiffArguments,
    ForkArguments, ListArguments, NoArguments, ReadArguments, RollbackArguments, SandboxArguments,
    WriteArguments,
};
use crate::collector::{Limits, OutputCollector};
use crate::message_limit::MessagePermits;
use crate::registry::{EnteredSandbox, Registry};
use crate::results::{
    CodeResult, CommandResult, Describe, DiffResult, FileContent, Listing, SandboxNames, StateId,
    StateTree, WrittenFile,
};
use crate::sandbox::{Sandbox, SandboxError};
use crate::server::Config;

/// One call of a tool.
pub(crate) struct ToolCall {
    pub(crate) registry: Arc<Registry>,
    /// Ends the wait for a sandbox.
    pub(crate) cancellation: CancellationToken,
    /// Ends a call that runs.
    pub(crate) cancelled: Arc<AtomicBool>,
    /// Receives output while the call runs.
    pub(crate) progress: Option<mpsc::Sender<String>>,
    /// For the memory of its arguments.
    pub(crate) permits: Option<MessagePermits>,
}

/// How a tool changes its sandbox.
#[derive(Clone, Copy)]
enum Effect {
    Reads,
    Adds,
    /// May remove or replace data.
    Replaces,
}

fn tool<A: JsonSchema + 'static, R: JsonSchema + 'static>(
    name: &'static str,
    effect: Effect,
    description: String,
) -> Tool {
    let annotations = ToolAnnotations::new()
        .read_only(matches!(effect, Effect::Reads))
        .destructive(matches!(effect, Effect::Replaces))
        .open_world(false);
    let mut tool = Tool::new(name, description, Arc::new(JsonObject::new()))
        .with_input_schema::<A>()
        .with_output_schema::<R>()
        .with_annotations(annotations);
    let schemas = [Some(&mut tool.input_schema), tool.output_schema.as_mut()];
    for schema in schemas.into_iter().flatten() {
        let known = Arc::make_mut(schema);
        let mut whole = Value::Object(std::mem::take(known));
        make_portable(&mut whole);
        if let Value::Object(portable) = whole {
            *known = portable;
        }
    }
    tool
}

/// Rewrites a schema for clients that map it to other dialects, such as that of Gemini. Formats of
/// unsigned numbers are removed, because no standard has them. A property has one type: one that
/// may be missing is never null. A property of any type names all types.
fn make_portable(schema: &mut Value) {
    match schema {
        Value::Object(parts) => {
            let is_rust = |format: &Value| format.as_str().is_some_and(|at| at.starts_with("uint"));
            if parts.get("format").is_some_and(is_rust) {
                parts.remove("format");
            }
            if let Some(Value::Array(types)) = parts.get_mut("type") {
                types.retain(|name| name != "null");
                if let [only] = &types[..] {
                    let only = only.clone();
                    parts.insert("type".to_owned(), only);
                }
            }
            let properties = parts.get_mut("properties").and_then(Value::as_object_mut);
            for property in properties.into_iter().flat_map(|all| all.values_mut()) {
                let Value::Object(keywords) = property else { continue };
                if keywords.keys().all(|name| ["title", "description"].contains(&&**name)) {
                    let types = ["object", "array", "string", "number", "boolean", "null"];
                    let types: Vec<Value> = types.map(|name| json!({ "type": name })).into();
                    keywords.insert("anyOf".to_owned(), types.into());
                }
            }
            parts.values_mut().for_each(make_portable);
        }
        Value::Array(parts) => parts.iter_mut().for_each(make_portable),
        _ => {}
    }
}

/// The tools that a server offers.
pub(crate) fn list(config: &Config) -> Vec<Tool> {
    let language = config.language.name();
    let mut tools = vec![
        tool::<CodeArguments, CodeResult>(
            "run_code",
            Effect::Replaces,
            format!(
                "Run {language} code in a sandbox. Variables, imports and files stay for later calls. \
                 Code that exceeds its time limit is undone."
            ),
        ),
        tool::<ReadArguments, FileContent>(
            "read_file",
            Effect::Reads,
            "Read a file of a sandbox.".to_owned(),
        ),
        tool::<WriteArguments, WrittenFile>(
            "write_file",
            Effect::Replaces,
            "Write a whole file of a sandbox.".to_owned(),
        ),
        tool::<ListArguments, Listing>(
            "list_files",
            Effect::Reads,
            "List a directory of a sandbox.".to_owned(),
        ),
        tool::<CheckpointArguments, StateId>(
            "checkpoint",
            Effect::Adds,
            "Save the present state of a sandbox (memory, processes and files) under a name. Takes microseconds \
             to milliseconds; use it before each risky step."
                .to_owned(),
        ),
        tool::<RollbackArguments, StateId>(
            "rollback",
            Effect::Replaces,
            "Return a sandbox to a checkpoint. Memory, processes and files are exactly as they were.".to_owned(),
        ),
        tool::<ForkArguments, SandboxNames>(
            "fork",
            Effect::Adds,
            "Make independent copies of a sandbox in its present state, to try several solutions. Returns their \
             names."
                .to_owned(),
        ),
        tool::<DiffArguments, DiffResult>(
            "diff",
            Effect::Reads,
            "List the files that differ between two checkpoints, or between a checkpoint and the present state."
                .to_owned(),
        ),
        tool::<SandboxArguments, StateTree>(
            "tree",
            Effect::Reads,
            "List all states of a sandbox and its forks.".to_owned(),
        ),
        tool::<NoArguments, SandboxNames>(
            "create_sandbox",
            Effect::Adds,
            "Create another sandbox in its initial state. Returns its name.".to_owned(),
        ),
        tool::<CloseArguments, SandboxNames>(
            "close_sandbox",
            Effect::Replaces,
            "Close a sandbox and free its memory. Returns the names of the others.".to_owned(),
        ),
        tool::<NoArguments, SandboxNames>(
            "list_sandboxes",
            Effect::Reads,
            "List all sandboxes.".to_owned(),
        ),
    ];
    if config.guest.kind() == Kind::Program {
        let command = tool::<CommandArguments, CommandResult>(
            "run_command",
            Effect::Replaces,
            "Run a shell command in a sandbox to its end. Processes that it leaves in the background continue during \
             later calls."
                .to_owned(),
        );
        tools.insert(1, command);
    }
    tools
}

/// Parses the arguments of a tool.
fn parse<A: DeserializeOwned>(arguments: JsonObject) -> Result<A, SandboxError> {
    serde_json::from_value(arguments.into())
        .map_err(|error| SandboxError::Refused(format!("invalid arguments: {error}")))
}

/// A result, structured and as text. `failed` marks a result that reports a failure.
fn answer<R: Serialize + Describe>(result: &R, failed: bool) -> CallToolResult {
    let mut answer = match failed {
        true => CallToolResult::error(Vec::new()),
        false => CallToolResult::success(Vec::new()),
    };
    answer.content = vec![ContentBlock::text(result.describe())];
    let images = result.images().iter();
    answer.content.extend(images.map(|image| ContentBlock::image(&*image.data, image.mime)));
    answer.structured_content = serde_json::to_value(result).ok();
    answer
}

impl ToolCall {
    /// Calls a tool by its name.
    pub(crate) async fn call(
        self,
        name: &str,
        arguments: JsonObject,
    ) -> Result<CallToolResult, ErrorData> {
        let called = match name {
            "run_code" => self.run_code(arguments).await,
            "run_command" => self.run_command(arguments).await,
            "read_file" => self.read_file(arguments).await,
            "write_file" => self.write_file(arguments).await,
            "list_files" => self.list_files(arguments).await,
            "checkpoint" => self.checkpoint(arguments).await,
            "rollback" => self.rollback(arguments).await,
            "fork" => self.fork(arguments).await,
            "diff" => self.diff(arguments).await,
            "tree" => self.tree(arguments).await,
            "create_sandbox" => self.create_sandbox(arguments).await,
            "close_sandbox" => self.close_sandbox(arguments).await,
            "list_sandboxes" => self.list_sandboxes(arguments),
            _ => {
                let message = format!("no tool is named {name:?}; `tools/list` lists them");
                return Err(ErrorData::invalid_params(message, None));
            }
        };
        // The agent reads the reason, and can correct its call.
        Ok(called.unwrap_or_else(|error| {
            CallToolResult::error(vec![ContentBlock::text(error.to_string())])
        }))
    }

    /// Uses a sandbox once the calls before this one have ended. The call is cancelled if the
    /// sandbox is closed.
    async fn with<R: Send + 'static>(
        &self,
        sandbox: &str,
        run: impl FnOnce(&mut Sandbox) -> Result<R, SandboxError> + Send + 'static,
    ) -> Result<R, SandboxError> {
        let entered = self.registry.enter(sandbox, &self.cancellation).await?;
        let EnteredSandbox { mut guard, closed } = entered;
        let (cancelled, permits) = (Arc::clone(&self.cancelled), self.permits.clone());
        let mut running = tokio::task::spawn_blocking(move || {
            // The call runs to its end where its client has left.
            let _permits = permits;
            if cancelled.load(Ordering::Relaxed) {
                return Err(SandboxError::Cancelled);
            }
            run(&mut guard.sandbox)
        });
        let ended = tokio::select! {
            ended = &mut running => ended,
            () = closed.cancelled() => {
                self.cancelled.store(true, Ordering::Relaxed);
                running.await.map(|_| Err(SandboxError::Closed))
            }
        };
        ended.unwrap_or_else(|error| {
            Err(SandboxError::Refused(format!("the call ended by an internal error: {error}")))
        })
    }

    /// Makes the collector of a call, whose time limit begins when the collector is made.
    fn collector(
        &self,
        seconds: Option<f64>,
    ) -> Result<impl FnOnce() -> OutputCollector + Send + 'static, SandboxError> {
        let timeout = match seconds {
            Some(seconds) => Duration::try_from_secs_f64(seconds)
                .map_err(|error| SandboxError::Refused(format!("`timeout`: {error}")))?
                .min(self.registry.config.max_timeout),
            None => self.registry.config.timeout,
        };
        let (cancelled, progress) = (Arc::clone(&self.cancelled), self.progress.clone());
        Ok(move || {
            let limits =
                Limits { cancelled, deadline: Instant::now().checked_add(timeout), timeout };
            OutputCollector::new(limits, progress)
        })
    }

    async fn run_code(&self, arguments: JsonObject) -> Result<CallToolResult, SandboxError> {
        let CodeArguments { code, sandbox, timeout } = parse(arguments)?;
        let collector = self.collector(timeout)?;
        let run = move |sandbox: &mut Sandbox| sandbox.run_code(&code, collector());
        let result = self.with(&sandbox, run).await?;
        Ok(answer(&result, result.error.is_some()))
    }

    async fn run_command(&self, arguments: JsonObject) -> Result<CallToolResult, SandboxError> {
        let arguments: CommandArguments = parse(arguments)?;
        let collector = self.collector(arguments.timeout)?;
        let sandbox = arguments.sandbox.clone();
        let run = move |sandbox: &mut Sandbox| sandbox.run_command(&arguments, collector());
        let result = self.with(&sandbox, run).await?;
        Ok(answer(&result, result.killed))
    }

    async fn read_file(&self, arguments: JsonObject) -> Result<CallToolResult, SandboxError> {
        let ReadArguments { path, sandbox, offset, length } = parse(arguments)?;
        let read = move |sandbox: &mut Sandbox| sandbox.read_file(&path, offset, length);
        Ok(answer(&self.with(&sandbox, read).await?, false))
    }

    async fn write_file(&self, arguments: JsonObject) -> Result<CallToolResult, SandboxError> {
        let WriteArguments { path, content, encoding, sandbox } = parse(arguments)?;
        let write = move |sandbox: &mut Sandbox| {
            let bytes = sandbox.write_file(&path, content, encoding)?;
            Ok(WrittenFile { path, bytes })
        };
        Ok(answer(&self.with(&sandbox, write).await?, false))
    }

    async fn list_files(&self, arguments: JsonObject) -> Result<CallToolResult, SandboxError> {
        let ListArguments { path, sandbox } = parse(arguments)?;
        let list = move |sandbox: &mut Sandbox| sandbox.list_files(&path);
        Ok(answer(&self.with(&sandbox, list).await?, false))
    }

    async fn checkpoint(&self, arguments: JsonObject) -> Result<CallToolResult, SandboxError> {
        let CheckpointArguments { name, sandbox } = parse(arguments)?;
        let checkpoint = move |sandbox: &mut Sandbox| sandbox.checkpoint(&name);
        let id = self.with(&sandbox, checkpoint).await?.to_string();
        Ok(answer(&StateId { id }, false))
    }

    async fn rollback(&self, arguments: JsonObject) -> Result<CallToolResult, SandboxError> {
        let RollbackArguments { to, sandbox } = parse(arguments)?;
        let rollback = move |sandbox: &mut Sandbox| sandbox.rollback(&to);
        let id = self.with(&sandbox, rollback).await?.to_string();
        Ok(answer(&StateId { id }, false))
    }

    async fn fork(&self, arguments: JsonObject) -> Result<CallToolResult, SandboxError> {
        let ForkArguments { count, sandbox } = parse(arguments)?;
        if count == 0 {
            return Err(SandboxError::Refused("`count` is 0; make at least 1 fork".to_owned()));
        }
        let places = self.registry.reserve(count)?;
        let fork = move |sandbox: &mut Sandbox| Ok((sandbox.fork(count)?, places));
        let (forks, places) = self.with(&sandbox, fork).await?;
        Ok(answer(&SandboxNames { sandboxes: places.fill(forks) }, false))
    }

    async fn diff(&self, arguments: JsonObject) -> Result<CallToolResult, SandboxError> {
        let DiffArguments { from, to, sandbox } = parse(arguments)?;
        let diff = move |sandbox: &mut Sandbox| sandbox.diff(&from, to.as_deref());
        Ok(answer(&self.with(&sandbox, diff).await?, false))
    }

    async fn tree(&self, arguments: JsonObject) -> Result<CallToolResult, SandboxError> {
        let SandboxArguments { sandbox } = parse(arguments)?;
        let tree = self.with(&sandbox, |sandbox| Ok(sandbox.tree())).await?;
        Ok(answer(&tree, false))
    }

    async fn create_sandbox(&self, arguments: JsonObject) -> Result<CallToolResult, SandboxError> {
        let NoArguments {} = parse(arguments)?;
        let places = self.registry.reserve(1)?;
        let registry = Arc::clone(&self.registry);
        // The start keeps its place to its end where the client has left.
        let start = move || registry.start().map(|started| (started, places));
        let started = tokio::task::spawn_blocking(start).await;
        let (started, places) =
            started.map_err(|error| SandboxError::Refused(error.to_string()))??;
        Ok(answer(&SandboxNames { sandboxes: places.fill(vec![started]) }, false))
    }

    async fn close_sandbox(&self, arguments: JsonObject) -> Result<CallToolResult, SandboxError> {
        let CloseArguments { sandbox } = parse(arguments)?;
        self.registry.close(&sandbox).await?;
        Ok(answer(&SandboxNames { sandboxes: self.registry.names() }, false))
    }

    fn list_sandboxes(&self, arguments: JsonObject) -> Result<CallToolResult, SandboxError> {
        let NoArguments {} = parse(arguments)?;
        Ok(answer(&SandboxNames { sandboxes: self.registry.names() }, false))
    }
}

#[cfg(test)]
mod tests {
    use afresh::{Guest, Options};
    use axum::body::Body;
    use axum::extract::Request;

    use super::*;
    use crate::arguments::MAIN;
    use crate::message_limit::MessageMemory;

    fn registry() -> Arc<Registry> {
        registry_of(100)
    }

    fn registry_of(max_sandboxes: usize) -> Arc<Registry> {
        let wasm = wat::parse_str(r#"(module (memory (export "memory") 1))"#).unwrap();
        let guest = Guest::from_bytes("empty", &wasm, &Options::new()).unwrap();
        let language = afresh_interpreter::Language::named("javascript").unwrap();
        let config = Config { max_sandboxes, ..Config::new(guest, language) };
        Arc::new(Registry::new(config).unwrap())
    }

    fn new_call(registry: &Arc<Registry>) -> ToolCall {
        ToolCall {
            registry: Arc::clone(registry),
            cancellation: CancellationToken::new(),
            cancelled: Arc::default(),
            progress: None,
            permits: None,
        }
    }

    fn arguments(arguments: serde_json::Value) -> JsonObject {
        serde_json::from_value(arguments).unwrap()
    }

    /// All calls reserve their places before the one thread for starts is free.
    #[test]
    fn sandboxes_that_start_at_once_stay_within_the_limit() {
        const FREE: usize = 3;
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.max_blocking_threads(1).build().unwrap().block_on(async {
            let registry = registry_of(FREE + 1);
            let (end, ends) = std::sync::mpsc::channel::<()>();
            let occupied = tokio::task::spawn_blocking(move || ends.recv());
            let calls = (0..4 * FREE).map(|_| {
                let call = new_call(&registry);
                tokio::spawn(async move { call.create_sandbox(JsonObject::new()).await })
            });
            let calls: Vec<_> = calls.collect();
            // Refused calls end while the others wait for the thread.
            while calls.iter().filter(|call| call.is_finished()).count() < 3 * FREE {
                tokio::task::yield_now().await;
            }
            let fork = arguments(serde_json::json!({"count": 1}));
            let refused = new_call(&registry).fork(fork).await.unwrap_err().to_string();
            assert!(refused.starts_with("1 sandboxes exist, 3 are being made"), "{refused}");
            end.send(()).unwrap();
            occupied.await.unwrap().unwrap();
            let mut refused = 0;
            for call in calls {
                refused += usize::from(call.await.unwrap().is_err());
            }
            assert_eq!((refused, registry.names().len()), (3 * FREE, FREE + 1));
            registry.close("sandbox-1").await.unwrap();
            new_call(&registry).create_sandbox(JsonObject::new()).await.unwrap();
        });
    }

    #[tokio::test]
    async fn places_of_sandboxes_that_are_not_made_are_free_again() {
        let registry = registry_of(2);
        let fork = arguments(serde_json::json!({"count": 1, "sandbox": "absent"}));
        let failed = new_call(&registry).fork(fork).await.unwrap_err().to_string();
        assert!(failed.starts_with("no sandbox is named"), "{failed}");
        let places = registry.reserve(1).unwrap();
        let start = move || -> Result<(), SandboxError> {
            let _places = places;
            panic!("a planted defect");
        };
        assert!(tokio::task::spawn_blocking(start).await.is_err());
        let fork = arguments(serde_json::json!({"count": 1}));
        let cancelled = new_call(&registry);
        cancelled.cancellation.cancel();
        assert!(matches!(cancelled.fork(fork).await, Err(SandboxError::Cancelled)));
        new_call(&registry).create_sandbox(JsonObject::new()).await.unwrap();
        assert!(new_call(&registry).create_sandbox(JsonObject::new()).await.is_err());
    }

    #[tokio::test]
    async fn a_closed_sandbox_has_its_place_until_its_cancelled_call_has_ended() {
        let registry = registry_of(2);
        new_call(&registry).create_sandbox(JsonObject::new()).await.unwrap();
        let (begun, is_begun) = tokio::sync::oneshot::channel();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let call = new_call(&registry);
        let cancelled = Arc::clone(&call.cancelled);
        let run = move |_: &mut Sandbox| {
            begun.send(()).unwrap();
            let _ = ends.recv();
            Ok(())
        };
        let running = tokio::spawn(async move { call.with("sandbox-1", run).await });
        is_begun.await.unwrap();
        let waiting = new_call(&registry);
        let waiting = tokio::spawn(async move { waiting.with("sandbox-1", |_| Ok(())).await });
        tokio::task::yield_now().await;
        let close = arguments(serde_json::json!({"sandbox": "sandbox-1"}));
        let closing = new_call(&registry);
        let closing = tokio::spawn(async move { closing.close_sandbox(close).await });
        assert!(matches!(waiting.await.unwrap(), Err(SandboxError::Closed)));
        while !cancelled.load(Ordering::Relaxed) {
            tokio::task::yield_now().await;
        }
        assert_eq!(registry.names(), [MAIN]);
        let refused = new_call(&registry).create_sandbox(JsonObject::new()).await.unwrap_err();
        let refused = refused.to_string();
        assert!(refused.starts_with("1 sandboxes exist, 1 are being made or closed"), "{refused}");
        assert!(!closing.is_finished(), "the call runs");
        end.send(()).unwrap();
        assert!(matches!(running.await.unwrap(), Err(SandboxError::Closed)));
        closing.await.unwrap().unwrap();
        new_call(&registry).create_sandbox(JsonObject::new()).await.unwrap();
    }

    #[tokio::test]
    async fn a_cancelled_call_does_not_wait_for_its_sandbox() {
        let registry = registry();
        let cancellation = CancellationToken::new();
        let running = registry.enter(MAIN, &cancellation).await.unwrap();
        let call = ToolCall {
            registry: Arc::clone(&registry),
            cancellation: cancellation.clone(),
            cancelled: Arc::default(),
            progress: None,
            permits: None,
        };
        let waiting = tokio::spawn(async move { call.with(MAIN, |_| Ok(())).await });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished(), "another call runs");
        cancellation.cancel();
        assert!(matches!(waiting.await.unwrap(), Err(SandboxError::Cancelled)));
        drop(running);
    }

    #[tokio::test]
    async fn a_call_whose_client_has_left_keeps_its_charge_until_it_ends() {
        let registry = registry();
        let memory = MessageMemory::default();
        let (request, permits) = memory.receive(Request::new(Body::from("{}"))).await.unwrap();
        let request = request.into_parts().0;
        let call = ToolCall {
            registry,
            cancellation: CancellationToken::new(),
            cancelled: Arc::default(),
            progress: None,
            permits: request.extensions.get().cloned(),
        };
        drop((request, permits));
        let (begun, is_begun) = tokio::sync::oneshot::channel();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let (ended, is_ended) = tokio::sync::oneshot::channel::<()>();
        let calling = tokio::spawn(async move {
            let run = move |_: &mut Sandbox| {
                begun.send(()).unwrap();
                let _ = ends.recv();
                Ok(ended)
            };
            call.with(MAIN, run).await.map(drop)
        });
        is_begun.await.unwrap();
        calling.abort();
        assert!(calling.await.unwrap_err().is_cancelled());
        assert!(!memory.is_free(), "the call runs");
        end.send(()).unwrap();
        // The call has ended once its result is dropped.
        assert!(is_ended.await.is_err());
        assert!(memory.is_free());
    }

    #[test]
    fn schemas_are_portable() {
        let tool = tool::<ReadArguments, FileContent>("read", Effect::Reads, String::new());
        let text = serde_json::to_string(&tool).unwrap();
        assert!(text.contains("next_offset") && text.contains("\"minimum\":0"), "{text}");
        assert!(!text.contains("uint"), "{text}");
        let run = super::tool::<CodeArguments, CodeResult>("run", Effect::Reads, String::new());
        assert_eq!(run.input_schema["properties"]["timeout"]["type"], "number");
        let output = run.output_schema.unwrap();
        assert_eq!(output["properties"]["text"]["type"], "string");
        assert_eq!(output["properties"]["json"]["anyOf"].as_array().unwrap().len(), 6);
    }
}
