//! The relay of one request: its body to the server, and the response to the guest.

use std::time::{Duration, Instant};

use super::{IDLE_TIMEOUT, ProxiedConnection, Stop};
use crate::body::{BodyDecoder, LAST_CHUNK, push_chunk};
use crate::log::Outcome;
use crate::request_head::{BodyFraming, RequestHead};
use crate::response_head::{ResponseHead, may_have_head};

/// Interval of checks for the guest's end while bytes move.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// The end of a relay before its time.
pub(super) enum RelayEnd {
    Stop(Stop),
    /// A failure of the server, before or after the guest got the head of its response.
    Server {
        reason: String,
        begun: bool,
    },
}

impl From<Stop> for RelayEnd {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

impl ProxiedConnection {
    /// Moves a request's body and its response. Returns whether the connection lasts.
    pub(super) fn relay(&mut self, head: &RequestHead) -> Result<bool, RelayEnd> {
        let mut request = BodyDecoder::of_request(head.framing);
        let mut request_done = has_no_body(head);
        let mut response: Option<(ResponseHead, BodyDecoder)> = None;
        let mut chunked = false;
        // Bytes of a response without the end of its head.
        let mut seen = 0;
        let mut looked = Instant::now();
        loop {
            let begun = response.is_some();
            let server = |reason: String| RelayEnd::Server { reason, begun };
            let Some(upstream) = &mut self.upstream else { return Err(Stop::Over.into()) };
            let mut moved = self.guest.fill().map_err(Stop::from)?;
            moved |= upstream.fill().map_err(|error| server(error.to_string()))?;
            if !request_done {
                let mut content = Vec::new();
                let room = upstream.room();
                let taken = request.decode(&self.guest.input, room, &mut content);
                let taken =
                    taken.map_err(|reason| Stop::Because(Outcome::Refused, reason.to_owned()))?;
                self.guest.take(taken);
                match head.framing {
                    BodyFraming::Chunked => push_chunk(&content, &mut upstream.output),
                    _ => upstream.output.extend(&content),
                }
                if request.is_done() {
                    request_done = true;
                    if head.framing == BodyFraming::Chunked {
                        upstream.output.extend(LAST_CHUNK);
                    }
                } else if self.guest.has_ended && taken == 0 && room > 0 {
                    return Err(Stop::Because(
                        Outcome::Failed,
                        "the guest has ended in a body".to_owned(),
                    )
                    .into());
                }
                moved |= taken > 0;
            }
            if response.is_none() {
                let may_have_head = may_have_head(&upstream.input, seen);
                seen = upstream.input.len();
                let parsed = match may_have_head {
                    true => ResponseHead::parse(&upstream.input, head.method == "HEAD"),
                    false => Ok(None),
                };
                match parsed {
                    Err(reason) => return Err(server(reason.to_owned())),
                    Ok(Some((found, len))) => {
                        upstream.take(len);
                        (moved, seen) = (true, 0);
                        if found.status == 101 {
                            return Err(server("it changes to another protocol".to_owned()));
                        }
                        if found.status >= 200 {
                            chunked = !head.is_old
                                && matches!(
                                    found.framing,
                                    BodyFraming::Chunked | BodyFraming::UntilClose
                                );
                            let until_close =
                                !chunked && !matches!(found.framing, BodyFraming::Length(_));
                            let closes = until_close || !head.keeps_alive || !request_done;
                            self.guest.output.extend(found.to_sent(chunked, closes));
                            let body = BodyDecoder::of_response(found.framing);
                            response = Some((found, body));
                        }
                    }
                    Ok(None) if upstream.has_ended => {
                        return Err(server("it has ended without a response".to_owned()));
                    }
                    Ok(None) => {}
                }
            }
            let mut done = false;
            if let Some((_, body)) = &mut response {
                let mut content = Vec::new();
                let room = self.guest.room();
                let taken = body.decode(&upstream.input, room, &mut content);
                let taken = taken.map_err(|reason| RelayEnd::Server {
                    reason: reason.to_owned(),
                    begun: true,
                })?;
                upstream.take(taken);
                moved |= taken > 0;
                match chunked {
                    true => push_chunk(&content, &mut self.guest.output),
                    false => self.guest.output.extend(&content),
                }
                // Bytes may be left that are no whole line of a chunk.
                let at_end = upstream.has_ended && taken == 0 && room > 0;
                done = body.is_done()
                    || at_end && body.ends_with_connection() && upstream.ended_cleanly;
                if at_end && !done {
                    let reason = "it has ended within its response".to_owned();
                    return Err(RelayEnd::Server { reason, begun: true });
                }
                if done && chunked {
                    self.guest.output.extend(LAST_CHUNK);
                }
            }
            moved |= self.guest.flush().map_err(Stop::from)?;
            match upstream.flush() {
                Ok(sent) => moved |= sent,
                // It may have answered before it read the whole body.
                Err(_) if response.is_some() || !upstream.input.is_empty() => upstream.be_deaf(),
                Err(error) => return Err(server(error.to_string())),
            }
            if done {
                let lasts = response.is_some_and(|(found, _)| found.keeps_alive)
                    && has_no_body(head)
                    && upstream.is_flushed()
                    && upstream.input.is_empty();
                if !lasts {
                    self.upstream = None;
                }
                self.drain()?;
                let until_close = !chunked && head.is_old;
                return Ok(request_done && head.keeps_alive && !until_close);
            }
            if !moved {
                self.wait(Instant::now() + IDLE_TIMEOUT)?;
            } else if looked.elapsed() < LOOK_INTERVAL {
                continue;
            } else {
                // A server that sends interim responses without end would hide the guest's end.
                self.look(Duration::ZERO)?;
            }
            looked = Instant::now();
        }
    }
}

fn has_no_body(head: &RequestHead) -> bool {
    head.framing == BodyFraming::Length(0)
}

/// The head of a request for the server. A server that leaves a body unread would take it for the
/// next request: the connection ends with a request that has a body.
pub(super) fn request_to_sent(
    head: &RequestHead,
    host: &str,
    headers: &[(String, Vec<u8>)],
) -> Vec<u8> {
    let mut out = format!("{} {} HTTP/1.1\r\nhost: {host}\r\n", head.method, head.target.to_sent())
        .into_bytes();
    for (name, value) in headers {
        out.extend([name.as_bytes(), b": ", value, b"\r\n"].concat());
    }
    let has_body = !matches!(&*head.method, "GET" | "HEAD" | "DELETE" | "OPTIONS");
    match head.framing {
        BodyFraming::Length(0) if !has_body => {}
        BodyFraming::Length(size) => out.extend(format!("content-length: {size}\r\n").into_bytes()),
        BodyFraming::Chunked | BodyFraming::UntilClose => {
            out.extend(b"transfer-encoding: chunked\r\n")
        }
    }
    if !has_no_body(head) {
        out.extend(b"connection: close\r\n");
    }
    out.extend(b"\r\n");
    out
}
