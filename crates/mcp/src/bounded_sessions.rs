//! The sessions of clients over HTTP.
//!
//! Promises: at most [`MAX_SESSIONS`] exist. A further one ends the session that has been without a
//! request for the longest time, and is refused where all have one. May break it: a client whose
//! session ended so gets 404 and begins another one, as after a restart of the server.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use futures_util::Stream;
use rmcp::model::{ClientJsonRpcMessage, ServerJsonRpcMessage};
use rmcp::transport::common::server_side_http::{ServerSseMessage, SessionId};
use rmcp::transport::streamable_http_server::SessionManager;
use rmcp::transport::streamable_http_server::session::local::{
    LocalSessionManager, LocalSessionManagerError,
};

/// Maximum sessions. Each takes about 70 KiB.
const MAX_SESSIONS: usize = 256;

/// Why a session cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionRefusal {
    #[error(transparent)]
    Local(#[from] LocalSessionManagerError),
    #[error("{MAX_SESSIONS} sessions have requests, which is the limit; retry later")]
    AllBusy,
}

/// The requests of a session.
#[derive(Default)]
struct SessionUse {
    /// The number of its last request among those of all sessions.
    last: u64,
    /// Requests without a whole answer.
    requests: usize,
}

#[derive(Default)]
struct SessionUses {
    sessions: HashMap<SessionId, SessionUse>,
    /// Requests of all sessions.
    count: u64,
}

impl SessionUses {
    /// Notes a request.
    fn touch(&mut self, id: &SessionId) -> Option<&mut SessionUse> {
        self.count += 1;
        let session = self.sessions.get_mut(id)?;
        session.last = self.count;
        Some(session)
    }

    /// The session without a request for the longest time.
    fn oldest_idle(&self) -> Option<SessionId> {
        let idle = self.sessions.iter().filter(|(_, session)| session.requests == 0);
        idle.min_by_key(|(_, session)| session.last).map(|(id, _)| id.clone())
    }
}

/// The sessions, with a limit of their number.
#[derive(Default)]
pub(crate) struct BoundedSessions {
    local: LocalSessionManager,
    uses: Arc<Mutex<SessionUses>>,
    /// Sessions begin one after the other.
    beginning: tokio::sync::Mutex<()>,
}

fn lock(uses: &Mutex<SessionUses>) -> MutexGuard<'_, SessionUses> {
    uses.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A request until its answer is whole or its client has left.
struct RequestUse {
    uses: Arc<Mutex<SessionUses>>,
    id: SessionId,
}

impl Drop for RequestUse {
    fn drop(&mut self) {
        if let Some(session) = lock(&self.uses).touch(&self.id) {
            session.requests = session.requests.saturating_sub(1);
        }
    }
}

/// The answer of a request.
struct AnswerStream<S> {
    stream: Pin<Box<S>>,
    _request: RequestUse,
}

impl<S: Stream> Stream for AnswerStream<S> {
    type Item = S::Item;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<S::Item>> {
        self.stream.as_mut().poll_next(context)
    }
}

impl BoundedSessions {
    /// Notes that a request begins.
    fn begin_request(&self, id: &SessionId) -> RequestUse {
        if let Some(session) = lock(&self.uses).touch(id) {
            session.requests += 1;
        }
        RequestUse { uses: Arc::clone(&self.uses), id: id.clone() }
    }

    /// Ends idle sessions until there is room for another.
    async fn make_room(&self) -> Result<(), SessionRefusal> {
        loop {
            let oldest = {
                // Sessions also end by themselves.
                let present = self.local.sessions.read().await;
                let mut uses = lock(&self.uses);
                uses.sessions.retain(|id, _| present.contains_key(id));
                if uses.sessions.len() < MAX_SESSIONS {
                    return Ok(());
                }
                uses.oldest_idle().ok_or(SessionRefusal::AllBusy)?
            };
            self.close_session(&oldest).await?;
        }
    }
}

impl SessionManager for BoundedSessions {
    type Error = SessionRefusal;
    type Transport = <LocalSessionManager as SessionManager>::Transport;

    async fn create_session(&self) -> Result<(SessionId, Self::Transport), SessionRefusal> {
        let _one = self.beginning.lock().await;
        self.make_room().await?;
        let (id, transport) = self.local.create_session().await?;
        let mut uses = lock(&self.uses);
        uses.sessions.insert(id.clone(), SessionUse::default());
        uses.touch(&id);
        Ok((id, transport))
    }

    async fn initialize_session(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<ServerJsonRpcMessage, SessionRefusal> {
        let _request = self.begin_request(id);
        Ok(self.local.initialize_session(id, message).await?)
    }

    async fn has_session(&self, id: &SessionId) -> Result<bool, SessionRefusal> {
        Ok(self.local.has_session(id).await?)
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), SessionRefusal> {
        lock(&self.uses).sessions.remove(id);
        Ok(self.local.close_session(id).await?)
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, SessionRefusal> {
        let request = self.begin_request(id);
        let stream = Box::pin(self.local.create_stream(id, message).await?);
        Ok(AnswerStream { stream, _request: request })
    }

    async fn accept_message(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<(), SessionRefusal> {
        let _request = self.begin_request(id);
        Ok(self.local.accept_message(id, message).await?)
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, SessionRefusal> {
        Ok(self.local.create_standalone_stream(id).await?)
    }

    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, SessionRefusal> {
        let request = self.begin_request(id);
        let stream = Box::pin(self.local.resume(id, last_event_id).await?);
        Ok(AnswerStream { stream, _request: request })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_further_session_ends_the_one_that_is_idle_for_the_longest_time() {
        let sessions = BoundedSessions::default();
        let mut all = Vec::new();
        for _ in 0..MAX_SESSIONS {
            all.push(sessions.create_session().await.unwrap());
        }
        // The first has a request, and the second had one last.
        let request = sessions.begin_request(&all[0].0);
        drop(sessions.begin_request(&all[1].0));
        all.push(sessions.create_session().await.unwrap());
        let exist = async |at: usize| sessions.has_session(&all[at].0).await.unwrap();
        for (at, exists) in [(0, true), (1, true), (2, false), (3, true), (MAX_SESSIONS, true)] {
            assert_eq!(exist(at).await, exists, "session {at}");
        }
        assert_eq!(sessions.local.sessions.read().await.len(), MAX_SESSIONS);
        assert_eq!(lock(&sessions.uses).sessions.len(), MAX_SESSIONS);
        // A session that has ended leaves its place.
        drop(request);
        sessions.close_session(&all[0].0).await.unwrap();
        sessions.create_session().await.unwrap();
        assert!(exist(3).await);
    }

    #[tokio::test]
    async fn a_further_session_is_refused_where_all_have_requests() {
        let sessions = BoundedSessions::default();
        let (mut all, mut requests) = (Vec::new(), Vec::new());
        for _ in 0..MAX_SESSIONS {
            all.push(sessions.create_session().await.unwrap());
            requests.push(sessions.begin_request(&all.last().unwrap().0));
        }
        let refused = sessions.create_session().await.err().unwrap().to_string();
        assert!(refused.starts_with("256 sessions have requests"), "{refused}");
        requests.pop();
        sessions.create_session().await.unwrap();
    }
}
