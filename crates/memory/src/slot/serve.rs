//! Missing pages of a lazily filled image in slots that a virtual machine runs on: threads of the
//! process answer for them.
//!
//! KVM touches a guest's memory in the kernel, where no signal can be answered. A userfaultfd with
//! events lets KVM sleep instead, and host code that touches the memory as well, until a thread has
//! filled the page. It needs privilege ([`afresh_sys::Feature::UffdKernel`]); without it the image
//! is filled first.
//!
//! One thread at a time leads: it takes the next fault, makes another thread lead, and answers the
//! fault itself. At most [`PER_IMAGE`] threads handle faults of one image; its further faults wait
//! in a queue, so a slow source delays only its own guests.
//!
//! Promises: an access to a missing page continues only when its content is in place; when it will
//! never be, the slot's memory is closed and KVM gets `EFAULT`. May break it: more images with slow
//! sources at the same time than [`THREADS`] can answer for; then all wait for the first of them,
//! until its time is up.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use afresh_sys::errno::EIO;
use afresh_sys::{
    Call, Interest, PAGE_SIZE, PageRange, PerProcess, SysError, Uffd, UffdEvent, fork, lock,
};

use crate::image::{FaultOutcome, Missing};

/// Threads there are at most.
const THREADS: usize = 64;
/// Threads that answer for one image at most.
const PER_IMAGE: usize = 2;
/// Idle time of a thread before it ends.
const IDLE: Duration = Duration::from_secs(10);

/// The threads, and the slots they answer for, by the address of their first page.
struct Server {
    uffd: Uffd,
    /// The process it was opened in.
    generation: u32,
    slots: Mutex<BTreeMap<usize, Arc<Entry>>>,
    crew: Mutex<FaultThreads>,
    /// Signalled when a leader is needed.
    bell: Condvar,
    /// Set when faults can be taken no more.
    ended: AtomicBool,
}

/// The server, once it was needed. At a fork another thread may hold the lock.
static STARTED: PerProcess<Mutex<Option<&'static Server>>> = PerProcess::new(Mutex::default);

/// Who does what.
#[derive(Default)]
struct FaultThreads {
    threads: usize,
    /// Threads that wait to lead.
    idle: usize,
    /// Whether somebody leads.
    led: bool,
    /// Threads that answer for each image.
    answering: HashMap<usize, usize>,
    /// Faults that wait until fewer threads answer for their image, in order.
    waiting: VecDeque<Fault>,
}

impl FaultThreads {
    /// Whether one more thread may answer for `image`, which counts it then.
    fn admit(&mut self, image: usize) -> bool {
        let answering = self.answering.entry(image).or_default();
        let admitted = *answering < PER_IMAGE;
        *answering += usize::from(admitted);
        admitted
    }

    /// A thread has handled a fault of `image`; returns the next fault for it.
    fn next_after(&mut self, image: usize) -> Option<Fault> {
        if let Some(answering) = self.answering.get_mut(&image) {
            *answering -= 1;
            if *answering == 0 {
                self.answering.remove(&image);
            }
        }
        let open = |fault: &Fault| {
            self.answering.get(&fault.image).is_none_or(|answering| *answering < PER_IMAGE)
        };
        let at = self.waiting.iter().position(open)?;
        let fault = self.waiting.remove(at)?;
        self.admit(fault.image).then_some(fault)
    }
}

/// A fault on a page of a slot.
struct Fault {
    slot: Arc<Entry>,
    /// The source of the page.
    image: usize,
    address: usize,
}

/// One slot.
struct Entry {
    missing: Missing,
    /// Whether the slot's memory is still filled by `missing`: only then may it be closed.
    current: Mutex<bool>,
    /// The thread ended, or the filler panicked.
    broken: AtomicBool,
}

impl Entry {
    fn close(&self, page: Option<usize>) {
        let current = lock(&self.current);
        if *current {
            self.missing.close(page);
        }
    }

    /// The slot's page at `address`.
    fn page(&self, address: usize) -> usize {
        (address - self.missing.address(0) as usize) / PAGE_SIZE
    }

    fn answer(&self, address: usize) {
        let page = self.page(address);
        // A thread that unwinds would leave all others waiting.
        let met = catch_unwind(AssertUnwindSafe(|| self.missing.handle_fault(page)));
        if met.is_err() {
            self.broken.store(true, Ordering::Release);
        }
        if !matches!(met, Ok(FaultOutcome::Present | FaultOutcome::Filled)) {
            self.close(Some(page));
        }
    }
}

