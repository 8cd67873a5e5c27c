//! A search over a live guest: try every move in a fork, keep the best, go back when it was a dead
//! end.
//!
//! `cargo run -p afresh --example session`

use afresh::{Call, Guest, Options, Session};

/// Holds a number. A move adds 7 or doubles it; 1000 and more is too far, which traps.
const PUZZLE: &str = r#"(module
    (memory 20)
    (func $set (param i32)
        (if (i32.ge_u (local.get 0) (i32.const 1000)) (then (unreachable)))
        (i32.store (i32.const 900000) (local.get 0)))
    (func (export "start") (param i32) (call $set (local.get 0)))
    (func (export "add") (call $set (i32.add (i32.load (i32.const 900000)) (i32.const 7))))
    (func (export "double") (call $set (i32.mul (i32.load (i32.const 900000)) (i32.const 2))))
    (func (export "number") (result i32) (i32.load (i32.const 900000))))"#;

fn call(name: &str) -> Call {
    Call::text(name, [] as [&str; 0])
}

fn number(session: &mut Session) -> Result<u32, Box<dyn std::error::Error>> {
    Ok(session.invoke(&call("number"))?.text().parse()?)
}

/// The moves that come nearest to `target` without passing it, by forks.
pub(crate) fn search(target: u32) -> Result<Vec<&'static str>, Box<dyn std::error::Error>> {
    let options = Options::new().warm(Call::text("start", ["1"]));
    let guest = Guest::from_bytes("puzzle", &wat::parse_str(PUZZLE)?, &options)?;
    let mut session = guest.session()?;
    let mut moves = Vec::new();
    loop {
        let tried = ["add", "double"];
        let mut best: Option<(u32, &str, Session)> = None;
        for (name, mut fork) in tried.into_iter().zip(session.fork(tried.len())?) {
            // A failed one is merely not a candidate, and does not affect its relatives.
            if fork.invoke(&call(name)).is_ok() {
                let reached = number(&mut fork)?;
                if reached <= target && best.as_ref().is_none_or(|(most, ..)| reached > *most) {
                    best = Some((reached, name, fork));
                }
            }
        }
        let Some((reached, name, fork)) = best else { break };
        println!("{name}: {reached}");
        moves.push(name);
        session = fork;
    }
    Ok(moves)
}

/// Goes too far, which traps, and back to where it was.
pub(crate) fn try_and_go_back() -> Result<(u32, u32), Box<dyn std::error::Error>> {
    let options = Options::new().warm(Call::text("start", ["600"]));
    let guest = Guest::from_bytes("puzzle", &wat::parse_str(PUZZLE)?, &options)?;
    let mut session = guest.session()?;
    session.invoke(&call("add"))?;
    session.checkpoint("near")?;
    let near = number(&mut session)?;
    let failed = session.invoke(&call("double")).is_err() && session.failed().is_some();
    println!("doubling {near} failed: {failed}");
    session.rollback("near")?;
    for state in session.tree() {
        println!("{} {:?}: {} private pages", state.id, state.name, state.own_pages);
    }
    Ok((near, number(&mut session)?))
}

#[allow(dead_code, reason = "the tests call what it calls")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("{:?}", search(500)?);
    println!("{:?}", try_and_go_back()?);
    Ok(())
}
