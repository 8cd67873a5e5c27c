//! An item is out of its pool while it is trimmed. A thread that waits then gets it afterwards.

use std::convert::Infallible;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use afresh_pool::{Budget, LimitPolicy, Limits, Pool, ProcessLimits, Recycle, ResetCost};

/// An item that reports the start of its trimming, and ends it at a message.
struct Item {
    begun: Sender<()>,
    end: Receiver<()>,
}

impl Recycle for Item {
    type Error = Infallible;
    fn key(&self) -> usize {
        1
    }
    fn recycle(&mut self) -> Result<ResetCost, Infallible> {
        Ok(ResetCost::default())
    }
    fn resident_bytes(&self) -> usize {
        4096
    }
    fn trim(&mut self) -> Result<(), Infallible> {
        self.begun.send(()).unwrap();
        self.end.recv().unwrap();
        Ok(())
    }
}

/// Disables the trimming of items under memory pressure of the host.
fn leave_items_alone() {
    Budget::process().set(ProcessLimits { pressure: None, ..ProcessLimits::default() });
}

#[test]
fn a_thread_that_waits_gets_the_item_that_was_trimmed() {
    const TRIM_TIMEOUT: Duration = Duration::from_secs(20);
    leave_items_alone();
    let exhausted = LimitPolicy::Wait(TRIM_TIMEOUT);
    let pool = Pool::new(Limits { items: 1, exhausted, ..Limits::default() });
    let ((began, begun), (end, ended)) = (channel(), channel());
    drop(pool.get(1, |_| Ok::<_, Infallible>(Item { begun: began, end: ended })).unwrap());
    std::thread::scope(|scope| {
        let trimming = scope.spawn(|| pool.trim_idle(0));
        begun.recv().unwrap();
        let waiting = scope.spawn(|| pool.get(1, |_| -> Result<Item, Infallible> { panic!() }));
        // Time to begin to wait. The test passes without it, but then it shows less.
        std::thread::sleep(Duration::from_millis(50));
        let trimmed = Instant::now();
        end.send(()).unwrap();
        let lease = waiting.join().unwrap();
        // It keeps the item: one that comes back during the trimming is trimmed again.
        assert_eq!(trimming.join().unwrap(), 1);
        assert!(lease.is_ok());
        // At the end of its time it looks once more, and finds the item without a signal.
        assert!(trimmed.elapsed() < TRIM_TIMEOUT / 2, "it waited for another return");
    });
}

#[test]
fn at_the_limit_the_other_idle_items_are_handed_out_while_one_is_trimmed() {
    leave_items_alone();
    for exhausted in [LimitPolicy::Error, LimitPolicy::OnDemand] {
        let pool = Pool::new(Limits { items: 2, exhausted, ..Limits::default() });
        let (began, begun) = channel();
        let (ends, items): (Vec<_>, Vec<_>) = [channel(), channel()]
            .map(|(end, ended)| (end, Item { begun: began.clone(), end: ended }))
            .into_iter()
            .unzip();
        let leases: Vec<_> =
            items.into_iter().map(|item| pool.get(1, |_| Ok::<_, Infallible>(item))).collect();
        drop(leases);
        let get = || pool.get(1, |_| -> Result<Item, Infallible> { panic!("another item") });
        std::thread::scope(|scope| {
            let trimming = scope.spawn(|| pool.trim_idle(0));
            begun.recv().unwrap();
            let first = get();
            // It keeps the item: one that comes back during the trimming is trimmed again.
            let second = scope.spawn(get);
            // Time to look for it, as above.
            std::thread::sleep(Duration::from_millis(50));
            for end in &ends {
                end.send(()).unwrap();
            }
            let second = second.join().unwrap();
            assert_eq!(trimming.join().unwrap(), 1);
            assert!(first.is_ok() && second.is_ok());
        });
    }
}
