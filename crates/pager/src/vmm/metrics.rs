//! Counts of a host in the text format of Prometheus, at a loopback port.
//!
//! Promises: only this machine can connect. A client costs its thread, one short request and one
//! answer, within [`CLIENT_TIMEOUT`]. Counters of an endpoint never decrease while it is open: they
//! include VMMs that have ended.
//!
//! May break it: any user of the machine can connect, and learn the names and counts of endpoints
//! and VMMs.

use std::fmt::{self, Write as _};
use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use afresh_sys::{poll, socket};

use super::host::{EndpointInfo, VmmHost};
use super::vm::VmStats;

/// Time limit of a client.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Clients at a time.
const MAX_CLIENTS: usize = 8;
/// Maximum length of a request.
const MAX_REQUEST: usize = 8 << 10;
/// Maximum time of one wait before a stop is noticed.
const TICK: Duration = Duration::from_millis(50);

/// Answers `GET /metrics` at a loopback port.
#[derive(Debug)]
pub struct MetricsServer {
    listener: TcpListener,
    host: VmmHost,
    clients: AtomicUsize,
}

impl MetricsServer {
    /// Listens at `address`.
    ///
    /// # Errors
    /// An address that is not a loopback one; an error of `bind`.
    pub fn bind(address: SocketAddr, host: VmmHost) -> io::Result<Self> {
        if !address.ip().is_loopback() {
            let text = format!(
                "{address} can be reached from other machines: use 127.0.0.1 or [::1], and a proxy where another machine collects metrics"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let listener = TcpListener::bind(address)
            .map_err(|error| io::Error::new(error.kind(), format!("{address}: {error}")))?;
        Ok(Self { listener, host, clients: AtomicUsize::new(0) })
    }

    /// The address, with the port that port 0 stood for.
    ///
    /// # Errors
    /// An error of `getsockname`.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Answers clients until `stop` is set.
    ///
    /// # Errors
    /// An error of `poll`.
    pub fn serve(&self, stop: &AtomicBool) -> io::Result<()> {
        std::thread::scope(|scope| {
            while !stop.load(Ordering::Acquire) {
                let ready = poll::readable([self.listener.as_fd()], TICK);
                if ready.map_err(io::Error::other)? == [false] {
                    continue;
                }
                // The client has disconnected, or no descriptor is left.
                let Ok((stream, _)) = self.listener.accept() else {
                    std::thread::sleep(TICK);
                    continue;
                };
                if self.clients.fetch_add(1, Ordering::AcqRel) >= MAX_CLIENTS {
                    self.clients.fetch_sub(1, Ordering::AcqRel);
                    continue;
                }
                let work = move || {
                    // A client that disconnects ends its own thread.
                    let _ = self.converse(&stream, stop);
                    self.clients.fetch_sub(1, Ordering::AcqRel);
                };
                let thread = std::thread::Builder::new().name("afresh-metrics".to_owned());
                if thread.spawn_scoped(scope, work).is_err() {
                    self.clients.fetch_sub(1, Ordering::AcqRel);
                }
            }
            Ok(())
        })
    }

    fn converse(&self, mut stream: &TcpStream, stop: &AtomicBool) -> io::Result<()> {
        let started = Instant::now();
        let (mut text, mut part) = (Vec::new(), [0; 1024]);
        while !text.windows(4).any(|end| end == b"\r\n\r\n") {
            let late = started.elapsed() > CLIENT_TIMEOUT || stop.load(Ordering::Acquire);
            if late || text.len() > MAX_REQUEST {
                return Ok(());
            }
            if poll::readable([stream.as_fd()], TICK).map_err(io::Error::other)? == [false] {
                continue;
            }
            match stream.read(&mut part)? {
                0 => return Ok(()),
                read => text.extend_from_slice(&part[..read]),
            }
        }
        let line = text.split(|byte| *byte == b'\r').next().unwrap_or_default();
        let mut words = line.split(|byte| *byte == b' ');
        let (status, body) = match (words.next(), words.next()) {
            (Some(b"GET"), Some(b"/metrics")) => ("200 OK", self.host.metrics()),
            (Some(b"GET"), _) => ("404 Not Found", "use /metrics\n".to_owned()),
            _ => ("405 Method Not Allowed", "use GET\n".to_owned()),
        };
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        socket::send_within(stream.as_fd(), (head + &body).as_bytes(), CLIENT_TIMEOUT)
            .map_err(io::Error::other)
    }
}

/// A metric under construction.
struct Page(String);

impl Page {
    fn metric(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP afresh_pager_{name} {help}");
        let _ = writeln!(self.0, "# TYPE afresh_pager_{name} {kind}");
    }

    /// Names of endpoints and VMMs need no escapes.
    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl fmt::Display) {
        let pairs: Vec<String> =
            labels.iter().map(|(label, text)| format!("{label}=\"{text}\"")).collect();
        let labels =
            if pairs.is_empty() { String::new() } else { format!("{{{}}}", pairs.join(",")) };
        let _ = writeln!(self.0, "afresh_pager_{name}{labels} {value}");
    }
}

/// A count of an endpoint: its name, its meaning and its value.
type EndpointCount = (&'static str, &'static str, &'static str, fn(&EndpointInfo) -> usize);

const ENDPOINT_COUNTS: [EndpointCount; 9] = [
    ("vms", "gauge", "VMMs that are served.", |endpoint| endpoint.vms),
    ("used_bytes", "gauge", "Memory of the pager for the VMMs of the endpoint.", |endpoint| {
        endpoint.used
    }),
    ("ended_total", "counter", "VMMs whose service has ended.", |endpoint| endpoint.totals.ended),
    ("failed_total", "counter", "VMMs whose service has failed.", |endpoint| {
        endpoint.totals.failed
    }),
    ("faults_total", "counter", "Faults answered.", |endpoint| endpoint.totals.served.faults),
    ("filled_pages_total", "counter", "Pages filled from the snapshot.", |endpoint| {
        endpoint.totals.served.pages
    }),
    (
        "empty_pages_total",
        "counter",
        "Pages filled that are zero and take no memory.",
        |endpoint| endpoint.totals.served.empty,
    ),
    ("zeroed_pages_total", "counter", "Pages filled with zeros after a discard.", |endpoint| {
        endpoint.totals.served.zeroed
    }),
    ("discards_total", "counter", "Discards of VMMs.", |endpoint| endpoint.totals.served.removals),
];

/// A count of a VMM: its name, its meaning and its value.
type VmCount = (&'static str, &'static str, fn(&VmStats) -> usize);

const VM_COUNTS: [VmCount; 5] = [
    ("vm_missing_pages", "Pages whose content is still to come.", |stats| stats.missing),
    ("vm_present_pages", "Pages in place.", |stats| stats.present),
    ("vm_removed_pages", "Pages that the VMM has discarded.", |stats| stats.removed),
    ("vm_frozen", "Whether the memory is frozen.", |stats| usize::from(stats.frozen)),
    ("vm_copied_bytes", "Copies of pages that were written to while frozen.", |stats| stats.copied),
];

impl VmmHost {
    /// The counts of all endpoints and VMMs, in the text format of Prometheus.
    #[must_use]
    pub fn metrics(&self) -> String {
        let (endpoints, vms) = (self.endpoints(), self.vms());
        let mut page = Page(String::new());
        page.metric("endpoints", "gauge", "Open endpoints.");
        page.sample("endpoints", &[], endpoints.len());
        page.metric("streaming_bytes", "gauge", "Pages on their way to VMMs.");
        page.sample("streaming_bytes", &[], self.stream_budget().used());
        for (name, kind, help, value) in ENDPOINT_COUNTS {
            page.metric(name, kind, help);
            for endpoint in &endpoints {
                page.sample(name, &[("name", &endpoint.options.name)], value(endpoint));
            }
        }
        page.metric("budget_bytes", "gauge", "Limit of used_bytes.");
        for endpoint in &endpoints {
            if let Some(budget) = endpoint.options.budget {
                page.sample("budget_bytes", &[("name", &endpoint.options.name)], budget);
            }
        }
        let stats: Vec<(&str, VmStats)> =
            vms.iter().map(|(name, vm)| (&**name, vm.stats())).collect();
        for (name, help, value) in VM_COUNTS {
            page.metric(name, "gauge", help);
            for (vm, stats) in &stats {
                page.sample(name, &[("vm", vm)], value(stats));
            }
        }
        page.0
    }
}
