//! Heads of responses, as a server sent them, and as the guest gets them.

use crate::request_head::{BodyFraming, HOP_BY_HOP, MAX_HEAD, MAX_HEADERS, head_end};

/// The head of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ResponseHead {
    pub(crate) status: u16,
    reason: String,
    headers: Vec<(String, Vec<u8>)>,
    pub(crate) framing: BodyFraming,
    /// Whether the server's connection lasts.
    pub(crate) keeps_alive: bool,
    /// Whether it responds to `HEAD`.
    bodiless: bool,
}

/// Whether `input` may have a whole head, or is too long for one. Its first `seen` bytes have no
/// end of a head, and are not searched again.
pub(crate) fn may_have_head(input: &[u8], seen: usize) -> bool {
    input.len() >= MAX_HEAD || head_end(&input[seen.saturating_sub(3)..]).is_some()
}

impl ResponseHead {
    /// Reads the head at the beginning of `bytes`: it and its length, once it is whole. `bodiless`
    /// for the response to `HEAD`.
    pub(crate) fn parse(
        bytes: &[u8],
        bodiless: bool,
    ) -> Result<Option<(Self, usize)>, &'static str> {
        if head_end(&bytes[..bytes.len().min(MAX_HEAD)]).is_none() {
            return if bytes.len() >= MAX_HEAD {
                Err("its head is longer than 64 KiB")
            } else {
                Ok(None)
            };
        }
        let mut space = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut parsed = httparse::Response::new(&mut space);
        let len = match parsed.parse(bytes) {
            Ok(httparse::Status::Complete(len)) => len,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(_) => return Err("its head is no head of HTTP/1.1"),
        };
        let status = parsed.code.unwrap_or_default();
        let (mut size, mut coding) = (None, None);
        let mut keeps_alive = parsed.version == Some(1);
        let mut headers = Vec::new();
        for header in parsed.headers.iter() {
            let name = header.name.to_ascii_lowercase();
            let text = || String::from_utf8_lossy(header.value).trim().to_ascii_lowercase();
            match &*name {
                "content-length" => {
                    let length = text().parse::<u64>().map_err(|_| "its length is invalid")?;
                    if size.replace(length).is_some_and(|other| other != length) {
                        return Err("it has two lengths");
                    }
                }
                "transfer-encoding" if coding.replace(text()).is_some() => {
                    return Err("it has two transfer codings");
                }
                "connection" if text().split(',').any(|word| word.trim() == "close") => {
                    keeps_alive = false
                }
                _ => {}
            }
            if !HOP_BY_HOP.contains(&&*name) {
                headers.push((header.name.to_owned(), header.value.to_vec()));
            }
        }
        let framing = match (coding.as_deref(), size) {
            _ if bodiless || status < 200 || matches!(status, 204 | 304) => BodyFraming::Length(0),
            (Some("chunked"), _) => BodyFraming::Chunked,
            (Some(_), _) => return Err("its transfer coding is not `chunked`"),
            (None, Some(size)) => BodyFraming::Length(size),
            (None, None) => BodyFraming::UntilClose,
        };
        keeps_alive &= framing != BodyFraming::UntilClose;
        // The length that a response to `GET` would have. No body follows.
        if bodiless && let Some(size) = size {
            headers.push(("content-length".to_owned(), size.to_string().into_bytes()));
        }
        let reason = parsed.reason.unwrap_or_default().to_owned();
        Ok(Some((Self { status, reason, headers, framing, keeps_alive, bodiless }, len)))
    }

    /// The head for the guest. `framing` is that of the body that follows, if a length or chunks
    /// say so.
    pub(crate) fn to_sent(&self, chunked: bool, closes: bool) -> Vec<u8> {
        let mut out = format!("HTTP/1.1 {} {}\r\n", self.status, self.reason).into_bytes();
        for (name, value) in &self.headers {
            out.extend([name.as_bytes(), b": ", value, b"\r\n"].concat());
        }
        let has_body = !self.bodiless && !matches!(self.status, 204 | 304);
        let has_length = self.headers.iter().any(|(name, _)| name == "content-length");
        match self.framing {
            BodyFraming::Length(size) if has_body && !has_length => {
                out.extend(format!("content-length: {size}\r\n").into_bytes());
            }
            BodyFraming::Length(_) => {}
            BodyFraming::Chunked | BodyFraming::UntilClose if chunked => {
                out.extend(b"transfer-encoding: chunked\r\n");
            }
            BodyFraming::Chunked | BodyFraming::UntilClose => {}
        }
        if closes {
            out.extend(b"connection: close\r\n");
        }
        out.extend(b"\r\n");
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_head_is_found_in_new_bytes() {
        let head = b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n";
        for seen in 0..head.len() {
            assert!(!may_have_head(&head[..seen], seen.saturating_sub(1)), "{seen}");
            assert!(may_have_head(head, seen), "{seen}");
        }
        // Earlier bytes are not searched.
        let (long, seen) = ([head, &[b'a'; 100][..]].concat(), head.len() + 50);
        assert!(may_have_head(&long, 0) && !may_have_head(&long, seen));
        assert!(may_have_head(&[b'a'; MAX_HEAD], MAX_HEAD - 1));
    }

    #[test]
    fn the_framing_of_a_response_is_that_of_the_standard() {
        let parse = |lines: &str, bodiless| {
            ResponseHead::parse(format!("HTTP/1.1 {lines}\r\n\r\n").as_bytes(), bodiless)
        };
        let framing = |lines: &str| parse(lines, false).unwrap().unwrap().0.framing;
        assert_eq!(framing("200 OK\r\nContent-Length: 5"), BodyFraming::Length(5));
        assert_eq!(framing("200 OK\r\nTransfer-Encoding: Chunked"), BodyFraming::Chunked);
        assert_eq!(framing("200 OK"), BodyFraming::UntilClose);
        assert_eq!(framing("304 Not Modified\r\nContent-Length: 5"), BodyFraming::Length(0));
        assert!(parse("200 OK\r\nContent-Length: 5\r\nContent-Length: 6", false).is_err());
        assert!(parse("200 OK\r\nTransfer-Encoding: gzip", false).is_err());
        assert!(parse("what", false).is_err());
        let (head, _) =
            parse("200 OK\r\nContent-Length: 5\r\nConnection: close", true).unwrap().unwrap();
        assert_eq!((head.framing, head.keeps_alive), (BodyFraming::Length(0), false));
        assert_eq!(
            head.to_sent(false, true),
            b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\n"
        );
        let (head, _) = parse("200 OK\r\nTransfer-Encoding: chunked", true).unwrap().unwrap();
        assert_eq!(head.to_sent(false, false), b"HTTP/1.1 200 OK\r\n\r\n");
    }
}
