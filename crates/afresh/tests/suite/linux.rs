//! A Linux program behind the front door: opened, called, leased, verified, forked and saved as any
//! other guest.

use std::path::Path;
use std::time::Duration;

use afresh::linux::Program;
use afresh::pool::Limits;
use afresh::{
    Call, CallError, CallOptions, CloneRandomness, Guest, Kind, LeaseOptions, OpenError, Options,
    OutputSource, OutputStream, Reference, SaveOptions, Session, SessionError,
};

/// `sed`, which numbers lines; `None` where this host runs no guests.
fn sed(options: Options) -> Option<Guest> {
    shaped_sed(options, |program| program)
}

/// The same, with further options of the program.
fn shaped_sed(options: Options, shape: fn(Program) -> Program) -> Option<Guest> {
    let path = ["/usr/bin/sed", "/bin/sed"].into_iter().find(|p| Path::new(p).exists());
    let Some(path) = path else {
        println!("SKIPPED: no sed");
        return None;
    };
    let options = options.linux(move |program| shape(program.arg("-u").arg("/quit/q7;=")));
    opened(afresh::open(path, &options))
}

/// The guest; `None` where this host runs none.
fn opened(opened: Result<Guest, OpenError>) -> Option<Guest> {
    match opened {
        Ok(guest) => Some(guest),
        Err(OpenError::Guest { source, .. }) if source.to_string().contains("this host") => {
            println!("SKIPPED: {source}");
            None
        }
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
fn a_program_is_a_guest_as_any_other() {
    let Some(guest) = sed(Options::new().warm(Call::text("", ["first"]))) else { return };
    assert_eq!(guest.kind(), Kind::Program);
    for _ in 0..3 {
        assert_eq!(guest.call("", b"a\n").unwrap(), b"2\na\n");
        assert_eq!(guest.invoke(&Call::text("", ["b", "c"])).unwrap().text(), "2\nb c\n");
    }
    let mut lease = guest.lease().unwrap();
    assert_eq!(lease.call("", b"a\n").unwrap(), b"2\na\n");
    assert_eq!(lease.call("", b"b\n").unwrap(), b"3\nb\n");
    drop(lease);
    let failed = guest.call("", b"quit\n").unwrap_err();
    assert!(matches!(&failed, afresh::CallError::Guest { .. }), "{failed:?}");
    // The end of its input ends it, which is an answer.
    assert_eq!(guest.call("", b"").unwrap(), b"");
    let found = guest.verify(&Call::bytes("", "x\n"), 5, &mut |_| {}).unwrap();
    assert!(found.is_pristine() && found.proves_nothing().is_none(), "{found:?}");
    assert_eq!((found.calls, found.failed_calls, found.answers_differ), (5, 0, 0));
    assert!(guest.pool_stats().created >= 1);
    // From several threads at once, each with a separate process.
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..20 {
                    assert_eq!(guest.call("", b"t\n").unwrap(), b"2\nt\n");
                }
            });
        }
    });
}

#[test]
fn verify_finds_numbers_that_clones_of_a_program_both_draw() {
    const PATH: &str = "/bin/bash";
    if !Path::new(PATH).exists() {
        return println!("SKIPPED: no bash");
    }
    // The generator behind `RANDOM` is in the shell's memory, the one behind `SRANDOM` in the
    // kernel.
    let cases = [
        ("", "echo $RANDOM", CloneRandomness::Alike),
        ("", "echo $SRANDOM $RANDOM", CloneRandomness::Partly),
        ("", "echo $SRANDOM", CloneRandomness::Differ),
        ("", "echo $line", CloneRandomness::Constant),
        (
            "exec 3</dev/afresh/generation",
            "read -t 0 -u 3 && RANDOM=$SRANDOM; echo $RANDOM",
            CloneRandomness::Differ,
        ),
    ];
    for (first, prints, expected) in cases {
        let script = format!("RANDOM=5\n{first}\nwhile read line; do {prints}; done");
        let options = Options::new().warm(Call::text("", ["first"]));
        let options = options.linux(move |program| program.arg("-c").arg(&script));
        let Some(guest) = opened(afresh::open(PATH, &options)) else { return };
        let found = guest.verify(&Call::bytes("", "x\n"), 3, &mut |_| {}).unwrap();
        assert!(found.is_pristine(), "{prints}: {found:?}");
        assert_eq!(found.clones, Some(expected), "{prints}: {found:?}");
        let repeats = matches!(expected, CloneRandomness::Alike | CloneRandomness::Partly);
        assert_eq!(!found.repeating.is_empty(), repeats, "{prints}: {found:?}");
    }
}

