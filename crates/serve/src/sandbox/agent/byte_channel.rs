//! A channel for pieces of output from a blocking thread to a client's task.
//!
//! Promises: waiting pieces take at most [`MAX_WAITING_BYTES`] bytes, however small they are; a
//! sender of more waits. They are received in order, many small ones at once. Pieces for a client
//! that left are dropped.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError, mpsc};

/// Bytes that may wait, each piece's [`PIECE_OVERHEAD`] among them.
pub(crate) const MAX_WAITING_BYTES: u32 = 256 << 10;
/// Overhead of a piece.
const PIECE_OVERHEAD: usize = 128;
/// Bytes that are taken at once, unless a single piece is larger.
const CHUNK_SIZE: usize = 32 << 10;

/// A piece, and the room that it takes until it is taken.
type Piece = (Bytes, OwnedSemaphorePermit);

/// Gives pieces.
#[derive(Clone)]
pub(crate) struct Sender {
    pieces: mpsc::UnboundedSender<Piece>,
    room: Arc<Semaphore>,
}

/// Takes them.
pub(crate) struct Receiver {
    pieces: mpsc::UnboundedReceiver<Piece>,
    room: Arc<Semaphore>,
}

/// A piece that was not sent.
pub(crate) enum SendError {
    /// There is no room now.
    Full(Bytes),
    /// The receiver was dropped.
    Gone,
}

/// A way for pieces.
pub(crate) fn byte_channel() -> (Sender, Receiver) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let room = Arc::new(Semaphore::new(MAX_WAITING_BYTES as usize));
    (Sender { pieces: sender, room: room.clone() }, Receiver { pieces: receiver, room })
}

/// The room that a piece takes. One that is larger than all of it takes all of it.
fn weight(piece: &Bytes) -> u32 {
    u32::try_from(piece.len() + PIECE_OVERHEAD)
        .map_or(MAX_WAITING_BYTES, |weight| weight.min(MAX_WAITING_BYTES))
}

impl Sender {
    /// Sends a piece if it fits.
    pub(crate) fn try_give(&self, piece: Bytes) -> Result<(), SendError> {
        match self.room.clone().try_acquire_many_owned(weight(&piece)) {
            Ok(permit) => self.pieces.send((piece, permit)).map_err(|_| SendError::Gone),
            Err(TryAcquireError::NoPermits) => Err(SendError::Full(piece)),
            Err(TryAcquireError::Closed) => Err(SendError::Gone),
        }
    }

    /// Gives a piece once there is room for it.
    pub(crate) async fn give(&self, piece: Bytes) {
        if let Ok(permit) = self.room.clone().acquire_many_owned(weight(&piece)).await {
            // The receiver may have been dropped.
            let _ = self.pieces.send((piece, permit));
        }
    }

    /// Whether the receiver was dropped.
    pub(crate) fn is_left(&self) -> bool {
        self.pieces.is_closed()
    }
}

impl Receiver {
    /// The next pieces, joined; `None` once all senders are dropped.
    pub(crate) async fn take(&mut self) -> Option<Bytes> {
        std::future::poll_fn(|context| self.poll_take(context)).await
    }

    /// As [`Receiver::take`].
    pub(crate) fn poll_take(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let first = ready!(self.pieces.poll_recv(context));
        Poll::Ready(first.map(|(piece, _)| self.gathered(piece)))
    }

    /// The next pieces, as one, if there are any now.
    pub(crate) fn try_take(&mut self) -> Option<Bytes> {
        let (piece, _) = self.pieces.try_recv().ok()?;
        Some(self.gathered(piece))
    }

    /// A piece with those that wait behind it.
    fn gathered(&mut self, first: Bytes) -> Bytes {
        if first.len() >= CHUNK_SIZE || self.pieces.is_empty() {
            return first;
        }
        let mut all = BytesMut::from(first);
        while all.len() < CHUNK_SIZE
            && let Ok((piece, _)) = self.pieces.try_recv()
        {
            all.extend_from_slice(&piece);
        }
        all.freeze()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // Waiting senders need no room any more.
        self.room.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_taken_in_order_many_at_once_and_wait_in_so_much_room() {
        let (sender, mut receiver) = byte_channel();
        let mut given = 0_u32;
        let refused = loop {
            match sender.try_give(given.to_le_bytes().to_vec().into()) {
                Ok(()) => given += 1,
                Err(refused) => break refused,
            }
        };
        assert!(matches!(refused, SendError::Full(piece) if *piece == given.to_le_bytes()));
        assert_eq!(given as usize, MAX_WAITING_BYTES as usize / (PIECE_OVERHEAD + 4));
        let mut came = Vec::new();
        let mut times = 0;
        while let Some(pieces) = receiver.try_take() {
            came.extend_from_slice(&pieces);
            times += 1;
        }
        let all: Vec<u8> = (0..given).flat_map(u32::to_le_bytes).collect();
        assert!(came == all && times == 1);
        // A piece larger than the whole buffer is sent alone, and is not joined with others.
        let large = Bytes::from(vec![1; 2 * MAX_WAITING_BYTES as usize]);
        assert!(sender.try_give(large.clone()).is_ok());
        assert!(matches!(sender.try_give("x".into()), Err(SendError::Full(_))));
        assert_eq!(receiver.try_take(), Some(large));
        assert!(sender.try_give("x".into()).is_ok());
        assert_eq!(receiver.try_take().as_deref(), Some(&b"x"[..]));
    }

    #[test]
    fn a_waiting_writer_gets_room_only_when_a_reader_takes_bytes() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (sender, mut receiver) = byte_channel();
            let whole = Bytes::from(vec![0; MAX_WAITING_BYTES as usize]);
            sender.give(whole.clone()).await;
            let (waiter, next) = (sender.clone(), whole.clone());
            let waiting = tokio::spawn(async move { waiter.give(next).await });
            tokio::task::yield_now().await;
            assert!(!waiting.is_finished());
            assert_eq!(receiver.take().await, Some(whole.clone()));
            waiting.await.unwrap();
            let waiter = sender.clone();
            let waiting = tokio::spawn(async move { waiter.give(whole).await });
            tokio::task::yield_now().await;
            assert!(!waiting.is_finished() && !sender.is_left());
            drop(receiver);
            waiting.await.unwrap();
            assert!(
                sender.is_left() && matches!(sender.try_give("x".into()), Err(SendError::Gone))
            );
        });
    }
}
