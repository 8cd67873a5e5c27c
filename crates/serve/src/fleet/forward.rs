//! Asking another host: a request goes there in pieces, and its answer comes back in pieces.
//!
//! What it promises: a client gets that host's answer, or an error that says that it is not known what became of the
//! request; a request is sent again only where the other host said that it did nothing with it. A host that is lost
//! while it is waited for is not waited for longer than its lease.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use async_nats::client::Request as Message;
use async_nats::{RequestErrorKind, Subject};
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame};
use hyper::http::request::Parts;
use hyper::{Request, StatusCode};
use tracing::Instrument;

use super::talk::Rest;
use super::wire::{self, Ask, Reply};
use super::{Fleet, lock};
use crate::refusal::Refusal;

/// How often somebody who waits looks whether the other host is still there.
const LOOK: Duration = Duration::from_millis(100);
/// After so long without an answer the other host's lease is looked after.
const DOUBT: Duration = Duration::from_secs(1);

/// What came of asking.
pub(super) enum Asked {
    Answered(Response),
    /// It is not there: the request was not begun, and can be sent elsewhere.
    NotThere(Request<Body>),
}

/// Why a piece was not answered.
enum Failed {
    /// Nobody listens there: nothing was begun.
    Nobody,
    /// It is not known what became of it.
    Unknown(Refusal),
}

fn lost() -> Refusal {
    Refusal::busy(
        StatusCode::SERVICE_UNAVAILABLE,
        "the host that worked on this request was lost, and whether it was done is not known; ask, then try again",
    )
}

impl Fleet {
    /// One message and its answer.
    async fn ask(&self, life: &str, ask: &Ask, piece: &[u8]) -> Result<(Reply, Bytes), Failed> {
        let host = Failed::Unknown(Refusal::host());
        let Ok(message) = wire::pack(ask, piece) else { return Err(host) };
        if message.len() > self.links.client.max_payload() {
            return Err(Failed::Unknown(Refusal::new(
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "the head of the request is larger than a message between hosts may be",
            )));
        }
        let node = life.split_once('-').map_or(life, |(node, _)| node);
        let subject = Subject::from(self.links.subject(&format!("host.{node}.call")));
        let message = Message::new().payload(message).timeout(Some(self.config.patience));
        let mut sending = std::pin::pin!(self.links.client.send_request(subject, message));
        let begun = tokio::time::Instant::now();
        let sent = loop {
            match tokio::time::timeout(LOOK, &mut sending).await {
                Ok(sent) => break sent,
                // Without a lease of its own, this host hears nobody.
                Err(_) if self.is_over(life) || !self.safe() => {
                    return Err(Failed::Unknown(lost()));
                }
                Err(_) if begun.elapsed() > DOUBT => self.suspect(life),
                Err(_) => {}
            }
        };
        match sent {
            Ok(reply) => wire::unpack(&reply.payload).map_err(|_| host),
            Err(error) if error.kind() == RequestErrorKind::NoResponders => {
                self.suspect(life);
                Err(Failed::Nobody)
            }
            Err(error) => {
                tracing::warn!(%error, life, "no answer from another host");
                self.suspect(life);
                Err(Failed::Unknown(lost()))
            }
        }
    }

    /// Has another host answer a request; `take` if it may take the sandbox that it is about.
    pub(super) async fn forward(
        self: &Arc<Self>,
        life: &str,
        #[cfg_attr(not(feature = "otel"), allow(unused_mut, reason = "traces are handed on"))]
        mut request: Request<Body>,
        take: bool,
    ) -> Asked {
        let span = tracing::debug_span!("forward", otel.kind = "client", afresh.host = life);
        #[cfg(feature = "otel")]
        crate::otel::hand_on(&span, request.headers_mut());
        self.send_on(life, request, take).instrument(span).await
    }

