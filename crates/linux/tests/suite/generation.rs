//! `/dev/afresh/generation`: another number for each run from a frozen state, and the ways in which
//! a program notices.

use std::collections::BTreeSet;

use afresh_linux::{Instance, Program, Warm};
use afresh_sys::planted::{self, Bug};

use crate::common;

/// The warm watcher in one of its modes.
fn watcher(mode: &str) -> Option<(Program, Warm)> {
    let path = common::compiled("generation.c", &["-static", "-pthread"])?;
    let program = Program::new(path).arg(mode);
    let warm = common::here(program.warm())?;
    Some((program, warm))
}

/// Makes a call, from the present state or from the frozen one.
fn ask(instance: &mut Instance, line: &str, pristine: bool) -> String {
    let call = if pristine { Instance::call_pristine } else { Instance::call };
    String::from_utf8(call(instance, line.as_bytes()).unwrap()).unwrap().trim().to_owned()
}

#[test]
fn a_program_notices_each_new_generation() {
    let Some((_, warm)) = watcher("single") else { return };
    let mut generations = BTreeSet::new();
    let mut instances = [warm.instance(), warm.instance()];
    for round in 0..6 {
        for instance in &mut instances {
            instance.reset();
            let generation = instance.generation();
            // One signal with the descriptor, one edge, readable until it was read; all ways show
            // the same number.
            let expected = format!("1 1 1 1 0 0 {0:016x} {0:016x} {0:016x}", generation);
            assert_eq!(ask(instance, "look\n", false), expected, "round {round}");
            assert!(generations.insert(generation), "round {round}");
            // A call that continues is in the same generation and sees no event.
            let expected = format!("1 1 0 0 0 0 {0:016x} {0:016x} {0:016x}", generation);
            assert_eq!(ask(instance, "look\n", false), expected, "round {round}");
            instance.verify().unwrap();
        }
    }
    assert!(instances.iter().all(|instance| instance.stats().processes == 1));
}

#[test]
fn each_rollback_and_thaw_begins_a_generation() {
    let Some((program, warm)) = watcher("single") else { return };
    let mut generations = BTreeSet::new();
    let mut look = |instance: &mut Instance, pristine: bool| {
        let seen = ask(instance, "look\n", pristine);
        let shown: Vec<_> = seen.split(' ').skip(6).collect();
        assert_eq!(shown, [shown[0]; 3], "{seen}");
        assert_eq!(shown[0], format!("{:016x}", instance.generation()));
        generations.insert(shown[0].to_owned())
    };
    let mut instance = warm.instance();
    assert!(look(&mut instance, true));
    let frozen = instance.freeze().unwrap();
    // Freezing ends no generation.
    assert!(!look(&mut instance, false));
    assert!(look(&mut instance, true));
    for _ in 0..3 {
        let thawed = Warm::thaw(&frozen, &program).unwrap();
        let mut thawed = thawed.instance();
        assert!(look(&mut thawed, false));
        assert!(look(&mut thawed, true));
        thawed.verify().unwrap();
    }
    // Files that are changed from outside are of the run that follows.
    let mut changed = warm.instance();
    changed.change_files(|_| ()).unwrap();
    assert!(look(&mut changed, false));
    assert!(!look(&mut changed, false));
}

#[test]
fn waiting_threads_and_processes_wake_for_a_new_generation() {
    for mode in ["threads", "processes"] {
        let Some((_, warm)) = watcher(mode) else { return };
        let mut seen = BTreeSet::new();
        for _ in 0..2 {
            let mut instance = warm.instance();
            for _ in 0..4 {
                let answer = ask(&mut instance, "look\n", true);
                let number = format!("{:016x}", instance.generation());
                let expected = match mode {
                    "threads" => format!("1 {number} {number}"),
                    _ => format!("{number} {number} {number}"),
                };
                assert_eq!(answer, expected, "{mode}");
                assert!(seen.insert(number), "{mode}");
                instance.verify().unwrap();
            }
        }
    }
}

#[test]
fn unsupported_operations_of_the_device_are_refused() {
    let Some((_, warm)) = watcher("single") else { return };
    let errors = [
        libc::EINVAL,
        libc::EACCES,
        libc::EACCES,
        libc::EINVAL,
        libc::EACCES,
        libc::ESRCH,
        libc::EINVAL,
        libc::EINVAL,
    ];
    let expected = errors.map(|errno| errno.to_string()).join(" ");
    assert_eq!(ask(&mut warm.instance(), "misuse\n", true), expected);
}

#[test]
fn planted_bugs_are_caught() {
    if watcher("single").is_none() {
        return;
    }
    planted::must_be_caught(
        &[Bug::OldGeneration],
        &["generation::a_program_notices_each_new_generation"],
    );
}

const GENERATOR: &str = r#"
import os, random, select, ssl, sys
reseeds = sys.argv[1] == "reseeds"
random.seed(1)
random.random(), ssl.RAND_bytes(8)
device = os.open("/dev/afresh/generation", os.O_RDONLY)
for line in sys.stdin:
    if reseeds and select.select([device], [], [], 0)[0]:
        os.read(device, 8)
        random.seed(os.urandom(32))
        ssl.RAND_add(os.urandom(32), 32.0)
    print(random.random(), ssl.RAND_bytes(8).hex(), flush=True)
"#;

#[test]
fn cpython_and_openssl_reseed_their_generators_in_each_clone() {
    for reseeds in [true, false] {
        let Some(program) = common::python() else { return };
        let argument = if reseeds { "reseeds" } else { "repeats" };
        let program =
            program.arg("/app.py").arg(argument).file("/app.py", GENERATOR).request("first\n");
        let Some(warm) = common::here(program.warm()) else { return };
        let (mut python, mut openssl) = (BTreeSet::new(), BTreeSet::new());
        let mut clone = warm.instance();
        for _ in 0..4 {
            for answer in [ask(&mut clone, "x\n", true), ask(&mut warm.instance(), "x\n", false)] {
                let (one, other) = answer.split_once(' ').unwrap();
                python.insert(one.to_owned());
                openssl.insert(other.to_owned());
            }
        }
        // Without the device every clone draws the same number. OpenSSL may mix in the time.
        assert_eq!(python.len(), if reseeds { 8 } else { 1 }, "{argument}");
        println!("{argument}: OpenSSL drew {} different numbers of 8", openssl.len());
        assert!(!reseeds || openssl.len() == 8, "{openssl:?}");
        clone.verify().unwrap();
    }
}

/// Values that the sentry generates differ in each clone.
const KERNEL_SOURCES: &str = r#"
import os, sys, uuid, secrets
for line in sys.stdin:
    print(os.urandom(8).hex(), os.getrandom(8).hex(), open("/dev/urandom", "rb").read(8).hex(),
          open("/dev/random", "rb", buffering=0).read(8).hex(), secrets.token_hex(8), uuid.uuid4().hex, flush=True)
"#;

#[test]
fn numbers_of_the_kernel_are_new_in_each_clone() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", KERNEL_SOURCES).request("first\n");
    let Some(warm) = common::here(program.warm()) else { return };
    let mut draws = BTreeSet::new();
    let mut clone = warm.instance();
    for _ in 0..4 {
        for answer in [ask(&mut clone, "x\n", true), ask(&mut warm.instance(), "x\n", false)] {
            draws.extend(answer.split(' ').map(str::to_owned));
        }
    }
    assert_eq!(draws.len(), 8 * 6);
}
