//! `session`, saved: a turn persisted, durably, and the session opened again as a new process does.
//! The rivals save the differences from the snapshot by comparing all of it, and write everything.
//!
//! Every iteration makes a turn first, outside of the clock. The size of a turn in the store is a
//! separate row.

use std::path::Path;
use std::time::{Duration, Instant};

use afresh::wasm::GuestOptions;
use afresh::{Call, Guest, Options as Opening, Reference, SaveOptions, Session};

use crate::row::{Contestant, Options, Row, Sink, contest, summarise};

/// Name of the table.
const TABLE: &str = "session";
/// Turns before a session is opened again.
const TURNS: u64 = 50;

/// The kind of a turn.
#[derive(Clone, Copy)]
enum Turn {
    /// Requests to the guest with the heap of 45 MiB.
    Query,
    /// An object is pushed, by a guest that evaluates code.
    Push,
}

impl Turn {
    fn call(self, number: u64) -> (&'static str, Vec<u8>) {
        match self {
            Self::Query => ("handle", crate::session::request(number)),
            Self::Push => ("evaluate", evaluate("heap.push({turn: heap.length, done: true})")),
        }
    }
}

/// A request to evaluate code: an array of kind, tools, source, name and arguments, as CBOR.
fn evaluate(source: &str) -> Vec<u8> {
    let mut request = vec![0x85, 0, 0x80, 0x79];
    request.extend_from_slice(&(source.len() as u16).to_be_bytes());
    request.extend_from_slice(source.as_bytes());
    request.extend_from_slice(&[0x61, b'x', 0x80]);
    request
}

/// A session, and where it is saved.
struct SavedSession {
    session: Session,
    turn: Turn,
    turns: u64,
}

impl SavedSession {
    fn turn(&mut self) -> anyhow::Result<()> {
        self.turns += 1;
        let (function, input) = self.turn.call(self.turns);
        self.session.call(function, &input)?;
        Ok(())
    }

    /// The time that `save` takes after each of `n` turns.
    fn timed(
        &mut self,
        n: u64,
        mut save: impl FnMut(&mut Session) -> anyhow::Result<()>,
    ) -> anyhow::Result<Duration> {
        let mut total = Duration::ZERO;
        for _ in 0..n {
            self.turn()?;
            let started = Instant::now();
            save(&mut self.session)?;
            total += started.elapsed();
        }
        Ok(total)
    }
}

fn reference(dir: &Path, name: &str) -> anyhow::Result<Reference> {
    Ok(format!("{}@{name}", dir.join("store").display()).parse()?)
}

/// A guest that evaluates imports where its output goes, and calls it for output alone.
fn opening(cache: Option<&Path>) -> Opening {
    let stubs = GuestOptions { stub_imports: true, ..GuestOptions::default() };
    let options = Opening::new().wasm(stubs);
    match cache {
        Some(cache) => options.cache(cache),
        None => options,
    }
}

/// A session of the snapshot `base`.
fn session(base: &Reference, cache: &Path, turn: Turn) -> anyhow::Result<SavedSession> {
    let guest = afresh::open(base.to_string(), &opening(Some(cache)))?;
    Ok(SavedSession { session: guest.session()?, turn, turns: 0 })
}

/// The contests; `small` is a guest that evaluates code.
///
/// # Errors
/// The first that any contestant meets.
pub(crate) fn all(
    wasm: &[u8],
    small: Option<&[u8]>,
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let warm = opening(None).warm(Call::text("warm", [""; 0]));
    cases("js45", wasm, &warm, Turn::Query, options, sink)?;
    let Some(small) = small else { return Ok(()) };
    let heap = |objects: u32| {
        let setup = format!(
            "globalThis.heap = Array.from({{length: {objects}}}, (_, i) => ({{id: i, name: 'object ' + i}}))"
        );
        warm.clone().warm(Call::bytes("evaluate", evaluate(&setup)))
    };
    cases("js1", small, &heap(2_000), Turn::Push, options, sink)?;
    // As many objects as take 39 MiB.
    cases("js39", small, &heap(200_000), Turn::Push, options, sink)
}

fn cases(
    name: &str,
    wasm: &[u8],
    warm: &Opening,
    turn: Turn,
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let (dir, cache) = (dir.path(), &dir.path().join("cache"));
    let base = &reference(dir, "base")?;
    let guest = Guest::from_bytes(name, wasm, &warm.clone().cache(cache))?;
    guest.save(base, &SaveOptions::new())?;
    drop(guest);

    let case = format!("{name}/save-turn");
    let (mut ours, mut other) = (session(base, cache, turn)?, session(base, cache, turn)?);
    let (to, compared) = (reference(dir, "turns")?, reference(dir, "compared")?);
    let save = SaveOptions::new();
    // The first names the session.
    ours.session.save_turn(&to, &save)?;
    let mut sizes = Vec::new();
    let field = vec![
        Contestant::timed("afresh", |n| {
            ours.timed(n, |session| {
                let saved = session.save_turn(&to, &save)?;
                sizes.push(saved.bytes as f64);
                Ok(())
            })
        }),
        Contestant::timed("compare all, save pages", |n| {
            other.timed(n, |session| Ok(session.save(&compared, &save).map(drop)?))
        }),
    ];
    let few = Options { rounds: options.rounds.min(7), ..options.clone() };
    contest(TABLE, &case, &few, field, sink)?;
    if !sizes.is_empty() {
        let row = summarise(TABLE, &case, "bytes of a turn".to_owned(), 1, sizes);
        sink(&Row { unit: "bytes", ..row });
    }
    reopen(name, base, dir, cache, turn, &few, sink)
}

/// The steps of a new process: an engine, the session opened, its first answer. The compiled module
/// comes from the cache.
fn reopen(
    name: &str,
    base: &Reference,
    dir: &Path,
    cache: &Path,
    turn: Turn,
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let case = format!("{name}/reopen");
    let to = reference(dir, "reopened")?;
    let whole = reference(dir, "whole")?;
    let mut saved = session(base, cache, turn)?;
    for _ in 0..TURNS {
        saved.turn()?;
        saved.session.save_turn(&to, &SaveOptions::new())?;
    }
    saved.session.save(&whole, &SaveOptions::new())?;
    let (function, input) = turn.call(0);
    let expected = saved.session.fork(1)?.remove(0).call(function, &input)?;
    let open = |what: &Reference, first: bool| {
        let started = Instant::now();
        let guest = afresh::open(what.to_string(), &opening(Some(cache)))?;
        let mut session = guest.session()?;
        if first {
            anyhow::ensure!(session.call(function, &input)? == expected, "it answers otherwise");
        }
        let took = started.elapsed();
        Ok((took, guest, session))
    };
    let timed = |what: &Reference, first: bool, n: u64| {
        let mut total = Duration::ZERO;
        for _ in 0..n {
            // The time to take it down does not count.
            total += open(what, first)?.0;
        }
        anyhow::Ok(total)
    };
    let field = vec![
        Contestant::timed("afresh, 50 turns", |n| timed(&to, false, n)),
        Contestant::timed("afresh, to its first answer", |n| timed(&to, true, n)),
        Contestant::timed("a snapshot, to its first answer", |n| timed(&whole, true, n)),
    ];
    contest(TABLE, &case, options, field, sink)
}
