//! Linear memories that are slots.
//!
//! wasmtime calls its memory creator for each memory an instance defines. Just before
//! instantiating, the adapter lays out the slots to use on this thread ([`with_memories`]).
//! wasmtime promises that an instantiation requests the same memories in the same order every time.
//! A module's memories are requested by index, before any of its code runs; a component's follow
//! the fixed list of steps that it was compiled to. So the order is determined once, and an
//! instantiation fails unless it requests exactly the memories that were laid out, each as it is
//! declared. Its heap for GC objects is recognised by its guard, and gets its own slot
//! ([decision](../../../docs/decisions/matching-memories.md)).
//!
//! wasmtime cannot shrink a memory, but a growth by zero pages makes it re-read size and base. So
//! after a reset has shrunk the slot, `memory.grow(0)` brings wasmtime's view in line.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use afresh_memory::{
    Features, HostAccess, Image, ImageError, PAGE_SIZE, PageLoss, ResetError, Slot, SlotConfig,
    SlotError, Strategy, ZeroPageSource, page_align_up,
};
use afresh_pool::ResetCost;
use afresh_rewrite::Memory;
use serde::{Deserialize, Serialize};
use wasmtime::{LinearMemory, MemoryCreator, MemoryType};

use crate::engine::address_space::Space;
use crate::engine::exclusive::{ExclusiveCell, Guard};

/// A size that no memory can have, with room for rounding it up.
const UNBOUNDED: usize = usize::MAX / 2;

/// A declared size in bytes; none when no address space holds it.
pub(crate) fn size_in_bytes(pages: u64, page_size_log2: u32) -> Option<usize> {
    let bytes = u128::from(pages) << page_size_log2.min(64);
    usize::try_from(bytes).ok().filter(|&bytes| bytes < UNBOUNDED)
}

/// The declaration of a memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub(crate) minimum: usize,
    maximum: Option<usize>,
    memory64: bool,
}

impl Shape {
    pub(crate) fn of(memory: &Memory) -> Self {
        let bytes = |pages| size_in_bytes(pages, memory.page_size_log2).unwrap_or(UNBOUNDED);
        Self {
            minimum: bytes(memory.minimum),
            maximum: memory.maximum.map(bytes),
            memory64: memory.memory64,
        }
    }

    /// Whether an address space has room for its least size.
    pub(crate) fn is_addressable(self) -> bool {
        self.minimum < UNBOUNDED
    }

    /// As wasmtime names it.
    fn from_type(ty: &MemoryType) -> Self {
        let log2 = u32::from(ty.page_size_log2());
        let bytes = |pages| size_in_bytes(pages, log2).unwrap_or(UNBOUNDED);
        Self {
            minimum: bytes(ty.minimum()),
            maximum: ty.maximum().map(bytes),
            memory64: ty.is_64(),
        }
    }

    /// Pages the slot must be able to hold.
    fn capacity(&self, memory64_capacity: usize) -> usize {
        let natural = if self.memory64 {
            memory64_capacity
        } else {
            Space::of_process().reservation as usize
        };
        let wanted = match self.maximum {
            Some(maximum) => maximum.min(natural.max(self.minimum)),
            None => natural.max(self.minimum),
        };
        page_align_up(wanted).max(PAGE_SIZE) / PAGE_SIZE
    }
}

/// The configuration of the slots of guest memories.
#[derive(Clone, Debug)]
pub(crate) struct MemoryPolicy {
    pub(crate) strategy: Strategy,
    pub(crate) host_access: HostAccess,
    pub(crate) verify_every: Option<u32>,
    pub(crate) memory64_capacity: usize,
    /// The source of whole blocks for growth.
    pub(crate) zero_source: Option<Arc<dyn ZeroPageSource>>,
    /// Whether memories wait until all of a lazily filled image is in place.
    pub(crate) waits: bool,
}

impl MemoryPolicy {
    /// The strategy that resets the memories.
    pub(crate) fn chosen(&self) -> Strategy {
        let choice = self.strategy.choose(Features::host(), self.host_access);
        // Without a choice no memory could be made either.
        choice.map_or(self.strategy, |choice| choice.strategy)
    }
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
    /// The slot's, readable without the lock.
    loss: Arc<PageLoss>,
    /// As [`MemoryPolicy::waits`].
    waits: bool,
    slot: ExclusiveCell<Slot>,
}

