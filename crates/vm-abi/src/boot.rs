//! Information for a guest at its start.

use core::mem::{offset_of, size_of};

use crate::MAX_REGIONS;

/// Information for a guest at its start, in a page that it can only read; RDI points to it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootInfo {
    /// [`BOOT_MAGIC`](crate::BOOT_MAGIC).
    pub magic: u64,
    /// [`ABI_VERSION`](crate::ABI_VERSION).
    pub version: u32,
    /// The number of used entries in `regions`.
    pub region_count: u32,
    /// First byte of the heap.
    pub heap: u64,
    /// Length of the heap in bytes.
    pub heap_len: u64,
    /// First byte of the input buffer.
    pub input: u64,
    /// Capacity of the input buffer in bytes.
    pub input_capacity: u64,
    /// Lowest usable byte of the stack.
    pub stack: u64,
    /// Length of the stack in bytes.
    pub stack_len: u64,
    /// The extra regions, in the order of the builder.
    pub regions: [BootRegion; MAX_REGIONS],
}

/// One extra region as the guest sees it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BootRegion {
    /// First byte.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// 0 read-write, 1 read-only, 2 shared with the host, 3 gap (not accessible).
    pub kind: u64,
}

/// Words before the regions.
const HEAD: usize = 8;

const _: () = {
    assert!(size_of::<BootInfo>() <= 4096, "it fits its page");
    assert!(offset_of!(BootInfo, version) == 8 && offset_of!(BootInfo, region_count) == 12);
    assert!(offset_of!(BootInfo, heap) == 16 && offset_of!(BootInfo, stack_len) == 56);
    assert!(offset_of!(BootInfo, regions) == HEAD * 8);
    assert!(size_of::<BootInfo>() == (HEAD + 3 * MAX_REGIONS) * 8, "there is no padding");
};

impl BootInfo {
    /// The structure as the guest reads it, word for word.
    pub fn words(&self) -> impl Iterator<Item = u64> + '_ {
        let head: [u64; HEAD] = [
            self.magic,
            u64::from(self.version) | u64::from(self.region_count) << 32,
            self.heap,
            self.heap_len,
            self.input,
            self.input_capacity,
            self.stack,
            self.stack_len,
        ];
        head.into_iter().chain(self.regions.iter().flat_map(|it| [it.address, it.len, it.kind]))
    }
}
