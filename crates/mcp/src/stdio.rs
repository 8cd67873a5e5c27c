//! The transport on standard input and output: one message a line.
//!
//! A thread reads and parses lines, and another writes answers. The runtime itself makes no call
//! that blocks, so one thread can drive it. Each line that is no message is answered with an error
//! of JSON-RPC, where `rmcp` would leave its sender without an answer.
//!
//! Promises: no line ends the server. At the end of the input, calls run on until they are
//! answered, while the output has a reader. The server ends after its last answer is written, also
//! where the client never began the protocol. Full buffers of a client that does not read delay
//! only its own messages. May break it: a client that has closed the input and reads nothing for
//! [`WRITE_TIMEOUT`], while answers wait, loses the rest.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rmcp::model::{ClientNotification, JsonRpcMessage, RequestId};
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use rmcp::{RoleServer, ServerHandler, ServiceExt};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;

use crate::answering_service::AnsweringService;
use crate::lines::{ClientMessage, Lines, RefusedLine};

/// Parsed messages that wait for the server. Each may have the size of the longest line.
const MAX_UNREAD: usize = 1;
/// Answers that wait for the writer.
const MAX_UNWRITTEN: usize = 16;
/// Time between two looks for a reader of the output that is to end the server.
const READER_INTERVAL: Duration = Duration::from_millis(100);
/// Time in which a client that has closed the input must read a part of the output.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of the buffer of each stream, and maximum bytes of a write.
const BUFFER: usize = 64 << 10;

/// A message of the server.
type ServerMessage = TxJsonRpcMessage<RoleServer>;

/// A message of the client, or the error of another line.
type Line = Result<ClientMessage, Box<RefusedLine>>;

/// Work of the writer.
enum WriterTask {
    Write(Box<ServerMessage>),
    /// Dropped when all earlier messages are written.
    Flush(oneshot::Sender<()>),
}

/// Answers the client of a transport until its input ends, or until `end`, and waits for the
/// writer.
///
/// # Errors
/// The client does not follow the protocol.
pub(crate) async fn serve_client(
    service: AnsweringService<impl ServerHandler>,
    (transport, writer): (StdioTransport, Writer),
    end: impl Future<Output = ()> + Send,
) -> Result<(), afresh::Cause> {
    let serving = async {
        service.serve(transport).await?.waiting().await?;
        Ok(())
    };
    let served = tokio::select! {
        served = serving => served,
        () = end => Ok(()),
    };
    writer.finish().await;
    served
}

/// Messages of the client, and answers to it.
pub(crate) struct StdioTransport {
    lines: mpsc::Receiver<Line>,
    /// An error that waits for room. `rmcp` may drop the future that waits.
    refused: Option<Box<RefusedLine>>,
    /// `None` once the transport is closed.
    answers: Option<mpsc::Sender<WriterTask>>,
    client: Arc<Client>,
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
        let (passed, lines) = mpsc::channel(MAX_UNREAD);
        let (answers, unwritten) = mpsc::channel(MAX_UNWRITTEN);
        let client = Client {
            input: input.try_clone()?,
            output: File::from(output),
            write_began: Mutex::default(),
        };
        let client = Arc::new(client);
        let written = Arc::clone(&client);
        thread::Builder::new().name("mcp-writer".to_owned()).spawn(move || {
            // An output that cannot be written has no reader. Senders notice that it is closed.
            let _ = write_messages(&written, unwritten);
        })?;
        let input = Lines::new(BufReader::with_capacity(BUFFER, File::from(input)));
        thread::Builder::new().name("mcp-reader".to_owned()).spawn(move || {
            read_lines(input, &passed);
        })?;
        let writer = Writer { tasks: answers.clone(), client: Arc::clone(&client) };
        let (answers, refused, pending) = (Some(answers), None, HashSet::new());
        Ok((Self { lines, refused, answers, client, pending }, writer))
    }
}

/// The streams of a client.
struct Client {
    input: OwnedFd,
    output: File,
    /// When the present write began.
    write_began: Mutex<Option<Instant>>,
}

impl Client {
    /// Whether no process can read the output any more. A file always has a reader.
    fn has_lost_reader(&self) -> bool {
        has_event(&self.output, PollFlags::ERR | PollFlags::HUP)
    }

    /// Whether the client has closed its end of the input. The input may have unread bytes.
    fn has_closed_input(&self) -> bool {
        #[cfg(target_os = "linux")]
        let closed = PollFlags::HUP | PollFlags::RDHUP;
        #[cfg(not(target_os = "linux"))]
        let closed = PollFlags::HUP;
        has_event(&self.input, closed)
    }

    /// Whether a write lasts longer than [`WRITE_TIMEOUT`].
    fn is_stalled(&self) -> bool {
        let began = *self.write_began.lock().unwrap_or_else(PoisonError::into_inner);
        began.is_some_and(|began| began.elapsed() >= WRITE_TIMEOUT)
    }

    /// Waits until no process can read the output.
    async fn closed_output(&self) {
        while !self.has_lost_reader() {
            sleep(READER_INTERVAL).await;
        }
    }

    /// Waits until the client has closed its end of the input and reads nothing.
    async fn abandoned(&self) {
        while !(self.is_stalled() && self.has_closed_input()) {
            sleep(READER_INTERVAL).await;
        }
    }

