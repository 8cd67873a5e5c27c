//! Sockets: local, loopback, and connections that the opener grants.

pub(super) mod addresses;
mod backlog;
pub(super) mod closed_connections;
pub(super) mod datagrams;
pub(super) mod dns;
mod dns_message;
pub(super) mod inbound;
pub(super) mod interfaces;
mod names;
mod netlink_message;
mod option_rules;
pub(super) mod outbound;
mod packet_info;
mod routes;
pub(super) mod socket_options;
pub(super) mod sockets;
mod stream_groups;
