//! The crate's tests, in one program that is linked once.

#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

mod apart;
mod asked;
#[cfg(target_arch = "x86_64")]
mod bases;
mod beside;
mod billed;
mod bomb;
mod bounds;
mod calls;
mod clock;
mod clones;
mod closed_descriptors;
mod common;
mod database;
mod deltas;
mod edges;
mod egress;
mod exact;
mod families;
mod fifos;
mod file_ranges;
mod forged;
mod fork;
mod generation;
mod host_limits;
mod http;
mod image;
mod inode_numbers;
#[cfg(target_arch = "x86_64")]
mod inside;
mod ipc;
mod isolation;
mod keys;
mod large_calls;
mod local_sockets;
mod memory_rules;
mod messages;
mod model;
mod mounts;
mod namespaces;
mod odd;
mod outside;
mod parked_calls;
mod peer_memory;
mod permissions;
mod pidfd;
mod pristine;
mod proc;
mod processes;
#[cfg(target_arch = "x86_64")]
mod program_segments;
mod published_ports;
mod python;
mod random;
mod reservations;
mod roots;
#[cfg(target_arch = "x86_64")]
mod series;
mod session;
mod shared;
mod shared_futexes;
mod shared_limits;
mod signals;
mod sockets;
mod spare;
mod spent;
mod standard_streams;
mod start_to_end;
#[cfg(target_arch = "x86_64")]
mod stub;
mod terminals;
mod threads;
#[cfg(target_arch = "x86_64")]
mod tracing;
mod transfers;
mod users;
mod watches;
mod xattr;
