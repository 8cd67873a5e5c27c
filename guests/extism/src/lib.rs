//! A plug-in built with Extism's development kit, as its users write them: a dictionary that `warm`
//! builds, and every way of a plug-in to keep state, fail, or call its host.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use extism_pdk::{FnResult, WithReturnCode, config, extism, info, plugin_fn, var};

thread_local! {
    static WORDS: RefCell<HashMap<String, u32>> = RefCell::new(HashMap::new());
    static SECRET: RefCell<String> = const { RefCell::new(String::new()) };
    static SERVED: Cell<u32> = const { Cell::new(0) };
}

/// Puts `count` words, or the number in the configuration, into the dictionary; and a variable for
/// later.
#[plugin_fn]
pub fn warm(count: String) -> FnResult<()> {
    let configured = config::get("words")?;
    let count = count.parse::<u32>().ok().or_else(|| configured.and_then(|n| n.parse().ok()));
    WORDS.with_borrow_mut(|words| {
        words.extend((0..count.unwrap_or(1000)).map(|n| (format!("word-{n}"), n)));
    });
    var::set("warmed", "yes")?;
    Ok(())
}

/// Looks words up, separated by spaces: the sum of their values, the number of calls so far, and a
/// variable.
#[plugin_fn]
pub fn handle(input: String) -> FnResult<String> {
    SERVED.set(SERVED.get() + 1);
    let sum: u64 = WORDS.with_borrow(|words| {
        input.split(' ').map(|word| u64::from(words.get(word).copied().unwrap_or(0))).sum()
    });
    let warmed = var::get::<String>("warmed")?.unwrap_or_default();
    Ok(format!("{sum} {} {warmed}", SERVED.get()))
}

/// The input, as it came.
#[plugin_fn]
pub fn echo(input: Vec<u8>) -> FnResult<Vec<u8>> {
    Ok(input)
}

/// Leaves a secret in memory, in the kernel's memory, and in variables.
#[plugin_fn]
pub fn plant(secret: String) -> FnResult<String> {
    WORDS.with_borrow_mut(|words| words.insert(secret.clone(), 1));
    var::set("secret", &secret)?;
    var::remove("warmed")?;
    // Handles that are never freed, more than the kernel has room for at first.
    for _ in 0..64 {
        std::mem::forget(extism_pdk::Memory::from_bytes(secret.repeat(4096 / secret.len().max(1)))?);
    }
    info!("planted {secret}");
    SECRET.set(secret);
    Ok(SECRET.with_borrow(Clone::clone))
}

/// The visible traces of a secret.
#[plugin_fn]
pub fn probe(secret: String) -> FnResult<String> {
    let mut traces = Vec::new();
    if SECRET.with_borrow(|planted| !planted.is_empty()) {
        traces.push("static");
    }
    if WORDS.with_borrow(|words| words.contains_key(&secret)) {
        traces.push("dictionary");
    }
    if var::get::<String>("secret")?.is_some() {
        traces.push("variable");
    }
    if var::get::<String>("warmed")?.is_none() {
        traces.push("removed");
    }
    Ok(traces.join(" "))
}

/// Fails, with the input as what is wrong.
#[plugin_fn]
pub fn fail(message: String) -> FnResult<()> {
    Err(WithReturnCode::new(extism_pdk::Error::msg(message), 7))
}

/// Panics.
#[plugin_fn]
pub fn panic(message: String) -> FnResult<()> {
    panic!("{message}")
}

/// Asks its host for a page.
#[plugin_fn]
pub fn fetch(_: String) -> FnResult<()> {
    // SAFETY: a host function, which can read every handle.
    let answer = unsafe { extism::http_request(0, 0) };
    Ok(assert_eq!(answer, 0))
}
