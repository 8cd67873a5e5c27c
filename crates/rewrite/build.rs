//! Names this build of the rewriter by its sources, so that it uses no cache entry of an older
//! build.

use std::path::Path;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=src");
    let sources = Path::new(&env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default()).join("src");
    let mut files =
        fs::read_dir(sources)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    files.sort();
    // FNV-1a: distinguishes honest builds.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for file in files {
        for byte in fs::read(file)? {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    println!("cargo::rustc-env=AFRESH_REWRITE_BUILD={version}-{hash:016x}");
    Ok(())
}
