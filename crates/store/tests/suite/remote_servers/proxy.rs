//! A TCP proxy that spoils what passes through it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Changes to the answers of a server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    Nothing,
    /// A connection, and each piece of a request, takes so long.
    Latency(Duration),
    /// The connection is reset after so many bytes of answers.
    Reset {
        after: usize,
    },
    /// The connection is closed as if the answer were over, after so many bytes.
    Truncate {
        after: usize,
    },
    /// A bit of every large piece is flipped.
    Flip,
    /// Nothing comes back.
    Silence,
}

struct State {
    fault: Mutex<Fault>,
    /// How many connections may still be spoilt.
    left: AtomicUsize,
    /// Bytes of answers that went through.
    passed: AtomicUsize,
    stop: AtomicBool,
}

/// Passes connections on to a server.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    pub(crate) fn before(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State {
            fault: Mutex::new(Fault::Nothing),
            left: AtomicUsize::new(0),
            passed: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        });
        let shared = state.clone();
        let thread = std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if shared.stop.load(Ordering::Relaxed) {
                    break;
                }
                let state = shared.clone();
                // Ends with its connection; a test does not wait for it.
                std::thread::spawn(move || connection(client, server, &state));
            }
        });
        Self { address, state, thread: Some(thread) }
    }

    /// Spoils the next `times` connections.
    pub(crate) fn be(&self, fault: Fault, times: usize) {
        *self.state.fault.lock().unwrap() = fault;
        self.state.left.store(times, Ordering::Relaxed);
    }

    /// Bytes of answers that went through so far.
    pub(crate) fn passed(&self) -> usize {
        self.state.passed.load(Ordering::Relaxed)
    }

    /// How many connections are still to be spoilt.
    pub(crate) fn left(&self) -> usize {
        self.state.left.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl State {
    fn fault(&self) -> Fault {
        *self.fault.lock().unwrap()
    }

    /// Whether this connection is one to spoil; counts it.
    fn take(&self) -> bool {
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok()
    }
}

fn connection(client: TcpStream, server: SocketAddr, state: &Arc<State>) {
    if let Fault::Latency(delay) = state.fault() {
        std::thread::sleep(delay);
    }
    let Ok(server) = TcpStream::connect(server) else { return };
    for stream in [&client, &server] {
        stream.set_nodelay(true).unwrap();
        // So that no thread outlives its test for long.
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    }
    let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    let shared = state.clone();
    let requests = std::thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            if let Fault::Latency(delay) = shared.fault() {
                std::thread::sleep(delay);
            }
            if to.write_all(&buffer[..n]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
    answers(server, client, state);
    let _ = requests.join();
}

fn answers(mut from: TcpStream, mut to: TcpStream, state: &State) {
    let mut buffer = vec![0; 64 << 10];
    let mut passed = 0;
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        let piece = &mut buffer[..n];
        let fault = state.fault();
        match fault {
            Fault::Reset { after } | Fault::Truncate { after }
                if passed + n > after && state.take() =>
            {
                // Bytes before the end still pass.
                let _ = to.write_all(&piece[..after - passed.min(after)]);
                let mut how = Shutdown::Both;
                if matches!(fault, Fault::Reset { .. }) {
                    // With no time to linger, closing the last handle resets; the other one is in
                    // the thread that reads requests, which ends when there is nothing to read.
                    rustix::net::sockopt::set_socket_linger(&to, Some(Duration::ZERO)).unwrap();
                    how = Shutdown::Read;
                }
                let _ = from.shutdown(Shutdown::Both);
                let _ = to.shutdown(how);
                return;
            }
            Fault::Flip if n > 2048 && state.take() => piece[n / 2] ^= 4,
            Fault::Silence => continue,
            _ => {}
        }
        passed += piece.len();
        state.passed.fetch_add(piece.len(), Ordering::Relaxed);
        if to.write_all(piece).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
