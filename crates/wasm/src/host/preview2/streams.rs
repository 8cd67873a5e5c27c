//! Streams into and out of files. They hold their file until they are dropped, and never wait.

use afresh_files::Refused;
use bytes::Bytes;
use wasmtime_wasi::async_trait;
use wasmtime_wasi::p2::{InputStream, OutputStream, Pollable, StreamError, StreamResult};

use crate::host::files::{LiveFiles, Ticket};
use crate::host::opened::OpenHandle;

/// Bytes that one read or write takes.
const PART: usize = 1 << 16;

/// A file that a stream holds.
struct FileHandle {
    files: LiveFiles,
    open: OpenHandle,
    _ticket: Ticket,
}

impl FileHandle {
    fn new(files: &LiveFiles, ticket: Ticket, open: OpenHandle) -> Result<Self, Refused> {
        open.hold(&mut files.lock().tree)?;
        Ok(Self { files: files.clone(), open, _ticket: ticket })
    }
}

impl Drop for FileHandle {
    fn drop(&mut self) {
        self.open.release(&mut self.files.lock().tree);
    }
}

fn failed(refused: Refused) -> StreamError {
    StreamError::LastOperationFailed(std::io::Error::from(refused).into())
}

/// Reads a file from a position on.
pub(super) struct Reader(FileHandle);

impl Reader {
    pub(super) fn new(
        files: &LiveFiles,
        ticket: Ticket,
        mut open: OpenHandle,
        at: u64,
    ) -> Result<Self, Refused> {
        open.set_offset(at);
        Ok(Self(FileHandle::new(files, ticket, open)?))
    }
}

#[async_trait]
impl Pollable for Reader {
    async fn ready(&mut self) {}
}

#[async_trait]
impl InputStream for Reader {
    fn read(&mut self, size: usize) -> StreamResult<Bytes> {
        let FileHandle { files, open, .. } = &mut self.0;
        let mut bytes = vec![0; size.min(PART)];
        let len = open.read(&files.lock().tree, &mut bytes).map_err(failed)?;
        if len == 0 && size > 0 {
            return Err(StreamError::Closed);
        }
        bytes.truncate(len);
        Ok(bytes.into())
    }
}

/// Writes into a file from a position on, or at its end.
pub(super) struct Writer(FileHandle);

impl Writer {
    pub(super) fn new(
        files: &LiveFiles,
        ticket: Ticket,
        mut open: OpenHandle,
        at: Option<u64>,
    ) -> Result<Self, Refused> {
        open.access_mut().append = at.is_none();
        open.set_offset(at.unwrap_or(0));
        Ok(Self(FileHandle::new(files, ticket, open)?))
    }
}

#[async_trait]
impl Pollable for Writer {
    async fn ready(&mut self) {}
}

#[async_trait]
impl OutputStream for Writer {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        let FileHandle { files, open, .. } = &mut self.0;
        let (tree, mut done) = (&mut files.lock().tree, 0);
        while done < bytes.len() {
            match open.write(tree, &bytes[done..]).map_err(failed)? {
                0 => return Err(failed(Refused::Full)),
                len => done += len,
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> StreamResult<()> {
        Ok(())
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        Ok(PART)
    }
}
