//! The parts of the memory for bodies that tenants of sandboxes have.
//!
//! Promises: requests of one tenant, and answers to it, take at most half of the memory for bodies,
//! however slow its clients are; all requests that show no key or token take a quarter together.
//! May break it: tenants that fill the memory together.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::budget::Budget;
use crate::lock::lock;

/// A tenant has at most one of so many parts.
const TENANT_PARTS: usize = 2;
/// Requests without a tenant have one of so many together.
const STRANGER_PARTS: usize = 4;

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
        assert!(all[4].add(25));
        assert_eq!(whole.used(), 100);
    }
}
