//! WASI preview 1: every function about descriptors and paths is our own, over a guest's file tree
//! or host directories; clocks, randomness, arguments and the standard streams are wasmtime-wasi's.
//!
//! Promises: a guest's operations affect its tree, which is rolled back and saved with its memory,
//! or the host directories that it was granted; paths stay within the directory that they start
//! from. Reads, writes and listings of any length end with the limits of the call. May break it:
//! the standard streams' content, which is the call's.

mod calls;
mod memory;
mod paths;
mod poll;
pub(crate) mod rights;

use wasmtime::{Caller, Linker};
use wasmtime_wasi::p1::wasi_snapshot_preview1 as theirs;
use wiggle::GuestMemory;

use crate::engine::call_path::block;
use crate::host::Host;
use crate::host::files::{Descriptor, LiveFiles};
use crate::host::wait::{self, Wait};
use memory::{Bytes, Fail};

const WASI: &str = "wasi_snapshot_preview1";
/// Bytes that wasmtime-wasi may copy for one call.
const COPIED: usize = 128 << 20;

/// Errors that programs receive.
#[cfg_attr(windows, allow(dead_code, reason = "errors of granted directories"))]
pub(crate) mod errno {
    pub(crate) const EACCES: u16 = 2;
    pub(crate) const EAGAIN: u16 = 6;
    pub(crate) const EBADF: u16 = 8;
    pub(crate) const EBUSY: u16 = 10;
    pub(crate) const EDQUOT: u16 = 19;
    pub(crate) const EEXIST: u16 = 20;
    pub(crate) const EFBIG: u16 = 22;
    pub(crate) const EILSEQ: u16 = 25;
    pub(crate) const EINVAL: u16 = 28;
    pub(crate) const EIO: u16 = 29;
    pub(crate) const EISDIR: u16 = 31;
    pub(crate) const ELOOP: u16 = 32;
    pub(crate) const EMFILE: u16 = 33;
    pub(crate) const EMLINK: u16 = 34;
    pub(crate) const ENAMETOOLONG: u16 = 37;
    pub(crate) const ENFILE: u16 = 41;
    pub(crate) const ENOENT: u16 = 44;
    pub(crate) const ENOMEM: u16 = 48;
    pub(crate) const ENOSPC: u16 = 51;
    pub(crate) const ENOTDIR: u16 = 54;
    pub(crate) const ENOTEMPTY: u16 = 55;
    pub(crate) const ENOTSUP: u16 = 58;
    pub(crate) const EPERM: u16 = 63;
    pub(crate) const EROFS: u16 = 69;
    pub(crate) const ESPIPE: u16 = 70;
    pub(crate) const ETXTBSY: u16 = 74;
    pub(crate) const EXDEV: u16 = 75;
    pub(crate) const ENOTCAPABLE: u16 = 76;
}

/// One guest call: its memory, and its files.
struct Call<'a> {
    memory: Bytes<'a>,
    files: &'a LiveFiles,
    host: &'a mut Host,
    wait: Wait,
}

impl Call<'_> {
    /// Ends the guest's call if it has reached a limit. For calls of many steps, between two of
    /// them.
    fn check_limits(&mut self) -> Result<(), Fail> {
        self.wait.check_in_time(self.host).map_err(Fail::Trap)
    }
}

