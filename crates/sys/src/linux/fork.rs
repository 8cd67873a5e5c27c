//! Noticing `fork`: a child inherits memory but not threads, not the protection of userfaultfd, and
//! it should not inherit secrets. Code that depends on such things compares generations, or keeps
//! them in a [`crate::PerProcess`].
//!
//! The kernel itself marks the child: a page with `MADV_WIPEONFORK` reads as zero in a child, for
//! every kind of fork, by any library. No system call is needed to look. Where the kernel cannot
//! mark a page, a handler of the C library's `fork` clears the word instead; it misses children
//! made by a bare system call.

use std::cell::Cell;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use crate::InheritedCell;

/// The word that a child finds cleared: this process's generation, or 0 when it was not settled
/// yet.
static WORD: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
/// The last generation that was given out, by this process or those it descends from.
static LAST: AtomicU32 = AtomicU32::new(0);
/// The word where no page can be marked.
static PLAIN: AtomicU32 = AtomicU32::new(0);

/// A number that differs between this process and every process that it descends from. Never zero.
/// May be called in a signal handler, and takes two loads.
#[inline]
#[must_use]
pub fn generation() -> u32 {
    let word = WORD.load(Ordering::Acquire);
    // SAFETY: a value published in `WORD` is never freed.
    match unsafe { word.as_ref() }.map_or(0, |word| word.load(Ordering::Acquire)) {
        0 => settle(),
        generation => generation,
    }
}

/// The number of forks through the C library, in this process and its ancestors.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// Whether that is counted.
static FORK_HOOK: InheritedCell<bool> = InheritedCell::new();

/// When something was made that children share: memory of a file, which they see change and vanish
/// with their parent.
///
/// A child made by a bare system call is not counted. It must not outlive the parent's resources
/// that it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epoch {
    generation: u32,
    forks: u32,
}

impl Epoch {
    /// Now, in this process.
    #[must_use]
    pub fn now() -> Self {
        // SAFETY: the handler only adds to an atomic.
        let hook = || unsafe { libc::pthread_atfork(Some(count), None, None) } == 0;
        let forks = match FORK_HOOK.get_or_make(hook) {
            true => FORKS.load(Ordering::Acquire),
            // Out of memory for the handler, nothing is known of children: no two epochs are equal.
            false => FORKS.fetch_add(1, Ordering::AcqRel),
        };
        Self { generation: generation(), forks }
    }

    /// Whether values made then exist only here: this process made them, and has not forked since.
    #[must_use]
    pub fn is_current(self) -> bool {
        self == Self::now()
    }
}

std::thread_local! {
    /// Whether forks of this thread now run another program at once.
    static EXECUTES: Cell<bool> = const { Cell::new(false) };
}

extern "C" fn count() {
    if !EXECUTES.with(Cell::get) {
        FORKS.fetch_add(1, Ordering::AcqRel);
    }
}

/// Does `work`, during which every fork of this thread runs another program at once, and so shares
/// nothing.
pub fn to_execute<T>(work: impl FnOnce() -> T) -> T {
    let before = EXECUTES.replace(true);
    let done = work();
    EXECUTES.set(before);
    done
}

/// Gives this process its number.
#[cold]
fn settle() -> u32 {
    let word = word();
    loop {
        // Overflow would take four billion forks in a row, each of the last one's child.
        let next = LAST.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        if next == 0 {
            continue;
        }
        return match word.compare_exchange(0, next, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => next,
            Err(settled) => settled,
        };
    }
}

