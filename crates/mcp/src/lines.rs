//! Messages of JSON-RPC as lines: reading, and the errors of lines that are no message.
//!
//! Promises: the text of a line takes at most [`MAX_LINE`] bytes, whatever its sender writes. A
//! line has the [limits](crate::message_limit) of messages over HTTP, and takes permits for its
//! memory while it is parsed. A request keeps them until its call has ended. Where none are free, a
//! short line takes them from a second memory, so that a client can still list and close sandboxes.

use std::io::{self, BufRead, Read};

use rmcp::model::{GetExtensions, JsonRpcMessage, RequestId};
use rmcp::service::RxJsonRpcMessage;
use rmcp::{ErrorData, RoleServer};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::message_limit::{MessageMemory, MessagePermits, MessageRefusal};

/// Maximum bytes of a line.
pub(crate) const MAX_LINE: u64 = 16 << 20;
/// Bytes of a buffer that stays allocated after a long line.
const MAX_IDLE_BUFFER: usize = 64 << 10;

/// Maximum bytes of a short line.
const MAX_SHORT_LINE: usize = 4 << 10;
/// Maximum memory of the short lines that find no other memory. Each of 256 calls in flight has 64
/// KiB of it.
const MAX_SHORT_MEMORY: usize = 16 << 20;

/// A message of the client.
pub(crate) type ClientMessage = RxJsonRpcMessage<RoleServer>;

/// The error of a line that is no message, and the ID that the line names.
#[derive(Debug)]
pub(crate) struct RefusedLine {
    pub(crate) error: ErrorData,
    pub(crate) id: Option<RequestId>,
}

impl RefusedLine {
    fn invalid_request(why: &str, id: Option<RequestId>) -> Box<Self> {
        let message = format!("the line is no message of JSON-RPC: {why}");
        Box::new(Self { error: ErrorData::invalid_request(message, None), id })
    }

    /// A line beyond a limit. Its other parts are not kept.
    fn beyond_limit(why: &MessageRefusal, id: Option<RequestId>) -> Box<Self> {
        let message = format!("the line is refused: {why}");
        let error = match why {
            MessageRefusal::NoMemory => ErrorData::internal_error(message, None),
            _ => ErrorData::invalid_request(message, None),
        };
        Box::new(Self { error, id })
    }

    fn parse_error(why: &dyn std::error::Error) -> Box<Self> {
        let message = format!("the line is not a JSON message: {why}");
        Box::new(Self { error: ErrorData::parse_error(message, None), id: None })
    }
}

/// Lines of a client.
pub(crate) struct Lines<R> {
    input: R,
    line: Vec<u8>,
    memory: MessageMemory,
    short_memory: MessageMemory,
}

/// The part of a line that names its answer.
#[derive(Deserialize)]
struct AnswerId {
    id: Option<RequestId>,
    method: Option<IgnoredAny>,
}

impl AnswerId {
    /// The ID of a line if it is a request. The server chose the ID of an answer.
    fn of(line: &[u8]) -> Option<RequestId> {
        let Self { id, method } = serde_json::from_slice(line).ok()?;
        method.and(id)
    }
}

impl<R: BufRead> Lines<R> {
    pub(crate) fn new(input: R) -> Self {
        let short_memory = MessageMemory::new(MAX_SHORT_MEMORY);
        Self { input, line: Vec::new(), memory: MessageMemory::default(), short_memory }
    }

    /// The permits for the line.
    fn admit(&self) -> Result<MessagePermits, MessageRefusal> {
        let is_short = self.line.len() <= MAX_SHORT_LINE;
        match self.memory.admit(&self.line) {
            Err(MessageRefusal::NoMemory) if is_short => self.short_memory.admit(&self.line),
            admitted => admitted,
        }
    }

