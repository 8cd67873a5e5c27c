//! The commands of one sandbox that somebody hears, and when something happens there by itself.
//!
//! What it promises: a command's client is told what it prints, in order, and one end: how it ended, or why no more is told. What waits
//! for a client is bounded.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame};
use tokio::sync::Notify;
use tokio::time::{Instant, Interval, interval_at};

use super::connect::{self, Failed};
use super::pieces::{Giver, Taker, way};
use super::registry::lock;

/// What is heard of a sandbox's commands, and when it goes on by itself.
#[derive(Default)]
pub(super) struct Commands {
    known: Mutex<Known>,
    changed: Notify,
    slicing: AtomicBool,
    /// Connections from outside, which are heard as commands are.
    #[cfg(feature = "linux")]
    pub(super) lines: super::lines::Lines,
}

/// A slice that lasts.
pub(super) struct Slice<'a>(&'a AtomicBool);

impl Drop for Slice<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct Known {
    ears: Vec<Listening>,
    /// How many there have been.
    count: u64,
    /// When commands have run as long as they may, by their numbers.
    limits: BTreeMap<u32, Instant>,
    /// When something happens in the sandbox by itself.
    due: Option<Instant>,
    /// Somebody sees to that.
    driven: bool,
}

struct Listening {
    key: u64,
    number: u32,
    ear: Ear,
}

impl Known {
    fn next(&self) -> Option<Instant> {
        self.limits.values().copied().chain(self.due).min()
    }

    /// Takes out those who hear one command.
    fn take(&mut self, number: u32) -> Vec<Ear> {
        let taken = self.ears.extract_if(.., |one| one.number == number);
        taken.map(|one| one.ear).collect()
    }
}

impl Commands {
    /// Has somebody hear a command, who is told its number now. With a `limit` it is ended after that.
    pub(super) fn listen(&self, number: u32, ear: Ear, limit: Option<Duration>) {
        // Nothing waits there yet; whoever is gone already misses it.
        let _ = ear.giver.try_give(connect::started(number).into());
        let mut known = lock(&self.known);
        known.count += 1;
        let key = known.count;
        known.ears.retain(|one| !one.ear.giver.is_left());
        known.ears.push(Listening { key, number, ear });
        if let Some(at) = limit.and_then(|limit| Instant::now().checked_add(limit)) {
            known.limits.insert(number, at);
        }
        self.changed.notify_one();
    }

    /// Where what a command prints is sent, by a key for [`Commands::drop_ear`].
    pub(super) fn ears(&self, number: u32) -> Vec<(u64, Giver)> {
        let known = lock(&self.known);
        let own = known.ears.iter().filter(|one| one.number == number);
        own.map(|one| (one.key, one.ear.giver.clone())).collect()
    }

    /// Tells one no more, and why.
    pub(super) fn drop_ear(&self, key: u64, why: &Failed) {
        let mut known = lock(&self.known);
        let at = known.ears.iter().position(|one| one.key == key);
        let gone = at.map(|at| known.ears.swap_remove(at));
        drop(known);
        if let Some(gone) = gone {
            gone.ear.end(connect::broken_off(why));
        }
    }

    /// A command has ended, with this status.
    pub(super) fn ended(&self, number: u32, status: i32) {
        let mut known = lock(&self.known);
        known.limits.remove(&number);
        let own = known.take(number);
        drop(known);
        own.into_iter().for_each(|ear| ear.end(connect::ended(status)));
    }

    /// Tells nobody any more, and why.
    pub(super) fn dismiss(&self, why: &Failed) {
        #[cfg(feature = "linux")]
        self.lines.clear();
        let all = std::mem::take(&mut lock(&self.known).ears);
        all.into_iter().for_each(|one| one.ear.end(connect::broken_off(why)));
    }

    /// The commands whose time is over. Who hears them is told; that they end is left to the caller.
    pub(super) fn overdue(&self) -> Vec<u32> {
        let now = Instant::now();
        let mut known = lock(&self.known);
        let over: Vec<_> =
            known.limits.extract_if(.., |_, at| *at <= now).map(|(number, _)| number).collect();
        let ears: Vec<_> = over.iter().flat_map(|number| known.take(*number)).collect();
        drop(known);
        let why = Failed::new("deadline_exceeded", "the command ran longer than it may");
        ears.into_iter().for_each(|ear| ear.end(connect::broken_off(&why)));
        over
    }

    /// When something happens in the sandbox by itself. True where somebody has to see to it from now on, who asks for [`Commands::next`].
    pub(super) fn set_due(&self, due: Option<Instant>) -> bool {
        let mut known = lock(&self.known);
        known.due = due;
        self.changed.notify_one();
        let begins = !known.driven && known.next().is_some();
        known.driven |= begins;
        begins
    }

    /// When the sandbox is to be looked after next; none where whoever sees to it is not needed any more.
    pub(super) fn next(&self) -> Option<Instant> {
        let mut known = lock(&self.known);
        let next = known.next();
        known.driven = next.is_some();
        next
    }

    /// Nothing happens by itself any more, until the next call.
    pub(super) fn rest(&self) {
        let mut known = lock(&self.known);
        known.due = None;
        known.limits.clear();
        self.changed.notify_one();
    }

    /// Nothing happens any more, and nobody is told, and why.
    pub(super) fn end(&self, why: &Failed) {
        self.rest();
        self.dismiss(why);
    }

