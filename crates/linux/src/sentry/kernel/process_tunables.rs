//! Numbers of a process that are set through `/proc`: its adjustment of the score for the
//! out-of-memory killer (`oom_score_adj`), and the memory in a core dump (`coredump_filter`). A
//! guest has neither the killer nor core dumps, so the numbers are only stored.
//!
//! Promises: values are those that a process without capabilities can have. A child begins with the
//! values of its parent, and another program keeps them.

use std::collections::BTreeMap;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// The highest adjustment of a score. The lowest one is its negation.
const MAX_ADJUSTMENT: i64 = 1000;
/// Bytes of a written adjustment, and of a written filter, that count.
const MAX_ADJUSTMENT_LEN: usize = 12;
const MAX_FILTER_LEN: usize = 34;
/// The kinds of memory that a filter has bits for, and those of a first process.
const FILTER_BITS: u16 = 0x1ff;
const FIRST_FILTER: u16 = 0x33;

/// The numbers of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessNumbers {
    pub(crate) oom_adjustment: i16,
    pub(crate) dump_filter: u16,
}

impl Default for ProcessNumbers {
    fn default() -> Self {
        Self { oom_adjustment: 0, dump_filter: FIRST_FILTER }
    }
}

/// The numbers of processes that differ from those of a first process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessTunables(BTreeMap<u32, ProcessNumbers>);

/// The number at the start of `text`, as the kernel reads it: decimal, octal or hexadecimal. A line
/// break and a zero may follow.
fn digits_in(text: &[u8]) -> Result<u64, Errno> {
    let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
    let (radix, digits) = match text {
        [b'0', b'x' | b'X', digits @ ..] => (16, digits),
        [b'0', ..] => (8, text),
        _ => (10, text),
    };
    let value = |byte: &u8| char::from(*byte).to_digit(radix);
    let len = digits.iter().take_while(|byte| value(byte).is_some()).count();
    let add = |sum: u64, digit: u32| sum.checked_mul(radix.into())?.checked_add(digit.into());
    let number = digits[..len].iter().filter_map(value).try_fold(0, add).ok_or(Errno::RANGE)?;
    match &digits[len..] {
        [] | b"\n" if len > 0 => Ok(number),
        _ => Err(Errno::INVAL),
    }
}

/// A number that may begin with a plus.
fn unsigned_in(text: &[u8]) -> Result<u64, Errno> {
    digits_in(text.strip_prefix(b"+").unwrap_or(text))
}

fn adjustment_in(text: &[u8]) -> Result<i16, Errno> {
    let text = &text[..text.len().min(MAX_ADJUSTMENT_LEN)];
    let text = text.split(|byte| *byte == 0).next().unwrap_or_default().trim_ascii();
    let number = match text.strip_prefix(b"-") {
        Some(digits) => 0i64.checked_sub_unsigned(digits_in(digits)?),
        None => i64::try_from(unsigned_in(text)?).ok(),
    };
    let number = number.filter(|number| i32::try_from(*number).is_ok()).ok_or(Errno::RANGE)?;
    match number {
        0..=MAX_ADJUSTMENT => Ok(number as i16),
        // It takes `CAP_SYS_RESOURCE` in the first namespace.
        number if (-MAX_ADJUSTMENT..0).contains(&number) => Err(Errno::ACCESS),
        _ => Err(Errno::INVAL),
    }
}

fn filter_in(text: &[u8]) -> Result<u16, Errno> {
    let number = unsigned_in(&text[..text.len().min(MAX_FILTER_LEN)])?;
    let number = u32::try_from(number).map_err(|_| Errno::RANGE)?;
    Ok(number as u16 & FILTER_BITS)
}

impl ProcessTunables {
    pub(in crate::sentry) fn of(&self, process: u32) -> ProcessNumbers {
        self.0.get(&process).copied().unwrap_or_default()
    }

    fn set(&mut self, process: u32, numbers: ProcessNumbers) {
        self.0.remove(&process);
        if numbers != ProcessNumbers::default() {
            self.0.insert(process, numbers);
        }
    }

    pub(in crate::sentry) fn write_oom_adjustment(
        &mut self,
        process: u32,
        text: &[u8],
    ) -> Result<(), Errno> {
        let oom_adjustment = adjustment_in(text)?;
        self.set(process, ProcessNumbers { oom_adjustment, ..self.of(process) });
        Ok(())
    }

