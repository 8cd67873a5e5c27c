//! A process that serves many VMMs: endpoints that they connect to, and the VMMs by name.
//!
//! An *endpoint* is a socket with a snapshot, a name and a budget. The VMMs that connect to
//! endpoint `web` are called `web.1`, `web.2` and so on.
//!
//! Promises: a VMM costs its endpoint no more than the endpoint's budget, and an endpoint no more
//! than a bounded number of threads. Pages that are streamed ahead share one budget. One that
//! exceeds it is refused, and others are not affected. Counts of an endpoint have each VMM once and
//! never decrease. No two VMMs have one name, also where an endpoint is closed and another one of
//! its name is opened. Stopping the host ends the service of every VMM as [`super::serve`]
//! describes.
//!
//! May break it: a host without a [`Watchdog`] whose process exits before it is stopped. Missing
//! pages of its VMMs are then not closed.

mod accept_thread;

use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use afresh_budget::Budget;
use afresh_sys::socket::SocketAccess;
use afresh_sys::{fork, lock};

use super::connection::Connection;
use super::host_error::HostError;
use super::listener::Listener;
use super::stream_budget::StreamBudget;
use super::vm::Vm;
use super::watchdog::Watchdog;
use super::{STREAM_BUDGET, ServeCounts, VmmError, VmmOptions};
use crate::PageSource;
use accept_thread::EndpointSocket;

/// Endpoints of a host at a time.
pub(super) const MAX_ENDPOINTS: usize = 4096;
/// Maximum length of the name of an endpoint.
pub(super) const MAX_NAME: usize = 64;
/// Time before the next attempt after `accept` failed.
pub(super) const PAUSE: Duration = Duration::from_secs(1);

/// A socket that VMMs connect to, and how they are served.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EndpointOptions {
    /// Its name: letters, digits, `-` and `_`.
    pub name: String,
    /// The name of the snapshot, for listings.
    pub snapshot: String,
    /// Path of the socket.
    pub socket: PathBuf,
    /// Who may connect.
    pub access: SocketAccess,
    /// Whether the directory of the socket is made, for its owner alone, if it is missing. It is
    /// removed with the socket.
    pub makes_directory: bool,
    /// As in [`VmmOptions`].
    pub window: usize,
    /// As in [`VmmOptions`].
    pub stream: bool,
    /// As in [`VmmOptions`].
    pub record: bool,
    /// Maximum bytes that the pager uses for its VMMs; `None` for no limit.
    pub budget: Option<usize>,
    /// Whether the endpoint closes once a VMM has connected.
    pub once: bool,
}

impl EndpointOptions {
    /// An endpoint for this user, without a budget.
    #[must_use]
    pub fn new(name: &str, snapshot: &str, socket: impl Into<PathBuf>) -> Self {
        Self {
            name: name.to_owned(),
            snapshot: snapshot.to_owned(),
            socket: socket.into(),
            access: SocketAccess::default(),
            makes_directory: false,
            window: 64,
            stream: true,
            record: false,
            budget: None,
            once: false,
        }
    }
}

/// An event in a host.
#[derive(Debug)]
#[non_exhaustive]
pub enum HostEvent<'a> {
    /// The handshake of a VMM was taken.
    Connected {
        /// Name of the VMM.
        name: &'a str,
    },
    /// The service of a VMM has ended.
    Served {
        /// Name of the VMM.
        name: &'a str,
        /// Its number at its endpoint.
        number: usize,
        /// The result.
        result: &'a Result<ServeCounts, VmmError>,
    },
    /// A VMM could not be accepted.
    Failed {
        /// Name of the endpoint.
        endpoint: &'a str,
        /// The cause.
        error: &'a io::Error,
    },
    /// A client of the control socket could not be accepted.
    ClientFailed {
        /// The cause.
        error: &'a io::Error,
    },
}

/// An endpoint that is open.
struct Endpoint {
    options: EndpointOptions,
    source: Arc<dyn PageSource>,
    budget: Budget,
    /// Set when no further VMM is accepted.
    closed: AtomicBool,
    /// VMMs that are served.
    live: AtomicUsize,
    /// Counts of VMMs that have ended.
    totals: Mutex<EndpointTotals>,
    /// Whether the socket is there.
    listens: Mutex<bool>,
    /// Rung when it is not any more.
    silent: Condvar,
}

/// Counts of an endpoint since it was opened.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct EndpointTotals {
    /// VMMs whose service has ended, with or without an error.
    pub ended: usize,
    /// Those whose service has failed or was refused.
    pub failed: usize,
    /// The work, for VMMs that are served and those that have ended.
    pub served: ServeCounts,
}

