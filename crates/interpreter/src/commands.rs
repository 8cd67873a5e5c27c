//! Commands that run in a Linux sandbox, and their output between the calls that run it.
//!
//! A sandbox runs only while a call runs it. Output that comes then is kept here until the host
//! takes it.
//!
//! Promises: each stream keeps a bounded number of bytes; a handle of a command that a rollback
//! removed never gets the output of another command with the same number.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use afresh::CallCost;
use minicbor::Decoder;

use crate::listener::Stream;

/// Maximum bytes kept of each stream until they are taken.
const MAX_KEPT: usize = 16 << 20;
/// Maximum memory of output of commands that have no number yet.
const MAX_EARLY: usize = 1 << 20;
/// Memory of a piece of such output, apart from its bytes.
const PIECE_COST: usize = 64;
/// Maximum commands that are known, beyond which those that have ended are forgotten.
const MAX_KNOWN: usize = 4096;

/// Output of one command that was not taken yet.
#[derive(Debug, Default)]
pub struct CommandOutput {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// Whether output was dropped.
    pub truncated: bool,
    /// The exit status, negative for a signal.
    pub ended: Option<i32>,
}

impl CommandOutput {
    /// Returns the number of bytes that are dropped.
    fn keep(&mut self, stream: Stream, bytes: &[u8]) -> usize {
        let kept = match stream {
            Stream::Stdout | Stream::Terminal => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        };
        let room = MAX_KEPT.saturating_sub(kept.len());
        kept.extend_from_slice(&bytes[..room.min(bytes.len())]);
        self.truncated |= room < bytes.len();
        bytes.len().saturating_sub(room)
    }
}

/// The use of a sandbox while a command ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommandCost {
    /// Wall-clock time from its start to its end, or until now.
    pub wall: Duration,
    /// CPU time of the sandbox, with all of its processes.
    pub cpu: Duration,
    /// Peak of the memory that the processes of the sandbox have mapped together.
    pub peak_memory: Option<u64>,
    /// Bytes of its output.
    pub output_bytes: u64,
    /// Bytes of its output that were dropped.
    pub dropped_bytes: u64,
}

#[derive(Debug)]
struct CommandEntry {
    /// Distinguishes it from other commands of the same number.
    serial: u64,
    output: CommandOutput,
    began: Instant,
    cost: CommandCost,
    /// Whether the cost of the work in which it ended was added.
    charged: bool,
    /// The bytes of each stream in `output` when the start of another command began.
    before_start: [usize; 2],
}

impl CommandEntry {
    fn new(serial: u64) -> Self {
        Self {
            serial,
            output: CommandOutput::default(),
            began: Instant::now(),
            cost: CommandCost::default(),
            charged: false,
            before_start: [0; 2],
        }
    }

    /// Takes output, and counts it.
    fn keep(&mut self, stream: Stream, bytes: &[u8]) {
        let dropped = self.output.keep(stream, bytes);
        self.cost.output_bytes += bytes.len() as u64;
        self.cost.dropped_bytes += dropped as u64;
    }

    /// Adds the cost of work of the sandbox, unless it had ended before that.
    fn charge(&mut self, cost: &CallCost) {
        if !self.charged {
            self.cost.cpu += cost.cpu;
            self.cost.peak_memory = self.cost.peak_memory.max(cost.peak_memory);
            self.charged = self.output.ended.is_some();
        }
    }

    /// The output since the start of another command began, in case it is that command's.
    fn output_since_start(mut self) -> CommandOutput {
        let [stdout, stderr] = self.before_start;
        let since = |kept: &mut Vec<u8>, before: usize| kept.split_off(before.min(kept.len()));
        CommandOutput {
            stdout: since(&mut self.output.stdout, stdout),
            stderr: since(&mut self.output.stderr, stderr),
            truncated: self.output.truncated,
            ended: None,
        }
    }
}

/// Output of commands that have no number yet.
#[derive(Debug, Default)]
struct EarlyOutput {
    pieces: Vec<(u32, Stream, Vec<u8>)>,
    /// Bytes of memory that the pieces take.
    cost: usize,
}

#[derive(Debug, Default)]
struct CommandTable {
    all: BTreeMap<u32, CommandEntry>,
    serials: u64,
    /// How often the sandbox went to another state.
    moves: u64,
    /// Output of unknown commands while one is started, which may be that one.
    early: Option<EarlyOutput>,
    /// The serial number of the command that was started last.
    begun: Option<u64>,
}

