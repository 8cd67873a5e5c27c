//! Traces that continue in requests to others.

use hyper::HeaderMap;
use hyper::header::HeaderValue;
use tracing_subscriber::Registry;
use tracing_subscriber::registry::LookupSpan;

use super::context::{Context, TRACEPARENT, TRACESTATE, read_headers};
use super::layer::SpanData;

/// The context of a span, if a [`Layer`](super::Layer) has seen it.
pub(super) fn context_of(span: &tracing::Span) -> Option<Context> {
    let found = span.with_subscriber(|(id, dispatch)| {
        let span = dispatch.downcast_ref::<Registry>()?.span(id)?;
        span.extensions().get::<SpanData>().map(|spanned| spanned.context)
    });
    found.flatten()
}

/// Adds headers that continue the trace of `span`. Without a trace they stay unchanged.
pub(crate) fn hand_on(span: &tracing::Span, headers: &mut HeaderMap) {
    let Some(context) = context_of(span) else { return };
    if read_headers(headers).is_none() {
        // It would belong to another trace.
        headers.remove(TRACESTATE);
    }
    if let Ok(value) = HeaderValue::try_from(context.text()) {
        headers.insert(TRACEPARENT, value);
    }
}