#[test]
fn a_program_of_bytes_is_a_guest_too() {
    if sed(Options::new()).is_none() {
        return;
    }
    let bytes = ["/usr/bin/sed", "/bin/sed"].into_iter().find_map(|path| std::fs::read(path).ok());
    let options = Options::new().linux(|program| program.arg("-u").arg("="));
    let guest = Guest::from_bytes("my-sed", &bytes.unwrap(), &options).unwrap();
    assert_eq!(
        (guest.kind(), guest.call("", b"a\n").unwrap()),
        (Kind::Program, b"1\na\n".to_vec())
    );
    // The kind of a file can be given where it cannot be recognised.
    let refused = Guest::from_bytes("text", b"no program", &options.kind(Kind::Program));
    assert!(refused.unwrap_err().to_string().contains("text"));
}

#[test]
fn a_session_of_a_program_goes_back_and_forks() {
    let Some(guest) = sed(Options::new()) else { return };
    let mut session = guest.session().unwrap();
    assert_eq!(session.call("", b"a\n").unwrap(), b"1\na\n");
    let one = session.checkpoint("one").unwrap();
    assert_eq!(session.call("", b"b\n").unwrap(), b"2\nb\n");
    let mut forks = session.fork(2).unwrap();
    for fork in &mut forks {
        assert_eq!(fork.call("", b"c\n").unwrap(), b"3\nc\n");
    }
    session.call("", b"quit\n").unwrap_err();
    assert!(session.failed().is_some());
    session.rollback("one").unwrap();
    assert_eq!(session.call("", b"d\n").unwrap(), b"2\nd\n");
    let two = session.checkpoint("two").unwrap();
    assert!(session.diff(one, two).unwrap().pages > 0);
    forks[0].rollback(two).unwrap();
    assert_eq!(forks[0].call("", b"e\n").unwrap(), b"3\ne\n");
}

#[test]
fn a_session_starts_in_the_process_of_one_that_has_ended() {
    // Idle processes end under memory pressure, unless there are no limits.
    afresh_sys::run_isolated(
        "linux::a_session_starts_in_the_process_of_one_that_has_ended",
        || {
            use afresh::pool::{Budget, ProcessLimits};
            let none = ProcessLimits { idle: None, pressure: None, ..ProcessLimits::default() };
            Budget::process().set(none);
            let Some(guest) = sed(Options::new()) else { return };
            let process = |session: &mut Session| {
                session
                    .with(|lease| Ok::<_, SessionError>(lease.as_program().unwrap().process_id()))
            };
            let mut session = guest.session().unwrap();
            assert_eq!(session.call("", b"a\n").unwrap(), b"1\na\n");
            session.files().unwrap().write("/tmp/kept", b"kept").unwrap();
            let first = process(&mut session).unwrap();
            drop(session);
            let mut session = guest.session().unwrap();
            assert!(session.files().unwrap().read("/tmp/kept").is_err());
            assert_eq!(session.call("", b"b\n").unwrap(), b"1\nb\n");
            assert_eq!(process(&mut session).unwrap(), first);
            let mut other = guest.session().unwrap();
            assert_eq!(other.call("", b"c\n").unwrap(), b"1\nc\n");
            assert_ne!(process(&mut other).unwrap(), first, "two sessions at the same time");
            // The process of a call that failed is not used again, and a panic is such a call.
            other.call("", b"quit\n").unwrap_err();
            let failed = process(&mut session).unwrap();
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                let _: Result<(), SessionError> = session.with(|_| panic!("a bug of the caller"));
            }));
            assert!(panicked.is_err());
            drop(other);
            let mut session = guest.session().unwrap();
            assert_eq!(session.call("", b"d\n").unwrap(), b"1\nd\n");
            assert_ne!(process(&mut session).unwrap(), failed);
            drop(session);

            let replacing = shaped_sed(Options::new(), |program| program.replace_processes(true));
            let Some(guest) = replacing else { return };
            let mut processes = Vec::new();
            for _ in 0..2 {
                let mut session = guest.session().unwrap();
                session.call("", b"a\n").unwrap();
                processes.push(process(&mut session).unwrap());
            }
            assert_ne!(processes[0], processes[1]);
        },
    );
}

