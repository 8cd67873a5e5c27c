//! Missing pages of a lazily filled image in slots that a virtual machine runs on: one thread of the
//! process answers for them.
//!
//! KVM touches a guest's memory in the kernel, where no signal can be answered. A userfaultfd with events
//! lets KVM sleep instead, and host code that touches the memory as well, until the thread has had the page
//! put in place. It needs privilege ([`afresh_sys::Feature::UffdKernel`]); without it the image is filled
//! first.
//!
//! Promises: nobody who touches a missing page goes on before its content is in place; when it will never
//! be, the slot's memory is closed and KVM gets `EFAULT`. May break it: a filler that takes its time for one
//! slot keeps the others waiting, until its patience ends.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use afresh_sys::{
    Call, Feature, Features, Interest, PAGE_SIZE, PageRange, SysError, Uffd, UffdEvent, fork,
};

use super::Slot;
use crate::SlotError;
use crate::image::{Met, Missing};

const EIO: i32 = 5;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that panics runs under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The thread, and the slots it answers for, by the address of their first page.
struct Server {
    uffd: Uffd,
    /// Of the process it was opened in.
    generation: u32,
    slots: Mutex<BTreeMap<usize, Arc<Entry>>>,
    /// Set when the thread can answer no more.
    ended: AtomicBool,
}

/// One slot.
struct Entry {
    missing: Missing,
    /// Whether the slot's memory is still filled by `missing`: it may be closed only as long as it is.
    current: Mutex<bool>,
    /// The thread ended, or the filler panicked.
    broken: AtomicBool,
}

impl Entry {
    fn close(&self) {
        let current = lock(&self.current);
        if *current {
            self.missing.close();
        }
    }

    fn answer(&self, address: usize) {
        let page = (address - self.missing.address(0) as usize) / PAGE_SIZE;
        // A thread that unwinds would leave everybody waiting.
        let met = catch_unwind(AssertUnwindSafe(|| self.missing.meet(page)));
        if met.is_err() {
            self.broken.store(true, Ordering::Release);
        }
        if !matches!(met, Ok(Met::Present | Met::Filled)) {
            self.close();
        }
    }
}

impl Server {
    /// The server of this process, started when it is first needed. A child of a fork has no thread of
    /// its parent's, and gets one of its own.
    fn get() -> Result<&'static Self, SysError> {
        static STARTED: Mutex<Option<&'static Server>> = Mutex::new(None);
        let mut started = lock(&STARTED);
        match *started {
            Some(server) if server.generation == fork::generation() => Ok(server),
            _ => {
                let server: &'static Server = Box::leak(Box::new(Server {
                    uffd: Uffd::open_for_kernel()?,
                    generation: fork::generation(),
                    slots: Mutex::new(BTreeMap::new()),
                    ended: AtomicBool::new(false),
                }));
                let spawned = std::thread::Builder::new()
                    .name("afresh-missing".to_owned())
                    .spawn(|| server.run());
                if let Err(error) = spawned {
                    let errno = error.raw_os_error().unwrap_or_default();
                    return Err(SysError::new(Call::Schedule, errno));
                }
                *started = Some(server);
                Ok(server)
            }
        }
    }

    fn run(&self) {
        while self.uffd.wait().is_ok() {
            loop {
                match self.uffd.next_event() {
                    Ok(Some(UffdEvent::Fault { address, .. })) => self.answer(address),
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(_) => return self.give_up(),
                }
            }
        }
        self.give_up();
    }

    fn answer(&self, address: usize) {
        let slot = lock(&self.slots).range(..=address).next_back().map(|(_, slot)| slot.clone());
        // Not there any more: whoever touched it was interrupted, and the slot is gone.
        if let Some(slot) = slot {
            slot.answer(address);
        }
        let page = (address & !(PAGE_SIZE - 1)) as *const u8;
        // Fails only for a range that is no multiple of a page.
        let _ = self.uffd.wake(page, PAGE_SIZE);
    }

    /// Nobody answers from now on, so nobody may wait.
    fn give_up(&self) {
        self.ended.store(true, Ordering::SeqCst);
        for slot in lock(&self.slots).values() {
            slot.broken.store(true, Ordering::Release);
            slot.close();
            let len = PageRange::new(0, slot.missing.capacity()).byte_len();
            let _ = self.uffd.wake(slot.missing.address(0), len);
        }
    }
}

/// A slot that the thread answers for, until this is dropped.
pub(super) struct Served {
    server: &'static Server,
    entry: Arc<Entry>,
    /// What is registered.
    parts: Vec<PageRange>,
}

impl Served {
    fn start(missing: Missing, regions: &[PageRange]) -> Result<Self, SysError> {
        let server = Server::get()?;
        let (current, broken) = (Mutex::new(true), AtomicBool::new(false));
        let entry = Arc::new(Entry { missing, current, broken });
        let first = entry.missing.address(0) as usize;
        lock(&server.slots).insert(first, entry.clone());
        let mut this = Self { server, entry, parts: Vec::new() };
        // Announced first, looked for second: whoever gives up closes this slot too, or is seen here.
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

impl Drop for Served {
    fn drop(&mut self) {
        // In the child of a fork the descriptor still stands for the parent's memory, which goes on
        // missing pages.
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

impl Slot {
    /// Has the thread answer for what is missing of the image just placed, or, where that is not to be
    /// had, waits for all of it.
    pub(super) fn serve(&mut self) -> Result<(), SlotError> {
        let features = self.config.features.as_ref().unwrap_or_else(|| Features::host());
        let missing = Missing::of(&self.image, &self.memory, self.first, self.capacity);
        let Some(missing) = missing.filter(|_| self.filling) else { return Ok(()) };
        if features.has(Feature::UffdKernel)
            && let Ok(served) = Served::start(missing, &self.regions)
        {
            self.served = Some(served);
            return Ok(());
        }
        self.image.complete()?;
        self.filling = false;
        Ok(())
    }
}
