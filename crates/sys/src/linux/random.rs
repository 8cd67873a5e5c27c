//! The kernel's random bytes.

use crate::{Call, SysError, inject};

/// Fills `bytes`. Waits, at the host's start, until the kernel has gathered enough.
///
/// # Errors
/// Any error of `getrandom`.
pub fn fill(bytes: &mut [u8]) -> Result<(), SysError> {
    inject::gate(Call::Random)?;
    let mut done = 0;
    while done < bytes.len() {
        let rest = &mut bytes[done..];
        // SAFETY: writes at most as many bytes as the slice has.
        let filled = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match usize::try_from(filled) {
            Ok(filled) => done += filled,
            Err(_) => {
                let error = SysError::last(Call::Random);
                if error.errno != libc::EINTR {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}
