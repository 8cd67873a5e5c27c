//! Linear memories that are slots.
//!
//! wasmtime asks its memory creator for each memory an instance defines. Just before instantiating, the
//! adapter lays out on this thread which slots are to be taken, in order ([`with_memories`]); a request
//! that does not fit the next one (wasmtime's own GC heap, say) gets a slot of its own.
//!
//! wasmtime cannot shrink a memory, but it can be told to look again: a growth by zero pages makes it
//! re-read size and base, so after a reset has shrunk the slot, `memory.grow(0)` brings wasmtime's view
//! in line.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use afresh_memory::{
    HostAccess, Image, PAGE_SIZE, ResetError, Slot, SlotConfig, SlotError, Strategy, ZeroStock,
    page_align_up,
};
use afresh_rewrite::Memory;
use serde::{Deserialize, Serialize};
use wasmtime::{LinearMemory, MemoryCreator, MemoryType};

use crate::engine::{GUARD, RESERVATION};
use crate::exclusive::{Exclusive, Guard};

/// What a memory is declared as, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub(crate) minimum: usize,
    maximum: Option<usize>,
    memory64: bool,
}

impl Shape {
    pub(crate) fn of(memory: &Memory) -> Self {
        let bytes = |pages: u64| {
            pages
                .checked_shl(memory.page_size_log2)
                .and_then(|b| usize::try_from(b).ok())
                .unwrap_or(usize::MAX)
        };
        Self {
            minimum: bytes(memory.minimum),
            maximum: memory.maximum.map(bytes),
            memory64: memory.memory64,
        }
    }

    /// Pages the slot must be able to hold.
    fn capacity(&self, memory64_capacity: usize) -> usize {
        let natural = if self.memory64 { memory64_capacity } else { RESERVATION as usize };
        let wanted = match self.maximum {
            Some(maximum) => maximum.min(natural.max(self.minimum)),
            None => natural.max(self.minimum),
        };
        page_align_up(wanted).max(PAGE_SIZE) / PAGE_SIZE
    }
}

/// How slots of a guest's memories are made.
#[derive(Clone, Debug)]
pub(crate) struct MemoryPolicy {
    pub(crate) strategy: Strategy,
    pub(crate) host_access: HostAccess,
    pub(crate) verify_every: Option<u32>,
    pub(crate) memory64_capacity: usize,
    /// Where whole blocks of a growth come from.
    pub(crate) stock: Option<Arc<dyn ZeroStock>>,
}

/// A linear memory: a slot, and its size in bytes, which need not be a multiple of a host page.
#[derive(Debug)]
pub(crate) struct GuestMemory {
    base: usize,
    capacity: usize,
    shape: Shape,
    bytes: AtomicUsize,
    initial: AtomicUsize,
    /// Pages of the write set after the last reset, readable without the lock.
    resident: AtomicUsize,
    slot: Exclusive<Slot>,
}

impl GuestMemory {
    /// A memory that holds `image`, `bytes` long.
    pub(crate) fn new(
        shape: Shape,
        image: &Image,
        bytes: usize,
        policy: &MemoryPolicy,
    ) -> Result<Arc<Self>, SlotError> {
        let capacity = shape.capacity(policy.memory64_capacity);
        let reserved = (RESERVATION as usize).saturating_sub(capacity * PAGE_SIZE);
        let slot = Slot::new(
            image,
            SlotConfig {
                strategy: policy.strategy,
                host_access: policy.host_access,
                guard_before: GUARD as usize,
                guard_after: reserved + GUARD as usize,
                capacity: Some(capacity),
                verify_every: policy.verify_every,
                stock: policy.stock.clone(),
                ..SlotConfig::default()
            },
        )?;
        Ok(Arc::new(Self {
            base: slot.base() as usize,
            capacity: capacity * PAGE_SIZE,
            shape,
            bytes: AtomicUsize::new(bytes),
            initial: AtomicUsize::new(bytes),
            resident: AtomicUsize::new(0),
            slot: Exclusive::new(slot),
        }))
    }

    #[inline]
    pub(crate) fn slot(&self) -> Guard<'_, Slot> {
        self.slot.lock()
    }

    /// Whether a memory declared as `shape` could be this one.
    pub(crate) fn is_shaped(&self, shape: Shape) -> bool {
        self.shape == shape
    }

    /// Size now, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Makes `image`, of the present size, the state that resets return to.
    pub(crate) fn adopt(&self, image: &Image) -> Result<(), SlotError> {
        self.slot().set_image(image, &[])?;
        self.initial.store(self.bytes(), Ordering::Relaxed);
        Ok(())
    }

    /// Bytes of private memory kept between calls, roughly.
    #[inline]
    pub(crate) fn resident_bytes(&self) -> usize {
        self.resident.load(Ordering::Relaxed) * PAGE_SIZE
    }

    /// Gives private memory back.
    pub(crate) fn trim(&self) -> Result<(), ResetError> {
        self.resident.store(0, Ordering::Relaxed);
        self.slot().trim()
    }

    /// Brings the memory back to its image; `true` when it had grown, and wasmtime must look again.
    #[inline]
    pub(crate) fn reset(&self) -> Result<bool, ResetError> {
        {
            let mut slot = self.slot();
            slot.reset()?;
            self.resident.store(slot.write_set_len(), Ordering::Relaxed);
        }
        let initial = self.initial.load(Ordering::Relaxed);
        let grown = self.bytes.load(Ordering::Relaxed) != initial;
        if grown {
            self.bytes.store(initial, Ordering::Relaxed);
        }
        Ok(grown)
    }
}

