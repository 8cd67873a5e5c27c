//! Messages between hosts: a head as JSON and a piece of a body, in one message of NATS.
//!
//! Bodies of any size go in pieces. Each piece is a request that is answered before the next is
//! sent. So messages stay within the limit of NATS, no host is flooded, and hosts need no port,
//! certificate or password except those of NATS. The cost is that each byte passes a NATS server.
//! Promises: bytes that are not such a message are an error, never a panic.

use bytes::{BufMut, Bytes, BytesMut};
use hyper::header::{CONNECTION, HeaderName, HeaderValue, TRANSFER_ENCODING};
use hyper::{HeaderMap, StatusCode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Room in a message for its head.
const MAX_HEAD: usize = 96 << 10;
/// Maximum bytes of one piece, whatever the limit of NATS.
const MAX_PIECE: usize = 512 << 10;

/// Bytes of a piece where messages may be so large.
pub(super) fn piece(most: usize) -> usize {
    most.saturating_sub(MAX_HEAD).clamp(1 << 10, MAX_PIECE)
}

/// Headers, as pairs.
pub(super) type Pairs = Vec<(String, String)>;

/// A message to a host.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Call {
    /// The caller's number of the call. The caller uses it to query whether the call still runs.
    pub(super) key: u64,
    /// The callee's clock when the message was sent, in milliseconds, as far as the caller knows
    /// it.
    pub(super) sent: u64,
    pub(super) request: RpcRequest,
}

/// A request to a host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RpcRequest {
    /// A request, with the first piece of its body. `waits` if the caller asks again after an empty
    /// piece that is not the last; earlier versions take it for the end.
    Open {
        method: String,
        uri: String,
        headers: Pairs,
        whole: bool,
        take: bool,
        #[serde(default)]
        waits: bool,
    },
    /// The next piece of the request body.
    More { id: u64, last: bool },
    /// Fetches the next piece of the response body.
    Next { id: u64 },
    /// The response is not needed any more.
    End { id: u64 },
    /// Whether the call of this number still runs.
    Running { key: u64 },
}

/// Its reply.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RpcReply {
    /// The next piece of the request body, please.
    Go { id: u64 },
    /// An answer, with the first piece of its body.
    Answer { id: u64, status: u16, headers: Pairs, whole: bool },
    /// A further piece.
    Piece { last: bool },
    /// The sandbox is not here.
    Elsewhere,
    /// Nothing is known of this any more, or there is no room for it.
    Gone { why: String },
    /// The message was too long on its way, so nothing was begun. This is the callee's clock.
    Late { now: u64 },
    /// Whether the call runs.
    Runs { runs: bool },
}

/// A damaged message.
#[derive(Debug, thiserror::Error)]
#[error("a message between hosts is damaged")]
pub(super) struct DamagedMessage;

/// A head and a piece, as one message.
pub(super) fn pack(head: &impl Serialize, piece: &[u8]) -> Result<Bytes, DamagedMessage> {
    let head = serde_json::to_vec(head).map_err(|_| DamagedMessage)?;
    let length = u32::try_from(head.len()).map_err(|_| DamagedMessage)?;
    let mut message = BytesMut::with_capacity(4 + head.len() + piece.len());
    message.put_u32(length);
    message.extend_from_slice(&head);
    message.extend_from_slice(piece);
    Ok(message.freeze())
}

/// The head and the piece of a message.
pub(super) fn unpack<T: DeserializeOwned>(message: &Bytes) -> Result<(T, Bytes), DamagedMessage> {
    let (length, rest) = message.split_first_chunk::<4>().ok_or(DamagedMessage)?;
    let length = u32::from_be_bytes(*length) as usize;
    let head = rest.get(..length).ok_or(DamagedMessage)?;
    Ok((serde_json::from_slice(head).map_err(|_| DamagedMessage)?, message.slice(4 + length..)))
}

/// Headers that are about one connection, and are not passed on.
fn passes(name: &HeaderName) -> bool {
    *name != CONNECTION && *name != TRANSFER_ENCODING
}

/// Headers as text; each byte is a character.
pub(super) fn pairs(headers: &HeaderMap) -> Pairs {
    let all = headers.iter().filter(|(name, _)| passes(name));
    let text = |value: &HeaderValue| value.as_bytes().iter().copied().map(char::from).collect();
    all.map(|(name, value)| (name.as_str().to_owned(), text(value))).collect()
}

/// Headers from text.
pub(super) fn headers(pairs: &Pairs) -> Result<HeaderMap, DamagedMessage> {
    let mut headers = HeaderMap::with_capacity(pairs.len());
    for (name, value) in pairs {
        let bytes: Result<Vec<u8>, _> = value.chars().map(u8::try_from).collect();
        let name = HeaderName::try_from(name.as_str()).map_err(|_| DamagedMessage)?;
        let value = HeaderValue::from_bytes(&bytes.map_err(|_| DamagedMessage)?)
            .map_err(|_| DamagedMessage)?;
        headers.append(name, value);
    }
    Ok(headers)
}

/// A status from its number.
pub(super) fn status(number: u16) -> Result<StatusCode, DamagedMessage> {
    StatusCode::from_u16(number).map_err(|_| DamagedMessage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_round_trip_and_damaged_ones_are_refused() {
        let message = pack(&RpcRequest::More { id: 7, last: true }, b"piece").unwrap();
        let (head, piece) = unpack::<RpcRequest>(&message).unwrap();
        assert!(matches!(head, RpcRequest::More { id: 7, last: true }));
        assert_eq!(piece, "piece");
        for cut in 0..message.len() - 5 {
            assert!(unpack::<RpcRequest>(&message.slice(..cut)).is_err(), "{cut}");
        }
        assert!(unpack::<RpcRequest>(&Bytes::from_static(&[0xff; 64])).is_err());
        assert!(unpack::<RpcReply>(&message).is_err());
    }

    #[test]
    fn headers_arrive_byte_for_byte() {
        let mut sent = HeaderMap::new();
        sent.insert("x", HeaderValue::from_bytes(b"caf\xe9").unwrap());
        sent.append("x", HeaderValue::from_static("two"));
        sent.insert(CONNECTION, HeaderValue::from_static("close"));
        let came = headers(&pairs(&sent)).unwrap();
        sent.remove(CONNECTION);
        assert_eq!(came, sent);
        assert!(headers(&vec![("a b".to_owned(), String::new())]).is_err());
        assert!(headers(&vec![("a".to_owned(), "ż\n".to_owned())]).is_err());
    }

    #[test]
    fn a_piece_and_its_head_fit_a_message() {
        assert_eq!(piece(1 << 20), MAX_PIECE);
        assert_eq!(piece(128 << 10), 32 << 10);
    }
}
