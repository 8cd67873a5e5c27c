//! Sockets: local, loopback, and connections that the opener grants.

pub(super) mod datagrams;
pub(super) mod dns;
pub(super) mod inbound;
pub(super) mod interfaces;
pub(super) mod outbound;
pub(super) mod socket_options;
pub(super) mod sockets;
