//! Bodies of requests: taken whole, or passed on, within limits of size, time and memory.
//!
//! What it promises: nothing is kept of a body that is too large before it is refused, however it says its
//! length; a client that sends a byte now and then is refused after the time for a body.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::StatusCode;
use tokio::time::{Instant, Sleep};

use crate::budget::{Budget, Share};
use crate::refusal::Refusal;

/// What one body may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimits {
    pub(crate) bytes: usize,
    pub(crate) time: Duration,
}

/// The whole body.
pub(crate) async fn read<B>(
    body: B,
    limits: BodyLimits,
    share: &mut Share,
) -> Result<Bytes, Refusal>
where
    B: Body<Data = Bytes> + Unpin,
{
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    if body.size_hint().lower() > limits.bytes as u64 {
        return Err(Refusal::too_large(limits.bytes));
    }
    let reading = collect(body, limits.bytes, share);
    tokio::time::timeout(limits.time, reading).await.unwrap_or_else(|_| Err(Refusal::too_slow()))
}

async fn collect<B>(mut body: B, most: usize, share: &mut Share) -> Result<Bytes, Refusal>
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        let broken = |_| Refusal::new(StatusCode::BAD_REQUEST, "the body broke off");
        // Trailers mean nothing to a guest that takes bytes.
        let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
        length += data.len();
        if length > most {
            return Err(Refusal::too_large(most));
        }
        if !share.add(data.len()) {
            return Err(Refusal::no_memory());
        }
        // Most bodies come in one piece, which need not be copied.
        if length == data.len() {
            first = data;
            continue;
        }
        if all.is_empty() {
            all.extend_from_slice(&first);
        }
        all.extend_from_slice(&data);
    }
    Ok(if all.is_empty() { first } else { all.freeze() })
}

/// Why a body that is passed on ends early.
#[derive(Debug)]
pub(crate) enum Cut<E> {
    TooLarge(usize),
    TooSlow,
    Broken(E),
}

impl<E: std::fmt::Display> std::fmt::Display for Cut<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooLarge(most) => write!(f, "the body is larger than {most} bytes"),
            Self::TooSlow => f.write_str("the body took too long to arrive"),
            Self::Broken(error) => write!(f, "the body broke off: {error}"),
        }
    }
}

impl<E: std::fmt::Debug + std::fmt::Display> std::error::Error for Cut<E> {}

/// A body on its way to a guest that reads it while it arrives.
pub(crate) struct Limited<B> {
    body: B,
    most: usize,
    left: usize,
    time: Duration,
    /// Made when the body is first waited for.
    sleep: Option<Pin<Box<Sleep>>>,
}

