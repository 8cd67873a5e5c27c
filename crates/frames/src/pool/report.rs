//! Reports of a pool: the places of its pages, and its work.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Pool;
use crate::usage::{Usage, Work};
use crate::zeroer::ZeroerShared;

impl Pool {
    /// Where the pages are now. A forked child has none.
    #[must_use]
    pub fn usage(&self) -> Usage {
        if self.is_of_parent() {
            return Usage::default();
        }
        let lists = self.lists();
        Usage {
            clean: lists.clean.free_pages(),
            dirty: lists.dirty.free_pages(),
            zeroing: self.shared.handoff.pages(),
            absent: lists.absent.free_pages(),
            lent: lists.lent,
            moving: lists.moving,
            total: self.total,
        }
    }

    /// Work of the pool since it was made.
    #[must_use]
    pub fn work(&self) -> Work {
        let (huge_frames, small_frames) = self.shared.store.populated_as();
        let zeroer = self.background.as_ref().map(|(_, zeroer)| zeroer.shared());
        let of = |count: fn(&ZeroerShared) -> u64| zeroer.map_or(0, count);
        Work {
            zeroed_inline: self.counters.inline.load(Ordering::Relaxed),
            zeroed_background: of(|z| z.zeroed.load(Ordering::Relaxed)),
            background_cpu: Duration::from_nanos(of(|z| z.cpu_ns.load(Ordering::Relaxed))),
            populated: self.counters.populated.load(Ordering::Relaxed),
            trimmed: self.counters.trimmed.load(Ordering::Relaxed)
                + of(|z| z.punched.load(Ordering::Relaxed)),
            huge_frames,
            small_frames,
            quarantined: self.counters.lost.load(Ordering::Relaxed),
        }
    }
}
