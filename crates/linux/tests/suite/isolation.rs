//! A guest that wants out changes nothing outside, and nothing for the next call.

use crate::common;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use afresh_linux::{CallError, End, Frozen, Instance, PlatformError, Program, Warm};
use afresh_pager::{Options, SnapshotOptions};
use afresh_store::Store;
use afresh_sys::{run_isolated, test_command};
use rustix::io::Errno;
use rustix::process::{WaitOptions, wait};

const MARKER: &str = "/tmp/afresh-hostile-marker";

fn hostile() -> Option<Instance> {
    common::warm("hostile.c", |p| {
        p.time_limit(common::limit(5))
            .start_limit(common::limit(20))
            .memory_limit(256 << 20)
            .storage_limit(16 << 20)
    })
}

/// Makes one attempt, and proves that it had no effect.
fn attempt(warm: &mut Instance, request: &str) -> Result<String, CallError> {
    let answer = warm
        .call_pristine(request.as_bytes())
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    if let Err(CallError::Platform {
        source: PlatformError::Missing { .. } | PlatformError::Kernel { .. },
        ..
    }) = &answer
    {
        panic!("{request}: {answer:?}");
    }
    warm.verify().unwrap_or_else(|error| panic!("{request}: {error}"));
    assert_eq!(warm.call_pristine(b"99\n").unwrap(), b"-1\n", "{request}");
    assert!(!Path::new(MARKER).exists(), "{request}");
    if let Some((guests, others)) = children() {
        assert_eq!(guests, vec![warm.process_id().unwrap()], "{request}");
        // The zygote, and a template once the guest was replaced a few times.
        let few = 1 + usize::from(warm.stats().processes > 2);
        assert_eq!(others.len(), few, "{request}: {others:?}");
    }
    answer
}

/// Child processes, if the kernel reports them: those under a filter, and others.
fn children() -> Option<(Vec<u32>, Vec<u32>)> {
    let mut all = Vec::new();
    for task in std::fs::read_dir("/proc/self/task").ok()?.flatten() {
        let text = std::fs::read_to_string(task.path().join("children")).ok()?;
        all.extend(text.split_whitespace().filter_map(|id| id.parse::<u32>().ok()));
    }
    Some(all.into_iter().partition(|id| status(*id).contains("Seccomp:\t2")))
}

fn status(id: u32) -> String {
    std::fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default()
}

/// The open files of a process, in order.
fn open_in(id: u32) -> Vec<String> {
    let list = std::fs::read_dir(format!("/proc/{id}/fd")).unwrap();
    let what = |entry: std::fs::DirEntry| std::fs::read_link(entry.path()).unwrap();
    let mut open: Vec<_> =
        list.map(|entry| what(entry.unwrap()).to_string_lossy().into_owned()).collect();
    open.sort();
    open
}

fn is_open(id: u32, kinds: &[&str]) {
    let open = open_in(id);
    let alike = open.iter().zip(kinds).all(|(is, kind)| is.starts_with(kind));
    assert!(alike && open.len() == kinds.len(), "{open:?}");
}

fn forged(answer: &Result<String, CallError>) -> bool {
    matches!(answer, Err(CallError::Platform { source: PlatformError::Forged(_), .. }))
}

fn ended(answer: &Result<String, CallError>) -> bool {
    matches!(
        answer,
        Err(CallError::Platform { source: PlatformError::Ended(_), .. }
            | CallError::Ended { end: End::Signal(_), .. })
    )
}

#[test]
fn a_hostile_guest_changes_nothing_outside() {
    // No other test's guest is among this process's then.
    run_isolated("isolation::a_hostile_guest_changes_nothing_outside", hostile_guest);
}

