//! Connections of the guest that close.

use super::{ClosedConnection, MAX_ADDRESSES};
use crate::sentry::kernel::channels::ChannelEnd;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::time::now;
use crate::sentry::net::sockets::{Address, Socket, SocketState};

impl Kernel {
    /// Notes the address of a connection that is closed before its peer has closed it.
    pub(in crate::sentry) fn note_closed(&mut self, socket: &Socket) {
        let SocketState::Connected { incoming: Some(incoming), outgoing: Some(_) } = socket.stage
        else {
            return;
        };
        let held = self.channels.get(incoming);
        let open = held.is_some_and(|held| {
            held.writers > 0 && !held.reset && held.is_empty() && held.end == ChannelEnd::Own
        });
        if !open || !socket.own.is_internet() || socket.options.breaks_off() {
            return;
        }
        let seconds = socket.options.number(libc::IPPROTO_TCP, libc::TCP_LINGER2).unwrap_or(0);
        if seconds <= 0 {
            return;
        }
        let (only, now) = (socket.is_for_newer_protocol(), now().seconds);
        let reuses = socket.options.is_on(libc::SOL_SOCKET, libc::SO_REUSEADDR);
        let until = now.saturating_add(seconds.into());
        let list = &mut self.closed.0;
        list.retain(|closed| closed.until > now);
        if list.len() >= MAX_ADDRESSES {
            list.pop_front();
        }
        list.push_back(ClosedConnection { address: socket.own.clone(), only, reuses, until });
    }

    /// Whether a closed connection keeps a socket from an address.
    pub(in crate::sentry) fn is_closing(&self, socket: &Socket, address: &Address) -> bool {
        let now = now().seconds;
        let reuses = socket.options.is_on(libc::SOL_SOCKET, libc::SO_REUSEADDR);
        let only = socket.is_for_newer_protocol();
        !socket.is_for_datagrams()
            && self.closed.0.iter().any(|closed| {
                closed.until > now
                    && !(reuses && closed.reuses)
                    && address.overlaps(only, &closed.address, closed.only)
            })
    }
}
