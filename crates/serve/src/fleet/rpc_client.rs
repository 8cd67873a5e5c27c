//! Asking another host: a request goes there in pieces, and its answer comes back in pieces.
//!
//! Promises: a client gets that host's answer, or an error that the outcome of the request is
//! unknown, which does not invite HTTP clients to send it again; a request is sent again only if
//! the other host reported that it did nothing with it. A host that is lost while it is waited for
//! is not waited for longer than its lease, and a lost answer not longer than a moment. A message
//! that NATS delivers late begins nothing: it carries the callee's clock. A client gets the error
//! only once its request cannot begin any more. While NATS is away nothing is sent.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use async_nats::client::Request as Message;
use async_nats::connection::State;
use async_nats::{RequestErrorKind, Subject};
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame};
use hyper::http::request::Parts;
use hyper::{Method, Request, StatusCode};
use tokio::time::Instant;
use tracing::Instrument;

use super::Fleet;
use super::body_reader::BodyReader;
use super::clock::clock_milliseconds;
use super::frame::{self, Call, RpcReply, RpcRequest};
use super::nats::NatsError;
use super::rpc_server::MAX_DELAY;
use crate::body::Meter;
use crate::budget::Budget;
use crate::error_response::ErrorResponse;
use crate::lock::lock;

/// Interval at which a waiting call checks the other host.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// After so long without an answer the other host's lease is looked after, and it is asked whether
/// the call still runs.
const SUSPICION_TIMEOUT: Duration = Duration::from_secs(1);
/// How often in succession it says that the call does not run before its answer counts as lost.
const MAX_MISSING_REPORTS: u32 = 2;

/// After this time a message begins nothing: the callee's clock may be behind the caller's guess by
/// [`MAX_DELAY`], and the message as long on its way.
const START_WINDOW: Duration = Duration::from_millis(2 * MAX_DELAY);
/// Maximum attempts to send a message that came too late.
const MAX_LATE_TRIES: usize = 3;
/// Maximum hosts whose clocks are known.
const MAX_CLOCKS: usize = 100_000;

/// The outcome of forwarding.
pub(super) enum ForwardResult {
    Answered(Response),
    /// It does not exist there: the request was not begun, and can be sent elsewhere.
    NotThere(Request<Body>),
}

/// Why a piece was not answered.
enum RpcError {
    /// The host does not listen: nothing was begun.
    Nobody,
    /// The piece was not sent.
    NotSent(ErrorResponse),
    /// The outcome is unknown.
    Unknown,
}

/// The answer where another host may have executed a request. A client that sends it again may
/// execute it twice, which changes nothing if the method is safe.
fn unknown_outcome(method: &Method) -> ErrorResponse {
    if method.is_safe() {
        let why = "the host that worked on this request was lost; try again";
        return ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, why);
    }
    ErrorResponse::new(
        StatusCode::GATEWAY_TIMEOUT,
        "the host that worked on this request was lost, and its outcome is unknown: it may have run, or still \
         run; read the state of the sandbox before you send it again",
    )
}

impl Fleet {
    /// One message and its answer. It is sent again only where it came too late to begin anything.
    async fn ask(
        &self,
        life: &str,
        request: RpcRequest,
        piece: &[u8],
    ) -> Result<(RpcReply, Bytes), RpcError> {
        let mut call = Call { key: lock(&self.random).next_word(), sent: 0, request };
        for _ in 0..MAX_LATE_TRIES {
            call.sent = self.clock_of(life);
            let begun = Instant::now();
            let replied = self.ask_once(life, &call, piece).await;
            if let (Err(RpcError::Unknown), RpcRequest::Open { .. } | RpcRequest::More { .. }) =
                (&replied, &call.request)
            {
                tokio::time::sleep_until(begun + START_WINDOW).await;
            }
            let (reply, piece) = replied?;
            match reply {
                RpcReply::Late { now } => self.learn_clock(life, now),
                reply => return Ok((reply, piece)),
            }
        }
        Err(RpcError::Nobody)
    }

