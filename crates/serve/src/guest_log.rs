//! A guest's standard output and error in the server's log: one event for each line, with the
//! guest, the stream and the request.
//!
//! Promises: a guest writes at most [`CALL_LIMIT`] bytes to the log in a request, and at most
//! [`LINE_LIMIT`] in an event. An event is one line of printable text: a guest cannot end a line of
//! the log, nor control a terminal.

use std::sync::{Arc, Mutex, MutexGuard};

use afresh::wasm::{OutputHandler, StandardStream};

use crate::lock::lock;
use crate::printable_text::printable;

/// The target of the events.
pub(crate) const TARGET: &str = "afresh_serve::guest";

/// Maximum bytes of a line. A longer one becomes several events.
const LINE_LIMIT: usize = 4 << 10;
/// Maximum bytes of a request. Each event counts [`EVENT_COST`] more than its text.
const CALL_LIMIT: usize = 64 << 10;
const EVENT_COST: usize = 64;

/// The log of an instance, for one request at a time.
pub(crate) struct GuestLog {
    guest: Arc<str>,
    call: Mutex<CallLog>,
}

/// The log of a request.
struct CallLog {
    request: String,
    /// Bytes that may still be logged.
    left: usize,
    is_full: bool,
    /// The beginning of the next line, of output and of errors.
    lines: [Vec<u8>; 2],
}

impl CallLog {
    fn new(request: String) -> Self {
        Self { request, left: CALL_LIMIT, is_full: false, lines: [Vec::new(), Vec::new()] }
    }
}

/// Logs the rest of a request when it is dropped.
pub(crate) struct LoggedCall(Arc<GuestLog>);

impl Drop for LoggedCall {
    fn drop(&mut self) {
        self.0.flush();
    }
}

impl GuestLog {
    pub(crate) fn new(guest: Arc<str>) -> Arc<Self> {
        Arc::new(Self { guest, call: Mutex::new(CallLog::new(String::new())) })
    }

    /// Begins a request with a new budget.
    pub(crate) fn begin(self: &Arc<Self>, request: &str) -> LoggedCall {
        *self.lock() = CallLog::new(request.to_owned());
        LoggedCall(self.clone())
    }

    /// The log as the output of a Wasm guest.
    pub(crate) fn handler(self: &Arc<Self>) -> OutputHandler {
        let log = self.clone();
        OutputHandler::new(move |stream, bytes| log.write(stream, bytes))
    }

    fn lock(&self) -> MutexGuard<'_, CallLog> {
        lock(&self.call)
    }

    /// Logs whole lines, and keeps the beginning of the next one.
    pub(crate) fn write(&self, stream: StandardStream, mut bytes: &[u8]) {
        let mut call = self.lock();
        while !bytes.is_empty() && !call.is_full {
            let line = call.line(stream);
            let room = bytes.len().min(LINE_LIMIT - line.len());
            let end = bytes[..room].iter().position(|byte| *byte == b'\n');
            let (part, rest) = bytes.split_at(end.unwrap_or(room));
            line.extend_from_slice(part);
            match end {
                Some(_) => {
                    bytes = &rest[1..];
                    let line = std::mem::take(call.line(stream));
                    self.emit(&mut call, stream, line);
                }
                None => {
                    bytes = rest;
                    if line.len() == LINE_LIMIT {
                        let cut = character_boundary(line);
                        let next = line.split_off(cut);
                        let line = std::mem::replace(line, next);
                        self.emit(&mut call, stream, line);
                    }
                }
            }
        }
    }

    /// Logs lines without an end.
    fn flush(&self) {
        let mut call = self.lock();
        for stream in [StandardStream::Output, StandardStream::Error] {
            let line = std::mem::take(call.line(stream));
            if !line.is_empty() && !call.is_full {
                self.emit(&mut call, stream, line);
            }
        }
    }

    fn emit(&self, call: &mut CallLog, stream: StandardStream, mut line: Vec<u8>) {
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        let (guest, request) = (&*self.guest, call.request.as_str());
        let Some(left) = call.left.checked_sub(line.len() + EVENT_COST) else {
            call.is_full = true;
            call.lines = [Vec::new(), Vec::new()];
            tracing::warn!(
                target: TARGET,
                guest,
                request.id = call.request,
                "further output of this request is not logged: it has more than {CALL_LIMIT} bytes"
            );
            return;
        };
        call.left = left;
        let stream = match stream {
            StandardStream::Output => "stdout",
            StandardStream::Error => "stderr",
        };
        let text = String::from_utf8_lossy(&line);
        let text = printable(&text);
        tracing::info!(target: TARGET, guest, stream, request.id = request, "{text}");
    }
}

