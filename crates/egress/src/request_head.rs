//! Heads of requests, as a guest sent them.
//!
//! Promises: a head that two servers could frame in different ways is refused, and never repaired:
//! both a length and a transfer coding, two lengths, a folded header, a name with an underscore in
//! place of a hyphen, a bare line feed. Memory is bounded by [`MAX_HEAD`].

use crate::path::RequestTarget;

/// Maximum bytes of a head.
pub const MAX_HEAD: usize = 64 << 10;
/// Maximum headers of a head.
pub(crate) const MAX_HEADERS: usize = 128;

/// Names in lower case, and values.
pub(crate) type HeaderList = Vec<(String, Vec<u8>)>;

/// The framing of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyFraming {
    /// A known number of bytes.
    Length(u64),
    /// Chunks.
    Chunked,
    /// All bytes until the connection ends. No request has it.
    UntilClose,
}

/// The head of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestHead {
    /// Its method.
    pub method: String,
    /// Its target, in normal form.
    pub target: RequestTarget,
    /// The value of `Host`.
    pub host: String,
    /// Headers, without those of this connection alone and `Host`. Names are in lower case.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The framing of its body.
    pub framing: BodyFraming,
    /// Whether the client waits for `100 Continue`.
    pub expects_continue: bool,
    /// Whether the connection lasts after this request.
    pub keeps_alive: bool,
    /// Whether the client speaks HTTP/1.0.
    pub is_old: bool,
}

/// Headers that belong to one connection.
pub(crate) const HOP_BY_HOP: [&str; 9] = [
    "connection",
    "content-length",
    "expect",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];
/// Headers that replace the method or the path of the request line at some servers.
pub(crate) const OVERRIDES: [&str; 7] = [
    "x-http-method",
    "x-http-method-override",
    "x-method-override",
    "x-original-method",
    "x-original-uri",
    "x-original-url",
    "x-rewrite-url",
];

pub(crate) fn is_token(text: &[u8]) -> bool {
    let allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte);
    !text.is_empty() && text.iter().all(allowed)
}

/// Whether a byte may be in the value of a header.
pub(crate) fn is_value_byte(byte: u8) -> bool {
    byte == b'\t' || byte >= b' ' && byte != 0x7f
}

/// The name that servers may take for a header's: in lower case, with hyphens.
pub(crate) fn folded(name: &str) -> String {
    name.to_ascii_lowercase().replace('_', "-")
}

/// Finds the end of a head.
pub(crate) fn head_end(bytes: &[u8]) -> Option<usize> {
    bytes.windows(4).position(|four| four == b"\r\n\r\n").map(|at| at + 4)
}

fn trimmed(value: &[u8]) -> &[u8] {
    let blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let start = value.iter().position(|byte| !blank(byte)).unwrap_or(value.len());
    let end = value.iter().rposition(|byte| !blank(byte)).map_or(start, |at| at + 1);
    &value[start..end]
}

/// The number of a length that has digits alone.
fn length(value: &[u8]) -> Option<u64> {
    let digits = !value.is_empty() && value.len() <= 18 && value.iter().all(u8::is_ascii_digit);
    digits.then(|| value.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0')))
}

/// The headers of a head, line by line.
fn headers(lines: &[&[u8]]) -> Result<Vec<(String, Vec<u8>)>, &'static str> {
    if lines.len() > MAX_HEADERS {
        return Err("it has more than 128 headers");
    }
    let mut all = Vec::new();
    for line in lines {
        if matches!(line.first(), Some(b' ' | b'\t')) {
            return Err("it has a folded header");
        }
        let at = line.iter().position(|byte| *byte == b':').ok_or("a header has no colon")?;
        let (name, value) = (&line[..at], trimmed(&line[at + 1..]));
        if !is_token(name) {
            return Err("the name of a header is invalid");
        }
        if !value.iter().copied().all(is_value_byte) {
            return Err("the value of a header is invalid");
        }
        let name = String::from_utf8_lossy(name).to_ascii_lowercase();
        let meant = folded(&name);
        if OVERRIDES.contains(&&*meant) {
            return Err("it has a header that overrides its method or path");
        }
        if meant != name && (meant == "host" || HOP_BY_HOP.contains(&&*meant)) {
            return Err("it has a header whose name only resembles one that frames it");
        }
        all.push((name, value.to_vec()));
    }
    Ok(all)
}

/// The one value of a header, if there is one.
fn one<'a>(
    headers: &'a [(String, Vec<u8>)],
    name: &str,
    twice: &'static str,
) -> Result<Option<&'a [u8]>, &'static str> {
    let mut found = headers.iter().filter(|(own, _)| own == name).map(|(_, value)| &value[..]);
    let first = found.next();
    if found.next().is_some() { Err(twice) } else { Ok(first) }
}

