//! Bodies of requests: taken whole, or passed on, within limits of size, time and memory.
//!
//! Promises: a body that is too large is refused before any of it is kept, for every form of its
//! length; a client that sends a byte now and then is refused after the time for a body.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::StatusCode;
use tokio::time::Sleep;

use crate::body_shares::BodyShares;
use crate::budget::{Budget, Share};
use crate::error_response::ErrorResponse;
use crate::lock::lock;

/// Limits of one body.
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
) -> Result<Bytes, ErrorResponse>
where
    B: Body<Data = Bytes> + Unpin,
{
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    if body.size_hint().lower() > limits.bytes as u64 {
        return Err(ErrorResponse::too_large(limits.bytes));
    }
    let reading = collect(body, limits.bytes, share);
    tokio::time::timeout(limits.time, reading)
        .await
        .unwrap_or_else(|_| Err(ErrorResponse::too_slow()))
}

async fn collect<B>(mut body: B, most: usize, share: &mut Share) -> Result<Bytes, ErrorResponse>
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        let broken = |_| {
            ErrorResponse::new(
                StatusCode::BAD_REQUEST,
                "the request body ended early; send the request again",
            )
        };
        // Trailers mean nothing to a guest that takes bytes.
        let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
        length += data.len();
        if length > most {
            return Err(ErrorResponse::too_large(most));
        }
        if !share.add(data.len()) {
            return Err(ErrorResponse::no_memory());
        }
        // Most bodies come in one piece, which is not copied.
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

/// How the memory of a body is counted that is passed on.
pub(crate) enum BodyMetering {
    /// The receiver counts it.
    Not,
    /// A body that is kept whole. Its bytes count until the meter is dropped.
    Whole(Meter),
    /// A body that streams. A piece counts until it is dropped.
    Pieces(Meter),
}

/// The memory of a request and its answer: of a body that is kept as a whole, of values decoded
/// from it, and of pieces. Clones share the count.
#[derive(Clone)]
pub(crate) struct Meter {
    shares: Arc<BodyShares>,
    state: Arc<Mutex<MeterState>>,
    weight: usize,
}

struct MeterState {
    /// The memory that bytes count in from now on.
    budget: Budget,
    share: Share,
    is_kept: bool,
    exceeded: bool,
}

impl Meter {
    /// A meter that counts `weight` bytes of memory per byte of the body, as those of a request
    /// without a tenant.
    pub(crate) fn new(shares: &Arc<BodyShares>, weight: usize) -> Self {
        let budget = shares.of(None);
        let share = budget.share();
        let metered = MeterState { budget, share, is_kept: false, exceeded: false };
        Self { shares: shares.clone(), state: Arc::new(Mutex::new(metered)), weight }
    }

    /// Counts in the part of a tenant from now on, or as a stranger's. Bytes that have come before
    /// that are counted where they were.
    pub(crate) fn set_tenant(&self, tenant: Option<&Arc<str>>) {
        let budget = self.shares.of(tenant);
        let mut metered = lock(&self.state);
        if metered.share.is_empty() {
            metered.share = budget.share();
        }
        metered.budget = budget;
    }

    /// The body is kept as a whole from now on. Before that its bytes pass on to another host.
    pub(crate) fn keep(&self) {
        lock(&self.state).is_kept = true;
    }

    /// The part of a tenant, for bytes of connections to its sandboxes, also of other clients.
    #[cfg(linux_guests)]
    pub(crate) fn tenant_budget(&self, tenant: &Arc<str>) -> Budget {
        self.shares.of(Some(tenant))
    }

    /// The memory that further bytes count in.
    pub(crate) fn budget(&self) -> Budget {
        lock(&self.state).budget.clone()
    }

    /// Counts bytes of the body, or decompressed bytes. False if they do not fit.
    pub(crate) fn add(&self, bytes: usize) -> bool {
        let mut metered = lock(&self.state);
        let fits = metered.share.add(bytes.saturating_mul(self.weight));
        metered.exceeded |= !fits;
        fits
    }

    /// Counts a piece until it is dropped. `None` if it does not fit.
    fn add_piece(&self, frame: Frame<Bytes>) -> Option<Frame<Bytes>> {
        let mut share = self.budget().share();
        let fits = share.add(frame.data_ref().map_or(0, Bytes::len));
        fits.then(|| frame.map_data(|data| count_until_dropped(data, share)))
    }

    /// Whether the body did not fit.
    pub(crate) fn is_exceeded(&self) -> bool {
        lock(&self.state).exceeded
    }
}

impl BodyMetering {
    /// Counts bytes that have arrived.
    fn count(&self, frame: Frame<Bytes>) -> Option<Frame<Bytes>> {
        match self {
            Self::Not => Some(frame),
            Self::Whole(meter) if lock(&meter.state).is_kept => {
                meter.add(frame.data_ref().map_or(0, Bytes::len)).then_some(frame)
            }
            Self::Whole(meter) | Self::Pieces(meter) => meter.add_piece(frame),
        }
    }
}

/// Why a body that is passed on ends early.
#[derive(Debug)]
pub(crate) enum BodyError<E> {
    TooLarge(usize),
    TooSlow,
    BudgetExhausted,
    Broken(E),
}

impl<E: std::fmt::Display> std::fmt::Display for BodyError<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooLarge(most) => write!(f, "the body is larger than {most} bytes"),
            Self::TooSlow => f.write_str("the body took too long to arrive"),
            Self::BudgetExhausted => {
                f.write_str("the server holds as much of other requests as it may")
            }
            Self::Broken(error) => write!(f, "the body ended early: {error}"),
        }
    }
}