impl CallLog {
    fn line(&mut self, stream: StandardStream) -> &mut Vec<u8> {
        &mut self.lines[usize::from(stream == StandardStream::Error)]
    }
}

/// The length of the whole characters of UTF-8 at the beginning of a full line.
fn character_boundary(line: &[u8]) -> usize {
    match std::str::from_utf8(line) {
        Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => error.valid_up_to(),
        // Other bytes are not text, wherever they are cut.
        _ => line.len(),
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    /// Names and values of the fields of an event.
    type EventFields = Vec<(String, String)>;

    /// Fields of the events of a thread.
    #[derive(Clone, Default)]
    struct Events(Arc<Mutex<Vec<EventFields>>>);

    struct Fields(Vec<(String, String)>);

    impl Visit for Fields {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            self.0.push((field.name().to_owned(), format!("{value:?}")));
        }

        fn record_str(&mut self, field: &Field, value: &str) {
            self.0.push((field.name().to_owned(), value.to_owned()));
        }
    }

    impl Subscriber for Events {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target() == TARGET
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, event: &Event<'_>) {
            let mut fields = Fields(vec![("level".into(), event.metadata().level().to_string())]);
            event.record(&mut fields);
            self.0.lock().unwrap().push(fields.0);
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    /// The messages of a request that writes these pieces to its standard output.
    fn messages<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<String> {
        let events = Events::default();
        tracing::subscriber::with_default(events.clone(), || {
            let log = GuestLog::new("guest".into());
            let call = log.begin("one");
            pieces.into_iter().for_each(|piece| log.write(StandardStream::Output, piece));
            drop(call);
        });
        let events = events.0.lock().unwrap();
        let message = |event: &Vec<(String, String)>| {
            event.iter().find(|(name, _)| name == "message").unwrap().1.clone()
        };
        events.iter().map(message).collect()
    }

    #[test]
    fn an_event_has_the_guest_the_stream_and_the_request() {
        let events = Events::default();
        tracing::subscriber::with_default(events.clone(), || {
            let log = GuestLog::new("guest".into());
            let call = log.begin("one");
            log.write(StandardStream::Output, b"to ");
            log.write(StandardStream::Error, b"an error\n");
            log.write(StandardStream::Output, b"output");
            drop(call);
            let _next = log.begin("two");
            log.write(StandardStream::Output, b"more\n");
        });
        let event = |stream: &str, request: &str, message: &str| {
            let fields = [
                ("level", "INFO"),
                ("message", message),
                ("guest", "guest"),
                ("stream", stream),
                ("request.id", request),
            ];
            fields.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec()
        };
        let expected = [
            event("stderr", "one", "an error"),
            event("stdout", "one", "to output"),
            event("stdout", "two", "more"),
        ];
        assert_eq!(*events.0.lock().unwrap(), expected);
    }

    #[test]
    fn lines_are_cut_at_their_limit_between_characters() {
        let long = "ä".repeat(LINE_LIMIT);
        let text = format!("x{long}\n");
        let found = messages(text.as_bytes().chunks(1000));
        assert!(found.iter().all(|line| line.len() <= LINE_LIMIT), "{:?}", found.len());
        assert_eq!(found.concat(), text.trim_end());
        // Bytes without characters are cut as well.
        assert_eq!(messages([&[0x80; LINE_LIMIT + 1][..]]).len(), 2);
    }

    #[test]
    fn a_request_logs_no_more_than_its_limit() {
        let said =
            messages(std::iter::repeat_n(&b"0123456789abcdef0123456789abcdef\n"[..], 10_000));
        assert_eq!(said.len(), CALL_LIMIT / (32 + EVENT_COST) + 1);
        assert!(said[said.len() - 1].contains("further output"), "{}", said[said.len() - 1]);
        // Empty lines count as well.
        assert_eq!(messages([&[b'\n'; 100_000][..]]).len(), CALL_LIMIT / EVENT_COST + 1);
    }

    #[test]
    fn control_characters_are_escaped() {
        let found = messages([&b"a\x1b[31m\rb\tc\r\nINFO forged\xe2\x80\xa8x\n"[..]]);
        assert_eq!(found, [r"a\u{1b}[31m\u{d}b	c", r"INFO forged\u{2028}x"]);
    }
}