/// The word, made when it is first needed.
fn word() -> &'static AtomicU32 {
    let present = WORD.load(Ordering::Acquire);
    // SAFETY: as in `generation`.
    if let Some(word) = unsafe { present.as_ref() } {
        return word;
    }
    let new = marked_page().unwrap_or_else(|| {
        // SAFETY: the handler only stores to an atomic. Out of memory for it, a child goes
        // unnoticed, as it would without this module.
        unsafe { libc::pthread_atfork(None, None, Some(clear)) };
        (&raw const PLAIN).cast_mut()
    });
    match WORD.compare_exchange(std::ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: neither `PLAIN` nor the page is ever freed.
        Ok(_) => unsafe { &*new },
        Err(present) => {
            if !std::ptr::eq(new, &raw const PLAIN) {
                // SAFETY: the page was just mapped, and is not shared yet.
                unsafe { libc::munmap(new.cast(), crate::PAGE_SIZE) };
            }
            // SAFETY: as in `generation`.
            unsafe { &*present }
        }
    }
}

extern "C" fn clear() {
    PLAIN.store(0, Ordering::Release);
}

/// A page that reads as zero in every child, or `None` where the kernel does not do that (before
/// Linux 4.14).
fn marked_page() -> Option<*mut AtomicU32> {
    // SAFETY: a new private mapping at an address that the kernel chooses disturbs nothing; it is
    // released again when it cannot be marked, before it is shared.
    unsafe {
        let page = libc::mmap(
            std::ptr::null_mut(),
            crate::PAGE_SIZE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        if page == libc::MAP_FAILED {
            return None;
        }
        if libc::madvise(page, crate::PAGE_SIZE, libc::MADV_WIPEONFORK) != 0 {
            libc::munmap(page, crate::PAGE_SIZE);
            return None;
        }
        Some(page.cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PerProcess;

    static COUNT: AtomicU32 = AtomicU32::new(0);
    static CELL: PerProcess<u32> = PerProcess::new(|| COUNT.fetch_add(1, Ordering::Relaxed));

    /// Runs `check` in a child made by `make`, and in a child of that one.
    fn in_children(make: fn() -> libc::pid_t, check: fn(u32, u32) -> bool) {
        let (parent, value) = (generation(), *CELL.get());
        let child = make();
        if child == 0 {
            let mine = (generation(), *CELL.get());
            let good = check(parent, mine.0) && mine.1 != value && generation() == mine.0;
            let grandchild = make();
            if grandchild == 0 {
                let good = check(mine.0, generation()) && check(parent, generation());
                // SAFETY: ends the grandchild and nothing else.
                unsafe { libc::_exit(i32::from(!good)) };
            }
            let good = good && ended_well(grandchild);
            // SAFETY: ends the child and nothing else.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        assert!(ended_well(child));
        assert_eq!((generation(), *CELL.get()), (parent, value), "the parent is as it was");
    }

    fn ended_well(child: libc::pid_t) -> bool {
        let mut status = 0;
        // SAFETY: waits for a child of this process.
        let ended = unsafe { libc::waitpid(child, &mut status, 0) };
        ended == child && status == 0
    }

    #[test]
    fn a_child_has_another_generation_and_its_own_values() {
        // SAFETY: the child calls async-signal-safe functions and the allocator, whose locks `fork`
        // keeps whole.
        in_children(|| unsafe { libc::fork() }, |of, mine| of != mine);
    }

    #[test]
    fn values_from_before_a_fork_are_shared() {
        let before = Epoch::now();
        // SAFETY: as above.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let good = !before.is_current() && Epoch::now().is_current();
            // SAFETY: ends the child and nothing else.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        assert!(ended_well(child));
        assert!(!before.is_current());
        assert!(to_execute(|| EXECUTES.get()) && !EXECUTES.get());
    }

    #[test]
    fn a_child_that_the_c_library_does_not_know_of_is_noticed_too() {
        let made = marked_page();
        if made.is_none() {
            println!("SKIPPED: MADV_WIPEONFORK is unavailable");
            return;
        }
        // Made before, so that the child needs no allocator.
        let parent = generation();
        // SAFETY: as `fork`, without the handlers of the C library; the child only looks at a
        // number.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
        if child == 0 {
            let good = generation() != parent;
            // SAFETY: ends the child and nothing else.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        assert!(ended_well(child as libc::pid_t));
    }
}
