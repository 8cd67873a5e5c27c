//! The record of one request about sandboxes: for the audit log, and for the use of its tenant.
//!
//! Promises: bytes of a request and of its answer are counted as they pass. The line in the audit
//! log is written when the answer ends or breaks off. A path is recorded by its pattern, never with
//! its query.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::{Request, StatusCode};
use serde_json::{Map, Value, json};

use crate::address_limits::CLIENT;
use crate::body::Meter;
use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::http::keys::KeyError;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::span::REQUEST_ID;

/// The key of a request that shows the token of a sandbox, or a signature by it.
pub(crate) const TOKEN: &str = "token";

/// Facts about a request: from its head, and from its handler. Clones share them.
#[derive(Clone)]
pub(crate) struct RequestNotes(Arc<Mutex<RecordFields>>);

#[derive(Default)]
struct RecordFields {
    tenant: Option<Arc<str>>,
    key: Option<Arc<str>>,
    sandbox: Option<String>,
    made: Vec<String>,
    reason: Option<String>,
    /// Counts the bytes of the request for its tenant.
    meter: Option<Meter>,
}

impl RequestNotes {
    fn new(meter: Option<Meter>) -> Self {
        Self(Arc::new(Mutex::new(RecordFields { meter, ..RecordFields::default() })))
    }

    /// The request is by this tenant, with this key.
    pub(crate) fn set_caller(&self, tenant: &Arc<str>, key: &str) {
        let mut notes = lock(&self.0);
        (notes.tenant, notes.key) = (Some(tenant.clone()), Some(key.into()));
        if let Some(meter) = &notes.meter {
            meter.set_tenant(Some(tenant));
        }
    }

    /// The key or token of the request does not count.
    pub(crate) fn set_denied(&self, error: &KeyError) {
        let mut notes = lock(&self.0);
        notes.reason = Some(error.to_string());
        #[cfg(feature = "oidc")]
        if let KeyError::Outside { key, .. } = error {
            notes.key = Some(key.clone());
        }
    }

    /// The request is about this sandbox or snapshot.
    pub(crate) fn set_sandbox(&self, id: &str) {
        lock(&self.0).sandbox = Some(id.to_owned());
    }

    /// The request made these sandboxes, or this snapshot.
    pub(crate) fn set_made<'a>(&self, ids: impl Iterator<Item = &'a str>) {
        lock(&self.0).made = ids.map(str::to_owned).collect();
    }

    pub(crate) fn tenant(&self) -> Option<Arc<str>> {
        lock(&self.0).tenant.clone()
    }
}

/// A request that is being answered.
pub(crate) struct RequestRecord {
    all: Arc<Sandboxes>,
    pub(crate) notes: RequestNotes,
    /// Fields that its head has.
    fields: Map<String, Value>,
    begun: Instant,
    /// Whether its bytes are counted here.
    is_counted: bool,
    sent: u64,
    /// That of the answer, if one was made.
    status: Option<StatusCode>,
    is_complete: bool,
}

impl RequestRecord {
    /// The record of a request for `action`.
    pub(crate) fn new(all: &Arc<Sandboxes>, request: &Request<Body>, action: &str) -> Self {
        let header = |name| {
            let value = request.headers().get(name);
            json!(value.and_then(|value: &hyper::header::HeaderValue| value.to_str().ok()))
        };
        let fields = Map::from_iter([
            ("request".to_owned(), header(&REQUEST_ID)),
            ("client".to_owned(), header(&CLIENT)),
            ("action".to_owned(), json!(format!("{} {action}", request.method()))),
        ]);
        Self {
            all: all.clone(),
            notes: RequestNotes::new(request.extensions().get().cloned()),
            fields,
            begun: Instant::now(),
            is_counted: true,
            sent: 0,
            status: None,
            is_complete: false,
        }
    }

    /// Another part counts the bytes of the request and of its answer.
    pub(crate) fn is_counted_elsewhere(&mut self) {
        self.is_counted = false;
    }

    fn fields(&self) -> Map<String, Value> {
        let mut fields = self.fields.clone();
        let notes = lock(&self.notes.0);
        fields.insert("tenant".to_owned(), json!(notes.tenant));
        fields.insert("key".to_owned(), json!(notes.key));
        fields.insert("sandbox".to_owned(), json!(notes.sandbox));
        fields.insert("reason".to_owned(), json!(notes.reason));
        if !notes.made.is_empty() {
            fields.insert("made".to_owned(), json!(notes.made));
        }
        fields
    }

    /// Records that the operation begins, if it must not without a record.
    pub(crate) async fn begin(&self) -> Result<(), ErrorResponse> {
        match &self.all.audit {
            Some(audit) => audit.begin(self.fields()).await,
            None => Ok(()),
        }
    }

    /// The body of the request, counted for its tenant.
    pub(crate) fn count_request(&self, request: Request<Body>) -> Request<Body> {
        if !self.is_counted {
            return request;
        }
        let (all, notes) = (self.all.clone(), self.notes.clone());
        request.map(|body| Body::new(CountedRequest { body, all, notes }))
    }

    /// The answer, whose end is the end of the record.
    pub(crate) fn follow(mut self, response: Response) -> Response {
        let status = response.status();
        self.status = Some(status);
        // A stranger's requests are not at the expense of the tenant.
        let is_denied = [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN].contains(&status);
        self.is_counted &= !is_denied;
        if let Some(meter) = lock(&self.notes.0).meter.as_ref().filter(|_| is_denied) {
            meter.set_tenant(None);
        }
        response.map(|body| Body::new(CountedAnswer { body, record: self }))
    }
}

/// The result of an operation, for the audit log.
fn result(status: Option<StatusCode>, is_complete: bool) -> &'static str {
    let Some(status) = status else { return "aborted" };
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => "denied",
        status if status.is_server_error() => "failed",
        status if status.is_client_error() => "refused",
        _ if !is_complete => "aborted",
        _ => "ok",
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        if let Some(audit) = &self.all.audit {
            let mut fields = self.fields();
            let milliseconds = self.begun.elapsed().as_secs_f64() * 1e3;
            for (name, value) in [
                ("event", json!("end")),
                ("status", json!(self.status.map(|status| status.as_u16()))),
                ("result", json!(result(self.status, self.is_complete))),
                ("duration_ms", json!((milliseconds * 1e3).round() / 1e3)),
                ("sent", json!(self.sent)),
            ] {
                fields.insert(name.to_owned(), value);
            }
            audit.write(fields);
        }
    }
}

/// A request's body.
struct CountedRequest {
    body: Body,
    all: Arc<Sandboxes>,
    notes: RequestNotes,
}

impl HttpBody for CountedRequest {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        let bytes = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref());
        if let (Some(bytes), Some(tenant)) = (bytes, self.notes.tenant()) {
            self.all.accounts.add_received(&tenant, bytes.len() as u64);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An answer's body.
struct CountedAnswer {
    body: Body,
    record: RequestRecord,
}

impl HttpBody for CountedAnswer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        let bytes = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref());
        let bytes = bytes.map_or(0, |bytes| bytes.len() as u64);
        let is_over = frame.is_none();
        let record = &mut self.record;
        record.sent += bytes;
        record.is_complete |= is_over;
        if let Some(tenant) = record.notes.tenant().filter(|_| record.is_counted && bytes > 0) {
            record.all.accounts.add_sent(&tenant, bytes);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for CountedAnswer {
    fn drop(&mut self) {
        // A reader may stop after the last byte.
        self.record.is_complete |= self.body.is_end_stream();
    }
}