#[test]
fn a_program_is_saved_and_opened_again() {
    let Some(guest) = sed(Options::new()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let reference = |name: &str| -> Reference {
        format!("{}@{name}", folder.path().display()).parse().unwrap()
    };
    guest.save(&reference("warm"), &SaveOptions::new()).unwrap();
    let warm = afresh::open(reference("warm").to_string(), &Options::new()).unwrap();
    assert_eq!(warm.kind(), Kind::Program);
    assert_eq!(warm.call("", b"a\n").unwrap(), b"1\na\n");
    let mut lease = warm.lease().unwrap();
    lease.call("", b"a\n").unwrap();
    lease.save(&reference("later"), &SaveOptions::new()).unwrap();
    drop(lease);
    let later = afresh::open(reference("later").to_string(), &Options::new()).unwrap();
    for _ in 0..2 {
        assert_eq!(later.call("", b"b\n").unwrap(), b"2\nb\n");
        assert_eq!(warm.call("", b"b\n").unwrap(), b"1\nb\n");
    }
    let options = SaveOptions::new().record(Call::bytes("", "a\n"));
    let saved = later.save(&reference("recorded"), &options).unwrap();
    assert!(
        saved.unrecorded.is_some() || saved.snapshot.working_set_layer().is_some(),
        "{saved:?}"
    );
    let again = afresh::open(reference("recorded").to_string(), &Options::new()).unwrap();
    assert_eq!(again.call("", b"b\n").unwrap(), b"2\nb\n");
}

#[test]
fn files_of_a_programs_session_are_read_and_written_from_outside() {
    let shell = Path::new("/bin/sh");
    if !shell.is_file() {
        println!("SKIPPED: there is no {}", shell.display());
        return;
    }
    // Runs each line that it gets.
    let options = Options::new()
        .kind(Kind::Program)
        .linux(|program| program.arg("-c").arg("while read line; do eval \"$line\"; done"));
    let Some(guest) = opened(afresh::open("/bin/sh", &options)) else { return };
    let mut session = guest.session().unwrap();
    // Before its first call, in a state without calls.
    session.files().unwrap().write("/notes/in.txt", b"from outside\n").unwrap();
    assert_eq!(session.call("", b"cat /notes/in.txt\n").unwrap(), b"from outside\n");
    session.call("", b"echo inside > /notes/out.txt; n=1\n").unwrap();
    assert_eq!(session.files().unwrap().read("/notes/out.txt").unwrap(), b"inside\n");
    let one = session.checkpoint("one").unwrap();
    session.files().unwrap().write("/notes/out.txt", b"changed\n").unwrap();
    session.files().unwrap().remove("/notes/in.txt").unwrap();
    assert_eq!(session.call("", b"cat /notes/out.txt; echo $n\n").unwrap(), b"changed\n1\n");
    let two = session.checkpoint("two").unwrap();
    let changed = session.diff_files(one, two).unwrap();
    assert_eq!(changed.changes.len(), 2, "{changed:?}");
    session.rollback(one).unwrap();
    assert_eq!(session.files().unwrap().read("/notes/out.txt").unwrap(), b"inside\n");
    assert_eq!(session.call("", b"cat /notes/*\n").unwrap(), b"from outside\ninside\n");
    // A fork's are its own; those of the next sessions are the warm state's.
    let mut fork = session.fork(1).unwrap().remove(0);
    fork.files().unwrap().write("/notes/fork.txt", b"x").unwrap();
    assert_eq!(fork.call("", b"ls /notes\n").unwrap(), b"fork.txt\nin.txt\nout.txt\n");
    assert!(session.files().unwrap().read("/notes/fork.txt").is_err());
    let mut other = guest.session().unwrap();
    assert_eq!(
        other
            .files()
            .unwrap()
            .list("/")
            .unwrap()
            .iter()
            .filter(|f| &f.name[..] == b"notes")
            .count(),
        0
    );
    // Files written to a restored instance are visible as well.
    assert_eq!(other.call("", b"ls / | grep -c notes\n").unwrap(), b"0\n");
}

#[test]
fn an_answer_of_a_program_is_heard_while_it_is_written() {
    let options = Options::new()
        .kind(Kind::Program)
        .linux(|program| program.arg("-c").arg("while read line; do eval \"$line\"; done"));
    let Some(guest) = opened(afresh::open("/bin/sh", &options)) else { return };
    let mut session = guest.session().unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let heard = move |from: OutputSource, piece: &[u8]| {
        assert_eq!(from.session_id, None);
        // With no bytes the caller only decides whether the call may continue.
        piece.is_empty()
            || sender.send((from.stream, piece.to_vec(), std::time::Instant::now())).is_ok()
    };
    let script = b"echo one; echo error >&2; sleep 1; echo host >/dev/host; echo two\n";
    session.with(|lease| Ok::<_, SessionError>(lease.call_streaming("", script, heard)?)).unwrap();
    let pieces: Vec<_> = receiver.iter().collect();
    let came: Vec<_> = pieces.iter().map(|(from, piece, _)| (*from, &piece[..])).collect();
    let wanted: [(OutputStream, &[u8]); 4] = [
        (OutputStream::Output, b"one\n"),
        (OutputStream::Error, b"error\n"),
        (OutputStream::Host, b"host\n"),
        (OutputStream::Output, b"two\n"),
    ];
    assert_eq!(came, wanted);
    let apart = pieces[3].2 - pieces[0].2;
    assert!(apart >= std::time::Duration::from_millis(500), "{apart:?}");
    // Without a listener, messages to the host are part of the answer.
    assert_eq!(session.call("", b"echo host >/dev/host\n").unwrap(), b"host\n");
    session.checkpoint("kept").unwrap();
    // A listener that wants no more ends the call, and the session goes back.
    let unheard = session.with(|lease| {
        Ok::<_, SessionError>(lease.call_streaming("", b"n=2; echo a; echo b\n", |_, _| false)?)
    });
    assert!(unheard.is_err() && session.failed().is_some());
    session.rollback("kept").unwrap();
    assert_eq!(session.call("", b"echo [$n]\n").unwrap(), b"[]\n");
    // A process with its own session is reported by its id, and continues between two calls.
    let (sender, receiver) = std::sync::mpsc::channel();
    let heard = move || {
        let sender = sender.clone();
        move |from: OutputSource, piece: &[u8]| {
            let text = String::from_utf8_lossy(piece).into_owned();
            piece.is_empty() || sender.send((from.session_id, text)).is_ok()
        }
    };
    let script = b"(setsid sh -c 'echo begun; sleep 0.2; echo done' &); echo own\n";
    session
        .with(|lease| Ok::<_, SessionError>(lease.call_streaming("", script, heard())?))
        .unwrap();
    let due = session.with(|lease| Ok::<_, SessionError>(lease.due())).unwrap();
    assert!(due.is_some_and(|due| due <= std::time::Duration::from_millis(200)), "{due:?}");
    std::thread::sleep(std::time::Duration::from_millis(250));
    session.with(|lease| Ok::<_, SessionError>(lease.proceed(heard())?)).unwrap();
    assert_eq!(session.with(|lease| Ok::<_, SessionError>(lease.due())).unwrap(), None);
    drop(heard);
    let mut came: Vec<_> = receiver.iter().collect();
    assert_eq!(
        came.pop().map(|(session, text)| (session.is_some(), text)),
        Some((true, "done\n".to_owned()))
    );
    came.sort();
    assert_eq!(came.len(), 2);
    assert_eq!(came[0], (None, "own\n".to_owned()));
    assert!(came[1].0.is_some() && came[1].1 == "begun\n");
    // A guest of another kind reports the answer whole.
    let wasm = wat::parse_str(
        r#"(module (memory (export "memory") 1) (data (i32.const 8) "hi")
            (func (export "afresh_buffer") (param i32) (result i32) (i32.const 64))
            (func (export "handle") (param i32) (result i64)
                (i64.or (i64.shl (i64.const 8) (i64.const 32)) (i64.const 2))))"#,
    );
    let module = Guest::from_bytes("hi", &wasm.unwrap(), &Options::new()).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let mut lease = module.lease().unwrap();
    lease
        .call_streaming("handle", b"", move |_, piece| sender.send(piece.to_vec()).is_ok())
        .unwrap();
    assert_eq!(receiver.iter().collect::<Vec<_>>(), [b"hi"]);
}