    /// Returns once [`Commands::next`] may be another.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// The sandbox goes on for a slice, until what this gives is dropped.
    pub(super) fn slice(&self) -> Slice<'_> {
        self.slicing.store(true, Ordering::Relaxed);
        Slice(&self.slicing)
    }

    /// Whether it goes on for a slice just now.
    pub(super) fn is_slicing(&self) -> bool {
        self.slicing.load(Ordering::Relaxed)
    }

    /// Whether something has gone through connections since this was last asked, so that the sandbox may go on.
    pub(super) fn moved(&self) -> bool {
        #[cfg(feature = "linux")]
        return self.lines.moved();
        #[cfg(not(feature = "linux"))]
        false
    }

    /// Whether somebody sees to what happens by itself.
    pub(super) fn is_driven(&self) -> bool {
        lock(&self.known).driven
    }

    /// Whether somebody hears a command, or is connected to one.
    pub(super) fn in_use(&self) -> bool {
        #[cfg(feature = "linux")]
        if !self.lines.is_empty() {
            return true;
        }
        lock(&self.known).ears.iter().any(|one| !one.ear.giver.is_left())
    }
}

/// Where what a command prints is sent to its client.
pub(super) struct Ear {
    giver: Giver,
    last: Arc<OnceLock<Bytes>>,
}

impl Ear {
    /// With what the client receives. Within a runtime. A client who hears nothing for `alive` is told that the command runs on.
    pub(super) fn new(alive: Duration) -> (Self, Heard) {
        let (giver, pieces) = way();
        let last = Arc::new(OnceLock::new());
        let alive = interval_at(Instant::now() + alive, alive);
        let heard = Heard { first: None, pieces, last: last.clone(), over: false, alive };
        (Self { giver, last }, heard)
    }

    fn end(self, last: Vec<u8>) {
        // The first to end it says why.
        let _ = self.last.set(last.into());
    }
}

/// What is told of a command, as a body.
pub(super) struct Heard {
    first: Option<Bytes>,
    pieces: Taker,
    last: Arc<OnceLock<Bytes>>,
    over: bool,
    alive: Interval,
}

impl Heard {
    /// Returns once there is something to tell; false where nothing ever will be.
    pub(super) async fn begun(&mut self) -> bool {
        if self.first.is_none() {
            self.first = self.pieces.take().await;
        }
        self.first.is_some()
    }
}

impl Body for Heard {
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
                let why = Failed::new("aborted", "the sandbox is gone");
                let last = self.last.get().cloned();
                last.unwrap_or_else(|| connect::broken_off(&why).into())
            }
            Poll::Pending => {
                ready!(self.alive.poll_tick(context));
                connect::alive().into()
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

    async fn whole(heard: Heard) -> String {
        let body = heard.collect().await.unwrap().to_bytes();
        String::from_utf8_lossy(&body).into_owned()
    }

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn each_is_told_of_its_own_command_and_one_end() {
        run(async {
            let commands = Commands::default();
            let (ear, mut heard) = Ear::new(LONG);
            let (other, unheard) = Ear::new(LONG);
            commands.listen(7, ear, None);
            commands.listen(8, other, None);
            assert!(commands.in_use() && heard.begun().await);
            let ears = commands.ears(7);
            assert_eq!(ears.len(), 1);
            ears[0].1.give("printed".into()).await;
            drop(ears);
            commands.ended(7, 3);
            commands.ended(7, 4);
            let told = whole(heard).await;
            assert!(told.contains(r#""pid":7"#) && told.contains("printed"), "{told}");
            assert!(told.contains(r#""exitCode":3"#) && !told.contains(r#""exitCode":4"#));
            // Whoever is gone is not missed.
            assert!(commands.in_use());
            drop(unheard);
            assert!(!commands.in_use());
            let (ear, heard) = Ear::new(LONG);
            commands.listen(9, ear, None);
            commands.dismiss(&Failed::new("unavailable", "paused"));
            assert!(whole(heard).await.contains("paused"));
            let (ear, mut heard) = Ear::new(LONG);
            drop(ear);
            assert!(!heard.begun().await && whole(heard).await.contains("gone"));
        });
    }

    #[test]
    fn who_hears_nothing_is_told_that_it_goes_on() {
        run(async {
            let commands = Commands::default();
            let (ear, mut heard) = Ear::new(Duration::from_millis(5));
            commands.listen(7, ear, None);
            assert!(heard.begun().await);
            for _ in 0..3 {
                heard.frame().await.unwrap().unwrap();
            }
            let frame = heard.frame().await.unwrap().unwrap().into_data().unwrap();
            assert!(String::from_utf8_lossy(&frame).contains("keepalive"));
        });
    }

    #[test]
    fn one_at_a_time_sees_to_what_happens_next() {
        run(async {
            let commands = Commands::default();
            assert!(!commands.set_due(None) && !commands.is_driven());
            let soon = Instant::now() + LONG;
            assert!(commands.set_due(Some(soon)) && !commands.set_due(Some(soon)));
            assert_eq!((commands.next(), commands.is_driven()), (Some(soon), true));
            assert!(!commands.set_due(None));
            assert_eq!((commands.next(), commands.is_driven()), (None, false));
            // Who is not needed any more finds out, and until then there is no second.
            assert!(commands.set_due(Some(soon)));
            commands.end(&Failed::new("aborted", "killed"));
            commands.changed().await;
            assert!(!commands.set_due(Some(soon)) && commands.next() == Some(soon));
            commands.rest();
            assert_eq!(commands.next(), None);
            // A command that may run only so long.
            let (ear, heard) = Ear::new(LONG);
            commands.listen(7, ear, Some(Duration::ZERO));
            assert!(commands.set_due(None) && commands.next().is_some());
            assert_eq!(commands.overdue(), [7]);
            assert!(commands.overdue().is_empty() && commands.next().is_none());
            assert!(whole(heard).await.contains("deadline_exceeded"));
        });
    }
}
