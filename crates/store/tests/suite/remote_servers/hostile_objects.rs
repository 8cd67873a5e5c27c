//! Object stores whose answers have no end.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use afresh_store::remote::{GRACE_PERIOD, Remote, RemoteError, RetryPolicy};
use afresh_store::{Encoding, Sha256};

/// The head of an answer, and the bytes that follow it again and again. An empty piece ends it.
type Answer = (String, Vec<u8>);

/// A store that sends a piece until its client disconnects.
struct Endless {
    address: SocketAddr,
    sent: Arc<AtomicU64>,
}

impl Endless {
    /// It ends with the process of the test.
    fn new(answer: impl Fn(&str) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, sent) = (listener.local_addr().unwrap(), Arc::new(AtomicU64::new(0)));
        let (answer, count) = (Arc::new(answer), sent.clone());
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (answer, count) = (answer.clone(), count.clone());
                std::thread::spawn(move || serve(client, &*answer, &count));
            }
        });
        Self { address, sent }
    }

    fn remote(&self) -> Remote {
        self.remote_with(&[("aws_access_key_id", "a"), ("aws_secret_access_key", "b")])
    }

    fn remote_with(&self, credentials: &[(&str, &str)]) -> Remote {
        let retry = RetryPolicy {
            attempts: 2,
            timeout: Duration::from_secs(60),
            pause: Duration::from_millis(1),
            outage: Duration::ZERO,
        };
        let endpoint = format!("http://{}", self.address);
        let place = [("aws_endpoint", endpoint.as_str()), ("aws_region", "us-east-1")];
        let options = [&place[..], credentials].concat();
        Remote::open_with("s3://bucket/p", retry, &options).unwrap()
    }

    /// Checks that each of two attempts read a bounded part.
    fn check_sent(&self) {
        let sent = self.sent.load(Ordering::Relaxed);
        assert!(sent < 96 << 20, "{sent} bytes were taken");
    }
}

fn serve(mut client: TcpStream, answer: &dyn Fn(&str) -> Answer, sent: &AtomicU64) {
    let (mut text, mut buffer) = (String::new(), [0; 4096]);
    while !text.contains("\r\n\r\n") {
        match client.read(&mut buffer) {
            Ok(n @ 1..) => text.push_str(&String::from_utf8_lossy(&buffer[..n])),
            _ => return,
        }
    }
    let lower = text.to_lowercase();
    let length = lower.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let mut rest = length.unwrap_or(0_u64).saturating_sub(body.len() as u64);
    while rest > 0
        && let Ok(n @ 1..) = client.read(&mut buffer)
    {
        rest = rest.saturating_sub(n as u64);
    }
    let (head, piece) = answer(head);
    if client.write_all(format!("HTTP/1.1 {head}\r\n\r\n").as_bytes()).is_err() {
        return;
    }
    while !piece.is_empty() && client.write_all(&piece).is_ok() {
        sent.fetch_add(piece.len() as u64, Ordering::Relaxed);
    }
}

