//! Single reads and writes of more bytes than the sentry moves at a time.

use std::process::Command;

use afresh_linux::{End, Program};

use crate::common;

#[test]
fn long_reads_and_writes_are_the_native_ones() {
    let Some(path) = common::compiled("transfers.c", &[]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let native = Command::new(&path).arg(folder.path().join("file")).output().unwrap();
    assert!(native.status.success(), "{native:?}");
    let program = Program::new(&path).arg("/tmp/file").memory_limit(1 << 30);
    let Some(run) = common::here(program.storage_limit(256 << 20).run(b"")) else { return };
    assert_eq!(run.end, End::Exit(0), "{}", run.messages);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    assert_eq!(text(run.output), text(native.stdout));
}
