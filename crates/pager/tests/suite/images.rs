//! Images that processes share through a server.
#![cfg(not(miri))]

mod hostile_clients;
mod hostile_servers;
mod other_users;
mod proportional_memory;
mod sharing;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use afresh_memory::Image;
use afresh_pager::Options;
use afresh_pager::SnapshotMemory;
use afresh_pager::images::{ImageClient, ImageEvent, ImageServer};
use afresh_pager::vmm::Listener;
use afresh_store::{Encoding, GuestBuild, MemoryPages, SaveRequest, Sha256, Snapshot, Store};
use afresh_sys::{PAGE_SIZE, lock};

const PAGES: usize = 1500;
const BUDGET: usize = 64 << 20;
const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// Runs of pages that differ, with zero pages in between. The first page has `number`.
fn content(number: u8) -> Vec<u8> {
    let mut bytes = vec![0; PAGES * PAGE_SIZE];
    for (page, bytes) in bytes.chunks_exact_mut(PAGE_SIZE).enumerate() {
        if page % 50 > 40 || (300..700).contains(&page) {
            continue;
        }
        bytes[..8].copy_from_slice(&(page as u64 + 1).to_le_bytes());
        bytes[100..].fill(number);
    }
    bytes
}

/// Saves that memory as the snapshot `name` in the store below `dir`.
fn save(dir: &Path, name: &str, number: u8, encoding: Encoding) -> Snapshot {
    let store = Store::create(dir).unwrap();
    let cpu = Vec::new();
    let guest = GuestBuild { kind: "arena".into(), module: "m".into(), engine: "e".into(), cpu };
    let mut request = SaveRequest::new(guest);
    request.options.encoding = encoding;
    // Snapshots with another state have another digest of the manifest.
    request.state = name.as_bytes().to_vec();
    store.save(name, &MemoryPages(content(number)), &request).unwrap();
    store.load(name).unwrap()
}

/// Whether an image has exactly that memory.
fn has_content(image: &Image, number: u8) -> bool {
    let mut bytes = vec![1; PAGES * PAGE_SIZE];
    image.read(0, &mut bytes);
    image.pages() == PAGES && bytes == content(number)
}

/// The events of a server.
#[derive(Default)]
struct Events {
    added: Vec<Sha256>,
    failures: Vec<String>,
    other_users: Vec<u32>,
}

/// A server in threads of this process.
struct Server {
    socket: PathBuf,
    events: Arc<std::sync::Mutex<Events>>,
    server: Arc<ImageServer>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(dir: &Path, budget: usize) -> Self {
        let socket = dir.join("images.sock");
        let events = Arc::new(std::sync::Mutex::new(Events::default()));
        let reported = events.clone();
        let report = move |event: &ImageEvent<'_>| match event {
            ImageEvent::Added { snapshot, .. } => lock(&reported).added.push(*snapshot),
            ImageEvent::Failed { error, .. } => lock(&reported).failures.push(error.to_string()),
            ImageEvent::OtherUser { user } => lock(&reported).other_users.push(*user),
            _ => {}
        };
        let listener = Listener::bind(&socket).unwrap();
        let server = Arc::new(ImageServer::new(listener, budget, report));
        let stop = Arc::new(AtomicBool::new(false));
        let (serving, stopping) = (server.clone(), stop.clone());
        let thread = Some(std::thread::spawn(move || serving.serve(&stopping)));
        Self { socket, events, server, stop, thread }
    }

    fn failures(&self) -> Vec<String> {
        lock(&self.events).failures.clone()
    }

    fn added(&self) -> Vec<Sha256> {
        lock(&self.events).added.clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A client that counts its reports.
fn client(socket: &Path) -> (Arc<ImageClient>, Arc<AtomicUsize>) {
    let reports = Arc::new(AtomicUsize::new(0));
    let count = reports.clone();
    let client = ImageClient::new(socket, move |_| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    (Arc::new(client), reports)
}

/// The shared image of a snapshot, once the server has it.
fn shared(client: &ImageClient, snapshot: &Snapshot) -> Image {
    let end = Instant::now() + TEST_TIMEOUT;
    loop {
        // A busy host answers late.
        if let Ok(Some(image)) = client.fetch(snapshot) {
            return image;
        }
        assert!(Instant::now() < end, "the server has no image");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Requests an image until the server has reported a failure.
fn request_failing(client: &ImageClient, server: &Server, snapshot: &Snapshot) {
    let end = Instant::now() + TEST_TIMEOUT;
    while server.failures().is_empty() {
        assert!(!client.fetch(snapshot).is_ok_and(|image| image.is_some()));
        assert!(Instant::now() < end, "the server reports no failure");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The memory of a snapshot that is opened with this client.
fn open(snapshot: &Snapshot, client: &Arc<ImageClient>) -> SnapshotMemory {
    let options = Options { images: Some(client.clone()), ..Options::default() };
    let memory = SnapshotMemory::load(snapshot.clone(), &options).unwrap();
    memory.wait(TEST_TIMEOUT).unwrap();
    memory
}