impl<E: std::fmt::Debug + std::fmt::Display> std::error::Error for BodyError<E> {}

/// A body on its way to a guest that reads it while it arrives.
pub(crate) struct LimitedBody<B> {
    body: B,
    most: usize,
    left: usize,
    time: Duration,
    counting: BodyMetering,
    /// Made when the body is first waited for.
    sleep: Option<Pin<Box<Sleep>>>,
}

impl<B> LimitedBody<B> {
    pub(crate) fn new(body: B, limits: BodyLimits, counting: BodyMetering) -> Self {
        let BodyLimits { bytes, time } = limits;
        Self { body, most: bytes, left: bytes, time, counting, sleep: None }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for LimitedBody<B> {
    type Data = Bytes;
    type Error = BodyError<B::Error>;

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
                    None => return Poll::Ready(Some(Err(BodyError::TooLarge(this.most)))),
                }
                Poll::Ready(Some(this.counting.count(frame).ok_or(BodyError::BudgetExhausted)))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(BodyError::Broken(error)))),
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => {
                let time = this.time;
                let sleep = this.sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep(time)));
                match sleep.as_mut().poll(context) {
                    Poll::Ready(()) => Poll::Ready(Some(Err(BodyError::TooSlow))),
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

/// A whole answer, and its share of the memory for bodies.
struct BufferedAnswer {
    bytes: Bytes,
    _share: Share,
}

impl AsRef<[u8]> for BufferedAnswer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Marks an answer whose body is sent in pieces while it is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamedAnswer;

/// A body in pieces. Each piece is counted until it is dropped. One that does not fit ends the
/// body.
pub(crate) struct MeteredBody {
    body: axum::body::Body,
    budget: Budget,
}

impl MeteredBody {
    pub(crate) fn new(body: axum::body::Body, budget: Budget) -> Self {
        Self { body, budget }
    }
}

/// There is no room for the next piece.
#[derive(Debug, thiserror::Error)]
#[error("the server has no memory left for the rest of the answer")]
pub(crate) struct BudgetExhausted;

impl Body for MeteredBody {
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
                    true => Ok(Frame::data(count_until_dropped(data, share))),
                    false => Err(BudgetExhausted.into()),
                }
            }
        });
        Poll::Ready(Some(counted))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The bytes of an answer, which are counted until their last holder drops them: a connection takes
/// all of a body at once, and keeps it until its client has received it.
pub(crate) fn count_until_dropped(bytes: Bytes, share: Share) -> Bytes {
    if bytes.is_empty() {
        return bytes;
    }
    Bytes::from_owner(BufferedAnswer { bytes, _share: share })
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::convert::Infallible;

    use super::*;

    /// A body in pieces; after them it ends, or stays silent.
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
    fn an_answer_is_counted_until_its_last_part_is_sent() {
        let budget = Budget::new(10);
        let mut share = budget.share();
        assert!(share.add(10));
        let mut bytes = count_until_dropped(Bytes::from_static(b"0123456789"), share);
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
        assert_eq!(refusal, Err(ErrorResponse::too_slow()));
        let mut passed = LimitedBody::new(pieces(false), limits, BodyMetering::Not);
        let mut sent = 0;
        let cut = loop {
            match passed.frame().await {
                Some(Ok(frame)) => sent += frame.data_ref().map_or(0, Bytes::len),
                Some(Err(cut)) => break cut,
                None => panic!("it has no end"),
            }
        };
        assert_eq!(sent, 11);
        assert!(matches!(cut, BodyError::TooSlow));
    }

    #[tokio::test]
    async fn a_body_that_is_passed_on_is_counted_as_it_arrives() {
        let limits = BodyLimits { bytes: 1 << 30, time: Duration::from_secs(600) };
        let budget = Budget::new(40);
        let shares = BodyShares::new(&budget);
        let meter = Meter::new(&shares, 3);
        meter.set_tenant(Some(&"one".into()));
        meter.keep();
        let mut whole = LimitedBody::new(pieces(true), limits, BodyMetering::Whole(meter.clone()));
        assert_eq!(budget.used(), 0, "nothing has arrived");
        for used in [9, 9, 18] {
            drop(whole.frame().await.unwrap().unwrap());
            assert_eq!(budget.used(), used);
        }
        assert!(
            matches!(whole.frame().await, Some(Err(BodyError::BudgetExhausted)))
                && meter.is_exceeded()
        );
        drop((whole, meter));
        assert_eq!(budget.used(), 0);
        // A host of a fleet passes on what it does not keep.
        for counting in [BodyMetering::Pieces, BodyMetering::Whole] {
            let counting = counting(Meter::new(&shares, 30));
            let mut passed = LimitedBody::new(pieces(true), limits, counting);
            let first = passed.frame().await.unwrap().unwrap();
            assert_eq!(budget.used(), 3);
            drop(first);
            assert_eq!(budget.used(), 0);
        }
    }

    #[tokio::test]
    async fn a_body_that_is_passed_on_ends_at_its_limit() {
        let limits = BodyLimits { bytes: 7, time: Duration::from_secs(600) };
        let mut passed = LimitedBody::new(pieces(true), limits, BodyMetering::Not);
        for length in [3, 0, 3] {
            assert_eq!(passed.frame().await.unwrap().unwrap().data_ref().unwrap().len(), length);
        }
        assert!(matches!(passed.frame().await, Some(Err(BodyError::TooLarge(7)))));
    }
}