    async fn ask_once(
        &self,
        life: &str,
        call: &Call,
        piece: &[u8],
    ) -> Result<(RpcReply, Bytes), RpcError> {
        let packed = frame::pack(call, piece);
        let message = packed.map_err(|_| RpcError::NotSent(ErrorResponse::host()))?;
        if message.len() > self.links.client.max_payload() {
            return Err(RpcError::NotSent(ErrorResponse::new(
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "the head of the request is larger than a message between hosts may be",
            )));
        }
        // The client would keep the message, and send it when it is connected again.
        if self.links.client.connection_state() != State::Connected {
            return Err(RpcError::NotSent(NatsError::Away("not connected".to_owned()).into()));
        }
        let subject = self.call_subject(life);
        let message = Message::new().payload(message).timeout(Some(self.config.patience));
        let mut sending = std::pin::pin!(self.links.client.send_request(subject, message));
        let (mut asked, mut not_running) = (Instant::now(), 0);
        let sent = loop {
            match tokio::time::timeout(CHECK_INTERVAL, &mut sending).await {
                Ok(sent) => break sent,
                // Without a safe lease, this host may be cut off.
                Err(_) if self.is_over(life) || !self.safe() => {
                    return Err(RpcError::Unknown);
                }
                Err(_) if asked.elapsed() > SUSPICION_TIMEOUT => {
                    self.suspect(life);
                    let running = self.is_running(life, call.key);
                    // The answer may come before.
                    let running = tokio::select! {
                        sent = &mut sending => break sent,
                        running = running => running,
                    };
                    match running {
                        Some(false) => not_running += 1,
                        _ => not_running = 0,
                    }
                    if not_running >= MAX_MISSING_REPORTS {
                        tracing::warn!(life, "the answer of another host was lost");
                        return Err(RpcError::Unknown);
                    }
                    asked = Instant::now();
                }
                Err(_) => {}
            }
        };
        match sent {
            Ok(reply) => frame::unpack(&reply.payload).map_err(|_| RpcError::Unknown),
            Err(error) if error.kind() == RequestErrorKind::NoResponders => {
                self.suspect(life);
                Err(RpcError::Nobody)
            }
            Err(error) => {
                tracing::warn!(%error, life, "no answer from another host");
                self.suspect(life);
                Err(RpcError::Unknown)
            }
        }
    }

    fn call_subject(&self, life: &str) -> Subject {
        let node = life.split_once('-').map_or(life, |(node, _)| node);
        Subject::from(self.links.subject(&format!("host.{node}.call")))
    }

    /// Whether another host still works on a call; `None` if it does not reply.
    async fn is_running(&self, life: &str, key: u64) -> Option<bool> {
        let request = RpcRequest::Running { key };
        let message = frame::pack(&Call { key: 0, sent: 0, request }, &[]).ok()?;
        let asking = self.links.client.request(self.call_subject(life), message);
        let reply = tokio::time::timeout(SUSPICION_TIMEOUT, asking).await.ok()?.ok()?;
        match frame::unpack(&reply.payload).ok()?.0 {
            RpcReply::Runs { runs } => Some(runs),
            _ => None,
        }
    }

    /// The clock of another host now, as far as this host has learnt it.
    fn clock_of(&self, life: &str) -> u64 {
        let ahead = lock(&self.clocks).get(life).copied().unwrap_or_default();
        clock_milliseconds().saturating_add_signed(ahead)
    }

    fn learn_clock(&self, life: &str, now: u64) {
        let mut clocks = lock(&self.clocks);
        if clocks.len() >= MAX_CLOCKS {
            clocks.clear();
        }
        clocks.insert(life.to_owned(), now.wrapping_sub(clock_milliseconds()).cast_signed());
    }

