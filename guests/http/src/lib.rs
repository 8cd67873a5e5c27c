//! A component of the world `wasi:http/proxy`: what a server has to do right, one path each.
//!
//! | path | what it does |
//! |---|---|
//! | `/hello` | answers at once |
//! | `/echo` | sends the body back while it arrives |
//! | `/visit` | leaves the query in its memory, and answers with all that it has found there: `served`, `traces` |
//! | `/stream` | answers with as many lines as the query says |
//! | `/wait` | waits as many milliseconds as the query says |
//! | `/late` | answers, and then waits before it ends |
//! | `/broken` | begins an answer, then traps, or with `?1` never returns |
//! | `/spin`, `/trap`, `/silent` | never returns, traps, returns without an answer |
//! | `/print` | writes the query to standard output, and to standard error |
//! | `/ask` | asks another server for something, and says what came of it |

use std::cell::RefCell;

use wasip2::clocks::monotonic_clock::subscribe_duration;
use wasip2::http::outgoing_handler;
use wasip2::http::types::{
    ErrorCode, Fields, IncomingRequest, OutgoingBody, OutgoingRequest, OutgoingResponse,
    ResponseOutparam, Scheme,
};
use wasip2::io::streams::StreamError;

struct Handler;

wasip2::http::proxy::export!(Handler);

#[derive(Default)]
struct State {
    served: u32,
    traces: Vec<String>,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

const MILLISECOND: u64 = 1_000_000;

fn sleep(milliseconds: u64) {
    subscribe_duration(milliseconds * MILLISECOND).block();
}

/// Begins the answer, and gives its body.
fn begin(outparam: ResponseOutparam, status: u16) -> OutgoingBody {
    let response = OutgoingResponse::new(Fields::new());
    response.set_status_code(status).expect("a status");
    let body = response.body().expect("its body is taken once");
    ResponseOutparam::set(outparam, Ok(response));
    body
}

fn answer(outparam: ResponseOutparam, status: u16, text: &str) {
    let body = begin(outparam, status);
    let stream = body.write().expect("its stream is taken once");
    // An error means that the client has left.
    let _ = stream.blocking_write_and_flush(text.as_bytes());
    drop(stream);
    let _ = OutgoingBody::finish(body, None);
}

fn echo(request: &IncomingRequest, outparam: ResponseOutparam) {
    let incoming = request.consume().expect("its body is taken once");
    let input = incoming.stream().expect("its stream is taken once");
    let body = begin(outparam, 200);
    let output = body.write().expect("its stream is taken once");
    loop {
        match input.blocking_read(4096) {
            Ok(bytes) => {
                if output.blocking_write_and_flush(&bytes).is_err() {
                    return;
                }
            }
            Err(StreamError::Closed) => break,
            // Without an end the client sees that the answer broke off.
            Err(StreamError::LastOperationFailed(_)) => return,
        }
    }
    drop(output);
    let _ = OutgoingBody::finish(body, None);
}

fn stream(outparam: ResponseOutparam, lines: u64) {
    let body = begin(outparam, 200);
    let output = body.write().expect("its stream is taken once");
    for line in 0..lines {
        if output.blocking_write_and_flush(format!("line {line}\n").as_bytes()).is_err() {
            return;
        }
    }
    drop(output);
    let _ = OutgoingBody::finish(body, None);
}

fn ask() -> Result<u16, ErrorCode> {
    let request = OutgoingRequest::new(Fields::new());
    request.set_scheme(Some(&Scheme::Http)).expect("a scheme");
    request.set_authority(Some("other.example")).expect("an authority");
    request.set_path_with_query(Some("/")).expect("a path");
    let future = outgoing_handler::handle(request, None)?;
    future.subscribe().block();
    let response = future.get().expect("it is there").expect("it is taken once")?;
    Ok(response.status())
}

impl wasip2::exports::http::incoming_handler::Guest for Handler {
    fn handle(request: IncomingRequest, outparam: ResponseOutparam) {
        let target = request.path_with_query().unwrap_or_default();
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let number = query.parse().unwrap_or(0);
        // The path may begin with a route of the server.
        match path.rsplit('/').next().unwrap_or_default() {
            "hello" => answer(outparam, 200, "hello\n"),
            "echo" => echo(&request, outparam),
            "visit" => {
                let found = STATE.with_borrow_mut(|state| {
                    state.served += 1;
                    let found = format!("served {} traces {:?}\n", state.served, state.traces);
                    state.traces.push(query.to_owned());
                    found
                });
                answer(outparam, 200, &found);
            }
            "stream" => stream(outparam, number),
            "wait" => {
                sleep(number);
                answer(outparam, 200, "waited\n");
            }
            "print" => {
                println!("{query}");
                eprint!("no {query}");
                answer(outparam, 200, "printed\n");
            }
            "late" => {
                answer(outparam, 200, "early\n");
                sleep(number);
            }
            "spin" => loop {
                std::hint::black_box(());
            },
            "trap" => panic!("as asked"),
            "broken" => {
                let body = begin(outparam, 200);
                let output = body.write().expect("its stream is taken once");
                let _ = output.blocking_write_and_flush(b"some of it\n");
                while number > 0 {
                    std::hint::black_box(());
                }
                panic!("as asked");
            }
            "silent" => {}
            "ask" => match ask() {
                Ok(status) => answer(outparam, 200, &format!("it answered {status}\n")),
                Err(error) => answer(outparam, 502, &format!("{error:?}\n")),
            },
            _ => answer(outparam, 404, "no such path\n"),
        }
    }
}
