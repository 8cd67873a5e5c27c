//! The heap: sizes rounded up to a power of two, a free list for each, new blocks from the front of
//! the region. The reset releases all leaks of a call.

use core::alloc::{GlobalAlloc, Layout};
use core::cell::UnsafeCell;
use core::ptr::null_mut;

const SMALLEST: usize = 16;
const CLASSES: usize = 33;

struct State {
    next: usize,
    end: usize,
    free: [usize; CLASSES],
}

/// The guest's only allocator.
pub struct Heap(UnsafeCell<State>);

// SAFETY: a guest has one thread and no interrupts.
unsafe impl Sync for Heap {}

#[global_allocator]
pub(crate) static HEAP: Heap = Heap(UnsafeCell::new(State { next: 0, end: 0, free: [0; CLASSES] }));

impl Heap {
    /// Gives the heap its memory.
    ///
    /// # Safety
    /// The memory is unused and this is called once, before any allocation.
    pub(crate) unsafe fn start(&self, base: usize, len: usize) {
        // SAFETY: one thread; nothing else refers to the state.
        let state = unsafe { &mut *self.0.get() };
        (state.next, state.end) = (base, base + len);
    }
}

/// The class whose blocks hold `layout`, each aligned to its size up to a page. Blocks of a page
/// and more waste at most what rounding up costs, since untouched pages cost nothing.
fn class(layout: Layout) -> usize {
    let size = layout.size().max(layout.align()).max(SMALLEST);
    size.next_power_of_two().trailing_zeros() as usize - SMALLEST.trailing_zeros() as usize
}

// SAFETY: blocks are disjoint, at least of the requested size and alignment.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: one thread; no reference outlives this function.
        let state = unsafe { &mut *self.0.get() };
        let class = class(layout);
        if class >= CLASSES {
            return null_mut();
        }
        let head = state.free[class];
        if head != 0 {
            // SAFETY: a free block holds the address of the next one in its first word.
            state.free[class] = unsafe { (head as *const usize).read() };
            return head as *mut u8;
        }
        let size = SMALLEST << class;
        let align = size.min(4096).max(layout.align());
        let start = state.next.next_multiple_of(align);
        // The last block may be cut to the requested size.
        match start.checked_add(layout.size()) {
            Some(end) if end <= state.end => {
                state.next = (start + size).min(state.end);
                start as *mut u8
            }
            _ => null_mut(),
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let class = class(layout);
        let start = block as usize;
        // SAFETY: one thread; no reference outlives this function.
        let state = unsafe { &mut *self.0.get() };
        if start + (SMALLEST << class) > state.end {
            return;
        }
        // SAFETY: the block is at least a word and no longer in use.
        unsafe { (block as *mut usize).write(state.free[class]) };
        state.free[class] = start;
    }
}

/// C's `malloc`, for C code linked into the guest.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc(size: usize) -> *mut u8 {
    let Some(total) = size.checked_add(16) else {
        return null_mut();
    };
    let Ok(layout) = Layout::from_size_align(total, 16) else {
        return null_mut();
    };
    // SAFETY: the layout is not empty.
    let block = unsafe { HEAP.alloc(layout) };
    if block.is_null() {
        return block;
    }
    // SAFETY: the block has 16 bytes more than requested.
    unsafe {
        (block as *mut usize).write(total);
        block.add(16)
    }
}

/// C's `free`.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(pointer: *mut u8) {
    if pointer.is_null() {
        return;
    }
    // SAFETY: `malloc` put the total size 16 bytes in front.
    unsafe {
        let block = pointer.sub(16);
        let total = (block as *const usize).read();
        HEAP.dealloc(block, Layout::from_size_align_unchecked(total, 16));
    }
}

/// C's `calloc`.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn calloc(count: usize, size: usize) -> *mut u8 {
    let Some(total) = count.checked_mul(size) else {
        return null_mut();
    };
    // SAFETY: as in C.
    let pointer = unsafe { malloc(total) };
    if !pointer.is_null() {
        // SAFETY: the block holds `total` bytes.
        unsafe { pointer.write_bytes(0, total) };
    }
    pointer
}

/// C's `realloc`.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(pointer: *mut u8, size: usize) -> *mut u8 {
    // SAFETY: as in C; `malloc` put the total size 16 bytes in front.
    unsafe {
        let new = malloc(size);
        if !pointer.is_null() && !new.is_null() {
            let old = (pointer.sub(16) as *const usize).read() - 16;
            core::ptr::copy_nonoverlapping(pointer, new, old.min(size));
            free(pointer);
        }
        new
    }
}
