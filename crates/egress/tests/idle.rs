//! A proxy whose guest does not read waits, and takes no processor time.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use afresh_egress::{ConnectionLog, DestinationQuery, EgressPolicy, NetGrant, ProxyQuota, Route};

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

/// Lengths of responses around what a socket takes, at distances below what the proxy keeps.
const LENGTHS: std::ops::Range<usize> = 2..14;
const STEP: usize = 32 << 10;

#[test]
fn guests_that_do_not_read_cost_nothing_after_the_server_has_closed() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = std::thread::spawn(move || {
        let mut open = Vec::new();
        for step in LENGTHS {
            let (mut stream, len) = (listener.accept().unwrap().0, step * STEP);
            let _ = stream.read(&mut [0; 1024]).unwrap();
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {len}\r\n\r\n");
            stream.write_all(&[head.into_bytes(), vec![7; len]].concat()).unwrap();
            open.push(stream);
        }
        // The proxies have the responses when the connections end.
        std::thread::sleep(Duration::from_millis(200));
    });
    let rule = format!(r#"{{"to": "a.test:80=127.0.0.1:{port}"}}"#);
    let policy: EgressPolicy = [rule.parse::<NetGrant>().unwrap()].into_iter().collect();
    let Some(Route::Proxied(server)) = policy.route(DestinationQuery::Name("a.test"), 80) else {
        panic!("no proxy");
    };
    let guests = LENGTHS.map(|_| {
        let mut guest =
            server.serve(&ConnectionLog::named("test"), &ProxyQuota::default()).unwrap();
        guest.write_all(b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n").unwrap();
        guest
    });
    let guests: Vec<UnixStream> = guests.collect();
    serving.join().unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let before = ticks();
    std::thread::sleep(Duration::from_millis(500));
    let spent = ticks() - before;
    assert!(spent <= 5, "{spent} ticks");
    // The responses are whole nevertheless.
    let mut lengths: Vec<usize> = guests
        .into_iter()
        .map(|mut guest| {
            guest.set_nonblocking(false).unwrap();
            guest.shutdown(Shutdown::Write).unwrap();
            let mut out = Vec::new();
            guest.read_to_end(&mut out).unwrap();
            out.iter().rev().take_while(|byte| **byte == 7).count()
        })
        .collect();
    lengths.sort_unstable();
    assert_eq!(lengths, LENGTHS.map(|step| step * STEP).collect::<Vec<_>>());
}
