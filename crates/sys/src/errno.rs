//! Names of the kernel's errors, as [`SysError::errno`](crate::SysError::errno) holds them; which error
//! means what is said where it is met.

pub use libc::{EAGAIN, EBUSY, EEXIST, EFAULT, EINVAL, EIO, ENOENT, ENOSYS, EPERM, ESRCH};
