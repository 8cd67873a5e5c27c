//! The C interface, for embedders that restore their own memory: a JVM, a checkpoint tool, a VMM.
//!
//! Every function that can fail returns 0 or a negative `AFRESH_E…` code, and leaves a message for
//! [`afresh_last_error`] in the calling thread. No function unwinds into C: a bug here is reported
//! as [`AFRESH_EINTERNAL`]. Handles may be used from any thread, but not closed while in use.
//!
//! The header `include/afresh.h` is generated from this file.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use afresh_pager::vmm::ControlClient;
use afresh_pager::{FillStrategy, Options, Restore, RestoreError, SnapshotSource};
use afresh_store::{Snapshot, Store};
use afresh_sys::{PAGE_SIZE, PageRange, Reservation};

/// An argument is null, misaligned, or no UTF-8.
pub const AFRESH_EINVAL: i32 = -1;
/// The store or the snapshot cannot be opened, or is damaged.
pub const AFRESH_ESNAPSHOT: i32 = -2;
/// The strategy cannot be used here.
pub const AFRESH_EUNSUPPORTED: i32 = -3;
/// Pages could not be filled; the memory is closed and raises SIGSEGV.
pub const AFRESH_EFAILED: i32 = -4;
/// Waiting took longer than allowed; the restore continues.
pub const AFRESH_ETIMEDOUT: i32 = -5;
/// A bug in afresh.
pub const AFRESH_EINTERNAL: i32 = -6;
/// The pager cannot be reached, or has disconnected.
pub const AFRESH_ECONNECTION: i32 = -7;
/// The pager has refused the request.
pub const AFRESH_EREFUSED: i32 = -8;

/// An opened snapshot.
#[allow(non_camel_case_types, reason = "the C name")]
pub struct afresh_snapshot {
    snapshot: Snapshot,
}

/// A restore under way.
#[allow(non_camel_case_types, reason = "the C name")]
pub struct afresh_restore {
    restore: Restore,
    pages: usize,
}

/// How far a restore is.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(non_camel_case_types, reason = "the C name")]
pub struct afresh_status {
    /// Faults answered in user space so far.
    pub faults: u64,
    /// 1 once the memory is complete and nothing of the snapshot is needed any more.
    pub done: i32,
}

/// A connection to the control socket of a pager.
#[allow(non_camel_case_types, reason = "the C name")]
pub struct afresh_control {
    client: Mutex<ControlClient>,
}

/// Handles may be used from any thread, also by several at a time.
const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<afresh_snapshot>();
    is_shared::<afresh_restore>();
    is_shared::<afresh_control>();
};

thread_local! {
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// A code and a message on their way to C.
struct Failure(i32, String);

impl Failure {
    fn invalid(why: &str) -> Self {
        Self(AFRESH_EINVAL, why.to_owned())
    }
}

impl From<RestoreError> for Failure {
    fn from(error: RestoreError) -> Self {
        let code = match &error {
            RestoreError::Unsupported { .. } => AFRESH_EUNSUPPORTED,
            RestoreError::Timeout(_) => AFRESH_ETIMEDOUT,
            _ => AFRESH_EFAILED,
        };
        Self(code, error.to_string())
    }
}

/// Runs `body`; keeps its message for `afresh_last_error` and returns its code.
fn guarded(body: impl FnOnce() -> Result<(), Failure>) -> i32 {
    let result = catch_unwind(AssertUnwindSafe(body))
        .unwrap_or_else(|_| Err(Failure(AFRESH_EINTERNAL, "a bug in afresh".to_owned())));
    match result {
        Ok(()) => 0,
        Err(Failure(code, message)) => {
            let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
            // A thread that ends may have dropped it. No panic may reach C.
            let _ = LAST.try_with(|last| last.replace(message));
            code
        }
    }
}

/// # Safety
/// `text` must be null or a string that ends in a zero byte.
unsafe fn string<'a>(text: *const c_char) -> Result<&'a str, Failure> {
    if text.is_null() {
        return Err(Failure::invalid("a string is null"));
    }
    // SAFETY: not null, and the caller promises the rest.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Failure::invalid("a string is not UTF-8"))
}

/// # Safety
/// `handle` must be null or a live handle.
unsafe fn handle<'a, T>(handle: *const T) -> Result<&'a T, Failure> {
    // SAFETY: the caller promises that it is null or live.
    unsafe { handle.as_ref() }.ok_or_else(|| Failure::invalid("a handle is null"))
}

/// The message of the last error in this thread; valid until the next call that fails here. Never
/// null.
#[unsafe(no_mangle)]
pub extern "C" fn afresh_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or_else(|_| c"".as_ptr())
}

