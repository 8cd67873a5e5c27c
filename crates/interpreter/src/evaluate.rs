//! One evaluation: a call of a guest, with everything that belongs to it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use afresh::wasm::entropy_bytes;
use afresh::{CallCost, CallError, CallOptions, Entry, Lease, OutputSource, OutputStream};

use crate::answer_limit::AnswerTooLong;
use crate::frame::{Frame, FrameStream, StreamedFrame};
use crate::listener::{HostCallbacks, ListenerState, Stream};
use crate::request::{CallConvention, Request};

/// How an evaluation went.
#[derive(Debug)]
pub struct Evaluation<L> {
    /// The guest's answer, for [`Answer::read`](crate::Answer::read); an error if the call gave no
    /// answer.
    pub answer: Result<Vec<u8>, CallError>,
    /// The listener, with the data that it collected.
    pub listener: L,
    /// The cost of the call, with the bytes that the listener dropped.
    pub cost: CallCost,
}

/// Makes one call of a guest. Requests of the guest during the call go to `listener`, if the guest
/// was opened with [`imports`](crate::imports) and [`state`](crate::state) of its type, or is a
/// [program](crate::Language::program).
pub fn evaluate<'f, L: HostCallbacks>(
    lease: &mut Lease<'_>,
    function: impl Into<Entry<'f>>,
    request: Request,
    listener: L,
) -> Evaluation<L> {
    let function = function.into();
    let counts_pages = listener.counts_pages();
    // The caller did not choose the function that interpreters have.
    let has_usual_function = function.name() == request.form().function();
    let call = |lease: &mut Lease<'_>| call(lease, function, request, listener);
    let (called, mut cost) = match counts_pages {
        true => lease.measure_pages(call),
        false => lease.measure(call),
    };
    let UnmeasuredCall { answer, listener, received } = called;
    cost.output_bytes += received;
    cost.dropped_bytes += listener.dropped_bytes();
    let answer = match has_usual_function {
        true => answer.map_err(CallError::without_function),
        false => answer,
    };
    Evaluation { answer, listener, cost }
}

/// A call that was not measured.
struct UnmeasuredCall<L> {
    answer: Result<Vec<u8>, CallError>,
    listener: L,
    /// Bytes that a Wasm guest sent to the listener.
    received: u64,
}

/// The options of a call that may use so much CPU time.
fn limited(cpu_time: Option<Duration>) -> CallOptions {
    match cpu_time {
        Some(limit) => CallOptions::new().cpu_time_limit(limit),
        None => CallOptions::new(),
    }
}

fn call<L: HostCallbacks>(
    lease: &mut Lease<'_>,
    function: Entry<'_>,
    mut request: Request,
    listener: L,
) -> UnmeasuredCall<L> {
    if let Some(generation) = lease.generation() {
        request.address_to(generation, entropy_bytes());
    }
    let options = limited(listener.cpu_time_limit());
    let Some(module) = lease.as_module() else {
        return match request.form() {
            CallConvention::Frame => through_streams(lease, function, &request, listener),
            // A component or a micro-VM, which sends no requests during the call.
            CallConvention::Array => {
                let answer = lease.call_with(function, request.bytes(), &options);
                UnmeasuredCall { answer, listener, received: 0 }
            }
        };
    };
    *module.host_mut().state::<ListenerState<L>>() = ListenerState::of(listener);
    let answer = lease.call_with(function, request.bytes(), &options);
    let mut heard = ListenerState::default();
    if let Some(module) = lease.as_module() {
        heard = std::mem::take(module.host_mut().state::<ListenerState<L>>());
    }
    // One that answers by a frame gives nothing back.
    let given = heard.given;
    let answer = answer.and_then(|answer| {
        given.unwrap_or(Ok(answer)).map_err(|source| CallError::Guest {
            function: function.name().to_owned(),
            source: source.into(),
        })
    });
    UnmeasuredCall { answer, listener: heard.listener, received: heard.received }
}

/// Bytes as they go through a stream.
pub(crate) fn after_length(bytes: &[u8]) -> Vec<u8> {
    // More than 4 GiB does not fit into the guest's memory.
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes();
    [&length, bytes].concat()
}

/// Output of a guest in pieces: printed text, and frames to the host.
struct Frames<L> {
    hearing: ListenerState<L>,
    stream: FrameStream,
    /// A call of a host function whose reply is due.
    tool: Option<Vec<u8>>,
}

