//! A host of VMMs with a control socket, for tests.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use afresh_pager::vmm::{
    Cause, ControlClient, ControlServer, HostEvent, Snapshots, SocketAccess, VmmHost,
};
use afresh_pager::{PageSource, SnapshotSource};
use afresh_store::{GuestBuild, MemoryPages, SaveRequest, Store};
use afresh_sys::PAGE_SIZE;
use serde_json::{Value, json};

use super::client::PAGES;
use super::process::VmmProcess;

pub(super) const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// The first byte of a page of the snapshot; every fifth page is zero.
pub(super) fn byte_of(page: usize) -> u8 {
    if page % 5 == 4 { 0 } else { (page % 250) as u8 + 1 }
}

pub(super) fn content() -> Vec<u8> {
    (0..PAGES).flat_map(|page| [byte_of(page); PAGE_SIZE]).collect()
}

/// All pages of a snapshot.
pub(super) fn memory_of(store: &Path, name: &str) -> Vec<u8> {
    let snapshot = Store::open(store).unwrap().load(name).unwrap();
    let mut bytes = vec![0; snapshot.pages() * PAGE_SIZE];
    snapshot.read(0, &mut bytes).unwrap();
    bytes
}

/// A directory with a store, and the references `NAME` into it.
pub(super) struct Names(pub(super) PathBuf);

impl Snapshots for Names {
    fn open(&self, reference: &str) -> Result<Arc<dyn PageSource>, Cause> {
        Ok(Arc::new(SnapshotSource::new(Store::open(&self.0)?.load(reference)?)))
    }

    fn target(&self, reference: &str) -> Result<(Store, String), Cause> {
        Ok((Store::open(&self.0)?, reference.to_owned()))
    }
}

/// A host with a control socket and a store that has the snapshot `base`.
pub(super) struct Bench {
    dir: tempfile::TempDir,
    pub(super) host: VmmHost,
    pub(super) events: std::sync::mpsc::Receiver<String>,
    over: Arc<AtomicBool>,
    control: Option<std::thread::JoinHandle<()>>,
}

impl Bench {
    pub(super) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(dir.path().join("store")).unwrap();
        let guest = GuestBuild {
            kind: "vm".into(),
            module: "kernel".into(),
            engine: "test".into(),
            cpu: Vec::new(),
        };
        store.save("base", &MemoryPages(content()), &SaveRequest::new(guest)).unwrap();
        let (sender, events) = std::sync::mpsc::channel();
        let host = VmmHost::new(None, move |event| {
            let text = match event {
                HostEvent::Served { name, result: Ok(_), .. } => format!("{name}: served"),
                HostEvent::Served { name, result: Err(error), .. } => format!("{name}: {error}"),
                other => format!("{other:?}"),
            };
            let _ = sender.send(text);
        });
        let over = Arc::new(AtomicBool::new(false));
        let names = Names(dir.path().join("store"));
        let path = dir.path().join("control");
        let server =
            ControlServer::bind(&path, SocketAccess::default(), host.clone(), names).unwrap();
        let until = over.clone();
        let control = Some(std::thread::spawn(move || server.serve(&until)));
        Self { dir, host, events, over, control }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(super) fn client(&self) -> ControlClient {
        ControlClient::connect(&self.path("control")).unwrap()
    }

    pub(super) fn request(&self, request: Value) -> Value {
        self.client().request(&request).unwrap_or_else(|error| panic!("{request}: {error}"))
    }

    pub(super) fn refused(&self, request: Value) -> String {
        self.client().request(&request).unwrap_err().to_string()
    }

    /// Opens an endpoint, and starts a VMM at it.
    pub(super) fn vmm(&self, endpoint: &str, more: Value) -> Option<VmmProcess> {
        self.vmm_by(endpoint, more, VmmProcess::start)
    }

    /// Opens an endpoint, and starts a VMM there with `start`.
    pub(super) fn vmm_by(
        &self,
        endpoint: &str,
        more: Value,
        start: impl FnOnce(&Path) -> Option<VmmProcess>,
    ) -> Option<VmmProcess> {
        let socket = self.path(endpoint);
        let mut request = json!({
            "request": "add", "name": endpoint, "snapshot": "base", "socket": socket,
        });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        assert_eq!(self.request(request)["pages"], PAGES);
        let vmm = start(&socket)?;
        let started = Instant::now();
        while self.host.vm(endpoint).is_err() && self.events.try_recv().is_err() {
            assert!(started.elapsed() < TEST_TIMEOUT);
            std::thread::sleep(Duration::from_millis(1));
        }
        Some(vmm)
    }

    /// The pages of a snapshot.
    pub(super) fn source(&self, name: &str) -> Arc<dyn PageSource> {
        Names(self.path("store")).open(name).unwrap()
    }

    /// All pages of a snapshot.
    pub(super) fn memory(&self, name: &str) -> Vec<u8> {
        memory_of(&self.path("store"), name)
    }

    pub(super) fn stats(&self, vm: &str) -> Value {
        self.request(json!({ "request": "stats", "vm": vm }))["vms"][0].clone()
    }

    /// Waits until the counts of a VMM are as wanted.
    pub(super) fn until(&self, vm: &str, is: impl Fn(&Value) -> bool) {
        let started = Instant::now();
        loop {
            let stats = self.stats(vm);
            if is(&stats) {
                return;
            }
            assert!(started.elapsed() < TEST_TIMEOUT, "{stats}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.host.stop();
        self.over.store(true, Ordering::Release);
        if let Some(thread) = self.control.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking());
        }
    }
}
