//! A forked child uses and drops a pool, whichever of its locks a thread of the parent held.

use afresh_sys::child_passes;

use crate::{Limits, OwnedLease, Pool, Recycle, ResetCost};

struct Item;

impl Recycle for Item {
    type Error = &'static str;

    fn key(&self) -> usize {
        0
    }

    fn recycle(&mut self) -> Result<ResetCost, Self::Error> {
        Ok(ResetCost::default())
    }

    fn reason(error: &Self::Error) -> &'static str {
        error
    }

    fn resident_bytes(&self) -> usize {
        0
    }

    fn trim(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }
}

fn make(_: Option<Item>) -> Result<Item, std::convert::Infallible> {
    Ok(Item)
}

#[test]
fn a_child_waits_for_no_lock_of_its_parents_pool() {
    let pool = Pool::<Item>::new(Limits { items: 64, ..Limits::default() });
    let state = pool.shared.clone();
    let in_use = OwnedLease::new(state.clone(), pool.get(0, make).unwrap());
    drop((0..2).map(|_| pool.get(0, make).unwrap()).collect::<Vec<_>>());
    let shards: Vec<_> = state.shards.iter().map(crate::shard::Shard::buckets).collect();
    let (failures, retired) = (state.failures.lock(), state.retired.lock());
    let mut own = Some((in_use, pool));
    assert!(child_passes(|| {
        let Some((in_use, pool)) = own.take() else { return false };
        drop(in_use);
        let leases: Vec<_> = (0..3).map(|_| pool.get(0, make).unwrap()).collect();
        drop(leases);
        let idle = pool.stats().idle;
        drop(pool);
        idle == 3
    }));
    drop((shards, failures, retired));
    drop(own);
}