impl GuestMemory {
    /// A memory that holds `image`, `bytes` long.
    pub(crate) fn new(
        shape: Shape,
        image: &Image,
        bytes: usize,
        policy: &MemoryPolicy,
    ) -> Result<Arc<Self>, SlotError> {
        if policy.waits {
            image.complete()?;
        }
        let capacity = shape.capacity(policy.memory64_capacity);
        let reserved =
            (Space::of_process().reservation as usize).saturating_sub(capacity * PAGE_SIZE);
        let slot = Slot::new(
            image,
            SlotConfig {
                strategy: policy.strategy,
                host_access: policy.host_access,
                guard_before: Space::of_process().guard as usize,
                guard_after: reserved + Space::of_process().guard as usize,
                capacity: Some(capacity),
                verify_every: policy.verify_every,
                zero_source: policy.zero_source.clone(),
                checks_loss: true,
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
            loss: slot.loss(),
            waits: policy.waits,
            slot: ExclusiveCell::new(slot),
        }))
    }

    #[inline]
    pub(crate) fn slot(&self) -> Guard<'_, Slot> {
        self.slot.lock()
    }

    /// Whether a page was touched that will never be in place.
    pub(crate) fn loss(&self) -> &Arc<PageLoss> {
        &self.loss
    }

    /// The lost page and the reason, if one was touched.
    #[cold]
    pub(crate) fn lost(&self) -> Option<String> {
        let unknown = || "a page is lost".to_owned();
        self.loss.is_known().then(|| self.slot().failure().unwrap_or_else(unknown))
    }

    /// Waits for those of its pages that contain `len` bytes at `address`, if they are its own.
    #[inline]
    pub(crate) fn fetch(&self, address: usize, len: usize) -> Result<(), SlotError> {
        match address.checked_sub(self.base).filter(|offset| *offset < self.capacity) {
            Some(offset) => self.slot().fetch(offset, len),
            None => Ok(()),
        }
    }

    /// Waits for all of its pages.
    pub(crate) fn complete(&self) -> Result<(), SlotError> {
        self.slot().fetch(0, self.capacity)
    }

    /// Its declaration.
    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// Where it lies.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base as *mut u8
    }

    /// Whether it fits wasmtime's request: a baked module declares its memories with their warm
    /// size.
    fn answers(&self, asked: &Shape) -> bool {
        self.shape.memory64 == asked.memory64
            && self.shape.maximum == asked.maximum
            && (self.shape.minimum == asked.minimum || self.bytes() == asked.minimum)
    }

    /// Size now, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Size that resets return to, in bytes.
    pub(crate) fn initial(&self) -> usize {
        self.initial.load(Ordering::Relaxed)
    }

    /// Makes `image`, of the present size, the state that resets return to.
    pub(crate) fn adopt(&self, image: &Image) -> Result<(), SlotError> {
        self.slot().set_image(image, &[])?;
        self.initial.store(self.bytes(), Ordering::Relaxed);
        Ok(())
    }

    /// Makes the present content and size the state that resets return to, and returns the content.
    pub(crate) fn checkpoint(&self) -> Result<Image, ImageError> {
        let image = self.slot().checkpoint()?;
        self.initial.store(self.bytes(), Ordering::Relaxed);
        Ok(image)
    }

    /// The number of pages that differ from the image.
    pub(crate) fn dirty_pages(&self) -> Result<usize, ImageError> {
        Ok(self.slot().differing()?.iter().map(|run| run.len).sum())
    }

    /// Goes to `image`, `bytes` long; `true` when the size is another now, and wasmtime must look
    /// again.
    pub(crate) fn switch(&self, image: &Image, bytes: usize) -> Result<bool, SlotError> {
        if self.waits {
            image.complete()?;
        }
        self.slot().switch(image)?;
        self.initial.store(bytes, Ordering::Relaxed);
        Ok(self.bytes.swap(bytes, Ordering::Relaxed) != bytes)
    }

    /// Bytes of private memory kept between calls, roughly.
    #[inline]
    pub(crate) fn resident_bytes(&self) -> usize {
        self.resident.load(Ordering::Relaxed) * PAGE_SIZE
    }

    /// Mappings that it takes, roughly: guards, content and zeros between them, and the tracker's
    /// own.
    pub(crate) fn mappings(&self) -> usize {
        4 + 2 * self.slot().image().mapping_count()
    }

    /// Gives private memory back.
    pub(crate) fn trim(&self) -> Result<(), ResetError> {
        self.resident.store(0, Ordering::Relaxed);
        self.slot().trim()
    }

    /// Resets the memory to its image, and enters the cost; `true` when it had grown, and wasmtime
    /// must look again.
    #[inline]
    pub(crate) fn reset(&self, took: &mut ResetCost) -> Result<bool, ResetError> {
        {
            let mut slot = self.slot();
            let report = slot.reset()?;
            took.pages += report.restored;
            took.discarded |= report.discarded;
            self.resident.store(slot.write_set_len(), Ordering::Relaxed);
        }
        let initial = self.initial.load(Ordering::Relaxed);
        let grown = self.bytes.load(Ordering::Relaxed) != initial;
        if grown {
            took.grown = true;
            self.bytes.store(initial, Ordering::Relaxed);
        }
        Ok(grown)
    }
}