#[test]
fn a_snapshot_reads_of_the_host_what_its_opener_grants() {
    let granted = tempfile::tempdir().unwrap();
    std::fs::write(granted.path().join("secret"), "hush").unwrap();
    let script = format!("while read -r line; do cat {}/secret; done", granted.path().display());
    let path = granted.path().to_path_buf();
    let also = path.clone();
    let grants = Options::new().linux(move |program| program.grant(&path));
    let runs = Options::new().linux(move |program| program.grant(&also).arg("-c").arg(&script));
    let Some(guest) = opened(afresh::open("/bin/sh", &runs)) else { return };
    assert_eq!(guest.call("", b"go\n").unwrap(), b"hush");
    let place = tempfile::tempdir().unwrap();
    let reference: Reference = format!("{}@sh", place.path().display()).parse().unwrap();
    guest.save(&reference, &SaveOptions::default()).unwrap();
    // The snapshot may come from a stranger: it names the directory, and its reader has to grant
    // it.
    let error = afresh::open(reference.to_string(), &Options::new()).unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("grant it again"), "{error}: {cause}");
    let again = afresh::open(reference.to_string(), &grants).unwrap();
    assert_eq!(again.call("", b"go\n").unwrap(), b"hush");
}

#[test]
fn a_dropped_call_of_a_task_ends_the_program_and_an_option_its_time() {
    let limits = Limits { items: 1, ..Limits::default() };
    let options = Options::new().limits(limits).timeout(Duration::from_secs(300));
    let Some(guest) = opened(afresh::open("/bin/sh", &options)) else { return };
    let endless = b"n=1; while :; do n=2; done\n";
    let soon = CallOptions::new().timeout(Duration::from_millis(50));
    let late = guest.call_with("", endless, &soon).unwrap_err();
    assert!(matches!(late, CallError::Timeout { .. }), "{late:?}");
    let fuel = guest.call_with("", b"echo a\n", &CallOptions::new().fuel(1)).unwrap_err();
    assert!(matches!(fuel, CallError::Option { .. }), "{fuel:?}");
    let lease = guest.lease_with(&LeaseOptions::new().timeout(Duration::from_millis(50)));
    assert!(matches!(lease.unwrap().call("", endless), Err(CallError::Timeout { .. })));

    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let mut lease = guest.lease_async().await.unwrap();
        let spinning = lease.call("", *endless);
        assert!(tokio::time::timeout(Duration::from_millis(100), spinning).await.is_err());
        assert!(lease.is_closed());
        // There is one instance, and the time limit of its call is longer than that of the test.
        let mut next = guest.lease_async().await.unwrap();
        assert_eq!(next.call("", *b"echo $n\n").await.unwrap(), b"\n");
    });
    // The time limit of the lease is over with it.
    let mut owned = guest.lease_owned().unwrap();
    assert_eq!(owned.as_program().unwrap().time_limit(), Duration::from_secs(300));
    assert_eq!(
        std::thread::spawn(move || owned.call("", b"echo a\n")).join().unwrap().unwrap(),
        b"a\n"
    );
}

