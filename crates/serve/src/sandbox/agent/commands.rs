//! The commands of one sandbox with subscribers, and its background work.
//!
//! Promises: a subscriber gets a command's output in order and one end: the exit status, or the
//! reason why no more follows. Output that waits for a client is bounded.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame};
use tokio::sync::Notify;
use tokio::time::{Instant, Interval, interval_at};

use crate::concurrency::Permit;
use crate::cpu_time::memory_peak;
use crate::lock::lock;
use crate::sandbox::agent::byte_channel::{Receiver, SendError, Sender, byte_channel};
use crate::sandbox::agent::connect::{self, CommandCost, ConnectError};
use crate::sandbox::agent::time_limits::TimeLimits;
use crate::sandbox::tenants::cpu_scheduler::CpuTurn;

/// Subscribers to commands in a sandbox, and its background work.
#[derive(Default)]
pub(crate) struct Commands {
    known: Mutex<CommandState>,
    changed: Notify,
    slicing: AtomicBool,
    /// The place of the call that runs.
    pub(crate) place: Mutex<Option<Permit>>,
    /// When that call began to run, after its waits.
    begun: Mutex<Option<Instant>>,
    /// CPU time of the calls and slices that have ended.
    ended_cpu: Mutex<Duration>,
    /// The turn of the running call on the processors.
    cpu: Mutex<Option<CpuTurn>>,
    /// Connections from outside, which have subscribers like commands.
    #[cfg(linux_guests)]
    pub(crate) lines: crate::sandbox::connections::tunnels::Tunnels,
    /// Its files while it runs.
    #[cfg(linux_guests)]
    pub(crate) view: afresh::linux::FileView,
}

/// A running call of a sandbox.
pub(crate) struct RunningCall<'a>(&'a Commands);

impl Drop for RunningCall<'_> {
    fn drop(&mut self) {
        drop(lock(&self.0.cpu).take());
        drop(lock(&self.0.place).take());
        *lock(&self.0.begun) = None;
    }
}

/// A slice that lasts.
pub(crate) struct RunningSlice<'a>(&'a AtomicBool);

impl Drop for RunningSlice<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct CommandState {
    subscribers: Vec<Subscription>,
    /// The total number.
    count: u64,
    limits: TimeLimits,
    /// When something happens in the sandbox by itself.
    due: Option<Instant>,
    /// When background work that was refused is tried again for commands whose time is over.
    retry: Option<Instant>,
    /// A task drives the background work.
    driven: bool,
}

struct Subscription {
    key: u64,
    number: u32,
    subscriber: Subscriber,
    /// When it began, and the CPU time of the sandbox then.
    begun: (Instant, Duration),
    /// The peak of mapped memory in calls and slices that have ended.
    peak_memory: u64,
    /// Bytes of output.
    output_bytes: u64,
}

impl CommandState {
    fn next(&self) -> Option<Instant> {
        [self.limits.next(self.retry), self.due].into_iter().flatten().min()
    }

    /// Removes the subscribers of one command.
    fn take(&mut self, number: u32) -> Vec<Subscription> {
        let taken = self.subscribers.extract_if(.., |one| one.number == number);
        taken.collect()
    }
}

impl Commands {
    /// Subscribes to a command, which sends its number now. With a `limit` the command is ended
    /// after that.
    pub(crate) fn listen(&self, number: u32, subscriber: Subscriber, limit: Option<Duration>) {
        // The channel is empty, and a client that left misses nothing.
        let _ = subscriber.sender.try_give(connect::started(number).into());
        let begun = (Instant::now(), self.cpu_time());
        let mut known = lock(&self.known);
        known.count += 1;
        let key = known.count;
        known.subscribers.retain(|one| !one.subscriber.sender.is_left());
        let (peak_memory, output_bytes) = (0, 0);
        let subscription =
            Subscription { key, number, subscriber, begun, peak_memory, output_bytes };
        known.subscribers.push(subscription);
        if let Some(limit) = limit {
            known.limits.set(number, limit);
        }
        self.changed.notify_one();
    }

    /// The subscribers to `count` bytes of output of a command, by a key for
    /// [`Commands::drop_subscriber`].
    pub(crate) fn subscribers(&self, number: u32, count: usize) -> Vec<(u64, Sender)> {
        let mut known = lock(&self.known);
        let own = known.subscribers.iter_mut().filter(|one| one.number == number);
        own.map(|one| {
            one.output_bytes += count as u64;
            (one.key, one.subscriber.sender.clone())
        })
        .collect()
    }

