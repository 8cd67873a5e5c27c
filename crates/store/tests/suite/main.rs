//! The crate's tests, in one program that is linked once.

mod archive;
mod crashes;
mod flips;
mod format;
mod full_disk;
mod golden;
mod golden_turns;
mod image;
mod kill;
mod large;
mod limits;
mod naming;
#[cfg(feature = "remote")]
mod outage;
mod pipes;
#[cfg(feature = "remote")]
mod remote;
#[cfg(feature = "remote")]
mod remote_servers;
#[cfg(feature = "seal")]
mod seal;
#[cfg(all(feature = "remote", feature = "seal"))]
mod seal_remote;
mod shared;
#[cfg(feature = "remote")]
mod staging;
mod support;
mod threadless;
pub(crate) mod turns;
