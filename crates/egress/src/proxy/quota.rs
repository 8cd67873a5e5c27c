//! How many proxies there may be at a time: of one guest, and of this process. Each has a thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum proxies of this process.
const MAX_PROXIES: usize = 2048;
/// Maximum proxies of one guest.
const MAX_GUEST_PROXIES: usize = 64;

static PROXIES: AtomicUsize = AtomicUsize::new(0);

/// The proxies of one guest: at most 64 at a time. Clones share the count. A proxy counts until its
/// thread has ended, also after a reset.
#[derive(Clone, Debug, Default)]
pub struct ProxyQuota(Arc<AtomicUsize>);

/// One of the proxies of a guest and of this process.
#[derive(Debug)]
pub(super) struct ProxyPermit(ProxyQuota);

impl ProxyQuota {
    /// A permit for one more proxy, unless there are too many.
    pub(super) fn permit(&self) -> Option<ProxyPermit> {
        let of_guest = self.0.fetch_add(1, Ordering::Relaxed);
        let of_process = PROXIES.fetch_add(1, Ordering::Relaxed);
        let permit = ProxyPermit(self.clone());
        (of_guest < MAX_GUEST_PROXIES && of_process < MAX_PROXIES).then_some(permit)
    }
}

impl Drop for ProxyPermit {
    fn drop(&mut self) {
        PROXIES.fetch_sub(1, Ordering::Relaxed);
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_has_no_more_than_its_proxies() {
        let (quota, other) = (ProxyQuota::default(), ProxyQuota::default());
        let mut permits: Vec<_> = (0..MAX_GUEST_PROXIES).filter_map(|_| quota.permit()).collect();
        assert_eq!(permits.len(), MAX_GUEST_PROXIES);
        assert!(quota.permit().is_none() && quota.clone().permit().is_none());
        assert!(other.permit().is_some());
        permits.pop();
        assert!(quota.permit().is_some());
    }
}