impl<L: HostCallbacks> Frames<L> {
    fn of(listener: L) -> Self {
        Self { hearing: ListenerState::of(listener), stream: FrameStream::default(), tool: None }
    }
}

impl<L: HostCallbacks> Frames<L> {
    /// Hears a piece; `false` ends the call.
    fn hear(&mut self, from: OutputSource, piece: &[u8]) -> bool {
        if piece.is_empty() {
            return self.hearing.listener.proceeds();
        }
        let stream = match from.stream {
            OutputStream::Output => Some(Stream::Stdout),
            OutputStream::Error => Some(Stream::Stderr),
            _ => None,
        };
        let listener = &mut self.hearing.listener;
        if let Some(stream) = stream {
            let heard = match from.session_id {
                Some(number) => listener.print_command(number, stream, piece),
                None => listener.print(stream, piece),
            };
            return heard.is_ok();
        }
        let (hearing, tool) = (&mut self.hearing, &mut self.tool);
        let limit = hearing.listener.max_frame();
        self.stream.push(piece, limit, |frame| match frame {
            StreamedFrame::LongAnswer(bytes) => {
                hearing.given = Some(Err(AnswerTooLong { bytes, limit }));
                true
            }
            StreamedFrame::Whole(frame) => match Frame::parse(frame) {
                // The program waits for the reply on its standard input, so only one is due.
                Some(Frame::Tool(request)) => tool.replace(request.to_vec()).is_none(),
                _ => matches!(hearing.hear(frame), Ok(Some(said)) if said.is_empty()),
            },
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The listener of a program, shared so that it can be taken back at the end.
struct SharedFrames<L>(Arc<Mutex<Frames<L>>>);

impl<L: HostCallbacks> SharedFrames<L> {
    fn new(listener: L) -> Self {
        Self(Arc::new(Mutex::new(Frames::of(listener))))
    }

    fn hear(&self) -> impl FnMut(OutputSource, &[u8]) -> bool + Send + 'static {
        let hearing = Arc::clone(&self.0);
        move |from, piece| lock(&hearing).hear(from, piece)
    }

    /// The reply to a call of a host function, if one is due; an error ends the guest's call.
    fn reply(&self) -> Option<afresh::wasm::wasmtime::Result<Vec<u8>>> {
        let mut frames = lock(&self.0);
        let request = frames.tool.take()?;
        Some(frames.hearing.listener.call(&request))
    }

    fn into_hearing(self) -> ListenerState<L> {
        std::mem::take(&mut lock(&self.0).hearing)
    }
}

fn through_streams<L: HostCallbacks>(
    lease: &mut Lease<'_>,
    function: Entry<'_>,
    request: &Request,
    listener: L,
) -> UnmeasuredCall<L> {
    let name = function.name().to_owned();
    let limit = listener.cpu_time_limit();
    let ears = SharedFrames::new(listener);
    // The calls that pass replies have one limit together.
    let mut left = limit;
    let mut pass = |input: &[u8]| {
        let (called, cost) = lease.measure(|lease| {
            lease.call_streaming_with(name.as_str(), input, &limited(left), ears.hear())
        });
        left = left.map(|left| left.saturating_sub(cost.cpu));
        called
    };
    let mut called = pass(&request.after_length());
    // A program that calls a host function waits for the next bytes of its input.
    while called.is_ok()
        && let Some(reply) = ears.reply()
    {
        called = match reply {
            Ok(reply) => pass(&after_length(&reply)),
            Err(error) => Err(CallError::Stopped { function: name.clone(), source: error.into() }),
        };
    }
    if let (Err(CallError::CpuTime { limit: rest, .. }), Some(limit)) = (&mut called, limit) {
        *rest = limit;
    }
    let ListenerState { given, listener, .. } = ears.into_hearing();
    // A program that has ended itself has answered nothing, however it ended.
    let answer = called.and_then(|()| match given {
        Some(given) => {
            given.map_err(|source| CallError::Guest { function: name, source: source.into() })
        }
        None => {
            let source = "it ended without an answer".into();
            Err(CallError::Guest { function: name, source })
        }
    });
    UnmeasuredCall { answer, listener, received: 0 }
}

/// Lets a Linux program continue its background work, as [`Lease::proceed`] does. `listener`
/// receives its output, and is returned.
///
/// # Errors
/// As [`Lease::proceed`].
#[cfg(linux_guests)]
pub fn proceed<L: HostCallbacks>(lease: &mut Lease<'_>, listener: L) -> (Result<(), CallError>, L) {
    let ears = SharedFrames::new(listener);
    let proceeded = lease.proceed(ears.hear());
    (proceeded, ears.into_hearing().listener)
}

#[cfg(test)]
mod tests {
    use super::*;
    use afresh::wasm::wasmtime;

    #[derive(Default)]
    struct Message(String);

    impl HostCallbacks for Message {
        fn print(&mut self, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
            self.0 += &format!("{stream:?} {} ", String::from_utf8_lossy(bytes));
            Ok(())
        }
    }

    #[test]
    fn a_guest_that_is_no_interpreter_gets_its_input_unchanged() {
        let component = r#"(component
            (core module $m
                (memory (export "memory") 1)
                (func (export "realloc") (param i32 i32 i32 i32) (result i32) (i32.const 1024))
                (func (export "echo") (param i32 i32) (result i32)
                    (i32.store (i32.const 16) (local.get 0))
                    (i32.store (i32.const 20) (local.get 1))
                    (i32.const 16)))
            (core instance $i (instantiate $m))
            (func (export "echo") (param "text" string) (result string)
                (canon lift (core func $i "echo") (memory (core memory $i "memory"))
                    (realloc (core func $i "realloc")))))"#;
        let component = wat::parse_str(component).unwrap();
        let guest = afresh::Guest::from_bytes("echo", &component, &afresh::Options::new()).unwrap();
        let plain = guest.lease().unwrap().call("echo", b"said").unwrap();
        let mut lease = guest.lease().unwrap();
        let asked = evaluate(&mut lease, "echo", Request::plain(b"said"), Message::default());
        assert_eq!(asked.answer.unwrap(), plain);
        assert_eq!(asked.listener.0, "");
    }

    /// A listener of answers of at most eight bytes.
    #[derive(Default)]
    struct ShortAnswers(usize);

    impl HostCallbacks for ShortAnswers {
        fn print(&mut self, _: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
            self.0 += bytes.len();
            Ok(())
        }

        fn max_frame(&self) -> usize {
            8
        }
    }

    #[test]
    fn a_long_answer_is_skipped_and_another_long_frame_ends_the_call() {
        let long = [&b"\x00"[..], &[7; 1000]].concat();
        let all = [&b"\x01one"[..], &long, b"\x01three"].map(after_length).concat();
        for size in 1..all.len() {
            let mut frames = Frames::of(ShortAnswers::default());
            assert!(all.chunks(size).all(|piece| frames.hear(OutputStream::Host.into(), piece)));
            let too_long = AnswerTooLong { bytes: 1000, limit: 8 };
            assert_eq!(frames.hearing.given, Some(Err(too_long)));
            assert_eq!(frames.hearing.listener.0, 8);
        }
        let mut frames = Frames::of(ShortAnswers::default());
        assert!(!frames.hear(OutputStream::Host.into(), &after_length(b"\x01too long")));
    }

    #[test]
    fn frames_are_put_together_however_they_come() {
        let all = [&b"\x01one"[..], b"\x02two", b"\x00answer"].map(after_length).concat();
        for size in 1..all.len() {
            let mut frames = Frames::of(Message::default());
            assert!(frames.hear(OutputStream::Error.into(), b"printed"));
            assert!(all.chunks(size).all(|piece| frames.hear(OutputStream::Host.into(), piece)));
            assert_eq!(frames.hearing.listener.0, "Stderr printed Stdout one Stderr two ");
            assert_eq!(frames.hearing.given, Some(Ok(b"answer".to_vec())));
        }
        // The call of a host function waits for its reply, and a second one before that is refused.
        let mut frames = Frames::of(Message::default());
        let tool = after_length(b"\x03\x80");
        assert!(frames.hear(OutputStream::Host.into(), &tool));
        assert_eq!(frames.tool.as_deref(), Some(&b"\x80"[..]));
        assert!(!frames.hear(OutputStream::Host.into(), &tool));
        let mut frames = Frames::of(Message::default());
        assert!(!frames.hear(OutputStream::Host.into(), b"\xff\xff\xff\xff\x01"));
        for wrong in [&b""[..], b"\x09"] {
            let mut frames = Frames::of(Message::default());
            assert!(!frames.hear(OutputStream::Host.into(), &after_length(wrong)), "{wrong:?}");
        }
    }
}