    /// Ends one subscription with the reason.
    pub(crate) fn drop_subscriber(&self, key: u64, why: &ConnectError) {
        let mut known = lock(&self.known);
        let at = known.subscribers.iter().position(|one| one.key == key);
        let gone = at.map(|at| known.subscribers.swap_remove(at));
        drop(known);
        if let Some(gone) = gone {
            gone.subscriber.end(connect::broken_off(why));
        }
    }

    /// A command has ended, with this status.
    pub(crate) fn ended(&self, number: u32, status: i32) {
        let cpu = self.cpu_time();
        let mut known = lock(&self.known);
        known.limits.remove(number);
        let own = known.take(number);
        drop(known);
        // It ends within a call or a slice of the sandbox, on its thread.
        let present = memory_peak();
        for Subscription {
            subscriber, begun: (since, before), peak_memory, output_bytes, ..
        } in own
        {
            let peak = peak_memory.max(present);
            let cost = CommandCost {
                wall: since.elapsed(),
                cpu: cpu.saturating_sub(before),
                peak_memory: (peak > 0).then_some(peak),
                output_bytes,
            };
            subscriber.end(connect::ended(status, Some(cost)));
        }
    }

    /// Ends all subscriptions with the reason.
    pub(crate) fn dismiss(&self, why: &ConnectError) {
        #[cfg(linux_guests)]
        self.lines.clear();
        let all = std::mem::take(&mut lock(&self.known).subscribers);
        all.into_iter().for_each(|one| one.subscriber.end(connect::broken_off(why)));
    }

    /// Ends all subscriptions of a sandbox that was taken back to an earlier state, and drops the
    /// limits of commands that began after `since`, or of all. Others may get their numbers.
    pub(crate) fn rolled_back(&self, since: Option<std::time::Instant>, why: &ConnectError) {
        lock(&self.known).limits.drop_since(since);
        self.dismiss(why);
    }

    /// The commands whose time is over. Their subscribers are notified; the caller ends the
    /// commands, and then drops their limits.
    pub(crate) fn overdue(&self) -> Vec<u32> {
        let mut known = lock(&self.known);
        let over = known.limits.overdue();
        let subscribers: Vec<_> = over.iter().flat_map(|number| known.take(*number)).collect();
        drop(known);
        let why = ConnectError::new("deadline_exceeded", "the command ran longer than it may");
        subscribers.into_iter().for_each(|one| one.subscriber.end(connect::broken_off(&why)));
        over
    }

    /// A command has no time limit any more.
    pub(crate) fn drop_limit(&self, number: u32) {
        lock(&self.known).limits.remove(number);
    }

    /// Sets the next moment of background work at the end of a turn: now if bytes for the sandbox
    /// have passed or wait, else `due`. True if the caller must start a task that follows
    /// [`Commands::next`].
    pub(crate) fn set_due(&self, due: Option<Instant>) -> bool {
        let mut known = lock(&self.known);
        // Under the lock: a wake before it is seen here, and one after it sets the moment itself.
        let due = if self.moved() { Some(Instant::now()) } else { due };
        self.set_due_locked(&mut known, due)
    }

    /// Lets the sandbox run now, also where a turn that ends meanwhile expects nothing. True as in
    /// [`Commands::set_due`].
    #[cfg(linux_guests)]
    pub(crate) fn wake(&self) -> bool {
        self.lines.moved.store(true, Ordering::Relaxed);
        self.set_due_locked(&mut lock(&self.known), Some(Instant::now()))
    }

    fn set_due_locked(&self, known: &mut CommandState, due: Option<Instant>) -> bool {
        (known.due, known.retry) = (due, None);
        self.changed.notify_one();
        let begins = !known.driven && known.next().is_some();
        known.driven |= begins;
        begins
    }

    /// The next moment of background work; `None` if no task is needed any more.
    pub(crate) fn next(&self) -> Option<Instant> {
        let mut known = lock(&self.known);
        let next = known.next();
        known.driven = next.is_some();
        next
    }

