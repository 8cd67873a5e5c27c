//! Output of one call: code's streams, and those of commands.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use afresh::CallCost;
use afresh::wasm::wasmtime;
use afresh_interpreter::{HostCallbacks, Stream};
use tokio::sync::mpsc;

use crate::displayed::{DisplayedResult, JsonRoom};
use crate::progress::Progress;

/// Maximum results that one call displays.
const MAX_RESULTS: usize = 256;

/// Maximum bytes of output that a result holds. The rest is counted.
pub(crate) const MAX_OUTPUT: usize = 1 << 20;

/// Maximum bytes of a value that code returns.
pub(crate) const MAX_ANSWER: usize = 16 << 20;

/// Maximum bytes of results that code displays, images included.
const MAX_DISPLAYED: usize = 16 << 20;

/// Maximum commands whose output is held while the number of the started command is unknown. Only
/// left-over commands exceed it.
const MAX_COMMANDS: usize = 64;

/// Maximum bytes of their output. Each may have [`MAX_OUTPUT`].
const MAX_CANDIDATE_OUTPUT: usize = 2 * MAX_OUTPUT;

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

/// The output of one program.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    /// Bytes that were dropped because the budget was spent.
    pub(crate) dropped: u64,
}

impl Streams {
    fn len(&self) -> usize {
        self.stdout.len() + self.stderr.len()
    }

    /// Drops the output, and counts it.
    fn clear(&mut self) {
        *self = Self { dropped: self.dropped + self.len() as u64, ..Self::default() };
    }

    /// Appends what has room. Returns the number of its bytes.
    fn append(&mut self, stream: Stream, bytes: &[u8]) -> usize {
        let held = bytes.len().min(MAX_OUTPUT - self.len());
        self.dropped += (bytes.len() - held) as u64;
        let to = match stream {
            Stream::Stdout | Stream::Terminal => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        };
        to.extend_from_slice(&bytes[..held]);
        held
    }
}

/// The program whose output a call collects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Source {
    #[default]
    Code,
    /// A command whose number is not known yet.
    Starting,
    Command(u32),
}

/// Receives the output of one call, within a budget, and ends the call when its client does.
/// Output of programs that earlier calls left running is dropped, and is not counted.
#[derive(Debug, Default)]
pub struct OutputCollector {
    source: Source,
    /// The output of the source.
    pub(crate) own: Streams,
    /// The exit status of the source, if it is a command that has ended.
    pub(crate) status: Option<i32>,
    /// Commands with output, or with an end, while the number of the started one is unknown.
    candidates: BTreeMap<u32, (Streams, Option<i32>)>,
    /// Results that code displayed.
    pub(crate) displayed: Vec<DisplayedResult>,
    displayed_bytes: usize,
    json_room: JsonRoom,
    /// Bytes of displayed results that were dropped.
    pub(crate) dropped: u64,
    /// The cost of the last call.
    pub(crate) cost: Option<CallCost>,
    pub(crate) limits: Limits,
    pub(crate) progress: Option<Progress>,
}

impl OutputCollector {
    pub(crate) fn new(limits: Limits, progress: Option<mpsc::Sender<String>>) -> Self {
        Self { limits, progress: progress.map(Progress::new), ..Self::default() }
    }

    /// The call starts a command: its output is collected, and that of code is not.
    pub(crate) fn expect_command(&mut self) {
        self.source = Source::Starting;
    }

    /// The started command has this number.
    pub(crate) fn begin_command(&mut self, number: u32) {
        self.source = Source::Command(number);
        (self.own, self.status) = self.candidates.remove(&number).unwrap_or_default();
        self.candidates.clear();
        if let Some(progress) = &mut self.progress {
            progress.report(Stream::Stdout, &self.own.stdout);
            progress.report(Stream::Stderr, &self.own.stderr);
        }
    }

    /// A command that may be the started one. Numbers grow, so the first one is dropped for it
    /// where there are too many.
    fn candidate(&mut self, number: u32) -> &mut (Streams, Option<i32>) {
        if self.candidates.len() >= MAX_COMMANDS && !self.candidates.contains_key(&number) {
            self.candidates.pop_first();
        }
        self.candidates.entry(number).or_default()
    }

    /// Holds output of a command that may be the started one. Where there is too much, that of the
    /// commands with lower numbers is dropped: earlier calls have started them.
    fn hold(&mut self, number: u32, stream: Stream, bytes: &[u8]) {
        self.candidate(number).0.append(stream, bytes);
        let mut excess = self.candidates.values().map(|(output, _)| output.len()).sum::<usize>();
        for (_, (output, _)) in self.candidates.iter_mut().filter(|(other, _)| **other != number) {
            if excess <= MAX_CANDIDATE_OUTPUT {
                return;
            }
            excess -= output.len();
            output.clear();
        }
    }

