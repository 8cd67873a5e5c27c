//! HTTP/1.1 as bytes, for Linux programs that listen on a port.
//!
//! Promises: the program gets one request, for any bytes in the client's head, because only parsed
//! parts are written; headers about the client's connection are not passed on, in either direction;
//! an incomplete answer is an error.

use axum::http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use httparse::Status;

/// Headers of a connection, not of its messages.
const HOPS: [HeaderName; 11] = [
    CONNECTION,
    EXPECT,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    CONTENT_LENGTH,
];

/// Maximum headers of an answer: the same as hyper's limit for a request.
const MAX_HEADERS: usize = 100;

/// Removes the headers of a connection, except for the length of the body.
#[cfg(linux_guests)]
pub(crate) fn strip(headers: &mut HeaderMap) {
    let own: Vec<_> = headers.keys().filter(hops(headers)).cloned().collect();
    own.iter().filter(|name| **name != CONTENT_LENGTH).for_each(|name| {
        headers.remove(name);
    });
}

/// Headers about a connection: the standard ones, and those that the client lists (RFC 9110,
/// 7.6.1).
fn hops(headers: &HeaderMap) -> impl Fn(&&HeaderName) -> bool {
    let named = headers.get_all(CONNECTION).iter().filter_map(|names| names.to_str().ok());
    let named: Vec<_> =
        named.flat_map(|names| names.split(',').map(|name| name.trim().to_owned())).collect();
    move |name| {
        HOPS.contains(name) || named.iter().any(|named| name.as_str().eq_ignore_ascii_case(named))
    }
}

/// A request, as a client of the program would write it.
pub(crate) fn request(parts: &Parts, body: &[u8]) -> Vec<u8> {
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut bytes = format!("{} {path} HTTP/1.1\r\n", parts.method).into_bytes();
    let mut put = |name: &str, value: &[u8]| {
        bytes.extend(name.as_bytes());
        bytes.extend(b": ");
        bytes.extend(value);
        bytes.extend(b"\r\n");
    };
    if !parts.headers.contains_key(HOST) {
        let host = parts.uri.authority().map_or("localhost", |authority| authority.as_str());
        put("host", host.as_bytes());
    }
    let hop = hops(&parts.headers);
    for (name, value) in parts.headers.iter().filter(|(name, _)| !hop(name)) {
        put(name.as_str(), value.as_bytes());
    }
    if !body.is_empty() || parts.headers.contains_key(CONTENT_LENGTH) {
        put("content-length", body.len().to_string().as_bytes());
    }
    put("connection", b"close");
    bytes.extend(b"\r\n");
    bytes.extend(body);
    bytes
}

/// The status, headers and body of an answer to such a request; `None` if it is invalid or
/// incomplete.
pub(crate) fn answer(
    method: &Method,
    mut bytes: &[u8],
) -> Option<(StatusCode, HeaderMap, Vec<u8>)> {
    loop {
        let mut lines = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut head = httparse::Response::new(&mut lines);
        let Ok(Status::Complete(end)) = head.parse(bytes) else { return None };
        let body = &bytes[end..];
        let status = StatusCode::from_u16(head.code?).ok()?;
        // Interim answers.
        if status.is_informational() {
            bytes = body;
            continue;
        }
        let (mut headers, mut chunked, mut length) = (HeaderMap::new(), false, None);
        for line in head.headers.iter() {
            let name = HeaderName::from_bytes(line.name.as_bytes()).ok()?;
            let text = || std::str::from_utf8(line.value).ok();
            if name == TRANSFER_ENCODING {
                chunked = text()?.to_ascii_lowercase().ends_with("chunked");
            } else if name == CONTENT_LENGTH {
                length = Some(text()?.parse::<usize>().ok()?);
            } else if !HOPS.contains(&name) {
                headers.append(name, HeaderValue::from_bytes(line.value).ok()?);
            }
        }
        // Such an answer has no body, regardless of its head (RFC 9112, 6.3).
        let bare = method == Method::HEAD
            || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        let body = match (chunked, length) {
            _ if bare => Vec::new(),
            (true, _) => joined(body)?,
            (false, Some(length)) => body.get(..length)?.to_vec(),
            (false, None) => body.to_vec(),
        };
        return Some((status, headers, body));
    }
}

/// Chunks without their framing.
fn joined(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let Ok(Status::Complete((begin, size))) = httparse::parse_chunk_size(rest) else {
            return None;
        };
        let size = usize::try_from(size).ok()?;
        rest = &rest[begin..];
        if size == 0 {
            return Some(body);
        }
        body.extend(rest.get(..size)?);
        rest = rest[size..].strip_prefix(b"\r\n")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(bytes: &[u8]) -> Option<(StatusCode, HeaderMap, Vec<u8>)> {
        super::answer(&Method::GET, bytes)
    }

    #[test]
    fn a_body_that_breaks_off_is_no_answer_and_one_that_cannot_be_is_not_missed() {
        let short = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell";
        assert!(answer(short).is_none());
        let (_, _, body) = answer(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello!").unwrap();
        assert_eq!(body, b"hello");
        let head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n";
        let (status, _, body) = super::answer(&Method::HEAD, head).unwrap();
        assert_eq!((status, body.len()), (StatusCode::OK, 0));
        let unchanged = b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n";
        assert!(answer(unchanged).is_some());
    }

    #[test]
    fn a_request_is_one_request_and_an_answer_is_its_parts() {
        let sent = axum::http::Request::builder()
            .method("POST")
            .uri("http://there/a?b=c")
            .header("x-y", "z")
            .header("transfer-encoding", "chunked")
            .header("connection", "keep-alive, X-Own")
            .header("x-own", "of this connection")
            .header("te", "trailers")
            .body(())
            .unwrap();
        let (parts, ()) = sent.into_parts();
        let bytes = String::from_utf8(request(&parts, b"hello")).unwrap();
        assert_eq!(
            bytes,
            "POST /a?b=c HTTP/1.1\r\nhost: there\r\nx-y: z\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello"
        );
        let said = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\nA: b\r\nA: c\r\nTransfer-Encoding: chunked\r\n\r\n3;q\r\nabc\r\n2\r\nde\r\n0\r\n\r\n";
        let (status, headers, body) = answer(said).unwrap();
        assert_eq!((status.as_u16(), &body[..]), (404, &b"abcde"[..]));
        assert_eq!(headers.get_all("a").iter().count(), 2);
        assert!(!headers.contains_key("transfer-encoding"));
        // A value need not be text.
        let (_, headers, _) = answer(b"HTTP/1.0 200 OK\r\nX: \xff \r\n\r\n").unwrap();
        assert_eq!(headers["x"].as_bytes(), b"\xff");
        for bad in [
            &b"hello"[..],
            b"HTTP/1.1 200 OK\r\n",
            b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
            b"HTTP/1.1 2000 OK\r\n\r\n",
            b"HTTP/1.1 099 Early\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        ] {
            assert!(answer(bad).is_none(), "{}", String::from_utf8_lossy(bad));
        }
        assert!(
            answer(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx")
                .is_none()
        );
    }
}