    /// Nothing happens by itself any more, until the next call.
    pub(crate) fn rest(&self) {
        let mut known = lock(&self.known);
        (known.due, known.retry) = (None, None);
        known.limits.clear();
        self.changed.notify_one();
    }

    /// Background work was refused. It is tried again after `wait`, or if that is unknown with the
    /// next call. Where bytes of a connection wait, or the time of a command is over, it is tried
    /// again after `backoff` at the latest.
    pub(crate) fn rest_after_refusal(&self, wait: Option<Duration>, backoff: Duration) {
        self.overdue();
        let mut known = lock(&self.known);
        // Under the lock, as in `set_due`.
        let waits = self.has_waiting_bytes().then_some(backoff);
        let after = |wait: Duration| Instant::now().checked_add(wait);
        known.due = wait.or(waits).and_then(after);
        known.retry = after(wait.unwrap_or(backoff));
        self.changed.notify_one();
    }

    /// Ends background work and all subscriptions, with the reason.
    pub(crate) fn end(&self, why: &ConnectError) {
        self.rest();
        self.dismiss(why);
    }

    /// Returns once [`Commands::next`] may be another.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Keeps the permit of a call until the guard is dropped, except while the call waits for its
    /// client.
    pub(crate) fn hold(&self, place: Permit) -> RunningCall<'_> {
        *lock(&self.place) = Some(place);
        RunningCall(self)
    }

    /// The call that holds a place begins to run: its waits are over.
    pub(crate) fn begin_run(&self) {
        *lock(&self.begun) = Some(Instant::now());
    }

    /// How long the call that runs has run.
    pub(crate) fn running_time(&self) -> Option<Duration> {
        lock(&self.begun).map(|begun| begun.elapsed())
    }

    /// CPU time of the sandbox until now, as far as it is known on this thread.
    fn cpu_time(&self) -> Duration {
        let running = self.with_turn(|turn| turn.cpu_time()).unwrap_or_default();
        *lock(&self.ended_cpu) + running
    }

    /// Counts the CPU time and the peak of mapped memory of a call or a slice that ends.
    pub(crate) fn add_use(&self, cpu: Duration, peak_memory: u64) {
        *lock(&self.ended_cpu) += cpu;
        for one in &mut lock(&self.known).subscribers {
            one.peak_memory = one.peak_memory.max(peak_memory);
        }
    }

    /// Keeps the turn of the running call on the processors, until the call ends.
    pub(crate) fn compute(&self, turn: CpuTurn) {
        *lock(&self.cpu) = Some(turn);
    }

    /// Uses the turn of the running call, on its thread.
    pub(crate) fn with_turn<R>(&self, with: impl FnOnce(&mut CpuTurn) -> R) -> Option<R> {
        lock(&self.cpu).as_mut().map(with)
    }

    /// The sandbox runs a slice until the guard is dropped.
    pub(crate) fn slice(&self) -> RunningSlice<'_> {
        self.slicing.store(true, Ordering::Relaxed);
        RunningSlice(&self.slicing)
    }

    /// Whether it runs a slice now.
    pub(crate) fn is_slicing(&self) -> bool {
        self.slicing.load(Ordering::Relaxed)
    }

    /// Whether bytes have passed through connections or wait for them since the last question, so
    /// that the sandbox may continue.
    fn moved(&self) -> bool {
        #[cfg(linux_guests)]
        return self.lines.moved.swap(false, Ordering::Relaxed);
        #[cfg(not(linux_guests))]
        false
    }

    /// Whether connections may have bytes for the sandbox that no turn has taken.
    fn has_waiting_bytes(&self) -> bool {
        #[cfg(linux_guests)]
        return self.lines.moved.load(Ordering::Relaxed);
        #[cfg(not(linux_guests))]
        false
    }

    /// Whether a task drives the background work.
    pub(crate) fn is_driven(&self) -> bool {
        lock(&self.known).driven
    }

    /// Whether a command has a subscriber or a connection.
    pub(crate) fn in_use(&self) -> bool {
        #[cfg(linux_guests)]
        if !self.lines.is_empty() {
            return true;
        }
        lock(&self.known).subscribers.iter().any(|one| !one.subscriber.sender.is_left())
    }
}

/// The receiver of output from a command.
pub(crate) struct Subscriber {
    sender: Sender,
    last: Arc<OnceLock<Bytes>>,
}

