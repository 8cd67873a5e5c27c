//! Costs of Linux programs on this thread.

pub(crate) use afresh_linux::{MemoryPeak, guest_cpu_time};
