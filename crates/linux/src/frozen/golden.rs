//! Version 10 of the state, frozen: the kernel state of a guest that was written when the version began is read for
//! ever, and written byte for byte as then.
//!
//! `tests/golden/state-10.bin` is never written again. A change that makes this test fail needs a new version, a second
//! golden, and code that still reads this one. `AFRESH_WRITE_GOLDEN=1` writes a golden that is missing. The
//! guest's memory is not part of it: `crates/store` has goldens of pages.

use std::path::{Path, PathBuf};

use super::{ENGINE, Header};
use crate::program::Program;

/// Waits for a line with files, pipes, a FIFO, processes, handlers, limits, a sleep and a lock open.
const COMMANDS: &str = "umask 027; trap 'echo usr1' USR1; trap '' USR2; ulimit -n 100; \
    mkdir /tmp/d; echo text > /tmp/d/f; ln -s f /tmp/d/l; mkfifo /tmp/p; exec 3< /tmp/d/f 4>> /tmp/d/f 5<> /tmp/p; \
    cd /tmp/d; rm f; sleep 100000 & (sleep 100000 | cat) & \
    while read line; do echo $line; done";

fn golden() -> PathBuf {
    let version = ENGINE.rsplit(' ').next().unwrap_or_default();
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/state-{version}.bin"))
}

/// Writes the golden, if it is missing and this is asked for.
fn write() {
    if golden().exists() || std::env::var_os("AFRESH_WRITE_GOLDEN").is_none() {
        return;
    }
    let program = Program::new("/bin/sh").grant("/").arg("-c").arg(COMMANDS).request(b"warm\n");
    let frozen = program.warm().unwrap().freeze().unwrap();
    std::fs::write(golden(), frozen.bytes()).unwrap();
}

#[test]
fn the_state_of_version_10_is_read_and_written_as_it_was() {
    write();
    let golden = std::fs::read(golden()).unwrap();
    let (header, rest): (Header, _) = postcard::take_from_bytes(&golden).unwrap();
    assert!(rest.is_empty());
    assert_eq!(header.parts.len(), 4, "the shell, two sleeps and the other end of the pipe");
    assert!(header.files > 0 && header.layers.is_none());
    assert!(postcard::to_allocvec(&header).unwrap() == golden, "the state has another form");
    // A state of another form does not pass for this one.
    for length in (0..golden.len()).step_by(golden.len() / 50) {
        assert!(postcard::from_bytes::<Header>(&golden[..length]).is_err(), "{length}");
    }
}
