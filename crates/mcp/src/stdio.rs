//! The transport on standard input and output: one message a line.
//!
//! `rmcp` drops a line that is not JSON, so its sender would wait for an answer. Here each such
//! line is answered with an error of JSON-RPC.
//!
//! Promises: no line ends the server, and none takes more memory than [`MAX_LINE`].

use std::io;

use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use rmcp::transport::async_rw::AsyncRwTransport;
use rmcp::{ErrorData, RoleServer};
use serde::de::IgnoredAny;
use tokio::io::{
    AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader,
    DuplexStream, Stdout,
};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Maximum bytes of a line.
const MAX_LINE: u64 = 16 << 20;
/// Bytes of messages that wait for the server.
const BUFFER: usize = 64 << 10;
/// Maximum errors that wait for the output.
const MAX_ERRORS: usize = 16;

/// Messages of the client, and errors for other lines.
pub(crate) struct StdioTransport {
    messages: AsyncRwTransport<RoleServer, DuplexStream, Stdout>,
    errors: mpsc::Receiver<ErrorData>,
    /// The last of the answers that are being written, in their order.
    sending: Option<JoinHandle<io::Result<()>>>,
}

impl StdioTransport {
    /// The transport on the streams of this process. Must be called in a runtime.
    pub(crate) fn new() -> Self {
        let (to, messages) = tokio::io::duplex(BUFFER);
        let (refused, errors) = mpsc::channel(MAX_ERRORS);
        tokio::spawn(async move {
            // An input that cannot be read has ended.
            let _ = forward(BufReader::new(tokio::io::stdin()), to, refused).await;
        });
        let messages = AsyncRwTransport::new_server(messages, tokio::io::stdout());
        Self { messages, errors, sending: None }
    }
}

impl Transport<RoleServer> for StdioTransport {
    type Error = io::Error;

    fn send(
        &mut self,
        item: TxJsonRpcMessage<RoleServer>,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        self.messages.send(item)
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleServer>> {
        loop {
            tokio::select! {
                biased;
                Some(error) = self.errors.recv() => {
                    // A task, because this future may be dropped at any time.
                    let answer = TxJsonRpcMessage::<RoleServer>::error(error, None);
                    self.sending = Some(tokio::spawn(self.messages.send(answer)));
                }
                message = self.messages.receive() => {
                    if let (None, Some(sending)) = (&message, self.sending.take()) {
                        let _ = sending.await;
                    }
                    return message;
                }
            }
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        self.messages.close().await
    }
}

/// Passes lines of JSON on, and an error for each other line.
async fn forward(
    mut input: impl AsyncBufRead + Unpin,
    mut messages: impl AsyncWrite + Unpin,
    errors: mpsc::Sender<ErrorData>,
) -> io::Result<()> {
    let mut line = Vec::new();
    loop {
        line.clear();
        if (&mut input).take(MAX_LINE).read_until(b'\n', &mut line).await? == 0 {
            return Ok(());
        }
        let ended = line.ends_with(b"\n");
        let refused = if !ended && line.len() as u64 == MAX_LINE {
            skip_line(&mut input).await?;
            Some(ErrorData::invalid_request(
                format!("the message is longer than {MAX_LINE} bytes"),
                None,
            ))
        } else {
            check(&line).err().map(|why| {
                ErrorData::parse_error(format!("the line is not a JSON message: {why}"), None)
            })
        };
        match refused {
            Some(error) => {
                if errors.send(error).await.is_err() {
                    // The server has ended.
                    return Ok(());
                }
            }
            None => {
                messages.write_all(&line).await?;
                if !ended {
                    messages.write_all(b"\n").await?;
                }
            }
        }
    }
}

/// Reads to the end of a line.
async fn skip_line(input: &mut (impl AsyncBufRead + Unpin)) -> io::Result<()> {
    loop {
        let read = input.fill_buf().await?;
        let (count, ended) = match read.iter().position(|byte| *byte == b'\n') {
            Some(end) => (end + 1, true),
            None => (read.len(), read.is_empty()),
        };
        input.consume(count);
        if ended {
            return Ok(());
        }
    }
}

/// Checks that a line is empty or JSON.
fn check(line: &[u8]) -> Result<(), String> {
    let text = std::str::from_utf8(line).map_err(|error| error.to_string())?;
    let text = text.trim_start_matches('\u{feff}').trim();
    if text.is_empty() {
        return Ok(());
    }
    serde_json::from_str::<IgnoredAny>(text).map(drop).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_that_are_not_json_are_refused_and_others_passed_on() {
        let long = vec![b'1'; MAX_LINE as usize + 1];
        let parts: [&[u8]; 6] = [b"{\"a\":1}\n", b"}{\n\xff\n\n", &long, b"\n", b"[2]\n", b"[3]"];
        let (mut passed, (send, mut errors)) = (Vec::new(), mpsc::channel(MAX_ERRORS));
        forward(&parts.concat()[..], &mut passed, send).await.unwrap();
        assert_eq!(passed, b"{\"a\":1}\n\n[2]\n[3]\n");
        let mut codes = Vec::new();
        while let Some(error) = errors.recv().await {
            codes.push(error.code.0);
        }
        assert_eq!(codes, [-32700, -32700, -32600]);
    }
}
