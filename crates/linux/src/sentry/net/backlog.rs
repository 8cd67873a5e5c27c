//! Connections that a listening socket has not accepted yet.
//!
//! Promises: of IP connections as many are established as the listener's backlog allows, and one
//! more, as in Linux. Others wait for an accept, and are refused when the listener closes.

use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::time::MonotonicTime;
use crate::sentry::net::sockets::{IncomingConnection, SocketState};

impl Kernel {
    /// The places of connections that can be accepted: those with data, if the listener wants data
    /// first.
    pub(in crate::sentry) fn acceptable<'a>(
        &'a self,
        queue: &'a [IncomingConnection],
        now: MonotonicTime,
    ) -> impl Iterator<Item = usize> + 'a {
        let has_data = |id: u64| {
            let channel = self.channels.get(id);
            channel.is_none_or(|held| !held.is_empty() || held.has_ended() || held.reset)
        };
        let is_ready = move |(at, arrival): (usize, &IncomingConnection)| {
            let due = arrival.until.is_none_or(|until| until <= now);
            (due || has_data(arrival.incoming)).then_some(at)
        };
        queue.iter().enumerate().filter_map(is_ready)
    }

    /// The moments at which connections can be accepted without data.
    pub(in crate::sentry) fn deferrals(&self) -> impl Iterator<Item = MonotonicTime> + '_ {
        self.table.descriptions().flat_map(|(_, description)| match &description.open {
            FileObject::Socket(socket) => match &socket.stage {
                SocketState::Listening(queue) => queue.iter().filter_map(|a| a.until).collect(),
                _ => Vec::new(),
            },
            _ => Vec::new(),
        })
    }

    /// Has a listener accept its last connection before `until` only with data.
    pub(in crate::sentry) fn defer_last(&mut self, listener: u64, until: MonotonicTime) {
        if let Some(FileObject::Socket(socket)) =
            self.table.description_mut(listener).map(|description| &mut description.open)
            && let SocketState::Listening(queue) = &mut socket.stage
            && let Some(last) = queue.last_mut()
        {
            last.until = Some(until);
        }
    }

    /// Establishes the connections for which a listener's backlog has room.
    pub(in crate::sentry) fn establish_connections(&mut self, listener: u64) {
        let Some(FileObject::Socket(socket)) =
            self.table.description(listener).map(|description| &description.open)
        else {
            return;
        };
        let SocketState::Listening(queue) = &socket.stage else { return };
        if socket.is_local() {
            return;
        }
        let first = queue.iter().take(socket.backlog_len() + 1);
        let first: Vec<u64> = first.map(|arrival| arrival.outgoing).collect();
        first.into_iter().for_each(|from| self.line_is_made(from));
    }

    /// The listener of a connection has closed: a socket that waits to be established is refused.
    pub(in crate::sentry) fn refuse_connection(&mut self, arrival: &IncomingConnection) {
        if self.is_reaching(arrival.outgoing) {
            self.line_failed(arrival.outgoing, arrival.incoming, libc::ECONNREFUSED);
        }
    }
}
