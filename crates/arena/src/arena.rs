//! The arena: a range of memory that is zero at every start, grows, shrinks, and is reset by
//! dropping its view of pool frames.
//!
//! ```text
//!   base                                   size                       max
//!    |  huge page 0  |  huge page 1  |  huge page 2  | ..|                          |
//!    |  frame    |  frame    |  kernel   |   |      inaccessible        |
//! ```
//!
//! Promises: every byte below [`Arena::pages`] reads as zero after growth and after a reset,
//! regardless of its earlier content; no byte above it is accessible. With [`CommitPolicy::Now`],
//! memory that [`Arena::grow`] returned can be touched without any signal for want of memory.
//!
//! A forked child has inaccessible memory in place of an arena, and every operation there fails.
//!
//! May break it: with [`CommitPolicy::OnTouch`], a system call that is given memory not yet touched
//! fails with `EFAULT` (call [`Arena::touch`] first), and so does the process if another library
//! takes SIGSEGV without passing it on.

use std::sync::Arc;

use afresh_frames::Pool;
use afresh_sys::{PAGE_SIZE, PageRange, fault};

use crate::ArenaError;
use crate::map::{Growth, View};

/// When an arena takes its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommitPolicy {
    /// At growth and reset: no fault signals, and running out is an error there and then.
    #[default]
    Now,
    /// At the first touch of each 2 MiB, by a fault signal that the arena answers. Memory that the
    /// pool lacks then comes from the kernel, by the kernel's rules for overcommitment.
    OnTouch,
}

/// Options of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaOptions {
    /// Maximum pages it may grow to; address space only.
    pub max: usize,
    /// When memory is taken.
    pub commit: CommitPolicy,
    /// Whether the arena learns from its last cycles: huge pages that prove sparse get the kernel's
    /// 4 KiB pages instead of 2 MiB frames (overcommitted, as all anonymous memory is), and with
    /// [`CommitPolicy::OnTouch`] pages touched in the last cycle are mapped beforehand.
    pub adapt: bool,
    /// Largest window mapped by one fault, in huge pages.
    pub window: usize,
}

impl ArenaOptions {
    /// An arena of at most `max` pages whose memory is there when growth returns.
    #[must_use]
    pub fn committed(max: usize) -> Self {
        Self { max, commit: CommitPolicy::Now, adapt: false, window: 1 }
    }

    /// An arena of at most `max` pages that takes memory as it is touched, in windows of up to
    /// 128 MiB, and learns which parts are sparse.
    #[must_use]
    pub fn on_touch(max: usize) -> Self {
        Self { max, commit: CommitPolicy::OnTouch, adapt: true, window: 64 }
    }
}

/// The memory of an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaUsage {
    /// 2 MiB frames of the pool.
    pub frames: usize,
    /// Huge pages on the kernel's own pages.
    pub kernel_huge_pages: usize,
    /// Huge pages that have proved sparse, mapped or not.
    pub sparse_huge_pages: usize,
}

/// Memory that is zero at every start.
#[derive(Debug)]
pub struct Arena {
    // Dropped first: no handler may run in an arena that is going away.
    registration: Option<fault::Registration>,
    view: Arc<View>,
    commit: CommitPolicy,
}

impl Arena {
    /// Makes an empty arena.
    ///
    /// # Errors
    /// When address space or signal handlers are unavailable.
    pub fn new(pool: Arc<Pool>, options: ArenaOptions) -> Result<Self, ArenaError> {
        let view = Arc::new(View::new(pool, options)?);
        let registration = match options.commit {
            CommitPolicy::Now => None,
            CommitPolicy::OnTouch => {
                let len = view.max_pages() * PAGE_SIZE;
                Some(fault::register(view.base(), len, view.clone())?)
            }
        };
        Ok(Self { registration, view, commit: options.commit })
    }

    /// The first byte. The memory is volatile: other threads and guests may write it, so access
    /// goes through raw pointers.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.view.base()
    }

    /// Accessible pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.view.pages()
    }

    /// Maximum pages it may grow to.
    #[must_use]
    pub fn max_pages(&self) -> usize {
        self.view.max_pages()
    }

    /// Fault signals answered so far.
    #[must_use]
    pub fn faults(&self) -> usize {
        self.view.faults()
    }

    /// The present memory.
    #[must_use]
    pub fn usage(&self) -> ArenaUsage {
        self.view.usage()
    }

    /// Whether this is a child of the process that made the arena.
    #[inline]
    pub(crate) fn is_of_parent(&self) -> bool {
        self.view.is_of_parent()
    }

    /// The accessible pages that may hold anything but zeros.
    pub(crate) fn present(&self) -> Vec<PageRange> {
        self.view.present()
    }

    /// Adds `pages` zero pages at the end; returns how many there were before.
    ///
    /// # Errors
    /// Beyond the maximum, or when memory ran out; the arena is as before then.
    pub fn grow(&mut self, pages: usize) -> Result<usize, ArenaError> {
        let old = self.pages();
        let max = self.max_pages();
        let new = old.saturating_add(pages);
        if new > max {
            return Err(ArenaError::Full { wanted: new, max });
        }
        self.view.set_pages(new)?;
        let result = match self.commit {
            CommitPolicy::Now => self.view.fill(PageRange::new(old, pages), Growth::Allowed),
            CommitPolicy::OnTouch => self
                .view
                .prefill(pages)
                .and_then(|()| self.view.anticipate(PageRange::new(old, pages))),
        };
        if let Err(error) = result {
            self.view.set_pages(old)?;
            return Err(error);
        }
        Ok(old)
    }

    /// Takes `pages` pages off the end and drops their content.
    ///
    /// # Errors
    /// When the kernel cannot unmap them; their memory is withdrawn from the pool then.
    pub fn shrink(&mut self, pages: usize) -> Result<(), ArenaError> {
        self.view.set_pages(self.pages().saturating_sub(pages))
    }

    /// Makes every byte zero again; the size stays.
    ///
    /// # Errors
    /// When memory for [`CommitPolicy::Now`] ran out, or the kernel refused; the arena is empty
    /// then. One that the kernel did not clear is refused from then on ([`ArenaError::Unclean`]).
    pub fn reset(&mut self) -> Result<(), ArenaError> {
        let size = self.pages();
        self.view.drop_all()?;
        self.view.set_pages(size)?;
        let all = PageRange::new(0, size);
        let filled = match self.commit {
            CommitPolicy::Now => self.view.fill(all, Growth::Allowed),
            CommitPolicy::OnTouch => self.view.anticipate(all),
        };
        if let Err(error) = filled {
            self.view.set_pages(0)?;
            return Err(error);
        }
        Ok(())
    }

    /// Gives everything back: the size is zero afterwards. Cheaper than a reset when the arena is
    /// not used again at once.
    ///
    /// # Errors
    /// When the kernel cannot unmap the memory; it is withdrawn from the pool then.
    pub fn clear(&mut self) -> Result<(), ArenaError> {
        self.view.drop_all()
    }

    /// Makes a range present, so that a system call may be given it.
    ///
    /// # Errors
    /// `Full` when the range is not inside the arena, or when memory ran out.
    pub fn touch(&self, range: PageRange) -> Result<(), ArenaError> {
        let wanted = range.start.saturating_add(range.len);
        if wanted > self.pages() {
            return Err(ArenaError::Full { wanted, max: self.pages() });
        }
        self.view.fill(range, Growth::Allowed)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.registration = None;
        // On failure the frames are withdrawn; the reservation unmaps everything either way.
        let _ = self.view.drop_all();
    }
}
