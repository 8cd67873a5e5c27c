//! Micro-VM guests that are built next to the tests.

use std::path::{Path, PathBuf};

/// The path of such a guest, if it is built and the host can run it; otherwise prints why it is
/// skipped.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests/vm").join(name);
    if !path.exists() {
        println!("SKIPPED: {} is not built; `cargo xtask guests` builds it", path.display());
        return None;
    }
    if let Err(error) = std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        println!("SKIPPED: /dev/kvm: {error}");
        return None;
    }
    Some(path)
}
