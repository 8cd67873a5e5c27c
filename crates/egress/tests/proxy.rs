//! The proxy between a guest's bytes and a server that behaves well or badly, without TLS.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use afresh_egress::{ConnectionLog, DestinationQuery, EgressPolicy, NetGrant, ProxyQuota, Route};

/// A server that serves each of its connections with `serve`.
fn server(serve: impl Fn(TcpStream) + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // It ends with the test's process.
    std::thread::spawn(move || listener.incoming().flatten().for_each(serve));
    port
}

/// The head of a request, line by line.
fn head(stream: &mut BufReader<TcpStream>) -> Vec<String> {
    let lines = stream.lines().map_while(Result::ok);
    lines.take_while(|line| !line.is_empty()).collect()
}

/// The guest's end of a connection to a server at `port`, with a rule.
fn guest(port: u16) -> UnixStream {
    guest_with(port, r#""methods": ["GET", "HEAD", "POST"], "headers": {"X-Own": "1"}"#)
}

/// As [`guest`], with these limits of the rule.
fn guest_with(port: u16, limits: &str) -> UnixStream {
    let rule = format!(r#"{{"to": "a.test:80=127.0.0.1:{port}", {limits}}}"#);
    let policy: EgressPolicy = [rule.parse::<NetGrant>().unwrap()].into_iter().collect();
    let Some(Route::Proxied(server)) = policy.route(DestinationQuery::Name("a.test"), 80) else {
        panic!("no proxy");
    };
    let guest = server.serve(&ConnectionLog::named("test"), &ProxyQuota::default()).unwrap();
    guest.set_nonblocking(false).unwrap();
    guest
}

/// Sends `text`, and receives until the end.
fn all(port: u16, text: &str) -> String {
    all_of(guest(port), text)
}

fn all_of(mut guest: UnixStream, text: &str) -> String {
    guest.write_all(text.as_bytes()).unwrap();
    guest.shutdown(Shutdown::Write).unwrap();
    let mut out = Vec::new();
    // A refusal may be followed by a reset.
    let _ = guest.read_to_end(&mut out);
    String::from_utf8(out).unwrap()
}

/// A server that answers each request on a connection with `answer`, and reports what it was sent.
fn answering(answer: &'static str) -> (u16, Receiver<Vec<String>>) {
    let (sent, seen) = channel();
    let port = server(move |stream| {
        let mut stream = BufReader::new(stream);
        loop {
            let lines = head(&mut stream);
            if lines.is_empty() {
                return;
            }
            let _ = sent.send(lines);
            if stream.get_mut().write_all(answer.as_bytes()).is_err() || answer.contains("close") {
                return;
            }
        }
    });
    (port, seen)
}

const GET: &str = "GET /a HTTP/1.1\r\nHost: a.test\r\n\r\n";

#[test]
fn requests_that_come_together_are_each_checked_and_answered_in_turn() {
    let (port, seen) = answering("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    let both =
        format!("{GET}GET /./b HTTP/1.1\r\nHost: a.test\r\nX_Own: 2\r\nConnection: X-Own\r\n\r\n");
    let out = all(port, &format!("{both}PUT /c HTTP/1.1\r\nHost: a.test\r\n\r\n"));
    assert_eq!(out.matches("HTTP/1.1 200 OK").count(), 2, "{out}");
    assert!(
        out.contains("403 Forbidden") && out.contains("no rule allows PUT /c at a.test"),
        "{out}"
    );
    let lines: Vec<Vec<String>> = seen.try_iter().collect();
    let expected =
        |path| vec![format!("GET {path} HTTP/1.1"), "host: a.test".into(), "x-own: 1".into()];
    assert_eq!(lines, [expected("/a"), expected("/b")]);
}

/// Requests that only look allowed reach no server, also behind one that is allowed.
#[test]
fn a_refused_request_behind_an_allowed_one_never_reaches_the_server() {
    let (port, seen) = answering("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    let rule = r#""methods": ["GET", "POST"], "paths": ["/v1/**"]"#;
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: a.test\r\n\r\n");
    let refused = [
        // Other paths, as a server could understand them.
        get("/admin"),
        get("/v1/../admin"),
        get("/v1/%2e%2e/admin"),
        get("/v1/.%2E/admin"),
        get("/v1/..%2fadmin"),
        get("/v1/%2e%2e%2fadmin"),
        get("/v1/%252e%252e/admin"),
        get("/v1/..;/admin"),
        get("/v1/..\\admin"),
        get("/v1//../admin"),
        get("//v1/a"),
        get("/v1//a"),
        get("/V1/a"),
        get("/v1%2fa"),
        // Other hosts and ports.
        get("http://b.test/v1/a"),
        get("http://a.test/v1/a"),
        get("//b.test/v1/a"),
        "GET /v1/a HTTP/1.1\r\nHost: b.test\r\n\r\n".to_owned(),
        "GET /v1/a HTTP/1.1\r\nHost: a.test:81\r\n\r\n".to_owned(),
        "GET /v1/a HTTP/1.1\r\nHost: a.test@b.test\r\n\r\n".to_owned(),
        "GET /v1/a HTTP/1.1\r\nHost: a.test\r\nHost: b.test\r\n\r\n".to_owned(),
        "GET /v1/a HTTP/1.1\r\n\r\n".to_owned(),
        "CONNECT a.test:22 HTTP/1.1\r\nHost: a.test:22\r\n\r\n".to_owned(),
        "CONNECT a.test:80 HTTP/1.1\r\nHost: a.test\r\n\r\n".to_owned(),
        "CONNECT /v1/a HTTP/1.1\r\nHost: a.test\r\n\r\n".to_owned(),
        // Other methods.
        "DELETE /v1/a HTTP/1.1\r\nHost: a.test\r\n\r\n".to_owned(),
        "get /v1/a HTTP/1.1\r\nHost: a.test\r\n\r\n".to_owned(),
        "GET /v1/a HTTP/1.1\r\nHost: a.test\r\nX-HTTP-Method: DELETE\r\n\r\n".to_owned(),
    ];
    for request in &refused {
        let out = all_of(guest_with(port, rule), &format!("{}{request}", get("/v1/first")));
        assert!(out.starts_with("HTTP/1.1 200 OK"), "{request}: {out}");
        let refusals = ["HTTP/1.1 400 ", "HTTP/1.1 403 ", "HTTP/1.1 421 ", "HTTP/1.1 501 "];
        assert!(refusals.iter().any(|refusal| out.contains(refusal)), "{request}: {out}");
        let lines: Vec<_> = seen.try_iter().map(|lines| lines[0].clone()).collect();
        assert_eq!(lines, ["GET /v1/first HTTP/1.1"], "{request}");
    }
    // Behind a body as well, also one whose end two servers could see at different places.
    for end in ["0\r\n\r\n", "0;a=\n\r\n", "0\n\r\n", "0\r\nX: 1\r\n\r\n"] {
        let head = "POST /v1/in HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n";
        all_of(guest_with(port, rule), &format!("{head}{end}{}", get("/admin")));
        assert!(seen.try_iter().flatten().all(|line| !line.contains("/admin")), "{end:?}");
    }
}

#[test]
fn every_framing_of_a_response_reaches_the_guest() {
    let (port, _seen) = answering("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil close");
    let out = all(port, GET);
    assert!(
        out.contains("transfer-encoding: chunked") && out.contains("until close\r\n0\r\n"),
        "{out}"
    );
    let out = all(port, "GET /a HTTP/1.0\r\nHost: a.test\r\n\r\n");
    assert!(out.ends_with("\r\n\r\nuntil close") && !out.contains("chunked"), "{out}");
    let (port, _seen) =
        answering("HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n");
    let out = all(port, "HEAD /a HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n");
    assert!(out.contains("content-length: 5") && !out.contains("103"), "{out}");
    let (port, _seen) = answering("HTTP/1.1 304 Not Modified\r\n\r\n");
    assert_eq!(all(port, &format!("{GET}{GET}")).matches("304").count(), 2);
}

#[test]
fn a_server_that_breaks_off_is_no_complete_response() {
    let (port, _seen) =
        answering("HTTP/1.1 200 OK\r\nContent-Length: 50\r\nConnection: close\r\n\r\nshort");
    let out = all(port, GET);
    assert!(out.ends_with("short") && out.contains("content-length: 50"), "{out}");
    let (port, _seen) =
        answering("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: close\r\n\r\n5\r\nsho");
    let out = all(port, GET);
    assert!(!out.contains("0\r\n\r\n"), "{out}");
    // Also within the line of a chunk.
    let (port, _seen) = answering(
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: close\r\n\r\n5\r\nshort\r\n3",
    );
    let out = all(port, GET);
    assert!(out.contains("short") && !out.contains("0\r\n\r\n"), "{out}");
    for (answer, part) in [
        ("HTTP/1.1 101 Switching\r\nConnection: close\r\n\r\n", "another protocol"),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\nX: close\r\n\r\n",
            "two lengths",
        ),
        ("nonsense: close\r\n\r\n", "no head of HTTP/1.1"),
    ] {
        let (port, _seen) = answering(answer);
        let out = all(port, GET);
        assert!(out.starts_with("HTTP/1.1 502") && out.contains(part), "{answer:?}: {out}");
    }
    // No server at all.
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    assert!(all(closed, GET).starts_with("HTTP/1.1 502"));
}

/// A server that reads and writes at once gets a body of any length, and its response passes as
/// well.
#[test]
fn bodies_pass_in_both_directions_at_once() {
    let port = server(|stream| {
        let mut writer = stream.try_clone().unwrap();
        let mut reader = BufReader::new(stream);
        head(&mut reader);
        writer.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n").unwrap();
        let mut buffer = vec![0; 10_000];
        let mut left = 3_000_000;
        while left > 0 {
            let len = reader.read(&mut buffer).unwrap();
            writer.write_all(&buffer[..len]).unwrap();
            left -= len;
        }
    });
    let guest = guest(port);
    let mut writer = guest.try_clone().unwrap();
    let sending = std::thread::spawn(move || {
        writer
            .write_all(b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3000000\r\n\r\n")
            .unwrap();
        (0..300u32).for_each(|piece| writer.write_all(&[piece as u8; 10_000]).unwrap());
    });
    let mut reader = BufReader::new(guest);
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        reader.read_line(&mut line).unwrap();
    }
    let mut body = vec![0; 3_000_000];
    reader.read_exact(&mut body).unwrap();
    assert!(
        body.chunks(10_000)
            .zip(0..300u32)
            .all(|(part, piece)| part.iter().all(|byte| *byte == piece as u8))
    );
    sending.join().unwrap();
}

/// A server that leaves the body of a request unread would take it for the next request.
#[test]
fn a_connection_to_the_server_ends_with_a_request_that_has_a_body() {
    let (port, seen) = answering("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    let hidden = "DELETE /admin HTTP/1.1\r\n\r\n";
    let first = format!(
        "GET /a HTTP/1.1\r\nHost: a.test\r\nContent-Length: {}\r\n\r\n{hidden}",
        hidden.len()
    );
    let out = all(port, &format!("{first}{GET}"));
    assert_eq!(out.matches("HTTP/1.1 200 OK").count(), 2, "{out}");
    let lines: Vec<Vec<String>> = seen.try_iter().collect();
    let is_first = |lines: &&Vec<String>| lines.iter().any(|line| line == "connection: close");
    assert_eq!(lines.iter().filter(is_first).count(), 1, "{lines:?}");
    // The second request came through another connection.
    assert!(lines.iter().any(|lines| lines[0] == "GET /a HTTP/1.1" && !is_first(&lines)));
}

/// A guest that has no more to send after a long body still gets the response, however slowly the
/// server reads.
#[test]
fn half_an_end_after_a_long_body_is_no_end() {
    const LEN: usize = 4 << 20;
    let port = server(|stream| {
        let mut stream = BufReader::with_capacity(512, stream);
        head(&mut stream);
        let mut piece = [0; 512];
        (0..LEN / piece.len()).for_each(|_| stream.read_exact(&mut piece).unwrap());
        stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
    });
    let mut guest = guest(port);
    let mut reader = guest.try_clone().unwrap();
    let head = format!("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: {LEN}\r\n\r\n");
    guest.write_all(head.as_bytes()).unwrap();
    let sending = std::thread::spawn(move || {
        guest.write_all(&vec![7; LEN]).unwrap();
        guest.shutdown(Shutdown::Write).unwrap();
    });
    let mut out = String::new();
    reader.read_to_string(&mut out).unwrap();
    assert!(out.starts_with("HTTP/1.1 200 OK") && out.ends_with("ok"), "{out}");
    sending.join().unwrap();
}

/// A reset closes the guest's end. The server, which has not answered yet, sees the end of its
/// connection.
#[test]
fn nothing_outlives_the_guests_end() {
    let (sent, ended) = channel();
    let port = server(move |stream| {
        let mut stream = BufReader::new(stream);
        sent.send(head(&mut stream).len()).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
        sent.send(0).unwrap();
    });
    let mut guest = guest(port);
    guest.write_all(GET.as_bytes()).unwrap();
    assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Ok(3));
    drop(guest);
    assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Ok(0));
}

/// A server that never ends its interim responses keeps the proxy busy, but not beyond the guest.
#[test]
fn interim_responses_without_end_end_with_the_guest() {
    let (ended, end) = channel();
    let port = server(move |stream| {
        let mut stream = BufReader::new(stream);
        head(&mut stream);
        let interim = "HTTP/1.1 102 Processing\r\n\r\n".repeat(4096);
        while stream.get_mut().write_all(interim.as_bytes()).is_ok() {}
        let _ = ended.send(());
    });
    let mut guest = guest(port);
    guest.write_all(GET.as_bytes()).unwrap();
    assert!(end.recv_timeout(Duration::from_millis(300)).is_err());
    drop(guest);
    end.recv_timeout(Duration::from_secs(60)).unwrap();
}
