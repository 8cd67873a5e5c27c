//! Bodies that go to another host piece by piece.
//!
//! Promises: a piece has the bytes that are there, and a reader whose caller gives up loses none.
//! Bytes that wait count in the budget of their request.

use std::convert::Infallible;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use futures_util::FutureExt;
use http_body_util::BodyExt;

use crate::body::{BodyError, count_until_dropped};
use crate::budget::{Budget, Share};

/// A body that is given in pieces.
pub(super) struct BodyReader {
    body: Body,
    over: BytesMut,
    /// Counts the bytes that were read, until their piece is dropped.
    share: Option<Share>,
}

/// Copies of a piece that is sent: itself, and its message.
const PIECE_COPIES: usize = 2;

impl BodyReader {
    pub(super) fn new(body: Body) -> Self {
        Self { body, over: BytesMut::new(), share: None }
    }

    /// The same with bytes that count in a budget while they wait for the other host.
    pub(super) fn counted(body: Body, budget: Option<&Budget>) -> Self {
        Self { share: budget.map(Budget::share), ..Self::new(body) }
    }

    /// Bytes that were read and not returned yet, and the unread body.
    pub(super) fn into_rest(self) -> (Bytes, Body) {
        (self.over.freeze(), self.body)
    }

    /// The next piece: as much as there is now, at most `most`, and at least something unless it
    /// was the last. A dropped call loses nothing.
    pub(super) async fn next(&mut self, most: usize) -> Result<(Bytes, bool), axum::Error> {
        loop {
            if self.over.len() >= most {
                return Ok((self.take(most), false));
            }
            let frame = match self.body.frame().now_or_never() {
                Some(frame) => frame,
                None if !self.over.is_empty() => return Ok((self.take(most), false)),
                None => self.body.frame().await,
            };
            match frame {
                None => return Ok((self.take(most), true)),
                Some(frame) => {
                    if let Ok(data) = frame?.into_data() {
                        self.add(&data)?;
                    }
                }
            }
        }
    }

    fn add(&mut self, data: &[u8]) -> Result<(), axum::Error> {
        let bytes = data.len().saturating_mul(PIECE_COPIES);
        if self.share.as_mut().is_some_and(|share| !share.add(bytes)) {
            return Err(axum::Error::new(BodyError::<Infallible>::BudgetExhausted));
        }
        self.over.extend_from_slice(data);
        Ok(())
    }

    /// A piece of at most `most` bytes.
    fn take(&mut self, most: usize) -> Bytes {
        let piece = self.over.split_to(self.over.len().min(most)).freeze();
        match &mut self.share {
            Some(share) => {
                let own = share.split(piece.len().saturating_mul(PIECE_COPIES));
                count_until_dropped(piece, own)
            }
            None => piece,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_body_counts_while_it_waits_for_another_host() {
        let budget = Budget::new(40);
        let pieces = [[1; 6], [2; 6], [3; 6]].map(|piece| Ok::<_, Infallible>(Vec::from(piece)));
        let body = Body::from_stream(futures_util::stream::iter(pieces));
        let mut reader = BodyReader::counted(body, Some(&budget));
        let (first, _) = reader.next(8).await.unwrap();
        assert_eq!((first.len(), budget.used()), (8, 24), "the piece, and the rest of two");
        drop(first);
        assert_eq!(budget.used(), 8);
        let (second, is_last) = reader.next(100).await.unwrap();
        assert_eq!((second.len(), is_last, budget.used()), (10, true, 20));
        let large = Body::from(vec![0; 11]);
        let refused = BodyReader::counted(large, Some(&budget)).next(100).await.unwrap_err();
        assert_eq!(crate::fleet::rpc_client::broken(&refused).status.as_u16(), 503);
        drop((second, reader));
        assert_eq!(budget.used(), 0);
    }
}
