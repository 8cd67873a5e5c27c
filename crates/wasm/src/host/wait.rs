//! Waits of guests inside the host: sleeps, polls and blocking streams, which end with the limits
//! of the call.
//!
//! Compiled code checks its limits at loops and function entries, which a guest that waits in the
//! host does not reach. So a wait is cut into slices, with the same check after each.
//!
//! Promises: a wait ends within a slice of the moment when the [watch](crate::Watch) refuses, or
//! the time limit expires. With an epoch that the embedder advances, one wait takes no longer than
//! the time limit. May break it: a host function of the embedder that blocks by itself.

use std::time::{Duration, Instant};

use afresh_files::{HostHandle, Refused};
use bytes::Bytes;
use wasmtime::component::{Linker, Resource};
use wasmtime_wasi::cli::StdinStream as _;
use wasmtime_wasi::p2::bindings::io::{poll, streams};
use wasmtime_wasi::p2::{
    DynInputStream, DynOutputStream, DynPollable, Pollable, StreamError, StreamResult,
};

use crate::engine::call_path::block as block_on;
use crate::host::Host;

/// Time between two checks.
const SLICE: Duration = Duration::from_millis(5);
/// Maximum bytes of a blocking write, as `wasi:io` defines it.
const MAX_BLOCKING_WRITE: usize = 4096;
/// The interfaces whose functions wait, at wasmtime-wasi's version: a linker resolves older ones to
/// it.
const POLL: &str = "wasi:io/poll@0.2.12";
const STREAMS: &str = "wasi:io/streams@0.2.12";

/// One wait of a guest, or work for it.
pub(crate) struct Wait {
    started: Instant,
    /// Slices after which limits were checked.
    checked: u128,
}

impl Wait {
    pub(crate) fn begin() -> Self {
        Self { started: Instant::now(), checked: 0 }
    }

    /// Ends the work once the call has reached a limit. For steps that are shorter than a slice:
    /// the limits are checked once in each.
    pub(crate) fn check_in_time(&mut self, host: &mut Host) -> wasmtime::Result<()> {
        let slices = self.started.elapsed().as_nanos() / SLICE.as_nanos();
        let checked = std::mem::replace(&mut self.checked, slices);
        if checked == slices {
            return Ok(());
        }
        // Other tasks of the thread do not run, so the time is that of the call.
        host.take_turns(u64::try_from(slices - checked).unwrap_or(u64::MAX))?;
        self.check(host)
    }

    /// Ends the wait once the call has reached a limit.
    fn check(&self, host: &mut Host) -> wasmtime::Result<()> {
        host.check_limits(self.started)
    }

    /// Sleeps on this thread until `time` has passed since the wait began.
    pub(crate) fn sleep(&self, host: &mut Host, time: Duration) -> wasmtime::Result<()> {
        while let Some(slice) = self.next_slice(time) {
            std::thread::sleep(slice);
            self.check(host)?;
        }
        Ok(())
    }

    /// As [`Wait::sleep`], without blocking the thread.
    pub(crate) async fn sleep_async(
        &self,
        host: &mut Host,
        time: Duration,
    ) -> wasmtime::Result<()> {
        while let Some(slice) = self.next_slice(time) {
            tokio::time::sleep(slice).await;
            self.check(host)?;
        }
        Ok(())
    }

    fn next_slice(&self, time: Duration) -> Option<Duration> {
        let left = time.saturating_sub(self.started.elapsed());
        (!left.is_zero()).then_some(left.min(SLICE))
    }
}

impl Host {
    /// Takes the turns of host work that did not yield, and fails once the call has none left.
    fn take_turns(&mut self, taken: u64) -> wasmtime::Result<()> {
        self.turns = self.turns.map(|turns| turns.saturating_sub(taken));
        match self.turns {
            Some(0) => Err(wasmtime::Trap::Interrupt.into()),
            _ => Ok(()),
        }
    }

    /// Whether its standard input is that of this process, which may keep it waiting.
    pub(crate) fn inherits_stdin(&self) -> bool {
        let wasi = self.own.as_ref().unwrap_or(&self.parts.wasi);
        wasi.stdin.is_empty() && wasi.inherit_stdin
    }
}

