//! A service whose calls are bounded and whose panics are errors: the client waits for an answer,
//! and a server on standard input ends only after all of them.
//!
//! Promises: a bounded number of calls uses or awaits sandboxes, because each keeps its arguments
//! in memory while it waits. A further call gets an error at once. Calls of `create_sandbox`,
//! `close_sandbox` and `list_sandboxes` are not counted: the maximum of sandboxes bounds those that
//! start one, and those that wait for the last call of one that they close. A panic of the four
//! asynchronous handlers of [`Server`](crate::Server) is an error. Not promised: panics of `rmcp`
//! itself, and of functions of the server that are not asynchronous.

use std::borrow::Cow;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock,
    ListResourceTemplatesResult, ListToolsResult, PaginatedRequestParams, ProtocolVersion,
    ReadResourceRequestParams, ReadResourceResponse, ServerConfig, Tool,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler};
use tokio::sync::{Semaphore, SemaphorePermit};

/// Maximum calls in flight of a server with at most as many sandboxes.
const MAX_CALLS: usize = 256;
/// The tools whose calls wait for no call of another client to end by itself.
const PROMPT_TOOLS: [&str; 3] = ["create_sandbox", "close_sandbox", "list_sandboxes"];

/// A service that answers a request with an error if its handler panics, or if too many calls use
/// or await sandboxes. Copies share the limit.
#[derive(Clone)]
pub(crate) struct AnsweringService<S> {
    service: S,
    calls: Arc<Semaphore>,
    limit: usize,
}

impl<S> AnsweringService<S> {
    /// A service for so many sandboxes. Each runs one call at a time.
    pub(crate) fn new(service: S, sandboxes: usize) -> Self {
        let limit = sandboxes.clamp(MAX_CALLS, Semaphore::MAX_PERMITS);
        Self { service, calls: Arc::new(Semaphore::new(limit)), limit }
    }

    /// The permit of a request that uses a sandbox, so that it may wait for one, or the text of the
    /// error beyond the limit.
    fn begin_call(&self) -> Result<SemaphorePermit<'_>, String> {
        self.calls.try_acquire().map_err(|_| {
            format!(
                "{} calls are in flight, which is the limit; send this one again once another is \
                 answered",
                self.limit
            )
        })
    }
}

/// The answer of a handler, or an error if it panics.
async fn answer<R>(handling: impl Future<Output = Result<R, ErrorData>>) -> Result<R, ErrorData> {
    AssertUnwindSafe(handling).catch_unwind().await.unwrap_or_else(|_| {
        // The hook of panics has written the reason.
        Err(ErrorData::internal_error("the server failed while it handled the request", None))
    })
}

/// Passes on what [`Server`](crate::Server) handles itself. `rmcp` answers all else. A method that
/// the server gains is without effect until it is here, too.
impl<S: ServerHandler> ServerHandler for AnsweringService<S> {
    fn get_info(&self) -> ServerConfig {
        self.service.get_info()
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        self.service.supported_protocol_versions()
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.service.get_tool(name)
    }

    async fn list_tools(
        &self,
        page: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        answer(self.service.list_tools(page, context)).await
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let waits = !PROMPT_TOOLS.contains(&&*request.name);
        let permit = waits.then(|| self.begin_call());
        match permit.transpose() {
            Ok(_permit) => answer(self.service.call_tool(request, context)).await,
            // As a result, which clients show to the model. Some take codes of errors from -32000
            // on for a lost connection.
            Err(why) => Ok(CallToolResult::error(vec![ContentBlock::text(why)]).into()),
        }
    }

