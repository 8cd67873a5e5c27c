//! The parts of the memory for bodies that tenants of sandboxes have.
//!
//! Promises: requests of one tenant, and answers to it, take at most half of the memory for bodies,
//! however slow its clients are; all requests that show no key or token take a quarter together.
//! Tenants cannot fill the memory together: each leaves at least as much free as it has. While `n`
//! of them take all they get, another gets `1 / (2 n + 2)` of the memory at once, and an equal
//! share as they give bytes back.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::budget::Budget;
use crate::lock::lock;

/// A tenant has at most one of so many parts.
const TENANT_PARTS: usize = 2;
/// Requests without a tenant have one of so many together.
const STRANGER_PARTS: usize = 4;

/// Tenants with parts before those without bytes lose them.
const MAX_PARTS: usize = 1024;

/// The memory for bodies, and the parts of it.
#[derive(Debug)]
pub(crate) struct BodyShares {
    whole: Budget,
    strangers: Budget,
    tenants: Mutex<HashMap<Arc<str>, Budget>>,
}

impl BodyShares {
    pub(crate) fn new(whole: &Budget) -> Arc<Self> {
        let strangers = whole.part(STRANGER_PARTS);
        Arc::new(Self { whole: whole.clone(), strangers, tenants: Mutex::default() })
    }

    /// The part of a tenant, or that of requests without one.
    pub(crate) fn of(&self, tenant: Option<&Arc<str>>) -> Budget {
        let Some(tenant) = tenant else { return self.strangers.clone() };
        let mut tenants = lock(&self.tenants);
        match tenants.get(tenant) {
            Some(part) => part.clone(),
            None => {
                if tenants.len() >= MAX_PARTS {
                    tenants.retain(|_, part| part.is_shared());
                }
                let part = self.whole.part(TENANT_PARTS);
                tenants.insert(tenant.clone(), part.clone());
                part
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_tenant_and_no_stranger_takes_the_memory_of_others() {
        let whole = Budget::new(100);
        let shares = BodyShares::new(&whole);
        let (one, two): (Arc<str>, Arc<str>) = ("one".into(), "two".into());
        let of = |tenant| shares.of(tenant).share();
        let mut all = [of(Some(&one)), of(Some(&one)), of(None), of(None), of(Some(&two))];
        assert!(all[0].add(50) && !all[1].add(1));
        assert!(all[2].add(25) && !all[3].add(1));
        assert!(all[4].add(12) && !all[4].add(1));
        assert_eq!(whole.used(), 87);
    }

    #[test]
    fn tenants_without_bytes_lose_their_parts() {
        let shares = BodyShares::new(&Budget::new(100));
        let own: Arc<str> = "own".into();
        let mut held = shares.of(Some(&own)).share();
        assert!(held.add(50));
        for number in 0..2 * MAX_PARTS {
            shares.of(Some(&number.to_string().into()));
        }
        assert!(lock(&shares.tenants).len() <= MAX_PARTS);
        assert!(!shares.of(Some(&own)).share().add(1), "its bytes do not count any more");
    }

    #[test]
    fn two_flooding_tenants_and_strangers_leave_room_for_a_third_tenant() {
        let shares = BodyShares::new(&Budget::new(1 << 20));
        let flooding: [Option<Arc<str>>; 3] = [Some("one".into()), Some("two".into()), None];
        let mut held: Vec<_> =
            flooding.iter().map(|tenant| shares.of(tenant.as_ref()).share()).collect();
        while held.iter_mut().map(|share| share.add(1 << 10)).filter(|took| *took).count() > 0 {}
        let third: Arc<str> = "three".into();
        let mut own = shares.of(Some(&third)).share();
        assert!(own.add(1 << 17) && !own.add(1 << 17));
        // The others end a request each.
        held.iter_mut()
            .zip(&flooding)
            .for_each(|(share, of)| *share = shares.of(of.as_ref()).share());
        assert!(own.add(1 << 17));
    }
}
