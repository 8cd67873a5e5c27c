//! Answers to other hosts: requests over NATS are answered like those over HTTP.
//!
//! Promises: transfers are bounded in number, and dropped when their caller is silent or leaves.
//! The head of an answer waits for its body only for [`HEAD_DELAY`]. The answer of a sandbox that
//! was lost is not sent.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use async_nats::service::{Request as Asked, ServiceExt};
use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt;
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::header::CONTENT_LENGTH;
use hyper::{Method, Request};
use tokio::sync::{Mutex, Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::Fleet;
use super::body_reader::BodyReader;
use super::clock::clock_milliseconds;
use super::frame::{self, Call, DamagedMessage, RpcReply, RpcRequest};
use crate::lock::lock;

/// Requests of other hosts that are under way at the same time.
const MAX_TRANSFERS: usize = 4096;
/// How long a request is kept that its host does not ask about: a piece of a body comes at least so
/// often.
const IDLE_TRANSFER_TIMEOUT: Duration = Duration::from_secs(60);

/// How long the head of an answer waits for the first bytes of the body, so that a short answer is
/// one message.
const HEAD_DELAY: Duration = Duration::from_millis(100);
/// How long a silent body is waited for before the caller gets an empty piece and asks again.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);
const _: () = assert!(SILENCE_TIMEOUT.as_secs() < IDLE_TRANSFER_TIMEOUT.as_secs());

/// Milliseconds after which a message on its way begins nothing.
pub(super) const MAX_DELAY: u64 = 2000;

/// Whether a message was too long on its way, by this host's clock in milliseconds. One from the
/// future was sent by a host that has not learnt this clock.
fn is_late(sent: u64, now: u64) -> bool {
    sent > now.saturating_add(MAX_DELAY) || now.saturating_sub(sent) > MAX_DELAY
}

/// A call that is worked on.
struct RunningCall {
    fleet: Arc<Fleet>,
    key: u64,
}

impl RunningCall {
    fn begin(fleet: &Arc<Fleet>, key: u64) -> Self {
        lock(&fleet.running).insert(key);
        Self { fleet: fleet.clone(), key }
    }
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        lock(&self.fleet.running).remove(&self.key);
    }
}

/// A request of another host that is under way.
pub(crate) struct Transfer {
    state: Mutex<State>,
    touched: std::sync::Mutex<Instant>,
    /// Whether the caller asks again after an empty piece.
    waits: bool,
    /// Notified when the caller does not need the answer any more.
    ended: Notify,
}

impl Transfer {
    /// The next piece of the answer, an empty one after `patience` without any. `None` if the
    /// caller has left.
    async fn next_piece(
        &self,
        rest: &mut BodyReader,
        most: usize,
        patience: Duration,
    ) -> Option<Result<(Bytes, bool), axum::Error>> {
        let silence = async {
            match self.waits {
                true => tokio::time::sleep(patience).await,
                false => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            piece = rest.next(most) => Some(piece),
            () = silence => Some(Ok((Bytes::new(), false))),
            () = self.ended.notified() => None,
        }
    }
}

struct State {
    /// The channel for further pieces of the request.
    body: Option<mpsc::Sender<Piece>>,
    /// The answer that is worked on.
    answer: Option<Answer>,
    /// The rest of the response body.
    rest: Option<BodyReader>,
}

/// An answer on its way; dropping it gives the call up.
struct Answer(JoinHandle<Option<Response>>);

impl Drop for Answer {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A piece of a request body, and whether it is the last.
type Piece = (Bytes, bool);

/// The pieces end before the last one, because their transfer was dropped.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the request was given up before its body had arrived")]
struct TruncatedBody;

/// A request body whose pieces arrive one by one. Without its last piece it ends with an error, so
/// that no guest takes a part of a body for the whole.
struct Pieces {
    first: Option<Bytes>,
    more: Option<mpsc::Receiver<Piece>>,
    left: Option<u64>,
}

impl HttpBody for Pieces {
    type Data = Bytes;
    type Error = TruncatedBody;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let piece = match (self.first.take().filter(|first| !first.is_empty()), &mut self.more) {
            (Some(first), _) => Some(first),
            (None, Some(more)) => {
                let Some((piece, last)) = std::task::ready!(more.poll_recv(context)) else {
                    return Poll::Ready(Some(Err(TruncatedBody)));
                };
                if last {
                    self.more = None;
                }
                Some(piece).filter(|piece| !last || !piece.is_empty())
            }
            (None, None) => None,
        };
        if let (Some(left), Some(piece)) = (&mut self.left, &piece) {
            *left = left.saturating_sub(piece.len() as u64);
        }
        Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.more.is_none() && self.first.as_ref().is_none_or(Bytes::is_empty)
    }

