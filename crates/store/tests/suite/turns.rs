//! Sessions that are saved turn by turn: what was appended is there, whole, whatever happens.

use crate::support;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::Stdio;

use crate::support::{PAGE, bytes, memory, options, store};
use afresh_store::{
    CompactOptions, FoldOptions, Journal, OpenError, ReplacedName, SaveError, Snapshot, Store,
    Turn, TurnBuilder, archive, diff,
};
use afresh_sys::planted::Bug;

/// A turn from one memory and state to another.
pub(crate) fn turn(was: (&[u8], &[u8]), now: (&[u8], &[u8]), parent: [u8; 32]) -> Turn {
    let (old, new) = (was.0.as_chunks::<PAGE>().0, now.0.as_chunks::<PAGE>().0);
    let mut builder = TurnBuilder::new(old.len());
    for (number, page) in new.iter().enumerate() {
        builder.page(old.get(number).map(|was| (number, was)), page);
    }
    builder.finish(was.1, now.1, parent).unwrap()
}

/// A memory that has been through `rounds` turns.
pub(crate) fn round(rounds: usize) -> (Vec<u8>, Vec<u8>) {
    let mut pages = memory(&[1, 2, 0, 3, 4, 5, 0, 0, 6]).0;
    pages.resize((9 + rounds / 3) * PAGE, 0);
    for round in 1..=rounds {
        let at = round * 4111 % pages.len();
        pages[at] = pages[at].wrapping_add(round as u8);
        if round % 4 == 0 {
            pages[2 * PAGE..3 * PAGE].fill(round as u8);
        }
    }
    (pages, format!("registers after {rounds}").into_bytes())
}

/// The turn of that number.
pub(crate) fn next_turn(journal: &Journal, rounds: usize) -> Turn {
    let ((was, state_was), (now, state)) = (round(rounds - 1), round(rounds));
    turn((&was, &state_was), (&now, &state), journal.last())
}

pub(crate) fn append(journal: &mut Journal, rounds: usize) {
    journal.append(&next_turn(journal, rounds), None).unwrap();
}

/// A session with so many turns.
pub(crate) fn session(store: &Store, name: &str, rounds: usize) -> Journal {
    let (pages, state) = round(0);
    let mut save = options();
    save.state = state;
    save.options.working_set = vec![afresh_sys::PageRange::new(0, 2)];
    let id = store.save(name, &afresh_store::MemoryPages(pages), &save).unwrap();
    let mut journal =
        store.begin_turns(name, &store.load_id(id).unwrap(), ReplacedName::Any).unwrap();
    (1..=rounds).for_each(|rounds| append(&mut journal, rounds));
    journal
}

pub(crate) fn is_round(snapshot: &Snapshot, rounds: usize) -> bool {
    let (pages, state) = round(rounds);
    bytes(snapshot) == pages && snapshot.state() == state
}

#[test]
fn a_session_opens_as_its_last_turn_left_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let mut journal = session(&store, "a", 0);
    assert!(is_round(&store.load("a").unwrap(), 0));
    for rounds in 1..=12 {
        append(&mut journal, rounds);
        let snapshot = store.load("a").unwrap();
        assert!(is_round(&snapshot, rounds), "round {rounds}");
        assert_eq!(snapshot.turns().unwrap().count, rounds);
        snapshot.check(&mut |_, _| {}).unwrap();
        let mut set = Vec::new();
        snapshot
            .read_working_set(|_, pages| {
                set.extend_from_slice(pages);
                Ok::<_, OpenError>(())
            })
            .unwrap();
        assert!(set == round(rounds).0[..2 * PAGE], "the working set is of now");
    }
    // Continues after it was opened.
    let opened = store.load("a").unwrap();
    let mut again = opened.resume_turns().unwrap().unwrap();
    append(&mut again, 13);
    assert!(is_round(&store.load("a").unwrap(), 13));
    // A writer that does not know this turn is refused, and harms nothing.
    let ((was, state_was), (now, state)) = (round(12), round(13));
    let late = turn((&was, &state_was), (&now, &state), journal.last());
    assert!(matches!(journal.append(&late, None), Err(SaveError::Moved(_))));
    // So is a turn that follows on another one.
    assert!(matches!(again.append(&late, None), Err(SaveError::Moved(_))));
    assert!(is_round(&store.load("a").unwrap(), 13));
    let found = store.load("a").unwrap().inspect();
    assert_eq!(found.turns.unwrap().count, 13);
    assert!(found.turned_pages > 0);
    assert!(diff(&opened, &store.load("a").unwrap()).unwrap().state);
}

