//! A guest's task that leaves its place to others while the guest waits.
//!
//! Promises: a guest that does next to nothing for [`WINDOW`], because it waits for its client or
//! for anything else, has no place, as far as others may be parked; it has one again whenever it
//! looks whether it can run on. A guest that runs keeps its place.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

use crate::concurrency::{ParkedPermit, Permit, RejectionReason};

/// Time for which a guest is watched before its place is given to others.
const WINDOW: Duration = Duration::from_millis(50);
/// One that runs for less than this in that time waits.
const BUSY: Duration = Duration::from_millis(5);
/// One that runs for as long at once waits no more. Those that wait look every few milliseconds,
/// for microseconds.
const MAX_BURST: Duration = Duration::from_millis(1);

/// Runs `guest`, which is polled only in a place.
pub(crate) struct YieldingFuture<'a, F> {
    guest: Pin<&'a mut F>,
    place: PermitState,
    /// It was parked, and has only looked since.
    looks: bool,
    /// The window of observation, from the first wait on: its start, the time that the guest ran,
    /// and its end.
    window: Option<Observation>,
    patience: Duration,
}

struct Observation {
    since: Instant,
    busy: Duration,
    end: Pin<Box<Sleep>>,
}

enum PermitState {
    Held(Permit),
    Parked(ParkedPermit),
    Entering(Pin<Box<dyn Future<Output = Result<Permit, RejectionReason>> + Send>>),
    /// It is over.
    None,
}

impl<'a, F> YieldingFuture<'a, F> {
    /// In the place that `pass` gives. It waits at most `patience` for another.
    pub(crate) fn new(guest: Pin<&'a mut F>, pass: Permit, patience: Duration) -> Self {
        Self { guest, place: PermitState::Held(pass), looks: false, window: None, patience }
    }

    /// Whether a guest that ran from `began` to `now` waits.
    fn waits(&mut self, began: Instant, now: Instant) -> bool {
        let took = now - began;
        if self.looks && took < MAX_BURST {
            return true;
        }
        self.looks = false;
        let window = self.window.get_or_insert_with(|| Observation {
            since: began,
            busy: Duration::ZERO,
            end: Box::pin(tokio::time::sleep_until(began + WINDOW)),
        });
        window.busy += took;
        if now - window.since < WINDOW {
            return false;
        }
        self.looks = window.busy < BUSY;
        (window.since, window.busy) = (now, Duration::ZERO);
        window.end.as_mut().reset(now + WINDOW);
        self.looks
    }
}

impl<F: Future> Future for YieldingFuture<'_, F> {
    type Output = Result<F::Output, RejectionReason>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        loop {
            match std::mem::replace(&mut this.place, PermitState::None) {
                PermitState::Held(pass) => {
                    let began = Instant::now();
                    if let Poll::Ready(done) = this.guest.as_mut().poll(context) {
                        return Poll::Ready(Ok(done));
                    }
                    let now = Instant::now();
                    this.place = match this.waits(began, now) {
                        true => pass.park().map_or_else(PermitState::Held, PermitState::Parked),
                        false => PermitState::Held(pass),
                    };
                    if let (PermitState::Held(_), Some(window)) = (&this.place, &mut this.window)
                        && window.end.as_mut().poll(context).is_ready()
                    {
                        // The next look finds the window over.
                        window.end.as_mut().reset(now + WINDOW);
                        context.waker().wake_by_ref();
                    }
                    return Poll::Pending;
                }
                // A guest that was woken has to look.
                PermitState::Parked(parked) => {
                    this.place = PermitState::Entering(Box::pin(parked.enter(this.patience)));
                }
                PermitState::Entering(mut entering) => match entering.as_mut().poll(context) {
                    Poll::Ready(entered) => this.place = PermitState::Held(entered?),
                    Poll::Pending => {
                        this.place = PermitState::Entering(entering);
                        return Poll::Pending;
                    }
                },
                PermitState::None => unreachable!("a future is not polled after its end"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;
    use crate::concurrency::{ConcurrencyLimiter, Share};

    const TEST_TIMEOUT: Duration = Duration::from_secs(600);

    #[tokio::test]
    async fn a_guest_that_waits_leaves_its_place_and_returns() {
        let share = Share { running: 1, waiting: 10, weight: 1 };
        let gate = ConcurrencyLimiter::new(1, [share, share]);
        let (sender, receiver) = tokio::sync::oneshot::channel::<()>();
        let pass = gate.enter(0, TEST_TIMEOUT).await.unwrap();
        let waits = tokio::spawn(async move {
            let mut guest = pin!(async {
                // As hosts do that check limits in between.
                let mut receiver = receiver;
                while tokio::time::timeout(Duration::from_millis(5), &mut receiver).await.is_err() {
                }
                7
            });
            YieldingFuture::new(guest.as_mut(), pass, TEST_TIMEOUT).await
        });
        let held = gate.enter(1, TEST_TIMEOUT).await.unwrap();
        sender.send(()).unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!waits.is_finished(), "it runs only in a place");
        drop(held);
        assert_eq!(waits.await.unwrap(), Ok(7));
        assert_eq!((gate.count(0), gate.count(1)), ((0, 0), (0, 0)));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_guest_that_runs_keeps_its_place() {
        let share = Share { running: 1, waiting: 10, weight: 1 };
        let gate = ConcurrencyLimiter::new(1, [share, share]);
        let pass = gate.enter(0, TEST_TIMEOUT).await.unwrap();
        let own = gate.clone();
        let runs = tokio::spawn(async move {
            let mut guest = pin!(async {
                let began = std::time::Instant::now();
                let mut lost = 0;
                while began.elapsed() < WINDOW * 6 {
                    let slice = std::time::Instant::now();
                    while slice.elapsed() < Duration::from_millis(8) {
                        std::hint::spin_loop();
                    }
                    lost += usize::from(own.count(0).0 == 0);
                    tokio::task::yield_now().await;
                }
                lost
            });
            YieldingFuture::new(guest.as_mut(), pass, TEST_TIMEOUT).await
        });
        assert_eq!(runs.await.unwrap(), Ok(0));
    }
}
