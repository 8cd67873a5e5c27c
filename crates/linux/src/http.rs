//! Whether the bytes of an answer are a whole HTTP answer: so that a call waits for what is still to come, and for no more.

/// Whether `answer` is all that `request` will be answered with. Bytes that are no HTTP are never whole.
pub(crate) fn is_whole(request: &[u8], mut answer: &[u8]) -> bool {
    loop {
        let Some(end) = find(answer, b"\r\n\r\n") else { return false };
        let (head, body) = (&answer[..end], &answer[end + 4..]);
        let mut lines = head.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii);
        let first = lines.next().unwrap_or_default();
        if !first.starts_with(b"HTTP/1.") {
            return false;
        }
        match first.get(9..12) {
            // A switch of protocols is the last of this one.
            Some(b"101" | b"204" | b"304") => return true,
            Some(code) if code.starts_with(b"1") => {
                answer = body;
                continue;
            }
            _ => {}
        }
        if request.starts_with(b"HEAD ") {
            return true;
        }
        let (mut length, mut chunked) = (None, false);
        for line in lines {
            let Some(colon) = line.iter().position(|&byte| byte == b':') else { continue };
            let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
            if name.eq_ignore_ascii_case(b"content-length") {
                length = std::str::from_utf8(value).ok().and_then(|value| value.parse().ok());
            } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
                chunked = value.to_ascii_lowercase().ends_with(b"chunked");
            }
        }
        // Without either it lasts until the connection ends.
        return match (chunked, length) {
            (true, _) => chunks_end(body),
            (false, Some(length)) => body.len() >= length,
            (false, None) => false,
        };
    }
}

/// Whether chunks come to their end.
fn chunks_end(mut body: &[u8]) -> bool {
    loop {
        let Some(line) = find(body, b"\r\n") else { return false };
        let size = body[..line].split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
        let size = std::str::from_utf8(size).ok().and_then(|s| usize::from_str_radix(s, 16).ok());
        let Some(size) = size else { return false };
        let rest = &body[line + 2..];
        if size == 0 {
            // Trailers, and an empty line.
            return rest.starts_with(b"\r\n") || find(rest, b"\r\n\r\n").is_some();
        }
        match size.checked_add(2).and_then(|next| rest.get(next..)) {
            Some(next) => body = next,
            None => return false,
        }
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

#[cfg(test)]
mod tests {
    use super::*;

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