fn hostile_guest() {
    let Some(mut warm) = hostile() else { return };
    // All its own calls are answered.
    attempt(&mut warm, "0\n").unwrap();
    assert!(warm.stats().unserved.len() > 200, "{:?}", warm.stats().unserved);
    // Calls from the stub's page, at each of its system call instructions, and its loop with forged
    // orders.
    let syscalls = 13;
    for nth in 0..syscalls {
        for mode in (1..=5).chain([23]) {
            let answer = attempt(&mut warm, &format!("{mode} {nth}\n"));
            assert!(forged(&answer) || ended(&answer), "{mode} {nth}: {answer:?}");
        }
    }
    assert_eq!(attempt(&mut warm, &format!("1 {syscalls}\n")).unwrap(), "no such place\n0\n");
    assert!(forged(&attempt(&mut warm, "6\n")));
    // The stub's memory cannot be mapped over, nor written where it is not its to write.
    assert_eq!(attempt(&mut warm, "7\n").unwrap(), "0\n");
    assert!(ended(&attempt(&mut warm, "8\n")));
    assert!(ended(&attempt(&mut warm, "9\n")));
    assert!(ended(&attempt(&mut warm, "18\n")));
    // Other architectures' numbers are no calls.
    assert!(attempt(&mut warm, "10\n").is_ok());
    assert_eq!(attempt(&mut warm, "11\n").unwrap(), "0\n");
    // Two calls that newer kernels keep from filters end a caller outside a probe.
    let answer = attempt(&mut warm, "17\n");
    assert!(ended(&answer) || answer.is_ok(), "{answer:?}");
    // Forged frames: another signal stack, SIGSYS blocked.
    for request in ["12 0\n", "12 1\n", "12 2\n", "20 3\n"] {
        let answer = attempt(&mut warm, request);
        assert!(forged(&answer) || ended(&answer), "{request}: {answer:?}");
    }
    // A fork whose stub is interrupted by a signal that it handles, and by one that ends it.
    for request in ["22 0\n", "22 1\n"] {
        let answer = attempt(&mut warm, request);
        assert!(forged(&answer) || ended(&answer), "{request}: {answer:?}");
    }
    // It can gain only harmless calls.
    attempt(&mut warm, "13\n").unwrap();
    // Pointers everywhere, also into its own descriptors' way: it may well end over it.
    let _ = attempt(&mut warm, "14\n");
    assert_eq!(attempt(&mut warm, "15\n").unwrap(), "0\n");
    assert!(ended(&attempt(&mut warm, "16\n")));
    // The stub copies forwards, however it was entered.
    assert_eq!(attempt(&mut warm, "19\n").unwrap(), "0\n");
}

/// The guest's program, in a process that is killed while the guest forks.
const FORKING_HOST: &str = "AFRESH_TEST_FORKING_HOST";

