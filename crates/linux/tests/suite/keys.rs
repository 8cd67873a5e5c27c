//! Keys and keyrings of the kernel.

use crate::common;

use afresh_linux::{End, Program};

use common::{compiled, here, limit};

#[test]
fn keys_are_linked_found_limited_and_revoked() {
    let Some(path) = compiled("keys.c", &["-static"]) else { return };
    let program = Program::new(path).start_limit(limit(100));
    let Some(run) = here(program.run(b"")) else { return };
    let output = String::from_utf8_lossy(&run.output).into_owned();
    assert_eq!((run.end, output.as_str()), (End::Exit(0), "ok\n"), "{}", run.messages);
}