/// Waits until standard input has bytes, an error or its end, at most for `time`. Returns whether
/// it has. Only that of this process can be empty.
pub(crate) async fn for_input(host: &mut Host, time: Duration) -> wasmtime::Result<bool> {
    if !host.inherits_stdin() {
        return Ok(true);
    }
    // All such streams are one, and none loses bytes when it is dropped.
    let (wait, mut input) = (Wait::begin(), wasmtime_wasi::cli::stdin().p2_stream());
    loop {
        let slice = wait.next_slice(time).unwrap_or_default();
        if tokio::time::timeout(slice, input.ready()).await.is_ok() {
            return Ok(true);
        }
        if wait.next_slice(time).is_none() {
            return Ok(false);
        }
        wait.check(host)?;
    }
}

/// Awaits `$ready`, an expression that is evaluated anew for each slice. Its future must be
/// cancel-safe, as [`Pollable::ready`] is. `$failed` wraps the error of a call that has reached a
/// limit.
macro_rules! sliced {
    ($host:expr, $failed:expr, $ready:expr) => {{
        let wait = Wait::begin();
        loop {
            if let Ok(done) = tokio::time::timeout(SLICE, $ready).await {
                break done;
            }
            wait.check($host).map_err($failed)?;
        }
    }};
}

/// Returns when bytes of a host file are on its disk, without blocking the thread.
pub(crate) async fn sync(file: HostHandle, data: bool) -> Result<(), Refused> {
    let synced = tokio::task::spawn_blocking(move || file.sync(data)).await;
    synced.unwrap_or_else(|_| Err(Refused::Layer("the runtime is shutting down".to_owned())))
}

/// As [`sync`], and ends with the limits of the call. The host then continues to write the bytes.
pub(crate) async fn sync_within_limits(
    host: &mut Host,
    file: HostHandle,
    data: bool,
) -> wasmtime::Result<Result<(), Refused>> {
    let mut work = std::pin::pin!(sync(file, data));
    Ok(sliced!(host, std::convert::identity, work.as_mut()))
}

async fn block(host: &mut Host, pollable: Resource<DynPollable>) -> wasmtime::Result<()> {
    let again = || Resource::new_borrow(pollable.rep());
    sliced!(host, std::convert::identity, poll::HostPollable::block(host.table(), again()))
}

async fn poll_all(
    host: &mut Host,
    pollables: Vec<Resource<DynPollable>>,
) -> wasmtime::Result<Vec<u32>> {
    let again = || pollables.iter().map(|one| Resource::new_borrow(one.rep())).collect();
    sliced!(host, std::convert::identity, poll::Host::poll(host.table(), again()))
}

async fn read(
    host: &mut Host,
    stream: Resource<DynInputStream>,
    len: u64,
) -> StreamResult<Vec<u8>> {
    host.table().get(&stream)?;
    sliced!(host, StreamError::Trap, host.table().get_mut(&stream)?.ready());
    streams::HostInputStream::read(host.table(), stream, len)
}

async fn skip(host: &mut Host, stream: Resource<DynInputStream>, len: u64) -> StreamResult<u64> {
    sliced!(host, StreamError::Trap, host.table().get_mut(&stream)?.ready());
    streams::HostInputStream::skip(host.table(), stream, len)
}

/// Waits until a stream takes bytes, and returns how many.
async fn writable(host: &mut Host, stream: &Resource<DynOutputStream>) -> StreamResult<usize> {
    sliced!(host, StreamError::Trap, host.table().get_mut(stream)?.write_ready())
}

async fn write(
    host: &mut Host,
    stream: Resource<DynOutputStream>,
    mut bytes: Bytes,
) -> StreamResult<()> {
    if bytes.len() > MAX_BLOCKING_WRITE {
        return Err(StreamError::trap("a blocking write takes 4096 bytes at most"));
    }
    loop {
        let room = writable(host, &stream).await?.min(bytes.len());
        host.table().get_mut(&stream)?.write(bytes.split_to(room))?;
        if bytes.is_empty() {
            break;
        }
    }
    // As in wasmtime-wasi, a stream that closes after the write is not an error.
    match flush(host, stream).await {
        Err(StreamError::Closed) => Ok(()),
        flushed => flushed,
    }
}