#[test]
fn a_host_that_is_killed_during_a_fork_leaves_no_process() {
    const NAME: &str = "isolation::a_host_that_is_killed_during_a_fork_leaves_no_process";
    const READY: &str = "the guest forks now";
    if let Ok(program) = std::env::var(FORKING_HOST) {
        let Some(warm) = common::here(Program::new(program).warm()) else { return };
        let mut warm = warm.instance();
        warm.prepare().unwrap();
        println!("{READY}");
        let _ = warm.call(b"24\n");
        return;
    }
    run_isolated(NAME, || {
        let Some(path) = common::compiled("hostile.c", &["-static"]) else { return };
        // Orphans become children of this process.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
        for round in 0..12 {
            let mut host = test_command(NAME);
            host.env(FORKING_HOST, &path).stdout(Stdio::piped());
            let mut host = host.spawn().unwrap();
            let lines = BufReader::new(host.stdout.take().unwrap()).lines();
            let mut said = Vec::new();
            let ready = lines.map_while(Result::ok).any(|line| {
                let ready = line.contains(READY);
                said.push(line);
                ready
            });
            if !ready {
                assert!(host.wait().unwrap().success(), "{said:?}");
                return println!("{}", said.join("\n"));
            }
            std::thread::sleep(Duration::from_millis(20 + 3 * round));
            host.kill().unwrap();
            host.wait().unwrap();
            let deadline = Instant::now() + Duration::from_secs(20);
            loop {
                match wait(WaitOptions::NOHANG) {
                    Err(Errno::CHILD) => break,
                    Ok(None) => {
                        assert!(Instant::now() < deadline, "round {round}: {:?}", children());
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    _ => {}
                }
            }
        }
    });
}

/// While pages are still to come, nothing may come in their place: the kernel would put zeros
/// there, for every guest.
#[test]
fn a_hostile_guest_spoils_no_page_that_is_still_to_come() {
    let Some(path) = common::compiled("hostile.c", &["-static"]) else { return };
    let program = Program::new(path).time_limit(Duration::from_secs(5));
    let Some(warm) = common::here(program.warm()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    warm.freeze().unwrap().save(&store, "warm", &SnapshotOptions::default()).unwrap();
    // Only touched pages come.
    let options = Options { background: false, ..Options::default() };
    let frozen = Frozen::load(store.load("warm").unwrap(), &options).unwrap();
    let thawed = Warm::thaw(&frozen, &program).unwrap();
    if thawed.image().is_complete() {
        println!("SKIPPED: this host fills images before they are used");
        return;
    }
    let mut requests: Vec<_> = [8, 9, 14, 16].into_iter().map(|mode| format!("{mode}\n")).collect();
    requests.extend((0..3).map(|nth| format!("12 {nth}\n")));
    requests.extend((0..thawed.image().pages()).step_by(7).map(|page| format!("20 {page}\n")));
    for request in &requests {
        let answer = thawed.instance().call(request.as_bytes());
        assert!(answer.is_err() || request == "14\n", "{request}: {answer:?}");
        assert!(!Path::new(MARKER).exists(), "{request}");
    }
    assert!(!thawed.image().is_complete());
    let mut other = thawed.instance();
    assert_eq!(other.call(b"99\n").unwrap(), b"-1\n");
    other.verify().unwrap();
    assert!(thawed.image().is_complete());
    assert_eq!(thawed.image().digest(), warm.image().digest());
}

#[test]
fn a_process_could_do_little_if_a_call_ever_passed() {
    let Some(warm) = common::warm("canary.c", |program| program) else { return };
    can_do_little(warm.process_id().unwrap());
    is_open(warm.process_id().unwrap(), &OPEN_FILES);
}

#[test]
fn descriptors_of_the_sentry_are_not_inherited_by_guests() {
    run_isolated("isolation::descriptors_of_the_sentry_are_not_inherited_by_guests", || {
        let Some(path) = common::compiled("canary.c", &["-static"]) else { return };
        let program = Program::new(path);
        if common::here(program.warm()).is_none() {
            return;
        }
        for _ in 0..20 {
            // SAFETY: duplicates a descriptor, one that programs inherit; it stays open until the
            // process ends.
            assert!(unsafe { libc::dup(0) } > 0);
        }
        for _ in 0..50 {
            let mut warm = program.warm().unwrap().instance();
            warm.prepare().unwrap();
            can_do_little(warm.process_id().unwrap());
            is_open(warm.process_id().unwrap(), &OPEN_FILES);
        }
    });
}

#[test]
fn a_forked_process_could_do_little_if_a_call_ever_passed() {
    run_isolated("isolation::a_forked_process_could_do_little_if_a_call_ever_passed", || {
        let Some(mut warm) = hostile() else { return };
        assert_eq!(warm.call(b"25\n").unwrap(), b"4\n");
        let Some((guests, _)) = children() else {
            return println!("SKIPPED: this kernel does not report the children of a process");
        };
        // The first process, a fork of it, three programs, and a blank process. The last program is
        // a fork of that.
        assert_eq!(guests.len(), 6);
        for id in guests {
            can_do_little(id);
            let open = open_in(id);
            let known = |file: &String| OPEN_FILES.iter().any(|kind| file.starts_with(kind));
            assert!(open.iter().all(known), "{open:?}");
        }
    });
}

/// Open files of the first process of a guest. An image's file may hold other images, and a socket
/// leads to the zygote.
const OPEN_FILES: [&str; 2] = ["anon_inode:[userfaultfd]", "anon_inode:seccomp notify"];

fn can_do_little(id: u32) {
    let status = status(id);
    for line in [
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
        "CapEff:\t0000000000000000",
        "CapPrm:\t0000000000000000",
        "Threads:\t1",
    ] {
        assert!(status.lines().any(|is| is == line), "{line}: {status}");
    }
    let limits = std::fs::read_to_string(format!("/proc/{id}/limits")).unwrap();
    for name in ["Max processes", "Max file size", "Max core file size"] {
        let line = limits.lines().find(|line| line.starts_with(name)).unwrap();
        assert!(line[name.len()..].trim_start().starts_with("0 "), "{line}");
    }
}

#[test]
fn the_zygote_has_nothing_that_a_guest_must_not_have() {
    run_isolated("isolation::the_zygote_has_nothing_that_a_guest_must_not_have", || {
        let Some(warm) = common::warm("canary.c", |program| program) else { return };
        let Some((guests, others)) = children() else {
            return println!("SKIPPED: this kernel does not report the children of a process");
        };
        assert_eq!((guests, others.len()), (vec![warm.process_id().unwrap()], 1));
        let status = status(others[0]);
        for line in ["NoNewPrivs:\t1", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000"] {
            assert!(status.lines().any(|is| is == line), "{line}: {status}");
        }
        is_open(others[0], &["/dev/null", "/memfd:afresh-control", "socket:"]);
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", others[0])).unwrap();
        let foreign = maps.lines().find(|line| {
            !["afresh-stub", "afresh-control", "[vdso]", "[vvar", "[vsyscall]"]
                .iter()
                .any(|own| line.contains(own))
        });
        assert_eq!(foreign, None, "{maps}");
        let may = Command::new("unshare").args(["-U", "-n", "-i", "-m", "-u", "true"]).status();
        if !may.is_ok_and(|status| status.success()) {
            return println!("SKIPPED: this host refuses new namespaces, or has no unshare");
        }
        // Its guests have the same.
        for process in [others[0], warm.process_id().unwrap()] {
            for name in ["user", "net", "ipc", "mnt", "uts"] {
                let space = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/{name}")).unwrap();
                assert_ne!(space("self"), space(&process.to_string()), "{name}");
            }
        }
    });
}

/// Runs a test of this file again, in a user namespace that allows no namespace of one kind. `None`
/// where such a namespace cannot be made.
fn without_namespaces(test: &str, kind: &str) -> Option<std::process::Output> {
    let mut again = Command::new(std::env::current_exe().unwrap());
    again.args([test, "--exact", "--nocapture"]).env(REFUSED_KIND, kind);
    let path = |text: String| std::ffi::CString::new(text).unwrap();
    let limit = path(format!("/proc/sys/user/max_{kind}_namespaces"));
    let user = rustix::process::geteuid().as_raw();
    let group = rustix::process::getegid().as_raw();
    let files = [
        (path("/proc/self/setgroups".to_owned()), "deny".to_owned()),
        (path("/proc/self/uid_map".to_owned()), format!("0 {user} 1")),
        (path("/proc/self/gid_map".to_owned()), format!("0 {group} 1")),
        (limit, "0".to_owned()),
    ];
    let refuse = move || {
        // SAFETY: the calls are made between fork and exec, and allocate nothing; the paths and
        // texts outlive them.
        unsafe {
            if libc::unshare(libc::CLONE_NEWUSER) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            for (path, text) in &files {
                let file = libc::open(path.as_ptr(), libc::O_WRONLY);
                if libc::write(file, text.as_ptr().cast(), text.len()) != text.len() as isize {
                    return Err(std::io::Error::last_os_error());
                }
            }
        }
        Ok(())
    };
    // SAFETY: as above.
    unsafe { std::os::unix::process::CommandExt::pre_exec(&mut again, refuse) };
    match again.output() {
        Ok(output) => Some(output),
        Err(error) => {
            println!("SKIPPED: no user namespace with a limit here: {error}");
            None
        }
    }
}

/// The kind of namespaces that the process of a test lacks.
const REFUSED_KIND: &str = "AFRESH_TEST_REFUSED_NAMESPACES";

#[test]
fn every_isolation_layer_is_applied_alone_and_can_be_required() {
    const NAME: &str = "isolation::every_isolation_layer_is_applied_alone_and_can_be_required";
    let kinds =
        [("net", "network-namespace"), ("user", "user-namespace"), ("ipc", "ipc-namespace")];
    let Ok(refused) = std::env::var(REFUSED_KIND) else {
        for (kind, _) in kinds {
            let Some(output) = without_namespaces(NAME, kind) else { return };
            assert!(output.status.success(), "{kind}: {output:?}");
        }
        return;
    };
    let layers = match afresh_linux::isolation_layers() {
        Ok(layers) => layers,
        Err(error) => return println!("SKIPPED: {error}"),
    };
    let absent = kinds.iter().find(|(kind, _)| *kind == refused).unwrap().1;
    let missing = |name: &str| layers.iter().find(|w| w.name == name).unwrap().missing.clone();
    let namespaces = [
        "user-namespace",
        "network-namespace",
        "ipc-namespace",
        "mount-namespace",
        "uts-namespace",
    ];
    let others = ["no-new-privileges", "no-capabilities", "limits"];
    for name in namespaces.into_iter().chain(others).filter(|name| *name != absent) {
        assert_eq!(missing(name), None, "{name} without {absent}");
    }
    let why = missing(absent).unwrap();
    assert!(why.contains(&format!("max_{refused}_namespaces")), "{why}");
    // Guests run without it until it is required, and make no process after that.
    let Some(mut guest) = hostile() else { return };
    assert_eq!(guest.call_pristine(b"25\n").unwrap(), b"4\n");
    let error = afresh_linux::require_isolation().unwrap_err().to_string();
    assert!(error.contains(absent), "{error}");
    assert_eq!(guest.call_pristine(b"25\n").unwrap(), b"0\n");
    let Some(path) = common::compiled("hostile.c", &["-static"]) else { return };
    assert!(Program::new(path).warm().is_err());
}

#[test]
fn a_reset_can_replace_the_process() {
    let Some(path) = common::compiled("hostile.c", &["-static"]) else { return };
    let program = Program::new(path);
    let Some(mut kept) = common::here(program.clone().warm()).map(|warm| warm.instance()) else {
        return;
    };
    let mut replaced = program.replace_processes(true).warm().unwrap().instance();
    // Enough processes for a template, and for the pages of earlier runs.
    for (instance, processes) in [(&mut kept, 1), (&mut replaced, 12)] {
        for _ in 0..12 {
            assert_eq!(instance.call_pristine(b"99\n").unwrap(), b"-1\n");
        }
        assert_eq!(instance.stats().processes, processes);
    }
}