/// An endpoint, for listings.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EndpointInfo {
    /// Its options.
    pub options: EndpointOptions,
    /// Bytes that the pager uses for its VMMs.
    pub used: usize,
    /// VMMs that are served.
    pub vms: usize,
    /// Counts since it was opened.
    pub totals: EndpointTotals,
}

/// A VMM that has connected to an endpoint.
struct ConnectedVm {
    endpoint: Arc<Endpoint>,
    /// Once its handshake was taken.
    vm: Option<Vm>,
}

type Report = dyn Fn(&HostEvent<'_>) + Send + Sync;

struct HostState {
    /// The process whose threads serve. A child has none of them.
    generation: u32,
    endpoints: Mutex<BTreeMap<String, Arc<Endpoint>>>,
    /// Names of endpoints that are being opened. Locked after `endpoints`.
    reserved: Mutex<BTreeSet<String>>,
    /// By name. Locked after `totals` of an endpoint.
    vms: Mutex<BTreeMap<String, ConnectedVm>>,
    stop: AtomicBool,
    threads: Mutex<usize>,
    /// Rung when a thread ends.
    ended: Condvar,
    watchdog: Option<Watchdog>,
    /// Shared by all VMMs.
    stream_budget: StreamBudget,
    report: Box<Report>,
}

/// Serves the VMMs of any number of endpoints. Clones stand for the same.
#[derive(Clone)]
pub struct VmmHost(Arc<HostState>);

impl std::fmt::Debug for VmmHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VmmHost").field("endpoints", &lock(&self.0.endpoints).len()).finish()
    }
}

fn list(names: impl Iterator<Item = String>) -> String {
    let names: Vec<String> = names.collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// The name of an endpoint that is being opened.
struct ReservedName<'a> {
    host: &'a VmmHost,
    name: &'a str,
}

impl Drop for ReservedName<'_> {
    fn drop(&mut self) {
        lock(&self.host.0.reserved).remove(self.name);
    }
}