    pub(in crate::sentry) fn write_dump_filter(
        &mut self,
        process: u32,
        text: &[u8],
    ) -> Result<(), Errno> {
        let dump_filter = filter_in(text)?;
        self.set(process, ProcessNumbers { dump_filter, ..self.of(process) });
        Ok(())
    }

    /// Gives a child the numbers of its parent.
    pub(in crate::sentry) fn fork(&mut self, parent: u32, child: u32) {
        self.set(child, self.of(parent));
    }

    /// Drops the numbers of a process that has ended.
    pub(in crate::sentry) fn leave(&mut self, process: u32) {
        self.0.remove(&process);
    }

    /// Whether these are numbers of living processes, with values that a guest can write.
    pub(in crate::sentry) fn is_sound(&self, lives: impl Fn(u32) -> bool) -> bool {
        self.0.iter().all(|(process, numbers)| {
            lives(*process)
                && (0..=MAX_ADJUSTMENT).contains(&numbers.oom_adjustment.into())
                && numbers.dump_filter & !FILTER_BITS == 0
                && *numbers != ProcessNumbers::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_adjustment_is_read_as_by_the_kernel() {
        for (text, expected) in [
            (&b"500"[..], Ok(500)),
            (b" 7\n\n", Ok(7)),
            (b"+8\0-900", Ok(8)),
            (b"0x10", Ok(16)),
            (b"010", Ok(8)),
            (b"1000", Ok(1000)),
            (b"-0", Ok(0)),
            (b"12          3", Ok(12)),
            (b"", Err(Errno::INVAL)),
            (b"\n", Err(Errno::INVAL)),
            (b"\xff", Err(Errno::INVAL)),
            (b"1 2", Err(Errno::INVAL)),
            (b"+ 5", Err(Errno::INVAL)),
            (b"--1", Err(Errno::INVAL)),
            (b"-+1", Err(Errno::INVAL)),
            (b"0x-1", Err(Errno::INVAL)),
            (b"0x", Err(Errno::INVAL)),
            (b"09", Err(Errno::INVAL)),
            (b"1001", Err(Errno::INVAL)),
            (b"-1001", Err(Errno::INVAL)),
            (b"-1", Err(Errno::ACCESS)),
            (b"-1000", Err(Errno::ACCESS)),
            (b"2147483648", Err(Errno::RANGE)),
            (b"-99999999999", Err(Errno::RANGE)),
        ] {
            assert_eq!(adjustment_in(text), expected, "{text:?}");
        }
    }

    #[test]
    fn a_written_filter_is_read_as_by_the_kernel() {
        let zeros = [&[b'0'; 40][..], b"7"].concat();
        for (text, expected) in [
            (&b"010\n"[..], Ok(8)),
            (b"+5", Ok(5)),
            (b"5\0junk", Ok(5)),
            (b"0xffffffff", Ok(0x1ff)),
            (&zeros, Ok(0)),
            (b"", Err(Errno::INVAL)),
            (b"5\n\n", Err(Errno::INVAL)),
            (b" 7", Err(Errno::INVAL)),
            (b"7 ", Err(Errno::INVAL)),
            (b"-0", Err(Errno::INVAL)),
            (b"12          3", Err(Errno::INVAL)),
            (b"99999999999", Err(Errno::RANGE)),
            (&[b'3'; 60], Err(Errno::RANGE)),
        ] {
            assert_eq!(filter_in(text), expected, "{text:?}");
        }
    }

    #[test]
    fn children_begin_with_the_numbers_of_their_parent() {
        let mut all = ProcessTunables::default();
        all.write_oom_adjustment(1, b"300").unwrap();
        all.fork(1, 2);
        all.fork(3, 4);
        all.write_oom_adjustment(1, b"0").unwrap();
        assert_eq!([1, 2, 3, 4].map(|id| all.of(id).oom_adjustment), [0, 300, 0, 0]);
        assert!(all.is_sound(|id| id == 2) && !all.is_sound(|id| id == 1));
        all.leave(2);
        assert_eq!(all, ProcessTunables::default());
    }

    #[test]
    fn numbers_that_no_guest_can_have_are_refused() {
        let first = ProcessNumbers::default();
        for numbers in [
            first,
            ProcessNumbers { oom_adjustment: -1, ..first },
            ProcessNumbers { oom_adjustment: 1001, ..first },
            ProcessNumbers { dump_filter: 0x200, ..first },
        ] {
            assert!(!ProcessTunables([(1, numbers)].into()).is_sound(|_| true), "{numbers:?}");
        }
    }
}
