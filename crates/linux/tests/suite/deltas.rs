//! Checkpoints of a guest whose work is done by a child that runs another program: each stores what
//! changed since the last.

use crate::common;

use std::time::Duration;

use afresh_snapshot::Guest;

const LEADER: &str = r#"
import subprocess, sys
kernel = subprocess.Popen([sys.executable, "/kernel.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for line in sys.stdin:
    kernel.stdin.write(line.encode()); kernel.stdin.flush()
    print(kernel.stdout.readline().decode(), end="", flush=True)
"#;

const KERNEL: &str = r#"
import sys
kept = []
for line in sys.stdin:
    exec(line)
    print(len(kept), flush=True)
"#;

#[test]
fn each_checkpoint_of_a_child_stores_what_changed() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", LEADER).file("/kernel.py", KERNEL);
    let limit = Duration::from_secs(100);
    let program = program.time_limit(limit).start_limit(limit).request("pass\n");
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    let mut last = None;
    for turn in 0..6 {
        let line = match turn % 3 {
            0 => "kept.append('x' * 1000)\n",
            1 => "kept.append(bytes(range(256)) * 2000)\n",
            _ => "import json; kept.append([json.dumps(n) for n in range(2000)])\n",
        };
        instance.call(line.as_bytes()).unwrap();
        let frozen = Guest::checkpoint(&mut instance).unwrap();
        if let Some(last) = last.replace(std::sync::Arc::clone(&frozen.memories)) {
            for (now, then) in frozen.memories.iter().zip(last.iter()) {
                let changed: usize = now.differing(then).iter().map(|run| run.len).sum();
                let stored = now.stored_pages();
                assert!(changed * 4 < stored, "turn {turn}: {changed} of {stored} pages");
            }
        }
    }
}
