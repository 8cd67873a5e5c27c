//! Descriptors that are passed through sockets.

use crate::sentry::kernel::fd_table::Description;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::net::sockets::{Socket, SocketState};

impl Kernel {
    /// Closes the object of a last descriptor, and the messages that only it could receive.
    pub(crate) fn forget(&mut self, description: Option<Description>) {
        use crate::sentry::kernel::fd_table::FileObject;
        let Some(description) = description else { return };
        let mut gone = vec![description];
        while let Some(description) = gone.pop() {
            self.notify_open(&description, false);
            match description.open {
                FileObject::Watches(_) => self.watchers = self.watchers.saturating_sub(1),
                FileObject::File(open) | FileObject::Device(_, open) => self.tree.close(open),
                FileObject::Terminal(end) => self.close_terminal(end),
                FileObject::Queue(id) => {
                    self.named_queues.leave(id);
                    self.drop_queue_notices();
                }
                FileObject::Process(id) => self.drop_status(id),
                open => {
                    if let FileObject::Fifo(fifo) = &open {
                        self.tree.close(fifo.open.clone());
                    }
                    if let FileObject::Socket(socket) = &open {
                        self.break_off(socket);
                    }
                    // A connection that was not accepted has no other side.
                    for (id, writes) in open.ends() {
                        for parcel in self.channels.leave(id, writes) {
                            gone.extend(self.table.drop_parcel(parcel));
                        }
                    }
                }
            }
        }
    }

    /// A connection that is closed before all that came was read is broken off, and its peer gets
    /// an error.
    fn break_off(&mut self, socket: &Socket) {
        if let SocketState::Listening(queue) = &socket.stage {
            // So is one that was not accepted.
            for arrival in queue {
                if let Some(channel) = self.channels.get_mut(arrival.outgoing) {
                    channel.reset = true;
                }
                self.refuse_connection(arrival);
            }
        }
        self.note_closed(socket);
        let SocketState::Connected { incoming, outgoing } = socket.stage else { return };
        // After a shutdown the channel is still there for its reader, but its number is no more
        // known here.
        let Some(outgoing) = outgoing.or(socket.left) else { return };
        let held = incoming.and_then(|id| self.channels.get(id));
        let unread = held.is_some_and(|held| !held.is_empty() || held.letter().is_some());
        let asked = socket.own.is_internet() && socket.options.breaks_off();
        if let Some(channel) = self.channels.get_mut(outgoing).filter(|_| unread || asked) {
            channel.reset = true;
        }
    }

    /// An end of a channel less.
    pub(in crate::sentry) fn leave(&mut self, id: u64, writes: bool) {
        for parcel in self.channels.leave(id, writes) {
            self.drop_parcel(parcel);
        }
    }

    /// Drops messages without a receiver.
    pub(in crate::sentry) fn drop_parcel(&mut self, parcel: u64) {
        for gone in self.table.drop_parcel(parcel) {
            self.forget(Some(gone));
        }
        self.drop_unowned();
    }
}
