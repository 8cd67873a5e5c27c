//! Whether a server started by a test accepts connections at its port, which was free when the test
//! chose it.
//!
//! Another process or test may have taken the port since, so an accepted connection alone proves
//! nothing. So the kernel is asked whose the socket is. Shared by the tests of several crates.

use std::net::SocketAddr;
use std::process::Child;
use std::time::{Duration, Instant};

/// Waits until `child` listens at `address`; `false` when it ended, or did not for so long.
pub(crate) fn listens(child: &mut Child, address: SocketAddr, patience: Duration) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < patience && child.try_wait().unwrap().is_none() {
        if has_socket(child.id(), address.port()) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}

/// Whether a process has a socket that listens at the port.
fn has_socket(process: u32, port: u16) -> bool {
    // "sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode …", where 0A
    // listens.
    let read = |table: &str| std::fs::read_to_string(format!("/proc/{process}/net/{table}"));
    let tables = [read("tcp"), read("tcp6")].map(Result::unwrap_or_default);
    let ends = format!(":{port:04X}");
    let sockets = tables.iter().flat_map(|table| table.lines()).filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let listens = words.get(1)?.ends_with(&ends) && *words.get(3)? == "0A";
        listens.then(|| format!("socket:[{}]", words[9]))
    });
    let sockets: Vec<String> = sockets.collect();
    let own = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let mut own = own.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    own.any(|file| sockets.iter().any(|socket| file.as_os_str() == socket.as_str()))
}

#[test]
fn a_port_that_another_process_has_is_not_taken_for_the_servers() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    assert!(has_socket(std::process::id(), address.port()));
    let mut child = std::process::Command::new("sleep").arg("0.2").spawn().unwrap();
    assert!(!listens(&mut child, address, Duration::from_secs(60)));
}
