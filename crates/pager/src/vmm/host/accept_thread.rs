//! The thread of an endpoint: it accepts VMMs, and gives each to a separate thread.
//!
//! Promises: a VMM that is accepted is served, or its memory is closed. Without a thread or
//! descriptors for it, it stays in the queue of the endpoint, and the next attempt comes after
//! [`PAUSE`].

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use afresh_sys::errno::EINVAL;
use afresh_sys::socket;

use super::{Endpoint, HostError, HostEvent, PAUSE, VmmHost, lock};
use crate::vmm::connection::Connection;
use crate::vmm::listener::Listener;
use crate::vmm::watchdog::{AcceptError, WatchdogEntry};

/// VMMs of an endpoint at a time. Further ones wait until one has ended.
const MAX_VMS: usize = 256;
/// Maximum time of one wait before a stop is noticed.
const TICK: Duration = Duration::from_millis(50);
/// Attempts to accept a VMM that waits at an endpoint that is being closed.
const MAX_LAST_ATTEMPTS: usize = 10;

/// The socket of an endpoint, and its entry in the watchdog.
pub(super) struct EndpointSocket<'a> {
    pub(super) listener: &'a Listener,
    pub(super) held: Option<&'a WatchdogEntry>,
}

/// A thread that waits for its VMM: the connection, and the VMM's name and number.
type VmThread = mpsc::Sender<(Connection, String, usize)>;

impl VmmHost {
    /// Accepts VMMs until the endpoint is closed, and those that have connected by then.
    pub(super) fn accept(&self, endpoint: &Arc<Endpoint>, socket: &EndpointSocket<'_>) {
        let mut number = 0;
        self.accept_while_open(endpoint, socket, &mut number);
        if !socket.listener.is_own() {
            return;
        }
        if let Err(error) = socket::refuse_connections(socket.listener.socket()) {
            return self.report_failed(endpoint, &io::Error::other(error));
        }
        // They may have sent their handshake, and would wait for pages.
        let mut attempts = 0;
        while attempts < MAX_LAST_ATTEMPTS {
            match self.next(socket, || false) {
                Ok(None) => return,
                // The queue is empty.
                Err(error) if error.raw_os_error() == Some(EINVAL) => return,
                Err(error) => {
                    attempts += 1;
                    self.report_failed(endpoint, &error);
                    std::thread::sleep(PAUSE);
                }
                Ok(Some(connection)) if endpoint.options.once => connection.refuse(),
                Ok(Some(connection)) => match self.thread(endpoint, number) {
                    Ok(thread) => self.welcome(endpoint, (connection, &thread), &mut number),
                    Err(error) => {
                        self.report_failed(endpoint, &error);
                        connection.refuse();
                    }
                },
            }
        }
    }

    fn accept_while_open(
        &self,
        endpoint: &Arc<Endpoint>,
        socket: &EndpointSocket<'_>,
        number: &mut usize,
    ) {
        let stopped =
            || self.0.stop.load(Ordering::Acquire) || endpoint.closed.load(Ordering::Acquire);
        let mut spare = None;
        while !stopped() {
            if endpoint.live.load(Ordering::Acquire) >= MAX_VMS {
                std::thread::sleep(TICK);
                continue;
            }
            match self.accept_one(endpoint, socket, (&mut spare, *number), stopped) {
                Ok(Some(next)) => self.welcome(endpoint, (next.0, &next.1), number),
                Ok(None) => continue,
                Err(error) => {
                    // For example, no descriptors or threads are left. The VMMs that are served
                    // need this process, and one that has connected stays in the queue.
                    self.report_failed(endpoint, &error);
                    std::thread::sleep(PAUSE);
                    continue;
                }
            }
            if endpoint.options.once {
                break;
            }
        }
    }

    /// Accepts a VMM, with a thread for it; `None` where none has connected for a tick. The thread
    /// comes first: a VMM that is accepted is served.
    fn accept_one(
        &self,
        endpoint: &Arc<Endpoint>,
        socket: &EndpointSocket<'_>,
        (spare, number): (&mut Option<VmThread>, usize),
        stopped: impl Fn() -> bool,
    ) -> io::Result<Option<(Connection, VmThread)>> {
        if !socket.listener.is_ready(TICK)? {
            return Ok(None);
        }
        let thread = match spare.take() {
            Some(thread) => thread,
            None => self.thread(endpoint, number)?,
        };
        match self.next(socket, stopped) {
            Ok(Some(connection)) => Ok(Some((connection, thread))),
            other => {
                *spare = Some(thread);
                other.map(|_| None)
            }
        }
    }

    /// The VMM that has waited longest at an endpoint; `None` where none waits.
    fn next(
        &self,
        socket: &EndpointSocket<'_>,
        stopped: impl Fn() -> bool,
    ) -> io::Result<Option<Connection>> {
        if let (Some(watchdog), Some(held)) = (&self.0.watchdog, socket.held) {
            match watchdog.accept(held, stopped) {
                Ok(connection) => return Ok(connection),
                Err(AcceptError::Refused(error)) => return Err(error),
                // The VMM gets to know it: it is ended.
                Err(AcceptError::Ended) => {}
            }
        }
        let Some(stream) = socket.listener.accept_within(Duration::ZERO)? else { return Ok(None) };
        Connection::of(stream, self.0.watchdog.as_ref()).map(Some).map_err(io::Error::other)
    }

    fn report_failed(&self, endpoint: &Endpoint, error: &io::Error) {
        self.report(&HostEvent::Failed { endpoint: &endpoint.options.name, error });
    }

    /// A thread for the VMM after the one with this number.
    fn thread(&self, endpoint: &Arc<Endpoint>, number: usize) -> io::Result<VmThread> {
        let (give, take) = mpsc::channel::<(Connection, String, usize)>();
        let (host, endpoint) = (self.clone(), endpoint.clone());
        let started = self.start(&format!("vmm-{}", number + 1), move || {
            if let Ok((connection, name, number)) = take.recv() {
                host.serve(&endpoint, (&name, number), connection);
                endpoint.live.fetch_sub(1, Ordering::AcqRel);
            }
        });
        match started {
            Ok(()) => Ok(give),
            Err(HostError::Thread(error)) => Err(error),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    /// Serves a VMM in a thread.
    fn welcome(
        &self,
        endpoint: &Arc<Endpoint>,
        (connection, thread): (Connection, &VmThread),
        number: &mut usize,
    ) {
        let name = self.name_vm(endpoint, number);
        endpoint.live.fetch_add(1, Ordering::AcqRel);
        if let Err(mpsc::SendError((connection, name, _))) =
            thread.send((connection, name, *number))
        {
            // The thread has ended without its work.
            endpoint.live.fetch_sub(1, Ordering::AcqRel);
            lock(&self.0.vms).remove(&name);
            connection.refuse();
        }
    }
}
