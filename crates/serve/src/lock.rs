//! Locks whose holders leave consistent data also when they panic.

pub(crate) use afresh_sys::lock;