#[test]
fn a_turn_that_was_cut_off_is_as_if_it_had_never_been() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let journal = session(&store, "a", 4);
    let (path, before) = (journal.path().unwrap().to_owned(), journal.size() as usize);
    let mut journal = journal;
    append(&mut journal, 5);
    let whole = fs::read(&path).unwrap();
    for len in before..whole.len() {
        fs::write(&path, &whole[..len]).unwrap();
        let snapshot = store.load("a").unwrap();
        assert!(is_round(&snapshot, 4), "cut at {len}");
        // As a file system leaves what was not written yet.
        let mut zeros = whole[..len].to_vec();
        zeros.resize(whole.len(), 0);
        // The first bytes of a frame are in one block of any disk.
        if zeros == whole || (before + 1..before + 8).contains(&len) {
            continue;
        }
        fs::write(&path, &zeros).unwrap();
        assert!(is_round(&store.load("a").unwrap(), 4), "zeros from {len} on");
    }
    fs::write(&path, &whole[..whole.len() - 3]).unwrap();
    let mut resumed = store.load("a").unwrap().resume_turns().unwrap().unwrap();
    append(&mut resumed, 5);
    assert!(is_round(&store.load("a").unwrap(), 5));
    assert!(fs::read(&path).unwrap() == whole, "nothing of the cut is left");
}

#[test]
fn a_flipped_bit_is_noticed_or_is_in_the_last_turn() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let mut journal = session(&store, "a", 3);
    let last = journal.size() as usize;
    append(&mut journal, 4);
    let (path, whole) =
        (journal.path().unwrap().to_owned(), fs::read(journal.path().unwrap()).unwrap());
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        fs::write(&path, &bytes).unwrap();
        match store.load("a") {
            Err(_) => {}
            // It looks like a turn that was not written whole. The padding before the next one is
            // ignored.
            Ok(snapshot) => {
                let rounds = snapshot.turns().unwrap().count;
                assert!(is_round(&snapshot, rounds), "byte {at}");
                assert!(rounds == 4 || (rounds == 3 && at >= last), "byte {at}: {rounds} turns");
            }
        }
    }
}

#[test]
fn a_delta_on_a_session_has_the_pages_of_its_turns_too() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    drop(session(&store, "a", 5));
    let (mut pages, _) = round(5);
    pages[4 * PAGE + 9] ^= 1;
    let mut delta = options();
    delta.options.parent = Some(store.load("a").unwrap());
    delta.options.changed = Some(vec![afresh_sys::PageRange::new(4, 1)]);
    delta.options.compared = true;
    store.save("b", &afresh_store::MemoryPages(pages.clone()), &delta).unwrap();
    let saved = store.load("b").unwrap();
    assert!(bytes(&saved) == pages);
    assert!(saved.layers()[1].stored() < 9, "a delta, not the whole memory");
}

