//! Standard output and error of guests: their destination, and the stream that hands writes to a
//! function.
//!
//! Promises: a handler receives every write once, in the guest's order. A write to it never waits
//! and never fails.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::io::AsyncWrite;
use wasmtime_wasi::async_trait;
use wasmtime_wasi::cli::{IsTerminal, StdoutStream};
use wasmtime_wasi::p2::{OutputStream, Pollable, StreamResult};

/// Maximum bytes that a guest may hand over in one write.
const MAX_WRITE: usize = 64 << 10;

/// The destination of standard output and error.
#[derive(Clone, Debug, Default)]
pub enum Output {
    /// Nowhere.
    #[default]
    Discard,
    /// This process's own standard output and error.
    Inherit,
    /// Memory, up to this many bytes each; read with [`crate::Host::stdout`] and
    /// [`crate::Host::stderr`].
    Capture(usize),
    /// A function of the embedder.
    Handler(OutputHandler),
}

/// A standard stream that a guest writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandardStream {
    /// Standard output.
    Output,
    /// Standard error.
    Error,
}

type Handle = dyn Fn(StandardStream, &[u8]) + Send + Sync;

/// A function that receives standard output and error while the guest writes. The guest waits for
/// it. It must bound what it keeps: the guest's limits do not count it.
#[derive(Clone)]
pub struct OutputHandler(Arc<Handle>);

impl OutputHandler {
    /// A handler that calls `handle` with each write.
    pub fn new(handle: impl Fn(StandardStream, &[u8]) + Send + Sync + 'static) -> Self {
        Self(Arc::new(handle))
    }
}

impl std::fmt::Debug for OutputHandler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OutputHandler")
    }
}

/// A stream of WASI whose writes go to a handler.
#[derive(Clone)]
pub(super) struct HandlerStream {
    pub(super) stream: StandardStream,
    pub(super) handler: OutputHandler,
}

impl IsTerminal for HandlerStream {
    fn is_terminal(&self) -> bool {
        false
    }
}

impl StdoutStream for HandlerStream {
    fn async_stream(&self) -> Box<dyn AsyncWrite + Send + Sync> {
        Box::new(self.clone())
    }

    fn p2_stream(&self) -> Box<dyn OutputStream> {
        Box::new(self.clone())
    }
}

#[async_trait]
impl Pollable for HandlerStream {
    async fn ready(&mut self) {}
}

#[async_trait]
impl OutputStream for HandlerStream {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        (self.handler.0)(self.stream, &bytes);
        Ok(())
    }

    fn flush(&mut self) -> StreamResult<()> {
        Ok(())
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        Ok(MAX_WRITE)
    }
}

impl AsyncWrite for HandlerStream {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        (self.handler.0)(self.stream, bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
