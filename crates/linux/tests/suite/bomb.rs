//! A fork bomb meets its budget, and leaves no trace.

use crate::common;

use std::time::Duration;

use afresh_linux::Resource;

const LIMIT: Duration = Duration::from_secs(200);

/// The children of this process, by any of its threads.
fn children() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists.map(|list| list.split_whitespace().count()).sum()
}

const BOMB: &str = r#"
import errno, os, signal, sys
def spread():
    """Every process forks until it is told that there is no room."""
    while True:
        try: pid = os.fork()
        except OSError as error: return error.errno
        if pid == 0: born.append(1)
for line in sys.stdin:
    born = []
    if line == "bomb\n":
        error = spread()
        if born: signal.pause()
        print(errno.errorcode[error], flush=True)
    else:
        pid = os.fork()
        if pid == 0: os._exit(9)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"#;

#[test]
fn a_fork_bomb_meets_its_budget_and_leaves_nothing() {
    // All children of the process are counted.
    afresh_sys::run_isolated("bomb::a_fork_bomb_meets_its_budget_and_leaves_nothing", bomb);
}

fn bomb() {
    let Some(program) = common::python() else { return };
    // Otherwise its memory would be the first bound.
    let program = program.arg("/app.py").file("/app.py", BOMB).limit(Resource::Tasks, 32, 32);
    let Some(warm) = common::here(program.time_limit(LIMIT).start_limit(LIMIT).warm()) else {
        return;
    };
    let mut instance = warm.instance();
    instance.prepare().unwrap();
    let before = children();
    for _ in 0..3 {
        assert_eq!(instance.call_pristine(b"bomb\n").unwrap(), b"EAGAIN\n");
        assert!(before == 0 || children() > before, "{}", children());
        // The reset comes with the next call.
        assert_eq!(instance.call_pristine(b"one\n").unwrap(), b"9\n");
        assert_eq!(children(), before);
        instance.verify().unwrap();
    }
    assert_eq!(instance.stats().processes, 1);
    assert_eq!(instance.call_pristine(b"bomb\n").unwrap(), b"EAGAIN\n");
    drop(instance);
    assert!(children() < before.max(1));
}
