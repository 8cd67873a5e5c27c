//! Clients that request something else than a snapshot.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use afresh_pager::images::{ImageAnswer, ImageRequest, RefusalReason};
use afresh_sys::socket;

use super::*;

/// The server's answer to `bytes`. `None` where it closes the connection.
fn answer_to(server: &Server, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Option<ImageAnswer> {
    let mut stream = UnixStream::connect(&server.socket).unwrap();
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    // The server may have closed the connection.
    let _ = socket::send(&stream, bytes, fds);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = [0; 24];
    stream.read_exact(&mut answer).ok()?;
    ImageAnswer::decode(&answer)
}

/// Requests an image until the server reads it, which is at the second request.
fn request_fill(server: &Server, request: &ImageRequest, directory: BorrowedFd<'_>) {
    for _ in 0..2 {
        let answer = answer_to(server, &request.encode(), &[directory]);
        assert_eq!(answer, Some(ImageAnswer::Pending));
    }
}

fn wait_for_failure(server: &Server, count: usize) -> String {
    let end = Instant::now() + TEST_TIMEOUT;
    loop {
        if let Some(failure) = server.failures().get(count - 1) {
            return failure.clone();
        }
        assert!(Instant::now() < end, "the server reports no failure");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn no_client_places_other_content_under_a_digest() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let [good, bad] = [1, 2].map(|n| save(&root, &format!("s{n}"), n, Encoding::Raw));
    let server = Server::start(dir.path(), BUDGET);
    // The digest of one memory with the snapshot of another.
    let memory = good.memory_digest().unwrap();
    let request = ImageRequest { memory, snapshot: bad.id() };
    let directory = socket::directory(&root).unwrap();
    request_fill(&server, &request, directory.as_fd());
    assert!(wait_for_failure(&server, 1).contains("another memory"));
    // A store with other pages under the names of the right blobs.
    let forged = dir.path().join("forged");
    save(&forged, "s1", 1, Encoding::Raw);
    let blob = Store::open(&forged).unwrap().blob_path(good.layers()[0].digest());
    let mut bytes = std::fs::read(&blob).unwrap();
    bytes[PAGE_SIZE + 200] ^= 1;
    std::fs::remove_file(&blob).unwrap();
    std::fs::write(&blob, bytes).unwrap();
    let request = ImageRequest { memory, snapshot: good.id() };
    let directory = socket::directory(&forged).unwrap();
    // The memory was requested before, and from another store it failed.
    let answer = answer_to(&server, &request.encode(), &[directory.as_fd()]);
    assert_eq!(answer, Some(ImageAnswer::Pending));
    wait_for_failure(&server, 2);
    assert_eq!(server.server.charged(), 0);
    // Not read, and not reported, once more.
    let failed = Some(ImageAnswer::Refused(RefusalReason::Failed));
    assert_eq!(answer_to(&server, &request.encode(), &[directory.as_fd()]), failed);
    assert_eq!(server.failures().len(), 2);
    // The right store still brings the right pages.
    let (client, _) = client(&server.socket);
    assert!(has_content(&shared(&client, &good), 1));
}

#[test]
fn other_requests_are_refused_and_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let snapshot = save(&root, "a", 7, Encoding::Raw);
    let server = Server::start(dir.path(), BUDGET);
    let memory = snapshot.memory_digest().unwrap();
    let request = ImageRequest { memory, snapshot: snapshot.id() }.encode();
    let directory = socket::directory(&root).unwrap();
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let fd = directory.as_fd();
    for (bytes, fds) in [
        (&[][..], &[][..]),
        (&request[..71], &[fd]),
        (&[b'x'; 72], &[fd]),
        (&request, &[fd, fd]),
        (&request, &[fd, fd, fd, fd]),
    ] {
        assert_eq!(
            answer_to(&server, bytes, fds),
            None,
            "{} bytes, {} files",
            bytes.len(),
            fds.len()
        );
    }
    let refused = Some(ImageAnswer::Refused(RefusalReason::NoDirectory));
    assert_eq!(answer_to(&server, &request, &[]), refused);
    // A descriptor that is no directory of a store.
    for _ in 0..2 {
        let answer = answer_to(&server, &request, &[file.as_fd()]);
        assert_eq!(answer, Some(ImageAnswer::Pending));
    }
    wait_for_failure(&server, 1);
    assert_eq!(server.server.charged(), 0);
    let (client, _) = client(&server.socket);
    assert!(has_content(&shared(&client, &snapshot), 7));
}

#[test]
fn clients_that_send_nothing_hold_up_no_others_for_long() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = save(&dir.path().join("store"), "a", 7, Encoding::Raw);
    let server = Server::start(dir.path(), BUDGET);
    let mut idle: Vec<_> = (0..60)
        .map(|number| {
            let mut stream = UnixStream::connect(&server.socket).unwrap();
            // Some send a part of a request.
            if number % 2 == 0 {
                let _ = stream.write_all(b"afimage1");
            }
            stream
        })
        .collect();
    let (client, _) = client(&server.socket);
    assert!(has_content(&shared(&client, &snapshot), 7));
    // The server has closed all these connections, and sent nothing.
    for stream in &mut idle {
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        match stream.read(&mut [0]) {
            Ok(received) => assert_eq!(received, 0),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }
}

#[test]
fn an_image_beyond_the_budget_takes_no_memory() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = save(&dir.path().join("store"), "a", 7, Encoding::Raw);
    let server = Server::start(dir.path(), 1 << 20);
    let (client, reports) = client(&server.socket);
    request_failing(&client, &server, &snapshot);
    assert!(wait_for_failure(&server, 1).contains("raise --budget"));
    assert_eq!(server.server.charged(), 0);
    assert!(has_content(open(&snapshot, &client).pages(), 7));
    // One message at most: the server can have forgotten the failure.
    assert!(reports.load(Ordering::Relaxed) <= 1);
}
