//! The control socket: answers requests of clients, a JSON object a line each way.
//!
//! Promises: a client costs at most its thread, one line and one answer. One that sends too much,
//! or does not read its answers, is disconnected. A request that fails changes nothing, for its VMM
//! or another. Requests with large buffers are worked on one at a time. A client that cannot be
//! accepted is reported, and later ones are served.
//!
//! May break it: any client may open endpoints and write snapshots with the rights of this process.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use afresh_budget::Charge;
use afresh_store::{MAX_STATE, Store};
use afresh_sys::socket::{self, SocketAccess};
use afresh_sys::{PageRange, poll};
use serde_json::{Value, json};

use super::host::{HostEvent, PAUSE, VmmHost};
use super::listener::{ListenError, Listener};
use super::request::{Request, parse_request};
use super::request_error::RequestError;
use super::vm::{Vm, VmSaveOptions};
use crate::PageSource;

/// Maximum length of a line.
const MAX_LINE: usize = 64 << 10;
/// Clients at a time.
const MAX_CLIENTS: usize = 16;
/// Time limit for a client to read an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time of one wait before a stop is noticed.
const TICK: Duration = Duration::from_millis(50);

/// Any error, for a text.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Opens snapshots by their references, for requests.
pub trait Snapshots: Send + Sync {
    /// The pages of a snapshot.
    ///
    /// # Errors
    /// Any, whose text the client gets.
    fn open(&self, reference: &str) -> Result<Arc<dyn PageSource>, Cause>;

    /// The store and the name that a new snapshot is saved under.
    ///
    /// # Errors
    /// Any, whose text the client gets.
    fn target(&self, reference: &str) -> Result<(Store, String), Cause>;
}

/// Answers the requests of clients.
pub struct ControlServer {
    listener: Listener,
    handler: Arc<Handler>,
}

impl std::fmt::Debug for ControlServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlServer").field("listener", &self.listener).finish_non_exhaustive()
    }
}

struct Handler {
    host: VmmHost,
    snapshots: Box<dyn Snapshots>,
    clients: AtomicUsize,
    /// Held while a snapshot is saved, or all pages of a VMM are listed: one at a time, so that
    /// their buffers do not add up.
    saving: Mutex<()>,
}

impl ControlServer {
    /// Listens for clients at `path`.
    ///
    /// # Errors
    /// As [`Listener::bind_for`].
    pub fn bind(
        path: &Path,
        access: SocketAccess,
        host: VmmHost,
        snapshots: impl Snapshots + 'static,
    ) -> Result<Self, ListenError> {
        Ok(Self::new(Listener::bind_for(path, access)?, host, snapshots))
    }

    /// Listens for clients at a socket that is there.
    pub fn new(listener: Listener, host: VmmHost, snapshots: impl Snapshots + 'static) -> Self {
        let handler = Handler {
            host,
            snapshots: Box::new(snapshots),
            clients: AtomicUsize::new(0),
            saving: Mutex::new(()),
        };
        Self { listener, handler: Arc::new(handler) }
    }

    /// Answers clients until `stop` is set.
    pub fn serve(&self, stop: &AtomicBool) {
        let handler = &*self.handler;
        let failed = |error: &io::Error| handler.host.report(&HostEvent::ClientFailed { error });
        std::thread::scope(|scope| {
            while !stop.load(Ordering::Acquire) {
                let mut stream = match self.listener.accept_within(TICK) {
                    Ok(Some(stream)) => stream,
                    Ok(None) => continue,
                    Err(error) => {
                        // For example, no descriptors are left. Some may be later.
                        failed(&error);
                        std::thread::sleep(PAUSE);
                        continue;
                    }
                };
                if handler.clients.fetch_add(1, Ordering::AcqRel) >= MAX_CLIENTS {
                    handler.clients.fetch_sub(1, Ordering::AcqRel);
                    let text = format!("{MAX_CLIENTS} clients are connected: disconnect one");
                    // The client sees the end of the stream, if not this.
                    let _ = stream.set_nonblocking(true);
                    let _ = stream.write_all(refusal(None, text).as_bytes());
                    continue;
                }
                let work = move || {
                    // A client that disconnects ends its own thread.
                    let _ = handler.converse(&stream, stop);
                    handler.clients.fetch_sub(1, Ordering::AcqRel);
                };
                let thread = std::thread::Builder::new().name("afresh-control".to_owned());
                if let Err(error) = thread.spawn_scoped(scope, work) {
                    handler.clients.fetch_sub(1, Ordering::AcqRel);
                    failed(&error);
                }
            }
        });
    }
}

