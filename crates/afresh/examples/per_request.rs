//! A Wasm module for each request: one warm guest, many threads, nothing left from one request to
//! the next.
//!
//! `cargo run -p afresh --example per_request`

use afresh::{Guest, Options};

/// Counts requests in its memory, and answers with how many it has seen and the last byte of the
/// input.
const HANDLER: &str = r#"(module
    (memory (export "memory") 1)
    (data (i32.const 0) "seen: 0, last: ?")
    (func (export "afresh_buffer") (param i32) (result i32) (i32.const 1024))
    (func (export "handle") (param $len i32) (result i64)
        (i32.store8 (i32.const 6) (i32.add (i32.load8_u (i32.const 6)) (i32.const 1)))
        (i32.store8 (i32.const 15)
            (i32.load8_u (i32.add (i32.const 1023) (local.get $len))))
        (i64.const 16)))"#;

/// Serves requests on four threads; returns every answer.
pub(crate) fn serve() -> Result<Vec<String>, Box<dyn std::error::Error>> {
    let guest = Guest::from_bytes("handler", &wat::parse_str(HANDLER)?, &Options::new())?;
    let handle = guest.function("handle")?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let (guest, handle) = (&guest, &handle);
                scope.spawn(move || {
                    (0..25)
                        .map(|request| {
                            let input = format!("thread {thread}, request {request}");
                            guest.call(handle, input.as_bytes())
                        })
                        .collect::<Result<Vec<_>, _>>()
                })
            })
            .collect();
        let mut answers = Vec::new();
        for thread in threads {
            for answer in thread.join().map_err(|_| "a thread panicked")?? {
                answers.push(String::from_utf8(answer)?);
            }
        }
        Ok(answers)
    })
}

#[allow(dead_code, reason = "the tests call what it calls")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let answers = serve()?;
    println!("{} requests; the last answer: {}", answers.len(), answers[answers.len() - 1]);
    Ok(())
}
