//! Connections of a sandbox: its filter and rules for those to the outside, and those from clients
//! to its ports.

#[cfg(linux_guests)]
pub(crate) mod connection_audit;
#[cfg(linux_guests)]
pub(crate) mod dial;
pub(crate) mod network;
pub(crate) mod network_policy;
pub(crate) mod network_update;
#[cfg(linux_guests)]
pub(crate) mod port;
pub(crate) mod request_host;
#[cfg(linux_guests)]
pub(crate) mod tunnels;