/// Runs a call that waits for nothing but the host's file system.
fn run(
    caller: &mut Caller<'_, Host>,
    call: impl FnOnce(&mut Call<'_>) -> Result<(), Fail>,
) -> wasmtime::Result<i32> {
    let memory = memory::of(caller)?;
    let (bytes, host) = memory.data_and_store_mut(&mut *caller);
    host.check_memory()?;
    let files = host.live();
    let memory = Bytes::new(bytes, host);
    let mut calls = Call { memory, files: &files, host, wait: Wait::begin() };
    memory::answer(call(&mut calls))
}

/// Which of the standard streams a descriptor is.
fn standard(host: &mut Host, number: i32) -> Option<i32> {
    match host.live().lock().descriptors.get(&(number as u32)) {
        Some(Descriptor::Standard(stream)) => Some(*stream as i32),
        _ => None,
    }
}

/// Defines functions of files, in place of those that are there.
macro_rules! own {
    ($linker:expr, $($name:ident($($argument:ident: $type:ty),*);)*) => {
        $($linker.func_wrap(WASI, stringify!($name), |mut caller: Caller<'_, Host>, $($argument: $type),*| {
            run(&mut caller, |call| call.$name($($argument),*))
        })?;)*
    };
}

/// Defines functions that may wait where standard streams or clocks are meant: those are
/// wasmtime-wasi's. Functions that concern files alone wait for nothing.
macro_rules! either {
    ($linker:expr, $waits:expr, $($name:ident($($argument:ident: $type:ty),*);)*) => {
        $(if $waits {
            $linker.func_wrap_async(WASI, stringify!($name), |mut caller: Caller<'_, Host>, ($($argument,)*): ($($type,)*)| {
                Box::new(async move {
                    match ours::$name(&mut caller, $($argument),*)? {
                        Some(answer) => Ok(answer),
                        None => streams::$name(&mut caller, $($argument),*).await,
                    }
                })
            })?;
        } else {
            $linker.func_wrap(WASI, stringify!($name), |mut caller: Caller<'_, Host>, $($argument: $type),*| {
                match ours::$name(&mut caller, $($argument),*)? {
                    Some(answer) => Ok(answer),
                    None => block(streams::$name(&mut caller, $($argument),*)),
                }
            })?;
        })*
    };
}

/// Replaces wasmtime-wasi's functions of files, and those whose waits no limit of a call would end.
pub(crate) fn link(linker: &mut Linker<Host>, waits: bool) -> wasmtime::Result<()> {
    own!(linker,
        fd_advise(fd: i32, offset: i64, len: i64, advice: i32);
        fd_allocate(fd: i32, offset: i64, len: i64);
        fd_close(fd: i32);
        fd_fdstat_get(fd: i32, to: i32);
        fd_fdstat_set_flags(fd: i32, flags: i32);
        fd_fdstat_set_rights(fd: i32, rights: i64, inheriting: i64);
        fd_filestat_get(fd: i32, to: i32);
        fd_filestat_set_size(fd: i32, size: i64);
        fd_filestat_set_times(fd: i32, accessed: i64, modified: i64, which: i32);
        fd_pread(fd: i32, parts: i32, count: i32, offset: i64, to: i32);
        fd_prestat_get(fd: i32, to: i32);
        fd_prestat_dir_name(fd: i32, to: i32, len: i32);
        fd_pwrite(fd: i32, parts: i32, count: i32, offset: i64, to: i32);
        fd_readdir(fd: i32, buffer: i32, len: i32, cookie: i64, to: i32);
        fd_renumber(fd: i32, other: i32);
        fd_seek(fd: i32, offset: i64, whence: i32, to: i32);
        fd_tell(fd: i32, to: i32);
        path_create_directory(fd: i32, path: i32, len: i32);
        path_filestat_get(fd: i32, flags: i32, path: i32, len: i32, to: i32);
        path_filestat_set_times(fd: i32, flags: i32, path: i32, len: i32, accessed: i64, modified: i64, which: i32);
        path_link(from: i32, flags: i32, old: i32, old_len: i32, into: i32, new: i32, new_len: i32);
        path_open(fd: i32, lookup: i32, path: i32, len: i32, how: i32, rights: i64, inheriting: i64, flags: i32, to: i32);
        path_readlink(fd: i32, path: i32, len: i32, buffer: i32, room: i32, to: i32);
        path_remove_directory(fd: i32, path: i32, len: i32);
        path_rename(from: i32, old: i32, old_len: i32, into: i32, new: i32, new_len: i32);
        path_symlink(target: i32, target_len: i32, fd: i32, path: i32, len: i32);
        path_unlink_file(fd: i32, path: i32, len: i32);
        sock_accept(fd: i32, flags: i32, to: i32);
        sock_recv(fd: i32, parts: i32, count: i32, flags: i32, to: i32, seen: i32);
        sock_send(fd: i32, parts: i32, count: i32, flags: i32, to: i32);
        sock_shutdown(fd: i32, how: i32);
    );
    either!(linker, waits,
        fd_read(fd: i32, parts: i32, count: i32, to: i32);
        fd_write(fd: i32, parts: i32, count: i32, to: i32);
    );
    link_sync(linker, waits)?;
    link_poll(linker, waits)
}