    /// The next message, or the error of another line. `None` at the end of the input.
    pub(crate) fn next_message(
        &mut self,
    ) -> io::Result<Option<Result<ClientMessage, Box<RefusedLine>>>> {
        loop {
            self.line.clear();
            self.line.shrink_to(MAX_IDLE_BUFFER);
            if self.input.by_ref().take(MAX_LINE).read_until(b'\n', &mut self.line)? == 0 {
                return Ok(None);
            }
            if self.line.len() as u64 == MAX_LINE && !self.line.ends_with(b"\n") {
                self.input.skip_until(b'\n')?;
                let why = format!("it is longer than {MAX_LINE} bytes");
                return Ok(Some(Err(RefusedLine::invalid_request(&why, None))));
            }
            let permits = match self.admit() {
                Ok(permits) => Some(permits),
                Err(why) => {
                    let id = AnswerId::of(&self.line);
                    // A short notification may cancel a call that holds the memory. It is handled
                    // without a wait.
                    if id.is_some() || self.line.len() > MAX_SHORT_LINE {
                        return Ok(Some(Err(RefusedLine::beyond_limit(&why, id))));
                    }
                    None
                }
            };
            match parse(&self.line) {
                Ok(Some(mut message)) => {
                    if let JsonRpcMessage::Request(request) = &mut message
                        && let Some(permits) = permits
                    {
                        request.request.extensions_mut().insert(permits);
                    }
                    return Ok(Some(Ok(message)));
                }
                Ok(None) => {}
                Err(refused) => return Ok(Some(Err(refused))),
            }
        }
    }
}

