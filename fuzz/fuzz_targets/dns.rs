//! Any bytes as a guest's question to DNS: refused, or a short name inside of its message. The
//! answer has a bounded length and repeats the question.
#![no_main]

#[path = "../../crates/linux/src/sentry/net/dns_message.rs"]
mod dns_message;

use std::net::Ipv4Addr;

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use dns_message::{ADDRESS, HEAD, INTERNET, MAX_NAME, answer, question};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Memory for a name, which grows by doubling, and its answer.
const ROOM: usize = 4 << 10;

fuzz_target!(|data: &[u8]| {
    let (asked, _) = within(ROOM, || question(data));
    let Some(asked) = accepted(asked.ok_or("no question")) else { return };
    assert!(asked.name.len() <= MAX_NAME && data[HEAD..].starts_with(asked.bytes));
    assert!(!asked.name.bytes().any(|byte| byte.is_ascii_uppercase()));
    for address in [None, Some(Ipv4Addr::LOCALHOST)] {
        let (told, _) = within(ROOM, || answer(data, Some(&asked), 0, address));
        assert!(told.len() <= HEAD + asked.bytes.len() + 16);
        assert_eq!(told[..2], data[..2]);
        assert_eq!(&told[HEAD..][..asked.bytes.len()], asked.bytes);
        // As a question it is refused, for it is an answer.
        assert_eq!(question(&told), None);
    }
    let kind = [ADDRESS.to_be_bytes(), INTERNET.to_be_bytes()].concat();
    assert_eq!(asked.kind == ADDRESS, asked.bytes.ends_with(&kind));
});
