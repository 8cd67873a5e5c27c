//! What code prints, on its way to the client while the code runs.
//!
//! What it promises: what waits for a client is bounded. Code that prints faster than its client reads waits for it, for as long as
//! the call may take; what nobody reads any more is dropped. Of a fleet's sandbox nothing is told once it may be another host's.

use std::time::Duration;

use afresh::wasm::wasmtime;
use afresh_interpreter::{Listener, Stream};
use bytes::Bytes;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::execute::now;
use crate::refusal::Refusal;

/// Pieces that wait for a client.
const PIECES: usize = 8;
/// Most bytes of what is printed in one piece.
const PIECE: usize = 32 << 10;

/// Who hears what code prints. The default tells nobody.
#[derive(Default)]
pub(super) struct Speaker(Option<Told>);

struct Told {
    sender: mpsc::Sender<Bytes>,
    runtime: tokio::runtime::Handle,
    time: Duration,
    until: Instant,
    /// What comes before everything else.
    head: String,
    /// Whether anything may be told now.
    check: Box<dyn Fn() -> Result<(), Refusal> + Send>,
    /// The client did not take it in time.
    late: bool,
}

impl Speaker {
    /// Tells whoever receives, in lines, each call for at most `time`. Within a runtime.
    pub(super) fn new(
        time: Duration,
        check: impl Fn() -> Result<(), Refusal> + Send + 'static,
    ) -> (Self, mpsc::Receiver<Bytes>) {
        let (sender, receiver) = mpsc::channel(PIECES);
        let told = Told {
            sender,
            runtime: tokio::runtime::Handle::current(),
            time,
            until: Instant::now() + time,
            head: String::new(),
            check: Box::new(check),
            late: false,
        };
        (Self(Some(told)), receiver)
    }

    /// The call begins, and with it the time that it has. `head` comes before all that it prints.
    pub(super) fn begin(&mut self, head: String) {
        if let Some(told) = &mut self.0 {
            told.until = Instant::now() + told.time;
            told.head = head;
        }
    }

    /// Whether the call was ended because its client took too long.
    pub(super) fn is_late(&self) -> bool {
        self.0.as_ref().is_some_and(|told| told.late)
    }
}

impl Listener for Speaker {
    fn print(&mut self, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        let Some(told) = &mut self.0 else { return Ok(()) };
        let kind = match stream {
            Stream::Stdout => "stdout",
            Stream::Stderr => "stderr",
        };
        let text = String::from_utf8_lossy(bytes);
        let mut rest = &*text;
        while !rest.is_empty() && !told.sender.is_closed() {
            let (piece, after) = rest.split_at(rest.floor_char_boundary(PIECE));
            rest = after;
            if (told.check)().is_err() {
                return Err(wasmtime::Error::msg("the sandbox may be another host's by now"));
            }
            let mut line = std::mem::take(&mut told.head);
            let said = json!({"type": kind, "text": piece, "timestamp": now()});
            line.push_str(&format!("{said}\n"));
            told.send(line)?;
        }
        Ok(())
    }
}

impl Told {
    fn send(&mut self, line: String) -> wasmtime::Result<()> {
        let line = match self.sender.try_send(line.into()) {
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => return Ok(()),
            Err(mpsc::error::TrySendError::Full(line)) => line,
        };
        let (until, sender) = (self.until, &self.sender);
        // Calls run on threads that may wait.
        let sent = self
            .runtime
            .block_on(async { tokio::time::timeout_at(until, sender.send(line)).await });
        self.late = sent.is_err();
        if self.late {
            return Err(wasmtime::Error::msg(
                "nobody took what the code printed, within the time that it has",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_arrives_in_pieces_and_waits_for_its_client_only_so_long() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_time()
            .build()
            .unwrap();
        let made = |time| runtime.block_on(async { Speaker::new(time, || Ok(())) });
        let (mut speaker, mut receiver) = made(Duration::from_secs(60));
        speaker.begin("head\n".to_owned());
        let text = "ä".repeat(PIECE * 3 / 4);
        speaker.print(Stream::Stderr, text.as_bytes()).unwrap();
        let mut came = String::new();
        let mut first = true;
        while let Ok(line) = receiver.try_recv() {
            let line = std::str::from_utf8(&line).unwrap();
            let line = if first { line.strip_prefix("head\n").unwrap() } else { line };
            let said: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(said["type"], "stderr");
            came.push_str(said["text"].as_str().unwrap());
            first = false;
        }
        assert_eq!(came, text);
        // Nobody is there any more: it is no matter.
        drop(receiver);
        speaker.print(Stream::Stdout, b"lost").unwrap();
        assert!(!speaker.is_late());
        // Somebody is there, and takes nothing.
        let (mut speaker, receiver) = made(Duration::from_millis(50));
        let printed = (0..=PIECES).map(|_| speaker.print(Stream::Stdout, b"x")).collect::<Vec<_>>();
        assert!(printed[..PIECES].iter().all(Result::is_ok) && printed[PIECES].is_err());
        assert!(speaker.is_late());
        drop(receiver);
        let refuse = || Err(Refusal::host());
        let (mut speaker, _receiver) =
            runtime.block_on(async { Speaker::new(Duration::from_secs(60), refuse) });
        assert!(speaker.print(Stream::Stdout, b"x").is_err() && !speaker.is_late());
    }
}