/// Refuses memories that have lost a page.
pub(crate) fn check_loss(memories: &[Arc<GuestMemory>]) -> Result<(), ImageError> {
    let lost = memories.iter().find_map(|memory| memory.lost());
    lost.map_or(Ok(()), |cause| Err(ImageError::Filler(cause)))
}

/// wasmtime's handle of a memory.
struct View(Arc<GuestMemory>);

// SAFETY: the base never moves. `capacity` bytes behind it stay reserved until this value is
// dropped, followed by a guard of the size that wasmtime was given (the slot is made with it).
// Exactly the first `byte_size` bytes (rounded up to host pages) are accessible.
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

/// The memories for an instantiation on this thread.
enum Scope {
    /// These memories, in order.
    Lay(Layout),
    /// New memories, which are recorded.
    Record(Vec<Arc<GuestMemory>>),
}

struct Layout {
    left: VecDeque<Arc<GuestMemory>>,
    owner: MemoryOwner,
    /// Requests after the last one was taken.
    beyond: usize,
}

/// The owner of the laid-out memories, which decides what code may run before the last of them is
/// made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryOwner {
    /// A module: wasmtime makes all memories of an instance before any of its code runs, so later
    /// requests belong to another instance.
    Module,
    /// A component: code of one of its modules may run before another's memories are made, so the
    /// owner of an excess request is unknown.
    Component,
}

thread_local! {
    /// Instantiations under way on this thread, the innermost last: a host function that a start
    /// function calls may make another instance.
    static SCOPES: RefCell<Vec<Scope>> = const { RefCell::new(Vec::new()) };
}

/// Runs `instantiate` inside of `scope`, and returns the scope afterwards.
fn within<R>(scope: Scope, instantiate: impl FnOnce() -> R) -> wasmtime::Result<(R, Scope)> {
    /// Leaves the scope, also when a host function panics.
    struct ScopeGuard(usize);
    impl Drop for ScopeGuard {
        fn drop(&mut self) {
            SCOPES.with_borrow_mut(|scopes| scopes.truncate(self.0));
        }
    }
    let depth = SCOPES.with_borrow_mut(|scopes| {
        scopes.push(scope);
        scopes.len() - 1
    });
    let leave = ScopeGuard(depth);
    let result = instantiate();
    let scope = SCOPES.with_borrow_mut(Vec::pop);
    drop(leave);
    scope.map(|scope| (result, scope)).ok_or_else(|| wasmtime::Error::msg("a scope was lost"))
}

/// Runs `instantiate` and returns the memories that it made, in order.
pub(crate) fn record_memories<R>(
    instantiate: impl FnOnce() -> wasmtime::Result<R>,
) -> wasmtime::Result<(R, Vec<Arc<GuestMemory>>)> {
    match within(Scope::Record(Vec::new()), instantiate)? {
        (result, Scope::Record(made)) => Ok((result?, made)),
        _ => Err(wasmtime::Error::msg("a scope was lost")),
    }
}