impl Server {
    /// The server of this process, started when it is first needed. A child of a fork has no thread
    /// of its parent, and starts a new one.
    fn get() -> Result<&'static Self, SysError> {
        let mut started = lock(STARTED.get());
        match *started {
            Some(server) => Ok(server),
            None => {
                let server: &'static Server = Box::leak(Box::new(Server {
                    uffd: Uffd::open_for_kernel()?,
                    generation: fork::generation(),
                    slots: Mutex::new(BTreeMap::new()),
                    crew: Mutex::new(FaultThreads::default()),
                    bell: Condvar::new(),
                    ended: AtomicBool::new(false),
                }));
                if let Err(error) = server.enlist(&mut lock(&server.crew)) {
                    let errno = error.raw_os_error().unwrap_or_default();
                    return Err(SysError::new(Call::Schedule, errno));
                }
                *started = Some(server);
                Ok(server)
            }
        }
    }

    /// Starts a thread.
    fn enlist(&'static self, crew: &mut FaultThreads) -> std::io::Result<()> {
        let named = std::thread::Builder::new().name("afresh-missing".to_owned());
        named.spawn(|| self.work())?;
        crew.threads += 1;
        Ok(())
    }

    /// The loop of each thread: leads, handles a fault, and leads again on request.
    fn work(&'static self) {
        loop {
            let mut crew = lock(&self.crew);
            while crew.led && !self.ended.load(Ordering::SeqCst) {
                crew.idle += 1;
                let (woken, timeout) =
                    self.bell.wait_timeout(crew, IDLE).unwrap_or_else(PoisonError::into_inner);
                crew = woken;
                crew.idle -= 1;
                if crew.led && timeout.timed_out() {
                    crew.threads -= 1;
                    return;
                }
            }
            if self.ended.load(Ordering::SeqCst) {
                return;
            }
            crew.led = true;
            drop(crew);
            let Some(mut fault) = self.lead() else { return self.give_up() };
            loop {
                fault.slot.answer(fault.address);
                self.wake(fault.address);
                match lock(&self.crew).next_after(fault.image) {
                    Some(next) => fault = next,
                    None => break,
                }
            }
        }
    }

    /// Takes faults until one is for this thread; another thread leads then. `None` when faults can
    /// be taken no more.
    fn lead(&'static self) -> Option<Fault> {
        loop {
            self.uffd.wait().ok()?;
            while let Some(event) = self.uffd.next_event().ok()? {
                if let UffdEvent::Fault { address, .. } = event
                    && let Some(fault) = self.find(address)
                    && let Some(mine) = self.take(fault)
                {
                    return Some(mine);
                }
            }
        }
    }

    /// The slot of a fault; a thread that touches memory of a dropped slot is woken.
    fn find(&self, address: usize) -> Option<Fault> {
        let slot = lock(&self.slots).range(..=address).next_back().map(|(_, slot)| slot.clone());
        let Some(slot) = slot else {
            self.wake(address);
            return None;
        };
        let image = slot.missing.source_of(slot.page(address));
        Some(Fault { slot, image, address })
    }

    /// Passes the lead on and returns the fault, or queues it.
    fn take(&'static self, fault: Fault) -> Option<Fault> {
        let mut crew = lock(&self.crew);
        let replaced = crew.idle > 0 || crew.threads < THREADS;
        if !replaced || !crew.admit(fault.image) {
            crew.waiting.push_back(fault);
            return None;
        }
        crew.led = false;
        if crew.idle > 0 {
            self.bell.notify_one();
        } else {
            // Without another thread this one leads again when it has answered.
            let _ = self.enlist(&mut crew);
        }
        Some(fault)
    }

    fn wake(&self, address: usize) {
        let page = (address & !(PAGE_SIZE - 1)) as *const u8;
        // Fails only for a range that is not a multiple of a page.
        let _ = self.uffd.wake(page, PAGE_SIZE);
    }

    /// Wakes all waiting threads, because faults are no longer handled.
    fn give_up(&self) {
        self.ended.store(true, Ordering::SeqCst);
        self.bell.notify_all();
        for slot in lock(&self.slots).values() {
            slot.broken.store(true, Ordering::Release);
            slot.close(None);
            let len = PageRange::new(0, slot.missing.capacity()).byte_len();
            let _ = self.uffd.wake(slot.missing.address(0), len);
        }
    }
}

/// A slot that the thread answers for, until this is dropped.
pub(super) struct ServedSlot {
    server: &'static Server,
    entry: Arc<Entry>,
    /// What is registered.
    parts: Vec<PageRange>,
}

impl ServedSlot {
    /// Registers the parts of `regions` whose pages are missing.
    pub(super) fn start(missing: Missing, regions: &[PageRange]) -> Result<Self, SysError> {
        let server = Server::get()?;
        let (current, broken) = (Mutex::new(true), AtomicBool::new(false));
        let entry = Arc::new(Entry { missing, current, broken });
        let first = entry.missing.address(0) as usize;
        lock(&server.slots).insert(first, entry.clone());
        let mut this = Self { server, entry, parts: Vec::new() };
        // Registered before the check: a server that gives up closes this slot too, or is seen
        // here.
        if server.ended.load(Ordering::SeqCst) {
            return Err(SysError::new(Call::UffdRead, EIO));
        }
        for region in regions {
            let entry = this.entry.clone();
            for part in entry.missing.within(*region) {
                let start = this.entry.missing.address(part.start);
                server.uffd.register(start, part.byte_len(), Interest::MISSING)?;
                this.parts.push(part);
            }
        }
        Ok(this)
    }

    /// Why pages will never come, once that is certain.
    pub(super) fn failure(&self) -> Option<String> {
        match self.entry.broken.load(Ordering::Acquire) {
            false => self.entry.missing.failure(),
            true => Some("the thread that fills missing pages has failed".to_owned()),
        }
    }
}

impl Drop for ServedSlot {
    fn drop(&mut self) {
        // In the child of a fork the descriptor still refers to the parent's memory, whose pages
        // are still missing.
        if self.server.generation != fork::generation() {
            return;
        }
        lock(&self.server.slots).remove(&(self.entry.missing.address(0) as usize));
        *lock(&self.entry.current) = false;
        for part in &self.parts {
            let start = self.entry.missing.address(part.start);
            // Fails only where the mapping was replaced, which ends the registration too.
            let _ = self.server.uffd.unregister(start, part.byte_len());
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn a_child_waits_for_no_start_of_its_parents_threads() {
        let held = lock(STARTED.get());
        // It starts threads, or learns why it cannot.
        assert!(afresh_sys::child_passes(|| Server::get().is_ok() | true));
        drop(held);
    }
}