/// The number in the answer to a request to start a command: `[0, number, text]`.
fn started(answer: &[u8]) -> Option<u32> {
    let mut from = Decoder::new(answer);
    let whole = from.array().ok()? == Some(3) && from.u8().ok()? == 0;
    from.u32().ok().filter(|_| whole)
}

/// The commands of one sandbox.
#[derive(Clone, Debug, Default)]
pub struct Commands(Arc<Mutex<CommandTable>>);

impl Commands {
    fn lock(&self) -> MutexGuard<'_, CommandTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A command is being started.
    pub fn begin(&self) {
        let mut state = self.lock();
        (state.early, state.begun) = (Some(EarlyOutput::default()), None);
        for CommandEntry { output, before_start, .. } in state.all.values_mut() {
            *before_start = [output.stdout.len(), output.stderr.len()];
        }
    }

    /// The guest has answered a request: if that was to start a command, with its number.
    pub fn answered(&self, answer: &[u8]) {
        let Some(early) = self.lock().early.take() else { return };
        let Some(number) = started(answer) else { return };
        // One with this number that has not ended ran in a state before a move. Its output since
        // the start began is that of the new command, whose number was not known yet.
        let stale = self.lock().all.remove(&number).filter(|entry| entry.output.ended.is_none());
        let serial = self.adopt(number, true);
        let mut state = self.lock();
        state.begun = Some(serial);
        if let Some(entry) = state.all.get_mut(&number) {
            entry.output = stale.map(CommandEntry::output_since_start).unwrap_or_default();
            let own = early.pieces.into_iter().filter(|(of, ..)| *of == number);
            entry.cost.output_bytes =
                (entry.output.stdout.len() + entry.output.stderr.len()) as u64;
            own.for_each(|(_, stream, bytes)| entry.keep(stream, &bytes));
        }
    }

    /// The serial number of the command that was started, if it was.
    #[must_use]
    pub fn started_serial(&self) -> Option<u64> {
        let mut state = self.lock();
        state.early = None;
        state.begun.take()
    }

    /// The serial number of a running command; another one than before if it is `new`.
    pub fn adopt(&self, number: u32, new: bool) -> u64 {
        let mut state = self.lock();
        if let Some(entry) =
            state.all.get(&number).filter(|entry| !new && entry.output.ended.is_none())
        {
            return entry.serial;
        }
        if state.all.len() >= MAX_KNOWN {
            state.all.retain(|_, entry| entry.output.ended.is_none());
        }
        state.serials += 1;
        let serial = state.serials;
        state.all.insert(number, CommandEntry::new(serial));
        serial
    }

    /// Takes output of a process that leads a session; false if it is not one of the commands.
    pub fn print(&self, number: u32, stream: Stream, bytes: &[u8]) -> bool {
        let mut state = self.lock();
        if let Some(entry) = state.all.get_mut(&number).filter(|entry| entry.output.ended.is_none())
        {
            entry.keep(stream, bytes);
            return true;
        }
        let Some(early) = &mut state.early else { return false };
        let cost = early.cost + PIECE_COST + bytes.len();
        if cost <= MAX_EARLY {
            early.cost = cost;
            early.pieces.push((number, stream, bytes.to_vec()));
        }
        true
    }

    /// A command has ended.
    pub fn ended(&self, number: u32, status: i32) {
        if let Some(entry) = self.lock().all.get_mut(&number) {
            entry.output.ended = Some(status);
            entry.cost.wall = entry.began.elapsed();
        }
    }

    /// The sandbox has done work of this cost, which counts for each command that ran.
    pub fn charge(&self, cost: &CallCost) {
        self.lock().all.values_mut().for_each(|entry| entry.charge(cost));
    }

    /// The cost of a command so far; `None` if it is unknown by now.
    #[must_use]
    pub fn cost(&self, number: u32, serial: u64) -> Option<CommandCost> {
        let state = self.lock();
        let entry = state.all.get(&number).filter(|entry| entry.serial == serial)?;
        let wall = match entry.output.ended {
            Some(_) => entry.cost.wall,
            None => entry.began.elapsed(),
        };
        Some(CommandCost { wall, ..entry.cost })
    }

    /// Takes the output of a command since the last time, with the number of moves so far; `None`
    /// if it is unknown by now.
    #[must_use]
    pub fn take(&self, number: u32, serial: u64) -> Option<(CommandOutput, u64)> {
        let mut state = self.lock();
        let moves = state.moves;
        let is_starting = state.early.is_some();
        let entry = state.all.get_mut(&number).filter(|entry| entry.serial == serial)?;
        if is_starting && entry.output.ended.is_none() {
            // It may be the output of the command that is being started.
            return Some((CommandOutput::default(), moves));
        }
        let output = std::mem::take(&mut entry.output);
        entry.output.ended = output.ended;
        Some((output, moves))
    }

