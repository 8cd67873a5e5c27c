//! SHA-256 of blobs while they are written, in a separate thread. Two blobs that are written at the
//! same time share a thread: a core hashes two almost as fast as one. Where no processor is free
//! for that thread, the writer hashes (`lanes`).
//!
//! Promises: a writer waits only while [`QUEUE`] of its buffers are not yet hashed. A blob whose
//! writer is dropped delays the other one of its pair by no more than those.

mod blob;
mod lanes;
mod sha_ni;

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use afresh_sys::Worker;
use sha2::Digest;

use crate::Sha256;
pub(crate) use blob::BlobHash;
use sha_ni::Sha;

/// Buffers of a blob in flight between writing and hashing.
const QUEUE: usize = 8;
/// Bytes of a blob alone that are hashed before another look at its pair.
const ALONE: usize = 64 << 10;

/// The hash of a blob.
#[derive(Clone)]
enum Hash {
    Instructions(Sha),
    Portable(sha2::Sha256),
}

impl Hash {
    fn new() -> Self {
        Sha::new().map_or_else(|| Self::Portable(sha2::Sha256::new()), Self::Instructions)
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Instructions(sha) => sha.update(bytes),
            Self::Portable(sha) => sha.update(bytes),
        }
    }

    fn update_both(&mut self, one: &[u8], other: &mut Self, two: &[u8]) {
        match (self, other) {
            (Self::Instructions(this), Self::Instructions(other)) => {
                this.update_both(one, other, two);
            }
            (this, other) => {
                this.update(one);
                other.update(two);
            }
        }
    }

    fn finish(self) -> Sha256 {
        Sha256(match self {
            Self::Instructions(sha) => sha.finish(),
            Self::Portable(sha) => sha.finalize().into(),
        })
    }
}

/// A blob, as its writer and the thread see it.
#[derive(Default)]
struct Blob {
    queue: VecDeque<Arc<Vec<u8>>>,
    /// Buffers that were hashed.
    recycled: Vec<Arc<Vec<u8>>>,
    closed: bool,
    digest: Option<Sha256>,
}

#[derive(Default)]
struct Blobs {
    both: [Blob; 2],
    /// Whether the thread has ended.
    ended: bool,
}

#[derive(Default)]
struct HashQueue {
    blobs: Mutex<Blobs>,
    /// Rung when there is something to hash.
    work: Condvar,
    /// Rung when something was hashed, or the thread has ended.
    room: Condvar,
}

impl HashQueue {
    fn lock(&self) -> MutexGuard<'_, Blobs> {
        self.blobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The hashing of one blob. Dropping it gives the rest up.
struct BlobHasher {
    shared: Arc<HashQueue>,
    /// Which of the blobs it is.
    number: usize,
    thread: Arc<HashThread>,
}

/// The thread of one blob or two, which is waited for at the end of both, but not in a child of a
/// fork, which does not have it.
struct HashThread(Option<Worker>);

impl Drop for HashThread {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // A panic has left the blobs without digests.
            thread.join();
        }
    }
}

impl BlobHasher {
    /// Hashes one blob, whose beginning is in `hash`.
    fn one(hash: Hash) -> io::Result<Self> {
        let [one, two] = Self::start([hash, Hash::new()])?;
        drop(two);
        Ok(one)
    }

    /// Hashes two blobs that are written at the same time.
    fn pair() -> io::Result<[Self; 2]> {
        Self::start([Hash::new(), Hash::new()])
    }

    fn start(hashes: [Hash; 2]) -> io::Result<[Self; 2]> {
        let shared = Arc::<HashQueue>::default();
        let of_thread = shared.clone();
        let thread = Worker::start("afresh-blob", move || hash(&of_thread, hashes))?;
        let thread = Arc::new(HashThread(Some(thread)));
        Ok([0, 1].map(|number| Self { shared: shared.clone(), number, thread: thread.clone() }))
    }

    /// A buffer that was hashed, with any content.
    fn recycled(&self) -> Arc<Vec<u8>> {
        self.shared.lock().both[self.number].recycled.pop().unwrap_or_default()
    }

    /// Appends bytes. Returns whether the thread takes them.
    fn push(&self, bytes: Arc<Vec<u8>>) -> bool {
        let mut blobs = self.shared.lock();
        while blobs.both[self.number].queue.len() >= QUEUE && !blobs.ended {
            blobs = self.shared.room.wait(blobs).unwrap_or_else(PoisonError::into_inner);
        }
        blobs.both[self.number].queue.push_back(bytes);
        self.shared.work.notify_one();
        !blobs.ended
    }

    /// No more bytes come, so that the hash can be completed while others are waited for.
    fn close(&self) {
        self.shared.lock().both[self.number].closed = true;
        self.shared.work.notify_one();
    }

