//! Making memory zero, and finding out whether it is.
//!
//! Two ways, for two purposes. [`hot`] goes through the caches (`rep stosb`): the memory is about to
//! be used. [`cold`] goes past them (`clzero`, or non-temporal stores): a background thread must not
//! push the working set of the program out of the caches it shares. `rep stosb` needs long runs: a
//! page at a time it is several times slower than 64 KiB at a time.

use std::sync::OnceLock;

/// Zeroes memory that will be used soon, through the caches.
///
/// # Safety
/// `start .. start + len` must be mapped and writable, and nobody else may access it meanwhile.
pub(crate) unsafe fn hot(start: *mut u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the caller promises the range; the instruction writes exactly `len` bytes from `start`
    // (the direction flag is clear by the calling convention).
    unsafe {
        std::arch::asm!(
            "rep stosb",
            inout("rcx") len => _,
            inout("rdi") start => _,
            in("al") 0u8,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(any(not(target_arch = "x86_64"), miri))]
    // SAFETY: the caller promises the range.
    unsafe {
        std::ptr::write_bytes(start, 0, len);
    }
}

/// How [`cold`] writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Past {
    /// AMD's `clzero`: a cache line an instruction, never read first.
    Clzero,
    /// Non-temporal stores.
    Streaming,
}

/// The way past the caches on this processor.
pub(crate) fn way_past() -> Past {
    static WAY: OnceLock<Past> = OnceLock::new();
    *WAY.get_or_init(|| {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            use std::arch::x86_64::__cpuid;
            // Leaf 0x8000_0008 exists where leaf 0x8000_0000 says so; its EBX bit 0 is CLZERO.
            if __cpuid(0x8000_0000).eax >= 0x8000_0008 && __cpuid(0x8000_0008).ebx & 1 != 0 {
                return Past::Clzero;
            }
        }
        Past::Streaming
    })
}

/// Zeroes memory past the caches.
///
/// # Safety
/// As for [`hot`]; both ends must be multiples of 64.
pub(crate) unsafe fn cold(start: *mut u8, len: usize, way: Past) {
    debug_assert!((start as usize).is_multiple_of(64) && len.is_multiple_of(64));
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the caller promises the range and its alignment, so every address lies inside it.
    // `Clzero` is chosen only where the processor has it; SSE2 is part of x86-64.
    unsafe {
        use std::arch::x86_64::{__m128i, _mm_setzero_si128, _mm_sfence, _mm_stream_si128};
        let end = start.add(len);
        let mut line = start;
        match way {
            Past::Clzero => {
                while line < end {
                    std::arch::asm!("clzero", in("rax") line, options(nostack, preserves_flags));
                    line = line.add(64);
                }
            }
            Past::Streaming => {
                let zero = _mm_setzero_si128();
                while line < end {
                    for part in 0..4 {
                        _mm_stream_si128(line.add(part * 16).cast::<__m128i>(), zero);
                    }
                    line = line.add(64);
                }
            }
        }
        // Both are weakly ordered: whoever is told that the memory is clean must see it so.
        _mm_sfence();
    }
    #[cfg(any(not(target_arch = "x86_64"), miri))]
    {
        let _ = way;
        // SAFETY: the caller promises the range.
        unsafe { std::ptr::write_bytes(start, 0, len) };
    }
}

/// Whether every byte is zero; stops at the first that is not.
///
/// # Safety
/// `start .. start + len` must be mapped and readable, both ends multiples of 64, and nobody may
/// write it meanwhile.
pub(crate) unsafe fn is_zero(start: *const u8, len: usize) -> bool {
    debug_assert!((start as usize).is_multiple_of(64) && len.is_multiple_of(64));
    // SAFETY: the caller promises the range; `u64` is aligned because the start is.
    (0..len / 64).all(|line| unsafe {
        let words = start.add(line * 64).cast::<[u64; 8]>().read();
        words.iter().fold(0, |all, word| all | word) == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(64))]
    struct Lines([u8; 512]);

    #[test]
    fn every_way_zeroes_the_whole_range_and_nothing_beside_it() {
        let ways: [fn(*mut u8, usize); 3] = [
            // SAFETY: the test passes ranges inside its own buffer.
            |p, n| unsafe { hot(p, n) },
            // SAFETY: as above.
            |p, n| unsafe { cold(p, n, Past::Streaming) },
            // SAFETY: as above, and the way is what the processor has.
            |p, n| unsafe { cold(p, n, way_past()) },
        ];
        for zero in ways {
            let mut lines = Lines([0xa5; 512]);
            // SAFETY: 64 .. 448 lies inside the buffer.
            let inner = unsafe { lines.0.as_mut_ptr().add(64) };
            zero(inner, 384);
            assert!(lines.0[..64].iter().chain(&lines.0[448..]).all(|b| *b == 0xa5));
            assert!(lines.0[64..448].iter().all(|b| *b == 0));
        }
    }

    #[test]
    fn one_set_bit_anywhere_is_not_zero() {
        let mut lines = Lines([0; 512]);
        // SAFETY: the whole buffer.
        assert!(unsafe { is_zero(lines.0.as_ptr(), 512) });
        for at in [0, 63, 64, 300, 511] {
            lines.0[at] = 1;
            // SAFETY: the whole buffer.
            assert!(!unsafe { is_zero(lines.0.as_ptr(), 512) });
            lines.0[at] = 0;
        }
    }
}
