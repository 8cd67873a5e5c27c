//! Limits on proxies at a time, each of which has a thread: of one guest, and of this process.
//!
//! Promises: no owner keeps others from their proxies. Where an owner with fewer proxies gets no
//! free place, the owner with the most gives one up: the proxy that waits longest for a request, or
//! else the one whose request is the oldest. May break it: a resolver that does not respond keeps
//! the threads of such proxies. So at most [`MAX_ENDING`] of them end at a time.

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::owner::ConnectionOwner;
use crate::shared_limit::{LimitReached, SharedLimit, SharedPlace};

/// Maximum proxies of one guest.
const MAX_GUEST_PROXIES: usize = 64;
/// Maximum proxies that have given up their place and have not ended.
const MAX_ENDING: usize = 256;

/// The places of this process.
static PLACES: SharedLimit = SharedLimit::new(2048);
static PROXIES: OpenProxies = OpenProxies::new(&PLACES);

/// The proxies of one guest: at most 64 at a time. Clones share the count. A proxy counts until its
/// thread has ended, also after a reset.
#[derive(Clone, Debug, Default)]
pub struct ProxyQuota(Arc<AtomicUsize>);

/// One of the proxies of a guest and of this process.
#[derive(Debug)]
pub(super) struct ProxyPermit {
    quota: ProxyQuota,
    proxies: &'static OpenProxies,
    number: u64,
    proxy: Arc<OpenProxy>,
}

/// A proxy, as other threads see it.
#[derive(Debug)]
struct OpenProxy {
    /// The proxy's end of the pair with the guest.
    socket: Arc<UnixStream>,
    state: Mutex<ProxyState>,
}

#[derive(Debug)]
struct ProxyState {
    /// The place, unless the proxy has given it up.
    place: Option<SharedPlace>,
    /// Whether it waits for a request.
    is_idle: bool,
    /// When that began, or the request.
    since: Instant,
}

/// The proxies of a process.
#[derive(Debug)]
struct OpenProxies {
    limit: &'static SharedLimit,
    list: Mutex<ProxyList>,
}

#[derive(Debug)]
struct ProxyList {
    next: u64,
    by_owner: BTreeMap<ConnectionOwner, BTreeMap<u64, Arc<OpenProxy>>>,
    /// Proxies that have given up their place and have not ended.
    ending: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl OpenProxy {
    fn note(&self, is_idle: bool) {
        let mut state = lock(&self.state);
        (state.is_idle, state.since) = (is_idle, Instant::now());
    }
}

impl OpenProxies {
    const fn new(limit: &'static SharedLimit) -> Self {
        let list = ProxyList { next: 0, by_owner: BTreeMap::new(), ending: 0 };
        Self { limit, list: Mutex::new(list) }
    }

    /// A place for `owner`, which another owner may give up for it.
    fn place(
        &self,
        owner: &ConnectionOwner,
        list: &mut ProxyList,
    ) -> Result<SharedPlace, LimitReached> {
        self.limit.take(owner).or_else(|refusal| {
            let richest = self.limit.owner_with_more(owner).ok_or_else(|| refusal.clone())?;
            list.give_up(&richest).map(|place| place.moved_to(owner)).ok_or(refusal)
        })
    }

    /// Counts a proxy of `owner` with this end of the pair with its guest.
    fn add(
        &'static self,
        owner: &ConnectionOwner,
        quota: &ProxyQuota,
        socket: Arc<UnixStream>,
    ) -> Result<ProxyPermit, LimitReached> {
        let mut list = lock(&self.list);
        let place = Some(self.place(owner, &mut list)?);
        let state = ProxyState { place, is_idle: true, since: Instant::now() };
        let proxy = Arc::new(OpenProxy { socket, state: Mutex::new(state) });
        let number = list.next;
        list.next += 1;
        list.by_owner.entry(owner.clone()).or_default().insert(number, proxy.clone());
        Ok(ProxyPermit { quota: quota.clone(), proxies: self, number, proxy })
    }
}

impl ProxyList {
    /// Ends a proxy of `owner`, and returns its place.
    fn give_up(&mut self, owner: &ConnectionOwner) -> Option<SharedPlace> {
        if self.ending >= MAX_ENDING {
            return None;
        }
        let proxies = self.by_owner.get_mut(owner)?;
        let rank = |proxy: &OpenProxy| {
            let state = lock(&proxy.state);
            (!state.is_idle, state.since)
        };
        let (number, _) = proxies.iter().min_by_key(|(_, proxy)| rank(proxy))?;
        let number = *number;
        let proxy = proxies.remove(&number)?;
        let place = lock(&proxy.state).place.take()?;
        self.ending += 1;
        // A failure leaves a thread that ends with its guest's end.
        let _ = proxy.socket.shutdown(Shutdown::Both);
        Some(place)
    }
}

impl ProxyQuota {
    /// A permit for one more proxy of the present owner, unless there are too many.
    pub(super) fn permit(&self, socket: Arc<UnixStream>) -> Result<ProxyPermit, String> {
        if self.0.fetch_add(1, Ordering::Relaxed) >= MAX_GUEST_PROXIES {
            self.0.fetch_sub(1, Ordering::Relaxed);
            return Err(format!("the guest has {MAX_GUEST_PROXIES} proxied connections already"));
        }
        PROXIES.add(&ConnectionOwner::present(), self, socket).map_err(|refusal| {
            self.0.fetch_sub(1, Ordering::Relaxed);
            format!("too many proxied connections: {refusal}")
        })
    }
}

impl ProxyPermit {
    /// Notes that a request has begun.
    pub(super) fn note_request(&self) {
        self.proxy.note(false);
    }