fn send_answer(stream: &UnixStream, text: &str) -> io::Result<()> {
    socket::send_within(stream.as_fd(), text.as_bytes(), ANSWER_TIMEOUT).map_err(io::Error::other)
}

fn refusal(id: Option<Value>, error: impl std::fmt::Display) -> String {
    answer(id, false, json!({ "error": error.to_string() }))
}

fn answer(id: Option<Value>, ok: bool, mut fields: Value) -> String {
    if let Some(id) = id {
        fields["id"] = id;
    }
    fields["ok"] = ok.into();
    format!("{fields}\n")
}

/// Ranges as pairs: first page and number of pages.
fn pairs(ranges: &[PageRange]) -> Value {
    ranges.iter().map(|run| json!([run.start, run.len])).collect()
}

impl Handler {
    /// Answers the lines of a client until it disconnects.
    fn converse(&self, stream: &UnixStream, stop: &AtomicBool) -> io::Result<()> {
        let (mut line, mut part) = (Vec::new(), [0; 4096]);
        while !stop.load(Ordering::Acquire) {
            if poll::readable([stream.as_fd()], TICK).map_err(io::Error::other)? == [false] {
                continue;
            }
            let read = (&mut &*stream).read(&mut part)?;
            if read == 0 {
                return Ok(());
            }
            for bytes in part[..read].split_inclusive(|byte| *byte == b'\n') {
                line.extend_from_slice(bytes);
                if line.len() > MAX_LINE {
                    let text = format!("a request is longer than {MAX_LINE} bytes");
                    return send_answer(stream, &refusal(None, text));
                }
                if line.last() == Some(&b'\n') {
                    let mut charges = Vec::new();
                    let text = self.reply(&line, &mut charges);
                    send_answer(stream, &text)?;
                    drop(charges);
                    line.clear();
                }
            }
        }
        Ok(())
    }

    /// The answer to a line. `charges` gets those of its text.
    fn reply(&self, line: &[u8], charges: &mut Vec<Charge>) -> String {
        let (id, request) = parse_request(line);
        match request.map_err(Cause::from).and_then(|request| self.perform(request, charges)) {
            Ok(fields) => answer(id, true, fields),
            Err(error) => refusal(id, error),
        }
    }

    /// Waits for its turn among requests with large buffers.
    fn take_turn(&self) -> MutexGuard<'_, ()> {
        self.saving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn perform(&self, request: Request, charges: &mut Vec<Charge>) -> Result<Value, Cause> {
        match request {
            Request::List {} => Ok(self.list()),
            Request::Add(endpoint) => {
                let source = self.snapshots.open(&endpoint.snapshot)?;
                let pages = source.pages();
                self.host.open_endpoint(*endpoint, source)?;
                Ok(json!({ "pages": pages }))
            }
            Request::Remove { name } => {
                self.host.close_endpoint(&name)?;
                Ok(json!({}))
            }
            Request::Stats { vm } => {
                let vms = match vm {
                    Some(name) => vec![(name.clone(), self.host.vm(&name)?)],
                    None => self.host.vms(),
                };
                Ok(json!({ "vms": vms.iter().map(stats).collect::<Vec<_>>() }))
            }
            Request::Touched { vm } => {
                let vm = self.host.vm(&vm)?;
                let _turn = self.take_turn();
                let (touched, of_lists) = vm.touched_charged()?;
                *charges = of_lists;
                Ok(json!({
                    "read": pairs(&touched.read), "written": pairs(&touched.written),
                    "removed": pairs(&touched.removed), "exact": touched.exact,
                }))
            }
            Request::Record { vm, to } => {
                let vm = self.host.vm(&vm)?;
                let (store, name) = self.snapshots.target(&to)?;
                let _turn = self.take_turn();
                let (id, pages) = vm.record(&store, &name)?;
                Ok(json!({ "id": id.to_string(), "pages": pages }))
            }
            Request::Prefetch { vm, pages } => {
                let missing = self.host.vm(&vm)?.prefetch(pages.as_deref())?;
                Ok(json!({ "missing": missing }))
            }
            Request::Detach { vm, timeout } => {
                self.host.vm(&vm)?.detach(timeout)?;
                Ok(json!({}))
            }
            Request::Prepare { vm } => {
                let prepared = self.host.vm(&vm)?.prepare()?;
                Ok(json!({ "watch": prepared.watch, "open": prepared.open }))
            }
            Request::Freeze { vm, watch } => {
                let frozen = self.host.vm(&vm)?.freeze(watch)?;
                let took = u64::try_from(frozen.took.as_micros()).unwrap_or(u64::MAX);
                Ok(json!({ "watch": frozen.watch, "took_us": took }))
            }
            Request::Thaw { vm, watch } => Ok(json!({ "thawed": self.host.vm(&vm)?.thaw(watch) })),
            Request::Snapshot { vm, watch, to, state, encoding } => {
                let vm = self.host.vm(&vm)?;
                let mut options = VmSaveOptions { encoding, watch, ..VmSaveOptions::default() };
                let (store, name) = self.snapshots.target(&to)?;
                let _turn = self.take_turn();
                if let Some(path) = state {
                    options.state = read_state(&path)?;
                }
                let (id, compared) = vm.snapshot(&store, &name, &options)?;
                let saved = store.load_id(id).map_err(RequestError::from)?;
                // The top layer was written.
                let written = saved.layers().last().map_or(0, |layer| layer.size());
                Ok(json!({
                    "id": id.to_string(), "compared_bytes": compared, "written_bytes": written,
                }))
            }
        }
    }

