//! The configuration that a bucket of a fleet must have.
//!
//! Promises: hosts and `afresh fleet init` refuse a bucket that would lose entries or refuse
//! changes, and name the command that corrects it.

use std::time::Duration;

use async_nats::jetstream::stream::{Config, DiscardPolicy};

use crate::sandbox::records::store::MAX_ENTRY;

/// A fault of a bucket, and the options that correct it.
fn fault(found: &Config) -> Option<(String, String)> {
    let holds = |limit: i64| limit > 0;
    if found.sealed || found.mirror.is_some() {
        let fault = "it is sealed or a mirror, and takes no changes";
        return Some((fault.to_owned(), String::new()));
    }
    let least = i32::try_from(MAX_ENTRY).unwrap_or(i32::MAX);
    if found.max_message_size > 0 && found.max_message_size < least {
        let fault = format!(
            "it takes entries of {} bytes, and hosts write {least}",
            found.max_message_size
        );
        return Some((fault, format!("--max-msg-size {least}")));
    }
    if found.max_age > Duration::ZERO {
        let fault = format!("it removes entries after {} s", found.max_age.as_secs());
        return Some((fault, "--max-age 0".to_owned()));
    }
    if !found.allow_message_ttl {
        let fault = "it ignores the lifetimes of entries";
        return Some((fault.to_owned(), "--allow-msg-ttl".to_owned()));
    }
    if found.discard == DiscardPolicy::Old && (holds(found.max_bytes) || holds(found.max_messages))
    {
        let fault = "it removes the oldest entries when it is full";
        return Some((fault.to_owned(), "--discard new".to_owned()));
    }
    if found.deny_purge || !found.allow_rollup {
        let fault = "it refuses removals";
        return Some((fault.to_owned(), String::new()));
    }
    None
}

/// Refuses a bucket that hosts cannot use.
pub(super) fn check_bucket(name: &str, found: &Config) -> Result<(), String> {
    let Some((fault, options)) = fault(found) else { return Ok(()) };
    let advice = match options.is_empty() {
        true => format!(
            "save the ledger (`afresh fleet backup`), run `nats stream rm KV_{name}`, and restore it (`afresh fleet restore`)"
        ),
        false => format!("run `nats stream edit KV_{name} {options}`"),
    };
    Err(format!("the bucket {name} is not configured for a fleet: {fault}; {advice}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_that_would_lose_entries_is_refused_with_the_way_out() {
        let good = Config { allow_message_ttl: true, allow_rollup: true, ..Config::default() };
        assert_eq!(check_bucket("b", &good), Ok(()));
        let large = Config { max_message_size: 64 << 20, max_bytes: -1, ..good.clone() };
        assert_eq!(check_bucket("b", &large), Ok(()));
        let of = || good.clone();
        for (found, advice) in [
            (Config { max_message_size: 10, ..of() }, "edit KV_b --max-msg-size"),
            (Config { max_age: Duration::from_secs(1), ..of() }, "edit KV_b --max-age 0"),
            (Config { allow_message_ttl: false, ..of() }, "edit KV_b --allow-msg-ttl"),
            (Config { max_bytes: 1 << 30, ..of() }, "edit KV_b --discard new"),
            (Config { sealed: true, ..of() }, "rm KV_b"),
            (Config { allow_rollup: false, ..of() }, "rm KV_b"),
        ] {
            let why = check_bucket("b", &found).unwrap_err();
            assert!(why.contains(advice), "{why}");
        }
    }
}