/// Grows a variable of the shell to 64 MiB, and returns its length.
const GROW: &[u8] = b"a=aaaaaaaa; for i in 0 1 2 3 4 5 6 7 8 9 a b c d e f g h i j k l m; do a=$a$a; done; echo ${#a}\n";
/// The answer.
const GROWN: &[u8] = b"67108864\n";

#[test]
fn a_memory_limit_of_a_call_goes_before_those_of_its_lease_and_its_program() {
    const LARGE_LIMIT: u64 = 1 << 30;
    const SMALL_LIMIT: u64 = 32 << 20;
    let limit = |bytes| CallOptions::new().memory(bytes);
    let fails = |answer: Result<Vec<u8>, CallError>| {
        assert!(matches!(&answer, Err(CallError::Guest { .. })), "{answer:?}");
    };
    let limits = Limits { items: 1, ..Limits::default() };
    let options = Options::new().limits(limits);
    let Some(guest) = opened(afresh::open("/bin/sh", &options)) else { return };
    assert_eq!(guest.call("", GROW).unwrap(), GROWN);
    fails(guest.call_with("", GROW, &limit(SMALL_LIMIT)));
    // The limit of a call is over with it, and so is that of a lease.
    assert_eq!(guest.call("", GROW).unwrap(), GROWN);
    let small = LeaseOptions::new().memory(SMALL_LIMIT);
    fails(guest.lease_with(&small).unwrap().call("", GROW));
    let mut lease = guest.lease_with(&small).unwrap();
    assert_eq!(lease.call_with("", GROW, &limit(LARGE_LIMIT)).unwrap(), GROWN);
    assert_eq!(lease.as_program().unwrap().memory_limit(), SMALL_LIMIT);
    fails(lease.call("", b"b=$a; echo ${#b}\n"));
    drop(lease);
    assert_eq!(guest.call("", GROW).unwrap(), GROWN);

    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let mut lease = guest.lease_async_with(&LeaseOptions::new()).await.unwrap();
        fails(lease.call_with("", GROW, &limit(SMALL_LIMIT)).await);
    });

    let Some(guest) = opened(afresh::open("/bin/sh", &options.memory(SMALL_LIMIT))) else { return };
    fails(guest.call("", GROW));
    assert_eq!(guest.call_with("", GROW, &limit(LARGE_LIMIT)).unwrap(), GROWN);
    let mut session = guest.session().unwrap();
    assert_eq!(session.call_with("", GROW, &limit(LARGE_LIMIT)).unwrap(), GROWN);
    // The state keeps memory that it has, and has the limit of its program again.
    assert_eq!(session.call("", b"echo on\n").unwrap(), b"on\n");
    session
        .with(|lease| {
            assert_eq!(lease.as_program().unwrap().memory_limit(), SMALL_LIMIT);
            Ok::<_, SessionError>(())
        })
        .unwrap();
    let mut fork = session.fork(1).unwrap().remove(0);
    fork.call("", b"b=$a; echo ${#b}\n").unwrap_err();
}