/// Opens the snapshot `name` (a tag, or a digest) of the store in directory `store`. Its manifest,
/// configuration and index are checked now, its pages when they are used.
///
/// # Safety
/// Both strings must end in a zero byte; `out` must be writable. Close the handle with
/// `afresh_snapshot_close`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn afresh_open(
    store: *const c_char,
    name: *const c_char,
    out: *mut *mut afresh_snapshot,
) -> i32 {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (store, name) = unsafe { (string(store)?, string(name)?) };
        if out.is_null() {
            return Err(Failure::invalid("`out` is null"));
        }
        let snapshot = Store::open(store)
            .and_then(|store| store.load(name))
            .map_err(|e| Failure(AFRESH_ESNAPSHOT, e.to_string()))?;
        // SAFETY: not null, and writable by the caller's promise.
        unsafe { out.write(Box::into_raw(Box::new(afresh_snapshot { snapshot }))) };
        Ok(())
    })
}

/// Length of the snapshot memory in bytes, a multiple of 4096; 0 for a null handle.
///
/// # Safety
/// `snapshot` must be null or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn afresh_bytes(snapshot: *const afresh_snapshot) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { snapshot.as_ref() }.map_or(0, |s| (s.snapshot.pages() * PAGE_SIZE) as u64)
}

/// Copies the guest state, at most `len` bytes of it, to `buffer`, and its whole length to
/// `needed`.
///
/// # Safety
/// `buffer` must be writable for `len` bytes, or null with `len` 0; `needed` must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn afresh_state(
    snapshot: *const afresh_snapshot,
    buffer: *mut u8,
    len: usize,
    needed: *mut usize,
) -> i32 {
    guarded(|| {
        // SAFETY: the caller's promise.
        let state = unsafe { handle(snapshot)? }.snapshot.state();
        if needed.is_null() || (buffer.is_null() && len > 0) {
            return Err(Failure::invalid("`buffer` or `needed` is null"));
        }
        let n = state.len().min(len);
        if n > 0 {
            // SAFETY: `buffer` is writable for at least `n` bytes, and a caller's buffer does not
            // overlap ours.
            unsafe { buffer.copy_from_nonoverlapping(state.as_ptr(), n) };
        }
        // SAFETY: not null, and writable by the caller's promise.
        unsafe { needed.write(state.len()) };
        Ok(())
    })
}

/// Starts to restore the snapshot's memory at `address`, whatever is mapped there now. The pages
/// come when they are touched and, with most strategies, ahead of that. `strategy` is a name such
/// as "stream", or null to let afresh choose.
///
/// # Safety
/// `address .. address + afresh_bytes(snapshot)` must be mapped memory of the caller, aligned to
/// 4096, that is not accessed until this returns and that stays mapped until the restore is closed.
/// Only the restore may change its mappings until it is done. `out` must be writable. Close the
/// handle with `afresh_restore_close`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn afresh_map(
    snapshot: *const afresh_snapshot,
    address: *mut c_void,
    strategy: *const c_char,
    out: *mut *mut afresh_restore,
) -> i32 {
    guarded(|| {
        // SAFETY: the caller's promise.
        let snapshot = unsafe { handle(snapshot)? }.snapshot.clone();
        let mut options = Options::default();
        if !strategy.is_null() {
            // SAFETY: not null; the caller promises a string.
            let name = unsafe { string(strategy)? };
            let parsed = name.parse::<FillStrategy>();
            options.strategy = Some(parsed.map_err(|e| Failure::invalid(&e.to_string()))?);
        }
        let base = NonNull::new(address.cast::<u8>())
            .filter(|base| (base.as_ptr() as usize).is_multiple_of(PAGE_SIZE) && !out.is_null())
            .ok_or_else(|| Failure::invalid("`address` is null or misaligned, or `out` is null"))?;
        let pages = snapshot.pages();
        // SAFETY: the caller promises that the range is mapped, theirs, and stays so until the
        // restore is closed.
        let target = Arc::new(unsafe { Reservation::of_others(base, pages) });
        let source = Arc::new(SnapshotSource::new(snapshot));
        let restore = Restore::start(target, PageRange::new(0, pages), source, &options)?;
        // SAFETY: not null, and writable by the caller's promise.
        unsafe { out.write(Box::into_raw(Box::new(afresh_restore { restore, pages }))) };
        Ok(())
    })
}

/// Puts the pages that hold `len` bytes at `offset` in place now, so that a system call may touch
/// them: one that meets a missing page fails with EFAULT.
///
/// # Safety
/// `restore` must be null or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn afresh_resolve(
    restore: *const afresh_restore,
    offset: usize,
    len: usize,
) -> i32 {
    guarded(|| {
        // SAFETY: the caller's promise.
        let restore = unsafe { handle(restore)? };
        let end = offset.checked_add(len).filter(|end| *end <= restore.pages * PAGE_SIZE);
        if end.is_none() {
            return Err(Failure::invalid("the range is outside the restored memory"));
        }
        Ok(restore.restore.resolve(PageRange::covering(offset, len))?)
    })
}

/// Waits until the memory is complete and nothing of the snapshot is mapped or open.
///
/// # Safety
/// `restore` must be null or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn afresh_wait(restore: *const afresh_restore, timeout_ms: u32) -> i32 {
    guarded(|| {
        // SAFETY: the caller's promise.
        let restore = unsafe { handle(restore)? };
        Ok(restore.restore.wait(Duration::from_millis(timeout_ms.into()))?)
    })
}

