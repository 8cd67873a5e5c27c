//! Memory shared by processes: writes of one are visible to the others, and a reset undoes them
//! like any other.

use crate::common;
use crate::common::states::ask;

use std::time::Duration;

use afresh_linux::{Frozen, Instance, Program, Warm};
use afresh_pager::{Options, SnapshotOptions};
use afresh_snapshot::{Branch, Tree};
use afresh_store::Store;
use afresh_sys::planted::{self, Bug};

/// The counter in shared memory was 40, and each round raises it by `step`.
fn is_pristine(warm: &Warm, step: u32) {
    let mut instance = warm.instance();
    let after = |rounds: u32| format!("ok {}\n", 40 + rounds * step);
    for round in 0..3 {
        let answer = String::from_utf8(instance.call_pristine(b"round\n").unwrap()).unwrap();
        assert_eq!(answer, after(2), "round {round}");
        instance.verify().unwrap();
    }
    instance.call_pristine(b"round\n").unwrap();
    assert_eq!(instance.call(b"round\n").unwrap(), after(3).as_bytes());
    assert_eq!(instance.stats().processes, 1);
}

fn is_pristine_also_out_of_a_snapshot(guest: &str, step: u32) {
    let Some(path) = common::compiled(guest, &["-static"]) else { return };
    let program = Program::new(path).time_limit(Duration::from_secs(60)).request("round\n");
    let Some(warm) = common::here(program.warm()) else { return };
    is_pristine(&warm, step);

    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store")).unwrap();
    warm.freeze().unwrap().save(&store, "warm", &SnapshotOptions::default()).unwrap();
    let frozen = Frozen::load(store.load("warm").unwrap(), &Options::default()).unwrap();
    is_pristine(&Warm::thaw(&frozen, &program).unwrap(), step);
}

#[test]
fn writes_to_shared_memory_reach_other_processes_and_are_reset() {
    // The process and its child.
    is_pristine_also_out_of_a_snapshot("shared.c", 2);
}

#[test]
fn segments_of_system_v_are_shared_counted_and_removed_and_a_reset_undoes_it() {
    is_pristine_also_out_of_a_snapshot("system_v.c", 1);
}

#[test]
fn files_have_several_views_with_ends_holes_and_growth() {
    is_pristine_also_out_of_a_snapshot("views.c", 1);
}

#[test]
fn calls_that_write_beyond_the_end_of_a_mapped_file_fail_and_take_nothing() {
    let Some(mut instance) = common::warm("past_end.c", |program| program) else { return };
    for _ in 0..2 {
        instance.reset();
        assert_eq!(String::from_utf8(instance.call(b"calls\n").unwrap()).unwrap(), "ok\n");
        for place in ["0\n", "1\n", "2\n", "3\n"] {
            assert_eq!(instance.call(place.as_bytes()).unwrap(), b"next\n");
            assert_eq!(instance.call(b"request\n").unwrap(), b"14 request\n", "{place}");
        }
        assert_eq!(instance.call(b"4\n").unwrap(), b"next\n");
        assert_eq!(instance.call(b"request\n").unwrap(), b"read request\n");
        instance.verify().unwrap();
    }
}

#[test]
fn planted_bugs_are_caught() {
    planted::must_be_caught(
        &[Bug::Shared],
        &["shared::writes_to_shared_memory_reach_other_processes_and_are_reset"],
    );
}

#[test]
fn a_mapping_without_room_for_its_pages_beyond_the_end_changes_nothing() {
    let Some(mut instance) = common::warm("past_end.c", |program| program) else { return };
    for _ in 0..2 {
        instance.reset();
        assert_eq!(String::from_utf8(instance.call(b"full\n").unwrap()).unwrap(), "ok\n");
        instance.verify().unwrap();
    }
}