/// The message of a line. `None` for lines without an answer: empty ones, and notifications that
/// the protocol does not define.
fn parse(line: &[u8]) -> Result<Option<ClientMessage>, Box<RefusedLine>> {
    let text = std::str::from_utf8(line).map_err(|error| RefusedLine::parse_error(&error))?;
    let text = text.trim_start_matches('\u{feff}').trim();
    if text.is_empty() {
        return Ok(None);
    }
    let error = match serde_json::from_str(text) {
        Ok(message) => return Ok(Some(message)),
        Err(error) => error,
    };
    let Value::Object(parts) =
        serde_json::from_str(text).map_err(|error| RefusedLine::parse_error(&error))?
    else {
        let why = "it is not an object, and batches are not supported";
        return Err(RefusedLine::invalid_request(why, None));
    };
    let has = |key| parts.contains_key(key);
    if has("method") && !has("id") {
        return Ok(None);
    }
    // The server chose the ID of an answer. The client may wait for an answer with the same ID.
    let is_answer = has("result") || has("error");
    let id = parts.get("id").filter(|_| !is_answer);
    let id = id.and_then(|id| RequestId::deserialize(id).ok());
    let why = match has("method") || is_answer {
        true => error.to_string(),
        false => "it has no `method`".to_owned(),
    };
    Err(RefusedLine::invalid_request(&why, id))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The methods and the IDs of messages, and the codes and the IDs of errors.
    fn read(input: &[u8]) -> Vec<Value> {
        let (mut lines, mut read) = (Lines::new(input), Vec::new());
        while let Some(line) = lines.next_message().unwrap() {
            read.push(match line {
                Ok(message) => {
                    let message = serde_json::to_value(message).unwrap();
                    json!([message["method"], message["id"]])
                }
                Err(refused) => json!([refused.error.code.0, refused.id]),
            });
        }
        read
    }

    #[test]
    fn lines_that_are_no_messages_are_refused_with_their_id() {
        let ping = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
        let version = r#"{"jsonrpc":"1.0","id":2,"method":"ping"}"#;
        let answer = r#"{"jsonrpc":"2.0","id":3,"result":{},"error":{}}"#;
        for (line, wanted) in [
            (ping, json!(["ping", 1])),
            (
                "\u{feff}{\"jsonrpc\":\"2.0\",\"id\":\"a\",\"method\":\"ping\"}\r",
                json!(["ping", "a"]),
            ),
            (version, json!([-32600, 2])),
            (answer, json!([-32600, null])),
            ("42", json!([-32600, null])),
            ("[]", json!([-32600, null])),
            (&format!("[{ping}]"), json!([-32600, null])),
            (r#"{"id":"b"}"#, json!([-32600, "b"])),
            (r#"{"id":[4]}"#, json!([-32600, null])),
            (r#"{"id":1.5,"method":"ping"}"#, json!([-32600, null])),
            ("{}", json!([-32600, null])),
            ("}{", json!([-32700, null])),
            ("42 }{", json!([-32700, null])),
            (r#"{"id":5"#, json!([-32700, null])),
        ] {
            assert_eq!(read(format!("{line}\n").as_bytes()), [wanted], "{line}");
        }
        assert_eq!(read(b"{\"id\":\"\xff\"}\n"), [json!([-32700, null])]);
    }

    #[test]
    fn empty_lines_and_unknown_notifications_have_no_answer() {
        let unknown = br#"{"jsonrpc":"9","method":"notifications/other"}"#;
        assert_eq!(read(&[b"\n \r\n", &unknown[..], b"\n"].concat()), [Value::Null; 0]);
    }

    #[test]
    fn a_line_that_is_too_long_is_skipped() {
        let ping = br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
        // Exactly the limit, with its end, is no longer than that.
        let whole = long_call(2, MAX_LINE as usize - 1 - long_call(2, 0).len());
        assert_eq!(whole.len() as u64, MAX_LINE - 1);
        let long = vec![b'1'; MAX_LINE as usize + 1];
        let parts = [&whole[..], b"\n", &long, b"\n", ping];
        let (call, ping) = (json!(["tools/call", 2]), json!(["ping", 1]));
        assert_eq!(read(&parts.concat()), [call, json!([-32600, null]), ping]);
    }

    /// A call with code of so many bytes.
    fn long_call(id: u32, bytes: usize) -> Vec<u8> {
        let params = json!({"name": "run_code", "arguments": {"code": "x".repeat(bytes)}});
        let method = "tools/call";
        json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
            .to_string()
            .into_bytes()
    }

    #[test]
    fn requests_share_a_bounded_memory_until_they_are_dropped() {
        let long = long_call(1, 15 << 20);
        let cancel =
            br#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}"#;
        let zeros = format!(
            r#"{{"jsonrpc":"2.0","id":"z","method":"ping","a":[{}0]}}"#,
            "0,".repeat(1 << 20)
        );
        let mut input = [&long[..], b"\n"].concat().repeat(18);
        let answer = format!(r#"{{"jsonrpc":"2.0","id":1,"result":"{}"}}"#, "x".repeat(2 << 20));
        let lines = [answer.as_bytes(), &cancel[..], &long, zeros.as_bytes()];
        for line in lines {
            input.extend_from_slice(line);
            input.push(b'\n');
        }
        let mut lines = Lines::new(&input[..]);
        let mut next = || lines.next_message().unwrap().unwrap();
        let held: Vec<_> = (0..17).map(|_| next().unwrap()).collect();
        let refused = next().unwrap_err();
        assert_eq!((refused.error.code.0, refused.id), (-32603, Some(RequestId::Number(1))));
        assert!(refused.error.message.contains("too much memory"), "{}", refused.error);
        // The ID of an answer names no request.
        assert_eq!(next().unwrap_err().id, None);
        // A call can be cancelled, and its memory is free once it has ended.
        assert!(matches!(next(), Ok(JsonRpcMessage::Notification(_))));
        drop(held);
        assert!(next().is_ok());
        let refused = next().unwrap_err();
        assert_eq!(
            (refused.error.code.0, refused.id),
            (-32600, Some(RequestId::String("z".into())))
        );
    }

    #[test]
    fn short_requests_share_a_second_bounded_memory() {
        let long = [&long_call(1, 15 << 20)[..], b"\n"].concat().repeat(17);
        let filler = [&long_call(2, 1 << 19)[..], b"\n"].concat().repeat(2);
        let call = [&long_call(3, 2 << 10)[..], b"\n"].concat();
        let count = 4000;
        let input = [long, filler, call.repeat(count)].concat();
        let mut lines = Lines::new(&input[..]);
        let mut next = || lines.next_message().unwrap();
        let mut held: Vec<_> = (0..17).map(|_| next().unwrap().unwrap()).collect();
        held.extend((0..2).filter_map(|_| next().unwrap().ok()));
        let mut refused = 0;
        while let Some(line) = next() {
            match line {
                Ok(message) => held.push(message),
                Err(why) => {
                    assert_eq!((why.error.code.0, why.id), (-32603, Some(RequestId::Number(3))));
                    refused += 1;
                }
            }
        }
        // More short calls than may be in flight, and not all.
        assert!(refused > 0 && refused < count - 256, "{refused} of {count}");
    }
}