impl Subscriber {
    /// With the client's receiver. Within a runtime. A silent command sends a keepalive after each
    /// `alive`.
    pub(crate) fn new(alive: Duration) -> (Self, EventStream) {
        Self::with_keepalive(alive, connect::keepalive)
    }

    /// The same, with another form of keepalives.
    pub(crate) fn with_keepalive(
        alive: Duration,
        keepalive: fn() -> Vec<u8>,
    ) -> (Self, EventStream) {
        let (sender, pieces) = byte_channel();
        let last = Arc::new(OnceLock::new());
        let alive = interval_at(Instant::now() + alive, alive);
        let last_event = last.clone();
        let heard =
            EventStream { first: None, pieces, last: last_event, over: false, alive, keepalive };
        (Self { sender, last }, heard)
    }

    /// Sends an event, if there is room for it.
    pub(crate) fn send(&self, event: Vec<u8>) -> Result<(), SendError> {
        self.sender.try_give(event.into())
    }

    /// Whether the client has left.
    pub(crate) fn is_left(&self) -> bool {
        self.sender.is_left()
    }

    /// Sends the last event.
    pub(crate) fn end(self, last: Vec<u8>) {
        // The first end sets the reason.
        let _ = self.last.set(last.into());
    }
}

/// The events of a command, as a body.
pub(crate) struct EventStream {
    first: Option<Bytes>,
    pieces: Receiver,
    last: Arc<OnceLock<Bytes>>,
    over: bool,
    alive: Interval,
    keepalive: fn() -> Vec<u8>,
}

impl EventStream {
    /// Returns once there is an event; false if none will follow.
    pub(crate) async fn wait_until_begun(&mut self) -> bool {
        if self.first.is_none() {
            self.first = self.pieces.take().await;
        }
        self.first.is_some()
    }
}