#[test]
fn folding_compacting_and_exporting_preserve_the_contents() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    drop(session(&store, "a", 9));
    let live = store.load("a").unwrap();
    let folded = store.folded(&live, &FoldOptions::default()).unwrap();
    assert!(is_round(&folded, 9) && folded.turns().is_none());
    assert_eq!(folded.layers().len(), 2, "a layer of what the turns changed");
    assert_eq!(folded.working_set().len(), 1);
    folded.verify().unwrap();
    // Layers do not pile up.
    let few = FoldOptions { layers: 1, ..FoldOptions::default() };
    assert_eq!(store.folded(&live, &few).unwrap().layers().len(), 1);

    store.compact("b", &live, &CompactOptions::default()).unwrap();
    assert!(is_round(&store.load("b").unwrap(), 9));
    let file = dir.path().join("a.afresh");
    archive::export(&live, &file, Some("a")).unwrap();
    assert!(is_round(&archive::open(&file).unwrap(), 9));
    store.set_working_set("c", &live, &[afresh_sys::PageRange::new(3, 1)]).unwrap();
    assert!(is_round(&store.load("c").unwrap(), 9));
    // A delta on a session is one on what its turns made.
    let (pages, state) = round(12);
    let mut save = options();
    (save.state, save.options.parent) = (state, Some(live.clone()));
    store.save("d", &afresh_store::MemoryPages(pages), &save).unwrap();
    assert!(is_round(&store.load("d").unwrap(), 12));

    // Another chain from here, and the first is left alone.
    let mut journal = store.begin_turns("e", &live, ReplacedName::Any).unwrap();
    append(&mut journal, 10);
    assert!(is_round(&store.load("e").unwrap(), 10));
    assert!(is_round(&store.load("a").unwrap(), 9));
}

#[test]
fn gc_keeps_the_turns_of_names_and_removes_those_of_none() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let journals = || fs::read_dir(dir.path().join("journals")).unwrap().count();
    drop(session(&store, "a", 3));
    let other = session(&store, "b", 2);
    fs::write(dir.path().join("journals/.tmp-dead"), b"dead").unwrap();
    store.gc().unwrap();
    assert_eq!(journals(), 2, "what is dead is gone");
    assert!(is_round(&store.load("a").unwrap(), 3));
    let live = store.load("b").unwrap();
    // Under a further name it stays, and without any it goes.
    store.tag("c", Some(live.id())).unwrap();
    store.tag("b", None).unwrap();
    assert!(is_round(&store.load("c").unwrap(), 2));
    store.compact("c", &store.load("c").unwrap(), &CompactOptions::default()).unwrap();
    assert_eq!(journals(), 1);
    store.gc().unwrap();
    assert_eq!(journals(), 1);
    assert!(is_round(&store.load("c").unwrap(), 2));
    assert!(is_round(&live, 2), "what is open stays");
    // Its writer notices that the turn would be lost.
    let mut other = other;
    let ((was, state_was), (now, state)) = (round(2), round(3));
    let turn = turn((&was, &state_was), (&now, &state), other.last());
    assert!(matches!(other.append(&turn, None), Err(SaveError::Moved(_))));
}

#[test]
fn a_copy_without_the_turns_is_refused_and_so_is_one_by_a_reader_of_old() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(&dir.path().join("store"));
    let journal = session(&store, "a", 2);
    let manifest = fs::read(store.blob_path(journal.base())).unwrap();
    let said = String::from_utf8(manifest).unwrap();
    assert!(said.contains("application/vnd.afresh.session.config.v1+json"), "{said}");
    assert!(!said.contains("application/vnd.afresh.snapshot.config.v1+json"), "{said}");
    fs::remove_dir_all(dir.path().join("store/journals")).unwrap();
    let error = store.load("a").unwrap_err();
    assert!(matches!(error, OpenError::NoJournal { .. }), "{error}");
    assert!(error.to_string().contains("afresh push"), "{error}");
}

