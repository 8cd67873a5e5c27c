//! A Linux program behind the front door: opened, called, leased, verified, forked and saved as any other guest.

use afresh::{Call, Guest, Kind, OpenError, Options, Reference, SaveOptions};

/// `sed`, which numbers lines; `None` where this host runs no guests.
fn sed(options: Options) -> Option<Guest> {
    let path = ["/usr/bin/sed", "/bin/sed"].into_iter().find(|p| std::path::Path::new(p).exists());
    let Some(path) = path else {
        println!("SKIPPED: no sed");
        return None;
    };
    let options = options.linux(|program| program.arg("-u").arg("/quit/q7;="));
    match afresh::open(path, &options) {
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
        assert_eq!(guest.ask(&Call::text("", ["b", "c"])).unwrap().text(), "2\nb c\n");
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
    // From several threads at once, each with a process of its own.
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
    // What a file is can be said where it cannot be told.
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