#[test]
fn cached_host_files_that_no_guest_shows_are_released_under_memory_pressure() {
    use afresh::linux::cached_file_bytes;
    use afresh::pool::{Budget, ProcessLimits, Usage};
    // The cache is one for all guests of a process.
    afresh_sys::run_isolated(
        "linux::cached_host_files_that_no_guest_shows_are_released_under_memory_pressure",
        || {
            if afresh_sys::host::memory_stalls().is_none() {
                return println!("SKIPPED: this kernel does not report memory pressure");
            }
            let budget = Budget::process();
            let none = ProcessLimits { idle: None, pressure: None, ..ProcessLimits::default() };
            budget.set(none);
            let Some(guest) = sed(Options::new()) else { return };
            assert_eq!(guest.call("", b"a\n").unwrap(), b"1\na\n");
            let shown = budget.usage().cache_bytes;
            assert!(shown > 0, "the program and its libraries are mapped");
            let Some(shell) = opened(afresh::open("/bin/sh", &Options::new())) else { return };
            assert_eq!(shell.call("", b"echo on\n").unwrap(), b"on\n");
            drop(shell);
            let cached = budget.usage().cache_bytes;
            assert!(cached > shown, "{cached}: a file stays after its last guest");
            // Any pressure is at least that.
            budget.set(ProcessLimits { pressure: Some(0), ..none });
            let until = |bytes: usize, released: u64| {
                let since = std::time::Instant::now();
                let holds = |usage: Usage| {
                    usage.cache_bytes <= bytes && usage.released_cache_bytes >= released
                };
                while !holds(budget.usage()) {
                    assert!(since.elapsed() < Duration::from_secs(120), "{:?}", budget.usage());
                    std::thread::sleep(Duration::from_millis(10));
                }
            };
            // Files that only the shell showed are released. `sed` shows the common libraries.
            until(cached - 1, 1);
            assert!(budget.usage().cache_bytes > 0, "the guest shows its libraries");
            assert_eq!(guest.call("", b"a\n").unwrap(), b"1\na\n");
            drop(guest);
            until(0, cached as u64);
            assert_eq!(cached_file_bytes(), 0);
            let guest = sed(Options::new()).unwrap();
            assert_eq!(guest.call("", b"a\n").unwrap(), b"1\na\n");
        },
    );
}