#[cfg(feature = "seal")]
#[test]
fn turns_are_sealed_and_signed_as_their_snapshot_is() {
    use afresh_store::Access;
    use afresh_store::seal::{SealKey, SigningKey};
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let (seal, sign) = (SealKey::generate().unwrap(), SigningKey::generate().unwrap());
    let (pages, state) = round(0);
    let mut save = options();
    (save.state, save.options.seal, save.options.sign) =
        (state, Some(seal.clone()), Some(sign.clone()));
    store.save("a", &afresh_store::MemoryPages(pages), &save).unwrap();
    let demand = || Access::new().with_key(seal.clone()).trusting([sign.public()]);
    let snapshot = store.load_with("a", &demand()).unwrap();
    let mut journal = store.begin_turns("a", &snapshot, ReplacedName::Any).unwrap();
    let step = |rounds: usize, parent| {
        let ((was, state_was), (now, state)) = (round(rounds - 1), round(rounds));
        turn((&was, &state_was), (&now, &state), parent)
    };
    let secret = b"registers after 1";
    let parent = journal.last();
    journal.append(&step(1, parent), Some(&|root| sign.sign_turn(root))).unwrap();
    assert!(is_round(&store.load_with("a", &demand()).unwrap(), 1));
    let stored = fs::read(journal.path().unwrap()).unwrap();
    assert!(!stored.windows(secret.len()).any(|window| window == secret), "written in the clear");
    assert!(store.load("a").is_err(), "it opens with the key alone");
    let other = Access::new().with_key(SealKey::generate().unwrap());
    assert!(store.load_with("a", &other).is_err());

    // Unsigned, or signed with another key: refused where a signature is demanded.
    let signed = fs::read(journal.path().unwrap()).unwrap();
    let parent = journal.last();
    journal.append(&step(2, parent), None).unwrap();
    assert!(store.load_with("a", &demand()).is_err());
    // The signature is checked before a turn is read.
    let limits = afresh_store::Limits { turns: 1, ..afresh_store::Limits::default() };
    let error = store.load_with("a", &demand().with_limits(limits)).unwrap_err();
    assert!(matches!(error, OpenError::Seal(_)), "{error}");
    let sealed_only = Access::new().with_key(seal.clone());
    assert!(is_round(&store.load_with("a", &sealed_only).unwrap(), 2));
    fs::write(journal.path().unwrap(), &signed).unwrap();
    let opened = store.load_with("a", &sealed_only).unwrap();
    let mut journal = opened.resume_turns().unwrap().unwrap();
    let stranger = SigningKey::generate().unwrap();
    let parent = journal.last();
    journal.append(&step(2, parent), Some(&|root| stranger.sign_turn(root))).unwrap();
    assert!(store.load_with("a", &demand()).is_err());
    // A folded one is sealed as before.
    let live = store.load_with("a", &sealed_only).unwrap();
    let folded = store.folded(&live, &FoldOptions::default()).unwrap();
    assert!(is_round(&folded, 2));
    assert!(store.load_id(folded.id()).is_err(), "sealed");
    assert!(matches!(store.sign("a", &sign), Err(SaveError::Session)));
}

#[cfg(feature = "remote")]
fn remote(server: &std::sync::Arc<support::objects::Server>) -> afresh_store::remote::Remote {
    let retry = afresh_store::remote::RetryPolicy {
        attempts: 3,
        timeout: std::time::Duration::from_secs(120),
        pause: std::time::Duration::from_millis(1),
        outage: std::time::Duration::ZERO,
    };
    let prefix = object_store::path::Path::from("team");
    afresh_store::remote::Remote::with_objects(server.clone(), prefix, retry).unwrap()
}

#[cfg(feature = "remote")]
#[test]
fn a_session_that_is_pushed_is_pushed_without_its_journal() {
    use afresh_store::Encoding;
    use afresh_store::remote::{Remote, RetryPolicy};
    let dir = tempfile::tempdir().unwrap();
    let store = store(&dir.path().join("store"));
    drop(session(&store, "a", 5));
    let live = store.load("a").unwrap();
    fs::create_dir(dir.path().join("remote")).unwrap();
    let url = format!("file://{}", dir.path().join("remote").display());
    let remote = Remote::open(&url, RetryPolicy::default()).unwrap();
    remote.push(&store, &live, "a", Encoding::Zstd, &mut |_| {}).unwrap();
    assert!(is_round(&remote.load("a").unwrap(), 5));
}

