//! Routes the output of a running call to clients: that of code to its caller, that of commands to
//! their subscribers.
//!
//! Promises: output that waits for a client is bounded. Code that prints faster than its client
//! reads waits, up to the time limit of the call; a command waits for half of that, and then its
//! client gets no more. Output without a reader is dropped. In a fleet no output of a sandbox is
//! sent once another host may own it.

use std::sync::Arc;
use std::time::Duration;

use afresh::CallCost;
use afresh::wasm::wasmtime;
use afresh_interpreter::{Answer, CharacterJoiner, HostCallbacks, Stream};
use bytes::Bytes;
use tokio::time::Instant;

use crate::concurrency::Permit;
use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::agent::byte_channel::{Receiver, SendError, Sender, byte_channel};
use crate::sandbox::agent::commands::{Commands, Subscriber};
use crate::sandbox::agent::connect::{self, ConnectError};
use crate::sandbox::tenants::cpu_scheduler::CpuTurn;

/// Maximum bytes of one piece of output.
pub(crate) const MAX_PIECE_BYTES: usize = 32 << 10;
/// Maximum bytes of an answer from the guest, and of a result of its code.
pub(crate) const MAX_ANSWER_BYTES: usize = 16 << 20;
/// Maximum bytes that are kept for a command whose number is not known yet.
const MAX_EARLY_BYTES: usize = 1 << 20;
/// Bytes that a piece of it takes in addition to its content.
const PIECE_COST: usize = 64;

/// CPU time that a call to manage commands may use, where code has a limit.
const MANAGEMENT_CPU_TIME: Duration = Duration::from_secs(5);

/// The encoding of a piece of at most [`MAX_PIECE_BYTES`] bytes.
pub(crate) type EncodeOutput = fn(Stream, &[u8]) -> Vec<u8>;

/// The encoding of a result, which is an object in JSON; `None` for other bytes.
pub(crate) type EncodeResult = fn(&[u8]) -> Option<Vec<u8>>;

/// The receivers of output from a call. The default has none.
#[derive(Default)]
pub(crate) struct OutputRouter(Option<Box<RoutedOutput>>);

struct RoutedOutput {
    patience: ClientPatience,
    commands: Arc<Commands>,
    /// Whether output may be sent now.
    check: Box<dyn Fn() -> Result<(), ErrorResponse> + Send>,
    /// The receiver of the output of code.
    code: Option<OutputClient>,
    /// A command that is being started.
    starting: Option<StartingCommand>,
    /// The client did not take it in time.
    late: bool,
    /// The cost of the last call.
    cost: Option<CallCost>,
    /// The CPU time that a call may use.
    cpu_limit: Option<Duration>,
}

struct OutputClient {
    sender: Sender,
    encode_output: EncodeOutput,
    encode_result: EncodeResult,
    /// Bytes before the first piece.
    head: Vec<u8>,
    /// For each stream.
    characters: [CharacterJoiner; 2],
}

struct StartingCommand {
    subscriber: Subscriber,
    limit: Option<Duration>,
    /// Output of commands without subscribers. This command may be one of them.
    early: Vec<(u32, Stream, Vec<u8>)>,
    /// Bytes of `early`.
    kept: usize,
}

/// The time limits of waits for clients.
struct ClientPatience {
    runtime: tokio::runtime::Handle,
    time: Duration,
    begun: Instant,
}