    fn size_hint(&self) -> SizeHint {
        match (self.left, &self.first) {
            (Some(left), _) => SizeHint::with_exact(left),
            (None, Some(first)) if self.more.is_none() => SizeHint::with_exact(first.len() as u64),
            (None, None) if self.more.is_none() => SizeHint::with_exact(0),
            _ => SizeHint::default(),
        }
    }
}

/// Answers messages to this host.
pub(super) async fn listen(fleet: &Arc<Fleet>) -> Result<(), afresh::Cause> {
    let service = fleet
        .links
        .client
        .service_builder()
        .description(
            "warm guests and sandboxes, each request answered by the host that holds what it needs",
        )
        .start("afresh", env!("CARGO_PKG_VERSION"))
        .await
        .map_err(|error| error.to_string())?;
    let subject = fleet.links.subject(&format!("host.{}", fleet.node));
    let mut calls = service
        .group(subject)
        .endpoint_builder()
        .name("call")
        .queue_group(fleet.node.clone())
        .add("call")
        .await
        .map_err(|error| error.to_string())?;
    let this = Arc::downgrade(fleet);
    fleet.spawn(async move {
        // It ends with its service.
        let _service = service;
        while let Some(asked) = calls.next().await {
            let Some(fleet) = this.upgrade() else { return };
            tokio::spawn(async move { fleet.serve_request(asked).await });
        }
    });
    let this = Arc::downgrade(fleet);
    fleet.spawn(async move {
        while let Some(fleet) = this.upgrade() {
            let old = |transfer: &Arc<Transfer>| {
                lock(&transfer.touched).elapsed() > IDLE_TRANSFER_TIMEOUT
            };
            // One that works on its answer is asked about when it has it.
            lock(&fleet.transfers).retain(|_, one| !old(one) || one.state.try_lock().is_err());
            drop(fleet);
            tokio::time::sleep(IDLE_TRANSFER_TIMEOUT / 4).await;
        }
    });
    Ok(())
}

/// How a request is answered.
#[derive(Clone, Copy)]
struct OpenMode {
    /// Whether the first piece of its body is the last.
    whole: bool,
    /// Whether this host may take the sandbox that it is about.
    take: bool,
    /// Whether the caller asks again after an empty piece.
    waits: bool,
}

impl Fleet {
    pub(super) fn piece(&self) -> usize {
        frame::piece(self.links.client.max_payload())
    }

    async fn serve_request(self: Arc<Self>, asked: Asked) {
        let call = frame::unpack::<Call>(&asked.message.payload);
        let key = call.as_ref().map_or(0, |(call, _)| call.key);
        let running = RunningCall::begin(&self, key);
        let answered = match call {
            Ok((call, piece)) => self.answer_in_time(call, piece).await,
            Err(damaged) => Err(damaged),
        };
        let (reply, piece) = answered
            .unwrap_or_else(|DamagedMessage| (reply_gone("the message is damaged"), Bytes::new()));
        let Ok(mut message) = frame::pack(&reply, &piece) else { return };
        if message.len() > self.links.client.max_payload() {
            // A guest sent too many headers; the caller gets an error.
            let why =
                reply_gone("the head of the answer is larger than a message between hosts may be");
            let Ok(short) = frame::pack(&why, &[]) else { return };
            message = short;
        }
        if let Err(error) = asked.respond(Ok(message)).await {
            tracing::warn!(%error, "an answer was not sent to another host");
        }
        // On its way before the caller learns that the call does not run any more.
        drop(running);
    }

    /// Answers a message that came in time. A message that NATS has kept begins nothing, since its
    /// sender may have given up.
    async fn answer_in_time(
        self: &Arc<Self>,
        call: Call,
        piece: Bytes,
    ) -> Result<(RpcReply, Bytes), DamagedMessage> {
        match call.request {
            RpcRequest::Open { .. } | RpcRequest::More { .. }
                if is_late(call.sent, clock_milliseconds()) =>
            {
                Ok((RpcReply::Late { now: clock_milliseconds() }, Bytes::new()))
            }
            request => self.answer(request, piece).await,
        }
    }