/// What wasmtime holds of a memory.
struct View(Arc<GuestMemory>);

// SAFETY: the base never moves; `capacity` bytes behind it are reserved for as long as this value
// lives, followed by a guard as large as wasmtime was told (the slot is made with it), and exactly the
// first `byte_size` bytes (rounded up to host pages) are accessible.
unsafe impl LinearMemory for View {
    fn byte_size(&self) -> usize {
        self.0.bytes()
    }

    fn byte_capacity(&self) -> usize {
        self.0.capacity
    }

    fn grow_to(&mut self, new_size: usize) -> wasmtime::Result<()> {
        self.0.slot().grow(page_align_up(new_size) / PAGE_SIZE)?;
        self.0.bytes.store(new_size, Ordering::Relaxed);
        Ok(())
    }

    fn as_ptr(&self) -> *mut u8 {
        self.0.base as *mut u8
    }
}

thread_local! {
    /// Memories that the instantiation under way on this thread is to take, in order.
    static PLAN: RefCell<VecDeque<Arc<GuestMemory>>> = const { RefCell::new(VecDeque::new()) };
}

thread_local! {
    /// Memories made while [`record_memories`] runs, in order.
    static RECORD: RefCell<Option<Vec<Arc<GuestMemory>>>> = const { RefCell::new(None) };
}

/// Runs `instantiate` and returns the memories that it made, in order.
pub(crate) fn record_memories<R>(
    instantiate: impl FnOnce() -> wasmtime::Result<R>,
) -> wasmtime::Result<(R, Vec<Arc<GuestMemory>>)> {
    RECORD.set(Some(Vec::new()));
    let result = instantiate();
    let made = RECORD.take().unwrap_or_default();
    Ok((result?, made))
}

/// Runs `instantiate` with `memories` laid out for wasmtime to take. Fails when it did not take them
/// all: the instance would run on other memory than ours.
pub(crate) fn with_memories<R>(
    memories: &[Arc<GuestMemory>],
    instantiate: impl FnOnce() -> wasmtime::Result<R>,
) -> wasmtime::Result<R> {
    struct Clear;
    impl Drop for Clear {
        fn drop(&mut self) {
            PLAN.with_borrow_mut(VecDeque::clear);
        }
    }
    PLAN.with_borrow_mut(|plan| {
        plan.clear();
        plan.extend(memories.iter().cloned());
    });
    let clear = Clear;
    let result = instantiate()?;
    let left = PLAN.with_borrow(VecDeque::len);
    drop(clear);
    if left > 0 {
        return Err(wasmtime::Error::msg(format!(
            "{left} of {} memories were not taken by the instance",
            memories.len()
        )));
    }
    Ok(result)
}

/// The memory creator handed to wasmtime.
#[derive(Debug, Default)]
pub(crate) struct SlotMemories;

// SAFETY: every memory is a slot whose capacity and guards cover what wasmtime asks for; see `View`.
unsafe impl MemoryCreator for SlotMemories {
    fn new_memory(
        &self,
        ty: MemoryType,
        minimum: usize,
        maximum: Option<usize>,
        reserved_size_in_bytes: Option<usize>,
        guard_size_in_bytes: usize,
    ) -> Result<Box<dyn LinearMemory>, String> {
        if guard_size_in_bytes > GUARD as usize
            || reserved_size_in_bytes.is_some_and(|r| r > RESERVATION as usize)
        {
            return Err("wasmtime asks for larger guards than slots have".to_owned());
        }
        let planned = PLAN.with_borrow_mut(|plan| {
            let fits = |m: &Arc<GuestMemory>| {
                m.shape.memory64 == ty.is_64()
                    && (m.shape.minimum == minimum || m.bytes() == minimum)
            };
            if plan.front().is_some_and(fits) { plan.pop_front() } else { None }
        });
        if let Some(memory) = planned {
            return Ok(Box::new(View(memory)));
        }
        let shape = Shape { minimum, maximum, memory64: ty.is_64() };
        let policy = MemoryPolicy {
            strategy: Strategy::Discard,
            host_access: HostAccess::Threads,
            verify_every: None,
            memory64_capacity: RESERVATION as usize,
            stock: None,
        };
        let image = Image::zero(page_align_up(minimum) / PAGE_SIZE);
        let memory =
            GuestMemory::new(shape, &image, minimum, &policy).map_err(|error| error.to_string())?;
        RECORD.with_borrow_mut(|record| {
            if let Some(made) = record {
                made.push(memory.clone());
            }
        });
        Ok(Box::new(View(memory)))
    }
}