/// Says how far the restore is.
///
/// # Safety
/// `restore` must be null or a live handle; `out` must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn afresh_status_of(
    restore: *const afresh_restore,
    out: *mut afresh_status,
) -> i32 {
    guarded(|| {
        // SAFETY: the caller's promise.
        let status = unsafe { handle(restore)? }.restore.status();
        if out.is_null() {
            return Err(Failure::invalid("`out` is null"));
        }
        let status = afresh_status { faults: status.faults as u64, done: i32::from(status.done) };
        // SAFETY: not null, and writable by the caller's promise.
        unsafe { out.write(status) };
        Ok(())
    })
}

/// Closes a restore. Before it is done this closes the memory too: touching it raises SIGSEGV. A
/// null handle is ignored.
///
/// # Safety
/// `restore` must be null or a live handle, which is invalid afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn afresh_restore_close(restore: *mut afresh_restore) {
    if !restore.is_null() {
        // SAFETY: made by `Box::into_raw` in `afresh_map`, and closed once by the caller's promise.
        let restore = unsafe { Box::from_raw(restore) };
        guarded(|| {
            drop(restore);
            Ok(())
        });
    }
}

/// Closes a snapshot; restores made from it continue. A null handle is ignored.
///
/// # Safety
/// `snapshot` must be null or a live handle, which is invalid afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn afresh_snapshot_close(snapshot: *mut afresh_snapshot) {
    if !snapshot.is_null() {
        // SAFETY: made by `Box::into_raw` in `afresh_open`, and closed once by the caller's
        // promise.
        let snapshot = unsafe { Box::from_raw(snapshot) };
        guarded(|| {
            drop(snapshot);
            Ok(())
        });
    }
}

/// Connects to the control socket of `afresh pager` at `path`.
///
/// # Safety
/// `path` must end in a zero byte; `out` must be writable. Close the handle with
/// `afresh_control_close`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn afresh_control_open(
    path: *const c_char,
    out: *mut *mut afresh_control,
) -> i32 {
    guarded(|| {
        // SAFETY: the caller's promise.
        let path = unsafe { string(path)? };
        if out.is_null() {
            return Err(Failure::invalid("`out` is null"));
        }
        let client = ControlClient::connect(Path::new(path))
            .map_err(|error| Failure(AFRESH_ECONNECTION, format!("{path}: {error}")))?;
        let control = afresh_control { client: Mutex::new(client) };
        // SAFETY: not null, and writable by the caller's promise.
        unsafe { out.write(Box::into_raw(Box::new(control))) };
        Ok(())
    })
}

/// Sends `request`, a JSON object, and waits for the answer. `answer` is the text of a JSON object,
/// or null where no answer came; free it with `afresh_text_free`. A refused request gives
/// `AFRESH_EREFUSED`, and its answer has the `error`. After `AFRESH_ECONNECTION` the connection is
/// of no more use.
///
/// # Safety
/// `control` must be null or a live handle; `request` must end in a zero byte; `answer` must be
/// null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn afresh_control_request(
    control: *const afresh_control,
    request: *const c_char,
    answer: *mut *mut c_char,
) -> i32 {
    guarded(|| {
        if !answer.is_null() {
            // SAFETY: not null, and writable by the caller's promise.
            unsafe { answer.write(std::ptr::null_mut()) };
        }
        // SAFETY: the caller's promise.
        let (control, request) = unsafe { (handle(control)?, string(request)?) };
        let mut client = control.client.lock().unwrap_or_else(PoisonError::into_inner);
        let text = client.exchange(request).map_err(|error| match error.kind() {
            std::io::ErrorKind::InvalidInput => Failure::invalid(&error.to_string()),
            _ => Failure(AFRESH_ECONNECTION, error.to_string()),
        })?;
        let refusal = ControlClient::refusal(&text);
        if !answer.is_null() {
            let text = CString::new(text)
                .map_err(|_| Failure(AFRESH_EINTERNAL, "an answer has a zero byte".to_owned()))?;
            // SAFETY: as above.
            unsafe { answer.write(text.into_raw()) };
        }
        refusal.map_or(Ok(()), |error| Err(Failure(AFRESH_EREFUSED, error)))
    })
}

/// Frees an answer. Null is ignored.
///
/// # Safety
/// `text` must be null or an answer of `afresh_control_request`, which is invalid afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn afresh_text_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: made by `CString::into_raw`, and freed once by the caller's promise.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// Closes a connection. A null handle is ignored.
///
/// # Safety
/// `control` must be null or a live handle, which is invalid afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn afresh_control_close(control: *mut afresh_control) {
    if !control.is_null() {
        // SAFETY: made by `Box::into_raw` in `afresh_control_open`, and closed once by the caller's
        // promise.
        drop(unsafe { Box::from_raw(control) });
    }
}