    async fn send_on(self: &Arc<Self>, life: &str, request: Request<Body>, take: bool) -> Asked {
        let (parts, body) = request.into_parts();
        lock(&self.members).sent(life);
        let most = self.piece();
        let mut body = Rest::new(body);
        let (first, whole) = match body.next(most).await {
            Ok(piece) => piece,
            Err(error) => return Asked::Answered(broken(&error).into_response()),
        };
        let open = Ask::Open {
            method: parts.method.to_string(),
            uri: parts.uri.to_string(),
            headers: wire::pairs(&parts.headers),
            whole,
            take,
        };
        let back = |parts: Parts, first: Bytes, body: Rest| {
            let (over, rest) = body.left();
            let body = match whole {
                true => Body::from(first),
                false => {
                    let first = Some(Bytes::from([first, over].concat()));
                    Body::new(After { first, rest: Box::pin(rest) })
                }
            };
            Asked::NotThere(Request::from_parts(parts, body))
        };
        let mut replied = self.ask(life, &open, &first).await;
        if let Err(Failed::Nobody) | Ok((Reply::Elsewhere, _)) = &replied {
            return back(parts, first, body);
        }
        let mut done = whole;
        while let Ok((Reply::Go { id }, _)) = &replied {
            let id = *id;
            if done {
                break;
            }
            let (piece, last) = match body.next(most).await {
                Ok(piece) => piece,
                Err(error) => {
                    let _ = self.ask(life, &Ask::End { id }, &[]).await;
                    return Asked::Answered(broken(&error).into_response());
                }
            };
            done = last;
            replied = self.ask(life, &Ask::More { id, last }, &piece).await;
        }
        let answered = match replied {
            Ok((Reply::Answer { id, status, headers, whole }, piece)) => {
                self.response(life, (id, status, &headers, whole), piece)
            }
            // Its body is gone, so it cannot be sent again from here.
            Ok((Reply::Elsewhere, _)) | Err(Failed::Nobody) => Err(Refusal::busy(
                StatusCode::SERVICE_UNAVAILABLE,
                "the sandbox has just moved to another host; try again",
            )),
            Ok((Reply::Gone { why }, _)) => {
                tracing::warn!(why, life, "another host did not answer");
                Err(lost())
            }
            Ok(_) => Err(Refusal::host()),
            Err(Failed::Unknown(refusal)) => Err(refusal),
        };
        Asked::Answered(answered.unwrap_or_else(IntoResponse::into_response))
    }

    fn response(
        self: &Arc<Self>,
        life: &str,
        (id, status, headers, whole): (u64, u16, &wire::Pairs, bool),
        piece: Bytes,
    ) -> Result<Response, Refusal> {
        let damaged = |_| Refusal::host();
        let body = match whole {
            true => Body::from(piece),
            false => {
                let rest = Incoming {
                    fleet: self.clone(),
                    life: life.to_owned(),
                    id,
                    waits: None,
                    over: false,
                };
                Body::new(After { first: Some(piece), rest: Box::pin(rest) })
            }
        };
        let mut response = Response::new(body);
        *response.status_mut() = wire::status(status).map_err(damaged)?;
        *response.headers_mut() = wire::headers(headers).map_err(damaged)?;
        Ok(response)
    }
}

fn broken(error: &axum::Error) -> Refusal {
    use crate::body::Cut;
    let cut = std::error::Error::source(error).map(std::string::ToString::to_string);
    let text = cut.unwrap_or_else(|| error.to_string());
    let status = match text {
        text if text == Cut::<std::convert::Infallible>::TooSlow.to_string() => {
            StatusCode::REQUEST_TIMEOUT
        }
        ref text if text.contains("larger than") => StatusCode::PAYLOAD_TOO_LARGE,
        _ => StatusCode::BAD_REQUEST,
    };
    Refusal::new(status, error.to_string())
}

/// A piece, and what follows it.
struct After<B> {
    first: Option<Bytes>,
    rest: Pin<Box<B>>,
}

impl<B: HttpBody<Data = Bytes>> HttpBody for After<B> {
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

type Next = Pin<Box<dyn Future<Output = Option<(Bytes, bool)>> + Send>>;

/// The rest of an answer, which the other host is asked for piece by piece, as the client takes it.
struct Incoming {
    fleet: Arc<Fleet>,
    life: String,
    id: u64,
    waits: Option<Next>,
    over: bool,
}

/// The other host gave no further piece.
#[derive(Debug, thiserror::Error)]
#[error("the host that answers was lost in the middle of its answer")]
struct CutOff;

impl HttpBody for Incoming {
    type Data = Bytes;
    type Error = CutOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, CutOff>>> {
        let this = &mut *self;
        if this.over {
            return Poll::Ready(None);
        }
        let waits = this.waits.get_or_insert_with(|| {
            let (fleet, life, id) = (this.fleet.clone(), this.life.clone(), this.id);
            Box::pin(async move {
                match fleet.ask(&life, &Ask::Next { id }, &[]).await {
                    Ok((Reply::Piece { last }, piece)) => Some((piece, last)),
                    _ => None,
                }
            })
        });
        let next = std::task::ready!(waits.as_mut().poll(context));
        this.waits = None;
        match next {
            Some((piece, last)) => {
                this.over = last;
                if piece.is_empty() {
                    return Poll::Ready(None);
                }
                Poll::Ready(Some(Ok(Frame::data(piece))))
            }
            None => {
                this.over = true;
                Poll::Ready(Some(Err(CutOff)))
            }
        }
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if !self.over
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let (fleet, life, id) = (self.fleet.clone(), std::mem::take(&mut self.life), self.id);
            runtime.spawn(async move { drop(fleet.ask(&life, &Ask::End { id }, &[]).await) });
        }
    }
}
