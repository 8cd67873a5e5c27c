//! Any bytes as a request and an answer in HTTP: an answer is whole or not, and no bytes behind a
//! whole one change that. The request ends at the first zero. Nothing is allocated for an answer.
#![no_main]

#[path = "../../crates/linux/src/http.rs"]
mod http;

use afresh_budget::meter::{Meter, within};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Memory in addition to a request, which may be made longer, and to names of codings.
const ROOM: usize = 4 << 10;

fuzz_target!(|data: &[u8]| {
    let end = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    let (request, answer) = (&data[..end], data.get(end + 1..).unwrap_or_default());
    let (full, _) = within(2 * request.len() + ROOM, || http::in_full(request).into_owned());
    assert_eq!(*http::in_full(&full), full, "a whole request is left alone");
    let (whole, _) = within(answer.len() + ROOM, || http::is_whole(&full, answer));
    if whole {
        let more = [answer, b"HTTP/1.1 200 OK\r\n\r\n"].concat();
        assert!(http::is_whole(&full, &more), "it was whole before more came");
    }
    if std::env::var_os("AFRESH_FUZZ_SEEDS").is_some() {
        assert!(whole, "a seed is a whole answer");
    }
});
