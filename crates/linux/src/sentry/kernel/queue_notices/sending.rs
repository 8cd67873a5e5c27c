//! Notices that are sent to their sockets.

use super::{COOKIE_LEN, REMOVED};
use crate::sentry::kernel::channels::Ancillary;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::net::interfaces::netlink_address;
use crate::sentry::net::sockets::{Socket, SocketState};

impl Kernel {
    /// Sends the notice of a queue, if it has one. It is lost if its socket is closed or full.
    pub(in crate::sentry) fn send_queue_notice(&mut self, queue: u32, reason: u8) {
        let Some(mut notice) = self.queue_notices.0.remove(&queue) else { return };
        notice.cookie[COOKIE_LEN - 1] = reason;
        let open = self.table.description(notice.socket).map(|found| &found.open);
        if let Some(FileObject::Socket(Socket {
            stage: SocketState::Datagrams { inbox, .. }, ..
        })) = open
            && let Some(channel) = self.channels.get_mut(*inbox)
            && channel.takes(COOKIE_LEN)
        {
            channel.post(&notice.cookie, netlink_address(0), Ancillary::default());
        }
    }

    /// Whether a queue has a request.
    pub(in crate::sentry) fn is_queue_asked(&self, queue: u32) -> bool {
        self.named_queues.get(queue).is_some_and(|queue| queue.request.is_some())
    }

    /// Ends the notices of queues whose requests have ended.
    pub(in crate::sentry) fn drop_queue_notices(&mut self) {
        let queues = self.queue_notices.0.keys().copied();
        let ended: Vec<u32> = queues.filter(|queue| !self.is_queue_asked(*queue)).collect();
        ended.into_iter().for_each(|queue| self.send_queue_notice(queue, REMOVED));
    }
}
