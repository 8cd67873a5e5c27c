//! The one place where a request is tried again.
//!
//! Every request of every kind of remote goes through [`Retrier::attempt`], or, where a guest waits
//! for the answer, through [`Retrier::persist`], so all of them share one limit of time, one way to
//! wait and one [`RetryBudget`]: a dead server is an error and not a hang, and one that comes back
//! is no error at all.
//!
//! Time is counted from the last progress, so that a slow line is not taken for a dead server. An
//! answer that comes slower than [`SLOWEST_ANSWER`] is one, however often it shows progress. A
//! request body shows no progress, and gets time by its length. A pause follows each attempt and
//! doubles, half of it by chance, lest all who wait come back at once; a server that says when to
//! come back is obeyed.

use std::cell::Cell;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use reqwest::StatusCode;
use reqwest::header::{HeaderMap, RETRY_AFTER};
use tokio::time::{Instant, sleep, timeout_at};

use super::RemoteError;
use super::retry_budget::{RETRY_COST, RetryBudget, TIMEOUT_COST};

/// Longest pause that doubling leads to.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Bytes a second that even a slow line carries; what is slower is taken for dead.
const SLOWEST: u64 = 16 << 10;
/// Bytes a second of one answer on such a line, which 16 requests share.
const SLOWEST_ANSWER: u64 = SLOWEST / 16;

/// Attempts and time limits of a request.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy {
    /// Number of attempts.
    pub attempts: u32,
    /// Time allowed for one attempt, counted from its last progress.
    pub timeout: Duration,
    /// Pause after the first failure; doubled after each, up to two seconds.
    pub pause: Duration,
    /// Time for which pages of an open snapshot are requested while the server is unreachable,
    /// regardless of the number of attempts, so that guests continue once it is back. At most the
    /// pager's own limit.
    pub outage: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts: 4,
            timeout: Duration::from_secs(15),
            pause: Duration::from_millis(50),
            outage: Duration::from_secs(30),
        }
    }
}

/// The state of the attempt that is under way.
struct Attempt {
    start: Instant,
    progress: Cell<Instant>,
    /// Requests of it that were answered.
    answers: Cell<u32>,
    /// Bytes of the answers.
    received: Cell<u64>,
    /// The last status that a server answered with, and when it wants to be asked again.
    heard: Cell<Option<(u16, Option<Duration>)>>,
}

tokio::task_local! {
    /// The attempt that this request is part of.
    static ATTEMPT: Attempt;
}

impl Attempt {
    fn begin() -> Self {
        let start = Instant::now();
        Self {
            start,
            progress: Cell::new(start),
            answers: Cell::new(0),
            received: Cell::new(0),
            heard: Cell::new(None),
        }
    }

    /// When it ends unless more arrives, if a request may take `allowed`.
    fn deadline(&self, allowed: Duration) -> Instant {
        let received = Duration::from_millis(self.received.get() * 1000 / SLOWEST_ANSWER);
        let slowest = allowed * (self.answers.get() + 1) + received;
        (self.progress.get() + allowed).min(self.start + slowest)
    }
}

/// Notes that the head of an answer has arrived.
pub(super) fn answered() {
    // Outside an attempt there is no limit.
    let _ = ATTEMPT.try_with(|attempt| {
        attempt.progress.set(Instant::now());
        attempt.answers.set(attempt.answers.get() + 1);
    });
}

/// Notes that bytes of an answer have arrived.
pub(super) fn received(bytes: usize) {
    let _ = ATTEMPT.try_with(|attempt| {
        attempt.progress.set(Instant::now());
        attempt.received.set(attempt.received.get().saturating_add(bytes as u64));
    });
}

/// Notes what a server answered with, and the text of its `Retry-After`.
pub(super) fn heard(status: u16, retry_after: Option<&str>) {
    // A date in place of seconds is rare, and stands for "later".
    let after = retry_after.and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
    let _ = ATTEMPT.try_with(|attempt| attempt.heard.set(Some((status, after))));
}