    async fn answer(
        self: &Arc<Self>,
        ask: RpcRequest,
        piece: Bytes,
    ) -> Result<(RpcReply, Bytes), DamagedMessage> {
        match ask {
            RpcRequest::Open { method, uri, headers, whole, take, waits } => {
                let headers = frame::headers(&headers)?;
                let method = Method::from_bytes(method.as_bytes()).map_err(|_| DamagedMessage)?;
                let mut request = Request::new(piece);
                *request.method_mut() = method;
                *request.uri_mut() = uri.parse().map_err(|_| DamagedMessage)?;
                *request.headers_mut() = headers;
                self.open(request, OpenMode { whole, take, waits }).await
            }
            RpcRequest::More { id, last } => {
                let Some(transfer) = self.transfer(id) else {
                    return Ok((reply_gone("forgotten"), Bytes::new()));
                };
                let mut state = transfer.state.lock().await;
                self.more(id, &transfer, &mut state, (piece, last)).await
            }
            RpcRequest::Next { id } => {
                let Some(transfer) = self.transfer(id) else {
                    return Ok((reply_gone("forgotten"), Bytes::new()));
                };
                let mut state = transfer.state.lock().await;
                let Some(rest) = &mut state.rest else {
                    return Ok((reply_gone("no answer yet"), Bytes::new()));
                };
                match transfer.next_piece(rest, self.piece(), SILENCE_TIMEOUT).await {
                    Some(Ok((piece, last))) => {
                        if last {
                            lock(&self.transfers).remove(&id);
                        }
                        Ok((RpcReply::Piece { last }, piece))
                    }
                    Some(Err(error)) => {
                        lock(&self.transfers).remove(&id);
                        Ok((reply_gone(&error.to_string()), Bytes::new()))
                    }
                    None => Ok((reply_gone("the caller has left"), Bytes::new())),
                }
            }
            RpcRequest::End { id } => {
                let transfer = lock(&self.transfers).remove(&id);
                if let Some(transfer) = transfer {
                    transfer.ended.notify_one();
                }
                Ok((RpcReply::Piece { last: true }, Bytes::new()))
            }
            RpcRequest::Running { key } => {
                let runs = lock(&self.running).contains(&key);
                Ok((RpcReply::Runs { runs }, Bytes::new()))
            }
        }
    }

    fn transfer(&self, id: u64) -> Option<Arc<Transfer>> {
        let transfer = lock(&self.transfers).get(&id).cloned()?;
        *lock(&transfer.touched) = Instant::now();
        Some(transfer)
    }

    async fn open(
        self: &Arc<Self>,
        request: Request<Bytes>,
        OpenMode { whole, take, waits }: OpenMode,
    ) -> Result<(RpcReply, Bytes), DamagedMessage> {
        let length = request.headers().get(CONTENT_LENGTH);
        let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
        let (body, more) = match whole {
            true => (None, None),
            false => {
                let (sender, receiver) = mpsc::channel(1);
                (Some(sender), Some(receiver))
            }
        };
        let request = request.map(|piece| {
            let left = if whole { Some(piece.len() as u64) } else { length };
            Body::new(Pieces { first: Some(piece), more, left })
        });
        let Some(host) = self.host() else {
            // Nothing was begun, so it may be asked of another.
            return Ok((RpcReply::Elsewhere, Bytes::new()));
        };
        let id = self.next_transfer.fetch_add(1, Ordering::Relaxed);
        let transfer = Arc::new(Transfer {
            state: Mutex::new(State { body, answer: None, rest: None }),
            touched: std::sync::Mutex::new(Instant::now()),
            waits,
            ended: Notify::new(),
        });
        let mut state = transfer.state.lock().await;
        {
            let mut transfers = lock(&self.transfers);
            if transfers.len() >= MAX_TRANSFERS {
                // Nothing was begun, so it may be asked of another.
                return Ok((RpcReply::Elsewhere, Bytes::new()));
            }
            transfers.insert(id, transfer.clone());
        }
        let answer = tokio::spawn(async move { host.answer_other(request, take).await });
        state.answer = Some(Answer(answer));
        if whole {
            self.finish(id, &transfer, &mut state).await
        } else {
            Ok((RpcReply::Go { id }, Bytes::new()))
        }
    }