impl ClientPatience {
    /// False if the client did not take it within that part of the time. The call is parked while
    /// it waits.
    fn give(
        &self,
        commands: &Commands,
        sender: &Sender,
        message: Bytes,
        part: u32,
    ) -> wasmtime::Result<bool> {
        let message = match sender.try_give(message) {
            Ok(()) | Err(SendError::Gone) => return Ok(true),
            Err(SendError::Full(message)) => message,
        };
        let until = self.begun + self.time / part;
        commands.with_turn(CpuTurn::rest);
        let place = &commands.place;
        // The lock ends with this statement: a permit that is kept is put back under it.
        let permit = lock(place).take();
        let parked = match permit.map(Permit::park) {
            Some(Ok(parked)) => Some(parked),
            Some(Err(kept)) => {
                *lock(place) = Some(kept);
                None
            }
            None => None,
        };
        // Calls run on threads that may wait.
        let giving = async { tokio::time::timeout_at(until, sender.give(message)).await };
        let given = self.runtime.block_on(giving).is_ok();
        if let Some(parked) = parked {
            let entered = self.runtime.block_on(parked.enter(self.time));
            let none = |_| wasmtime::Error::msg("no place became free for the call to continue");
            *lock(place) = Some(entered.map_err(none)?);
        }
        Ok(given)
    }
}

impl OutputRouter {
    /// For calls of a sandbox with these commands, each for at most `time`. Within a runtime.
    pub(crate) fn new(
        time: Duration,
        commands: Arc<Commands>,
        check: impl Fn() -> Result<(), ErrorResponse> + Send + 'static,
    ) -> Self {
        let runtime = tokio::runtime::Handle::current();
        Self(Some(Box::new(RoutedOutput {
            patience: ClientPatience { runtime, time, begun: Instant::now() },
            commands,
            check: Box::new(check),
            code: None,
            starting: None,
            late: false,
            cost: None,
            cpu_limit: None,
        })))
    }

    /// Bounds the CPU time of its call.
    pub(crate) fn limit_cpu_time(mut self, limit: Option<Duration>) -> Self {
        if let Some(routed) = &mut self.0 {
            routed.cpu_limit = limit;
        }
        self
    }

    /// The router of a call that manages commands, and runs no code of its client. Its CPU time is
    /// that of the whole sandbox, so a limit for code is raised to [`MANAGEMENT_CPU_TIME`]: a busy
    /// command can be listed and ended.
    pub(crate) fn for_management(mut self) -> Self {
        if let Some(limit) = self.0.as_mut().and_then(|routed| routed.cpu_limit.as_mut()) {
            *limit = (*limit).max(MANAGEMENT_CPU_TIME);
        }
        self
    }

    /// Notes the cost of a call.
    pub(crate) fn note_cost(&mut self, cost: CallCost) {
        if let Some(routed) = &mut self.0 {
            routed.cost = Some(cost);
        }
    }

    /// The cost of the last call, if there was one.
    pub(crate) fn take_cost(&mut self) -> Option<CallCost> {
        self.0.as_mut()?.cost.take()
    }

    /// Sends the output of code to the returned receiver.
    pub(crate) fn route_code_output(
        &mut self,
        encode_output: EncodeOutput,
        encode_result: EncodeResult,
    ) -> Receiver {
        let (sender, receiver) = byte_channel();
        if let Some(routed) = &mut self.0 {
            routed.code = Some(OutputClient {
                sender,
                encode_output,
                encode_result,
                head: Vec::new(),
                characters: Default::default(),
            });
        }
        receiver
    }

    /// The call starts a command, whose output goes to `subscriber`, and which ends after `limit`.
    pub(crate) fn starts(&mut self, subscriber: Subscriber, limit: Option<Duration>) {
        if let Some(routed) = &mut self.0 {
            routed.starting =
                Some(StartingCommand { subscriber, limit, early: Vec::new(), kept: 0 });
        }
    }

    /// The call begins, and with it the time that it has. `head` comes before all output of its
    /// code.
    pub(crate) fn begin(&mut self, head: Vec<u8>) {
        let Some(routed) = &mut self.0 else { return };
        routed.patience.begun = Instant::now();
        if let Some(code) = &mut routed.code {
            code.head = head;
        }
    }

