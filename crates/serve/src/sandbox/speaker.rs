//! What code prints, on its way to the client while the code runs.
//!
//! What it promises: what waits for a client is bounded. Code that prints faster than its client reads waits for it, for as long as
//! the call may take; what nobody reads any more is dropped. Of a fleet's sandbox nothing is told once it may be another host's.

use std::time::Duration;

use afresh::wasm::wasmtime;
use afresh_interpreter::{Listener, Stream};
use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::refusal::Refusal;

/// Pieces that wait for a client.
const PIECES: usize = 8;
/// Most bytes of what is printed in one piece.
pub(super) const PIECE: usize = 32 << 10;

/// How a piece of at most [`PIECE`] bytes is told.
pub(super) type Tell = fn(Stream, &[u8]) -> Vec<u8>;

/// Who hears what code prints. The default tells nobody.
#[derive(Default)]
pub(super) struct Speaker(Option<Told>);

struct Told {
    sender: mpsc::Sender<Bytes>,
    runtime: tokio::runtime::Handle,
    time: Duration,
    until: Instant,
    tell: Tell,
    /// What comes before everything else.
    head: Vec<u8>,
    /// Whether anything may be told now.
    check: Box<dyn Fn() -> Result<(), Refusal> + Send>,
    /// The client did not take it in time.
    late: bool,
}

impl Speaker {
    /// Tells whoever receives, each call for at most `time`. Within a runtime.
    pub(super) fn new(
        time: Duration,
        tell: Tell,
        check: impl Fn() -> Result<(), Refusal> + Send + 'static,
    ) -> (Self, mpsc::Receiver<Bytes>) {
        let (sender, receiver) = mpsc::channel(PIECES);
        let told = Told {
            sender,
            runtime: tokio::runtime::Handle::current(),
            time,
            until: Instant::now() + time,
            tell,
            head: Vec::new(),
            check: Box::new(check),
            late: false,
        };
        (Self(Some(told)), receiver)
    }

    /// The call begins, and with it the time that it has. `head` comes before all that it prints, or at once.
    pub(super) fn begin(&mut self, head: Vec<u8>, at_once: bool) {
        let Some(told) = &mut self.0 else { return };
        told.until = Instant::now() + told.time;
        match at_once {
            // Nothing waits there yet; whoever is gone already misses it.
            true => drop(told.sender.try_send(head.into())),
            false => told.head = head,
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
        let mut rest = bytes;
        while !rest.is_empty() && !told.sender.is_closed() {
            let (piece, after) = rest.split_at(whole(rest));
            rest = after;
            if (told.check)().is_err() {
                return Err(wasmtime::Error::msg("the sandbox may be another host's by now"));
            }
            let mut message = std::mem::take(&mut told.head);
            message.extend((told.tell)(stream, piece));
            told.send(message.into())?;
        }
        Ok(())
    }
}

/// Where a piece ends: not within a letter, where it is text.
fn whole(bytes: &[u8]) -> usize {
    let most = bytes.len().min(PIECE);
    let begins = |at: &usize| bytes.get(*at).is_none_or(|byte| byte & 0xc0 != 0x80);
    (most.saturating_sub(3)..=most).rev().find(begins).unwrap_or(most)
}

impl Told {
    fn send(&mut self, message: Bytes) -> wasmtime::Result<()> {
        let message = match self.sender.try_send(message) {
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => return Ok(()),
            Err(mpsc::error::TrySendError::Full(message)) => message,
        };
        let (until, sender) = (self.until, &self.sender);
        // Calls run on threads that may wait.
        let sent = self
            .runtime
            .block_on(async { tokio::time::timeout_at(until, sender.send(message)).await });
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
        let told = |_, piece: &[u8]| piece.to_vec();
        let made = |time| runtime.block_on(async { Speaker::new(time, told, || Ok(())) });
        let (mut speaker, mut receiver) = made(Duration::from_secs(60));
        speaker.begin(b"head".to_vec(), false);
        let text = "ä".repeat(PIECE * 3 / 4);
        speaker.print(Stream::Stderr, format!("x{text}").as_bytes()).unwrap();
        let mut came = String::new();
        while let Ok(piece) = receiver.try_recv() {
            assert!(piece.len() <= PIECE + 4);
            came.push_str(std::str::from_utf8(&piece).unwrap());
        }
        assert!(came == format!("headx{text}"));
        // What is no text is cut anywhere.
        speaker.print(Stream::Stdout, &[0x80; PIECE + 1]).unwrap();
        assert_eq!(
            receiver.try_recv().unwrap().len() + receiver.try_recv().unwrap().len(),
            PIECE + 1
        );
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
            runtime.block_on(async { Speaker::new(Duration::from_secs(60), told, refuse) });
        assert!(speaker.print(Stream::Stdout, b"x").is_err() && !speaker.is_late());
    }
}
