//! The crate's tests, in one program that is linked once.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod asked;
mod billed;
mod bomb;
mod bounds;
mod calls;
mod clock;
mod clones;
mod common;
mod database;
mod deltas;
mod edges;
mod egress;
mod exact;
mod families;
mod fifos;
mod forged;
mod fork;
mod generation;
mod http;
mod image;
mod ipc;
mod local_sockets;
mod messages;
mod model;
mod odd;
mod outside;
mod permissions;
mod pidfd;
mod pristine;
mod proc;
mod processes;
mod python;
mod session;
mod shared;
mod shared_limits;
mod signals;
mod sockets;
mod spent;
mod start_to_end;
mod stub;
mod terminals;
mod threads;
mod walls;
mod watches;