    /// Ends the call's output: sends the bytes of a character that was not completed.
    pub(crate) fn finish(&mut self) {
        let Some(routed) = &mut self.0 else { return };
        for stream in [Stream::Stdout, Stream::Stderr] {
            let begun = routed.code.as_mut().map(|code| code.characters(stream).finish());
            if let Some(begun) = begun.filter(|begun| !begun.is_empty()) {
                // The call is over: a client that does not read it changes nothing.
                let _ = routed.send_code_output(stream, &begun);
            }
        }
    }

    /// Passes the bytes of connections on, and shows the files during the next call.
    pub(crate) fn exchange(&self, lease: &mut afresh::Lease<'_>) -> Result<(), afresh::CallError> {
        #[cfg(linux_guests)]
        if let Some(routed) = self.0.as_ref().filter(|routed| (routed.check)().is_ok()) {
            routed.commands.lines.exchange(lease)?;
            lease.show_files(&routed.commands.view);
        }
        #[cfg(not(linux_guests))]
        let _ = lease;
        Ok(())
    }

    /// Output of commands since the call before is withdrawn, and commands that began after `since`
    /// do not exist any more.
    pub(crate) fn undone(&self, since: Option<std::time::Instant>) {
        let why = "the sandbox was taken back to an earlier state, because a call was cut short";
        if let Some(routed) = &self.0 {
            routed.commands.rolled_back(since, &ConnectError::new("aborted", why));
        }
    }

    /// Whether the call was ended because its client took too long.
    pub(crate) fn is_late(&self) -> bool {
        self.0.as_ref().is_some_and(|routed| routed.late)
    }
}

impl HostCallbacks for OutputRouter {
    fn print(&mut self, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        self.0.as_mut().map_or(Ok(()), |routed| routed.print(stream, bytes))
    }

    fn print_command(&mut self, number: u32, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        self.0.as_mut().map_or(Ok(()), |routed| routed.print_command(number, stream, bytes))
    }

    fn display(&mut self, result: &[u8]) -> wasmtime::Result<()> {
        self.0.as_mut().map_or(Ok(()), |routed| routed.display(result))
    }

    fn cpu_time_limit(&self) -> Option<Duration> {
        self.0.as_ref()?.cpu_limit
    }

    fn command_ended(&mut self, number: u32, status: i32) {
        if let Some(routed) = self.0.as_mut().filter(|routed| (routed.check)().is_ok()) {
            routed.commands.ended(number, status);
        }
    }

    fn max_frame(&self) -> usize {
        // The first byte of a frame is its kind.
        MAX_ANSWER_BYTES + 1
    }

    /// Ends calls of a sandbox that was killed or that this host may no longer answer for, and code
    /// whose client left. A call that computes waits here while it is the turn of others.
    fn proceeds(&mut self) -> bool {
        self.0.as_ref().is_none_or(|routed| {
            routed.proceeds() && {
                let commands = &routed.commands;
                commands.with_turn(|turn| turn.tick(|| routed.proceeds())).unwrap_or(true)
            }
        })
    }

    fn answered(&mut self, answer: &[u8]) {
        // A long answer of code is not parsed here.
        let Some(routed) = self.0.as_mut().filter(|routed| routed.starting.is_some()) else {
            return;
        };
        let Ok(Answer::Value(shown)) = Answer::read(answer) else { return };
        let number = shown.json.as_ref().and_then(serde_json::Value::as_u64);
        if let Some(number) = number.and_then(|number| u32::try_from(number).ok()) {
            // The errors of this call have no receiver any more.
            let _ = routed.started(number);
        }
    }
}

