//! HTTP to programs that listen in a sandbox: `PORT-ID.domain`, as E2B's `get_host` names it.
//!
//! Promises: request and answer pass unchanged and piece by piece, except for headers of the
//! connection and the sandbox's tokens, and for `Host` where the sandbox was made with another. A
//! client without a token gets nothing, unless the sandbox was made for public traffic.

use std::sync::Arc;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http_body_util::Limited;
use hyper::header::{CONNECTION, HOST, HeaderValue, UPGRADE};
use hyper::http::uri::{PathAndQuery, Uri};
use hyper::upgrade::OnUpgrade;
use hyper::{HeaderMap, Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional_with_sizes;

use crate::address_limits::CLIENT;
use crate::body::{Meter, StreamedAnswer};
use crate::connection_permit::ConnectionPermit;
use crate::error_response::ErrorResponse;
use crate::sandbox::connections::dial::{COPY_BYTES, MAX_HTTP_BUFFER_BYTES, dial};
use crate::sandbox::connections::request_host::host_of;
use crate::sandbox::http::authorization::{
    ACCESS_TOKEN, SANDBOX, TRAFFIC_TOKEN, called, resume_for_request, shows_traffic_token,
};
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::wire;

/// The header that names a port where the host does not.
const PORT: &str = "e2b-sandbox-port";
/// Ports that the server itself handles in every sandbox: those of the E2B agent and of its code
/// interpreter.
const OWN_PORTS: [u16; 2] = [49983, 49999];

/// The port of a sandbox program that a request is for; `None` if the server answers it.
pub(crate) fn of(headers: &HeaderMap) -> Option<u16> {
    let named = match headers.get(SANDBOX) {
        Some(_) => headers.get(PORT)?.to_str().ok()?,
        None => headers.get(HOST)?.to_str().ok()?.split_once('-')?.0,
    };
    named.parse().ok().filter(|port| !OWN_PORTS.contains(port))
}

/// Answers a request by the program that listens there.
pub(crate) async fn answer(all: &Arc<Sandboxes>, port: u16, request: Request<Body>) -> Response {
    forward(all, port, request).await.unwrap_or_else(IntoResponse::into_response)
}

async fn forward(
    all: &Arc<Sandboxes>,
    port: u16,
    request: Request<Body>,
) -> Result<Response, ErrorResponse> {
    let mut request = request;
    let from = hyper::upgrade::on(&mut request);
    let (mut parts, body) = request.into_parts();
    let protocol = parts.headers.get(UPGRADE).cloned();
    let place = parts.extensions.remove::<ConnectionPermit>();
    let sandbox = called(all, &parts.headers)?;
    if !sandbox.settings.public && !shows_traffic_token(&parts.headers, &sandbox.token) {
        return Err(no_token(&sandbox.id, port));
    }
    let sandbox = resume_for_request(all, sandbox).await?;
    // Every request of the server has one.
    let meter = parts.extensions.get::<Meter>().ok_or_else(ErrorResponse::host)?;
    let memory = meter.tenant_budget(&sandbox.tenant);
    let client = dial(all, &sandbox, port, memory).await?;
    let hung_up = |error: hyper::Error| {
        tracing::debug!(id = sandbox.id, port, %error, "no answer");
        let message =
            format!("the listener on port {port} of the sandbox did not answer with HTTP");
        ErrorResponse::new(StatusCode::BAD_GATEWAY, message)
    };
    // As proxies write them: some programs compare names of headers byte by byte.
    let mut http = hyper::client::conn::http1::Builder::new();
    http.title_case_headers(true).max_buf_size(MAX_HTTP_BUFFER_BYTES);
    let handshake = http.handshake(TokioIo::new(client));
    let (mut sender, connection) = handshake.await.map_err(hung_up)?;
    tokio::spawn(connection.with_upgrades());
    wire::strip(&mut parts.headers);
    for secret in [ACCESS_TOKEN, TRAFFIC_TOKEN, SANDBOX, PORT, CLIENT.as_str()] {
        parts.headers.remove(secret);
    }
    if let Some(host) = sandbox.settings.host.as_deref().and_then(|host| host_of(host, port)) {
        parts.headers.insert(HOST, host);
    }
    set_protocol(&mut parts.headers, protocol);
    let path = parts.uri.path_and_query().cloned();
    parts.uri = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
    let body = Limited::new(body, all.config.max_body);
    let asked = sender.send_request(Request::from_parts(parts, body)).await;
    let mut response = asked.map_err(hung_up)?;
    let to = hyper::upgrade::on(&mut response);
    let (mut parts, body) = response.into_parts();
    let protocol = parts.headers.get(UPGRADE).cloned();
    wire::strip(&mut parts.headers);
    if parts.status == StatusCode::SWITCHING_PROTOCOLS {
        tokio::spawn(relay(from, to, place));
        set_protocol(&mut parts.headers, protocol);
        return Ok(Response::from_parts(parts, Body::empty()));
    }
    parts.extensions.insert(StreamedAnswer);
    Ok(Response::from_parts(parts, Body::new(body)))
}

/// A request to a program without the token. E2B's edge answers so.
pub(crate) fn no_token(id: &str, port: u16) -> ErrorResponse {
    let message = format!(
        "port {port} of the sandbox {id} needs its `trafficAccessToken`, in the header `{TRAFFIC_TOKEN}`; or make \
         the sandbox with `allowPublicTraffic`"
    );
    ErrorResponse::new(StatusCode::FORBIDDEN, message)
}

/// Repeats the protocol that the connection switches to. Among the headers about a connection, only
/// this one is for both sides.
fn set_protocol(headers: &mut HeaderMap, protocol: Option<HeaderValue>) {
    if let Some(protocol) = protocol {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol);
    }
}

/// Copies bytes between two ends that speak another protocol now, under the client's connection
/// permit.
async fn relay(from: OnUpgrade, to: OnUpgrade, _place: Option<ConnectionPermit>) {
    let (Ok(from), Ok(to)) = (from.await, to.await) else { return };
    let (mut from, mut to) = (TokioIo::new(from), TokioIo::new(to));
    // Either may just go away.
    let copying = copy_bidirectional_with_sizes(&mut from, &mut to, COPY_BYTES, COPY_BYTES);
    let _ = copying.await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_named_by_the_host_or_by_a_header() {
        let of = |given: &[(&'static str, &str)]| {
            let mut headers = HeaderMap::new();
            given.iter().for_each(|(name, value)| {
                headers.insert(*name, value.parse().unwrap());
            });
            of(&headers)
        };
        assert_eq!(of(&[("host", "8000-abc.example")]), Some(8000));
        assert_eq!(of(&[("host", "49999-abc.example")]), None);
        assert_eq!(of(&[("host", "localhost:8080")]), None);
        assert_eq!(of(&[("host", "70000-abc.example")]), None);
        assert_eq!(of(&[("host", "8000-abc.example"), (SANDBOX, "abc")]), None);
        assert_eq!(of(&[(SANDBOX, "abc"), (PORT, "8000")]), Some(8000));
        assert_eq!(of(&[(SANDBOX, "abc"), (PORT, "49983")]), None);
    }
}
