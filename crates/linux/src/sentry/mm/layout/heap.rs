//! The heap of a process: the memory below its break.

use super::{CEILING, Layout, PAGE, READ_WRITE};
use crate::sentry::mm::stub_calls::{Change, map_call, unmap_call};

impl Layout {
    /// Sets where the break begins. Without room below the mappings of `mmap` it cannot grow.
    pub(crate) fn start_heap(&mut self, at: u64) {
        let at = at.min(CEILING);
        self.heap = at;
        self.brk = at;
    }

    /// The end of the heap.
    pub(in crate::sentry) fn brk(&self) -> u64 {
        self.brk
    }

    /// `brk`: the new break, or the old one if it is not possible.
    pub(crate) fn set_brk(&mut self, brk: u64) -> (u64, Change) {
        let old = self.brk.next_multiple_of(PAGE);
        let mut change = Change::default();
        if brk < self.heap || brk > CEILING {
            return (self.brk, change);
        }
        let new = brk.next_multiple_of(PAGE);
        if new > old {
            let grow = |layout: &mut Self| layout.insert(old..new, READ_WRITE, false);
            let fits = self.check_change(&[&(old..new)], self.growth(&(old..new), 1), grow);
            if self.touches(&(old..new)) || fits.and(self.afford(new - old, false)).is_err() {
                return (self.brk, change);
            }
            grow(self);
            if self.locks_new && self.set_locked(&(old..new), true).is_err() {
                self.remove(&(old..new));
                return (self.brk, change);
            }
            change.before.push(map_call(old, new - old, READ_WRITE));
        } else if new < old {
            let range = new..old;
            if self.check_room(self.growth(&range, 0)).and(self.check_seals(&range)).is_err() {
                return (self.brk, change);
            }
            self.remove(&range);
            change.before.push(unmap_call(new, old - new));
        }
        self.brk = brk;
        (brk, change)
    }
}