/// Pieces of output; none of them ends within a character of text.
fn pieces(mut rest: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let most = rest.len().min(MAX_PIECE_BYTES);
        let begins = |at: &usize| rest.get(*at).is_none_or(|byte| byte & 0xc0 != 0x80);
        let end = (most.saturating_sub(3)..=most).rev().find(begins).unwrap_or(most);
        let (piece, after) = rest.split_at(end);
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

impl OutputClient {
    fn characters(&mut self, stream: Stream) -> &mut CharacterJoiner {
        &mut self.characters[usize::from(stream == Stream::Stderr)]
    }
}

impl RoutedOutput {
    fn proceeds(&self) -> bool {
        let left = self.code.as_ref().is_some_and(|code| code.sender.is_left());
        !left && (self.check)().is_ok()
    }

    fn check_may_send(&self) -> wasmtime::Result<()> {
        let told = (self.check)();
        told.map_err(|_| wasmtime::Error::msg("the sandbox may be another host's by now"))
    }

    fn print(&mut self, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        let Some(code) = &mut self.code else { return Ok(()) };
        let whole = code.characters(stream).join(bytes);
        self.send_code_output(stream, &whole)
    }

    fn send_code_output(&mut self, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        let Some(encode_output) = self.code.as_ref().map(|code| code.encode_output) else {
            return Ok(());
        };
        pieces(bytes).try_for_each(|piece| self.send(&encode_output(stream, piece)))
    }

    /// Sends a result of code.
    fn display(&mut self, result: &[u8]) -> wasmtime::Result<()> {
        let Some(encode_result) = self.code.as_ref().map(|code| code.encode_result) else {
            return Ok(());
        };
        let wrong =
            || wasmtime::Error::msg("the guest sent a result that is too large or no object");
        let encoded =
            Some(result).filter(|result| result.len() <= MAX_ANSWER_BYTES).and_then(encode_result);
        self.send(&encoded.ok_or_else(wrong)?)
    }

    /// Sends a part of the answer to the client of the code.
    fn send(&mut self, part: &[u8]) -> wasmtime::Result<()> {
        if self.code.as_ref().is_none_or(|code| code.sender.is_left()) {
            return Ok(());
        }
        self.check_may_send()?;
        let Some(code) = &mut self.code else { return Ok(()) };
        let mut message = std::mem::take(&mut code.head);
        message.extend_from_slice(part);
        self.late = !self.patience.give(&self.commands, &code.sender, message.into(), 1)?;
        if self.late {
            return Err(wasmtime::Error::msg(
                "the code's output was not read within its time limit",
            ));
        }
        Ok(())
    }

    fn print_command(&mut self, number: u32, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        let mut subscribers = self.commands.subscribers(number, bytes.len());
        if let Some(starting) = self.starting.as_mut().filter(|_| subscribers.is_empty()) {
            starting.early.push((number, stream, bytes.to_vec()));
            starting.kept += bytes.len() + PIECE_COST;
            // A command that prints this much before it has a number is the one that is being
            // started.
            return if starting.kept > MAX_EARLY_BYTES { self.started(number) } else { Ok(()) };
        }
        for piece in pieces(bytes) {
            if subscribers.is_empty() {
                break;
            }
            self.check_may_send()?;
            let message = Bytes::from(connect::printed(stream, piece));
            let mut failed = None;
            subscribers.retain(|(key, sender)| {
                let given = self.patience.give(&self.commands, sender, message.clone(), 2);
                let given = given.unwrap_or_else(|error| {
                    failed.get_or_insert(error);
                    true
                });
                if !given {
                    let why = "the command's output was not read; connect to it again";
                    self.commands
                        .drop_subscriber(*key, &ConnectError::new("resource_exhausted", why));
                }
                given
            });
            if let Some(error) = failed {
                return Err(error);
            }
        }
        Ok(())
    }

    /// The command that is being started has this number.
    fn started(&mut self, number: u32) -> wasmtime::Result<()> {
        let Some(StartingCommand { subscriber, limit, early, .. }) = self.starting.take() else {
            return Ok(());
        };
        self.check_may_send()?;
        // An earlier command of this number has ended.
        self.commands.drop_limit(number);
        self.commands.listen(number, subscriber, limit);
        let own = early.into_iter().filter(|(of, ..)| *of == number);
        own.into_iter().try_for_each(|(of, stream, bytes)| self.print_command(of, stream, &bytes))
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;
    use crate::concurrency::{ConcurrencyLimiter, Share};
    use crate::sandbox::agent::byte_channel::MAX_WAITING_BYTES;

    const TEST_TIMEOUT: Duration = Duration::from_secs(60);

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap()
    }

    fn copy_piece(_: Stream, piece: &[u8]) -> Vec<u8> {
        piece.to_vec()
    }

    #[test]
    fn output_arrives_in_pieces_and_a_slow_client_is_dropped_after_a_limit() {
        let runtime = runtime();
        let made = |time| {
            let _within = runtime.enter();
            let mut router = OutputRouter::new(time, Arc::default(), || Ok(()));
            let receiver = router.route_code_output(copy_piece, |result| Some(result.to_vec()));
            (router, receiver)
        };
        let (mut router, mut receiver) = made(TEST_TIMEOUT);
        router.begin(b"head".to_vec());
        let text = "ä".repeat(MAX_PIECE_BYTES * 3 / 4);
        router.print(Stream::Stderr, format!("x{text}").as_bytes()).unwrap();
        let mut came = String::new();
        while let Some(piece) = receiver.try_take() {
            assert!(piece.len() <= MAX_PIECE_BYTES + 4);
            came.push_str(std::str::from_utf8(&piece).unwrap());
        }
        assert!(came == format!("headx{text}"));
        // Binary output is cut anywhere.
        router.print(Stream::Stdout, &[0x80; MAX_PIECE_BYTES + 1]).unwrap();
        assert_eq!(
            receiver.try_take().unwrap().len() + receiver.try_take().unwrap().len(),
            MAX_PIECE_BYTES + 1
        );
        // A character split over writes arrives whole, also with the other stream between; an
        // incomplete one arrives at the end.
        for (stream, bytes) in [
            (Stream::Stdout, &b"\xf0\x9f"[..]),
            (Stream::Stderr, b"\xc3"),
            (Stream::Stdout, b"\x98"),
            (Stream::Stdout, b"\x80!"),
            (Stream::Stderr, b"\xa4\xe2\x82"),
        ] {
            router.print(stream, bytes).unwrap();
        }
        router.finish();
        assert_eq!(receiver.try_take().as_deref(), Some(&b"\xf0\x9f\x98\x80!\xc3\xa4\xe2\x82"[..]));
        // The client has left, which is no error.
        drop(receiver);
        router.print(Stream::Stdout, b"lost").unwrap();
        assert!(!router.is_late());
        // The client is there and takes nothing.
        let (mut router, receiver) = made(Duration::from_millis(50));
        assert!(router.print(Stream::Stdout, &vec![b'x'; MAX_WAITING_BYTES as usize]).is_err());
        assert!(router.is_late());
        drop(receiver);
        let _within = runtime.enter();
        let mut router =
            OutputRouter::new(TEST_TIMEOUT, Arc::default(), || Err(ErrorResponse::host()));
        let _receiver = router.route_code_output(copy_piece, |result| Some(result.to_vec()));
        assert!(router.print(Stream::Stdout, b"x").is_err() && !router.is_late());
    }

    /// The guest's answer after it started a command of this number.
    fn number(number: u8) -> [u8; 5] {
        [0x83, 0, 0x18, number, 0x60]
    }

    #[test]
    fn output_before_the_pid_is_known_is_sent_after_the_pid() {
        let runtime = runtime();
        let _within = runtime.enter();
        for flood in [1, MAX_EARLY_BYTES / 2] {
            let commands = Arc::new(Commands::default());
            let mut router = OutputRouter::new(TEST_TIMEOUT, commands.clone(), || Ok(()));
            let (subscriber, heard) = Subscriber::new(TEST_TIMEOUT);
            router.starts(subscriber, None);
            let whole = runtime.spawn(heard.collect());
            router.print_command(99, Stream::Stdout, b"of another").unwrap();
            for _ in 0..3 {
                router.print_command(42, Stream::Stdout, &vec![b'x'; flood]).unwrap();
            }
            router.answered(&number(42));
            router.print_command(42, Stream::Stderr, b"later").unwrap();
            router.command_ended(42, 0);
            let whole = runtime.block_on(whole).unwrap().unwrap().to_bytes();
            let text = String::from_utf8_lossy(&whole);
            assert!(text[5..].starts_with(r#"{"event":{"start":{"pid":42}}}"#), "{flood}");
            assert!(whole.len() >= 3 * flood && text.contains("stderr") && text.contains("end"));
            assert_eq!(text.matches("stdout").count(), 3 * flood.div_ceil(MAX_PIECE_BYTES));
        }
    }

    #[test]
    fn small_pieces_before_the_pid_is_known_are_charged_for_themselves() {
        let runtime = runtime();
        let _within = runtime.enter();
        let commands = Arc::new(Commands::default());
        let mut router = OutputRouter::new(TEST_TIMEOUT, commands, || Ok(()));
        let (subscriber, heard) = Subscriber::new(TEST_TIMEOUT);
        router.starts(subscriber, None);
        drop(heard);
        for _ in 0..100_000 {
            router.print_command(7, Stream::Stdout, b"x").unwrap();
            let routed = router.0.as_ref().unwrap();
            let early = routed.starting.as_ref().map_or(0, |starting| starting.early.len());
            assert!(early <= MAX_EARLY_BYTES / PIECE_COST, "{early}");
        }
    }

    #[test]
    fn a_call_that_cannot_park_keeps_its_place_and_ends() {
        let runtime = runtime();
        let share = Share { running: 2, waiting: 0, weight: 1 };
        let gate = ConcurrencyLimiter::new(1, [share]);
        let enter = || runtime.block_on(gate.enter(0, TEST_TIMEOUT)).unwrap();
        let parked = enter().park().ok().expect("nothing is parked");
        let commands = Arc::new(Commands::default());
        let calling = commands.clone();
        let (ended, end) = std::sync::mpsc::channel();
        let permit = enter();
        let within = runtime.handle().clone();
        // A deadlock of this thread fails the test by the limit below.
        std::thread::spawn(move || {
            let _within = within.enter();
            let running = calling.hold(permit);
            let short = Duration::from_millis(50);
            let mut router = OutputRouter::new(short, calling.clone(), || Ok(()));
            let _unread = router.route_code_output(copy_piece, |result| Some(result.to_vec()));
            let flood = vec![b'x'; MAX_WAITING_BYTES as usize];
            let printed = router.print(Stream::Stdout, &flood).is_err();
            let has_place = lock(&calling.place).is_some();
            drop(running);
            ended.send((printed, has_place, router.is_late())).unwrap();
        });
        let outcome = end.recv_timeout(TEST_TIMEOUT).expect("the call hangs");
        assert_eq!(outcome, (true, true, true));
        drop(parked);
        assert!(runtime.block_on(gate.enter(0, TEST_TIMEOUT)).is_ok(), "the place is not free");
    }

    #[test]
    fn a_client_that_does_not_read_is_dropped_and_the_call_continues() {
        let runtime = runtime();
        let _within = runtime.enter();
        let commands = Arc::new(Commands::default());
        let mut router = OutputRouter::new(Duration::from_millis(50), commands.clone(), || Ok(()));
        let (subscriber, heard) = Subscriber::new(TEST_TIMEOUT);
        commands.listen(7, subscriber, None);
        router.print_command(7, Stream::Stdout, &vec![b'x'; MAX_WAITING_BYTES as usize]).unwrap();
        assert!(!router.is_late() && !commands.in_use());
        let whole = runtime.block_on(heard.collect()).unwrap().to_bytes();
        assert!(String::from_utf8_lossy(&whole).contains("resource_exhausted"));
    }
}