#[test]
fn planted_bugs_of_turns_are_caught() {
    afresh_sys::planted::must_be_caught(
        &[Bug::Patch, Bug::Turn],
        &["turns::a_session_opens_as_its_last_turn_left_it"],
    );
}

const CHILD: &str = "AFRESH_TEST_TURNS_INTO";

#[test]
fn a_kill_leaves_every_turn_that_was_said_to_be_saved() {
    if let Some(dir) = std::env::var_os(CHILD) {
        let store = Store::open(PathBuf::from(dir)).unwrap();
        let mut journal = store.load("a").unwrap().resume_turns().unwrap().unwrap();
        for rounds in journal.turns() + 1.. {
            append(&mut journal, rounds);
            println!("saved {rounds}");
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    drop(session(&store, "a", 0));
    for attempt in 0..12 {
        let mut child =
            afresh_sys::test_command("turns::a_kill_leaves_every_turn_that_was_said_to_be_saved")
                .env(CHILD, dir.path())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut saved = 0;
        let mut note = |line: String| {
            if let Some((_, number)) = line.rsplit_once("saved ") {
                saved = number.parse().unwrap();
            }
        };
        for _ in 0..3 + attempt % 4 {
            note(lines.next().unwrap().unwrap());
        }
        std::thread::sleep(std::time::Duration::from_micros(attempt as u64 * 57));
        child.kill().unwrap();
        child.wait().unwrap();
        lines.map_while(Result::ok).for_each(note);
        let snapshot = store.load("a").unwrap();
        let there = snapshot.turns().unwrap().count;
        assert!(there == saved || there == saved + 1, "{saved} were said, {there} are there");
        assert!(is_round(&snapshot, there));
    }
}

#[cfg(feature = "remote")]
#[test]
fn a_turn_in_an_object_store_is_one_request_and_opens_as_it_was() {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use afresh_store::Encoding;
    use afresh_store::remote::ReplacedName;
    use object_store::path::Path;
    use object_store::{ObjectStoreExt, PutPayload};
    use support::objects::{Server, ServerFault};

    let dir = tempfile::tempdir().unwrap();
    let store = store(&dir.path().join("store"));
    drop(session(&store, "a", 0));
    let base = store.load("a").unwrap();
    let server = Server::new();
    let remote = remote(&server);
    assert!(remote.keeps_turns());
    let mut journal = remote
        .push_turns(&store, &base, "a", Encoding::Raw, ReplacedName::Any, &mut |_| {})
        .unwrap();
    for rounds in 1..=13 {
        server.be(ServerFault::Nothing);
        append(&mut journal, rounds);
        assert_eq!(server.requests.load(Ordering::Relaxed), 1);
    }
    let opened = remote.load("a").unwrap();
    assert!(is_round(&opened, 13));
    assert_eq!(opened.turns().unwrap().count, 13);

    // Its opener continues, and the first is refused then, as is a second that opened it before.
    let mut again = opened.resume_turns().unwrap().unwrap();
    let mut late = opened.resume_turns().unwrap().unwrap();
    append(&mut again, 14);
    let ((was, state_was), (now, state)) = (round(13), round(99));
    let other = turn((&was, &state_was), (&now, &state), journal.last());
    for journal in [&mut journal, &mut late] {
        assert!(matches!(journal.append(&other, None), Err(SaveError::Moved(_))));
    }
    assert!(is_round(&remote.load("a").unwrap(), 14));
    // A lost answer does not mean that another writer was faster.
    server.be(ServerFault::Lost { times: 1 });
    append(&mut again, 15);
    server.be(ServerFault::Nothing);
    assert!(is_round(&remote.load("a").unwrap(), 15));

    // Here it is a snapshot without turns.
    let to = support::store(&dir.path().join("pulled"));
    remote.pull(&to, "a", "mine", Encoding::Zstd, &mut |_| {}).unwrap();
    let pulled = to.load("mine").unwrap();
    assert!(is_round(&pulled, 15) && pulled.turns().is_none());
    // And one that was opened there without turns continues there.
    remote.push(&to, &pulled, "b", Encoding::Zstd, &mut |_| {}).unwrap();
    let mut journal =
        remote.begin_turns("b", &remote.load("b").unwrap(), ReplacedName::Any).unwrap();
    append(&mut journal, 16);
    assert!(is_round(&remote.load("b").unwrap(), 16));

    // A turn that is damaged or missing in the middle is an error; the last one that is missing is
    // not.
    let names = |server: Arc<Server>| async move {
        use futures_util::TryStreamExt;
        use object_store::ObjectStore;
        let all: Vec<_> = server.list(Some(&Path::from("team/journals"))).try_collect().await?;
        Ok::<_, object_store::Error>(all.into_iter().map(|meta| meta.location).collect::<Vec<_>>())
    };
    let threads = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let all = threads.block_on(names(server.clone())).unwrap();
    let number = |n: &str| all.iter().find(|path| path.as_ref().ends_with(n)).unwrap().clone();
    threads.block_on(server.delete(&number("/00000014"))).unwrap();
    assert!(is_round(&remote.load("a").unwrap(), 14));
    threads.block_on(server.put(&number("/00000003"), PutPayload::from_static(b"?"))).unwrap();
    assert!(remote.load("a").is_err());
    threads.block_on(server.delete(&number("/00000003"))).unwrap();
    assert!(remote.load("a").is_err());
}

#[cfg(feature = "remote")]
#[test]
fn a_turn_whose_answers_are_all_lost_is_read_back_and_the_next_follows_on_it() {
    use afresh_store::Encoding;
    use afresh_store::remote::ReplacedName;
    use support::objects::{Server, ServerFault};

    const AWAY: ServerFault = ServerFault::Reset { after: 0, times: usize::MAX };
    let dir = tempfile::tempdir().unwrap();
    let store = store(&dir.path().join("store"));
    drop(session(&store, "a", 0));
    let server = Server::new();
    let remote = remote(&server);
    let base = store.load("a").unwrap();
    let name = ReplacedName::Any;
    let mut journal =
        remote.push_turns(&store, &base, "a", Encoding::Raw, name, &mut |_| {}).unwrap();
    for rounds in 1..=4 {
        // Odd turns are put. None can be read back while the server is away.
        let is_put = rounds % 2 == 1;
        server.be(if is_put { ServerFault::Severed { at: "" } } else { AWAY });
        let unanswered = next_turn(&journal, rounds);
        let error = journal.append(&unanswered, None).unwrap_err();
        assert!(!matches!(error, SaveError::Moved(_)), "{error}");
        server.be(AWAY);
        assert!(!matches!(journal.settle().unwrap_err(), SaveError::Moved(_)));
        server.be(ServerFault::Nothing);
        assert!(is_round(&remote.load("a").unwrap(), rounds - usize::from(!is_put)));
        assert!(journal.settle().unwrap() && !journal.settle().unwrap());
        assert!(journal.last() == *unanswered.root() && journal.turns() == rounds);
        assert!(is_round(&remote.load("a").unwrap(), rounds));
    }
    append(&mut journal, 5);
    // Another writer is faster.
    let mut other = remote.load("a").unwrap().resume_turns().unwrap().unwrap();
    server.be(AWAY);
    let ((was, state_was), (now, state)) = (round(5), round(99));
    let late = turn((&was, &state_was), (&now, &state), journal.last());
    assert!(journal.append(&late, None).is_err());
    server.be(ServerFault::Nothing);
    append(&mut other, 6);
    assert!(matches!(journal.settle(), Err(SaveError::Moved(_))));
    assert!(is_round(&remote.load("a").unwrap(), 6));
}

#[cfg(feature = "remote")]
#[test]
fn a_session_whose_name_was_changed_without_an_answer_is_saved_again() {
    use afresh_store::Encoding;
    use afresh_store::remote::{RemoteError, ReplacedName};
    use support::objects::{Server, ServerFault};

    const SEVERED: ServerFault = ServerFault::Severed { at: "index.json" };
    let dir = tempfile::tempdir().unwrap();
    let store = store(&dir.path().join("store"));
    drop(session(&store, "a", 0));
    let server = Server::new();
    let remote = remote(&server);
    let base = store.load("a").unwrap();
    let push = |replaced: ReplacedName<'_>| {
        remote.push_turns(&store, &base, "a", Encoding::Raw, replaced, &mut |_| {})
    };
    let mut journal = push(ReplacedName::Any).unwrap();
    append(&mut journal, 1);
    for _ in 0..2 {
        server.be(SEVERED);
        let error = push(ReplacedName::Journal(&journal)).unwrap_err();
        assert!(!matches!(error, RemoteError::Save(SaveError::Moved(_))), "{error}");
        server.be(ServerFault::Nothing);
        // The name was changed.
        assert!(is_round(&remote.load("a").unwrap(), 0));
    }
    let again = push(ReplacedName::Journal(&journal)).unwrap();
    assert!(remote.load("a").unwrap().id() == again.base());

    // A turn of another writer, saved after the lost answer, is not replaced.
    server.be(SEVERED);
    assert!(push(ReplacedName::Journal(&again)).is_err());
    server.be(ServerFault::Nothing);
    let mut other = remote.load("a").unwrap().resume_turns().unwrap().unwrap();
    append(&mut other, 1);
    let late = push(ReplacedName::Journal(&again)).unwrap_err();
    assert!(matches!(late, RemoteError::Save(SaveError::Moved(_))), "{late}");
    assert!(is_round(&remote.load("a").unwrap(), 1));
}

/// Each turn copies all pages of the one before twice. A pull folds the session, so it reads them.
#[cfg(feature = "remote")]
#[test]
fn a_pull_of_turns_that_copy_one_another_again_and_again_meets_a_limit() {
    use afresh_store::Limits;
    use afresh_store::remote::{Remote, RemoteError, RetryPolicy};
    let dir = tempfile::tempdir().unwrap();
    let here = store(&dir.path().join("here"));
    let bytes: Vec<u8> = (1..=255).collect();
    here.save("a", &memory(&bytes), &options()).unwrap();
    let url = format!("file://{}", dir.path().join("there").display());
    let remote = Remote::open(&url, RetryPolicy::default()).unwrap();
    let snapshot = here.load("a").unwrap();
    let any = ReplacedName::Any;
    let encoding = afresh_store::Encoding::Raw;
    let pushed = remote.push_turns(&here, &snapshot, "a", encoding, any, &mut |_| {});
    let mut journal = pushed.unwrap();
    for doubled in 0..15 {
        let pages = bytes.len() << doubled;
        let mut turn = TurnBuilder::new(pages);
        turn.copy(0, pages);
        turn.copy(0, pages);
        let turn = turn.finish(snapshot.state(), snapshot.state(), journal.last()).unwrap();
        journal.append(&turn, None).unwrap();
    }
    // 32 GiB out of one MiB.
    let error = remote.pull(&here, "a", "b", encoding, &mut |_| {}).unwrap_err();
    let limit = |error: &_| match error {
        RemoteError::Open(OpenError::Limit { name, limit, .. }) => Some((*name, *limit)),
        _ => None,
    };
    assert_eq!(limit(&error), Some(("content", 16 << 30)), "{error}");
    // A pull has the limits that it gets.
    let limits = Limits { content: 20 << 30, ..Limits::default() };
    let error = remote.pull_within(&limits, &here, "a", "b", encoding, &mut |_| {}).unwrap_err();
    assert_eq!(limit(&error), Some(("content", 20 << 30)), "{error}");
}
