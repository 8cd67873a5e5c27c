//! The one place where a request is tried again.
//!
//! Every request of every kind of remote goes through [`Patience::attempt`], so all of them share one
//! limit of time and one number of attempts, and a dead server is an error and not a hang.

use std::time::Duration;

use super::RemoteError;

/// How often and how long a request is tried.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Attempts in all.
    pub attempts: u32,
    /// Time allowed for one attempt.
    pub timeout: Duration,
    /// Pause after the first failure; doubled after each.
    pub pause: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { attempts: 4, timeout: Duration::from_secs(15), pause: Duration::from_millis(50) }
    }
}

impl Patience {
    /// Tries `request` as often as the patience allows. Errors that no repetition cures end it at once.
    pub(super) async fn attempt<T, F>(
        &self,
        what: &str,
        request: impl Fn() -> F,
    ) -> Result<T, RemoteError>
    where
        F: Future<Output = Result<T, RemoteError>>,
    {
        let mut pause = self.pause;
        let mut attempt = 1;
        loop {
            let error = match tokio::time::timeout(self.timeout, request()).await {
                Ok(Ok(value)) => return Ok(value),
                Ok(Err(error)) => error,
                Err(_) => RemoteError::Timeout { what: what.to_owned(), after: self.timeout },
            };
            if attempt >= self.attempts || !error.may_pass() {
                return Err(error);
            }
            attempt += 1;
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    /// Time to establish a connection.
    pub(super) fn connect(&self) -> Duration {
        self.timeout.min(Duration::from_secs(5))
    }
}
