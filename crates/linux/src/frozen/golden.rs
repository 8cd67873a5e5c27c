//! Version 11 of the state, frozen: the kernel state of a guest that was written when the version
//! began is still read, and written byte for byte as then.
//!
//! `tests/golden/state-11.bin.gz` is never written again. A change that makes this test fail needs
//! a new version, a second golden, and code that still reads this one. `AFRESH_WRITE_GOLDEN=1`
//! writes a golden that is missing. The guest's memory is not part of it: `crates/store` has
//! goldens of pages.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;

use super::{ENGINE, Header};
use crate::program::Program;

/// Waits for a line with files, pipes, a FIFO, processes, handlers, limits, a sleep and a lock
/// open.
const COMMANDS: &str = "umask 027; trap 'echo usr1' USR1; trap '' USR2; ulimit -n 100; \
    mkdir /tmp/d; echo text > /tmp/d/f; ln -s f /tmp/d/l; mkfifo /tmp/p; exec 3< /tmp/d/f 4>> /tmp/d/f 5<> /tmp/p; \
    cd /tmp/d; rm f; sleep 100000 & (sleep 100000 | cat) & \
    while read line; do echo $line; done";

fn golden() -> PathBuf {
    let version = ENGINE.rsplit(' ').next().unwrap_or_default();
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/state-{version}.bin.gz"))
}

/// The content of the golden.
pub(super) fn golden_bytes() -> Vec<u8> {
    let mut bytes = Vec::new();
    GzDecoder::new(std::fs::File::open(golden()).unwrap()).read_to_end(&mut bytes).unwrap();
    bytes
}

/// Writes the golden, if it is missing and this is asked for.
fn write() {
    if golden().exists() || std::env::var_os("AFRESH_WRITE_GOLDEN").is_none() {
        return;
    }
    let granted = ["/bin", "/etc", "/lib", "/lib64", "/usr"];
    let program = Program::new("/bin/sh").arg("-c").arg(COMMANDS).request(b"warm\n");
    let program = granted.iter().fold(program, |program, path| program.grant(path));
    let frozen = program.warm().unwrap().freeze().unwrap();
    let file = std::fs::File::create(golden()).unwrap();
    let mut file = GzEncoder::new(file, Compression::best());
    file.write_all(frozen.bytes()).unwrap();
    file.finish().unwrap();
}

#[test]
fn the_state_of_version_11_is_read_and_written_as_it_was() {
    write();
    let golden = golden_bytes();
    let (header, rest): (Header, _) = postcard::take_from_bytes(&golden).unwrap();
    assert!(rest.is_empty());
    assert_eq!(header.parts.len(), 5, "two shells, two sleeps and `cat`");
    assert!(header.files > 0 && header.layers.is_none());
    assert!(postcard::to_allocvec(&header).unwrap() == golden, "the state has another form");
    // A state of another form does not pass for this one.
    for length in (0..golden.len()).step_by(golden.len() / 50) {
        assert!(postcard::from_bytes::<Header>(&golden[..length]).is_err(), "{length}");
    }
}