    fn list(&self) -> Value {
        let endpoint = |endpoint: super::EndpointInfo| {
            json!({
                "name": endpoint.options.name,
                "snapshot": endpoint.options.snapshot,
                "socket": endpoint.options.socket.display().to_string(),
                "vms": endpoint.vms,
                "budget_bytes": endpoint.options.budget,
                "used_bytes": endpoint.used,
            })
        };
        json!({
            "endpoints": self.host.endpoints().into_iter().map(endpoint).collect::<Vec<_>>(),
            "vms": self.host.vms().into_iter().map(|(name, _)| name).collect::<Vec<_>>(),
        })
    }
}

fn stats((name, vm): &(String, Vm)) -> Value {
    let stats = vm.stats();
    json!({
        "name": name,
        "state": stats.state.name(),
        "pages": stats.pages,
        "missing": stats.missing,
        "present": stats.present,
        "removed": stats.removed,
        "faults": stats.served.faults,
        "filled": stats.served.pages,
        "empty": stats.served.empty,
        "zeroed": stats.served.zeroed,
        "removals": stats.served.removals,
        "watch": stats.watch,
        "frozen": stats.frozen,
        "copied_bytes": stats.copied,
    })
}

/// Reads the state of a VMM from a file.
fn read_state(path: &Path) -> Result<Vec<u8>, Cause> {
    let failed = |error: io::Error| format!("{}: {error}", path.display());
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(format!("{}: not a regular file", path.display()).into());
    }
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut state = Vec::new();
    file.take(MAX_STATE + 1).read_to_end(&mut state).map_err(failed)?;
    if state.len() as u64 > MAX_STATE {
        return Err(format!("{}: longer than {MAX_STATE} bytes", path.display()).into());
    }
    Ok(state)
}

/// A connection to a control socket.
#[derive(Debug)]
pub struct ControlClient(UnixStream);

impl ControlClient {
    /// Connects.
    ///
    /// # Errors
    /// An error of `connect`.
    pub fn connect(path: &Path) -> io::Result<Self> {
        UnixStream::connect(path).map(Self)
    }

    /// Sends a request, a JSON object, and returns the fields of its answer.
    ///
    /// # Errors
    /// The `error` of the answer; an error of the socket.
    pub fn request(&mut self, request: &Value) -> io::Result<Value> {
        let answer = self.exchange(&request.to_string())?;
        match Self::refusal(&answer) {
            Some(error) => Err(io::Error::other(error)),
            None => Ok(serde_json::from_str(&answer)?),
        }
    }

    /// Sends a request, the text of a JSON object, and returns the text of its answer.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a request that is no JSON object; nothing is sent then.
    /// An error of the socket.
    pub fn exchange(&mut self, request: &str) -> io::Result<String> {
        // A client may write it on several lines, and the pager reads one.
        let request: serde_json::Map<String, Value> =
            serde_json::from_str(request).map_err(|e| {
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("a request is a JSON object: {e}"),
                )
            })?;
        self.0.write_all(format!("{}\n", Value::Object(request)).as_bytes())?;
        let (mut line, mut part) = (Vec::new(), [0; 4096]);
        while line.last() != Some(&b'\n') {
            match self.0.read(&mut part)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => line.extend_from_slice(&part[..read]),
            }
        }
        String::from_utf8(line).map_err(io::Error::other)
    }

    /// The `error` of an answer, if the request was refused.
    #[must_use]
    pub fn refusal(answer: &str) -> Option<String> {
        let answer: Value = match serde_json::from_str(answer) {
            Ok(answer) => answer,
            Err(error) => return Some(format!("the answer is no JSON: {error}")),
        };
        (answer["ok"] != true).then(|| match answer["error"].as_str() {
            Some(error) => error.to_owned(),
            None => "the pager has given no reason".to_owned(),
        })
    }
}
