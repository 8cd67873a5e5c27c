//! Encryption by a key of KMS: each object that is written asks for it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use afresh_store::Encoding;
use afresh_store::remote::Remote;

use super::local;
use super::servers::{Kind, Server, retry};

const KEY: &str = "alias/afresh-test";

/// The requests that passed through, by connection.
type Recording = Arc<Mutex<Vec<Vec<u8>>>>;

/// Passes connections on to a server, and records what clients send.
fn record(server: SocketAddr) -> (SocketAddr, Recording) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let recording = Recording::default();
    let shared = recording.clone();
    // These threads end with the test program.
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = TcpStream::connect(server) else { continue };
            let (mut answers, mut to_client) =
                (server.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut answers, &mut to_client);
                let _ = to_client.shutdown(Shutdown::Both);
            });
            let mut all = shared.lock().unwrap();
            let number = all.len();
            all.push(Vec::new());
            drop(all);
            let shared = shared.clone();
            std::thread::spawn(move || {
                pass(client, server, |part| {
                    shared.lock().unwrap()[number].extend_from_slice(part);
                })
            });
        }
    });
    (address, recording)
}

fn pass(mut from: TcpStream, mut to: TcpStream, mut each: impl FnMut(&[u8])) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        // Before the server can answer.
        each(&buffer[..read]);
        if to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// The heads of the requests of a connection, in lower case.
fn heads(mut bytes: &[u8]) -> Vec<String> {
    let mut heads = Vec::new();
    while let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
        let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
        let length = length.map_or(0, |length| length.trim().parse().unwrap());
        bytes = bytes.get(end + 4 + length..).unwrap_or_default();
        heads.push(head);
    }
    heads
}

#[test]
fn each_object_is_written_with_the_key_of_kms() {
    let Some(server) = Server::start(Kind::S3) else { return };
    let (address, recording) = record(server.address);
    let (url, mut options) = server.url(address);
    options.push(("aws_server_side_encryption", "aws:kms".to_owned()));
    options.push(("aws_sse_kms_key_id", KEY.to_owned()));
    let options: Vec<_> = options.iter().map(|(key, value)| (*key, value.as_str())).collect();
    let remote = Remote::open_with(&url, retry(), &options).unwrap();
    let dir = tempfile::tempdir().unwrap();
    // Large enough for an upload in parts.
    let (here, snapshot, _) = local(dir.path(), 1, 5000);
    remote.push(&here, &snapshot, "a", Encoding::Raw, &mut |_| {}).unwrap();
    let requests: Vec<String> =
        recording.lock().unwrap().iter().flat_map(|bytes| heads(bytes)).collect();
    // Parts belong to an upload that was begun with the key.
    let begins_upload = |head: &&String| head.starts_with("post ") && head.contains("?uploads");
    let puts_object = |head: &&String| head.starts_with("put ") && !head.contains("partnumber=");
    assert!(requests.iter().any(|head| begins_upload(&head)), "{requests:?}");
    let writes = requests.iter().filter(|head| begins_upload(head) || puts_object(head));
    let mut count = 0;
    for head in writes {
        let has = |line: &str| head.lines().any(|found| found == line);
        assert!(has("x-amz-server-side-encryption: aws:kms"), "{head}");
        assert!(has(&format!("x-amz-server-side-encryption-aws-kms-key-id: {KEY}")), "{head}");
        count += 1;
    }
    assert!(count >= 4, "{requests:?}");
}