    /// Has another host answer a request; `take` if it may take the sandbox that it is about.
    pub(super) async fn forward(
        self: &Arc<Self>,
        life: &str,
        #[cfg_attr(not(feature = "otel"), allow(unused_mut, reason = "traces are handed on"))]
        mut request: Request<Body>,
        take: bool,
    ) -> ForwardResult {
        let span = tracing::debug_span!("forward", otel.kind = "client", afresh.host = life);
        #[cfg(feature = "otel")]
        crate::otel::hand_on(&span, request.headers_mut());
        self.send_on(life, request, take).instrument(span).await
    }

    async fn send_on(
        self: &Arc<Self>,
        life: &str,
        request: Request<Body>,
        take: bool,
    ) -> ForwardResult {
        let (parts, body) = request.into_parts();
        lock(&self.members).note_sent(life);
        let most = self.piece();
        // Bytes that wait for NATS and the other host are memory of this one.
        let extensions = &parts.extensions;
        let budget = extensions.get::<Meter>().map(Meter::budget);
        let budget = budget.or_else(|| extensions.get::<Budget>().cloned());
        let mut body = BodyReader::counted(body, budget.as_ref());
        let (first, whole) = match body.next(most).await {
            Ok(piece) => piece,
            Err(error) => return ForwardResult::Answered(broken(&error).into_response()),
        };
        let open = RpcRequest::Open {
            method: parts.method.to_string(),
            uri: parts.uri.to_string(),
            headers: frame::pairs(&parts.headers),
            whole,
            take,
            waits: true,
        };
        let back = |parts: Parts, first: Bytes, body: BodyReader| {
            let (over, rest) = body.into_rest();
            let body = match whole {
                true => Body::from(first),
                false => {
                    let first = Some(Bytes::from([first, over].concat()));
                    Body::new(PrefixedBody { first, rest: Box::pin(rest) })
                }
            };
            ForwardResult::NotThere(Request::from_parts(parts, body))
        };
        let mut replied = self.ask(life, open, &first).await;
        if let Err(RpcError::Nobody) | Ok((RpcReply::Elsewhere, _)) = &replied {
            return back(parts, first, body);
        }
        let mut done = whole;
        let mut begun = false;
        while let Ok((RpcReply::Go { id }, _)) = &replied {
            let id = *id;
            if done {
                break;
            }
            let (piece, last) = match body.next(most).await {
                Ok(piece) => piece,
                Err(error) => {
                    let _ = self.ask(life, RpcRequest::End { id }, &[]).await;
                    return ForwardResult::Answered(broken(&error).into_response());
                }
            };
            done = last;
            begun = true;
            replied = self.ask(life, RpcRequest::More { id, last }, &piece).await;
        }
        let answered = match replied {
            Ok((RpcReply::Answer { id, status, headers, whole }, piece)) => {
                self.response(life, (id, status, &headers, whole), piece)
            }
            // Its body was consumed, so it cannot be sent again from here.
            Ok((RpcReply::Elsewhere, _)) => Err(ErrorResponse::busy(
                StatusCode::SERVICE_UNAVAILABLE,
                "the sandbox has just moved to another host; try again",
            )),
            Ok((RpcReply::Gone { why }, _)) => {
                tracing::warn!(why, life, "another host did not answer");
                Err(unknown_outcome(&parts.method))
            }
            Ok(_) => Err(ErrorResponse::host()),
            Err(RpcError::NotSent(refusal)) if !begun => Err(refusal),
            // A guest can begin before it has read its whole body.
            Err(_) => Err(unknown_outcome(&parts.method)),
        };
        ForwardResult::Answered(answered.unwrap_or_else(IntoResponse::into_response))
    }

