//! The parts of HTTP that a caller needs: a short form of a request, and whether the bytes of an
//! answer are a whole one, so that a call waits for the rest and for no more.

use std::borrow::Cow;

/// Header fields that an answer may have.
const FIELDS: usize = 128;

/// A whole request; of one in short, `GET /path`, it is made.
pub(crate) fn in_full(request: &[u8]) -> Cow<'_, [u8]> {
    let short = std::str::from_utf8(request.trim_ascii_end()).ok().filter(|line| {
        let parts = line.split_once(' ');
        parts.is_some_and(|(method, target)| {
            !method.is_empty()
                && method.bytes().all(|c| c.is_ascii_uppercase())
                && target.starts_with('/')
                && target.bytes().all(|c| c.is_ascii_graphic())
        })
    });
    match short {
        Some(line) => format!("{line} HTTP/1.1\r\nHost: localhost\r\n\r\n").into_bytes().into(),
        None => request.into(),
    }
}

/// Whether `answer` is the complete answer to `request`. Bytes that are not HTTP are never whole.
pub(crate) fn is_whole(request: &[u8], mut answer: &[u8]) -> bool {
    loop {
        let mut fields = [httparse::EMPTY_HEADER; FIELDS];
        let mut head = httparse::Response::new(&mut fields);
        let Ok(httparse::Status::Complete(len)) = head.parse(answer) else { return false };
        let body = &answer[len..];
        match head.code {
            // A switch of protocols is the last of this one.
            Some(101 | 204 | 304) => return true,
            Some(100..200) => {
                answer = body;
                continue;
            }
            _ => {}
        }
        if request.starts_with(b"HEAD ") {
            return true;
        }
        let field = |name: &str| {
            let mut named =
                head.headers.iter().filter(|field| field.name.eq_ignore_ascii_case(name));
            named.next_back().map(|field| field.value.trim_ascii())
        };
        // Without either it lasts until the connection ends.
        return match field("transfer-encoding") {
            Some(coding) if coding.to_ascii_lowercase().ends_with(b"chunked") => chunks_end(body),
            _ => {
                let length =
                    field("content-length").and_then(|value| std::str::from_utf8(value).ok());
                let length = length.and_then(|length| length.parse().ok());
                length.is_some_and(|length: usize| body.len() >= length)
            }
        };
    }
}

/// Whether chunks come to their end.
fn chunks_end(mut body: &[u8]) -> bool {
    while let Ok(httparse::Status::Complete((start, size))) = httparse::parse_chunk_size(body) {
        let rest = &body[start..];
        if size == 0 {
            // Trailers, and an empty line.
            let mut fields = [httparse::EMPTY_HEADER; FIELDS];
            return matches!(
                httparse::parse_headers(rest, &mut fields),
                Ok(httparse::Status::Complete(_))
            );
        }
        let next = usize::try_from(size).ok().and_then(|size| size.checked_add(2));
        match next.and_then(|next| rest.get(next..)) {
            Some(next) => body = next,
            None => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_in_short_is_made_whole_and_others_are_left_alone() {
        assert_eq!(&*in_full(b"GET /a?b\n"), b"GET /a?b HTTP/1.1\r\nHost: localhost\r\n\r\n");
        for other in
            [&b"GET / HTTP/1.1\r\n\r\n"[..], b"get /", b"GET there", b"GET /\r\nX: /", b"", b"\xff"]
        {
            assert_eq!(&*in_full(other), other);
        }
    }

    #[test]
    fn an_answer_is_whole_with_its_last_byte() {
        let get = b"GET / HTTP/1.1\r\n\r\n";
        let answers: [&[u8]; 5] = [
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX: y\r\n\r\nhello",
            b"HTTP/1.0 404 No\r\ncontent-length:0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\nA\r\n0123456789\r\n0\r\n\r\n",
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\nA: b\r\n\r\n",
        ];
        for answer in answers {
            for len in 0..answer.len() {
                let part = &answer[..len];
                assert!(!is_whole(get, part), "{:?}", String::from_utf8_lossy(part));
            }
            assert!(is_whole(get, answer), "{:?}", String::from_utf8_lossy(answer));
        }
        assert!(is_whole(
            b"HEAD / HTTP/1.1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
        ));
        for never in [
            &b"hello\n"[..],
            b"HTTP/1.1 200 OK\r\n\r\nuntil it ends",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        ] {
            assert!(!is_whole(get, never));
        }
    }
}