    async fn list_resource_templates(
        &self,
        page: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        answer(self.service.list_resource_templates(page, context)).await
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let _permit = self.begin_call().map_err(|why| ErrorData::internal_error(why, None))?;
        answer(self.service.read_resource(request, context)).await
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use serde_json::{Value, json};

    use super::*;

    /// A server with a defect.
    #[derive(Clone)]
    pub(crate) struct PanickingServer;

    impl ServerHandler for PanickingServer {
        async fn list_tools(
            &self,
            _: Option<PaginatedRequestParams>,
            _: RequestContext<RoleServer>,
        ) -> Result<ListToolsResult, ErrorData> {
            panic!("a planted defect");
        }
    }

    /// The first message of a client.
    pub(crate) fn initialize() -> Value {
        json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
            "protocolVersion": "2025-06-18", "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"}}})
    }
}

#[cfg(test)]
mod tests {
    use rmcp::ServiceExt;
    use tokio::io::duplex;

    use super::*;

    /// A server whose calls of `wait` wait for permits, which `begun` counts.
    #[derive(Clone)]
    struct WaitingServer {
        begun: Arc<Semaphore>,
        end: Arc<Semaphore>,
    }

    impl ServerHandler for WaitingServer {
        async fn call_tool(
            &self,
            request: CallToolRequestParams,
            _: RequestContext<RoleServer>,
        ) -> Result<CallToolResponse, ErrorData> {
            if request.name != "wait" {
                return Ok(CallToolResult::success(Vec::new()).into());
            }
            self.begun.add_permits(1);
            let _ended = self.end.acquire().await;
            Ok(CallToolResult::success(Vec::new()).into())
        }

        async fn list_tools(
            &self,
            _: Option<PaginatedRequestParams>,
            _: RequestContext<RoleServer>,
        ) -> Result<ListToolsResult, ErrorData> {
            Ok(ListToolsResult::default())
        }
    }

    /// Waits until so many more calls have begun.
    async fn wait_for(begun: &Semaphore, calls: usize) {
        begun.acquire_many(u32::try_from(calls).unwrap()).await.unwrap().forget();
    }

    #[tokio::test]
    async fn calls_beyond_the_limit_are_refused_until_others_have_ended() {
        let (begun, end) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let server = WaitingServer { begun: Arc::clone(&begun), end: Arc::clone(&end) };
        let service = AnsweringService::new(server, 1);
        let (own, other) = duplex(1 << 16);
        let (serving, client) = tokio::join!(service.serve(own), ().serve(other));
        let (serving, client) = (serving.unwrap(), client.unwrap());
        let call = || {
            let peer = client.peer().clone();
            tokio::spawn(async move { peer.call_tool(CallToolRequestParams::new("wait")).await })
        };
        let first: Vec<_> = (0..MAX_CALLS).map(|_| call()).collect();
        wait_for(&begun, MAX_CALLS).await;
        let refused = call().await.unwrap().unwrap();
        assert_eq!(refused.is_error, Some(true));
        let text = &refused.content[0].as_text().unwrap().text;
        assert!(text.starts_with("256 calls are in flight"), "{text}");
        let read = ReadResourceRequestParams::new("afresh://main/x");
        let refused = client.peer().read_resource(read).await.unwrap_err();
        assert!(refused.to_string().contains("256 calls"), "{refused}");
        // Requests that wait for no sandbox are answered.
        for tool in PROMPT_TOOLS {
            let answer = client.peer().call_tool(CallToolRequestParams::new(tool)).await.unwrap();
            assert_eq!(answer.is_error, Some(false), "{tool}");
        }
        assert!(client.peer().list_tools(None).await.unwrap().tools.is_empty());
        end.add_permits(MAX_CALLS);
        for one in first {
            one.await.unwrap().unwrap();
        }
        call().await.unwrap().unwrap();
        client.cancel().await.unwrap();
        serving.waiting().await.unwrap();
    }

    #[test]
    fn each_sandbox_may_have_a_call() {
        assert_eq!(AnsweringService::new((), 1).limit, MAX_CALLS);
        assert_eq!(AnsweringService::new((), 1000).limit, 1000);
        assert_eq!(AnsweringService::new((), usize::MAX).limit, Semaphore::MAX_PERMITS);
    }
}
