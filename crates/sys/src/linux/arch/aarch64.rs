//! arm64.

use std::mem::offset_of;

/// The head of a record. Records are behind the registers in the context of a signal.
#[repr(C)]
struct Record {
    magic: u32,
    bytes: u32,
}

/// `ESR_MAGIC`: the record with the exception's syndrome.
const SYNDROME: u32 = 0x4553_5201;

/// Bytes of records: `__reserved` in `struct sigcontext`, which is aligned to 16.
const RECORD_BYTES: usize = 4096;

/// Where the records begin: after the fault's address, 31 registers, the stack pointer, the program
/// counter and the processor's state.
const RECORDS: usize =
    (offset_of!(libc::ucontext_t, uc_mcontext) + 35 * size_of::<u64>()).next_multiple_of(16);

/// Whether the access was a write: a bit of the syndrome, which the kernel adds to the context of
/// each fault that has an address.
///
/// # Safety
/// `context` must be the one that the kernel passed to a handler.
pub(in crate::linux) unsafe fn was_write(context: *const libc::c_void) -> Option<bool> {
    // SAFETY: the records are in the context, which the caller promises.
    syndrome(unsafe {
        context.cast::<u8>().add(RECORDS).cast::<[u64; RECORD_BYTES / 8]>().as_ref()?
    })
    .and_then(is_write)
}

/// Address of the interrupted instruction.
///
/// # Safety
/// `context` must be the one that the kernel passed to a handler.
pub(in crate::linux) unsafe fn instruction(context: *const libc::c_void) -> usize {
    // SAFETY: the caller's promise.
    unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.pc as usize }
}

/// The syndrome in the records, which end with one of no bytes.
fn syndrome(records: &[u64; RECORD_BYTES / 8]) -> Option<u64> {
    let mut at = 0;
    while let Some(&[head, value]) = records.get(at..at + 2) {
        let record = Record { magic: head as u32, bytes: (head >> 32) as u32 };
        if record.magic == SYNDROME {
            return Some(value);
        }
        if record.bytes < 8 {
            return None;
        }
        at += record.bytes as usize / 8;
    }
    None
}

/// Whether the access was a write, for an abort of a data access.
fn is_write(syndrome: u64) -> Option<bool> {
    /// Data aborts of a lower level and of the same one.
    const DATA_ABORTS: [u64; 2] = [0x24, 0x25];
    const WRITE: u64 = 1 << 6;
    /// Cache maintenance is reported as a write.
    const MAINTENANCE: u64 = 1 << 8;
    DATA_ABORTS
        .contains(&(syndrome >> 26 & 0x3f))
        .then_some(syndrome & WRITE != 0 && syndrome & MAINTENANCE == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_syndrome_is_found_behind_other_records_and_a_broken_list_ends() {
        let mut records = [0; RECORD_BYTES / 8];
        // Floating-point registers come first.
        records[0] = 528 << 32 | 0x4650_8001;
        records[66] = 16 << 32 | u64::from(SYNDROME);
        records[67] = 0x24 << 26 | 1 << 6;
        assert_eq!(syndrome(&records).and_then(is_write), Some(true));
        records[67] = 0x24 << 26;
        assert_eq!(syndrome(&records).and_then(is_write), Some(false));
        records[67] = 0x20 << 26 | 1 << 6;
        assert_eq!(syndrome(&records).and_then(is_write), None, "an instruction was fetched");
        records[66] = 0;
        assert_eq!(syndrome(&records), None);
        records[0] = u64::MAX << 32;
        assert_eq!(syndrome(&records), None);
    }
}