impl<B> Limited<B> {
    pub(crate) fn new(body: B, limits: BodyLimits) -> Self {
        let BodyLimits { bytes, time } = limits;
        Self { body, most: bytes, left: bytes, time, sleep: None }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Limited<B> {
    type Data = Bytes;
    type Error = Cut<B::Error>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        match Pin::new(&mut this.body).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                let bytes = frame.data_ref().map_or(0, Bytes::len);
                match this.left.checked_sub(bytes) {
                    Some(left) => this.left = left,
                    None => return Poll::Ready(Some(Err(Cut::TooLarge(this.most)))),
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(Cut::Broken(error)))),
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => {
                let until = Instant::now() + this.time;
                let sleep =
                    this.sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
                match sleep.as_mut().poll(context) {
                    Poll::Ready(()) => Poll::Ready(Some(Err(Cut::TooSlow))),
                    Poll::Pending => Poll::Pending,
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An answer that is whole, and its share of what may be kept.
struct Held {
    bytes: Bytes,
    _share: Share,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Said of an answer whose body comes in pieces, while it is still being made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InPieces;

/// A body in pieces, each of which is counted for as long as anybody has it. One that does not fit ends it.
pub(crate) struct Counted {
    body: axum::body::Body,
    budget: Budget,
}

impl Counted {
    pub(crate) fn new(body: axum::body::Body, budget: &Budget) -> Self {
        Self { body, budget: budget.clone() }
    }
}

/// There is no room for the next piece.
#[derive(Debug, thiserror::Error)]
#[error("the server has no memory left for the rest of the answer")]
pub(crate) struct NoRoom;

impl Body for Counted {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(context));
        let Some(frame) = frame else { return Poll::Ready(None) };
        let counted = frame.map_err(Into::into).and_then(|frame| match frame.into_data() {
            Err(trailers) => Ok(trailers),
            Ok(data) => {
                let mut share = self.budget.share();
                match share.add(data.len()) {
                    true => Ok(Frame::data(held(data, share))),
                    false => Err(NoRoom.into()),
                }
            }
        });
        Poll::Ready(Some(counted))
    }
}

/// The bytes of an answer, which are counted for as long as anybody has them: a connection takes all of a body at once, and keeps
/// it until its client has.
pub(crate) fn held(bytes: Bytes, share: Share) -> Bytes {
    if bytes.is_empty() {
        return bytes;
    }
    Bytes::from_owner(Held { bytes, _share: share })
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::convert::Infallible;

    use super::*;

    /// A body in pieces; after them it ends, or never says anything again.
    struct Pieces(VecDeque<&'static [u8]>, bool);

    impl Body for Pieces {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            match self.0.pop_front() {
                Some(piece) => Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(piece))))),
                None if self.1 => Poll::Ready(None),
                None => Poll::Pending,
            }
        }
    }

    fn pieces(ends: bool) -> Pieces {
        Pieces(VecDeque::from([&b"one"[..], b"", b"two", b"three"]), ends)
    }

    async fn all(bytes: usize, budget: &Budget) -> Result<Bytes, StatusCode> {
        let limits = BodyLimits { bytes, time: Duration::from_secs(600) };
        let mut share = budget.share();
        read(pieces(true), limits, &mut share).await.map_err(|refusal| refusal.status)
    }

    #[tokio::test]
    async fn a_body_in_pieces_arrives_whole_or_not_at_all() {
        let budget = Budget::new(1000);
        assert_eq!(all(11, &budget).await.unwrap(), "onetwothree");
        assert_eq!(all(10, &budget).await, Err(StatusCode::PAYLOAD_TOO_LARGE));
        assert_eq!(all(11, &Budget::new(10)).await, Err(StatusCode::SERVICE_UNAVAILABLE));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn an_answer_is_counted_until_its_last_part_is_gone() {
        let budget = Budget::new(10);
        let mut share = budget.share();
        assert!(share.add(10));
        let mut bytes = held(Bytes::from_static(b"0123456789"), share);
        let rest = bytes.split_off(4);
        drop(bytes);
        assert_eq!((&rest[..], budget.used()), (&b"456789"[..], 10));
        drop(rest);
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test]
    async fn a_body_that_stalls_is_given_up() {
        let limits = BodyLimits { bytes: 100, time: Duration::from_millis(5) };
        let refusal = read(pieces(false), limits, &mut Budget::new(100).share()).await;
        assert_eq!(refusal, Err(Refusal::too_slow()));
        let mut passed = Limited::new(pieces(false), limits);
        let mut sent = 0;
        let cut = loop {
            match passed.frame().await {
                Some(Ok(frame)) => sent += frame.data_ref().map_or(0, Bytes::len),
                Some(Err(cut)) => break cut,
                None => panic!("it has no end"),
            }
        };
        assert_eq!(sent, 11);
        assert!(matches!(cut, Cut::TooSlow));
    }

    #[tokio::test]
    async fn a_body_that_is_passed_on_ends_at_its_limit() {
        let limits = BodyLimits { bytes: 7, time: Duration::from_secs(600) };
        let mut passed = Limited::new(pieces(true), limits);
        for length in [3, 0, 3] {
            assert_eq!(passed.frame().await.unwrap().unwrap().data_ref().unwrap().len(), length);
        }
        assert!(matches!(passed.frame().await, Some(Err(Cut::TooLarge(7)))));
    }
}
