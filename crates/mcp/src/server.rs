//! The server: sandboxes behind the protocol.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use afresh::Guest;
use afresh_interpreter::Language;
use percent_encoding::percent_decode_str;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, Implementation, ListResourceTemplatesResult,
    ListToolsResult, PaginatedRequestParams, ProgressNotificationParam, ProgressToken,
    ReadResourceRequestParams, ReadResourceResponse, ReadResourceResult, ResourceContents,
    ResourceTemplate, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::{Peer, RequestContext};
use rmcp::{ErrorData, RoleServer, ServerHandler};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::answering_service::AnsweringService;
use crate::message_limit::MessagePermits;
use crate::registry::Registry;
use crate::stdio::{StdioTransport, serve_client};
use crate::tools::{self, ToolCall};

/// The scheme of the files of sandboxes as resources: `afresh://SANDBOX/PATH`.
const SCHEME: &str = "afresh://";
/// Maximum pieces of output that wait to be reported as progress.
const MAX_PROGRESS: usize = 64;

/// The guest and the limits of sandboxes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Config {
    /// The guest, opened with [`OutputCollector`](crate::OutputCollector) as its listener.
    pub guest: Guest,
    /// The language that it evaluates.
    pub language: &'static Language,
    /// Time limit of a call that names none.
    pub timeout: Duration,
    /// Maximum time limit that a call may name.
    pub max_timeout: Duration,
    /// Maximum sandboxes at the same time.
    pub max_sandboxes: usize,
    /// Maximum bytes of memory of all checkpoints, and of the states that forks start from.
    pub max_state_memory: u64,
}

impl Config {
    /// Sandboxes of `guest`: at most 100 with 4 GiB of states, with 60 s for a call, and an hour
    /// where the call names its limit.
    #[must_use]
    pub fn new(guest: Guest, language: &'static Language) -> Self {
        Self {
            guest,
            language,
            timeout: Duration::from_secs(60),
            max_timeout: Duration::from_secs(60 * 60),
            max_sandboxes: 100,
            max_state_memory: 4 << 30,
        }
    }
}

/// A server with its sandboxes. Copies share them.
#[derive(Clone)]
pub struct Server {
    registry: Arc<Registry>,
    /// Made once: each call looks its tool up.
    tools: Arc<[Tool]>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("sandboxes", &self.registry.names()).finish()
    }
}

/// Ends a call when its client has left.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Server {
    /// A server with one sandbox, `main`.
    ///
    /// # Errors
    /// The guest has no sessions.
    pub fn new(config: Config) -> Result<Self, afresh::Cause> {
        let tools = tools::list(&config).into();
        Ok(Self { registry: Arc::new(Registry::new(config)?), tools })
    }

    /// Answers the client on standard input and output until its input ends, or until `end`.
    /// Returns once the answers are written, if the client reads them.
    ///
    /// # Errors
    /// The client does not follow the protocol, or a thread cannot be started.
    pub async fn serve_stdio(
        self,
        end: impl Future<Output = ()> + Send,
    ) -> Result<(), afresh::Cause> {
        serve_client(self.answering(), StdioTransport::new()?, end).await
    }

    /// The service of all clients.
    pub(crate) fn answering(self) -> AnsweringService<Self> {
        let sandboxes = self.registry.config.max_sandboxes;
        AnsweringService::new(self, sandboxes)
    }

    /// Runs a call, and cancels it when its client does.
    async fn run(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let cancel = CancelOnDrop(Arc::default());
        let (progress, pieces) = match context.meta.get_progress_token() {
            Some(token) => {
                let (progress, pieces) = mpsc::channel(MAX_PROGRESS);
                (Some(progress), Some((token, pieces)))
            }
            None => (None, None),
        };
        let call = ToolCall {
            registry: Arc::clone(&self.registry),
            cancellation: context.ct.clone(),
            cancelled: Arc::clone(&cancel.0),
            progress,
            permits: MessagePermits::of(&context.extensions),
        };
        let calling = call.call(&request.name, request.arguments.unwrap_or_default());
        let reporting = async {
            if let Some((token, pieces)) = pieces {
                report_progress(&context.peer, token, pieces).await;
            }
        };
        let cancelling = async {
            context.ct.cancelled().await;
            cancel.0.store(true, Ordering::Relaxed);
            // The call notices and answers.
            std::future::pending::<()>().await;
        };
        let both = async { tokio::join!(calling, reporting).0 };
        tokio::select! {
            called = both => called.map(CallToolResponse::from),
            () = cancelling => unreachable!("it never ends"),
        }
    }

    /// The content of a resource.
    async fn read(
        &self,
        uri: &str,
        cancellation: &CancellationToken,
    ) -> Result<ReadResourceResult, ErrorData> {
        let Some((sandbox, path)) = resource(uri) else {
            let message = format!("{uri}: expected {SCHEME}SANDBOX/PATH, in UTF-8");
            return Err(ErrorData::resource_not_found(message, None));
        };
        let refused = |error: crate::sandbox::SandboxError| {
            ErrorData::resource_not_found(error.to_string(), None)
        };
        let mut entered = self.registry.enter(sandbox, cancellation).await.map_err(refused)?;
        let read = move || entered.guard.sandbox.read_file(&path, 0, None);
        let read = tokio::task::spawn_blocking(read).await;
        let file = read
            .map_err(|error| ErrorData::internal_error(error.to_string(), None))?
            .map_err(refused)?;
        if file.next_offset.is_some() {
            let message = format!("{uri} has {} bytes; `read_file` reads it in parts", file.size);
            return Err(ErrorData::invalid_params(message, None));
        }
        let content = match file.encoding {
            "utf8" => ResourceContents::text(file.content, uri),
            _ => ResourceContents::blob(file.content, uri),
        };
        Ok(ReadResourceResult::new(vec![content]))
    }
}