/// Runs `instantiate` with `memories` laid out for wasmtime to take, in the order in which it makes
/// them. Fails unless it requested exactly these: an instance would run on another's memory.
///
/// The memories are laid out on the polling thread during each poll: while the instantiation waits,
/// others may use that thread, and it may continue on another.
pub(crate) async fn with_memories<R>(
    memories: &[Arc<GuestMemory>],
    owner: MemoryOwner,
    instantiate: impl Future<Output = wasmtime::Result<R>>,
) -> wasmtime::Result<R> {
    let layout = Layout { left: memories.iter().cloned().collect(), owner, beyond: 0 };
    let lost = || wasmtime::Error::msg("a scope was lost");
    let mut scope = Some(Scope::Lay(layout));
    let mut instantiate = pin!(instantiate);
    let result = poll_fn(|context| {
        let entered = scope.take().ok_or_else(lost);
        match entered.and_then(|scope| within(scope, || instantiate.as_mut().poll(context))) {
            Ok((polled, left)) => {
                scope = Some(left);
                polled
            }
            Err(error) => Poll::Ready(Err(error)),
        }
    })
    .await?;
    let Some(Scope::Lay(layout)) = scope else { return Err(lost()) };
    if !layout.left.is_empty() || layout.beyond > 0 {
        return Err(wasmtime::Error::msg(format!(
            "the instance has {} memories laid out for it, left {} of them and requested {} \
             more, so none is known to be its own",
            memories.len(),
            layout.left.len(),
            layout.beyond
        )));
    }
    Ok(result)
}

/// The memory that the present instantiation has for this request; `None` if it must be made.
fn laid_out(asked: &Shape) -> Result<Option<Arc<GuestMemory>>, String> {
    SCOPES.with_borrow_mut(|scopes| {
        let Some(Scope::Lay(layout)) = scopes.last_mut() else { return Ok(None) };
        match layout.left.front() {
            Some(memory) if memory.answers(asked) => Ok(layout.left.pop_front()),
            Some(memory) => Err(format!(
                "wasmtime requests {asked:?} where {:?} is next, so no memory is known to be the \
                 right one",
                memory.shape
            )),
            None => {
                layout.beyond += usize::from(layout.owner == MemoryOwner::Component);
                Ok(None)
            }
        }
    })
}

/// The memory creator handed to wasmtime.
#[derive(Debug, Default)]
pub(crate) struct SlotMemories;

// SAFETY: every memory is a slot whose capacity and guards cover wasmtime's request; see `View`.
unsafe impl MemoryCreator for SlotMemories {
    fn new_memory(
        &self,
        ty: MemoryType,
        minimum: usize,
        _maximum: Option<usize>,
        reserved_size_in_bytes: Option<usize>,
        guard_size_in_bytes: usize,
    ) -> Result<Box<dyn LinearMemory>, String> {
        let space = Space::of_process();
        if guard_size_in_bytes > space.guard as usize
            || reserved_size_in_bytes.is_some_and(|r| r > space.reservation as usize)
        {
            return Err("wasmtime requests larger guards than slots have".to_owned());
        }
        // The guard distinguishes wasmtime's own heap for GC objects from guest memories: the
        // engine is configured with different sizes.
        let heap = guard_size_in_bytes as u64 == space.heap_guard();
        if !heap && guard_size_in_bytes as u64 != space.guard {
            return Err(format!(
                "wasmtime requests a guard of {guard_size_in_bytes} bytes, which no memory has"
            ));
        }
        let shape = Shape::from_type(&ty);
        if !heap && let Some(memory) = laid_out(&shape)? {
            return Ok(Box::new(View(memory)));
        }
        let policy = MemoryPolicy {
            strategy: Strategy::Discard,
            host_access: HostAccess::Threads,
            verify_every: None,
            memory64_capacity: space.reservation as usize,
            zero_source: None,
            waits: false,
        };
        let image = Image::zero(page_align_up(minimum) / PAGE_SIZE);
        let memory =
            GuestMemory::new(shape, &image, minimum, &policy).map_err(|error| error.to_string())?;
        if !heap {
            SCOPES.with_borrow_mut(|scopes| {
                if let Some(Scope::Record(made)) = scopes.last_mut() {
                    made.push(memory.clone());
                }
            });
        }
        Ok(Box::new(View(memory)))
    }
}
