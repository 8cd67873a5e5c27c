//! The images of a server, within its budget.
//!
//! Promises: the files of all images, complete or not, are charged in full, and their sum is within
//! the budget. So is their number, as each takes a descriptor. Only an image that no other process
//! has is evicted, the least recently used first. It is also evicted where descriptors ran out.
//! Whether a process has it is what the kernel reports ([`SealedMemfd::is_held_elsewhere`]); where
//! the kernel reports nothing, no image is evicted.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use afresh_memory::SealedMemfd;
use afresh_sys::SysError;
use afresh_sys::errno::{EMFILE, ENFILE};

use super::admission::{Admission, Decision, Source};
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
    admission: Admission,
}

/// The images of a server.
pub(super) struct Shelf {
    budget: usize,
    max_images: usize,
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
    /// Descriptors ran out, and all images are in use.
    Full,
}

/// Whether an error is a lack of descriptors.
pub(super) fn is_lack_of_descriptors(errno: i32) -> bool {
    errno == EMFILE || errno == ENFILE
}

impl Shelf {
    pub(super) fn new(budget: usize, max_images: usize) -> Arc<Self> {
        Arc::new(Self { budget, max_images, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The image with this digest.
    pub(super) fn look_up(&self, memory: &MemoryDigest) -> Result<Lookup, SysError> {
        let mut state = self.lock();
        state.clock += 1;
        let now = state.clock;
        while let Some(entry) = state.images.get_mut(memory) {
            entry.used = now;
            // Under the lock, so that no eviction finds the image unused in between.
            match entry.file.reopen() {
                Ok(file) => return Ok(Lookup::Image(file, entry.bytes)),
                Err(error) if !is_lack_of_descriptors(error.errno) => return Err(error),
                // Another image gives its descriptor. This one was used last.
                Err(_) if state.evict_one(Some(memory)) => {}
                Err(_) => return Ok(Lookup::Full),
            }
        }
        Ok(if state.filling.contains(memory) { Lookup::Filling } else { Lookup::Missing })
    }

    /// Decides about a request for an image that is missing.
    pub(super) fn decide(&self, source: &Source) -> Decision {
        self.lock().admission.decide(source, Instant::now())
    }

    /// Notes that an image could not be made.
    pub(super) fn fail(&self, source: Source, reason: RefusalReason) {
        self.lock().admission.fail(source, reason, Instant::now());
    }

    /// Evicts the least recently used image that no process has, for its descriptor.
    pub(super) fn free_descriptor(&self) -> bool {
        self.lock().evict_one(None)
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
        let is_short = |state: &State| state.images.len() + state.filling.len() >= self.max_images;
        if !state.evict(None, is_short) {
            return Err(RefusalReason::Images);
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
    /// Removes images that no process has while `is_short`, the least recently used first, and
    /// never `kept`. Returns whether there is enough room then.
    fn evict(&mut self, kept: Option<&MemoryDigest>, is_short: impl Fn(&Self) -> bool) -> bool {
        if !is_short(self) {
            return true;
        }
        let others = self.images.iter().filter(|(memory, _)| Some(*memory) != kept);
        let mut oldest: Vec<_> = others.map(|(memory, entry)| (entry.used, *memory)).collect();
        oldest.sort_unstable();
        for (_, memory) in oldest {
            let unused = |entry: &Entry| matches!(entry.file.is_held_elsewhere(), Ok(false));
            if self.images.get(&memory).is_some_and(unused)
                && let Some(entry) = self.images.remove(&memory)
            {
                self.charged -= entry.bytes;
                if !is_short(self) {
                    return true;
                }
            }
        }
        false
    }

    /// Removes one image that no process has, other than `kept`, for its descriptor.
    fn evict_one(&mut self, kept: Option<&MemoryDigest>) -> bool {
        let before = self.images.len();
        self.evict(kept, |state| state.images.len() == before)
    }

    /// Removes unused images until `bytes` more fit `budget`.
    fn make_room(&mut self, bytes: usize, budget: usize) -> Result<(), RefusalReason> {
        let is_short =
            |state: &Self| state.charged.checked_add(bytes).is_none_or(|sum| sum > budget);
        let has_room = bytes <= budget && self.evict(None, is_short);
        if has_room { Ok(()) } else { Err(RefusalReason::Budget) }
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
    use afresh_sys::Call;
    use afresh_sys::inject::{Plan, with};

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
            Lookup::Filling | Lookup::Missing | Lookup::Full => None,
        }
    }

    #[test]
    fn unused_images_make_room_and_those_of_processes_stay() {
        let shelf = Shelf::new(10 * PAGE_SIZE, 10);
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
        let shelf = Shelf::new(10 * PAGE_SIZE, 10);
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

    #[test]
    fn the_number_of_images_is_limited_as_their_memory_is() {
        let shelf = Shelf::new(100 * PAGE_SIZE, 3);
        (1..=3).for_each(|number| add(&shelf, number, 1).unwrap());
        if let Err(error) = shelf.lock().images[&[1; 32]].file.is_held_elsewhere() {
            return println!("SKIPPED: {error}");
        }
        let held = [1, 3].map(|number| take(&shelf, number));
        assert!(held.iter().all(Option::is_some));
        add(&shelf, 4, 1).unwrap();
        assert!(take(&shelf, 2).is_none(), "the only unused one made room");
        let last = take(&shelf, 4);
        assert_eq!(add(&shelf, 5, 1).unwrap_err(), RefusalReason::Images);
        assert_eq!(shelf.charged(), 3 * PAGE_SIZE);
        drop(held);
        // An image that is being filled counts.
        let filling = [6, 7].map(|number| shelf.begin([number; 32]).unwrap().unwrap());
        assert!(take(&shelf, 1).is_none() && take(&shelf, 3).is_none());
        drop((filling, last));
    }

    #[test]
    fn an_unused_image_gives_its_descriptor_to_a_client() {
        let shelf = Shelf::new(100 * PAGE_SIZE, 10);
        (1..=2).for_each(|number| add(&shelf, number, 1).unwrap());
        if let Err(error) = shelf.lock().images[&[1; 32]].file.is_held_elsewhere() {
            return println!("SKIPPED: {error}");
        }
        let none_left = |times| Plan { call: Some(Call::Reopen), after: 0, times, errno: EMFILE };
        let (taken, fired) = with(none_left(1), || take(&shelf, 2));
        assert!(taken.is_some() && fired == 1);
        assert!(take(&shelf, 1).is_none() && shelf.charged() == PAGE_SIZE);
        // No other image is left. This one stays, for a later request.
        let (found, _) = with(none_left(usize::MAX), || shelf.look_up(&[2; 32]));
        assert!(matches!(found.unwrap(), Lookup::Full));
        assert!(!shelf.free_descriptor(), "a process has it");
        drop(taken);
        assert!(take(&shelf, 2).is_some() && shelf.free_descriptor());
        assert_eq!(shelf.charged(), 0);
    }
}
