//! The transport on standard input and output: one message a line.
//!
//! A thread reads and parses lines, and another writes answers. The runtime itself makes no call
//! that blocks, so one thread can drive it. Each line that is no message is answered with an error
//! of JSON-RPC, where `rmcp` would leave its sender without an answer.
//!
//! Promises: no line ends the server. At the end of the input, calls run on until they are
//! answered, while the output has a reader. Full buffers of a client that does not read delay only
//! its own messages.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::Duration;

use rmcp::RoleServer;
use rmcp::model::{ClientNotification, JsonRpcMessage, RequestId};
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;

use crate::lines::{ClientMessage, Lines};

/// Parsed messages that wait for the server. Each may have the size of the longest line.
const MAX_UNREAD: usize = 1;
/// Answers that wait for the writer.
const MAX_UNWRITTEN: usize = 16;
/// Time between two looks for a reader of the output, after the end of the input.
const READER_INTERVAL: Duration = Duration::from_millis(100);
/// Bytes of the buffer of each stream.
const BUFFER: usize = 64 << 10;

/// A message of the server.
type ServerMessage = TxJsonRpcMessage<RoleServer>;

/// Messages of the client, and answers to it.
pub(crate) struct StdioTransport {
    messages: mpsc::Receiver<ClientMessage>,
    /// `None` once the transport is closed.
    answers: Option<mpsc::Sender<ServerMessage>>,
    /// Closed when the writer has ended.
    written: oneshot::Receiver<()>,
    output: OwnedFd,
    /// Requests without an answer.
    pending: HashSet<RequestId>,
}

impl StdioTransport {
    /// The transport on the streams of this process. Must be called in a runtime.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(crate) fn new() -> io::Result<Self> {
        let input = io::stdin().as_fd().try_clone_to_owned()?;
        let output = io::stdout().as_fd().try_clone_to_owned()?;
        Self::on(input, output)
    }

    fn on(input: OwnedFd, output: OwnedFd) -> io::Result<Self> {
        let (passed, messages) = mpsc::channel(MAX_UNREAD);
        let (answers, unwritten) = mpsc::channel(MAX_UNWRITTEN);
        let (writing, written) = oneshot::channel();
        let writer = File::from(output.try_clone()?);
        thread::Builder::new().name("mcp-writer".to_owned()).spawn(move || {
            // An output that cannot be written has no reader. Senders notice that it is closed.
            let _ = write_messages(writer, unwritten);
            drop(writing);
        })?;
        // The reader may wait for input for ever, and must not keep the writer from its end.
        let refused = answers.downgrade();
        let lines = Lines::new(BufReader::with_capacity(BUFFER, File::from(input)));
        thread::Builder::new().name("mcp-reader".to_owned()).spawn(move || {
            read_messages(lines, &passed, &refused);
        })?;
        let pending = HashSet::new();
        Ok(Self { messages, answers: Some(answers), written, output, pending })
    }

    /// Whether no process can read the output any more. A file always has a reader.
    fn has_lost_reader(&self) -> bool {
        let mut output = [PollFd::new(&self.output, PollFlags::empty())];
        let polled = poll(&mut output, Some(&Timespec::default()));
        polled.is_ok() && output[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
    }

    /// Waits until no process can read the output.
    async fn closed_by_reader(&self) {
        while !self.has_lost_reader() {
            sleep(READER_INTERVAL).await;
        }
    }
}

impl Transport<RoleServer> for StdioTransport {
    type Error = io::Error;

    fn send(
        &mut self,
        item: ServerMessage,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        if let JsonRpcMessage::Response(response) = &item {
            self.pending.remove(&response.id);
        }
        if let JsonRpcMessage::Error(error) = &item
            && let Some(id) = &error.id
        {
            self.pending.remove(id);
        }
        let answers = self.answers.clone();
        async move {
            let closed = || io::Error::from(io::ErrorKind::BrokenPipe);
            answers.ok_or_else(closed)?.send(item).await.map_err(|_| closed())
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleServer>> {
        let answers = self.answers.as_ref()?;
        let message = tokio::select! {
            message = self.messages.recv() => message,
            () = answers.closed() => return None,
        };
        match &message {
            Some(JsonRpcMessage::Request(request)) => {
                self.pending.insert(request.id.clone());
            }
            // The answer of a cancelled request is dropped.
            Some(JsonRpcMessage::Notification(note)) => {
                if let ClientNotification::CancelledNotification(note) = &note.notification
                    && let Some(id) = &note.params.request_id
                {
                    self.pending.remove(id);
                }
            }
            // `rmcp` calls this function again after each answer.
            None if !self.pending.is_empty() => {
                tokio::select! {
                    () = answers.closed() => {}
                    () = self.closed_by_reader() => {}
                }
            }
            _ => {}
        }
        message
    }

    async fn close(&mut self) -> io::Result<()> {
        self.answers = None;
        let _ = (&mut self.written).await;
        Ok(())
    }
}

/// Passes messages on to the server, and errors of other lines to the writer.
fn read_messages(
    mut lines: Lines<BufReader<File>>,
    passed: &mpsc::Sender<ClientMessage>,
    refused: &mpsc::WeakSender<ServerMessage>,
) {
    // An input that cannot be read has ended.
    while let Ok(Some(line)) = lines.next_message() {
        let went = match line {
            Ok(message) => passed.blocking_send(message).is_ok(),
            Err(line) => refused.upgrade().is_some_and(|answers| {
                answers.blocking_send(ServerMessage::error(line.error, line.id)).is_ok()
            }),
        };
        if !went {
            // The server has ended.
            return;
        }
    }
}

/// Writes messages until the transport is closed. Messages that wait are written together.
fn write_messages(output: File, mut messages: mpsc::Receiver<ServerMessage>) -> io::Result<()> {
    let mut output = BufWriter::with_capacity(BUFFER, output);
    while let Some(message) = messages.blocking_recv() {
        write_message(&mut output, &message)?;
        while let Ok(message) = messages.try_recv() {
            write_message(&mut output, &message)?;
        }
        output.flush()?;
    }
    Ok(())
}

fn write_message(output: &mut impl Write, message: &ServerMessage) -> io::Result<()> {
    serde_json::to_writer(&mut *output, message)?;
    output.write_all(b"\n")
}