/// Defines the functions that wait for a disk.
fn link_sync(linker: &mut Linker<Host>, waits: bool) -> wasmtime::Result<()> {
    for (name, data) in [("fd_sync", false), ("fd_datasync", true)] {
        if waits {
            linker.func_wrap_async(
                WASI,
                name,
                move |mut caller: Caller<'_, Host>, (fd,): (i32,)| {
                    Box::new(async move {
                        let mut host = None;
                        let answer = run(&mut caller, |call| {
                            host = call.host_to_sync(fd, data)?;
                            Ok(())
                        })?;
                        match host {
                            Some(host) => {
                                let store = caller.data_mut();
                                let synced = wait::sync_within_limits(store, host, data).await?;
                                memory::answer(synced.map_err(Fail::from))
                            }
                            None => Ok(answer),
                        }
                    })
                },
            )?;
        } else {
            linker.func_wrap(WASI, name, move |mut caller: Caller<'_, Host>, fd: i32| {
                run(&mut caller, |call| match call.host_to_sync(fd, data)? {
                    Some(host) => Ok(host.sync(data)?),
                    None => Ok(()),
                })
            })?;
        }
    }
    Ok(())
}

/// Defines `poll_oneoff`, for files, clocks and standard streams.
fn link_poll(linker: &mut Linker<Host>, waits: bool) -> wasmtime::Result<()> {
    type Arguments = (i32, i32, i32, i32);
    if waits {
        linker.func_wrap_async(
            WASI,
            "poll_oneoff",
            |mut caller: Caller<'_, Host>, (asked, answers, count, to): Arguments| {
                Box::new(async move {
                    if let Some(answer) = ours::poll_oneoff(&mut caller, asked, answers, count, to)?
                    {
                        return Ok(answer);
                    }
                    match poll::clocks(&mut caller, asked, count)? {
                        Some(clocks) if !clocks.wait_async(caller.data_mut()).await? => {
                            clocks.report(&mut caller, answers, to)
                        }
                        _ => streams::poll_oneoff(&mut caller, asked, answers, count, to).await,
                    }
                })
            },
        )?;
    } else {
        linker.func_wrap(
            WASI,
            "poll_oneoff",
            |mut caller: Caller<'_, Host>, asked: i32, answers: i32, count: i32, to: i32| {
                if let Some(answer) = ours::poll_oneoff(&mut caller, asked, answers, count, to)? {
                    return Ok(answer);
                }
                match poll::clocks(&mut caller, asked, count)? {
                    Some(clocks) if !clocks.wait(caller.data_mut())? => {
                        clocks.report(&mut caller, answers, to)
                    }
                    _ => block(streams::poll_oneoff(&mut caller, asked, answers, count, to)),
                }
            },
        )?;
    }
    Ok(())
}

/// Functions of files, if the descriptor or path is one.
mod ours {
    use super::{Caller, Host, run, standard};

    pub(super) fn fd_read(
        caller: &mut Caller<'_, Host>,
        fd: i32,
        parts: i32,
        count: i32,
        to: i32,
    ) -> wasmtime::Result<Option<i32>> {
        match standard(caller.data_mut(), fd) {
            Some(_) => Ok(None),
            None => run(caller, |call| call.fd_read(fd, parts, count, to)).map(Some),
        }
    }

