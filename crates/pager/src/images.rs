//! Images that the processes of a host share: one copy of equal memory.
//!
//! An [`ImageServer`] keeps the memory of snapshots in sealed files and passes them to processes of
//! its user. An [`ImageClient`] requests the memory of a snapshot that it has opened. The server
//! reads a snapshot that it does not have from the store of the client, whose directory it receives
//! as a descriptor. It takes pages from no client.
//!
//! Promises:
//! * The pages of a file have the digests that the snapshot names: the server checks each while it
//!   copies it, compares the sealed file with them, and serves the file by the digest of the memory
//!   alone. So no client can place other content under a digest.
//! * A file cannot change: its receiver checks the seals and the length.
//! * A client takes a file from a server of the same user or of root, by the credentials that the
//!   kernel reports. Other users cannot replace the socket.
//! * The files of the server take no more memory than its budget, and no more than half of its
//!   descriptors. One that a process still maps is charged, as the kernel reports it, and is never
//!   evicted.
//! * A client that sends nothing, or too slowly, holds one of a fixed number of places for a
//!   bounded time. Without an answer a client opens the snapshot itself.
//!
//! May break it: a directory whose files never answer holds one of the few places for reading. Then
//! no further images are added, and those that are there are still served. A process that can trace
//! the server changes its memory. A client of an image that opens its file again by `O_PATH` keeps
//! the memory of the file beyond its charge.

mod admission;
mod client;
mod error;
mod filling;
mod message;
mod peer;
mod server;
mod shelf;

pub use client::ImageClient;
pub use error::ImageClientError;
pub use message::{ImageAnswer, ImageRequest, RefusalReason};
pub use peer::is_protected;
pub use server::{ImageEvent, ImageServer, MAX_IMAGES};
