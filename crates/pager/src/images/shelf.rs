//! The images of a server, within its budget.
//!
//! Promises: the files of all images, complete or not, are charged in full, and their sum is within
//! the budget. Only an image that no other process has is evicted, the least recently used first.
//! Whether a process has it is what the kernel reports ([`SealedMemfd::is_held_elsewhere`]); where
//! the kernel reports nothing, no image is evicted.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use afresh_memory::SealedMemfd;
use afresh_sys::SysError;

use super::message::RefusalReason;

/// Digest of a memory.
pub(super) type MemoryDigest = [u8; 32];

/// Snapshots that are read at a time.
const MAX_FILLS: usize = 2;

/// A file, and when it was last used.
struct Entry {
    file: SealedMemfd,
    bytes: usize,
    used: u64,
}

#[derive(Default)]
struct State {
    images: HashMap<MemoryDigest, Entry>,
    /// Images that are being filled.
    filling: Vec<MemoryDigest>,
    /// Bytes of all files.
    charged: usize,
    /// Counts uses.
    clock: u64,
}

/// The images of a server.
pub(super) struct Shelf {
    budget: usize,
    state: Mutex<State>,
}

/// The result of a search for an image.
pub(super) enum Lookup {
    /// A descriptor for the client, and the length of the file.
    Image(OwnedFd, usize),
    /// Another thread fills it.
    Filling,
    /// Nothing.
    Missing,
}

