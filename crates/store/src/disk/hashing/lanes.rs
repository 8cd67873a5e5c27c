//! SHA-256 of two blobs that one thread writes by turns, in that thread.
//!
//! On few processors a separate thread for the hash costs more than it gains: switches, and a queue
//! of buffers that have left the cache before they are hashed. Two blobs at the same time use the
//! processor's SHA unit fully.
//!
//! Promises: each blob has its own digest, however far the other one is. At most [`MAX_AHEAD`]
//! buffers of a blob wait for the other.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Hash, HashBuffer};
use crate::Sha256;

/// Buffers of a blob that wait for the other one.
const MAX_AHEAD: usize = 2;

/// One of the two blobs.
struct Lane {
    /// `None` once the digest was taken.
    hash: Option<Hash>,
    queue: VecDeque<HashBuffer>,
    /// Buffers that were hashed.
    recycled: Vec<Arc<Vec<u8>>>,
}

impl Lane {
    /// Hashes the next `len` bytes of the first buffer in the queue.
    fn advance(&mut self, len: usize) {
        if let (Some(hash), Some(first)) = (&mut self.hash, self.queue.front_mut()) {
            hash.update(&first.rest()[..len]);
            first.done += len;
        }
        self.recycle();
    }

    /// Takes the first buffer out of the queue if it was hashed.
    fn recycle(&mut self) {
        if self.queue.front().is_some_and(|first| first.rest().is_empty()) {
            self.recycled.extend(self.queue.pop_front().map(|first| first.bytes));
        }
    }

    /// Hashes the first buffer of the queue without the other blob.
    fn advance_alone(&mut self) {
        let len = self.queue.front().map_or(0, |first| first.rest().len());
        self.advance(len);
    }
}

/// The hash of one of two blobs.
pub(super) struct LaneHasher {
    lanes: Arc<Mutex<[Lane; 2]>>,
    number: usize,
}

impl LaneHasher {
    /// The hashes of two blobs.
    pub(super) fn pair() -> [Self; 2] {
        let lane =
            || Lane { hash: Some(Hash::new()), queue: VecDeque::new(), recycled: Vec::new() };
        let lanes = Arc::new(Mutex::new([lane(), lane()]));
        [0, 1].map(|number| Self { lanes: lanes.clone(), number })
    }

    fn lock(&self) -> MutexGuard<'_, [Lane; 2]> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer that was hashed, with any content.
    pub(super) fn recycled(&self) -> Arc<Vec<u8>> {
        self.lock()[self.number].recycled.pop().unwrap_or_default()
    }

    /// Appends bytes, and hashes those that both blobs have.
    pub(super) fn push(&self, bytes: Arc<Vec<u8>>) {
        let mut lanes = self.lock();
        lanes[self.number].queue.push_back(HashBuffer { bytes, done: 0 });
        loop {
            let [one, two] = &mut *lanes;
            let (Some(first), Some(second)) = (one.queue.front_mut(), two.queue.front_mut()) else {
                break;
            };
            let common = first.rest().len().min(second.rest().len());
            if let (Some(hash), Some(other)) = (&mut one.hash, &mut two.hash) {
                hash.update_both(&first.rest()[..common], other, &second.rest()[..common]);
            }
            first.done += common;
            second.done += common;
            one.recycle();
            two.recycle();
        }
        while lanes[self.number].queue.len() > MAX_AHEAD {
            lanes[self.number].advance_alone();
        }
    }

    /// The digest of all bytes; `None` if it was taken before.
    pub(super) fn finish(&self) -> Option<Sha256> {
        let mut lanes = self.lock();
        let lane = &mut lanes[self.number];
        while !lane.queue.is_empty() {
            lane.advance_alone();
        }
        lane.hash.take().map(Hash::finish)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_blobs_of_one_thread_have_their_own_digests() {
        let text = |len: usize, seed: usize| -> Vec<u8> {
            (0..len).map(|at| (at * seed / 7) as u8).collect()
        };
        for sizes in [[0, 0], [0, 100_000], [1, 300_000], [200_000, 200_000], [1_000_000, 77_777]] {
            for sizes_of_parts in [[10_000, 10_000], [64, 70_001], [50_000, 1]] {
                let pair = LaneHasher::pair();
                let texts = [text(sizes[0], 3), text(sizes[1], 5)];
                let mut parts =
                    [0, 1].map(|number| texts[number].chunks(sizes_of_parts[number].max(500)));
                loop {
                    let next = [0, 1].map(|number| parts[number].next());
                    if next == [None, None] {
                        break;
                    }
                    for (hasher, part) in pair.iter().zip(next) {
                        let Some(part) = part else { continue };
                        let mut buffer = Arc::try_unwrap(hasher.recycled()).unwrap();
                        buffer.clear();
                        buffer.extend_from_slice(part);
                        hasher.push(Arc::new(buffer));
                    }
                }
                for (hasher, text) in pair.iter().zip(&texts) {
                    assert_eq!(hasher.finish(), Some(Sha256::of(text)), "{sizes:?}");
                    assert_eq!(hasher.finish(), None);
                }
            }
        }
    }

    #[test]
    fn a_blob_is_hashed_without_the_other_one() {
        let [one, two] = LaneHasher::pair();
        two.push(Arc::new(vec![1; 1000]));
        drop(two);
        for _ in 0..10 {
            one.push(Arc::new(vec![7; 1000]));
        }
        assert!(one.lock()[0].queue.len() <= MAX_AHEAD);
        assert_eq!(one.finish(), Some(Sha256::of(&[7; 10_000])));
    }
}