/// As [`heard`], of an answer.
pub(super) fn heard_from(status: StatusCode, headers: &HeaderMap) {
    let after = headers.get(RETRY_AFTER).and_then(|text| text.to_str().ok());
    heard(status.as_u16(), after);
}

/// A policy, and the budget that all requests of a remote share. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Retrier {
    pub(super) policy: RetryPolicy,
    pub(super) budget: Arc<RetryBudget>,
}

impl From<RetryPolicy> for Retrier {
    fn from(policy: RetryPolicy) -> Self {
        Self { policy, budget: Arc::default() }
    }
}

impl Retrier {
    /// Tries `request` as often as the policy allows. Errors that no repetition cures end it at
    /// once.
    pub(super) async fn attempt<T, F>(
        &self,
        what: &str,
        request: impl Fn() -> F,
    ) -> Result<T, RemoteError>
    where
        F: Future<Output = Result<T, RemoteError>>,
    {
        self.repeat(what, 0, Duration::ZERO, request).await
    }

    /// As [`Retrier::attempt`], for a request that sends `bytes` bytes.
    pub(super) async fn attempt_sending<T, F>(
        &self,
        what: &str,
        bytes: u64,
        request: impl Fn() -> F,
    ) -> Result<T, RemoteError>
    where
        F: Future<Output = Result<T, RemoteError>>,
    {
        self.repeat(what, bytes, Duration::ZERO, request).await
    }

    /// As [`Retrier::attempt`], and through an outage of the server: for the pages of snapshots
    /// that are open.
    pub(super) async fn persist<T, F>(
        &self,
        what: &str,
        request: impl Fn() -> F,
    ) -> Result<T, RemoteError>
    where
        F: Future<Output = Result<T, RemoteError>>,
    {
        self.repeat(what, 0, self.policy.outage, request).await
    }

    async fn repeat<T, F>(
        &self,
        what: &str,
        sending: u64,
        outage: Duration,
        request: impl Fn() -> F,
    ) -> Result<T, RemoteError>
    where
        F: Future<Output = Result<T, RemoteError>>,
    {
        let start = Instant::now();
        let policy = &self.policy;
        let mut pause = policy.pause;
        let mut attempt = 1;
        let mut cost = 0;
        loop {
            let attempted = Attempt::begin();
            let allowed = policy.sending(sending);
            let work = async {
                let answer = within(allowed, request()).await;
                let heard = ATTEMPT.with(|attempt| attempt.heard.get());
                (answer, heard)
            };
            let (answer, heard) = ATTEMPT.scope(attempted, work).await;
            let error = match answer {
                Some(Ok(value)) => {
                    self.budget.note_success(cost);
                    return Ok(value);
                }
                Some(Err(error)) => error,
                None => RemoteError::Timeout { what: what.to_owned(), after: allowed },
            };
            let (status, after) = heard.unzip();
            if status.is_some_and(|status| !is_passing(status)) {
                // The server works, and has no such object or refuses this request.
                self.budget.note_success(cost);
                return Err(error);
            }
            if !error.may_pass() {
                return Err(error);
            }
            let is_timeout = matches!(error, RemoteError::Timeout { .. });
            cost = if is_timeout { TIMEOUT_COST } else { RETRY_COST };
            let refused = attempt < policy.attempts && !self.budget.take(cost);
            if refused {
                // A guest that waits for its pages is served in an outage, at the slowest pace.
                (cost, pause) = (0, LONGEST_PAUSE.max(policy.pause));
            }
            // The wait has a limit, whatever the server asks for, and is never shorter than the
            // pause: `Retry-After: 0` would cause a loop without one.
            let left = outage.saturating_sub(start.elapsed());
            let after = after.flatten().unwrap_or_default().min(policy.timeout.max(left));
            let mut wait = after.max(jittered(pause));
            if !left.is_zero() {
                // The last attempt is at the end of the outage.
                wait = wait.min(left);
            } else if refused {
                return Err(RemoteError::RetryRefused { source: Box::new(error) });
            }
            let persists = error.is_outage() && !left.is_zero();
            if attempt >= policy.attempts && !persists {
                return Err(error);
            }
            if attempt >= policy.attempts {
                cost = 0;
            }
            attempt += 1;
            sleep(wait).await;
            pause = (pause * 2).min(LONGEST_PAUSE.max(policy.pause));
        }
    }
}

