//! Ports of a run that clients of the host connect to.

use crate::common;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use afresh_linux::{End, HostStreams};

const LIMIT: Duration = Duration::from_secs(100);

const SERVER: &str = "import socket
listener = socket.create_server(('', 7000))
print('listens', flush=True)
peer, _ = listener.accept()
listener.close()
data = b''
while piece := peer.recv(100):
    data += piece
peer.sendall(data[::-1])
";

/// Output that a thread waits for.
struct Notice(SyncSender<()>);

impl Write for Notice {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let _ = self.0.try_send(());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Without a terminal and without signals, so only a client can wake the server.
#[test]
fn a_server_that_waits_for_a_client_is_not_deadlocked() {
    let Some(program) = common::python() else { return };
    let program = program.arg("-c").arg(SERVER);
    let (notice, listens) = sync_channel(1);
    let mut streams = HostStreams::default().output(Notice(notice)).time_limit(LIMIT);
    let address = streams.publish((Ipv4Addr::LOCALHOST, 0).into(), 7000).unwrap();
    let client = std::thread::spawn(move || {
        // It fails where the run ended before.
        listens.recv().ok()?;
        let mut stream = TcpStream::connect(address).ok()?;
        let mut answer = String::new();
        for piece in ["abc", "def"] {
            // The server waits in each of its calls.
            std::thread::sleep(Duration::from_millis(50));
            stream.write_all(piece.as_bytes()).ok()?;
        }
        stream.shutdown(Shutdown::Write).ok()?;
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    });
    let run = common::here(program.run_to_end(streams));
    let answer = client.join().unwrap();
    let Some(run) = run else { return };
    assert_eq!((run.end, answer.as_deref()), (End::Exit(0), Some("fedcba")));
}