impl VmmHost {
    /// A host without endpoints. `report` is called by its threads. A `watchdog` closes the memory
    /// of its VMMs if this process is killed.
    pub fn new(
        watchdog: Option<Watchdog>,
        report: impl Fn(&HostEvent<'_>) + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(HostState {
            generation: fork::generation(),
            endpoints: Mutex::default(),
            reserved: Mutex::default(),
            vms: Mutex::default(),
            stop: AtomicBool::new(false),
            threads: Mutex::new(0),
            ended: Condvar::new(),
            watchdog,
            stream_budget: StreamBudget::new(STREAM_BUDGET),
            report: Box::new(report),
        }))
    }

    pub(super) fn report(&self, event: &HostEvent<'_>) {
        (self.0.report)(event);
    }

    /// Opens an endpoint.
    ///
    /// # Errors
    /// [`HostError`] by cause; nothing was opened then.
    pub fn open_endpoint(
        &self,
        options: EndpointOptions,
        source: Arc<dyn PageSource>,
    ) -> Result<(), HostError> {
        self.open(options, source, None)
    }

    /// Opens an endpoint at a socket that is there, as a service manager passes it.
    /// `options.socket`, `options.access` and `options.makes_directory` have no effect on it.
    ///
    /// # Errors
    /// As [`VmmHost::open_endpoint`].
    pub fn open_endpoint_at(
        &self,
        listener: Listener,
        options: EndpointOptions,
        source: Arc<dyn PageSource>,
    ) -> Result<(), HostError> {
        self.open(options, source, Some(listener))
    }

    fn open(
        &self,
        options: EndpointOptions,
        source: Arc<dyn PageSource>,
        listener: Option<Listener>,
    ) -> Result<(), HostError> {
        let name = options.name.clone();
        let usable = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(usable) {
            return Err(HostError::Name(name.chars().take(MAX_NAME).collect()));
        }
        let _reserved = self.reserve(&name)?;
        // No lock is held: making a name may take the kernel long.
        let listener = match (listener, options.makes_directory) {
            (Some(listener), _) => listener,
            (None, true) => Listener::bind_in_directory(&options.socket, options.access)?,
            (None, false) => Listener::bind_for(&options.socket, options.access)?,
        };
        let endpoint = Arc::new(Endpoint {
            budget: Budget::new("VMM memory", options.budget.unwrap_or(usize::MAX)),
            options,
            source,
            closed: AtomicBool::new(false),
            live: AtomicUsize::new(0),
            totals: Mutex::default(),
            listens: Mutex::new(true),
            silent: Condvar::new(),
        });
        let held = self.0.watchdog.as_ref().map(|watchdog| watchdog.hold_endpoint(&listener));
        let held = held.transpose().map_err(HostError::Watchdog)?;
        let (host, of_thread) = (self.clone(), endpoint.clone());
        let mut endpoints = lock(&self.0.endpoints);
        // From here on `stop` waits for the thread.
        if self.0.stop.load(Ordering::Acquire) {
            return Err(HostError::Stopping);
        }
        self.start(&format!("endpoint-{name}"), move || {
            host.accept(&of_thread, &EndpointSocket { listener: &listener, held: held.as_ref() });
            drop(listener);
            drop(held);
            *lock(&of_thread.listens) = false;
            of_thread.silent.notify_all();
        })?;
        endpoints.insert(name.clone(), endpoint);
        Ok(())
    }

    /// Reserves the name of an endpoint that is about to be opened.
    fn reserve<'a>(&'a self, name: &'a str) -> Result<ReservedName<'a>, HostError> {
        let endpoints = lock(&self.0.endpoints);
        if self.0.stop.load(Ordering::Acquire) {
            return Err(HostError::Stopping);
        }
        let mut reserved = lock(&self.0.reserved);
        if endpoints.contains_key(name) || reserved.contains(name) {
            return Err(HostError::Taken(name.to_owned()));
        }
        if endpoints.len() + reserved.len() >= MAX_ENDPOINTS {
            return Err(HostError::TooMany);
        }
        reserved.insert(name.to_owned());
        Ok(ReservedName { host: self, name })
    }

    /// Closes an endpoint. Its socket is removed; VMMs that are connected are served on.
    ///
    /// # Errors
    /// [`HostError::NoEndpoint`].
    pub fn close_endpoint(&self, name: &str) -> Result<(), HostError> {
        let mut endpoints = lock(&self.0.endpoints);
        let Some(endpoint) = endpoints.remove(name) else {
            return Err(HostError::NoEndpoint {
                name: name.chars().take(MAX_NAME).collect(),
                there: list(endpoints.keys().cloned()),
            });
        };
        drop(endpoints);
        endpoint.closed.store(true, Ordering::Release);
        let mut listens = lock(&endpoint.listens);
        while *listens {
            listens = endpoint.silent.wait(listens).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// The open endpoints.
    #[must_use]
    pub fn endpoints(&self) -> Vec<EndpointInfo> {
        let endpoints: Vec<Arc<Endpoint>> = lock(&self.0.endpoints).values().cloned().collect();
        // No lock of the host is held while a VMM is asked: it may be listing its pages.
        endpoints.iter().map(|endpoint| self.endpoint_info(endpoint)).collect()
    }

    fn endpoint_info(&self, endpoint: &Arc<Endpoint>) -> EndpointInfo {
        let (mut totals, vms) = {
            // Held, so that a VMM that ends meanwhile is counted once: with the listed ones, or
            // with those that have ended.
            let ended = lock(&endpoint.totals);
            let of_endpoint = |vm: &&ConnectedVm| Arc::ptr_eq(&vm.endpoint, endpoint);
            let vms: Vec<Vm> = lock(&self.0.vms)
                .values()
                .filter(of_endpoint)
                .filter_map(|vm| vm.vm.clone())
                .collect();
            (*ended, vms)
        };
        for vm in vms {
            totals.served.add(&vm.stats().served);
        }
        EndpointInfo {
            options: endpoint.options.clone(),
            used: endpoint.budget.used(),
            vms: endpoint.live.load(Ordering::Acquire),
            totals,
        }
    }

    /// Room for pages that are streamed ahead, which all VMMs share.
    #[must_use]
    pub fn stream_budget(&self) -> &StreamBudget {
        &self.0.stream_budget
    }

    /// The VMMs that are served, by name.
    #[must_use]
    pub fn vms(&self) -> Vec<(String, Vm)> {
        let vms = lock(&self.0.vms);
        vms.iter().filter_map(|(name, vm)| Some((name.clone(), vm.vm.clone()?))).collect()
    }

    /// The VMM of this name; the name of an endpoint stands for its only VMM.
    ///
    /// # Errors
    /// [`HostError::NoVm`].
    pub fn vm(&self, name: &str) -> Result<Vm, HostError> {
        let vms = self.vms();
        if let Some((_, vm)) = vms.iter().find(|(full, _)| full == name) {
            return Ok(vm.clone());
        }
        let at_endpoint =
            |full: &str| full.rsplit_once('.').is_some_and(|(endpoint, _)| endpoint == name);
        let mut of_endpoint = vms.iter().filter(|(full, _)| at_endpoint(full));
        match (of_endpoint.next(), of_endpoint.next()) {
            (Some((_, only)), None) => Ok(only.clone()),
            _ => Err(HostError::NoVm {
                name: name.chars().take(MAX_NAME).collect(),
                there: list(vms.iter().map(|(full, _)| full.clone())),
            }),
        }
    }

    /// Closes all endpoints and ends the service of every VMM, and returns once all threads have
    /// ended. A child of a fork has neither: there it does nothing.
    pub fn stop(&self) {
        if self.0.generation != fork::generation() {
            return;
        }
        self.0.stop.store(true, Ordering::Release);
        lock(&self.0.endpoints).clear();
        let mut threads = lock(&self.0.threads);
        while *threads > 0 {
            threads = self.0.ended.wait(threads).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Starts a thread that [`VmmHost::stop`] waits for.
    fn start(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), HostError> {
        /// Counts the thread until it has ended or was not started.
        struct ThreadCount(VmmHost);
        impl Drop for ThreadCount {
            fn drop(&mut self) {
                *lock(&self.0.0.threads) -= 1;
                self.0.0.ended.notify_all();
            }
        }
        *lock(&self.0.threads) += 1;
        let counted = ThreadCount(self.clone());
        let body = move || {
            let _counted = counted;
            work();
        };
        let thread = std::thread::Builder::new().name(name.to_owned());
        thread.spawn(body).map(drop).map_err(HostError::Thread)
    }

    /// Takes the next name of an endpoint that no VMM has. A VMM of an earlier endpoint with the
    /// same name can have it.
    fn name_vm(&self, endpoint: &Arc<Endpoint>, number: &mut usize) -> String {
        let mut vms = lock(&self.0.vms);
        loop {
            *number += 1;
            if let Entry::Vacant(place) = vms.entry(format!("{}.{number}", endpoint.options.name)) {
                let name = place.key().clone();
                place.insert(ConnectedVm { endpoint: endpoint.clone(), vm: None });
                return name;
            }
        }
    }

    fn serve(&self, endpoint: &Endpoint, (name, number): (&str, usize), connection: Connection) {
        let mut options = VmmOptions::new(&self.0.stop);
        options.stream = endpoint.options.stream && !endpoint.options.record;
        options.record = endpoint.options.record;
        options.window = endpoint.options.window;
        options.budget = Some(endpoint.budget.clone());
        options.watchdog.clone_from(&self.0.watchdog);
        options.stream_budget = self.0.stream_budget.clone();
        let accepted = Vm::accept_connection(connection, endpoint.source.clone(), &options);
        let (vm, result) = match accepted {
            Ok(vm) => {
                if let Some(connected) = lock(&self.0.vms).get_mut(name) {
                    connected.vm = Some(vm.clone());
                }
                (self.0.report)(&HostEvent::Connected { name });
                let served = vm.serve(&options);
                (Some(vm), served)
            }
            Err(error) => (None, Err(error)),
        };
        let mut totals = lock(&endpoint.totals);
        lock(&self.0.vms).remove(name);
        if let Some(vm) = vm {
            totals.served.add(&vm.stats().served);
        }
        totals.ended += 1;
        totals.failed += usize::from(result.is_err());
        drop(totals);
        (self.0.report)(&HostEvent::Served { name, number, result: &result });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SourceError;

    /// One page of zeros.
    struct ZeroSource;

    impl PageSource for ZeroSource {
        fn pages(&self) -> usize {
            1
        }

        unsafe fn read(&self, _: usize, to: *mut u8, pages: usize) -> Result<(), SourceError> {
            // SAFETY: the caller's promise.
            unsafe { to.write_bytes(0, pages * afresh_sys::PAGE_SIZE) };
            Ok(())
        }
    }

    #[test]
    fn a_listing_that_waits_for_a_vmm_holds_no_lock_of_the_host() {
        let dir = tempfile::tempdir().unwrap();
        let host = VmmHost::new(None, |_| {});
        let options = EndpointOptions::new("a", "store@a", dir.path().join("a.sock"));
        host.open_endpoint(options, Arc::new(ZeroSource)).unwrap();
        let endpoint = lock(&host.0.endpoints)["a"].clone();
        let totals = lock(&endpoint.totals);
        let (started, threads) = std::sync::mpsc::channel();
        let of_thread = host.clone();
        let listing = std::thread::spawn(move || {
            started.send(std::fs::read_link("/proc/thread-self").unwrap()).unwrap();
            of_thread.endpoints().len()
        });
        let status = std::path::Path::new("/proc").join(threads.recv().unwrap()).join("stat");
        while !std::fs::read_to_string(&status).unwrap().contains(") S ") {
            std::thread::yield_now();
        }
        assert!(host.0.endpoints.try_lock().is_ok());
        drop(totals);
        assert_eq!(listing.join().unwrap(), 1);
        host.stop();
    }
}