impl RetryPolicy {
    /// Time for a request that sends `bytes` bytes.
    pub(super) fn sending(&self, bytes: u64) -> Duration {
        self.timeout + Duration::from_secs(bytes / SLOWEST)
    }

    /// Time to establish a connection.
    pub(super) fn connect(&self) -> Duration {
        self.timeout.min(Duration::from_secs(5))
    }
}

/// Whether a server that answers with `status` may answer otherwise later.
fn is_passing(status: u16) -> bool {
    matches!(status, 0..400 | 408 | 425 | 429 | 500..)
}

/// The result of `work`, or `None` when it made too little progress.
async fn within<T>(timeout: Duration, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    loop {
        let deadline = ATTEMPT.with(|attempt| attempt.deadline(timeout));
        if let Ok(value) = timeout_at(deadline, &mut work).await {
            return Some(value);
        }
        if ATTEMPT.with(|attempt| attempt.deadline(timeout)) <= Instant::now() {
            return None;
        }
    }
}

/// Half of `pause`, and up to as much again.
fn jittered(pause: Duration) -> Duration {
    // The standard library seeds each state by chance.
    let chance = RandomState::new().hash_one(0u8) as u32;
    pause / 2 + (pause / 2).mul_f64(f64::from(chance) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tokio::runtime::{Builder, Runtime};

    use super::*;

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    fn short() -> RetryPolicy {
        let ms = Duration::from_millis;
        RetryPolicy { attempts: 3, timeout: ms(200), pause: ms(1), outage: ms(600) }
    }

    fn retrier(policy: RetryPolicy) -> Retrier {
        policy.into()
    }

    fn refused() -> RemoteError {
        let source = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        RemoteError::Connection { what: "a".to_owned(), source: source.into() }
    }

    #[test]
    fn a_request_that_makes_progress_has_all_the_time_it_needs() {
        runtime().block_on(async {
            let slow = || async {
                for _ in 0..8 {
                    sleep(Duration::from_millis(200)).await;
                    received(1 << 10);
                }
                Ok(7)
            };
            let retry = retrier(RetryPolicy { timeout: Duration::from_secs(1), ..short() });
            assert_eq!(retry.attempt("a", slow).await.unwrap(), 7);
            let stuck = || async {
                answered();
                sleep(Duration::from_secs(60)).await;
                Ok(())
            };
            let error = retrier(short()).attempt("a", stuck).await.unwrap_err();
            assert!(matches!(error, RemoteError::Timeout { .. }), "{error}");
        });
    }

    #[test]
    fn an_answer_that_dribbles_ends_in_an_error() {
        runtime().block_on(async {
            let dribble = || async {
                answered();
                for _ in 0..u32::MAX {
                    sleep(Duration::from_millis(20)).await;
                    received(1);
                }
                Ok(())
            };
            let error = retrier(short()).attempt("a", dribble).await.unwrap_err();
            assert!(matches!(error, RemoteError::Timeout { .. }), "{error}");
        });
    }

    #[test]
    fn an_outage_is_sat_out_and_a_refusal_is_not() {
        runtime().block_on(async {
            let refusals = Cell::new(8);
            let away = || async {
                match refusals.get() {
                    0 => Ok(()),
                    left => {
                        refusals.set(left - 1);
                        Err(refused())
                    }
                }
            };
            let retry = retrier(RetryPolicy { outage: Duration::from_secs(60), ..short() });
            retry.attempt("a", away).await.unwrap_err();
            assert_eq!(refusals.get(), 5);
            // More refusals than attempts are allowed.
            retry.persist("a", away).await.unwrap();
            let tries = Cell::new(0);
            let forbidden = || async {
                tries.set(tries.get() + 1);
                heard(403, None);
                Err::<(), _>(refused())
            };
            retrier(short()).persist("a", forbidden).await.unwrap_err();
            assert_eq!(tries.get(), 1);
        });
    }

    #[test]
    fn a_server_that_says_when_to_come_back_is_obeyed() {
        runtime().block_on(async {
            let times = RefCell::new(Vec::new());
            let busy = || async {
                times.borrow_mut().push(Instant::now());
                if times.borrow().len() == 1 {
                    heard(503, Some("1"));
                    return Err(refused());
                }
                Ok(())
            };
            let retry = retrier(RetryPolicy { outage: Duration::from_secs(30), ..short() });
            retry.persist("a", busy).await.unwrap();
            let times = times.into_inner();
            assert!(times[1] - times[0] >= Duration::from_secs(1));
        });
    }

    #[test]
    fn requests_fail_at_their_first_attempt_once_most_of_them_fail() {
        runtime().block_on(async {
            let pause = Duration::from_micros(10);
            let retry = retrier(RetryPolicy { pause, outage: Duration::ZERO, ..short() });
            let tries = Cell::new(0_u64);
            let away = || async {
                tries.set(tries.get() + 1);
                Err::<(), _>(refused())
            };
            let start = Instant::now();
            let mut last = None;
            for _ in 0..400 {
                last = Some(retry.attempt("a", away).await.unwrap_err());
            }
            let refilled = 1 + start.elapsed().as_secs();
            assert!(tries.get() <= 400 + 100 + refilled, "{} attempts", tries.get());
            let text = last.unwrap().to_string();
            assert!(text.contains("it was not tried again"), "{text}");
            let counts = retry.budget.counts();
            assert_eq!(counts.retries, tries.get() - 400);
            assert!(counts.refused >= 400 - 50 - refilled, "{counts:?}");
            // Successes pay for retries again.
            for _ in 0..20 {
                retry.attempt("a", || async { Ok(()) }).await.unwrap();
            }
            let left = Cell::new(1_u32);
            let once = || async {
                match left.replace(0) {
                    0 => Ok(()),
                    _ => Err(refused()),
                }
            };
            retry.attempt("a", once).await.unwrap();
        });
    }

    #[test]
    fn an_open_guest_sits_an_outage_out_although_the_budget_is_spent() {
        runtime().block_on(async {
            let retry = retrier(RetryPolicy { outage: Duration::from_secs(60), ..short() });
            while retry.budget.take(RETRY_COST) {}
            let left = Cell::new(1_u32);
            let once = || async {
                match left.replace(0) {
                    0 => Ok(()),
                    _ => Err(refused()),
                }
            };
            let start = Instant::now();
            retry.persist("a", once).await.unwrap();
            assert!(start.elapsed() >= LONGEST_PAUSE / 2);
        });
    }

    #[test]
    fn an_open_guest_is_not_refused_because_of_a_late_retry_or_a_wrong_length() {
        runtime().block_on(async {
            let retry = retrier(RetryPolicy { outage: Duration::from_secs(3), ..short() });
            let left = Cell::new(1_u32);
            let busy = || async {
                match left.replace(0) {
                    0 => Ok(()),
                    _ => {
                        heard(503, Some("3600"));
                        Err(refused())
                    }
                }
            };
            let cut = || async {
                let (what, found, wanted) = ("a".to_owned(), 1, 2);
                match left.replace(0) {
                    0 => Ok(()),
                    _ => Err(RemoteError::Length { what, found, wanted }),
                }
            };
            while retry.budget.take(RETRY_COST) {}
            retry.persist("a", busy).await.unwrap();
            left.set(1);
            while retry.budget.take(RETRY_COST) {}
            retry.persist("a", cut).await.unwrap();
        });
    }

    #[test]
    fn a_server_that_asks_for_no_pause_gets_one() {
        runtime().block_on(async {
            let pause = Duration::from_millis(100);
            let retry = retrier(RetryPolicy { pause, ..short() });
            let tries = Cell::new(0);
            let busy = || async {
                tries.set(tries.get() + 1);
                heard(503, Some("0"));
                Err::<(), _>(refused())
            };
            retry.persist("a", busy).await.unwrap_err();
            // Pauses of at least 50, 100, 200 and 400 milliseconds in 600, and a last attempt.
            assert!((3..=6).contains(&tries.get()), "{} attempts", tries.get());
        });
    }
}