    /// The sandbox goes to another state: commands that have ended since then may run again there.
    pub fn moved(&self) {
        let mut state = self.lock();
        state.moves += 1;
        state.all.values_mut().for_each(|entry| *entry = CommandEntry::new(entry.serial));
    }

    /// The commands of a fork.
    #[must_use]
    pub fn fork(&self) -> Self {
        let state = self.lock();
        let running = state.all.iter().filter(|(_, entry)| entry.output.ended.is_none());
        let copy =
            |(number, entry): (&u32, &CommandEntry)| (*number, CommandEntry::new(entry.serial));
        let all = running.map(copy).collect();
        Self(Arc::new(Mutex::new(CommandTable {
            all,
            serials: state.serials,
            ..CommandTable::default()
        })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answer that a command was started.
    fn answer(number: u8) -> [u8; 4] {
        [0x83, 0, number, 0x60]
    }

    fn start(commands: &Commands, number: u8) -> u64 {
        commands.begin();
        commands.answered(&answer(number));
        commands.started_serial().unwrap()
    }

    #[test]
    fn output_before_the_number_is_known_is_that_of_the_new_command_after_a_move() {
        let commands = Commands::default();
        let [old, other] = [7, 8].map(|number| start(&commands, number));
        commands.ended(7, 0);
        // In the other state the number may be that of a running command, or of none.
        commands.moved();
        assert!(commands.print(7, Stream::Stdout, b"before"));
        commands.begin();
        assert!(commands.print(7, Stream::Stdout, b"da"));
        assert!(commands.print(8, Stream::Stderr, b"of another"));
        let (seen, moves) = commands.take(7, old).unwrap();
        assert_eq!((&seen.stdout[..], seen.ended, moves), (&b""[..], None, 1));
        assert!(commands.print(7, Stream::Stdout, b"ta"));
        commands.answered(&answer(7));
        let new = commands.started_serial().unwrap();
        commands.ended(7, 0);
        assert!(commands.take(7, old).is_none());
        let (seen, _) = commands.take(7, new).unwrap();
        assert_eq!((&seen.stdout[..], seen.ended, seen.truncated), (&b"data"[..], Some(0), false));
        assert_eq!(commands.take(8, other).unwrap().0.stderr, b"of another");
    }

    #[test]
    fn a_command_costs_the_work_of_its_sandbox_from_its_start_to_its_end() {
        let work = |cpu, peak| {
            let mut cost = CallCost::default();
            (cost.cpu, cost.peak_memory) = (Duration::from_millis(cpu), Some(peak));
            cost
        };
        let commands = Commands::default();
        commands.charge(&work(1000, 9000));
        let one = start(&commands, 7);
        commands.charge(&work(1, 10));
        let two = start(&commands, 8);
        commands.print(7, Stream::Stdout, b"abc");
        commands.charge(&work(2, 30));
        // The work in which it ends counts, whether its output is taken before or not.
        commands.ended(7, 0);
        assert!(commands.take(7, one).is_some());
        commands.charge(&work(4, 20));
        commands.charge(&work(8, 40));
        let cost = commands.cost(7, one).unwrap();
        assert_eq!((cost.cpu, cost.peak_memory), (Duration::from_millis(7), Some(30)));
        assert_eq!((cost.output_bytes, cost.dropped_bytes), (3, 0));
        assert_eq!(commands.cost(7, one), Some(cost));
        let cost = commands.cost(8, two).unwrap();
        assert_eq!((cost.cpu, cost.peak_memory), (Duration::from_millis(14), Some(40)));
        commands.print(8, Stream::Stderr, &vec![0; MAX_KEPT + 5]);
        let cost = commands.cost(8, two).unwrap();
        assert_eq!((cost.output_bytes, cost.dropped_bytes), (MAX_KEPT as u64 + 5, 5));
        commands.moved();
        assert_eq!(commands.cost(8, two).unwrap().cpu, Duration::ZERO);
        assert!(commands.cost(8, one).is_none());
    }

    #[test]
    fn a_running_command_keeps_its_output_while_another_is_started() {
        let commands = Commands::default();
        let old = start(&commands, 7);
        commands.moved();
        commands.print(7, Stream::Stdout, b"a");
        commands.begin();
        commands.print(7, Stream::Stdout, b"b");
        commands.answered(&answer(9));
        let new = commands.started_serial().unwrap();
        assert_eq!(commands.take(7, old).unwrap().0.stdout, b"ab");
        assert_eq!(commands.take(9, new).unwrap().0.stdout, b"");
    }
}
