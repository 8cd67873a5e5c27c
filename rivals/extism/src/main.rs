//! Calls of a plug-in: Extism's own library and afresh, in turns.
//!
//! `rival-extism PLUGIN KERNEL`: `target/guests/extism.wasm` and
//! `target/guests/extism-kernel.wasm`; one JSON object a line.
//!
//! `call` is Extism as its users call it: one instance, whose kernel is reset before each call,
//! while the plug-in keeps its memory and variables. `new-plugin` makes each call start anew, from
//! the compiled module and a new warm-up, because Extism keeps no warm state; `new-plugin-cold`
//! leaves the warm-up out, for functions that need none. Both of the `afresh` contestants start
//! each call from the warm state, and reset all of it.

use std::error::Error;
use std::time::{Duration, Instant};

use afresh_wasm::{Engine, EngineConfig, Extism, Guest, GuestOptions, Mode, Warm, WarmUp};
use extism::{CompiledPlugin, Manifest, Plugin, PluginBuilder, Wasm};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Words of the dictionary.
const WORDS: &str = "20000";
/// Rounds, in which each has its turn, and how long a turn is.
const ROUNDS: usize = 15;
const TURN: Duration = Duration::from_millis(60);

/// A new plug-in that is not warmed.
const COLD: &str = "extism-new-plugin-cold";

/// A call, by its contestant.
type Call<'a> = (&'static str, Box<dyn FnMut(&str, &[u8]) -> Outcome<Vec<u8>> + 'a>);

fn ours(warm: &Warm) -> impl FnMut(&str, &[u8]) -> Outcome<Vec<u8>> {
    let entries: Vec<_> =
        ["handle", "echo"].map(|name| (name, warm.bytes_entry(name))).into_iter().collect();
    move |name, input| {
        let entry = entries.iter().find(|(known, _)| *known == name);
        let (_, Ok(entry)) = entry.ok_or("no such function")? else {
            return Err("no entry".into());
        };
        Ok(warm.lease()?.call_bytes(entry, input)?)
    }
}

/// Microseconds that one call takes, the mean of a turn.
fn turn(call: &mut Call<'_>, name: &str, input: &[u8], wanted: &[u8]) -> Outcome<f64> {
    let (start, mut calls) = (Instant::now(), 0u32);
    while start.elapsed() < TURN {
        let answer = (call.1)(name, input)?;
        // Where nothing is reset the number of calls is another.
        if answer.len() < wanted.len() || answer[..2] != wanted[..2] {
            return Err(format!("{} answers {:?}", call.0, String::from_utf8_lossy(&answer)).into());
        }
        calls += 1;
    }
    Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(calls))
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: rival-extism PLUGIN KERNEL";
    let plugin = std::fs::read(arguments.next().ok_or(usage)?)?;
    let kernel = std::fs::read(arguments.next().ok_or(usage)?)?;

    let engine = Engine::new(EngineConfig::default())?;
    let warm = |mode| -> Outcome<Warm> {
        let options = GuestOptions { mode, ..GuestOptions::default() };
        let guest = Guest::extism(&engine, &kernel, &[("main", &plugin)], Extism::new(), options)?;
        Ok(guest.warm(WarmUp::new().call_bytes("warm", WORDS))?)
    };
    let (reset, fresh) = (warm(Mode::Reset)?, warm(Mode::Fresh)?);
    let manifest = Manifest::new([Wasm::data(plugin.clone())]);
    let compiled = CompiledPlugin::new(PluginBuilder::new(manifest).with_cache_disabled())?;
    let mut one = Plugin::new_from_compiled(&compiled)?;
    one.call::<&str, &[u8]>("warm", WORDS)?;

    let mut calls: Vec<Call<'_>> = vec![
        ("afresh-reset", Box::new(ours(&reset))),
        ("afresh-fresh", Box::new(ours(&fresh))),
        (
            "extism-call",
            Box::new(move |name, input| Ok(one.call::<&[u8], &[u8]>(name, input)?.to_vec())),
        ),
        (
            "extism-new-plugin",
            Box::new(|name, input| {
                let mut plugin = Plugin::new_from_compiled(&compiled)?;
                plugin.call::<&str, &[u8]>("warm", WORDS)?;
                Ok(plugin.call::<&[u8], &[u8]>(name, input)?.to_vec())
            }),
        ),
        (
            COLD,
            Box::new(|name, input| {
                let mut plugin = Plugin::new_from_compiled(&compiled)?;
                Ok(plugin.call::<&[u8], &[u8]>(name, input)?.to_vec())
            }),
        ),
    ];
    let text = "word-7 word-19999 word-3 ".repeat(4);
    let page = vec![b'x'; 64 << 10];
    let cases: [(&str, &str, &[u8]); 3] = [
        ("lookup", "handle", text.as_bytes()),
        ("echo-8", "echo", b"12345678"),
        ("echo-64KiB", "echo", &page),
    ];
    for (case, name, input) in cases {
        let wanted = (calls[0].1)(name, input)?;
        let mut times = vec![Vec::new(); calls.len()];
        // Without a dictionary there is nothing to look up.
        let takes_part = |who: &str| who != COLD || name == "echo";
        for _ in 0..ROUNDS {
            let field = calls.iter_mut().zip(&mut times);
            for (call, times) in field.filter(|(call, _)| takes_part(call.0)) {
                times.push(turn(call, name, input, &wanted)?);
            }
        }
        let field = calls.iter().zip(times);
        for ((who, _), mut times) in field.filter(|((who, _), _)| takes_part(who)) {
            times.sort_by(f64::total_cmp);
            println!(
                "{{\"table\":\"extism-rival\",\"case\":\"{case}\",\"strategy\":\"{who}\",\"median\":{:.3},\"min\":{:.3},\
                 \"max\":{:.3},\"unit\":\"us\"}}",
                times[ROUNDS / 2],
                times[0],
                times[ROUNDS - 1]
            );
        }
    }
    Ok(())
}
