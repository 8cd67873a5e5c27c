//! Requests to a guest: to run source, to call a function of the program, or to set itself up.

use minicbor::Encoder;

use crate::evaluate::after_length;

/// Runs source; the answer is the value of its last expression.
pub const RUN: u8 = 0;
/// Runs source that has to come to its end: for warm-ups.
pub const SETUP: u8 = 4;
/// An operation on commands, in a Linux program that evaluates code: the source is an object in
/// JSON, whose `op` selects the operation.
///
/// * `start` runs `cmd` with `args`, `envs` and `cwd`, and with an input if `stdin` is set; `tag`
///   is kept. The answer is its number. Its output and its end go to the
///   [`HostCallbacks`](crate::HostCallbacks) of the call that runs then.
/// * `list` answers with all running commands: an array of
///   `{pid, config: {cmd, args, envs, cwd}, tag}`.
/// * `signal` sends the command `pid`, and its descendants, the signal `signal`.
/// * `input` writes `data` (base64) to its input, `close` ends that.
/// * `resize` sets the `size` of its terminal, rows and columns.
/// * `feed` writes as much of `data` to its input as fits. The answer is the number of bytes, or
///   nothing if it reads no more.
/// * `list_contexts` answers with all contexts of code: an array of `{id, language, cwd}`.
///   `create_context` makes one with `id`, `language` and `cwd`, `restart_context` empties the one
///   of `id`, and `remove_context` removes it.
///
/// The answer of the others is whether there is such a command or context; it is `false` for `feed`
/// as well without one.
pub const COMMAND: u8 = 6;
/// Code in a context of a Linux program that evaluates code: the source is an object in JSON with
/// the `code`, and optionally its `language`, its `context` and variables of the environment
/// (`envs`). Its results go to [`HostCallbacks::display`](crate::HostCallbacks::display), the value
/// of the last expression too. The answer has no value.
pub const CELL: u8 = 8;

/// The calling convention of a guest, and the place of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallConvention {
    /// An array in CBOR for `evaluate`, answered by its return value.
    Array,
    /// A header and parts behind it for `turn`, answered by a frame to the host.
    Frame,
}

impl CallConvention {
    /// The forms that are known.
    pub const ALL: [Self; 2] = [Self::Array, Self::Frame];

    /// The function of the guest to call.
    #[must_use]
    pub fn function(self) -> &'static str {
        match self {
            Self::Array => "evaluate",
            Self::Frame => "turn",
        }
    }
}

/// Bytes of a frame header.
const HEADER: usize = 37;
/// Header bytes before the lengths of the parts.
const LENGTHS: usize = HEADER - 12;

/// The names of the host functions that programs may call, in the encoding of the guests.
#[derive(Clone, Debug)]
pub struct Tools(Vec<u8>);

impl Default for Tools {
    fn default() -> Self {
        Self(NONE.to_vec())
    }
}

/// An empty array.
const NONE: &[u8] = &[0x80];

impl Tools {
    /// These.
    #[must_use]
    pub fn new<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> Self {
        let mut told = Vec::new();
        let mut out = Encoder::new(&mut told);
        written((|| {
            out.array(names.len() as u64)?;
            names.into_iter().try_for_each(|name| out.str(name)?.ok())
        })());
        Self(told)
    }
}

/// Writing to memory does not fail.
fn written(result: Result<(), minicbor::encode::Error<std::convert::Infallible>>) {
    if result.is_err() {
        unreachable!("writing to memory does not fail")
    }
}

/// A request without its receiver.
#[derive(Clone, Debug)]
pub struct Request {
    bytes: Vec<u8>,
    form: CallConvention,
}

impl Request {
    /// A request for an evaluation: `what` is [`RUN`], [`SETUP`] or another kind of the guest;
    /// `name` is the name of the source in traces; `arguments` is an array in CBOR.
    #[must_use]
    pub fn new(
        form: CallConvention,
        what: u8,
        tools: &Tools,
        source: &str,
        name: &str,
        arguments: Option<&[u8]>,
    ) -> Self {
        let arguments = arguments.unwrap_or(NONE);
        let mut bytes = Vec::with_capacity(HEADER + tools.0.len() + source.len() + name.len() + 64);
        match form {
            CallConvention::Frame => {
                bytes.push(what);
                bytes.resize(LENGTHS, 0);
                for part in [tools.0.len(), source.len(), name.len()] {
                    // A guest of 32 bits refuses a longer one.
                    bytes.extend_from_slice(&u32::try_from(part).unwrap_or(u32::MAX).to_le_bytes());
                }
                for part in [&tools.0, source.as_bytes(), name.as_bytes(), arguments] {
                    bytes.extend_from_slice(part);
                }
            }
            CallConvention::Array => {
                // An array of five.
                bytes.extend([0x85, what]);
                bytes.extend_from_slice(&tools.0);
                written(Encoder::new(&mut bytes).str(source).and_then(|out| out.str(name)?.ok()));
                bytes.extend_from_slice(arguments);
            }
        }
        Self { bytes, form }
    }

    /// Bytes for a handler that is not an interpreter.
    #[must_use]
    pub fn plain(bytes: &[u8]) -> Self {
        Self { bytes: bytes.to_vec(), form: CallConvention::Array }
    }

    /// The bytes of a request for a minimal evaluation, in a separate clone; after their length for
    /// a program's standard input.
    #[must_use]
    pub fn minimal(form: CallConvention, tools: &Tools, for_program: bool) -> Vec<u8> {
        let mut request = Self::new(form, RUN, tools, "1+1", "<sandbox>", None);
        request.address_to(1, afresh::wasm::entropy_bytes());
        match for_program {
            true => request.after_length(),
            false => request.bytes,
        }
    }

    /// Sets a clone's number and entropy, if its guest gets them in the request.
    pub fn address_to(&mut self, clone: u64, entropy: [u8; 16]) {
        if self.form == CallConvention::Frame {
            self.bytes[1..9].copy_from_slice(&clone.to_le_bytes());
            self.bytes[9..LENGTHS].copy_from_slice(&entropy);
        }
    }

    /// The calling convention of its guest.
    #[must_use]
    pub fn form(&self) -> CallConvention {
        self.form
    }

    /// As a Linux program reads it from its standard input.
    #[must_use]
    pub fn after_length(&self) -> Vec<u8> {
        after_length(&self.bytes)
    }

    /// As the guest reads it.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_say_the_same() {
        let tools = Tools::new(["search"].into_iter());
        let array = Request::new(CallConvention::Array, RUN, &tools, "1+1", "<s>", None);
        assert_eq!(array.bytes(), b"\x85\x00\x81\x66search\x631+1\x63<s>\x80");
        let mut frame = Request::new(CallConvention::Frame, SETUP, &tools, "1+1", "<s>", None);
        frame.address_to(7, [9; 16]);
        let mut wanted = vec![4, 7, 0, 0, 0, 0, 0, 0, 0];
        wanted.extend([9; 16]);
        wanted.extend([8, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0, 0]);
        wanted.extend(b"\x81\x66search1+1<s>\x80");
        assert_eq!(frame.bytes(), wanted);
        let mut same = array.clone();
        same.address_to(7, [9; 16]);
        assert_eq!(same.bytes(), array.bytes());
    }
}