impl Body for EventStream {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let piece = match self.first.take() {
            Some(first) => Poll::Ready(Some(first)),
            None => self.pieces.poll_take(context),
        };
        let told = match piece {
            Poll::Ready(Some(piece)) => {
                self.alive.reset();
                piece
            }
            Poll::Ready(None) if self.over => return Poll::Ready(None),
            Poll::Ready(None) => {
                self.over = true;
                let why = ConnectError::new("aborted", "the sandbox has ended");
                let last = self.last.get().cloned();
                last.unwrap_or_else(|| connect::broken_off(&why).into())
            }
            Poll::Pending => {
                ready!(self.alive.poll_tick(context));
                (self.keepalive)().into()
            }
        };
        Poll::Ready(Some(Ok(Frame::data(told))))
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    fn run<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(work)
    }

    async fn whole(heard: EventStream) -> String {
        let body = heard.collect().await.unwrap().to_bytes();
        String::from_utf8_lossy(&body).into_owned()
    }

    #[cfg(linux_guests)]
    #[test]
    fn a_turn_that_ends_does_not_take_back_a_wake() {
        let commands = Commands::default();
        assert!(commands.wake());
        assert!(!commands.set_due(None));
        assert!(commands.next().is_some_and(|at| at <= Instant::now()));
        // The bytes have met a turn.
        commands.set_due(None);
        assert_eq!(commands.next(), None);
    }

    #[cfg(linux_guests)]
    #[test]
    fn a_refused_turn_is_tried_again_for_bytes_that_wait() {
        let commands = Commands::default();
        commands.wake();
        commands.rest_after_refusal(None, TEST_TIMEOUT);
        assert!(commands.next().is_some_and(|at| at > Instant::now()));
        // Its connections have ended.
        commands.dismiss(&ConnectError::new("unavailable", "paused"));
        commands.rest_after_refusal(None, TEST_TIMEOUT);
        assert_eq!(commands.next(), None);
    }

    #[test]
    fn a_refused_turn_keeps_time_limits_and_is_tried_again() {
        run(async {
            let commands = Commands::default();
            let subscribe = |number, limit| {
                let (subscriber, heard) = Subscriber::new(TEST_TIMEOUT);
                commands.listen(number, subscriber, Some(limit));
                heard
            };
            let (short, long) = (subscribe(7, Duration::ZERO), subscribe(8, TEST_TIMEOUT));
            let before = Instant::now();
            commands.rest_after_refusal(None, TEST_TIMEOUT);
            // The client learns of the end in time, and the command ends with the next turn.
            assert!(whole(short).await.contains("deadline_exceeded"));
            assert!(commands.next().is_some_and(|at| at >= before + TEST_TIMEOUT / 2));
            commands.set_due(None);
            assert!(commands.next().is_some_and(|at| at <= Instant::now()));
            assert_eq!(commands.overdue(), [7]);
            commands.drop_limit(7);
            assert!(commands.next().is_some_and(|at| at > before), "the other limit is lost");
            // A refusal for a time is over with it.
            commands.rest_after_refusal(Some(TEST_TIMEOUT / 4), TEST_TIMEOUT);
            assert!(commands.next().is_some_and(|at| at < before + TEST_TIMEOUT / 2));
            drop(long);
        });
    }

    const TEST_TIMEOUT: Duration = Duration::from_secs(3600);

    #[test]
    fn each_subscriber_receives_its_own_command_and_one_end() {
        run(async {
            let commands = Commands::default();
            let (subscriber, mut heard) = Subscriber::new(TEST_TIMEOUT);
            let (other, unheard) = Subscriber::new(TEST_TIMEOUT);
            commands.listen(7, subscriber, None);
            commands.listen(8, other, None);
            assert!(commands.in_use() && heard.wait_until_begun().await);
            let subscribers = commands.subscribers(7, 7);
            assert_eq!(subscribers.len(), 1);
            subscribers[0].1.give("printed".into()).await;
            drop(subscribers);
            commands.ended(7, 3);
            commands.ended(7, 4);
            let told = whole(heard).await;
            assert!(told.contains(r#""pid":7"#) && told.contains("printed"), "{told}");
            assert!(told.contains(r#""exitCode":3"#) && !told.contains(r#""exitCode":4"#));
            assert!(told.contains(r#""output_bytes":7"#), "{told}");
            // A client that left is ignored.
            assert!(commands.in_use());
            drop(unheard);
            assert!(!commands.in_use());
            let (subscriber, heard) = Subscriber::new(TEST_TIMEOUT);
            commands.listen(9, subscriber, None);
            commands.dismiss(&ConnectError::new("unavailable", "paused"));
            assert!(whole(heard).await.contains("paused"));
            let (subscriber, mut heard) = Subscriber::new(TEST_TIMEOUT);
            drop(subscriber);
            assert!(!heard.wait_until_begun().await && whole(heard).await.contains("has ended"));
        });
    }

    #[test]
    fn a_silent_command_sends_keepalives() {
        run(async {
            let commands = Commands::default();
            let (subscriber, mut heard) = Subscriber::new(Duration::from_millis(5));
            commands.listen(7, subscriber, None);
            assert!(heard.wait_until_begun().await);
            for _ in 0..3 {
                heard.frame().await.unwrap().unwrap();
            }
            let frame = heard.frame().await.unwrap().unwrap().into_data().unwrap();
            assert!(String::from_utf8_lossy(&frame).contains("keepalive"));
        });
    }

    #[test]
    fn one_task_at_a_time_drives_due_timers() {
        run(async {
            let commands = Commands::default();
            assert!(!commands.set_due(None) && !commands.is_driven());
            let soon = Instant::now() + TEST_TIMEOUT;
            assert!(commands.set_due(Some(soon)) && !commands.set_due(Some(soon)));
            assert_eq!((commands.next(), commands.is_driven()), (Some(soon), true));
            assert!(!commands.set_due(None));
            assert_eq!((commands.next(), commands.is_driven()), (None, false));
            // A task that is not needed notices it, and until then there is no second.
            assert!(commands.set_due(Some(soon)));
            commands.end(&ConnectError::new("aborted", "killed"));
            commands.changed().await;
            assert!(!commands.set_due(Some(soon)) && commands.next() == Some(soon));
            commands.rest();
            assert_eq!(commands.next(), None);
            // A command that may run only so long.
            let (subscriber, heard) = Subscriber::new(TEST_TIMEOUT);
            commands.listen(7, subscriber, Some(Duration::ZERO));
            assert!(commands.set_due(None) && commands.next().is_some());
            assert_eq!(commands.overdue(), [7]);
            commands.drop_limit(7);
            assert!(commands.overdue().is_empty() && commands.next().is_none());
            assert!(whole(heard).await.contains("deadline_exceeded"));
        });
    }
}