async fn write_zeroes(
    host: &mut Host,
    stream: Resource<DynOutputStream>,
    len: u64,
) -> StreamResult<()> {
    static ZEROES: [u8; MAX_BLOCKING_WRITE + 1] = [0; MAX_BLOCKING_WRITE + 1];
    let len = usize::try_from(len).map_or(ZEROES.len(), |len| len.min(ZEROES.len()));
    write(host, stream, Bytes::from_static(&ZEROES[..len])).await
}

async fn flush(host: &mut Host, stream: Resource<DynOutputStream>) -> StreamResult<()> {
    host.table().get_mut(&stream)?.flush()?;
    writable(host, &stream).await.map(drop)
}

async fn splice(
    host: &mut Host,
    to: Resource<DynOutputStream>,
    from: Resource<DynInputStream>,
    len: u64,
) -> StreamResult<u64> {
    let room = writable(host, &to).await?.min(MAX_BLOCKING_WRITE);
    let bytes = read(host, from, len.min(room as u64)).await?;
    let spliced = bytes.len() as u64;
    if spliced > 0 {
        write(host, to, bytes.into()).await?;
    }
    Ok(spliced)
}

/// Converts the result of a stream function to that of `wasi:io`.
fn lower<T>(
    host: &mut Host,
    result: StreamResult<T>,
) -> wasmtime::Result<(Result<T, streams::StreamError>,)> {
    Ok((match result {
        Ok(value) => Ok(value),
        Err(error) => Err(streams::Host::convert_stream_error(host.table(), error)?),
    },))
}

/// Replaces the functions of `wasi:io` that wait; `waits` as
/// [`crate::engine::call_path::CallPath::waits`].
pub(crate) fn link(linker: &mut Linker<Host>, waits: bool) -> wasmtime::Result<()> {
    macro_rules! define {
        ($interface:expr, $($name:literal => ($($argument:ident: $type:ty),*) |$host:ident| $run:expr;)*) => {{
            let mut interface = linker.instance($interface)?;
            $(if waits {
                interface.func_wrap_async($name, |mut store, ($($argument,)*): ($($type,)*)| {
                    Box::new(async move {
                        let $host: &mut Host = store.data_mut();
                        $run.await
                    })
                })?;
            } else {
                interface.func_wrap($name, |mut store, ($($argument,)*): ($($type,)*)| {
                    let $host: &mut Host = store.data_mut();
                    block_on($run)
                })?;
            })*
        }};
    }
    define!(POLL,
        "poll" => (all: Vec<Resource<DynPollable>>) |host| async {
            Ok((poll_all(host, all).await?,))
        };
        "[method]pollable.block" => (one: Resource<DynPollable>) |host| block(host, one);
    );
    type Input = Resource<DynInputStream>;
    type Output = Resource<DynOutputStream>;
    define!(STREAMS,
        "[method]input-stream.blocking-read" => (stream: Input, len: u64) |host| async {
            let read = read(host, stream, len).await;
            lower(host, read)
        };
        "[method]input-stream.blocking-skip" => (stream: Input, len: u64) |host| async {
            let skipped = skip(host, stream, len).await;
            lower(host, skipped)
        };
        "[method]output-stream.blocking-write-and-flush" => (stream: Output, bytes: Vec<u8>) |host| async {
            let written = write(host, stream, bytes.into()).await;
            lower(host, written)
        };
        "[method]output-stream.blocking-write-zeroes-and-flush" => (stream: Output, len: u64) |host| async {
            let written = write_zeroes(host, stream, len).await;
            lower(host, written)
        };
        "[method]output-stream.blocking-flush" => (stream: Output) |host| async {
            let flushed = flush(host, stream).await;
            lower(host, flushed)
        };
        "[method]output-stream.blocking-splice" => (to: Output, from: Input, len: u64) |host| async {
            let spliced = splice(host, to, from, len).await;
            lower(host, spliced)
        };
    );
    Ok(())
}