    /// The digest of a closed blob, once it is there; `None` if the thread has ended before.
    fn finish(&self) -> Option<Sha256> {
        self.close();
        let mut blobs = self.shared.lock();
        loop {
            if let Some(digest) = blobs.both[self.number].digest {
                return Some(digest);
            }
            if blobs.ended {
                return None;
            }
            blobs = self.shared.room.wait(blobs).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for BlobHasher {
    fn drop(&mut self) {
        if self.thread.0.as_ref().is_none_or(|thread| !thread.is_here()) {
            return;
        }
        let mut blobs = self.shared.lock();
        let blob = &mut blobs.both[self.number];
        blob.closed = true;
        blob.queue.clear();
        blob.recycled.clear();
        self.shared.work.notify_one();
    }
}

/// A buffer that is being hashed.
#[derive(Default)]
struct HashBuffer {
    bytes: Arc<Vec<u8>>,
    done: usize,
}

impl HashBuffer {
    fn rest(&self) -> &[u8] {
        &self.bytes[self.done..]
    }
}

/// Hashes the blobs until both are closed.
fn hash(shared: &HashQueue, hashes: [Hash; 2]) {
    /// Wakes writers that wait for the thread, also after a panic.
    struct ThreadEnd<'a>(&'a HashQueue);
    impl Drop for ThreadEnd<'_> {
        fn drop(&mut self) {
            self.0.lock().ended = true;
            self.0.room.notify_all();
        }
    }
    let _rung = ThreadEnd(shared);
    let mut hashes = hashes.map(Some);
    let mut current = [HashBuffer::default(), HashBuffer::default()];
    while next(shared, &mut hashes, &mut current) {
        let [one, two] = &mut current;
        let common = one.rest().len().min(two.rest().len());
        match &mut hashes {
            [Some(first), Some(second)] if common > 0 => {
                first.update_both(&one.rest()[..common], second, &two.rest()[..common]);
                one.done += common;
                two.done += common;
            }
            hashes => {
                for (hash, current) in hashes.iter_mut().zip([one, two]) {
                    let some = current.rest().len().min(ALONE);
                    if let Some(hash) = hash {
                        hash.update(&current.rest()[..some]);
                    }
                    current.done += some;
                }
            }
        }
    }
}

/// Takes the next buffers. Returns `false` once both blobs have their digests.
fn next(shared: &HashQueue, hashes: &mut [Option<Hash>; 2], current: &mut [HashBuffer; 2]) -> bool {
    let mut blobs = shared.lock();
    loop {
        let mut changed = false;
        for ((blob, hash), current) in blobs.both.iter_mut().zip(&mut *hashes).zip(&mut *current) {
            if !current.rest().is_empty() {
                continue;
            }
            let done = std::mem::take(current).bytes;
            if done.capacity() > 0 && !blob.closed {
                blob.recycled.push(done);
            }
            if let Some(bytes) = blob.queue.pop_front() {
                *current = HashBuffer { bytes, done: 0 };
                changed = true;
            } else if blob.closed
                && let Some(hash) = hash.take()
            {
                blob.digest = Some(hash.finish());
                changed = true;
            }
        }
        if changed {
            shared.room.notify_all();
        }
        if current.iter().any(|current| !current.rest().is_empty()) {
            return true;
        }
        if hashes.iter().all(Option::is_none) {
            return false;
        }
        if !changed {
            blobs = shared.work.wait(blobs).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(len: usize, seed: usize) -> Vec<u8> {
        (0..len).map(|at| (at * seed / 7) as u8).collect()
    }

    #[test]
    fn each_blob_of_a_pair_has_its_own_digest() {
        for sizes in [[0, 0], [0, 100_000], [1, 300_000], [200_000, 200_000], [77_777, 1_000_000]] {
            let pair = BlobHasher::pair().unwrap();
            let texts = [text(sizes[0], 3), text(sizes[1], 5)];
            std::thread::scope(|scope| {
                for (hashing, text) in pair.iter().zip(&texts) {
                    scope.spawn(move || {
                        for part in text.chunks(10_000) {
                            let mut buffer = Arc::try_unwrap(hashing.recycled()).unwrap();
                            buffer.clear();
                            buffer.extend_from_slice(part);
                            assert!(hashing.push(Arc::new(buffer)));
                        }
                        assert_eq!(hashing.finish(), Some(Sha256::of(text)));
                        assert_eq!(hashing.finish(), Some(Sha256::of(text)));
                    });
                }
            });
        }
    }

    #[test]
    fn a_blob_that_is_given_up_does_not_stop_its_pair() {
        let [one, two] = BlobHasher::pair().unwrap();
        assert!(one.push(Arc::new(text(100_000, 3))));
        drop(one);
        let rest = text(3_000_000, 5);
        for part in rest.chunks(100_000) {
            assert!(two.push(Arc::new(part.to_vec())));
        }
        assert_eq!(two.finish(), Some(Sha256::of(&rest)));
    }

    #[test]
    #[cfg_attr(miri, ignore = "forks")]
    fn a_child_gives_up_a_blob_of_its_parent_without_waiting() {
        let mut pair = Some(BlobHasher::pair().unwrap());
        let shared = pair.as_ref().unwrap()[0].shared.clone();
        let held = shared.lock();
        assert!(afresh_sys::child_passes(|| pair.take().is_some()));
        drop(held);
        drop(pair);
    }
}