    /// Passes a piece of the request body on; the answer may come before its end.
    async fn more(
        &self,
        id: u64,
        transfer: &Transfer,
        state: &mut State,
        (piece, last): Piece,
    ) -> Result<(RpcReply, Bytes), DamagedMessage> {
        let Some(body) = state.body.clone() else {
            return Ok((reply_gone("the body is over"), Bytes::new()));
        };
        let answered = match &mut state.answer {
            Some(answer) => {
                let mut sending = std::pin::pin!(body.send((piece, last)));
                loop {
                    // A guest may answer before it has read all, and read no more.
                    match tokio::time::timeout(Duration::from_millis(20), &mut sending).await {
                        Ok(sent) => break sent.is_err(),
                        Err(_) if answer.0.is_finished() => break true,
                        Err(_) => {}
                    }
                }
            }
            None => true,
        };
        drop(body);
        if last || answered {
            state.body = None;
            return self.finish(id, transfer, state).await;
        }
        Ok((RpcReply::Go { id }, Bytes::new()))
    }

    /// Waits for the answer, and gives its first piece, an empty one if the body is silent.
    async fn finish(
        &self,
        id: u64,
        transfer: &Transfer,
        state: &mut State,
    ) -> Result<(RpcReply, Bytes), DamagedMessage> {
        let forget = || lock(&self.transfers).remove(&id);
        let Some(mut answer) = state.answer.take() else {
            return Ok((reply_gone("answered"), Bytes::new()));
        };
        let response = (&mut answer.0).await;
        let response = match response {
            Ok(Some(response)) => response,
            Ok(None) => {
                forget();
                return Ok((RpcReply::Elsewhere, Bytes::new()));
            }
            Err(error) => {
                tracing::error!(%error, "a request of another host was not answered");
                forget();
                return Ok((reply_gone("the request failed"), Bytes::new()));
            }
        };
        let (parts, body) = response.into_parts();
        let mut rest = BodyReader::new(body);
        let (piece, whole) = match transfer.next_piece(&mut rest, self.piece(), HEAD_DELAY).await {
            Some(Ok(piece)) => piece,
            Some(Err(error)) => {
                forget();
                return Ok((reply_gone(&error.to_string()), Bytes::new()));
            }
            None => return Ok((reply_gone("the caller has left"), Bytes::new())),
        };
        if whole {
            forget();
        } else {
            state.rest = Some(rest);
        }
        let headers = frame::pairs(&parts.headers);
        Ok((RpcReply::Answer { id, status: parts.status.as_u16(), headers, whole }, piece))
    }
}

fn reply_gone(why: &str) -> RpcReply {
    RpcReply::Gone { why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn a_body_without_its_last_piece_is_an_error() {
        for last in [true, false] {
            let (sender, more) = mpsc::channel(2);
            let first = Some(Bytes::from_static(b"a"));
            let mut body = Pieces { first, more: Some(more), left: None };
            sender.try_send((Bytes::from_static(b"b"), false)).unwrap();
            if last {
                sender.try_send((Bytes::new(), true)).unwrap();
            }
            drop(sender);
            for expected in [&b"a"[..], b"b"] {
                let frame = body.frame().await.unwrap().unwrap();
                assert_eq!(frame.into_data().unwrap(), expected);
            }
            let end = body.frame().await.map(|frame| frame.map(drop));
            assert_eq!(end, if last { None } else { Some(Err(TruncatedBody)) });
        }
    }

    #[tokio::test]
    async fn a_silent_body_gives_an_empty_piece_to_a_caller_that_asks_again() {
        let silent = || {
            let stream = futures_util::stream::pending::<Result<Bytes, std::convert::Infallible>>();
            BodyReader::new(Body::from_stream(stream))
        };
        let transfer = |waits| Transfer {
            state: Mutex::new(State { body: None, answer: None, rest: None }),
            touched: std::sync::Mutex::new(Instant::now()),
            waits,
            ended: Notify::new(),
        };
        let piece = transfer(true).next_piece(&mut silent(), 1, Duration::ZERO).await;
        assert_eq!(piece.unwrap().unwrap(), (Bytes::new(), false));
        // An earlier version would take it for the end.
        let earlier = transfer(false);
        let mut body = silent();
        let waiting = earlier.next_piece(&mut body, 1, Duration::ZERO);
        tokio::pin!(waiting);
        assert!(tokio::time::timeout(Duration::from_millis(50), &mut waiting).await.is_err());
        earlier.ended.notify_one();
        assert!(waiting.await.is_none());
    }

    #[test]
    fn a_message_that_was_kept_on_its_way_is_late() {
        let now = 100_000;
        assert!(!is_late(now, now) && !is_late(now - MAX_DELAY, now));
        assert!(is_late(now - MAX_DELAY - 1, now));
        // A host that does not know this clock learns it first, in either direction of the
        // difference.
        assert!(is_late(0, now) && is_late(now + MAX_DELAY + 1, now) && is_late(u64::MAX, now));
    }
}
