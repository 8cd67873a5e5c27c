//! What a call of a sandbox prints, on its way to the clients while it runs: that of code to who runs it, that of commands to who hears them.
//!
//! What it promises: what waits for a client is bounded. Code that prints faster than its client reads waits for it, for as long as
//! the call may take; a command for half of that, and then its client is told no more. What nobody reads is dropped. Of a fleet's
//! sandbox nothing is told once it may be another host's.

use std::sync::Arc;
use std::time::Duration;

use afresh::wasm::wasmtime;
use afresh_interpreter::{Answer, Listener, Stream};
use bytes::Bytes;
use tokio::time::Instant;

use super::commands::{Commands, Ear};
use super::connect::{self, Failed};
use super::pieces::{Giver, Refused, Taker, way};
use crate::refusal::Refusal;

/// Most bytes of what is printed in one piece.
pub(super) const PIECE: usize = 32 << 10;
/// Most bytes of what is kept for a command whose number is not known yet.
const EARLY: usize = 1 << 20;

/// How a piece of at most [`PIECE`] bytes is told.
pub(super) type Tell = fn(Stream, &[u8]) -> Vec<u8>;

/// Who hears a call. The default tells nobody.
#[derive(Default)]
pub(super) struct Speaker(Option<Box<Speaking>>);

struct Speaking {
    patience: Patience,
    commands: Arc<Commands>,
    /// Whether anything may be told now.
    check: Box<dyn Fn() -> Result<(), Refusal> + Send>,
    /// Who hears code.
    code: Option<Told>,
    /// A command that is being started.
    starting: Option<Starting>,
    /// The client did not take it in time.
    late: bool,
}

struct Told {
    giver: Giver,
    tell: Tell,
    /// What comes before everything else.
    head: Vec<u8>,
}

struct Starting {
    ear: Ear,
    limit: Option<Duration>,
    /// What came of commands that nobody hears, one of which it may be.
    early: Vec<(u32, Stream, Vec<u8>)>,
    /// How many bytes that are.
    kept: usize,
}

/// How long clients are waited for.
struct Patience {
    runtime: tokio::runtime::Handle,
    time: Duration,
    begun: Instant,
}

impl Patience {
    /// False where nobody took it within that part of the time.
    fn give(&self, giver: &Giver, message: Bytes, part: u32) -> bool {
        let message = match giver.try_give(message) {
            Ok(()) | Err(Refused::Gone) => return true,
            Err(Refused::Full(message)) => message,
        };
        let until = self.begun + self.time / part;
        // Calls run on threads that may wait.
        let giving = async { tokio::time::timeout_at(until, giver.give(message)).await };
        self.runtime.block_on(giving).is_ok()
    }
}

impl Speaker {
    /// For calls of a sandbox with these commands, each for at most `time`. Within a runtime.
    pub(super) fn new(
        time: Duration,
        commands: Arc<Commands>,
        check: impl Fn() -> Result<(), Refusal> + Send + 'static,
    ) -> Self {
        let runtime = tokio::runtime::Handle::current();
        Self(Some(Box::new(Speaking {
            patience: Patience { runtime, time, begun: Instant::now() },
            commands,
            check: Box::new(check),
            code: None,
            starting: None,
            late: false,
        })))
    }

    /// Tells whoever receives what code prints.
    pub(super) fn tell_code(&mut self, tell: Tell) -> Taker {
        let (giver, taker) = way();
        if let Some(speaking) = &mut self.0 {
            speaking.code = Some(Told { giver, tell, head: Vec::new() });
        }
        taker
    }

    /// The call starts a command, which is heard there, and ends after `limit`.
    pub(super) fn starts(&mut self, ear: Ear, limit: Option<Duration>) {
        if let Some(speaking) = &mut self.0 {
            speaking.starting = Some(Starting { ear, limit, early: Vec::new(), kept: 0 });
        }
    }

    /// The call begins, and with it the time that it has. `head` comes before all that its code prints.
    pub(super) fn begin(&mut self, head: Vec<u8>) {
        let Some(speaking) = &mut self.0 else { return };
        speaking.patience.begun = Instant::now();
        if let Some(code) = &mut speaking.code {
            code.head = head;
        }
    }