/// The sandbox and the path of a resource. Clients that expand the URI template escape characters
/// that a URI cannot have. A `%` that begins no escape is taken as it is.
fn resource(uri: &str) -> Option<(&str, String)> {
    let rest = uri.strip_prefix(SCHEME)?;
    let (sandbox, path) = rest.split_at(rest.find('/')?);
    let path = percent_decode_str(path).decode_utf8().ok()?;
    Some((sandbox, path.into_owned()))
}

/// Reports output as progress of a call until the call ends. Pieces that came meanwhile are
/// reported together.
async fn report_progress(
    peer: &Peer<RoleServer>,
    token: ProgressToken,
    mut pieces: mpsc::Receiver<String>,
) {
    let mut count = 0.0;
    while let Some(mut text) = pieces.recv().await {
        while let Ok(more) = pieces.try_recv() {
            text.push_str(&more);
        }
        count += 1.0;
        let note = ProgressNotificationParam::new(token.clone(), count).with_message(text);
        if peer.notify_progress(note).await.is_err() {
            return;
        }
    }
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder().enable_tools().enable_resources().build();
        let mut info = ServerConfig::new(capabilities);
        info.server_info = Implementation::new("afresh", env!("CARGO_PKG_VERSION"));
        info.instructions = Some(
            "Sandboxes that keep their state between calls. `checkpoint` before a risky step and `rollback` if it \
             fails; `fork` to try several solutions from one state. The sandbox `main` exists from the start."
                .to_owned(),
        );
        info
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(self.tools.to_vec()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.tools.iter().find(|tool| tool.name == name).cloned()
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        self.run(request, context).await
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        let files = ResourceTemplate::new(format!("{SCHEME}{{sandbox}}/{{+path}}"), "file")
            .with_description(
                "A file of a sandbox, by its absolute path with `%` as `%25`, up to 1 MiB.",
            );
        Ok(ListResourceTemplatesResult::with_all_items(vec![files]))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        self.read(&request.uri, &context.ct).await.map(ReadResourceResponse::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resource_names_a_file_by_its_escaped_path() {
        for (uri, path) in [
            ("afresh://main/tmp/a.txt", Some("/tmp/a.txt")),
            ("afresh://main/tmp/a%20b.txt", Some("/tmp/a b.txt")),
            ("afresh://main/tmp/a b.txt", Some("/tmp/a b.txt")),
            ("afresh://main/tmp/%C3%A4%e2%82%ac", Some("/tmp/\u{e4}\u{20ac}")),
            ("afresh://main/tmp/\u{e4}+?#", Some("/tmp/\u{e4}+?#")),
            ("afresh://main/tmp/100%25%2f", Some("/tmp/100%/")),
            ("afresh://main/tmp/100%+%zz", Some("/tmp/100%+%zz")),
            ("afresh://main/tmp/%ff", None),
            ("afresh://main", None),
            ("file:///tmp/a.txt", None),
        ] {
            let named = path.map(|path| ("main", path.to_owned()));
            assert_eq!(resource(uri), named, "{uri}");
        }
    }
}
