//! Output of one call: code's streams, and those of commands.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use afresh::wasm::wasmtime;
use afresh_interpreter::{HostCallbacks, Stream};
use tokio::sync::mpsc;

use crate::displayed::{DisplayedResult, JsonRoom};

/// Maximum results that one call displays.
const MAX_RESULTS: usize = 256;

/// Maximum bytes of output that a result holds. The rest is counted.
pub(crate) const MAX_OUTPUT: usize = 1 << 20;

/// Maximum bytes of a value that code returns.
pub(crate) const MAX_ANSWER: usize = 16 << 20;

/// Maximum bytes of results that code displays, images included.
const MAX_DISPLAYED: usize = 16 << 20;

/// Maximum commands whose output one call collects; only left-over commands exceed it.
const MAX_COMMANDS: usize = 64;

/// When a call ends at the latest, and who may end it earlier.
#[derive(Clone, Debug, Default)]
pub(crate) struct Limits {
    pub(crate) deadline: Option<Instant>,
    /// The time before the deadline, for messages.
    pub(crate) timeout: Duration,
    pub(crate) cancelled: Arc<AtomicBool>,
}

impl Limits {
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    pub(crate) fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }
}

/// The text of one program.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
}

/// Receives the output of one call, within a budget, and ends the call when its client does.
#[derive(Debug, Default)]
pub struct OutputCollector {
    pub(crate) code: Streams,
    commands: BTreeMap<u32, Streams>,
    ended: BTreeMap<u32, i32>,
    /// Results that code displayed.
    pub(crate) displayed: Vec<DisplayedResult>,
    displayed_bytes: usize,
    json_room: JsonRoom,
    /// Bytes that are held.
    bytes: usize,
    /// Bytes that were dropped because the budget was spent.
    pub(crate) dropped: u64,
    pub(crate) limits: Limits,
    /// Receives text while the call runs. Text is dropped here where the receiver is slow.
    pub(crate) progress: Option<mpsc::Sender<String>>,
}

impl OutputCollector {
    pub(crate) fn new(limits: Limits, progress: Option<mpsc::Sender<String>>) -> Self {
        Self { limits, progress, ..Self::default() }
    }

    /// The exit status of a command, once it has ended.
    pub(crate) fn status(&self, number: u32) -> Option<i32> {
        self.ended.get(&number).copied()
    }

    /// The output of a command.
    pub(crate) fn take_command(&mut self, number: u32) -> Streams {
        self.commands.remove(&number).unwrap_or_default()
    }

    fn collect(&mut self, number: Option<u32>, stream: Stream, bytes: &[u8]) {
        if let Some(progress) = &self.progress {
            let _ = progress.try_send(String::from_utf8_lossy(bytes).into_owned());
        }
        let new = number.is_some_and(|number| !self.commands.contains_key(&number));
        if new && self.commands.len() >= MAX_COMMANDS {
            self.dropped += bytes.len() as u64;
            return;
        }
        let held = bytes.len().min(MAX_OUTPUT - self.bytes);
        self.bytes += held;
        self.dropped += (bytes.len() - held) as u64;
        let streams = match number {
            Some(number) => self.commands.entry(number).or_default(),
            None => &mut self.code,
        };
        let to = match stream {
            Stream::Stdout | Stream::Terminal => &mut streams.stdout,
            Stream::Stderr => &mut streams.stderr,
        };
        to.extend_from_slice(&bytes[..held]);
    }
}

impl HostCallbacks for OutputCollector {
    fn print(&mut self, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        self.collect(None, stream, bytes);
        Ok(())
    }

    fn print_command(&mut self, number: u32, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        self.collect(Some(number), stream, bytes);
        Ok(())
    }

    fn max_frame(&self) -> usize {
        // The first byte of a frame is its kind.
        MAX_ANSWER + 1
    }

    fn display(&mut self, result: &[u8]) -> wasmtime::Result<()> {
        let room = MAX_DISPLAYED - self.displayed_bytes;
        let shown = match result.len() <= room && self.displayed.len() < MAX_RESULTS {
            true => DisplayedResult::parse(result, &mut self.json_room),
            false => None,
        };
        match shown {
            Some(shown) => {
                self.displayed_bytes += result.len();
                self.displayed.push(shown);
            }
            // The guest may send any bytes.
            None => self.dropped += result.len() as u64,
        }
        Ok(())
    }

    fn command_ended(&mut self, number: u32, status: i32) {
        if self.ended.len() < MAX_COMMANDS || self.commands.contains_key(&number) {
            self.ended.insert(number, status);
        }
    }

    fn proceeds(&mut self) -> bool {
        !self.limits.is_cancelled() && !self.limits.is_late()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_beyond_the_budget_is_counted() {
        let mut collector = OutputCollector::default();
        collector.print(Stream::Stdout, &vec![b'a'; MAX_OUTPUT - 1]).unwrap();
        collector.print_command(7, Stream::Stderr, b"bcd").unwrap();
        assert_eq!(collector.code.stdout.len(), MAX_OUTPUT - 1);
        assert_eq!(collector.take_command(7).stderr, b"b");
        assert_eq!(collector.dropped, 2);
    }

    #[test]
    fn commands_keep_their_own_output_and_status() {
        let mut collector = OutputCollector::default();
        collector.print_command(1, Stream::Stdout, b"one").unwrap();
        collector.print_command(2, Stream::Stdout, b"two").unwrap();
        collector.command_ended(2, -9);
        assert_eq!(collector.take_command(2).stdout, b"two");
        assert_eq!((collector.status(1), collector.status(2)), (None, Some(-9)));
    }

    #[test]
    fn a_cancelled_call_does_not_proceed() {
        let mut collector = OutputCollector::default();
        assert!(collector.proceeds());
        collector.limits.cancelled.store(true, Ordering::Relaxed);
        assert!(!collector.proceeds());
    }
}