    fn collect(&mut self, stream: Stream, bytes: &[u8]) {
        let held = self.own.append(stream, bytes);
        if let Some(progress) = &mut self.progress {
            progress.report(stream, &bytes[..held]);
        }
    }
}

impl HostCallbacks for OutputCollector {
    fn print(&mut self, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        if self.source == Source::Code {
            self.collect(stream, bytes);
        }
        Ok(())
    }

    fn print_command(&mut self, number: u32, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        match self.source {
            Source::Starting => self.hold(number, stream, bytes),
            Source::Command(own) if own == number => self.collect(stream, bytes),
            _ => {}
        }
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
        match self.source {
            Source::Starting => self.candidate(number).1 = Some(status),
            Source::Command(own) if own == number => self.status = Some(status),
            _ => {}
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
        collector.print(Stream::Stderr, b"bcd").unwrap();
        assert_eq!(collector.own.stdout.len(), MAX_OUTPUT - 1);
        assert_eq!((&collector.own.stderr[..], collector.own.dropped), (&b"b"[..], 2));
    }

    #[test]
    fn commands_of_earlier_calls_spend_no_budget_of_a_later_command() {
        let mut collector = OutputCollector::default();
        collector.expect_command();
        let noise = vec![b'n'; MAX_OUTPUT + 1];
        collector.print_command(1, Stream::Stdout, &noise).unwrap();
        for other in 2..2 + MAX_COMMANDS as u32 {
            collector.command_ended(other, 0);
        }
        collector.print_command(99, Stream::Stdout, b"one").unwrap();
        collector.begin_command(99);
        collector.print_command(1, Stream::Stdout, &noise).unwrap();
        collector.print(Stream::Stdout, &noise).unwrap();
        collector.print_command(99, Stream::Stderr, b"two").unwrap();
        collector.command_ended(1, 7);
        assert_eq!(collector.status, None);
        collector.command_ended(99, -9);
        let Streams { stdout, stderr, dropped } = &collector.own;
        assert_eq!((&stdout[..], &stderr[..], *dropped), (&b"one"[..], &b"two"[..], 0));
        assert_eq!(collector.status, Some(-9));
    }

    #[test]
    fn commands_with_unknown_numbers_share_a_budget() {
        let mut collector = OutputCollector::default();
        collector.expect_command();
        let noise = vec![b'n'; MAX_OUTPUT];
        for number in 1..MAX_COMMANDS as u32 {
            collector.print_command(number, Stream::Stdout, &noise).unwrap();
            collector.print_command(99, Stream::Stderr, b"own").unwrap();
            let held: usize = collector.candidates.values().map(|(output, _)| output.len()).sum();
            assert!(held <= MAX_CANDIDATE_OUTPUT, "{held}");
        }
        assert_eq!(collector.candidates[&1].0.dropped, MAX_OUTPUT as u64);
        collector.begin_command(99);
        assert_eq!(collector.own.stderr, b"own".repeat(MAX_COMMANDS - 1));
    }

    #[test]
    fn progress_ends_at_the_budget_of_output() {
        let (to, mut pieces) = mpsc::channel(1);
        let mut collector = OutputCollector::new(Limits::default(), Some(to));
        collector.expect_command();
        collector.begin_command(7);
        let mut reported = 0;
        for _ in 0..2 * MAX_OUTPUT / 4096 {
            collector.print_command(7, Stream::Stdout, &[b'a'; 4096]).unwrap();
            reported += pieces.try_recv().map_or(0, |piece| piece.len());
        }
        assert_eq!((reported, collector.own.dropped), (MAX_OUTPUT, MAX_OUTPUT as u64));
    }

    #[test]
    fn a_command_that_ends_before_its_number_is_known_has_its_status() {
        let mut collector = OutputCollector::default();
        collector.expect_command();
        for other in 0..=MAX_COMMANDS as u32 {
            collector.command_ended(other, 0);
        }
        collector.command_ended(99, 3);
        collector.begin_command(99);
        assert_eq!(collector.status, Some(3));
    }

    #[test]
    fn a_cancelled_call_does_not_proceed() {
        let mut collector = OutputCollector::default();
        assert!(collector.proceeds());
        collector.limits.cancelled.store(true, Ordering::Relaxed);
        assert!(!collector.proceeds());
    }
}
