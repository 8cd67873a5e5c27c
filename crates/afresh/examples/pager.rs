//! The pager for a virtual machine monitor: memory of a snapshot, served by Firecracker's
//! userfaultfd handshake, the guest running while pages arrive.
//!
//! `cargo run -p afresh --features snapshots --example pager -- SNAPSHOT SOCKET`; then name SOCKET
//! as the `uffd` memory backend of the monitor, or try it with any client of the handshake.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use afresh::pager::SnapshotSource;
use afresh::pager::vmm::{Listener, ServeCounts, VmmOptions, serve};
use afresh::{Options, Reference};

/// Serves one monitor until it ends; `ready` is called once it may connect.
pub(crate) fn serve_one(
    snapshot: &Reference,
    socket: &Path,
    ready: impl FnOnce(),
) -> Result<Option<ServeCounts>, Box<dyn std::error::Error>> {
    // In a directory, an archive, or on a server where the feature `remote` is on.
    let source = SnapshotSource::new(snapshot.load(&Options::new())?);
    let stop = AtomicBool::new(false);
    let listener = Listener::bind(socket)?;
    ready();
    let Some(stream) = listener.accept(&stop)? else { return Ok(None) };
    Ok(Some(serve(&stream, &source, &VmmOptions::new(&stop))?))
}

#[allow(dead_code, reason = "the tests call what it calls")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [snapshot, socket] = &arguments[..] else {
        return Err("usage: pager SNAPSHOT SOCKET".into());
    };
    let served = serve_one(&snapshot.parse()?, Path::new(socket), || println!("listening"))?;
    println!("{served:?}");
    Ok(())
}