impl RequestHead {
    /// Reads the head at the beginning of `bytes`: it and its length, once it is whole.
    ///
    /// # Errors
    /// The reason that it is refused.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, &'static str> {
        let end = head_end(&bytes[..bytes.len().min(MAX_HEAD)]);
        let seen = &bytes[..end.unwrap_or(bytes.len()).min(MAX_HEAD)];
        let is_bare = |(at, byte): (usize, &u8)| match byte {
            b'\n' => at == 0 || seen[at - 1] != b'\r',
            b'\r' => seen.get(at + 1).is_some_and(|next| *next != b'\n'),
            byte => *byte == 0,
        };
        if seen.iter().enumerate().any(is_bare) {
            return Err("its head has a bare line feed, a bare carriage return or a zero");
        }
        let Some(end) = end else {
            return if bytes.len() >= MAX_HEAD {
                Err("its head is longer than 64 KiB")
            } else {
                Ok(None)
            };
        };
        let text = &bytes[..end - 4];
        let lines: Vec<&[u8]> = text
            .split(|byte| *byte == b'\n')
            .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
            .collect();
        let words: Vec<&[u8]> = lines[0].split(|byte| *byte == b' ').collect();
        let [method, target, version] = words[..] else {
            return Err("its request line has not three parts");
        };
        let is_old = match version {
            b"HTTP/1.1" => false,
            b"HTTP/1.0" => true,
            _ => return Err("its version is neither HTTP/1.1 nor HTTP/1.0"),
        };
        if !is_token(method) || method.len() > 32 {
            return Err("its method is invalid");
        }
        if method.iter().any(u8::is_ascii_lowercase) {
            return Err("its method is not in upper case");
        }
        let method = String::from_utf8_lossy(method).into_owned();
        if matches!(&*method, "CONNECT" | "TRACE") {
            return Err("CONNECT and TRACE are not served");
        }
        let target = RequestTarget::parse(target)?;
        let headers = headers(&lines[1..])?;
        let host =
            one(&headers, "host", "it has two Host headers")?.ok_or("it has no Host header")?;
        let host = String::from_utf8_lossy(host).into_owned();
        let size = one(&headers, "content-length", "it has two lengths")?;
        let coding = one(&headers, "transfer-encoding", "it has two transfer codings")?;
        let framing = match (size, coding) {
            (Some(_), Some(_)) => return Err("it has both a length and a transfer coding"),
            (None, None) => BodyFraming::Length(0),
            (Some(size), None) => BodyFraming::Length(length(size).ok_or("its length is invalid")?),
            (None, Some(_)) if is_old => return Err("HTTP/1.0 has no transfer codings"),
            (None, Some(coding)) if coding.eq_ignore_ascii_case(b"chunked") => BodyFraming::Chunked,
            (None, Some(_)) => return Err("its transfer coding is not `chunked`"),
        };
        let expects = one(&headers, "expect", "it expects two things")?;
        if expects.is_some_and(|value| !value.eq_ignore_ascii_case(b"100-continue")) {
            return Err("it expects something other than `100-continue`");
        }
        let mut dropped: Vec<String> = HOP_BY_HOP.iter().map(|name| (*name).to_owned()).collect();
        dropped.push("host".to_owned());
        let (mut closes, mut keeps) = (false, false);
        for (_, value) in headers.iter().filter(|(name, _)| name == "connection") {
            for word in value.split(|byte| *byte == b',') {
                let word = String::from_utf8_lossy(trimmed(word)).to_ascii_lowercase();
                match &*word {
                    "close" => closes = true,
                    "keep-alive" => keeps = true,
                    "upgrade" => return Err("it asks for another protocol (Upgrade)"),
                    _ => dropped.push(word),
                }
            }
        }
        if headers.iter().any(|(name, _)| name == "upgrade") {
            return Err("it asks for another protocol (Upgrade)");
        }
        // HTTP/1.0 has no such response.
        let expects_continue = expects.is_some() && !is_old && framing != BodyFraming::Length(0);
        let keeps_alive = !closes && (!is_old || keeps);
        let headers = headers.into_iter().filter(|(name, _)| !dropped.contains(name)).collect();
        let head =
            Self { method, target, host, headers, framing, expects_continue, keeps_alive, is_old };
        Ok(Some((head, end)))
    }

    /// Whether `Host` is this host, at this port.
    #[must_use]
    pub fn is_for(&self, name: &str, port: u16, usual: u16) -> bool {
        let (host, given) = match self.host.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (&*self.host, None),
        };
        let same_port = match given {
            Some(given) => given == port.to_string(),
            None => port == usual,
        };
        host.eq_ignore_ascii_case(name) && same_port
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<Option<(RequestHead, usize)>, &'static str> {
        RequestHead::parse(text.as_bytes())
    }

    #[test]
    fn a_head_is_read_once_it_is_whole() {
        let text = "POST /v1/%61?q HTTP/1.1\r\nHost: A.test:8443\r\nContent-Length: 3\r\nX-One:  1 \r\n\
                    Connection: keep-alive, X-Two\r\nX-Two: 2\r\nExpect: 100-continue\r\n\r\nabc";
        for end in 0..text.len() - 3 {
            assert_eq!(parse(&text[..end]), Ok(None), "{end}");
        }
        let (head, len) = parse(text).unwrap().unwrap();
        assert_eq!(
            (len, &*head.method, &*head.target.to_sent()),
            (text.len() - 3, "POST", "/v1/a?q")
        );
        assert_eq!(head.headers, [("x-one".to_owned(), b"1".to_vec())]);
        assert_eq!((head.framing, head.expects_continue), (BodyFraming::Length(3), true));
        assert!(head.keeps_alive && head.is_for("a.test", 8443, 443));
        assert!(!head.is_for("a.test", 443, 443) && !head.is_for("b.test", 8443, 443));
    }

    #[test]
    fn ambiguous_heads_are_refused() {
        let with = |lines: &str| format!("GET / HTTP/1.1\r\nHost: a.test\r\n{lines}\r\n");
        for lines in [
            "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n",
            "Transfer-Encoding: chunked\r\nContent-Length: 1\r\n",
            "Content-Length: 1\r\nContent-Length: 1\r\n",
            "Content-Length: 1, 1\r\n",
            "Content-Length: +1\r\n",
            "Content-Length: 9999999999999999999999\r\n",
            "Transfer-Encoding: gzip, chunked\r\n",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            "Transfer-Encoding: \u{b}chunked\r\n",
            "Transfer_Encoding: chunked\r\n",
            "Content_Length: 5\r\n",
            "Host: b.test\r\n",
            "X: 1\r\n folded: 2\r\n",
            "X : 1\r\n",
            "X: 1\nY: 2\r\n",
            "X: a\rb\r\n",
            "X: a\0b\r\n",
            "X-HTTP-Method-Override: DELETE\r\n",
            "x_http_method_override: DELETE\r\n",
            "X-Original-URL: /admin\r\n",
            "Upgrade: h2c\r\n",
            "Connection: upgrade\r\n",
            "Expect: 200-maybe\r\n",
            "no colon\r\n",
        ] {
            assert!(parse(&with(lines)).is_err(), "{lines:?}");
        }
        for text in [
            "GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
            "CONNECT a.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n",
            "TRACE / HTTP/1.1\r\nHost: a.test\r\n\r\n",
            "connect a.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n",
            "Trace / HTTP/1.1\r\nHost: a.test\r\n\r\n",
            "OPTIONS * HTTP/1.1\r\nHost: a.test\r\n\r\n",
            "GET  / HTTP/1.1\r\nHost: a.test\r\n\r\n",
            "GET / HTTP/1.1 \r\nHost: a.test\r\n\r\n",
            "GET / HTTP/2.0\r\nHost: a.test\r\n\r\n",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            "GET / HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
            "\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
        ] {
            assert!(parse(text).is_err(), "{text:?}");
        }
        let long = with(&format!("X: {}\r\n", "a".repeat(MAX_HEAD)));
        assert!(parse(&long).is_err());
        assert!(parse(&with(&"X: 1\r\n".repeat(MAX_HEADERS))).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

        /// No bytes make the parser fail otherwise than by an error, and the pieces that they come
        /// in do not matter.
        #[test]
        fn a_prefix_is_never_read_otherwise(
            text in "(GET|POST) /[a-z./%]{0,6} HTTP/1\\.[01]\r\n(Host: a\r\n|Content-Length: [0-9]\r\n|\
                     Transfer-Encoding: chunked\r\n|X: [ -~]{0,4}\r?\n| ){0,5}\r\n",
            cut in any::<prop::sample::Index>(),
        ) {
            let whole = parse(&text);
            match parse(&text[..cut.index(text.len())]) {
                Ok(None) => {}
                Ok(Some(found)) => prop_assert_eq!(Ok(Some(found)), whole),
                Err(_) => prop_assert!(whole.is_err()),
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = RequestHead::parse(&bytes);
        }
    }
}
