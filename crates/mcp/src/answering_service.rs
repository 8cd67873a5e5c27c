//! A service whose panics are answers: the client of a request waits for one, and a server on
//! standard input ends only after all of them.

use std::borrow::Cow;
use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;
use rmcp::model::{ClientNotification, ClientRequest, ProtocolVersion, ServerConfig, ServerResult};
use rmcp::service::{NotificationContext, RequestContext};
use rmcp::{ErrorData, RoleServer, Service};

/// A service that answers a request with an error if its handler panics.
pub(crate) struct AnsweringService<S>(pub(crate) S);

impl<S: Service<RoleServer>> Service<RoleServer> for AnsweringService<S> {
    async fn handle_request(
        &self,
        request: ClientRequest,
        context: RequestContext<RoleServer>,
    ) -> Result<ServerResult, ErrorData> {
        let handling = AssertUnwindSafe(self.0.handle_request(request, context)).catch_unwind();
        handling.await.unwrap_or_else(|_| {
            // The hook of panics has written the reason.
            Err(ErrorData::internal_error("the server failed while it handled the request", None))
        })
    }

    async fn handle_notification(
        &self,
        notification: ClientNotification,
        context: NotificationContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.0.handle_notification(notification, context).await
    }

    fn get_info(&self) -> ServerConfig {
        self.0.get_info()
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        self.0.supported_protocol_versions()
    }
}