    fn response(
        self: &Arc<Self>,
        life: &str,
        (id, status, headers, whole): (u64, u16, &frame::Pairs, bool),
        piece: Bytes,
    ) -> Result<Response, ErrorResponse> {
        let damaged = |_| ErrorResponse::host();
        let body = match whole {
            true => Body::from(piece),
            false => {
                let rest = RemoteBody {
                    fleet: self.clone(),
                    life: life.to_owned(),
                    id,
                    waits: None,
                    over: false,
                    is_held: true,
                };
                // The head comes alone where the body is silent.
                let first = Some(piece).filter(|piece| !piece.is_empty());
                Body::new(PrefixedBody { first, rest: Box::pin(rest) })
            }
        };
        let mut response = Response::new(body);
        *response.status_mut() = frame::status(status).map_err(damaged)?;
        *response.headers_mut() = frame::headers(headers).map_err(damaged)?;
        Ok(response)
    }
}

pub(super) fn broken(error: &axum::Error) -> ErrorResponse {
    use crate::body::BodyError;
    let cut = std::error::Error::source(error).map(std::string::ToString::to_string);
    let text = cut.unwrap_or_else(|| error.to_string());
    if text == BodyError::<std::convert::Infallible>::BudgetExhausted.to_string() {
        return ErrorResponse::no_memory();
    }
    let status = match text {
        text if text == BodyError::<std::convert::Infallible>::TooSlow.to_string() => {
            StatusCode::REQUEST_TIMEOUT
        }
        ref text if text.contains("larger than") => StatusCode::PAYLOAD_TOO_LARGE,
        _ => StatusCode::BAD_REQUEST,
    };
    ErrorResponse::new(status, error.to_string())
}

/// A piece, and the rest of the body.
struct PrefixedBody<B> {
    first: Option<Bytes>,
    rest: Pin<Box<B>>,
}

impl<B: HttpBody<Data = Bytes>> HttpBody for PrefixedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.first.take() {
            Some(first) => Poll::Ready(Some(Ok(Frame::data(first)))),
            None => self.rest.as_mut().poll_frame(context),
        }
    }
}

type NextChunk = Pin<Box<dyn Future<Output = Option<(Bytes, bool)>> + Send>>;

/// The rest of an answer, which is fetched from the other host piece by piece, as the client takes
/// it.
struct RemoteBody {
    fleet: Arc<Fleet>,
    life: String,
    id: u64,
    waits: Option<NextChunk>,
    over: bool,
    /// Whether the other host keeps the answer for this one.
    is_held: bool,
}

/// The other host gave no further piece.
#[derive(Debug, thiserror::Error)]
#[error("the host that answers was lost in the middle of its answer")]
struct TruncatedResponse;

impl HttpBody for RemoteBody {
    type Data = Bytes;
    type Error = TruncatedResponse;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, TruncatedResponse>>> {
        let this = &mut *self;
        if this.over {
            return Poll::Ready(None);
        }
        loop {
            let waits = this.waits.get_or_insert_with(|| {
                let (fleet, life, id) = (this.fleet.clone(), this.life.clone(), this.id);
                Box::pin(async move {
                    match fleet.ask(&life, RpcRequest::Next { id }, &[]).await {
                        Ok((RpcReply::Piece { last }, piece)) => Some((piece, last)),
                        _ => None,
                    }
                })
            });
            let next = std::task::ready!(waits.as_mut().poll(context));
            this.waits = None;
            let Some((piece, last)) = next else {
                this.over = true;
                return Poll::Ready(Some(Err(TruncatedResponse)));
            };
            this.over = last;
            this.is_held = !last;
            match (piece.is_empty(), last) {
                (false, _) => return Poll::Ready(Some(Ok(Frame::data(piece)))),
                (true, true) => return Poll::Ready(None),
                // The body is silent, and the answer continues.
                (true, false) => {}
            }
        }
    }
}

impl Drop for RemoteBody {
    fn drop(&mut self) {
        // Also after an error: the other host may still work on the answer.
        if self.is_held
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let (fleet, life, id) = (self.fleet.clone(), std::mem::take(&mut self.life), self.id);
            runtime.spawn(async move { drop(fleet.ask(&life, RpcRequest::End { id }, &[]).await) });
        }
    }
}
