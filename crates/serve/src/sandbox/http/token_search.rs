//! The search for the sandbox whose token signed a URL that names no sandbox.
//!
//! Promises: clients without a key cannot load the server by such URLs. Searches take turns, and
//! hash at most [`TOKENS_PER_SECOND`] tokens in a second together, however many clients and
//! sandboxes there are.

use std::time::Duration;

use hyper::StatusCode;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::Instant;

use crate::error_response::ErrorResponse;

/// Tokens that all searches hash in a second: about a twentieth of a core.
const TOKENS_PER_SECOND: u32 = 200_000;
/// Maximum searches that run or wait.
const MAX_SEARCHES: usize = 64;
/// Tokens between which other tasks of the thread run.
const PIECE: usize = 1000;

/// The turns of searches.
pub(crate) struct TokenSearch {
    /// When the next one may begin.
    turn: Mutex<Instant>,
    places: Semaphore,
}

impl Default for TokenSearch {
    fn default() -> Self {
        Self { turn: Mutex::new(Instant::now()), places: Semaphore::new(MAX_SEARCHES) }
    }
}

impl TokenSearch {
    /// The first of `all()` that signed, in its turn.
    pub(crate) async fn find<T: Clone>(
        &self,
        all: impl FnOnce() -> Vec<T>,
        signed: impl Fn(&T) -> bool,
    ) -> Result<Option<T>, ErrorResponse> {
        let _place = self.places.try_acquire().map_err(|_| {
            let why = "too many signed URLs that name no sandbox are looked up; put the id of the sandbox into the host \
                       name or the header `e2b-sandbox-id`, or try again";
            ErrorResponse::busy(StatusCode::TOO_MANY_REQUESTS, why)
        })?;
        let mut turn = self.turn.lock().await;
        tokio::time::sleep_until(*turn).await;
        let all = all();
        let count = u32::try_from(all.len()).unwrap_or(u32::MAX);
        *turn = Instant::now() + Duration::from_secs(1) * count / TOKENS_PER_SECOND;
        for piece in all.chunks(PIECE) {
            if let Some(found) = piece.iter().find(|one| signed(one)) {
                return Ok(Some(found.clone()));
            }
            tokio::task::yield_now().await;
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn searches_of_all_clients_together_hash_a_bounded_number_of_tokens_in_a_second() {
        let search = Arc::new(TokenSearch::default());
        let count = 3 * PIECE;
        let find = async |wanted: usize| {
            search.find(|| (0..count).collect(), |token| *token == wanted).await
        };
        let before = Instant::now();
        assert_eq!(find(count - 1).await, Ok(Some(count - 1)));
        assert_eq!(find(count).await, Ok(None));
        let cost = Duration::from_secs(2) * u32::try_from(count).unwrap() / TOKENS_PER_SECOND;
        assert!(*search.turn.lock().await >= before + cost);
        // A search waits for its turn, and as many as may wait.
        *search.turn.lock().await = Instant::now() + Duration::from_secs(3600);
        let waiting: Vec<_> = (0..MAX_SEARCHES)
            .map(|_| {
                let search = search.clone();
                tokio::spawn(async move {
                    search.find(|| -> Vec<u8> { panic!("not its turn") }, |_| false).await
                })
            })
            .collect();
        while search.places.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let refused = find(0).await.unwrap_err();
        assert_eq!((refused.status, refused.later), (StatusCode::TOO_MANY_REQUESTS, true));
        assert!(refused.message.contains("e2b-sandbox-id"), "{}", refused.message);
        // Clients that leave make room.
        waiting.iter().for_each(tokio::task::JoinHandle::abort);
        for left in waiting {
            assert!(left.await.unwrap_err().is_cancelled());
        }
        *search.turn.lock().await = Instant::now();
        assert_eq!(find(0).await, Ok(Some(0)));
    }
}