impl Shelf {
    pub(super) fn new(budget: usize) -> Arc<Self> {
        Arc::new(Self { budget, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The image with this digest.
    pub(super) fn look_up(&self, memory: &MemoryDigest) -> Result<Lookup, SysError> {
        let mut state = self.lock();
        state.clock += 1;
        let now = state.clock;
        if let Some(entry) = state.images.get_mut(memory) {
            entry.used = now;
            // Under the lock, so that no eviction finds the image unused in between.
            return Ok(Lookup::Image(entry.file.reopen()?, entry.bytes));
        }
        Ok(if state.filling.contains(memory) { Lookup::Filling } else { Lookup::Missing })
    }

    /// A place for an image that is to be filled. `None` where another thread has it.
    pub(super) fn begin(
        self: &Arc<Self>,
        memory: MemoryDigest,
    ) -> Result<Option<Filling>, RefusalReason> {
        let mut state = self.lock();
        if state.images.contains_key(&memory) || state.filling.contains(&memory) {
            return Ok(None);
        }
        if state.filling.len() >= MAX_FILLS {
            return Err(RefusalReason::Busy);
        }
        state.filling.push(memory);
        Ok(Some(Filling { shelf: self.clone(), memory, bytes: 0 }))
    }

    /// Bytes of all files.
    pub(super) fn charged(&self) -> usize {
        self.lock().charged
    }
}

impl State {
    /// Removes unused images until `bytes` more fit `budget`.
    fn make_room(&mut self, bytes: usize, budget: usize) -> Result<(), RefusalReason> {
        let fits = |charged: usize| charged.checked_add(bytes).is_some_and(|sum| sum <= budget);
        if bytes > budget {
            return Err(RefusalReason::Budget);
        }
        let mut oldest: Vec<_> =
            self.images.iter().map(|(key, entry)| (entry.used, *key)).collect();
        oldest.sort_unstable();
        for (_, memory) in oldest {
            if fits(self.charged) {
                break;
            }
            let unused = |entry: &Entry| matches!(entry.file.is_held_elsewhere(), Ok(false));
            if self.images.get(&memory).is_some_and(unused)
                && let Some(entry) = self.images.remove(&memory)
            {
                self.charged -= entry.bytes;
            }
        }
        if fits(self.charged) { Ok(()) } else { Err(RefusalReason::Budget) }
    }
}

/// An image that is being filled. Dropping it gives its place and its memory back.
pub(super) struct Filling {
    shelf: Arc<Shelf>,
    memory: MemoryDigest,
    /// Charged so far.
    bytes: usize,
}

impl Filling {
    /// Digest of the memory.
    pub(super) fn memory(&self) -> &MemoryDigest {
        &self.memory
    }

    /// Charges the file of the image, before it takes memory.
    pub(super) fn charge(&mut self, bytes: usize) -> Result<(), RefusalReason> {
        let mut state = self.shelf.lock();
        state.make_room(bytes, self.shelf.budget)?;
        state.charged += bytes;
        self.bytes += bytes;
        Ok(())
    }

    /// Adds the complete image.
    pub(super) fn finish(mut self, file: SealedMemfd) {
        let mut state = self.shelf.lock();
        state.clock += 1;
        let entry = Entry { file, bytes: self.bytes, used: state.clock };
        state.images.insert(self.memory, entry);
        drop(state);
        // The entry has the charge now.
        self.bytes = 0;
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        let mut state = self.shelf.lock();
        state.filling.retain(|memory| *memory != self.memory);
        state.charged -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use afresh_memory::{Memfd, PAGE_SIZE};

    use super::*;

    fn add(shelf: &Arc<Shelf>, number: u8, pages: usize) -> Result<(), RefusalReason> {
        let mut filling = shelf.begin([number; 32])?.unwrap();
        filling.charge(pages * PAGE_SIZE)?;
        let file = Memfd::new(c"shelf").unwrap();
        file.write_at(&vec![number; pages * PAGE_SIZE], 0).unwrap();
        filling.finish(SealedMemfd::new(file).unwrap());
        Ok(())
    }

    fn take(shelf: &Shelf, number: u8) -> Option<OwnedFd> {
        match shelf.look_up(&[number; 32]).unwrap() {
            Lookup::Image(fd, _) => Some(fd),
            Lookup::Filling | Lookup::Missing => None,
        }
    }

    #[test]
    fn unused_images_make_room_and_those_of_processes_stay() {
        let shelf = Shelf::new(10 * PAGE_SIZE);
        add(&shelf, 1, 4).unwrap();
        if let Err(error) = shelf.lock().images[&[1; 32]].file.is_held_elsewhere() {
            return println!("SKIPPED: {error}");
        }
        add(&shelf, 2, 4).unwrap();
        let first = take(&shelf, 1);
        assert!(first.is_some());
        // The second image is the more recently used one, and the only unused one.
        drop(take(&shelf, 2));
        add(&shelf, 3, 4).unwrap();
        assert!(take(&shelf, 2).is_none() && take(&shelf, 3).is_some());
        assert_eq!(shelf.charged(), 8 * PAGE_SIZE);
        // Without the first image there is room.
        assert_eq!(add(&shelf, 4, 7).unwrap_err(), RefusalReason::Budget);
        drop(first);
        add(&shelf, 4, 7).unwrap();
        assert_eq!(add(&shelf, 5, 11).unwrap_err(), RefusalReason::Budget);
        assert!(take(&shelf, 4).is_some(), "an image that fits no budget evicts none");
    }

    #[test]
    fn a_filling_that_ends_early_gives_its_charge_and_its_place_back() {
        let shelf = Shelf::new(10 * PAGE_SIZE);
        let mut first = shelf.begin([1; 32]).unwrap().unwrap();
        first.charge(8 * PAGE_SIZE).unwrap();
        assert!(shelf.begin([1; 32]).unwrap().is_none(), "it is being filled");
        assert!(matches!(shelf.look_up(&[1; 32]).unwrap(), Lookup::Filling));
        let second = shelf.begin([2; 32]).unwrap();
        assert!(matches!(shelf.begin([3; 32]), Err(RefusalReason::Busy)));
        assert_eq!(add(&shelf, 4, 1).unwrap_err(), RefusalReason::Busy);
        drop((first, second));
        assert_eq!(shelf.charged(), 0);
        add(&shelf, 1, 10).unwrap();
    }
}
