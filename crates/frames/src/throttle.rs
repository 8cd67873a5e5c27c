//! A source that stops supplying users that waste its memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use afresh_sys::{PageRange, Reservation, SysError, ZeroPageSource};

/// Maximum consecutive requests that go unserved.
const MAX_REFUSALS: u32 = 1024;

/// Stands between a source and users of one kind, such as the slots of one guest. When more of the
/// supplied memory was wasted than used, requests go unserved for a while: one, and twice as many
/// each time it happens again.
#[derive(Debug)]
pub struct ThrottledSource {
    source: Arc<dyn ZeroPageSource>,
    /// Requests yet to go unserved, and how many the next waste will cost.
    pause: AtomicU32,
    next: AtomicU32,
}

impl ThrottledSource {
    /// Serves from `source`.
    #[must_use]
    pub fn new(source: Arc<dyn ZeroPageSource>) -> Self {
        Self { source, pause: 0.into(), next: 1.into() }
    }
}

// SAFETY: moves nothing, or what the source behind it moves.
unsafe impl ZeroPageSource for ThrottledSource {
    fn supply(&self, memory: &Reservation, range: PageRange) -> Result<usize, SysError> {
        let less = |left: u32| left.checked_sub(1);
        if self.pause.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
            return Ok(0);
        }
        self.source.supply(memory, range)
    }

    fn report_use(&self, used: usize, wasted: usize) {
        if used >= wasted {
            self.next.store(1, Ordering::Relaxed);
        } else {
            let pause = self.next.load(Ordering::Relaxed);
            self.pause.store(pause, Ordering::Relaxed);
            self.next.store((pause * 2).min(MAX_REFUSALS), Ordering::Relaxed);
        }
        self.source.report_use(used, wasted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Supplies nothing, and counts the requests.
    #[derive(Debug, Default)]
    struct Count(AtomicU32);

    // SAFETY: moves nothing.
    unsafe impl ZeroPageSource for Count {
        fn supply(&self, _: &Reservation, _: PageRange) -> Result<usize, SysError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(0)
        }
    }

    #[test]
    fn a_consumer_that_wastes_pages_is_supplied_less_often_until_it_uses_them() {
        let count = Arc::new(Count::default());
        let throttled = ThrottledSource::new(count.clone());
        let memory = Reservation::new(1).unwrap();
        let served = |requests: u32| {
            let before = count.0.load(Ordering::Relaxed);
            for _ in 0..requests {
                throttled.supply(&memory, PageRange::new(0, 1)).unwrap();
            }
            count.0.load(Ordering::Relaxed) - before
        };
        assert_eq!(served(3), 3);
        for pause in [1, 2, 4, 8] {
            throttled.report_use(0, 512);
            assert_eq!(served(pause), 0);
            assert_eq!(served(2), 2);
        }
        throttled.report_use(512, 512);
        assert_eq!(served(2), 2);
        throttled.report_use(0, 512);
        assert_eq!(served(3), 2);
    }
}