    pub(super) fn fd_write(
        caller: &mut Caller<'_, Host>,
        fd: i32,
        parts: i32,
        count: i32,
        to: i32,
    ) -> wasmtime::Result<Option<i32>> {
        match standard(caller.data_mut(), fd) {
            Some(_) => Ok(None),
            None => run(caller, |call| call.fd_write(fd, parts, count, to)).map(Some),
        }
    }

    /// Files are always ready: where one is polled, the answer is there at once.
    pub(super) fn poll_oneoff(
        caller: &mut Caller<'_, Host>,
        asked: i32,
        answers: i32,
        count: i32,
        to: i32,
    ) -> wasmtime::Result<Option<i32>> {
        let mut ready = false;
        let answer = run(caller, |call| {
            ready = call.poll_files(asked, answers, count, to)?;
            Ok(())
        })?;
        Ok((answer != 0 || ready).then_some(answer))
    }
}

/// Functions of standard streams and clocks.
mod streams {
    use std::time::Duration;

    use super::{Bytes, COPIED, Caller, GuestMemory, Host, errno, memory, standard, theirs};
    use crate::host::wait;
    use wasmtime_wasi::p1::WasiP1Ctx;
    use wasmtime_wasi::p1::wasi_snapshot_preview1::WasiSnapshotPreview1 as _;

    /// The arguments of a wasmtime-wasi function: its context, and the guest's memory.
    fn lend<'a>(
        caller: &'a mut Caller<'_, Host>,
    ) -> wasmtime::Result<(&'a mut WasiP1Ctx, GuestMemory<'a>)> {
        let memory = memory::of(caller)?;
        let (bytes, host) = memory.data_and_store_mut(caller);
        host.check_memory()?;
        let context = host.p1();
        context.set_hostcall_fuel(COPIED);
        Ok((context, GuestMemory::Unshared(bytes)))
    }

    /// Whether a call has more buffers than one may have. To look at as many as a memory of 4 GiB
    /// has room for takes longer than a time limit.
    fn has_too_many_parts(count: i32) -> bool {
        count as u32 > memory::PARTS
    }

    pub(super) async fn fd_read(
        caller: &mut Caller<'_, Host>,
        fd: i32,
        parts: i32,
        count: i32,
        to: i32,
    ) -> wasmtime::Result<i32> {
        if has_too_many_parts(count) {
            return Ok(i32::from(errno::EINVAL));
        }
        let stream = standard(caller.data_mut(), fd).unwrap_or(fd);
        if stream == 0 {
            wait::for_input(caller.data_mut(), Duration::MAX).await?;
        }
        let (context, mut memory) = lend(caller)?;
        theirs::fd_read(context, &mut memory, stream, parts, count, to).await
    }

    pub(super) async fn fd_write(
        caller: &mut Caller<'_, Host>,
        fd: i32,
        parts: i32,
        count: i32,
        to: i32,
    ) -> wasmtime::Result<i32> {
        if has_too_many_parts(count) {
            return Ok(i32::from(errno::EINVAL));
        }
        let stream = standard(caller.data_mut(), fd).unwrap_or(fd);
        let (bytes, host) = memory::of(caller)?.data_and_store_mut(&mut *caller);
        // It writes the bytes as it reads them.
        Bytes::new(bytes, host).fetch_parts(parts, count)?;
        let (context, mut memory) = lend(caller)?;
        theirs::fd_write(context, &mut memory, stream, parts, count, to).await
    }

    pub(super) async fn poll_oneoff(
        caller: &mut Caller<'_, Host>,
        asked: i32,
        answers: i32,
        count: i32,
        to: i32,
    ) -> wasmtime::Result<i32> {
        let (context, mut memory) = lend(caller)?;
        theirs::poll_oneoff(context, &mut memory, asked, answers, count, to).await
    }
}
