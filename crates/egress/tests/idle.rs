//! A proxy whose guest does not read waits, and takes no processor time.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use afresh_egress::{ConnectionLog, DestinationQuery, EgressPolicy, NetGrant, Route};

/// Processor time of all proxies of this process, in ticks of 10 ms.
fn ticks() -> u64 {
    let mut sum = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let Ok(stat) = std::fs::read_to_string(task.path().join("stat")) else { continue };
        if let Some((_, fields)) = stat.split_once("(afresh-egress) ") {
            let times = fields.split(' ').skip(11).take(2);
            sum += times.map(|field| field.parse::<u64>().unwrap()).sum::<u64>();
        }
    }
    sum
}

/// Bytes that a pair of sockets takes without a reader.
fn capacity() -> usize {
    let (mut writer, _reader) = UnixStream::pair().unwrap();
    writer.set_nonblocking(true).unwrap();
    let mut sum = 0;
    while let Ok(len) = writer.write(&[0; 4096]) {
        sum += len;
    }
    sum
}

#[test]
fn a_guest_that_does_not_read_costs_nothing_after_the_server_has_closed() {
    let len = capacity() + (48 << 10);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        let _ = stream.read(&mut [0; 1024]).unwrap();
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {len}\r\n\r\n");
        stream.write_all(&[head.into_bytes(), vec![7; len]].concat()).unwrap();
    });
    let rule = format!(r#"{{"to": "a.test:80=127.0.0.1:{port}"}}"#);
    let policy: EgressPolicy = [rule.parse::<NetGrant>().unwrap()].into_iter().collect();
    let Some(Route::Proxied(server)) = policy.route(DestinationQuery::Name("a.test"), 80) else {
        panic!("no proxy");
    };
    let mut guest = server.serve(&ConnectionLog::named("test")).unwrap();
    guest.write_all(b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n").unwrap();
    serving.join().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let before = ticks();
    std::thread::sleep(Duration::from_millis(700));
    let spent = ticks() - before;
    assert!(spent <= 5, "{spent} ticks");
    // The response is whole nevertheless.
    guest.set_nonblocking(false).unwrap();
    guest.shutdown(std::net::Shutdown::Write).unwrap();
    let mut out = Vec::new();
    guest.read_to_end(&mut out).unwrap();
    assert!(out.len() > len && out.ends_with(&[7; 1024]));
}
