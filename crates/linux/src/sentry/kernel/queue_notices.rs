//! Notices of messages in named queues over a socket (`SIGEV_THREAD`): the C library starts a
//! thread for each.
//!
//! Promises: a notice belongs to the request of its queue, and is sent once: with a message, or
//! when the request ends.

mod sending;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Bytes of a notice (`NOTIFY_COOKIE_LEN`). The last one is its reason.
pub(in crate::sentry) const COOKIE_LEN: usize = 32;
/// The reasons: a message came, and the request has ended (`NOTIFY_WOKENUP`, `NOTIFY_REMOVED`).
pub(in crate::sentry) const CAME: u8 = 1;
const REMOVED: u8 = 2;

/// The socket that a notice is sent to, as an open description, and its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct QueueNotice {
    pub(in crate::sentry) socket: u64,
    pub(in crate::sentry) cookie: [u8; COOKIE_LEN],
}

/// Notices by the number of their queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct QueueNotices(BTreeMap<u32, QueueNotice>);

impl QueueNotices {
    pub(in crate::sentry) fn set(&mut self, queue: u32, notice: QueueNotice) {
        self.0.insert(queue, notice);
    }

    /// Whether each belongs to a request.
    pub(in crate::sentry) fn is_sound(&self, is_asked: impl Fn(u32) -> bool) -> bool {
        self.0.keys().all(|queue| is_asked(*queue))
    }
}