#[test]
fn a_mapping_that_failed_leaves_no_memory_behind_a_rollback() {
    let Some(path) = common::compiled("past_end.c", &["-static"]) else { return };
    let Some(warm) = common::here(Program::new(path).warm()) else { return };
    let mut line = Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    let root = line.at();
    for _ in 0..2 {
        let guest = line.guest_mut().unwrap();
        assert_eq!(ask(guest, "half"), "ok");
        let place = format!("={}", ask(guest, "where"));
        assert_eq!(ask(guest, &place), "104", "the mapping in its place stayed");
        let with = line.checkpoint().unwrap();
        line.rollback(root).unwrap();
        let guest = line.guest_mut().unwrap();
        guest.verify().unwrap();
        assert_eq!(ask(guest, &place), "gone");
        line.rollback(with).unwrap();
        assert_eq!(ask(line.guest_mut().unwrap(), &place), "104");
        line.rollback(root).unwrap();
    }
}

const BEHIND: &str = r#"
import mmap, os, sys
page, memory, (asked, ask), (answered, answer) = mmap.PAGESIZE, mmap.mmap(-1, 64 * mmap.PAGESIZE), os.pipe(), os.pipe()
if os.fork() == 0:
    while os.read(asked, 1):
        memory[3 * page] += 1
        os.write(answer, bytes([memory[0], memory[5 * page], memory[3 * page]]))
for line in sys.stdin:
    if line == "warm\n":
        os.write(ask, b"x"); os.read(answered, 3)
        # The child waits, and has not seen this.
        memory[5 * page] = 7
        print("ready", flush=True)
    else:
        memory[0] += 1
        os.write(ask, b"x")
        print(*os.read(answered, 3), memory[3 * page], flush=True)
"#;

#[test]
fn a_process_behind_at_the_freeze_sees_writes_of_the_others() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", BEHIND).request("warm\n");
    let limit = Duration::from_secs(100);
    let program = program.time_limit(limit).start_limit(limit);
    let Some(warm) = common::here(program.warm()) else { return };
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store")).unwrap();
    warm.freeze().unwrap().save(&store, "warm", &SnapshotOptions::default()).unwrap();
    let frozen = Frozen::load(store.load("warm").unwrap(), &Options::default()).unwrap();
    for warm in [warm, Warm::thaw(&frozen, &program).unwrap()] {
        let mut instance = warm.instance();
        for _ in 0..2 {
            let ask = |instance: &mut Instance| instance.call(b"go\n").unwrap();
            assert_eq!(instance.call_pristine(b"go\n").unwrap(), b"1 7 2 2\n");
            instance.verify().unwrap();
            assert_eq!(ask(&mut instance), b"1 7 2 2\n");
            assert_eq!(ask(&mut instance), b"2 7 3 3\n");
        }
    }
}

const POOL: &str = r#"
import multiprocessing as mp, sys

def work(lock, counter, queue, number):
    for _ in range(20):
        with lock:
            counter.value += number
    queue.put(number)

for line in sys.stdin:
    context = mp.get_context("fork")
    lock, counter, queue = context.Lock(), context.Value("i", 0), context.SimpleQueue()
    workers = [context.Process(target=work, args=(lock, counter, queue, n)) for n in (1, 2, 3)]
    [worker.start() for worker in workers]
    seen = sorted(queue.get() for _ in workers)
    [worker.join() for worker in workers]
    print(counter.value, seen, flush=True)
"#;

#[test]
fn pythons_multiprocessing_shares_locks_and_values() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", POOL).request("warm\n");
    let limit = Duration::from_secs(100);
    let Some(warm) = common::here(program.time_limit(limit).start_limit(limit).warm()) else {
        return;
    };
    let mut instance = warm.instance();
    for _ in 0..2 {
        let answer = instance.call_pristine(b"go\n").unwrap();
        assert_eq!(String::from_utf8_lossy(&answer), "120 [1, 2, 3]\n");
        instance.verify().unwrap();
    }
}