    /// Passes on what goes through connections into the sandbox.
    pub(super) fn exchange(&self, lease: &mut afresh::Lease<'_>) -> Result<(), afresh::CallError> {
        #[cfg(feature = "linux")]
        if let Some(speaking) = &self.0 {
            speaking.commands.lines.exchange(lease)?;
        }
        #[cfg(not(feature = "linux"))]
        let _ = lease;
        Ok(())
    }

    /// What was told of commands since the call before is not so any more.
    pub(super) fn undone(&self) {
        let why = "the sandbox was taken back to an earlier state, because a call was cut short";
        if let Some(speaking) = &self.0 {
            speaking.commands.dismiss(&Failed::new("aborted", why));
        }
    }

    /// Whether the call was ended because its client took too long.
    pub(super) fn is_late(&self) -> bool {
        self.0.as_ref().is_some_and(|speaking| speaking.late)
    }
}

impl Listener for Speaker {
    fn print(&mut self, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        self.0.as_mut().map_or(Ok(()), |speaking| speaking.print(stream, bytes))
    }

    fn print_command(&mut self, number: u32, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        self.0.as_mut().map_or(Ok(()), |speaking| speaking.print_command(number, stream, bytes))
    }

    fn command_ended(&mut self, number: u32, status: i32) {
        if let Some(speaking) = self.0.as_mut().filter(|speaking| (speaking.check)().is_ok()) {
            speaking.commands.ended(number, status);
        }
    }

    fn answered(&mut self, answer: &[u8]) {
        // Code may answer with much, which nobody wants read here.
        let Some(speaking) = self.0.as_mut().filter(|speaking| speaking.starting.is_some()) else {
            return;
        };
        let Ok(Answer::Value(shown)) = Answer::read(answer) else { return };
        let number = shown.json.as_ref().and_then(serde_json::Value::as_u64);
        if let Some(number) = number.and_then(|number| u32::try_from(number).ok()) {
            // Nobody hears this call's errors any more.
            let _ = speaking.started(number);
        }
    }
}

