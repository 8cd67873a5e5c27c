//! The span of a request: its fields in logs and traces, by OpenTelemetry's conventions.
//!
//! Without a subscriber for spans, this costs only the check for one.

use axum::response::Response;
use hyper::{Method, Request, StatusCode};
use tracing::Span;
use tracing::field::Empty;

use crate::error_response::RefusalReason;
use hyper::header::HeaderName;

/// The header that a request's number comes and goes in.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A span for a request, which continues the trace that the request came with; handlers of the
/// request continue the span.
pub(crate) fn request<B>(request: &mut Request<B>) -> Span {
    let id = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok());
    #[cfg(feature = "otel")]
    let given = crate::otel::read_headers(request.headers());
    #[cfg(not(feature = "otel"))]
    let given: Option<(&str, &str)> = None;
    let span = tracing::debug_span!(
        "request",
        otel.kind = "server",
        otel.name = Empty,
        otel.status_code = Empty,
        traceparent = given.map(|given| given.0),
        tracestate = given.map(|given| given.1).filter(|state| !state.is_empty()),
        request.id = id.unwrap_or_default(),
        http.request.method = method(request.method()),
        http.route = Empty,
        http.response.status_code = Empty,
        url.path = request.uri().path(),
        afresh.tenant = Empty,
    );
    #[cfg(feature = "otel")]
    crate::otel::hand_on(&span, request.headers_mut());
    span
}

/// A span for an operation of the server itself: for logs, at the level TRACE. Such spans would
/// hide the relevant ones in traces.
pub(crate) fn operation<B>(request: &Request<B>) -> Span {
    let id = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let path = request.uri().path();
    tracing::trace_span!("operation", request.id = id.unwrap_or_default(), url.path = path)
}

/// A method as part of a name, from a fixed list.
fn method(method: &Method) -> &str {
    match method.as_str() {
        known @ ("GET" | "HEAD" | "POST" | "PUT" | "DELETE" | "CONNECT" | "OPTIONS" | "TRACE"
        | "PATCH") => known,
        _ => "_OTHER",
    }
}

/// Says which route a request is for.
pub(crate) fn route(asked: &Method, route: impl FnOnce() -> String) {
    let span = Span::current();
    if !span.is_disabled() {
        let route = route();
        let name = match method(asked) {
            "_OTHER" => "HTTP",
            known => known,
        };
        span.record("otel.name", format!("{name} {route}"));
        span.record("http.route", route);
    }
}

/// Records the tenant that a request comes from.
pub(crate) fn tenant(tenant: &str) {
    Span::current().record("afresh.tenant", tenant);
}

/// Notes how a request was answered. A refusal and its reason are in the log: as a warning if the
/// server is at its limit or failed.
pub(crate) fn answered(response: &Response) {
    let status = response.status();
    if let Some(RefusalReason(why)) = response.extensions().get() {
        match status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
            true => tracing::warn!(status = status.as_u16(), why, "a request was refused"),
            false => tracing::info!(status = status.as_u16(), why, "a request was refused"),
        }
    }
    let span = Span::current();
    span.record("http.response.status_code", status.as_u16());
    if status.is_server_error() {
        span.record("otel.status_code", "ERROR");
    }
    tracing::debug!("answered");
}

#[cfg(all(test, feature = "otel"))]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;
    use crate::otel::{Context, Settings, Traces};

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    /// The context for a receiver of the request.
    fn handed_on(given: &[(&'static str, &'static str)]) -> (Option<Context>, bool) {
        let mut asked = Request::new(());
        for (name, value) in given {
            asked.headers_mut().append(*name, value.parse().unwrap());
        }
        drop(request(&mut asked));
        let parent = asked.headers().get("traceparent").and_then(|text| text.to_str().ok());
        (parent.and_then(Context::read), asked.headers().contains_key("tracestate"))
    }

    #[test]
    fn the_receiver_of_a_forwarded_request_continues_its_trace() {
        let own = Context::read(PARENT).unwrap();
        // Without traces the received context is passed on.
        assert_eq!(handed_on(&[("traceparent", PARENT)]), (Some(own), false));
        let settings =
            Settings::read(|name| (name == "OTEL_TRACES_EXPORTER").then(|| "otlp".into()));
        let traces = Traces::new(settings.unwrap().unwrap());
        let subscriber = tracing_subscriber::registry().with(traces.layer());
        tracing::subscriber::with_default(subscriber, || {
            let (given, state) = handed_on(&[("traceparent", PARENT), ("tracestate", "a=b")]);
            let text = given.unwrap().text();
            assert!(text.starts_with(&PARENT[..36]) && text != PARENT && state, "{text}");
            let (new, state) = handed_on(&[("traceparent", "sesame"), ("tracestate", "a=b")]);
            assert!(new.is_some_and(|new| !new.text().starts_with(&PARENT[..36])) && !state);
            assert!(handed_on(&[]).0.is_some());
        });
    }
}
