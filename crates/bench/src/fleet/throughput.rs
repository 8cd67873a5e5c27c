//! Requests a second of hosts that forward them to each other.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use afresh_serve::fleet::policy::SplitMix64;

use super::chance::{Chance, SECOND};

/// Requests a second of hosts whose calls take five milliseconds each, at sixteen places; a host
/// that forwards a request works on it for half a millisecond as well.
pub(super) fn throughput(hosts: usize) -> f64 {
    const PLACES: usize = 16;
    const CLIENTS: usize = 200;
    let mut chance = Chance(SplitMix64::new(7));
    let mut seed = SplitMix64::new(8);
    // Each client has a session on one host, and sends to any.
    let clients = CLIENTS * hosts;
    let mut free: Vec<BinaryHeap<Reverse<u64>>> =
        (0..hosts).map(|_| (0..PLACES).map(|_| Reverse(0)).collect()).collect();
    // When a client's call is at a host, and which.
    let mut ready: BinaryHeap<Reverse<(u64, usize, usize)>> =
        (0..clients).map(|client| Reverse((0, client, seed.below(hosts)))).collect();
    let end = 20 * SECOND;
    let mut done = 0_u64;
    while let Some(Reverse((now, client, host))) = ready.pop() {
        let Some(Reverse(place)) = free[host].pop() else { continue };
        let owner = client % hosts;
        let work = if host == owner { chance.time(0.005) } else { 500 };
        let over = place.max(now) + work;
        free[host].push(Reverse(over));
        if over >= end {
            continue;
        }
        let next = if host == owner { seed.below(hosts) } else { owner };
        done += u64::from(host == owner);
        ready.push(Reverse((over, client, next)));
    }
    done as f64 / 20.0
}
