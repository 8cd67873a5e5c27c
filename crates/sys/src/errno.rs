//! Names of the kernel's errors, as [`SysError::errno`](crate::SysError::errno) holds them; which error
//! means what is said where it is met.

pub use libc::{
    EACCES, EAGAIN, EBUSY, EEXIST, EFAULT, EINTR, EINVAL, EIO, ENODEV, ENOENT, ENOSYS, ENXIO,
    EPERM, ESRCH,
};