    /// Notes that the proxy waits for a request.
    pub(super) fn note_idle(&self) {
        self.proxy.note(true);
    }

    /// Whether the proxy ends because another owner has its place.
    pub(super) fn has_given_up(&self) -> bool {
        lock(&self.proxy.state).place.is_none()
    }
}

impl Drop for ProxyPermit {
    fn drop(&mut self) {
        let mut list = lock(&self.proxies.list);
        match lock(&self.proxy.state).place.take() {
            Some(place) => {
                if let Some(proxies) = list.by_owner.get_mut(place.owner()) {
                    proxies.remove(&self.number);
                    if proxies.is_empty() {
                        list.by_owner.remove(place.owner());
                    }
                }
            }
            None => list.ending -= 1,
        }
        self.quota.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn proxies(places: usize) -> &'static OpenProxies {
        let limit = Box::leak(Box::new(SharedLimit::new(places)));
        Box::leak(Box::new(OpenProxies::new(limit)))
    }

    fn owners() -> (ConnectionOwner, ConnectionOwner) {
        (ConnectionOwner::new("one"), ConnectionOwner::new("two"))
    }

    /// A proxy, and its guest's end, which does not block.
    fn open(
        proxies: &'static OpenProxies,
        owner: &ConnectionOwner,
    ) -> Option<(ProxyPermit, UnixStream)> {
        let (guest, own) = UnixStream::pair().unwrap();
        guest.set_nonblocking(true).unwrap();
        Some((proxies.add(owner, &ProxyQuota::default(), Arc::new(own)).ok()?, guest))
    }

    fn fill(
        proxies: &'static OpenProxies,
        owner: &ConnectionOwner,
    ) -> Vec<(ProxyPermit, UnixStream)> {
        std::iter::from_fn(|| open(proxies, owner)).collect()
    }

    fn has_ended(guest: &mut UnixStream) -> bool {
        matches!(guest.read(&mut [0]), Ok(0))
    }

    #[test]
    fn a_guest_has_no_more_than_its_proxies() {
        let (quota, other) = (ProxyQuota::default(), ProxyQuota::default());
        let socket = Arc::new(UnixStream::pair().unwrap().0);
        let permit = |quota: &ProxyQuota| quota.permit(socket.clone());
        let mut permits: Vec<_> =
            (0..MAX_GUEST_PROXIES).filter_map(|_| permit(&quota).ok()).collect();
        assert_eq!(permits.len(), MAX_GUEST_PROXIES);
        let refusal = permit(&quota).unwrap_err();
        assert!(refusal.contains("the guest has 64"), "{refusal}");
        assert!(permit(&quota.clone()).is_err() && permit(&other).is_ok());
        permits.pop();
        assert!(permit(&quota).is_ok());
    }

    #[test]
    fn an_owner_with_idle_proxies_gives_places_to_another() {
        let (proxies, (one, two)) = (proxies(16), owners());
        let mut first = fill(proxies, &one);
        assert_eq!(first.len(), 12);
        let second = fill(proxies, &two);
        let ended: Vec<_> = first.iter_mut().map(|(_, guest)| has_ended(guest)).collect();
        let count = ended.iter().filter(|ended| **ended).count();
        assert!(second.len().abs_diff(12 - count) <= 1, "{} {count}", second.len());
        // Those that are idle for longest.
        assert!(ended[..count].iter().all(|ended| *ended), "{ended:?}");
        for ((permit, _), ended) in first.iter().zip(&ended) {
            assert_eq!(permit.has_given_up(), *ended);
        }
        // Neither takes from the other in turns.
        assert!(open(proxies, &one).is_none() && open(proxies, &two).is_none());
        assert_eq!(lock(&proxies.list).ending, count);
        drop((first, second));
        let list = lock(&proxies.list);
        assert!(list.ending == 0 && list.by_owner.is_empty());
    }

    #[test]
    fn a_proxy_with_a_request_is_the_last_to_give_up_its_place() {
        let (proxies, (one, two)) = (proxies(4), owners());
        let mut first = fill(proxies, &one);
        assert_eq!(first.len(), 3);
        first[0].0.note_request();
        let mut ended = || first.iter_mut().map(|(_, guest)| has_ended(guest)).collect::<Vec<_>>();
        let _second = open(proxies, &two).unwrap();
        assert_eq!(ended(), [false; 3]);
        let _third = open(proxies, &ConnectionOwner::default()).unwrap();
        assert_eq!(ended(), [false, true, false]);
    }

    #[test]
    fn an_owner_whose_proxies_all_have_requests_gives_up_the_oldest() {
        let (proxies, (one, two)) = (proxies(4), owners());
        let mut first = fill(proxies, &one);
        first.iter().for_each(|(permit, _)| permit.note_request());
        let _held =
            [open(proxies, &two).unwrap(), open(proxies, &ConnectionOwner::default()).unwrap()];
        let ended: Vec<_> = first.iter_mut().map(|(_, guest)| has_ended(guest)).collect();
        assert_eq!(ended, [true, false, false]);
    }
}
