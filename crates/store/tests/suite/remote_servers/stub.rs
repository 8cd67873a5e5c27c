//! An HTTP server that answers whatever a test wants.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Serves requests in turn, each on a new connection.
pub(crate) struct Stub {
    pub(crate) address: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<()>>,
}

impl Stub {
    /// `answer` gets a request's head (and what of its body came with it) and gives an answer, as
    /// [`answer`] makes it.
    pub(crate) fn new(answer: impl Fn(&str) -> Vec<u8> + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let shared = requests.clone();
        let thread = std::thread::spawn(move || {
            for mut client in listener.incoming().flatten() {
                client.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
                let mut text = String::new();
                let mut buffer = [0; 4096];
                while !text.contains("\r\n\r\n") {
                    match client.read(&mut buffer) {
                        Ok(n @ 1..) => text.push_str(&String::from_utf8_lossy(&buffer[..n])),
                        _ => break,
                    }
                }
                if text.starts_with("STOP") {
                    return;
                }
                let answer = answer(&text);
                shared.lock().unwrap().push(text);
                // A client that has read enough disconnects.
                let _ = client.write_all(&answer);
            }
        });
        Self { address, requests, thread: Some(thread) }
    }

    /// The requests so far; forgets them.
    pub(crate) fn requests(&self) -> Vec<String> {
        std::mem::take(&mut *self.requests.lock().unwrap())
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        if let Ok(mut stream) = TcpStream::connect(self.address) {
            // It ends at this, or has ended.
            let _ = stream.write_all(b"STOP\r\n\r\n");
        }
        if let Some(thread) = self.thread.take() {
            // A panic in it shows as a failed request.
            let _ = thread.join();
        }
    }
}

/// An answer with more lines for its head.
pub(crate) fn answer(status: &str, head: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{head}\r\n");
    [head.as_bytes(), body].concat()
}
