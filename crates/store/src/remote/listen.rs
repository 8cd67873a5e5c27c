//! Listens to the answers of an object store, because the clients' errors omit parts of them: the
//! status, and when the server wants to be asked again. A client that repeats requests itself is
//! charged for its retries here, by a [`RetryLedger`].
//!
//! Promises: the client reads no more than [`MAX_ANSWER`] bytes of an answer that it reads whole,
//! also of a server that issues credentials, and reserves no memory for a length that a server
//! announces. Objects are read piece by piece, and their readers have limits.

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use async_trait::async_trait;
use bytes::Bytes;
use http_body::{Body, Frame};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService, ReqwestConnector,
};
use object_store::{ClientOptions, GetOptions};

use super::retry;
use super::retry_ledger::RetryLedger;

/// Maximum bytes of an answer that is no object: an error, credentials, or a page of a list. A page
/// has at most 5,000 names of 1 KiB.
const MAX_ANSWER: usize = 16 << 20;

/// An answer has no end, or a longer one than any store sends.
#[derive(Debug, thiserror::Error)]
#[error("the answer of the store has more than {MAX_ANSWER} bytes")]
struct AnswerTooLong;

/// The body of an answer that the client reads whole. It shows no length, because the client would
/// reserve as much.
struct LimitedBody {
    body: HttpResponseBody,
    room: usize,
}

impl Body for LimitedBody {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        let bytes = match &frame {
            Some(Ok(frame)) => frame.data_ref().map_or(0, Bytes::len),
            _ => 0,
        };
        let Some(room) = self.room.checked_sub(bytes) else {
            // Not repeated, as any answer that cannot be read.
            return Poll::Ready(Some(Err(HttpError::new(HttpErrorKind::Decode, AnswerTooLong))));
        };
        self.room = room;
        Poll::Ready(frame)
    }
}

/// Marks a request for an object.
#[derive(Clone, Copy, Debug)]
struct ObjectRequest;

/// Options of a request for an object, whose caller reads it piece by piece and has a limit.
pub(super) fn object_options(range: Option<Range<u64>>) -> GetOptions {
    let mut options = GetOptions { range: range.map(Into::into), ..GetOptions::default() };
    options.extensions.insert(ObjectRequest);
    options
}

/// Makes clients that report their answers to [`retry`].
#[derive(Debug)]
pub(super) struct ListeningConnector {
    /// For a client that repeats requests itself.
    pub(super) ledger: Option<Arc<RetryLedger>>,
}

#[derive(Debug)]
struct Listener {
    client: HttpClient,
    ledger: Option<Arc<RetryLedger>>,
}

impl HttpConnector for ListeningConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Listener { client, ledger: self.ledger.clone() }))
    }
}

#[async_trait]
impl HttpService for Listener {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let attempt = self.ledger.as_ref().map(|ledger| ledger.begin(&request)).transpose()?;
        let is_for_object = request.extensions().get::<ObjectRequest>().is_some();
        let mut outcome = self.client.execute(request).await;
        if let Ok(response) = &outcome
            && !response.status().is_success()
        {
            retry::heard_from(response.status(), response.headers());
        }
        if let (Some(ledger), Some(attempt)) = (&self.ledger, attempt) {
            ledger.end(attempt, &outcome);
        }
        if let Ok(response) = outcome {
            outcome = Ok(match is_for_object && response.status().is_success() {
                true => response,
                false => response
                    .map(|body| HttpResponseBody::new(LimitedBody { body, room: MAX_ANSWER })),
            });
        }
        outcome
    }
}
