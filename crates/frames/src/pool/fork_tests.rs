//! A forked child never waits for a lock that a thread of its parent held.

use std::sync::mpsc;

use crate::{Order, Pool, PoolOptions, Usage};

#[test]
fn a_child_waits_for_no_lock_of_its_parents_threads() {
    let mut options = PoolOptions::new(2048);
    options.background = None;
    let pool = Pool::new(options).unwrap();
    let (kept, unused) = (pool.take(Order::PAGE).unwrap().used(), pool.take(Order::PAGE).unwrap());
    let (held, is_held) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let pool = &pool;
        scope.spawn(move || {
            let _lists = pool.lists();
            held.send(()).unwrap();
            ended.recv().unwrap();
        });
        is_held.recv().unwrap();
        // SAFETY: the child calls methods of the pool that neither allocate nor lock.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends a child that waits.
            unsafe { libc::alarm(20) };
            pool.give(kept);
            pool.give_unused([unused]);
            let refused = pool.take(Order::PAGE).is_err()
                && pool.take_at(0, Order::PAGE).is_none()
                && pool.prefill(1).is_err();
            pool.pause(true);
            let good = refused && pool.trim(0) == 0 && pool.usage() == Usage::default();
            // SAFETY: ends the child without the parent's destructors.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        end.send(()).unwrap();
        let mut status = 0;
        // SAFETY: waits for the child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child waited for a lock, or got memory of its parent");
        assert_eq!(pool.usage().lent, 2, "the child gave nothing back here");
        pool.give(kept);
        pool.give_unused([unused]);
    });
    assert!(pool.usage().is_consistent());
}
