//! Events of descriptors, as `poll` and `epoll` name them.

pub(crate) const IN: u16 = libc::POLLIN as u16;
pub(crate) const OUT: u16 = libc::POLLOUT as u16;
pub(crate) const ERR: u16 = libc::POLLERR as u16;
pub(crate) const HUP: u16 = libc::POLLHUP as u16;
pub(crate) const RDHUP: u16 = 0x2000;
/// Room for a datagram, for waiting senders. `poll` has no such event.
pub(in crate::sentry) const SEND_ROOM: u16 = 0x800;
/// Events that are always reported.
pub(crate) const ALWAYS: u16 = ERR | HUP;

/// Counters of events stay below this: no guest lives long enough to reach it.
pub(in crate::sentry) const MAX_EVENTS: u64 = 1 << 62;