/// Pieces of what is printed, none of which ends within a letter, where it is text.
fn pieces(mut rest: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let most = rest.len().min(PIECE);
        let begins = |at: &usize| rest.get(*at).is_none_or(|byte| byte & 0xc0 != 0x80);
        let end = (most.saturating_sub(3)..=most).rev().find(begins).unwrap_or(most);
        let (piece, after) = rest.split_at(end);
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

impl Speaking {
    fn may_tell(&self) -> wasmtime::Result<()> {
        let told = (self.check)();
        told.map_err(|_| wasmtime::Error::msg("the sandbox may be another host's by now"))
    }

    fn print(&mut self, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        for piece in pieces(bytes) {
            if self.code.as_ref().is_none_or(|code| code.giver.is_left()) {
                return Ok(());
            }
            self.may_tell()?;
            let Some(code) = &mut self.code else { return Ok(()) };
            let mut message = std::mem::take(&mut code.head);
            message.extend((code.tell)(stream, piece));
            self.late = !self.patience.give(&code.giver, message.into(), 1);
            if self.late {
                return Err(wasmtime::Error::msg(
                    "nobody took what the code printed, within the time that it has",
                ));
            }
        }
        Ok(())
    }

    fn print_command(&mut self, number: u32, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        let mut ears = self.commands.ears(number);
        if let Some(starting) = self.starting.as_mut().filter(|_| ears.is_empty()) {
            starting.early.push((number, stream, bytes.to_vec()));
            starting.kept += bytes.len();
            // Who prints so much before it has a number is the one that is being started.
            return if starting.kept > EARLY { self.started(number) } else { Ok(()) };
        }
        for piece in pieces(bytes) {
            if ears.is_empty() {
                break;
            }
            self.may_tell()?;
            let message = Bytes::from(connect::printed(stream, piece));
            ears.retain(|(key, giver)| {
                let given = self.patience.give(giver, message.clone(), 2);
                if !given {
                    let why = "nobody took what the command printed; connect to it again";
                    self.commands.drop_ear(*key, &Failed::new("resource_exhausted", why));
                }
                given
            });
        }
        Ok(())
    }

    /// The command that is being started has this number.
    fn started(&mut self, number: u32) -> wasmtime::Result<()> {
        let Some(Starting { ear, limit, early, .. }) = self.starting.take() else { return Ok(()) };
        self.may_tell()?;
        self.commands.listen(number, ear, limit);
        let own = early.into_iter().filter(|(of, ..)| *of == number);
        own.into_iter().try_for_each(|(of, stream, bytes)| self.print_command(of, stream, &bytes))
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::super::pieces::ROOM;
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap()
    }

    fn told(_: Stream, piece: &[u8]) -> Vec<u8> {
        piece.to_vec()
    }

    #[test]
    fn what_is_printed_arrives_in_pieces_and_waits_for_its_client_only_so_long() {
        let runtime = runtime();
        let made = |time| {
            let _within = runtime.enter();
            let mut speaker = Speaker::new(time, Arc::default(), || Ok(()));
            let taker = speaker.tell_code(told);
            (speaker, taker)
        };
        let (mut speaker, mut taker) = made(LONG);
        speaker.begin(b"head".to_vec());
        let text = "ä".repeat(PIECE * 3 / 4);
        speaker.print(Stream::Stderr, format!("x{text}").as_bytes()).unwrap();
        let mut came = String::new();
        while let Some(piece) = taker.try_take() {
            assert!(piece.len() <= PIECE + 4);
            came.push_str(std::str::from_utf8(&piece).unwrap());
        }
        assert!(came == format!("headx{text}"));
        // What is no text is cut anywhere.
        speaker.print(Stream::Stdout, &[0x80; PIECE + 1]).unwrap();
        assert_eq!(taker.try_take().unwrap().len() + taker.try_take().unwrap().len(), PIECE + 1);
        // Nobody is there any more: it is no matter.
        drop(taker);
        speaker.print(Stream::Stdout, b"lost").unwrap();
        assert!(!speaker.is_late());
        // Somebody is there, and takes nothing.
        let (mut speaker, taker) = made(Duration::from_millis(50));
        assert!(speaker.print(Stream::Stdout, &vec![b'x'; ROOM as usize]).is_err());
        assert!(speaker.is_late());
        drop(taker);
        let _within = runtime.enter();
        let mut speaker = Speaker::new(LONG, Arc::default(), || Err(Refusal::host()));
        let _taker = speaker.tell_code(told);
        assert!(speaker.print(Stream::Stdout, b"x").is_err() && !speaker.is_late());
    }

    /// What a guest answers that has started a command of this number.
    fn number(number: u8) -> [u8; 5] {
        [0x83, 0, 0x18, number, 0x60]
    }

    #[test]
    fn what_a_command_prints_before_its_number_is_known_comes_after_it() {
        let runtime = runtime();
        let _within = runtime.enter();
        for flood in [1, EARLY / 2] {
            let commands = Arc::new(Commands::default());
            let mut speaker = Speaker::new(LONG, commands.clone(), || Ok(()));
            let (ear, heard) = Ear::new(LONG);
            speaker.starts(ear, None);
            let whole = runtime.spawn(heard.collect());
            speaker.print_command(99, Stream::Stdout, b"of another").unwrap();
            for _ in 0..3 {
                speaker.print_command(42, Stream::Stdout, &vec![b'x'; flood]).unwrap();
            }
            speaker.answered(&number(42));
            speaker.print_command(42, Stream::Stderr, b"later").unwrap();
            speaker.command_ended(42, 0);
            let whole = runtime.block_on(whole).unwrap().unwrap().to_bytes();
            let text = String::from_utf8_lossy(&whole);
            assert!(text[5..].starts_with(r#"{"event":{"start":{"pid":42}}}"#), "{flood}");
            assert!(whole.len() >= 3 * flood && text.contains("stderr") && text.contains("end"));
            assert_eq!(text.matches("stdout").count(), 3 * flood.div_ceil(PIECE));
        }
    }

    #[test]
    fn who_does_not_take_what_a_command_prints_is_told_no_more_and_the_call_goes_on() {
        let runtime = runtime();
        let _within = runtime.enter();
        let commands = Arc::new(Commands::default());
        let mut speaker = Speaker::new(Duration::from_millis(50), commands.clone(), || Ok(()));
        let (ear, heard) = Ear::new(LONG);
        commands.listen(7, ear, None);
        speaker.print_command(7, Stream::Stdout, &vec![b'x'; ROOM as usize]).unwrap();
        assert!(!speaker.is_late() && !commands.in_use());
        let whole = runtime.block_on(heard.collect()).unwrap().to_bytes();
        assert!(String::from_utf8_lossy(&whole).contains("resource_exhausted"));
    }
}
