//! The transport on standard input and output: one message a line.
//!
//! A thread reads and parses lines, and another writes answers. The runtime itself makes no call
//! that blocks, so one thread can drive it. Each line that is no message is answered with an error
//! of JSON-RPC, where `rmcp` would leave its sender without an answer.
//!
//! Promises: no line ends the server. At the end of the input, calls run on until they are
//! answered, while the output has a reader. The server ends after its last answer is written, also
//! where the client never began the protocol. Full buffers of a client that does not read delay
//! only its own messages. May break it: a client that reads nothing for [`WRITE_TIMEOUT`] at the
//! end of the server loses the rest.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rmcp::RoleServer;
use rmcp::model::{ClientNotification, JsonRpcMessage, RequestId};
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep};

use crate::lines::{ClientMessage, Lines};

/// Parsed messages that wait for the server. Each may have the size of the longest line.
const MAX_UNREAD: usize = 1;
/// Answers that wait for the writer.
const MAX_UNWRITTEN: usize = 16;
/// Time between two looks for a reader of the output, after the end of the input.
const READER_INTERVAL: Duration = Duration::from_millis(100);
/// Time in which a client must read a part of the output once the server ends.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of the buffer of each stream, and maximum bytes of a write.
const BUFFER: usize = 64 << 10;

/// A message of the server.
type ServerMessage = TxJsonRpcMessage<RoleServer>;

/// Work of the writer.
enum WriterTask {
    Write(Box<ServerMessage>),
    /// Dropped when all earlier messages are written.
    Flush(oneshot::Sender<()>),
}

/// Messages of the client, and answers to it.
pub(crate) struct StdioTransport {
    messages: mpsc::Receiver<ClientMessage>,
    /// `None` once the transport is closed.
    answers: Option<mpsc::Sender<WriterTask>>,
    output: Arc<Output>,
    /// Requests without an answer.
    pending: HashSet<RequestId>,
}

impl StdioTransport {
    /// The transport on the streams of this process, and its writer.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(crate) fn new() -> io::Result<(Self, Writer)> {
        let input = io::stdin().as_fd().try_clone_to_owned()?;
        let output = io::stdout().as_fd().try_clone_to_owned()?;
        Self::on(input, output)
    }

    fn on(input: OwnedFd, output: OwnedFd) -> io::Result<(Self, Writer)> {
        let (passed, messages) = mpsc::channel(MAX_UNREAD);
        let (answers, unwritten) = mpsc::channel(MAX_UNWRITTEN);
        let output = Arc::new(Output { stream: File::from(output), writes: AtomicU64::new(0) });
        let written = Arc::clone(&output);
        thread::Builder::new().name("mcp-writer".to_owned()).spawn(move || {
            // An output that cannot be written has no reader. Senders notice that it is closed.
            let _ = write_messages(&written, unwritten);
        })?;
        // The reader may wait for input for ever, and must not keep the writer from its end.
        let refused = answers.downgrade();
        let lines = Lines::new(BufReader::with_capacity(BUFFER, File::from(input)));
        thread::Builder::new().name("mcp-reader".to_owned()).spawn(move || {
            read_messages(lines, &passed, &refused);
        })?;
        let writer = Writer { tasks: answers.clone(), output: Arc::clone(&output) };
        Ok((Self { messages, answers: Some(answers), output, pending: HashSet::new() }, writer))
    }
}

/// The stream of answers.
struct Output {
    stream: File,
    /// Writes that have ended.
    writes: AtomicU64,
}

impl Output {
    /// Whether no process can read the output any more. A file always has a reader.
    fn has_lost_reader(&self) -> bool {
        let mut output = [PollFd::new(&self.stream, PollFlags::empty())];
        let polled = poll(&mut output, Some(&Timespec::default()));
        polled.is_ok() && output[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
    }

    /// Waits until no process can read the output.
    async fn closed_by_reader(&self) {
        while !self.has_lost_reader() {
            sleep(READER_INTERVAL).await;
        }
    }

    /// Waits until no write ends for [`WRITE_TIMEOUT`].
    async fn stalled(&self) {
        let (mut writes, mut since) = (self.writes.load(Ordering::Relaxed), Instant::now());
        while since.elapsed() < WRITE_TIMEOUT {
            sleep(READER_INTERVAL).await;
            let now = self.writes.load(Ordering::Relaxed);
            if now != writes {
                (writes, since) = (now, Instant::now());
            }
        }
    }
}

/// Counts writes. Each is small, so that a reader that is slow still ends some.
impl Write for &Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = (&self.stream).write(&bytes[..bytes.len().min(BUFFER)])?;
        self.writes.fetch_add(1, Ordering::Relaxed);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The thread that writes answers.
pub(crate) struct Writer {
    tasks: mpsc::Sender<WriterTask>,
    output: Arc<Output>,
}

impl Writer {
    /// Waits until the answers so far are written, or their reader has left or reads nothing for
    /// [`WRITE_TIMEOUT`].
    pub(crate) async fn finish(self) {
        let (flush, flushed) = oneshot::channel();
        let finished = async {
            if self.tasks.send(WriterTask::Flush(flush)).await.is_ok() {
                // An error, since the writer drops its end.
                let _ = flushed.await;
            }
        };
        tokio::select! {
            () = finished => {}
            () = self.output.closed_by_reader() => {}
            () = self.output.stalled() => {}
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
            let task = WriterTask::Write(Box::new(item));
            answers.ok_or_else(closed)?.send(task).await.map_err(|_| closed())
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
                    () = self.output.closed_by_reader() => {}
                }
            }
            _ => {}
        }
        message
    }

    /// Takes no more answers. [`Writer::finish`] waits for those before.
    async fn close(&mut self) -> io::Result<()> {
        self.answers = None;
        Ok(())
    }
}

/// Passes messages on to the server, and errors of other lines to the writer.
fn read_messages(
    mut lines: Lines<BufReader<File>>,
    passed: &mpsc::Sender<ClientMessage>,
    refused: &mpsc::WeakSender<WriterTask>,
) {
    // An input that cannot be read has ended.
    while let Ok(Some(line)) = lines.next_message() {
        let went = match line {
            Ok(message) => passed.blocking_send(message).is_ok(),
            Err(line) => refused.upgrade().is_some_and(|answers| {
                let message = Box::new(ServerMessage::error(line.error, line.id));
                answers.blocking_send(WriterTask::Write(message)).is_ok()
            }),
        };
        if !went {
            // The server has ended.
            return;
        }
    }
}

/// Writes messages until the transport is closed. Messages that wait are written together.
fn write_messages(output: &Output, mut tasks: mpsc::Receiver<WriterTask>) -> io::Result<()> {
    let mut output = BufWriter::with_capacity(BUFFER, output);
    while let Some(task) = tasks.blocking_recv() {
        carry_out(&mut output, task)?;
        while let Ok(task) = tasks.try_recv() {
            carry_out(&mut output, task)?;
        }
        output.flush()?;
    }
    Ok(())
}

fn carry_out(output: &mut impl Write, task: WriterTask) -> io::Result<()> {
    match task {
        WriterTask::Write(message) => {
            serde_json::to_writer(&mut *output, &message)?;
            output.write_all(b"\n")
        }
        WriterTask::Flush(flushed) => {
            output.flush()?;
            drop(flushed);
            Ok(())
        }
    }
}
