//! The memory of processes that open the same snapshot.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};

use afresh_memory::{Slot, SlotConfig};
use afresh_sys::test_command;

use super::*;

const TEST: &str = "images::proportional_memory::processes_divide_the_memory_of_a_shared_image";
/// Directory of the store, in a process that opens the snapshot.
const STORE: &str = "AFRESH_TEST_STORE";
/// Socket of the server for it.
const SOCKET: &str = "AFRESH_TEST_SOCKET";
const PROCESSES: usize = 4;

/// The work of a process: opens the snapshot, reads all of it in a slot, and waits for the end of
/// its input.
fn process(store: &str) {
    let snapshot = Store::open(store).unwrap().load("a").unwrap();
    let image = match std::env::var_os(SOCKET) {
        Some(socket) => shared(&client(Path::new(&socket)).0, &snapshot),
        None => {
            let memory = SnapshotMemory::load(snapshot, &Options::default()).unwrap();
            memory.wait(TEST_TIMEOUT).unwrap();
            memory.pages().clone()
        }
    };
    let slot = Slot::new(&image, SlotConfig::default()).unwrap();
    let mut bytes = vec![0; PAGES * PAGE_SIZE];
    slot.read(0, &mut bytes).unwrap();
    println!("equal: {}", bytes == content(7) && has_content(&image, 7));
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// KiB of the proportional memory of the mappings of images in a process.
fn image_kib(process: &Child) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{}/smaps", process.id())).unwrap();
    let (mut kib, mut is_image) = (0, false);
    for line in maps.lines() {
        if let Some(size) = line.strip_prefix("Pss:") {
            let size = size.trim().trim_end_matches(" kB").parse::<usize>().unwrap();
            kib += if is_image { size } else { 0 };
        } else if line.as_bytes().first().is_some_and(|byte| !byte.is_ascii_uppercase()) {
            is_image = line.contains("memfd:afresh-");
        }
    }
    kib
}

/// The proportional memory of all processes together.
fn memory_of_processes(store: &Path, socket: Option<&Path>) -> usize {
    let mut processes: Vec<Child> = (0..PROCESSES)
        .map(|_| {
            let mut command = test_command(TEST);
            command.env(STORE, store).envs(socket.map(|socket| (SOCKET, socket)));
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for process in &mut processes {
        let lines = BufReader::new(process.stdout.as_mut().unwrap()).lines();
        let answer = lines.map(Result::unwrap).find(|line| line.contains("equal: "));
        assert!(answer.is_some_and(|line| line.ends_with("equal: true")));
    }
    let memory = processes.iter().map(image_kib).sum();
    for process in &mut processes {
        drop(process.stdin.take());
        process.wait().unwrap();
    }
    memory
}

#[test]
fn processes_divide_the_memory_of_a_shared_image() {
    if let Ok(store) = std::env::var(STORE) {
        return process(&store);
    }
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    save(&store, "a", 7, Encoding::Raw);
    let server = Server::start(dir.path(), BUDGET);
    let own = memory_of_processes(&store, None);
    let shared = memory_of_processes(&store, Some(&server.socket));
    println!("{PROCESSES} processes: {own} KiB of separate images, {shared} KiB of a shared one");
    // One copy, and rounding in each mapping.
    let one = server.server.charged() / 1024;
    assert!(shared <= one * 5 / 4, "{shared} KiB of an image of {one} KiB");
    assert!(own >= one * (PROCESSES - 1), "{own} KiB without a server");
}
