//! Processes of ended instances in which others start, which see nothing of the ones before.

use std::time::Duration;

use afresh_linux::{Instance, Warm};
use afresh_snapshot::{Branch, Tree};
use afresh_sys::planted::{self, Bug};

use crate::common;
use crate::common::states::ask;

const LIMIT: Duration = Duration::from_secs(200);

/// Holds something of every kind, and lists it.
const KEEPER: &str = r#"
import ctypes, mmap, os, resource, signal, sys
data, shared, held = bytearray(1 << 20), mmap.mmap(-1, 4096), []
def look():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    timer = signal.getitimer(signal.ITIMER_REAL)[0] > 0
    handler = signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL
    children = len([pid for pid in os.listdir("/proc") if pid.isdigit()])
    return (sum(map(bool, data)), shared[0], len(held), os.environ.get("HELD"), os.getcwd(), limit,
            timer, handler, os.path.exists("/tmp/held"), len(os.listdir("/proc/self/fd")), children, os.umask(0o22),
            signal.pthread_sigmask(signal.SIG_BLOCK, []), os.times().user < 1)
def hold():
    data[::4096] = b"x" * 256
    shared[0] = 7
    large = mmap.mmap(-1, 8 << 20)
    large.write(b"y" * (8 << 20))
    held.append(large)
    os.environ["HELD"] = "yes"
    os.chdir("/tmp")
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 3600)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    open("/tmp/held", "w").write("held")
    held.append(open("/tmp/held"))
    os.umask(0)
    if os.fork() == 0:
        signal.pause()
for line in sys.stdin:
    match line.strip():
        case "hold": hold(); print("held", flush=True)
        case "look": print(look(), flush=True)
        case "end": os._exit(3)
"#;

fn warm() -> Option<Warm> {
    let program = common::python()?.arg("/app.py").file("/app.py", KEEPER);
    common::here(program.time_limit(LIMIT).start_limit(LIMIT).warm())
}

#[test]
fn an_instance_in_the_process_of_another_is_as_a_new_one() {
    let Some(warm) = warm() else { return };
    let new = ask(&mut warm.instance(), "look");
    let mut instance = warm.instance();
    let (process, mut generations) = (instance_process(&mut instance), Vec::new());
    let limits = (instance.memory_limit(), instance.time_limit(), instance.cpu_time_limit());
    for _ in 0..4 {
        assert_eq!(ask(&mut instance, "look"), new);
        generations.push(instance.generation());
        assert_eq!(ask(&mut instance, "hold"), "held");
        assert_ne!(ask(&mut instance, "look"), new);
        instance.limit_memory(2 << 30).unwrap();
        instance.set_time_limit(LIMIT / 2);
        instance.set_cpu_time_limit(Some(LIMIT));
        let stop = instance.stop_handle();
        let spare = instance.into_spare(&warm).expect("a sound instance");
        stop.stop();
        assert!(spare.write_set_bytes() > 0);
        instance = warm.instance_in(spare);
        assert_eq!(instance.process_id(), process);
        assert_eq!((instance.stats().calls, instance.stats().processes), (0, 0));
        assert!(instance.files().find("/tmp/held").is_err());
        let now = (instance.memory_limit(), instance.time_limit(), instance.cpu_time_limit());
        assert_eq!(now, limits);
    }
    generations.dedup();
    assert_eq!(generations.len(), 4);
    // Every byte is as in the warm state, before a call and after a further reset.
    let spare = instance.into_spare(&warm).expect("a process that has not run");
    let mut instance = warm.instance_in(spare);
    instance.verify().unwrap();
    assert_eq!(ask(&mut instance, "look"), new);
    instance.reset();
    instance.verify().unwrap();
}

#[test]
fn a_process_of_another_program_is_not_used() {
    let (Some(warm), Some(other)) = (warm(), warm()) else { return };
    let mut instance = warm.instance();
    ask(&mut instance, "hold");
    let process = instance.process_id();
    let spare = instance.into_spare(&warm).expect("a sound instance");
    let mut instance = other.instance_in(spare);
    assert_ne!(instance_process(&mut instance), process);
    assert_eq!(ask(&mut instance, "look"), ask(&mut other.instance(), "look"));
}

/// The host process of an instance.
fn instance_process(instance: &mut Instance) -> Option<u32> {
    instance.prepare().unwrap();
    instance.process_id()
}

#[test]
fn an_instance_leaves_another_state_before_its_process_is_used_again() {
    let Some(warm) = warm() else { return };
    let new = ask(&mut warm.instance(), "look");
    let mut branch = Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    ask(branch.guest_mut().unwrap(), "hold");
    branch.checkpoint().unwrap();
    ask(branch.guest_mut().unwrap(), "hold");
    let mut instance = warm.instance();
    ask(&mut instance, "look");
    std::mem::swap(branch.guest_mut().unwrap(), &mut instance);
    let spare = instance.into_spare(&warm).expect("it is brought back to the warm state");
    let mut instance = warm.instance_in(spare);
    instance.verify().unwrap();
    assert_eq!(ask(&mut instance, "look"), new);
}

#[test]
fn a_process_that_was_killed_while_it_waited_is_replaced() {
    let Some(warm) = warm() else { return };
    let new = ask(&mut warm.instance(), "look");
    let mut instance = warm.instance();
    ask(&mut instance, "hold");
    let spare = instance.into_spare(&warm).expect("a sound instance");
    let mut instance = warm.instance_in(spare);
    let process = rustix::process::Pid::from_raw(instance.process_id().unwrap() as i32).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    instance.limit_memory(2 << 30).unwrap();
    assert_eq!(ask(&mut instance, "look"), new);
}

#[test]
fn a_process_that_failed_or_must_be_replaced_is_not_used_again() {
    let Some(warm) = warm() else { return };
    assert!(warm.instance().into_spare(&warm).is_none(), "it has no process");
    let mut instance = warm.instance();
    ask(&mut instance, "look");
    assert!(instance.call(b"end\n").is_err());
    assert!(instance.into_spare(&warm).is_none());
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", KEEPER).replace_processes(true);
    let Some(replacing) = common::here(program.time_limit(LIMIT).start_limit(LIMIT).warm()) else {
        return;
    };
    let mut instance = replacing.instance();
    ask(&mut instance, "look");
    assert!(instance.into_spare(&replacing).is_none());
}

#[test]
fn planted_bugs_are_caught() {
    if warm().is_some() {
        planted::must_be_caught(
            &[Bug::SpareReset],
            &["spare::an_instance_in_the_process_of_another_is_as_a_new_one"],
        );
    }
}
