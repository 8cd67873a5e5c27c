//! Names of kernel errors, as [`SysError::errno`](crate::SysError::errno) holds them; their meaning
//! is documented at each use.

pub use libc::{
    EACCES, EAGAIN, EBUSY, EEXIST, EFAULT, EINTR, EINVAL, EIO, EMFILE, ENFILE, ENODEV, ENOENT,
    ENOMEM, ENOSYS, ENXIO, EPERM, ESRCH,
};