/// An answer of this length.
fn whole(status: &str, body: &str) -> Answer {
    (
        format!("{status}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len()),
        Vec::new(),
    )
}

#[test]
fn an_error_of_an_object_store_without_end_is_cut_off() {
    // The second one announces a length that no host can allocate.
    for head in ["500 No", "400 No\r\nContent-Length: 9000000000000000000"] {
        let store = Endless::new(move |_| (head.to_owned(), vec![b' '; 1 << 20]));
        let start = Instant::now();
        assert!(store.remote().load("x").is_err());
        assert!(start.elapsed() < Duration::from_secs(60));
        store.check_sent();
    }
}

const LIST: &str = "<?xml version=\"1.0\"?><ListBucketResult>";

#[test]
fn a_list_of_objects_without_end_is_cut_off() {
    let entry = "<Contents><Key>p/blobs/sha256/a</Key><Size>1</Size>\
                 <LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>";
    let store = Endless::new(move |request| match request.starts_with("HEAD") {
        true => whole("404 Not Found", ""),
        false => (format!("200 OK\r\n\r\n{LIST}"), entry.repeat(1 << 12).into_bytes()),
    });
    assert!(store.remote().gc(None, GRACE_PERIOD).is_err());
    store.check_sent();
}

/// Each page of the list has another one behind it.
#[test]
fn a_journal_of_turns_without_end_is_refused() {
    let journal = "7".repeat(64);
    let config = Sha256::of(b"{}");
    let manifest = format!(
        r#"{{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","artifactType":"application/vnd.afresh.snapshot.v1","config":{{"mediaType":"application/vnd.afresh.session.config.v1+json","digest":"{config}","size":2}},"layers":[],"annotations":{{"vnd.afresh.session.journal":"{journal}"}}}}"#
    );
    let id = Sha256::of(manifest.as_bytes());
    let pages = Arc::new(AtomicU64::new(0));
    let asked = pages.clone();
    let store = Endless::new(move |request| {
        let line = request.lines().next().unwrap();
        if line.contains("list-type") {
            let page = pages.fetch_add(1, Ordering::Relaxed);
            let entries: String = (0..1000).map(|entry| format!(
                "<Contents><Key>p/journals/{journal}/{:08}</Key><Size>0</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>",
                page * 1000 + entry,
            )).collect();
            return whole(
                "200 OK",
                &format!(
                    "{LIST}{entries}<IsTruncated>true</IsTruncated><NextContinuationToken>{page}</NextContinuationToken></ListBucketResult>"
                ),
            );
        }
        match line {
            line if line.contains(&id.hex()) => whole(
                "200 OK\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nETag: \"a\"",
                &manifest,
            ),
            line if line.contains(&config.hex()) => {
                whole("200 OK\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nETag: \"b\"", "{}")
            }
            _ => whole("404 Not Found", ""),
        }
    });
    let error = store.remote().load(&id.to_string()).unwrap_err();
    assert!(matches!(error, RemoteError::Protocol { .. }), "{error}");
    assert!(error.to_string().contains("more than"), "{error}");
    assert!(asked.load(Ordering::Relaxed) < 100);
}

/// The metadata service of a machine, or one that took its address.
#[test]
fn credentials_without_end_are_cut_off() {
    let store = Endless::new(|request| match request.starts_with("PUT") {
        true => whole("200 OK", "token"),
        false => ("200 OK".to_owned(), vec![b' '; 1 << 20]),
    });
    let endpoint = format!("http://{}", store.address);
    let remote = store.remote_with(&[("aws_metadata_endpoint", &endpoint)]);
    assert!(remote.load("x").is_err());
    assert!(store.sent.load(Ordering::Relaxed) > 0);
    store.check_sent();
}

/// A store keeps the parts of an upload until it is given up.
#[test]
fn an_upload_whose_last_part_is_refused_is_given_up() {
    let removed = Arc::new(AtomicU64::new(0));
    let count = removed.clone();
    let store = Endless::new(move |request| {
        let line = request.lines().next().unwrap();
        match line.split(' ').next().unwrap() {
            "POST" if line.contains("uploads") => whole(
                "200 OK",
                "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
            ),
            "PUT" if line.contains("partNumber") => whole("400 Bad Request", ""),
            "PUT" => whole("200 OK\r\nETag: \"a\"", ""),
            "DELETE" if line.contains("uploadId=u") => {
                count.fetch_add(1, Ordering::Relaxed);
                whole("204 No Content", "")
            }
            _ => whole("404 Not Found", ""),
        }
    });
    let dir = tempfile::tempdir().unwrap();
    // Two parts.
    let (here, snapshot, _) = super::local(dir.path(), 1, 3000);
    let pushed = store.remote().push(&here, &snapshot, "x", Encoding::Raw, &mut |_| {});
    assert!(matches!(pushed, Err(RemoteError::Object { .. })), "{pushed:?}");
    assert_eq!(removed.load(Ordering::Relaxed), 1);
}

#[test]
fn a_password_in_an_address_is_refused_and_not_shown() {
    for scheme in ["s3", "gs", "az", "oci", "ftp"] {
        let address = format!("{scheme}://user:secret@host/a");
        let refused = Remote::open(&address, RetryPolicy::default()).unwrap_err();
        assert!(matches!(refused, RemoteError::Url { .. }), "{refused}");
        assert!(!format!("{refused} {refused:?}").contains("secret"), "{refused:?}");
    }
}
