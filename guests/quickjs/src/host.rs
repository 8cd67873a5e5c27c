//! Requests of the guest to its host: to take printed text, and to call a host function.

use crate::wire::Failed;

#[link(wasm_import_module = "afresh_interpreter")]
unsafe extern "C" {
    /// Takes `len` bytes that the program wrote to standard output (1) or standard error (2).
    fn write(stream: i32, address: *const u8, len: usize);
    /// Calls a host function; the request is the array `[name, arguments]`. Returns how long the
    /// answer is.
    fn call(address: *const u8, len: usize) -> usize;
    /// Copies the answer of the last call to `address`, which has room for it.
    fn take(address: *mut u8);
}

/// Hands over the program's output.
pub(crate) fn print(stream: i32, text: &str) {
    // SAFETY: the host reads the bytes of `text` before it returns, and keeps no reference to them.
    unsafe { write(stream, text.as_ptr(), text.len()) }
}

/// Has the host call a function, and returns its answer.
pub(crate) fn ask(request: &[u8]) -> Result<Vec<u8>, Failed> {
    // SAFETY: the host reads the bytes of `request` before it returns, and keeps no reference to
    // them.
    let len = unsafe { call(request.as_ptr(), request.len()) };
    let mut answer = Vec::new();
    answer
        .try_reserve_exact(len)
        .map_err(|_| Failed("there is no memory for the answer".into()))?;
    // Touched here, so that the host meets no page that is missing.
    answer.resize(len, 0);
    // SAFETY: the host writes exactly `len` bytes, for which there is room.
    unsafe { take(answer.as_mut_ptr()) }
    Ok(answer)
}