    /// Waits until the client reads nothing.
    async fn stalled(&self) {
        while !self.is_stalled() {
            sleep(READER_INTERVAL).await;
        }
    }

    /// Room for a task of the writer. An error once no process reads the output any more.
    async fn room<'a>(
        &self,
        answers: &'a mpsc::Sender<WriterTask>,
    ) -> io::Result<mpsc::Permit<'a, WriterTask>> {
        let closed = || io::Error::from(io::ErrorKind::BrokenPipe);
        tokio::select! {
            biased;
            room = answers.reserve() => room.map_err(|_| closed()),
            () = self.abandoned() => Err(closed()),
        }
    }
}

/// Whether a stream has one of these events now.
fn has_event(stream: &impl AsFd, events: PollFlags) -> bool {
    let mut polled = [PollFd::new(stream, events)];
    poll(&mut polled, Some(&Timespec::default())).is_ok() && polled[0].revents().intersects(events)
}

/// Notes the beginning of writes. Each is small, so that a reader that is slow still ends some.
impl Write for &Client {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let note = |began| {
            *self.write_began.lock().unwrap_or_else(PoisonError::into_inner) = began;
        };
        note(Some(Instant::now()));
        let written = (&self.output).write(&bytes[..bytes.len().min(BUFFER)]);
        note(None);
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The thread that writes answers.
pub(crate) struct Writer {
    tasks: mpsc::Sender<WriterTask>,
    client: Arc<Client>,
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
            () = self.client.closed_output() => {}
            () = self.client.stalled() => {}
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
        let (answers, client) = (self.answers.clone(), Arc::clone(&self.client));
        async move {
            let answers = answers.ok_or(io::ErrorKind::BrokenPipe)?;
            client.room(&answers).await?.send(WriterTask::Write(Box::new(item)));
            Ok(())
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleServer>> {
        let answers = self.answers.as_ref()?;
        let message = loop {
            if self.refused.is_some() {
                let room = self.client.room(answers).await.ok()?;
                if let Some(line) = self.refused.take() {
                    let message = ServerMessage::error(line.error, line.id);
                    room.send(WriterTask::Write(Box::new(message)));
                }
            }
            let line = tokio::select! {
                line = self.lines.recv() => line,
                () = answers.closed() => return None,
            };
            match line {
                Some(Ok(message)) => break Some(message),
                Some(Err(refused)) => self.refused = Some(refused),
                None => break None,
            }
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
                    () = self.client.closed_output() => {}
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

/// Passes lines on to the server until it ends.
fn read_lines(mut input: Lines<BufReader<File>>, passed: &mpsc::Sender<Line>) {
    // An input that cannot be read has ended.
    while let Ok(Some(line)) = input.next_message() {
        if passed.blocking_send(line).is_err() {
            return;
        }
    }
}

/// Writes messages until the transport is closed. Messages that wait are written together.
fn write_messages(client: &Client, mut tasks: mpsc::Receiver<WriterTask>) -> io::Result<()> {
    let mut output = BufWriter::with_capacity(BUFFER, client);
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

#[cfg(test)]
mod tests {
    use std::io::Read;

    use serde_json::{Value, json};

    use super::*;
    use crate::answering_service::testing::{PanickingServer, initialize};

    /// Serves a client with this input.
    fn serve(input: impl Iterator<Item = Value> + Send + 'static, output: OwnedFd) {
        let (reader, mut writer) = io::pipe().unwrap();
        let writing = thread::spawn(move || {
            input.take_while(|line| writeln!(writer, "{line}").is_ok()).count();
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let transport = StdioTransport::on(reader.into(), output).unwrap();
            let _ = serve_client(
                AnsweringService::new(PanickingServer, 1),
                transport,
                std::future::pending(),
            )
            .await;
        });
        runtime.shutdown_background();
        drop(writing);
    }

    #[test]
    fn a_request_whose_handler_panics_is_answered_before_the_end() {
        let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"});
        let (mut reader, writer) = io::pipe().unwrap();
        serve([initialize(), list].into_iter(), writer.into());
        let mut output = String::new();
        reader.read_to_string(&mut output).unwrap();
        let last: Value = serde_json::from_str(output.lines().last().unwrap()).unwrap();
        assert_eq!((&last["id"], &last["error"]["code"]), (&json!(1), &json!(-32603)), "{output}");
    }

    /// The buffers have no room for the whole output. Refused lines fit the pipe of the input, and
    /// the server reads all pings.
    #[test]
    fn a_server_ends_whose_client_closes_the_input_and_does_not_read() {
        let ping = |id: usize| json!({"jsonrpc": "2.0", "id": id, "method": "ping"});
        let no_message = |_| json!("0".repeat(9));
        let inputs: [Box<dyn Iterator<Item = Value> + Send>; 3] = [
            Box::new((1..5000).map(no_message)),
            Box::new([initialize()].into_iter().chain((1..5000).map(ping))),
            Box::new([initialize()].into_iter().chain((1..5000).map(no_message))),
        ];
        let mut unread = Vec::new();
        thread::scope(|scope| {
            for input in inputs {
                let (reader, writer) = io::pipe().unwrap();
                unread.push(reader);
                scope.spawn(move || serve(input, writer.into()));
            }
        });
        assert!(unread.iter_mut().all(|reader| reader.read(&mut [0; 1]).unwrap() == 1));
    }
}
